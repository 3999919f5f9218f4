"""The peers of models.py that run the exported module itself, in PyTorch."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model_cases import Work, feeds_of, from_models, job_of

from onnxfuse.ir.dtypes import Array


@functools.lru_cache(maxsize=1)
def torch_model(architecture: str, dtype: str, device: str) -> Any:
    """Return the module that was exported, with the same weights."""
    return from_models("exporters").build_model(job_of(architecture, dtype)).to(device)


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


def in_torch(mode: str | None = None, channels_last: bool = False) -> Callable[[Work], Any]:
    """Return the `prepare` of a peer that runs the module: eager without a mode, else compiled for these shapes.

    channels_last  weights of convolutions, and inputs of four axes, are in that memory format
    """

    def prepare(work: Work) -> InTorch:
        torch = importlib.import_module("torch")
        device = "cuda" if work.provider == "cuda" else "cpu"
        allow_fastest(torch)
        case = work.case
        job, module = job_of(case.architecture, case.dtype), torch_model(case.architecture, case.dtype, device)
        feeds = feeds_of(work)
        arguments = {each.arg or each.name: torch.from_numpy(feeds[each.name]).to(device) for each in job.inputs}
        if channels_last:
            module = copy.deepcopy(module).to(memory_format=torch.channels_last)  # other peers keep the module
            arguments = {name: in_channels_last(torch, value) for name, value in arguments.items()}
        if mode:
            module = torch.compile(module, mode=mode, dynamic=False)
        names = tuple(name for name, _ in job.architecture.outputs)
        return InTorch(module, arguments, names, torch.cuda.synchronize if device == "cuda" else lambda: None)

    return prepare


def allow_fastest(torch: Any) -> None:
    """Let PyTorch time cuDNN's engines, and use TF32 in float32 as onnxruntime does.

    A compiled function may have many shapes before PyTorch gives up compiling it: models share their blocks.
    """
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64


def in_channels_last(torch: Any, value: Any) -> Any:
    """Return a tensor of four axes in the memory format channels_last, others as they are."""
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


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
        tokens = {name: plain.arguments[name] for name in ("input_ids", "attention_mask")}
        call = torch.compile(module, mode=mode, dynamic=False)
        return InPlace(call, tokens, plain.names, plain.wait, module=module)

    return prepare
