"""Draw the inputs on which an optimized model is compared with its original: several sizes, and special values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import onnx
from drafts import WORD, Dim, shape_at
from onnx import TensorProto, helper

from onnxfuse.ir.dtypes import HALF_PRECISION

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, *HALF_PRECISION)
POOLS = ((), (1, 2, 3, 5), (0, 1, 1, 4), (0,), (1,))  # of sizes, a draw each; the first has the first sizes
SCALES = (1.0, 4.0, 1.0, 1.0, 1.0)
WHOLE = 2  # the draw whose floats are whole numbers, so that many are equal
SPECIAL_DRAWS = (1, 2)  # in which a model that is asked for special values gets them
SHARE_OF_SPECIAL = 0.15  # of the elements
DRAWABLE = set(onnx.TensorProto.DataType.values()) - {TensorProto.UNDEFINED, TensorProto.STRING}
MAX_ELEMENTS = 2**24  # of an input
UNKNOWN = "unknown"  # the symbol of dims that no model declares: 2 at first
Dims = Mapping[str, Sequence[Dim]]


def draws(
    model: onnx.ModelProto, sizes: Mapping[str, int], seed: int, dims: Dims | None = None, special: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield inputs: at the first sizes of the symbols, at others, at 0 and 1 of some symbols, and of all of them.

    There are none for a model with an input that is not a tensor of numbers, or has no sizes that can be drawn.  A
    symbol in the shape of an input that has a default value is always the default's size: onnxruntime reuses the memory
    of one tensor for another whose dims are the same symbols, and refuses a run in which they differ (seed 1110048610).

    sizes    the first sizes of the symbols
    dims     of inputs whose shapes the model does not declare
    special  whether some elements are NaN, infinite, negative zero, subnormal or the largest number
    """
    if any(each.type.tensor_type.elem_type not in DRAWABLE for each in model.graph.input):
        return
    kept, dims = {tensor.name: tensor for tensor in model.graph.initializer}, dims or {}
    declared = {each.name: _dims(each.type.tensor_type, dims.get(each.name, ())) for each in model.graph.input}
    given = {dim.dim_param: size for each in model.graph.input if each.name in kept
             for dim, size in zip(each.type.tensor_type.shape.dim, kept[each.name].dims, strict=False)
             if dim.dim_param}  # fmt: skip
    words = sorted({word for each in declared.values() for d in each if isinstance(d, str) for word in WORD.findall(d)})
    for draw, pool in enumerate(POOLS):
        if draw > WHOLE and not words:
            return
        random, numbers = Random(seed * len(POOLS) + draw), np.random.default_rng(seed * len(POOLS) + draw)
        now = (dict(sizes) if draw == 0 else {word: random.choice(pool) for word in words}) | given
        feeds = {}
        for each in model.graph.input:
            dtype = each.type.tensor_type.elem_type
            shape = tuple(kept[each.name].dims) if each.name in kept else shape_at(declared[each.name], now)
            if min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) > MAX_ELEMENTS:
                return
            feeds[each.name] = drawn(numbers, shape, dtype, SCALES[draw], whole=draw == WHOLE)
            if special and draw in SPECIAL_DRAWS and dtype in FLOATS:
                feeds[each.name] = with_specials(numbers, feeds[each.name])
        yield feeds


def _dims(kind: onnx.TypeProto.Tensor, otherwise: Sequence[Dim]) -> list[int | str]:
    """Return the dims of an input; those that it does not declare are one symbol more."""
    if kind.HasField("shape"):
        return [d.dim_param or d.dim_value if d.WhichOneof("value") else UNKNOWN for d in kind.shape.dim]
    return [UNKNOWN if dim is None else dim for dim in otherwise]


def drawn(numbers: np.random.Generator, shape: Sequence[int], dtype: int, scale: float, whole: bool = False) -> Any:
    """Return random values of a dtype: floats around zero, or whole ones with many ties, and small indices."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    if dtype == TensorProto.BOOL:
        return np.asarray(numbers.random(shape) < 0.6)
    if dtype in FLOATS:
        values = numbers.standard_normal(shape) * scale
        return np.asarray(np.round(values) if whole else values).astype(kind)
    if dtype in (TensorProto.INT8, TensorProto.UINT8):
        limits = np.iinfo(kind)
        return np.asarray(numbers.integers(limits.min, limits.max + 1, shape)).astype(kind)
    return np.asarray(numbers.integers(0, 2, shape)).astype(kind)


def special_values(dtype: np.dtype[Any]) -> list[float]:
    """Return NaN, infinities, zeros, the smallest and the largest numbers of a float dtype."""
    import ml_dtypes

    limits = ml_dtypes.finfo(dtype)
    positive = [np.inf, 0.0, float(limits.smallest_subnormal), float(limits.tiny), float(limits.max), 1.0]
    return [np.nan, *positive, *(-value for value in positive)]


def with_specials(numbers: np.random.Generator, values: Any, share: float = SHARE_OF_SPECIAL) -> Any:
    """Return the array with some elements replaced by special values; half the time there is one kind of them."""
    found = special_values(values.dtype)
    if numbers.random() < 0.5:
        found = [found[numbers.integers(len(found))]]
    chosen = numbers.choice(np.array(found), values.shape)
    with np.errstate(all="ignore"):
        return np.asarray(np.where(numbers.random(values.shape) < share, chosen, values.astype(np.float64))).astype(
            values.dtype
        )
