"""Time a fused operator in onnxruntime's own kernels, as one more step of a chain inside a CUDA graph.

A chain of a few steps is a model, and one of many more; their runs differ by the steps that one has more.  Each step
reads what the one before it wrote, as operators of a model do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper

MICROSOFT: Final = "com.microsoft"
TYPES: Final = {
    torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16, torch.float32: TensorProto.FLOAT,
    torch.int64: TensorProto.INT64,
}  # fmt: skip
RUNS: Final = 15
SHORT: Final = 2  # steps of the shorter chain
CHAIN_US: Final = 600.0  # of work, about, by which the longer chain exceeds the shorter one
MAX_STEPS: Final = 200

Tensors = Mapping[str, torch.Tensor]
Nodes = Callable[[list[str], list[str]], list[onnx.NodeProto]]


@dataclass(frozen=True)
class Step:
    """A step of a chain: it computes the next tensors of the names in `flows`; its other inputs never change."""

    flows: tuple[str, ...]
    nodes: Nodes  # from the names of the tensors that flow in, and of those that flow out
    inputs: Tensors


def microsoft(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), domain=MICROSOFT, **attributes)


def single(flow: str, op: str, *others: str, domain: str = MICROSOFT, **attributes: Any) -> tuple[tuple[str], Nodes]:
    """Return a step of one operator, whose first input and output flow."""
    return (flow,), lambda a, b: [helper.make_node(op, [*a, *others], b, domain=domain, **attributes)]


def gate(a: list[str], b: list[str]) -> list[onnx.NodeProto]:
    """Return the nodes of silu(gate) * up."""
    return [microsoft("QuickGelu", a, [f"silu_{b[0]}"], alpha=1.0), helper.make_node("Mul", [f"silu_{b[0]}", "up"], b)]


def skip(op: str, *weights: str, **attributes: Any) -> tuple[tuple[str, str], Nodes]:
    """Return a step that is a norm of a sum, which is an output too."""
    return ("x", "residual"), lambda a, b: [microsoft(op, [*a, *weights], [b[0], "", "", b[1]], **attributes)]


def step_of(fusion: str, attributes: Mapping[str, Any], inputs: Tensors) -> Step | None:
    """Return a step of onnxruntime's operators that compute the fusion; None if it has none."""
    norm, activation = {"epsilon": attributes.get("epsilon", 1e-5)}, attributes.get("activation")
    groups = {"groups": attributes.get("groups", 1), "activation": int(activation == "silu"), "channels_last": 1}
    last = {"axis": -1}
    known = {
        "layer_norm": single("x", "LayerNormalization", "scale", "bias", domain="", **last, **norm),
        "rms_norm": single("x", "SimplifiedLayerNormalization", "scale", domain="", **last, **norm),
        "add_layer_norm": skip("SkipLayerNormalization", "scale", "bias", **norm),
        "add_rms_norm": skip("SkipSimplifiedLayerNormalization", "scale", **norm),
        "softmax": single("x", "Softmax", domain="", **last),
        "bias_activation gelu": single("x", "BiasGelu", "bias"),
        "activation silu": single("x", "QuickGelu", alpha=1.0),
        "gated_activation silu": (("gate",), gate),
        "group_norm silu": single("x", "GroupNorm", "scale", "bias", **groups, **norm),
        "rotary_embedding": single("x", "RotaryEmbedding", "positions", "cos", "sin"),
    }
    name = f"{fusion} {activation}" if activation else fusion
    return Step(*known[name], adapted(fusion, inputs)) if name in known else None


def adapted(fusion: str, inputs: Tensors) -> Tensors:
    """Return the inputs in the form that onnxruntime's operator takes."""
    if fusion == "group_norm":
        x, scale, bias = inputs.values()
        return {"x": x.permute(0, 2, 3, 1).contiguous(), "scale": scale.float(), "bias": bias.float()}
    if fusion == "rotary_embedding":
        x, cos, sin = inputs.values()
        half = cos.shape[-1] // 2
        first = torch.zeros(1, dtype=torch.int64, device=x.device)
        return {"x": x, "positions": first, "cos": cos[0, :, :half].contiguous(), "sin": sin[0, :, :half].contiguous()}
    return inputs


def chain(step: Step, count: int) -> bytes:
    """Return a model of that many steps."""
    nodes: list[onnx.NodeProto] = []
    names = list(step.flows)
    for i in range(count):
        following = [f"{name}_{i}" for name in step.flows]
        nodes += step.nodes(names, following)
        names = following

    def values(those: Sequence[str], like: Sequence[str]) -> list[onnx.ValueInfoProto]:
        pairs = zip(those, (step.inputs[name] for name in like), strict=True)
        return [helper.make_tensor_value_info(name, TYPES[tensor.dtype], tensor.shape) for name, tensor in pairs]

    given = values(list(step.inputs), list(step.inputs))
    graph = helper.make_graph(nodes, "chain", given, values(names, step.flows))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


def run(step: Step, count: int) -> Callable[[], float]:
    """Return a call that gives the median microseconds of a run of the chain, whose CUDA graph is captured."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # run operators as written
    session = ort.InferenceSession(chain(step, count), options, [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})])
    if session.get_providers()[0] != "CUDAExecutionProvider":
        raise RuntimeError("onnxruntime has no CUDA provider here; required onnxruntime-gpu")
    binding, written = session.io_binding(), [torch.empty_like(step.inputs[name]) for name in step.flows]
    read = dict(step.inputs)  # a binding holds addresses only
    for name, tensor in read.items():
        binding.bind_input(name, "cuda", 0, TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr())
    for output, tensor in zip(session.get_outputs(), written, strict=True):
        binding.bind_output(output.name, "cuda", 0, TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr())
    for _ in range(3):  # the first runs allocate memory and capture the graph
        session.run_with_iobinding(binding)

    def median_us() -> float:
        times = []
        for _ in range(RUNS):
            start = time.perf_counter()
            session.run_with_iobinding(binding)
            times.append(1e6 * (time.perf_counter() - start))
        if not all(bool(tensor.isfinite().all()) for tensor in (*written, *read.values())):
            raise ValueError(f"{count} steps give infinities or NaN")
        return statistics.median(times)

    return median_us


def prepared(step: Step, guess_us: float) -> Callable[[], float]:
    """Return a call that gives the microseconds of one more step; `guess_us` decides how many steps are compared."""
    more = min(MAX_STEPS, max(8, round(CHAIN_US / guess_us)))
    short, long = run(step, SHORT), run(step, SHORT + more)
    return lambda: (long() - short()) / more


def step_us(step: Step, guess_us: float) -> float:
    """Return the microseconds of one more step."""
    return prepared(step, guess_us)()
