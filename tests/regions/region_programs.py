"""A NumPy interpreter of region programs: what the kernels of regions, and the bodies of their functions, must compute.

A program is the attribute `program` of a fused node of the fusion `region`: JSON with ops, outputs and dtypes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.ir.dtypes import Array

HALVES = ("float16", "bfloat16")
# Operators that jump: they read a value as its own dtype holds it.
NOT_CONTINUOUS = {
    "IsNaN", "IsInf", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Floor", "Ceil", "Round", "Sign",
    "Mod", "ArgMax", "ArgMin",
}  # fmt: skip

_erf = np.vectorize(math.erf, otypes=[float])


def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of a name, which is ml_dtypes' for bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def run_program(program: str | Mapping[str, Any], operands: Sequence[Array]) -> list[Array]:
    """Return the outputs of a program for its operands x0, x1, ..., in the dtypes that the program states.

    Floats are computed in float32 (float64 in float64) and rounded to their dtype where they leave the program, where
    an operator that jumps reads them, and where a Cast goes to a half precision.
    """
    parsed = json.loads(program) if isinstance(program, str) else program
    dtypes = parsed["dtypes"]
    values: dict[str, Array] = {}
    for i, operand in enumerate(operands):
        name = f"x{i}"
        assert operand.dtype == dtype_of(dtypes[name]), f"{name} is {operand.dtype}; required {dtypes[name]}"
        values[name] = operand.astype(np.float32) if dtypes[name] in HALVES else operand
    with np.errstate(all="ignore"):
        for op, inputs, outputs, attributes in parsed["ops"]:
            read = [_rounded(values[n], dtypes[n]) if op in NOT_CONTINUOUS else values[n] for n in inputs]
            if op == "Where":
                read[0] = values[inputs[0]].astype(bool)
            if op == "Cast" and not _is_float(dtypes[outputs[0]]):
                read = [_rounded(values[inputs[0]], dtypes[inputs[0]])]
            found = _results(op, read, attributes, len(outputs), dtypes[outputs[0]])
            for name, value in zip(outputs, found, strict=True):
                kept = _rounded(value, dtypes[name]) if op == "Cast" else value
                values[name] = np.asarray(kept).astype(_held(dtypes[name]))
        return [values[name].astype(dtype_of(dtypes[name])) for name in parsed["outputs"]]


def _held(dtype: str) -> np.dtype[Any]:
    """Return the dtype in which a value is held between operators."""
    return np.dtype(np.float32) if dtype in HALVES else np.dtype(dtype)


def _is_float(dtype: str) -> bool:
    return dtype in (*HALVES, "float32", "float64")


def _rounded(value: Array, dtype: str) -> Array:
    return np.asarray(value).astype(dtype_of(dtype)).astype(np.float32) if dtype in HALVES else value


def _results(op: str, inputs: list[Array], attrs: Mapping[str, Any], count: int, dtype: str) -> list[Array]:
    if op == "Split":
        cuts = np.cumsum(attrs["sizes"])[:-1]
        return list(np.split(inputs[0], cuts, attrs["axis"]))
    assert count == 1, op
    if op == "Constant":
        return [np.array(float(attrs["value"]) if isinstance(attrs["value"], str) else attrs["value"], _held(dtype))]
    if op == "Cast":
        return [_cast(inputs[0], dtype)]
    if op == "Mod":
        return [(np.fmod if attrs["fmod"] else np.mod)(*inputs)]
    if op in ELEMENTWISE:
        return [ELEMENTWISE[op](*inputs)]
    if op in ("LeakyRelu", "Elu", "Selu", "HardSigmoid", "HardSwish", "Softplus", "Mish", "Gelu"):
        return [_activation(op, inputs[0], attrs)]
    if op == "IsInf":
        positive, negative = attrs.get("detect_positive", 1), attrs.get("detect_negative", 1)
        infinite = np.isinf(inputs[0])
        return [infinite & ((inputs[0] > 0) & bool(positive) | (inputs[0] < 0) & bool(negative))]
    if op in MAPS:
        return [MAPS[op](inputs, attrs)]
    return [_reduced(op, inputs[0], attrs)]


def _cast(x: Array, dtype: str) -> Array:
    if dtype == "bool":
        return x != 0
    if dtype in HALVES:
        return x.astype(np.float32)
    return (np.trunc(x) if x.dtype.kind == "f" and not _is_float(dtype) else x).astype(dtype)


def _div(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    quotient = np.abs(a.astype(object)) // np.abs(b.astype(object))  # integers are divided toward zero
    return (quotient * np.sign(a.astype(object)) * np.sign(b.astype(object))).astype(a.dtype)


ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _div,
    "Pow": lambda a, b: np.power(a, b.astype(a.dtype) if a.dtype.kind == "f" else b).astype(a.dtype),
    "Min": np.minimum,
    "Max": np.maximum,
    "Neg": np.negative,
    "Abs": np.abs,
    "Sqrt": np.sqrt,
    "Exp": np.exp,
    "Log": np.log,
    "Erf": lambda x: _erf(x).astype(x.dtype),
    "Tanh": np.tanh,
    "Sin": np.sin,
    "Cos": np.cos,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.round,
    "Sign": np.sign,
    "Reciprocal": lambda x: 1 / x,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Where": lambda c, a, b: np.where(c, a, b),
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Not": np.logical_not,
    "IsNaN": np.isnan,
    "Identity": lambda x: x,
}
SNAKE = {"LeakyRelu": "leaky_relu", "HardSwish": "hard_swish"}


def _activation(op: str, x: Array, attrs: Mapping[str, Any]) -> Array:
    wide = x.astype(np.float64)
    alpha, beta = attrs.get("alpha", 0.0), attrs.get("beta", 0.0)
    if op == "Elu":
        return np.where(wide < 0, alpha * np.expm1(np.minimum(wide, 0)), wide)
    if op == "Selu":
        alpha, gamma = attrs.get("alpha", 1.67326319217681884765625), attrs.get("gamma", 1.05070102214813232421875)
        return gamma * np.where(wide < 0, alpha * np.expm1(np.minimum(wide, 0)), wide)
    if op == "HardSigmoid":
        return np.clip(alpha * wide + beta, 0, 1)
    if op == "Softplus":
        return np.logaddexp(0, wide)
    if op == "Mish":
        return wide * np.tanh(np.logaddexp(0, wide))
    name = "gelu_tanh" if attrs.get("approximate") == "tanh" else SNAKE.get(op, op.lower())
    return ACTIVATIONS[name].formula(wide, alpha, beta)


# --- index maps ----------------------------------------------------------------------------------------------------


def _reshape(inputs: list[Array], attrs: Mapping[str, Any]) -> Array:
    shape = [inputs[0].shape[i] if size == 0 else size for i, size in enumerate(attrs["shape"])]
    return inputs[0].reshape(shape)


def _slice(inputs: list[Array], attrs: Mapping[str, Any]) -> Array:
    (x,) = inputs
    for axis, start, end, step in zip(attrs["axes"], attrs["starts"], attrs["ends"], attrs["steps"], strict=True):
        size = x.shape[axis]
        start, end = (each + size if each < 0 else each for each in (start, end))
        low, high = (0, size) if step > 0 else (-1, size - 1)
        taken = range(min(max(start, 0), high), min(max(end, low), high), step)
        x = np.take(x, np.array(taken, np.int64), axis)
    return x


def _pad(inputs: list[Array], attrs: Mapping[str, Any]) -> Array:
    (x,) = inputs
    pads, rank = attrs["pads"], inputs[0].ndim
    cut = tuple(
        slice(max(-pads[i], 0), x.shape[i] - max(-pads[i + rank], 0)) for i in range(rank)
    )  # negative pads take elements away
    widths = [(max(pads[i], 0), max(pads[i + rank], 0)) for i in range(rank)]
    mode = attrs["mode"]
    if mode == "constant":
        value = attrs["value"]
        return np.pad(x[cut], widths, constant_values=np.array(float(value)).astype(x.dtype))
    return np.pad(x[cut], widths, mode=mode)


MAPS: dict[str, Callable[[list[Array], Mapping[str, Any]], Array]] = {
    "Reshape": _reshape,
    "Transpose": lambda x, a: np.transpose(x[0], a["perm"]),
    "Unsqueeze": lambda x, a: np.expand_dims(x[0], tuple(a["axes"])),
    "Squeeze": lambda x, a: np.squeeze(x[0], tuple(a["axes"])),
    "Expand": lambda x, a: (
        x[0] * np.ones(a["shape"], x[0].dtype)
        if x[0].dtype != bool
        else np.logical_and(x[0], np.ones(a["shape"], bool))
    ),
    "Slice": _slice,
    "Concat": lambda x, a: np.concatenate(x, a["axis"]),
    "Pad": _pad,
    "Gather": lambda x, a: np.take(x[0], np.where(x[1] < 0, x[1] + x[0].shape[a["axis"]], x[1]), a["axis"]),
    "Tile": lambda x, a: np.tile(x[0], a["repeats"]),
}


# --- reductions ----------------------------------------------------------------------------------------------------


def _reduced(op: str, x: Array, attrs: Mapping[str, Any]) -> Array:
    if op in ("Softmax", "LogSoftmax"):
        axis = attrs["axis"]
        shifted = x - x.max(axis=axis, keepdims=True, initial=-np.inf)
        total = np.exp(shifted).sum(axis=axis, keepdims=True)
        return np.exp(shifted) / total if op == "Softmax" else shifted - np.log(total)
    if op in ("ArgMax", "ArgMin"):
        return _arg(op, x, attrs)
    axes, keep = tuple(attrs["axes"]), bool(attrs["keepdims"])
    wide = x.astype(np.float64) if x.dtype.kind == "f" else x
    return np.asarray(REDUCTIONS[op](wide, axes, keep)).astype(x.dtype)


def _arg(op: str, x: Array, attrs: Mapping[str, Any]) -> Array:
    axis, choose = attrs["axis"], np.argmax if op == "ArgMax" else np.argmin
    if attrs.get("select_last_index"):
        last = x.shape[axis] - 1 - choose(np.flip(x, axis), axis=axis, keepdims=bool(attrs["keepdims"]))
        return last.astype(np.int64)
    return choose(x, axis=axis, keepdims=bool(attrs["keepdims"])).astype(np.int64)


def _log_sum_exp(x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    top = x.max(axis=axes, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    total = np.log(np.exp(x - top).sum(axis=axes, keepdims=True)) + top
    return total if keep else total.squeeze(axes)


REDUCTIONS: dict[str, Callable[[Array, tuple[int, ...], bool], Array]] = {
    "ReduceSum": lambda x, axes, keep: x.sum(axis=axes, keepdims=keep, dtype=x.dtype),
    "ReduceMean": lambda x, axes, keep: (
        x.mean(axis=axes, keepdims=keep)
        if x.dtype.kind == "f"
        else _div(
            x.sum(axis=axes, keepdims=keep, dtype=x.dtype), np.array(math.prod(x.shape[a] for a in axes), x.dtype)
        )
    ),
    "ReduceMax": lambda x, axes, keep: x.max(axis=axes, keepdims=keep),
    "ReduceMin": lambda x, axes, keep: x.min(axis=axes, keepdims=keep),
    "ReduceProd": lambda x, axes, keep: x.prod(axis=axes, keepdims=keep, dtype=x.dtype),
    "ReduceSumSquare": lambda x, axes, keep: (x * x).sum(axis=axes, keepdims=keep, dtype=x.dtype),
    "ReduceL1": lambda x, axes, keep: np.abs(x).sum(axis=axes, keepdims=keep, dtype=x.dtype),
    "ReduceL2": lambda x, axes, keep: np.sqrt((x * x).sum(axis=axes, keepdims=keep, dtype=x.dtype)),
    "ReduceLogSumExp": _log_sum_exp,
}
