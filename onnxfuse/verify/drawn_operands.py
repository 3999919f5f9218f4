"""Draw random values, with fixed seeds, on which a fused node is compared with the nodes that it replaced."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

import numpy as np
import onnx

from onnxfuse.algebra.sizes import evaluate, symbols
from onnxfuse.analysis.repeated_columns import repeat_columns
from onnxfuse.errors import VerificationError
from onnxfuse.ir.dtypes import FLOAT_NAMES, Array
from onnxfuse.verify.input_uses import added_to_scores_by
from onnxfuse.verify.mask_rows import Mask, with_mask_rows
from onnxfuse.verify.noise import DRAWN_BLOCK
from onnxfuse.verify.parts import Part, UnfusedGraph

Feeds: TypeAlias = dict[str, Array]

# Standard deviations of the two sets of drawn values.  Large values saturate activations and reveal a missing rounding;
# in half precision, the sum of 64 products of two large values is still finite.
DRAWN_MAGNITUDES: Final[Mapping[str, tuple[float, float]]] = {
    "float64": (1.0, 1000.0), "float32": (1.0, 1000.0), "float16": (1.0, 16.0), "bfloat16": (1.0, 16.0),
}  # fmt: skip

LEAVE_NOTHING: Final = "masks that leave nothing"

# Sizes for symbolic dims, assigned in the order of their names; all differ, so that exchanged dims are noticed.
SYMBOL_SIZES: Final = (2, 3, 5, 7, 4, 6, 9, 11)
ONES: Final = (1,)
MAX_ELEMENTS: Final = 2**28  # elements of a drawn tensor; a larger shape is wrong, or would take too long


def operands_by_shape(unfused: UnfusedGraph, part: Part, lengths: tuple[int, ...] = SYMBOL_SIZES) -> Feeds:
    """Return random values for a fused node's operands, which fit the operands' dtypes and symbolic shapes.

    The function is for models that do not run, so that no run shows the operands' values and sizes.  `lengths` are the
    sizes of symbolic dims in the order of the dims' names, repeated where there are more dims.
    Integers are 0 or 1, which are valid indices of nearly any table.  Raises VerificationError if a shape is unknown or
    too large, or if the replaced nodes read a tensor that is neither an operand nor a constant.  Such a tensor could be
    computed from an operand, and then independent random values for both would contradict each other.
    """
    for name in part.leaves:
        if name not in unfused.constants and name not in part.operands:
            raise VerificationError(f"the value of '{name}' is known in a run only, and the original does not run")
    names = list(dict.fromkeys((*part.operands, *part.leaves)))
    shapes = {name: unfused.types[name][1] for name in names}
    words = sorted({word for shape in shapes.values() for size in shape or () for word in symbols(size)})
    sizes = {word: lengths[i % len(lengths)] for i, word in enumerate(words)}
    made: Feeds = {}
    for name, shape in shapes.items():
        dtype = unfused.types[name][0]
        if name in unfused.constants:
            made[name] = unfused.constant(name)
        elif shape is None or not dtype or dtype == onnx.TensorProto.STRING:
            raise VerificationError(f"the original does not run, and the shape or dtype of '{name}' is unknown")
        else:
            known = tuple(max(0, evaluate(size, sizes)) for size in shape)
            if math.prod(known) > MAX_ELEMENTS:
                raise VerificationError(f"the original does not run, and '{name}' of shape {list(known)} is too large")
            made[name] = _by_shape(name, known, dtype)
    return made | {name: repeat_columns(made[name], columns) for name, columns in part.repeated.items()}


def _by_shape(name: str, shape: tuple[int, ...], dtype: int) -> Array:
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    if kind.name in DRAWN_MAGNITUDES or kind == np.bool_:
        return _draw(name, np.zeros(shape, kind), 0)
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return np.asarray(random.integers(0, 2, shape)).astype(kind)


def draws(unfused: UnfusedGraph, part: Part, given: Feeds, *, runs: bool) -> Iterator[tuple[str, Feeds]]:
    """Yield named sets of operand values: `given`, if a run computed them; then random values, small and then large.

    If operands are masks, draws with fully masked rows follow.  Integers keep the values of the run, and so do tensors
    that only the replaced nodes read.  If such a tensor is floating-point, nothing is drawn, because the tensor could
    be computed from an operand.  If the fused node is a region, constants of one element keep their values, because
    its attribute `program`, the list of its operators, can contain copies of these constants.
    """
    if runs:
        yield "the values of a run", given
    others = [name for name in part.leaves if name not in part.operands]
    if any(given[name].dtype.name in FLOAT_NAMES for name in others):
        return
    may_copy = any(attribute.name == "program" for attribute in part.fused.attribute)
    kept = {name for name, value in given.items() if may_copy and name in unfused.constants and value.size == 1}
    first: Feeds = {}
    for index, what in enumerate(("drawn values", "large drawn values")):
        drawn = {
            name: _draw(name, value, 0 if name in part.tables else index)
            for name, value in given.items()
            if name in part.operands and name not in kept
        }
        drawn |= {name: repeat_columns(drawn[name], columns) for name, columns in part.repeated.items()}
        first = first or drawn
        yield what, {**given, **drawn}
    for feeds in with_mask_rows({**given, **first}, _masks(unfused, part, given)):
        yield LEAVE_NOTHING, feeds


def _masks(unfused: UnfusedGraph, part: Part, given: Feeds) -> dict[str, Mask]:
    """Return, by name, the operands that mask elements of a row, such as the keys of attention."""
    may_mask = (name for name in part.operands if name not in unfused.ordinary)
    floats = [name for name in may_mask if given[name].dtype.name in FLOAT_NAMES]
    masks: dict[str, Mask] = dict.fromkeys(added_to_scores_by(part.replaced, floats), "added")
    return masks | {name: "flags" for name in part.operands if given[name].dtype == np.bool_}


def _draw(name: str, like: Array, size: int) -> Array:
    random = np.random.default_rng([zlib.crc32(name.encode()), size])
    dtype = like.dtype.name
    if dtype == "bool":
        bits = random.random(like.shape) < 0.5
        if like.ndim:
            bits[..., :1] = True  # every row of a mask keeps at least one element
        return np.asarray(bits)
    if dtype not in DRAWN_MAGNITUDES:
        return like
    block = random.standard_normal(min(like.size, DRAWN_BLOCK), np.float32) * DRAWN_MAGNITUDES[dtype][size]
    return np.resize(block.astype(like.dtype), like.shape)
