"""The peers of models.py that run the exported module itself, in PyTorch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model_cases import Work, feeds_of, from_models, job_of

from onnxfuse.ir.dtypes import Array


@functools.lru_cache(maxsize=1)
def torch_model(architecture: str, device: str) -> Any:
    """Return the module that was exported, with the same weights."""
    return from_models("exporters").build_model(job_of(architecture)).to(device)


@dataclass
class InTorch:
    """A module with inputs on the device, which is called like a session of onnxruntime."""

    call: Callable[..., Any]
    arguments: Mapping[str, Any]
    names: tuple[str, ...]
    wait: Callable[[], None]
    last: Any = field(default=None)

    def run(self) -> None:
        """Run once, and wait for the end."""
        torch = importlib.import_module("torch")
        self.last = None  # CUDA graphs of torch write the next outputs to the same memory
        with torch.no_grad():
            self.last = self.call(**self.arguments)
        self.wait()

    def outputs(self) -> dict[str, Array]:
        """Return the outputs of the last run as arrays."""
        values = from_models("exporters").as_tuple(self.last)
        return {name: value.float().cpu().numpy() for name, value in zip(self.names, values, strict=False)}


def in_torch(mode: str | None = None) -> Callable[[Work], Any]:
    """Return the `prepare` of a peer that runs the module: eager without a mode, else compiled for these shapes."""

    def prepare(work: Work) -> InTorch:
        torch = importlib.import_module("torch")
        device = "cuda" if work.provider == "cuda" else "cpu"
        job, module = job_of(work.case.architecture), torch_model(work.case.architecture, device)
        if mode:
            torch._dynamo.reset()
            module = torch.compile(module, mode=mode, dynamic=False)
        feeds = feeds_of(work)
        arguments = {each.arg or each.name: torch.from_numpy(feeds[each.name]).to(device) for each in job.inputs}
        names = tuple(name for name, _ in job.architecture.outputs)
        return InTorch(module, arguments, names, torch.cuda.synchronize if device == "cuda" else lambda: None)

    return prepare


@dataclass
class InPlace(InTorch):
    """A module that keeps its cache in itself instead of returning it."""

    module: Any = None

    def outputs(self) -> dict[str, Array]:
        """Return the logits of the last run, and the cache after it."""
        self.last = (*self.last, *self.module.states())
        return super().outputs()


def in_torch_in_place(mode: str) -> Callable[[Work], Any]:
    """Return the `prepare` of a peer that compiles the module with a cache of fixed size, which torch need not copy."""

    def prepare(work: Work) -> InPlace:
        torch = importlib.import_module("torch")
        plain = in_torch()(work)
        pasts = [plain.arguments[each.arg] for each in job_of(work.case.architecture).inputs if each.arg]
        module = from_models("modules").WithStaticCache(plain.call, pasts, work.case.sizes["seq"])
        torch._dynamo.reset()
        tokens = {name: plain.arguments[name] for name in ("input_ids", "attention_mask")}
        call = torch.compile(module, mode=mode, dynamic=False)
        return InPlace(call, tokens, plain.names, plain.wait, module=module)

    return prepare
