"""Programs of regions as functions of PyTorch: what torch.compile gets, and the reference in float32."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.fx
import torch.nn.functional as F
from region_problems import Part, Problem

from onnxfuse.kernels.region.program import Operation, Program
from onnxfuse.kernels.region.shapes import reduced_axes
from onnxfuse.region_operators import HALVES

Tensor = torch.Tensor
VIEWS: Final = ("Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand", "Slice", "Split", "Identity")


def dtype_of(name: str, wide: bool = False) -> torch.dtype:
    """Return PyTorch's dtype of a name; `wide` holds floats of 16 bits as float32."""
    found: torch.dtype = getattr(torch, "float32" if wide and name in HALVES else name)
    return found


def module_of(problem: Problem, device: str, wide: bool = False) -> torch.fx.GraphModule:
    """Return a module that computes the outputs of a problem, each a tensor of its own in row-major order.

    With `wide` floats of 16 bits are computed and returned in float32, and rounded by Casts, and where a result depends
    on them that is not continuous.
    """
    graph = torch.fx.Graph()
    values = {name: graph.placeholder(name.replace(".", "_").replace("/", "_")) for name in problem.operands}
    for part in problem.parts:
        inner = {name: values[t] for name, t in zip(part.node.operands, part.inputs, strict=True)}
        _add(graph, part.program, inner, device, wide)
        for tensor, name in zip(part.outputs, part.program.outputs, strict=True):
            values[tensor] = inner[name]
    made = [graph.call_function(_owned, (values[name], _is_view(problem.parts, name))) for name in problem.outputs]
    graph.output(tuple(made))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _owned(x: Tensor, is_view: bool) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if is_view else x.contiguous()


def _is_view(parts: Sequence[Part], tensor: str) -> bool:
    """Return whether PyTorch may compute a tensor as a view of another one."""
    for part in parts:
        for name, output in zip(part.program.outputs, part.outputs, strict=True):
            if output == tensor:
                return name not in part.program.producers or part.program.producers[name].name in VIEWS
    return True


def _add(graph: torch.fx.Graph, program: Program, values: dict[str, Any], device: str, wide: bool) -> None:
    """Add the operators of a program to a graph."""
    for operation in program.operations:
        dtype = program.dtypes[operation.outputs[0]]
        target = dtype_of(dtype, wide)
        if operation.name == "Constant":
            arguments = ((), _number(operation.attributes["value"], dtype))
            values[operation.outputs[0]] = graph.call_function(
                torch.full, arguments, {"dtype": target, "device": device}
            )
            continue
        read = [values[name] for name in operation.inputs]
        found = _call(graph, operation, read, target)
        if wide and (operation.name == "Cast" or operation.outputs[0] in program.rounded):
            found = _rounded(graph, found, dtype)
        if len(operation.outputs) == 1:
            values[operation.outputs[0]] = found
        else:
            values |= {n: graph.call_function(operator.getitem, (found, i)) for i, n in enumerate(operation.outputs)}


def _rounded(graph: torch.fx.Graph, value: Any, dtype: str) -> Any:
    """Add the rounding of a float32 value to a dtype of 16 bits."""
    if dtype not in HALVES:
        return value
    return graph.call_function(_round_to, (value, dtype_of(dtype)))


def _round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _number(value: Any, dtype: str) -> Any:
    if dtype == "bool":
        return bool(value)
    return float(value) if dtype in (*HALVES, "float32", "float64") else int(value)


def _call(graph: torch.fx.Graph, operation: Operation, read: list[Any], target: torch.dtype) -> Any:
    """Add the call of one operator."""
    name, attributes = operation.name, dict(operation.attributes)
    if name in SIMPLE:
        return graph.call_function(SIMPLE[name], tuple(read))
    if name == "Cast":
        return graph.call_function(_cast, (read[0], target))
    if name == "Concat":
        return graph.call_function(torch.cat, (read, attributes["axis"]))
    if name in REDUCED:
        arguments = (read[0], list(reduced_axes(operation)), bool(attributes.get("keepdims", 1)))
        return graph.call_function(REDUCED[name], arguments)
    return graph.call_function(WITH_ATTRIBUTES[name], tuple(read), attributes)


# --- elementwise operators --------------------------------------------------------------------------------------------


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _cast(x: Tensor, to: torch.dtype) -> Tensor:
    return x != 0 if to is torch.bool else x.to(to)


def _mod(a: Tensor, b: Tensor, fmod: int = 0) -> Tensor:
    return torch.fmod(a, b) if fmod or a.is_floating_point() else torch.remainder(a, b)


def _bit_shift(x: Tensor, by: Tensor, direction: str) -> Tensor:
    return x << by if direction == "LEFT" else x >> by


def _is_inf(x: Tensor, detect_positive: int = 1, detect_negative: int = 1) -> Tensor:
    if detect_positive and detect_negative:
        return torch.isinf(x)
    return torch.isposinf(x) if detect_positive else torch.isneginf(x)


def _selu(x: Tensor, alpha: float = 1.6732631921768188, gamma: float = 1.0507010221481323) -> Tensor:
    return gamma * torch.where(x < 0, alpha * torch.expm1(x), x)


def _hard_sigmoid(x: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return torch.clamp(x * alpha + beta, 0, 1)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def _elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


def _leaky_relu(x: Tensor, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


SIMPLE: Mapping[str, Callable[..., Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": _divide, "Pow": torch.pow, "Min": torch.minimum,
    "Max": torch.maximum, "Equal": torch.eq, "Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
    "BitwiseNot": torch.bitwise_not,
    "Not": torch.logical_not, "Neg": torch.neg, "Abs": torch.abs, "Sqrt": torch.sqrt, "Exp": torch.exp,
    "Log": torch.log, "Erf": torch.erf, "Tanh": torch.tanh, "Sin": torch.sin, "Cos": torch.cos, "Floor": torch.floor,
    "Ceil": torch.ceil, "Round": torch.round, "Sign": torch.sign, "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Sigmoid": torch.sigmoid, "HardSwish": F.hardswish, "Softplus": F.softplus, "Softsign": F.softsign, "Mish": F.mish,
    "Where": torch.where, "IsNaN": torch.isnan, "Identity": torch.clone,
}  # fmt: skip


# --- index maps -------------------------------------------------------------------------------------------------------


def _reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.reshape([x.shape[i] if dim == 0 else dim for i, dim in enumerate(shape)])


def _unsqueeze(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in sorted(axes):
        x = x.unsqueeze(axis)
    return x


def _expand(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape)))


def _slice(
    x: Tensor, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int], steps: Sequence[int] = ()
) -> Tensor:
    for axis, start, end, step in zip(axes, starts, ends, steps or [1] * len(axes), strict=True):
        places = range(x.shape[axis])[start:end:step]
        if step > 0:
            x = x[(slice(None),) * axis + (slice(places.start, max(places.start, places.stop), step),)]
        else:
            low, high = (places[-1], places[0]) if len(places) else (0, -1)
            x = x.narrow(axis, low, high - low + 1).flip(axis)[(slice(None),) * axis + (slice(None, None, -step),)]
    return x


def _split(x: Tensor, axis: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(x, list(sizes), axis)


def _pad(x: Tensor, pads: Sequence[int], mode: str = "constant", value: float | str = 0) -> Tensor:
    rank = x.dim()
    if mode == "constant":
        amounts = [amount for axis in reversed(range(rank)) for amount in (pads[axis], pads[axis + rank])]
        return F.pad(x, amounts, "constant", float(value) if x.is_floating_point() else int(value))
    for axis in range(rank):
        if pads[axis] or pads[axis + rank]:
            x = x.index_select(axis, _padded_places(x, axis, pads[axis], pads[axis + rank], mode))
    return x


def _padded_places(x: Tensor, axis: int, before: int, after: int, mode: str) -> Tensor:
    size = x.shape[axis]
    at = torch.arange(-before, size + after, device=x.device)
    if mode == "edge":
        return at.clamp(0, size - 1)
    return at.remainder(size) if mode == "wrap" else size - 1 - (size - 1 - at.abs()).abs()


def _gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    flat = indices.reshape(-1)
    found = x.index_select(axis, torch.where(flat < 0, flat + x.shape[axis], flat))
    return found.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def _gather_elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    return x.gather(axis, torch.where(indices < 0, indices + x.shape[axis], indices).long())


# --- reductions -------------------------------------------------------------------------------------------------------


def _in_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _sum(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    return torch.sum(x, axes, keepdim, dtype=x.dtype)


def _mean(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    if x.is_floating_point():
        return torch.mean(x, axes, keepdim)
    return torch.div(_sum(x, axes, keepdim), math.prod(x.shape[axis] for axis in axes), rounding_mode="trunc")


def _product(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    for axis in reversed(axes):
        x = torch.prod(x, axis, keepdim, dtype=x.dtype)
    return x


def _sum_of_squares(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    wide = _in_float32(x)
    return _sum(wide * wide, axes, keepdim).to(x.dtype)


def _l1(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    return _sum(x.abs(), axes, keepdim)


def _l2(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    wide = _in_float32(x)
    return torch.sqrt(_sum(wide * wide, axes, keepdim)).to(x.dtype)


REDUCED: Mapping[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceSum": _sum, "ReduceMean": _mean, "ReduceMax": torch.amax, "ReduceMin": torch.amin, "ReduceProd": _product,
    "ReduceSumSquare": _sum_of_squares, "ReduceL1": _l1, "ReduceL2": _l2, "ReduceLogSumExp": torch.logsumexp,
}  # fmt: skip


def _place(find: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def found(x: Tensor, axis: int, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        if select_last_index:
            return x.shape[axis] - 1 - find(x.flip(axis), axis, bool(keepdims))
        return find(x, axis, bool(keepdims))

    return found


def _softmax(x: Tensor, axis: int) -> Tensor:
    return torch.softmax(x, axis)


def _log_softmax(x: Tensor, axis: int) -> Tensor:
    return torch.log_softmax(x, axis)


def _transpose(x: Tensor, perm: Sequence[int]) -> Tensor:
    return x.permute(list(perm))


def _squeeze(x: Tensor, axes: Sequence[int]) -> Tensor:
    return x.squeeze(tuple(axes))


def _tile(x: Tensor, repeats: Sequence[int]) -> Tensor:
    return x.repeat(list(repeats))


WITH_ATTRIBUTES: Mapping[str, Callable[..., Any]] = {
    "Mod": _mod, "IsInf": _is_inf, "Selu": _selu, "HardSigmoid": _hard_sigmoid, "Gelu": _gelu, "Elu": _elu,
    "LeakyRelu": _leaky_relu, "Reshape": _reshape, "Unsqueeze": _unsqueeze, "Expand": _expand, "Slice": _slice,
    "Split": _split, "Pad": _pad, "Gather": _gather, "GatherElements": _gather_elements, "Transpose": _transpose,
    "Squeeze": _squeeze, "Tile": _tile, "BitShift": _bit_shift,
    "ArgMax": _place(torch.argmax), "ArgMin": _place(torch.argmin), "Softmax": _softmax, "LogSoftmax": _log_softmax,
}  # fmt: skip
