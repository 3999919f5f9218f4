"""The peers that models.py compares: how each prepares a model, and which options it runs with."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from model_cases import Case, Work, at_sizes, feeds_of, job_of, model_of
from torch_peers import in_torch, in_torch_in_place

from onnxfuse.ir.dtypes import Array
from onnxfuse.layout.conversion import Layout
from onnxfuse.optimizer import optimize
from onnxfuse.session import InferenceSession
from onnxfuse.tuning.bound_session import bind, start_session
from onnxfuse.verify.widen import arrays_to_float32, half_precision_of, model_to_float32

SAMPLE = 2**20  # values of an output that are compared
TOLERANCE = 2e-2  # of the norm; fp16 models of this depth are off by 1e-3 to 5e-3
Sampled = tuple[tuple[int, ...], Array]  # the shape of an output, and some of its values
EXACT = {"use_tf32": 0, "cudnn_conv_algo_search": "HEURISTIC"}  # an exhaustive search takes seconds a model
GRAPH = {"enable_cuda_graph": 1}
FLOAT32 = {"use_tf32": 0} | GRAPH  # products of float32 are not rounded to TF32
NHWC = {"prefer_nhwc": 1, "fuse_conv_bias": 1}  # onnxruntime 1.31.1: the second without the first fails in fp16


MAX_AUTOTUNE = "torch-max-autotune-channels-last"


@dataclass(frozen=True)
class Peer:
    """A way to run a model; `prepare` returns something with `run()` and `outputs()`.

    What it takes on an H200, estimated: `seconds` each time, and `once` for every architecture.
    `compiles`: its first run fills caches on disk.
    """

    name: str
    prepare: Callable[[Work], Any]
    seconds: float
    applies: Callable[[Case], bool] = lambda case: True
    once: float = 0
    by_default: bool = True
    torch: bool = False
    compiles: bool = False


# --- the reference ---------------------------------------------------------------------------------------------------


@functools.cache
def reference(work: Work) -> dict[str, Sampled]:
    """Return the outputs of the model in float32, which onnxruntime computes without TF32."""
    model, feeds = model_of(work), feeds_of(work)
    options = EXACT if work.provider == "cuda" else {}
    if half_precision_of(model):
        model, feeds = model_to_float32(model), arrays_to_float32(feeds)
    bound = bind(start_session(model, None, work.provider, options=options), feeds, work.provider)
    bound.run()
    return sampled(bound.outputs())


def sampled(outputs: Mapping[str, Array]) -> dict[str, Sampled]:
    """Return the shape of every output, and at most SAMPLE values that are spread over it."""
    return {name: (value.shape, value.reshape(-1)[:: max(1, value.size // SAMPLE)].astype(np.float64))
            for name, value in outputs.items()}  # fmt: skip


def relative_error(expected: Mapping[str, Sampled], outputs: Mapping[str, Array]) -> float:
    """Return the largest |out - reference| / |reference| of all outputs; infinity for NaN or if shapes differ."""
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
    """Return the model as it is; onnxruntime optimizes it."""
    return model_of(work)


@functools.lru_cache(maxsize=1)
def _by_the_tool(path: Path, kind: str, heads: int, hidden: int) -> onnx.ModelProto:
    tool = importlib.import_module("onnxruntime.transformers.optimizer")
    kind = kind if kind in tool.MODEL_TYPES else "gpt2"
    result: onnx.ModelProto = tool.optimize_model(str(path), kind, heads, hidden, use_gpu=True).model
    return result


def by_the_tool(work: Work) -> onnx.ModelProto:
    """Return the model that onnxruntime.transformers.optimizer makes."""
    config = job_of(work.case.architecture, work.case.dtype).config
    return _by_the_tool(work.path, work.case.tool, config["heads"], config["hidden"])


@functools.lru_cache(maxsize=1)
def _by_onnxscript(path: Path) -> onnx.ModelProto:
    ir = importlib.import_module("onnxscript.ir")
    model = ir.load(path)
    result = importlib.import_module("onnxscript.rewriter.ort_fusions").optimize_for_ort(model)
    proto: onnx.ModelProto = ir.serde.serialize_model(result[0] if isinstance(result, tuple) else model)
    return proto


def by_onnxscript(work: Work) -> onnx.ModelProto:
    """Return the model that onnxscript's ort_fusions make."""
    return _by_onnxscript(work.path)


@functools.lru_cache(maxsize=2)
def _fused(work: Work, layout: Layout) -> onnx.ModelProto:
    return optimize(model_of(work), layout=layout, verify=False)[0]


def fused(work: Work) -> onnx.ModelProto:
    """Return the model that onnxfuse makes."""
    return _fused(work, "auto")


def fused_at_sizes(work: Work) -> onnx.ModelProto:
    """Return the model that onnxfuse makes of the model with static shapes, whose plans hold these sizes alone."""
    return optimize(at_sizes(model_of(work), feeds_of(work)), verify=False)[0]


def fused_without_regions(work: Work) -> onnx.ModelProto:
    """Return the model that onnxfuse makes where patterns match, and nowhere else."""
    return optimize(model_of(work), verify=False, regions=False)[0]


def fused_without_epilogues(work: Work) -> onnx.ModelProto:
    """Return the model that onnxfuse makes if no region joins a product."""
    return optimize(model_of(work), verify=False, regions="apart")[0]


def fused_in_nchw(work: Work) -> onnx.ModelProto:
    """Return the model that onnxfuse makes with images as the original has them."""
    return _fused(work, "nchw")


def fused_in_nhwc(work: Work) -> onnx.ModelProto:
    """Return the model that onnxfuse makes with all images channels-last that can be, whatever their dtype."""
    return _fused(work, "nhwc")


def in_onnxruntime(
    make: Callable[[Work], onnx.ModelProto], kernels: bool = False, options: Mapping[str, int | str] | None = None
) -> Callable[[Work], Any]:
    """Return the `prepare` of a peer that changes the model and runs it in onnxruntime."""

    def prepare(work: Work) -> Any:
        session = start_session(
            make(work), None, work.provider, partial(InferenceSession, wait=True) if kernels else None, options=options
        )
        shapes = {name: shape for name, (shape, _) in reference(work).items()}
        return bind(session, feeds_of(work), work.provider, shapes)

    return prepare


def release() -> None:
    """Release the memory and the compiled code of the last peers."""
    gc.collect()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _has_tool(case: Case) -> bool:
    return bool(case.tool)


def _convolutions(case: Case) -> bool:
    return case.convolutions


def _is_dynamic(case: Case) -> bool:
    return not case.fixed


def _has_cache(case: Case) -> bool:
    return "past" in case.sizes


# The most important come first: a budget that runs out leaves out the last ones.
PEERS = (
    Peer("ort", in_onnxruntime(as_exported), 2),
    Peer("ort-graph", in_onnxruntime(as_exported, options=GRAPH), 2),
    Peer("onnxfuse", in_onnxruntime(fused, kernels=True), 2.5, once=3),
    Peer("onnxfuse-graph", in_onnxruntime(fused, kernels=True, options=GRAPH), 2, compiles=True),
    Peer("onnxfuse-static", in_onnxruntime(fused_at_sizes, kernels=True), 2.5, _is_dynamic, once=3, by_default=False),
    Peer("onnxfuse-static-graph", in_onnxruntime(fused_at_sizes, kernels=True, options=GRAPH), 2, _is_dynamic,
         by_default=False, compiles=True),
    Peer("onnxfuse-no-regions-graph", in_onnxruntime(fused_without_regions, kernels=True, options=GRAPH), 2,
         by_default=False, compiles=True),
    Peer("onnxfuse-no-epilogues-graph", in_onnxruntime(fused_without_epilogues, kernels=True, options=GRAPH), 2,
         by_default=False, compiles=True),
    Peer("onnxfuse-bodies", in_onnxruntime(fused), 2),
    Peer("onnxfuse-bodies-graph", in_onnxruntime(fused, options=GRAPH), 2, by_default=False),
    Peer("ort-nhwc", in_onnxruntime(as_exported, options=NHWC), 1.5, _convolutions),
    Peer("ort-nhwc-graph", in_onnxruntime(as_exported, options=NHWC | GRAPH), 1.5, _convolutions),
    Peer("onnxfuse-nhwc-graph", in_onnxruntime(fused_in_nchw, kernels=True, options=NHWC | GRAPH), 1.5, _convolutions),
    Peer("onnxfuse-layout-nchw-graph", in_onnxruntime(fused_in_nchw, kernels=True, options=GRAPH), 3, _convolutions,
         by_default=False, compiles=True),
    Peer("onnxfuse-layout-nhwc-graph", in_onnxruntime(fused_in_nhwc, kernels=True, options=GRAPH), 3, _convolutions,
         by_default=False, compiles=True),
    Peer("ort-float32-graph", in_onnxruntime(as_exported, options=FLOAT32), 2, _convolutions, by_default=False),
    Peer("ort-nhwc-float32-graph", in_onnxruntime(as_exported, options=NHWC | FLOAT32), 2, _convolutions,
         by_default=False),
    Peer("onnxfuse-layout-nhwc-float32-graph", in_onnxruntime(fused_in_nhwc, kernels=True, options=FLOAT32), 3,
         _convolutions, by_default=False, compiles=True),
    Peer("onnxscript", in_onnxruntime(by_onnxscript), 2, _has_tool, once=6),
    Peer("onnxscript-graph", in_onnxruntime(by_onnxscript, options=GRAPH), 2, _has_tool, by_default=False),
    Peer("ort-transformers", in_onnxruntime(by_the_tool), 2, _has_tool, once=6),
    Peer("ort-transformers-graph", in_onnxruntime(by_the_tool, options=GRAPH), 2, _has_tool, by_default=False),
    Peer("torch-reduce-overhead", in_torch("reduce-overhead"), 12, torch=True, compiles=True),
    Peer("torch-channels-last", in_torch("reduce-overhead", channels_last=True), 12, _convolutions, by_default=False,
         torch=True, compiles=True),
    Peer("torch-static-cache", in_torch_in_place("reduce-overhead"), 12, _has_cache, torch=True),
    Peer("torch-eager", in_torch(), 1.5, once=4, torch=True),
    Peer("torch-compile", in_torch("default"), 12, by_default=False, torch=True),
    Peer("torch-max-autotune", in_torch("max-autotune"), 90, by_default=False, torch=True),
    Peer(MAX_AUTOTUNE, in_torch("max-autotune", channels_last=True), 90, _convolutions, by_default=False, torch=True),
)  # fmt: skip
QUICK = ("ort", "ort-graph", "onnxfuse", "onnxfuse-graph")
CONVOLUTIONS = ("ort-graph", "ort-nhwc-graph", "onnxfuse-layout-nchw-graph", "onnxfuse-graph", "torch-reduce-overhead",
                "torch-channels-last")  # fmt: skip
