"""Serve a fused text model with Ray Serve: replicas on GPUs, and requests of mixed lengths in one padded batch.

    pip install -e '.[cuda,ray]'
    onnxfuse optimize bert.onnx /models/fused.onnx
    cd examples && serve run --working-dir . ray_serve:app model=/models/fused.onnx replicas=4 gpus=1
    curl localhost:8000 -d '{"input_ids": [101, 7592, 2088, 102]}'

The model takes `input_ids` and `attention_mask`, as BERT does, and its file is at the same path on every node.  Each
replica opens one session on the GPU that Ray gives it.  Requests that wait at the same time become one run: they are
padded to the longest of them, and each answer is cut to its own length again.  One that the model refuses, such as a
token that it does not know, fails alone.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import ray
from pydantic import BaseModel
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

import onnxfuse

MAX_BATCH = 16  # requests in one run
WAIT_S = 0.002  # that the first request of a batch waits for others
IN_FLIGHT = 2  # batches of a replica: one is padded while the other one runs
Tokens = Sequence[int]
Answer = dict[str, npt.NDArray[Any]]


class Arguments(BaseModel):
    """The arguments of `serve run`, as name=value."""

    model: str
    replicas: int = 1
    gpus: float = 1  # of each replica; 0 runs on the CPU, and 0.5 lets two replicas share a GPU
    max_tokens: int = 512  # of a request


@serve.deployment(max_ongoing_requests=2 * IN_FLIGHT * MAX_BATCH)
class FusedModel:
    """A replica: one session, which all requests that reach this process share."""

    def __init__(self, arguments: Arguments) -> None:
        """Open the session and answer the largest batch, so that Ray sends requests only to a replica that is warm."""
        if arguments.gpus:
            onnxruntime.preload_dlls()
        provider = "CUDAExecutionProvider" if arguments.gpus else "CPUExecutionProvider"
        self._session = onnxfuse.InferenceSession(arguments.model, providers=[provider], wait=True)
        length = self._session.get_inputs()[0].shape[1]  # the name of the dim: outputs that have it are cut
        self._outputs = [(each.name, each.shape[1:2] == [length]) for each in self._session.get_outputs()]
        self._max_tokens = arguments.max_tokens
        self._served = Counter(requests=0, runs=0)
        self._run([[0] * self._max_tokens] * MAX_BATCH)

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer a POST of {"input_ids": [...]} with the outputs by name."""
        body = await request.json()
        tokens = body.get("input_ids") if isinstance(body, dict) else None
        whole = isinstance(tokens, list) and all(type(each) is int for each in tokens)
        if not whole or not 0 < len(tokens) <= self._max_tokens:
            return JSONResponse({"error": f"input_ids takes 1 to {self._max_tokens} integers"}, status_code=400)
        try:
            answer = await self.infer(tokens)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return JSONResponse({name: value.tolist() for name, value in answer.items()})

    async def infer(self, tokens: Tokens) -> Answer:
        """Answer a request.  Raises ValueError if the model refuses it."""
        answer: Answer | str = await self._together(tokens)
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=WAIT_S, max_concurrent_batches=IN_FLIGHT)
    async def _together(self, batch: list[Tokens]) -> list[Answer | str]:
        """Answer a request, or say why not; Ray Serve collects those of many callers into `batch`."""
        self._served.update(requests=len(batch), runs=1)
        return await asyncio.to_thread(self._answers, batch)  # so that this process accepts requests meanwhile

    def describe(self) -> dict[str, Any]:
        """Return the replica's name and GPUs, how many nodes run as kernels and as bodies, and what it has served."""
        replica = serve.get_replica_context().replica_id.unique_id
        nodes = Counter(each.how for each in onnxfuse.explain_session(self._session))
        return {"replica": replica, "gpus": ray.get_gpu_ids(), **nodes, **self._served}

    def _answers(self, batch: Sequence[Tokens]) -> list[Answer | str]:
        """Run requests together, and one by one if the model refuses them, so that only those that are wrong fail."""
        try:
            return list(self._run(batch))
        except Exception as error:  # onnxruntime's errors have no common class
            alone = [self._answers([tokens]) for tokens in batch] if len(batch) > 1 else [[str(error)]]
            return [answer for (answer,) in alone]

    def _run(self, batch: Sequence[Tokens]) -> list[Answer]:
        """Run requests of mixed lengths together."""
        lengths = [len(tokens) for tokens in batch]
        mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
        ids = np.zeros_like(mask)
        ids[mask == 1] = np.concatenate(batch)
        outputs = self._session.run(None, {"input_ids": ids, "attention_mask": mask})
        return [
            {
                name: value[i, :length] if cut else value[i]
                for (name, cut), value in zip(self._outputs, outputs, strict=True)
            }
            for i, length in enumerate(lengths)
        ]


def app(arguments: Arguments) -> serve.Application:
    """Return the application that `serve run` starts."""
    options = {"num_gpus": arguments.gpus}
    return FusedModel.options(num_replicas=arguments.replicas, ray_actor_options=options).bind(arguments)
