"""The peers of benchmarks/models.py: how each prepares a model, and which options it runs with."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxfuse.inputs import Array, generate, inputs_of, roles_of, sizes_to_try
from onnxfuse.optimize import optimize
from onnxfuse.timing import Provider, bind, start
from onnxfuse.widen import half_of, widened, widened_arrays

MODELS = Path(__file__).parent.parent / "models"
SAMPLE = 2**20  # values of an output that are compared
Sampled = tuple[tuple[int, ...], Array]  # the shape of an output, and some of its values
GRAPH = {"enable_cuda_graph": 1}
NHWC = {"prefer_nhwc": 1, "fuse_conv_bias": 1}  # onnxruntime 1.31.1: the second without the first fails in fp16


@dataclass(frozen=True)
class Case:
    """A model at one size; `tool` is its name in onnxruntime's transformers tool, '' where that knows none.

    `fixed`: onnxruntime is told the sizes, as it has to be for a CUDA graph of a model that computes with them.
    """

    name: str
    architecture: str
    sizes: Mapping[str, int] = field(hash=False)
    tool: str = ""
    convolutions: bool = False
    fixed: bool = False


@dataclass(frozen=True)
class Work:
    """A case, its exported model, and where it runs."""

    case: Case
    path: Path
    provider: Provider


@dataclass(frozen=True)
class Peer:
    """A way to run a model; `prepare` returns something with `run()` and `outputs()`.

    What it takes on an H200, estimated: `seconds` each time, and `once` for every architecture.
    """

    name: str
    prepare: Callable[[Work], Any]
    seconds: float
    applies: Callable[[Case], bool] = lambda case: True
    once: float = 0
    by_default: bool = True
    torch: bool = False


# --- the model and its inputs ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _loaded(path: Path) -> onnx.ModelProto:
    return onnx.load(path)


@functools.lru_cache(maxsize=1)
def model_of(work: Work) -> onnx.ModelProto:
    """The exported model."""
    model = _loaded(work.path)
    return at_sizes(model, feeds_of(work)) if work.case.fixed else model


def at_sizes(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> onnx.ModelProto:
    """The model for inputs of these shapes alone."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    fixed.graph.ClearField("value_info")
    for value in fixed.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, feeds[value.name].shape, strict=True):
            dim.dim_value = size
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    return fixed


def feeds_of(work: Work) -> dict[str, Array]:
    """The same inputs for every peer."""
    model = _loaded(work.path)
    inputs = inputs_of(model)
    sizes = {**next(sizes_to_try(inputs, {})), **work.case.sizes}
    return generate(inputs, sizes, roles_of(model), {})


@functools.cache
def reference(work: Work) -> dict[str, Sampled]:
    """The outputs of the model in float32, as onnxruntime computes them without TF32."""
    model, feeds = model_of(work), feeds_of(work)
    options = {"use_tf32": 0} if work.provider == "cuda" else {}
    if half_of(model):
        model, feeds = widened(model), widened_arrays(feeds)
    bound = bind(start(model, None, work.provider, options=options), feeds, work.provider)
    bound.run()
    return sampled(bound.outputs())


def sampled(outputs: Mapping[str, Array]) -> dict[str, Sampled]:
    """The shape of every output, and at most SAMPLE values that are spread over it."""
    return {name: (value.shape, value.reshape(-1)[:: max(1, value.size // SAMPLE)].astype(np.float64))
            for name, value in outputs.items()}  # fmt: skip


def relative_error(expected: Mapping[str, Sampled], outputs: Mapping[str, Array]) -> float:
    """|out - reference| / |reference|, the largest of all outputs; infinite for NaN and where shapes differ."""
    found = sampled(outputs)
    worst = 0.0
    for name, (shape, values) in expected.items():
        if name not in found or found[name][0] != shape:
            return float("inf")
        error = float(np.linalg.norm(found[name][1] - values) / (np.linalg.norm(values) or 1.0))
        worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst


# --- onnxruntime -----------------------------------------------------------------------------------------------------


def as_exported(work: Work) -> onnx.ModelProto:
    """What onnxruntime makes of the model by itself."""
    return model_of(work)


@functools.lru_cache(maxsize=1)
def _by_the_tool(path: Path, kind: str, heads: int, hidden: int) -> onnx.ModelProto:
    tool = importlib.import_module("onnxruntime.transformers.optimizer")
    kind = kind if kind in tool.MODEL_TYPES else "gpt2"
    result: onnx.ModelProto = tool.optimize_model(str(path), kind, heads, hidden, use_gpu=True).model
    return result


def by_the_tool(work: Work) -> onnx.ModelProto:
    """onnxruntime.transformers.optimizer."""
    config = job_of(work.case.architecture).config
    return _by_the_tool(work.path, work.case.tool, config["heads"], config["hidden"])


@functools.lru_cache(maxsize=1)
def _by_onnxscript(path: Path) -> onnx.ModelProto:
    ir = importlib.import_module("onnxscript.ir")
    model = ir.load(path)
    result = importlib.import_module("onnxscript.rewriter.ort_fusions").optimize_for_ort(model)
    proto: onnx.ModelProto = ir.serde.serialize_model(result[0] if isinstance(result, tuple) else model)
    return proto


def by_onnxscript(work: Work) -> onnx.ModelProto:
    """onnxscript's ort_fusions."""
    return _by_onnxscript(work.path)


@functools.lru_cache(maxsize=1)
def _fused(work: Work) -> onnx.ModelProto:
    return optimize(model_of(work), verify=False)[0]


def fused(work: Work) -> onnx.ModelProto:
    """onnxfuse."""
    return _fused(work)


def in_onnxruntime(
    make: Callable[[Work], onnx.ModelProto], kernels: bool = False, options: Mapping[str, int] | None = None
) -> Callable[[Work], Any]:
    """A peer that changes the model and runs it in onnxruntime."""

    def prepare(work: Work) -> Any:
        session = start(make(work), None, work.provider, kernels=kernels, options=options)
        shapes = {name: shape for name, (shape, _) in reference(work).items()}
        return bind(session, feeds_of(work), work.provider, shapes)

    return prepare


# --- torch -----------------------------------------------------------------------------------------------------------


def from_models(name: str) -> Any:
    """A module of models/, which imports torch."""
    if str(MODELS) not in sys.path:
        sys.path.insert(0, str(MODELS))
    return importlib.import_module(name)


def job_of(architecture: str) -> Any:
    """What models/export.py exports of this architecture, in its public size, through dynamo in fp16."""
    found = next(each for each in from_models("table").ARCHITECTURES if each.name == architecture and each.full)
    attention = "" if found.variants and not found.variants[0].attention else "sdpa"
    variant = from_models("architecture").Variant("dynamo", "dynamo", None, attention, "fp16")
    return from_models("exporters").Job(found, variant, found.full)


@functools.lru_cache(maxsize=1)
def torch_model(architecture: str, device: str) -> Any:
    """The module that was exported, with the same weights."""
    return from_models("exporters").build_model(job_of(architecture)).to(device)


@dataclass
class InTorch:
    """A module with inputs on the device, called as onnxruntime's sessions are."""

    call: Callable[..., Any]
    arguments: Mapping[str, Any]
    names: tuple[str, ...]
    wait: Callable[[], None]
    last: Any = field(default=None)

    def run(self) -> None:
        """One run, to its end."""
        torch = importlib.import_module("torch")
        self.last = None  # CUDA graphs of torch write the next outputs to the same place
        with torch.no_grad():
            self.last = self.call(**self.arguments)
        self.wait()

    def outputs(self) -> dict[str, Array]:
        """The outputs of the last run as arrays."""
        values = from_models("exporters").as_tuple(self.last)
        return {name: value.float().cpu().numpy() for name, value in zip(self.names, values, strict=False)}


def in_torch(mode: str | None = None) -> Callable[[Work], Any]:
    """A peer that runs the module itself: eager without a mode, else compiled for these shapes."""

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
    """A module whose cache is no output, but part of it."""

    module: Any = None

    def outputs(self) -> dict[str, Array]:
        """The logits of the last run, and the cache as it left it."""
        self.last = (*self.last, *self.module.states())
        return super().outputs()


def in_torch_in_place(mode: str) -> Callable[[Work], Any]:
    """A peer that compiles the module with a cache of fixed size, where torch need not copy what is past."""

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


def release() -> None:
    """Give memory of the last peer back."""
    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def _has_tool(case: Case) -> bool:
    return bool(case.tool)


def _convolutions(case: Case) -> bool:
    return case.convolutions


def _has_cache(case: Case) -> bool:
    return "past" in case.sizes


# Most wanted first: a budget that runs out cuts at the end.
PEERS = (
    Peer("ort", in_onnxruntime(as_exported), 2),
    Peer("ort-graph", in_onnxruntime(as_exported, options=GRAPH), 2),
    Peer("onnxfuse", in_onnxruntime(fused, kernels=True), 2.5, once=3),
    Peer("onnxfuse-graph", in_onnxruntime(fused, kernels=True, options=GRAPH), 2),
    Peer("onnxfuse-bodies", in_onnxruntime(fused), 2),
    Peer("onnxfuse-bodies-graph", in_onnxruntime(fused, options=GRAPH), 2, by_default=False),
    Peer("ort-nhwc", in_onnxruntime(as_exported, options=NHWC), 1.5, _convolutions),
    Peer("ort-nhwc-graph", in_onnxruntime(as_exported, options=NHWC | GRAPH), 1.5, _convolutions),
    Peer("onnxfuse-nhwc-graph", in_onnxruntime(fused, kernels=True, options=NHWC | GRAPH), 1.5, _convolutions),
    Peer("onnxscript", in_onnxruntime(by_onnxscript), 2, _has_tool, once=6),
    Peer("onnxscript-graph", in_onnxruntime(by_onnxscript, options=GRAPH), 2, _has_tool, by_default=False),
    Peer("ort-transformers", in_onnxruntime(by_the_tool), 2, _has_tool, once=6),
    Peer("ort-transformers-graph", in_onnxruntime(by_the_tool, options=GRAPH), 2, _has_tool, by_default=False),
    Peer("torch-reduce-overhead", in_torch("reduce-overhead"), 12, torch=True),
    Peer("torch-static-cache", in_torch_in_place("reduce-overhead"), 12, _has_cache, torch=True),
    Peer("torch-eager", in_torch(), 1.5, once=4, torch=True),
    Peer("torch-compile", in_torch("default"), 12, by_default=False, torch=True),
    Peer("torch-max-autotune", in_torch("max-autotune"), 90, by_default=False, torch=True),
)
QUICK = ("ort", "ort-graph", "onnxfuse", "onnxfuse-graph")
