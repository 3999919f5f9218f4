"""Compute the shapes that chains of views give where an axis is empty; they can differ from the inferred shapes.

A 0 in the target of a Reshape copies the size of the source's axis.  So a Reshape to [-1, n] gives (n, 6) the shape
(6, n), but if n is 0, the target [-1, 0] gives (0, 6) the shape (0, 6).  No chain of other views gives both shapes, so
no other chain can replace a chain with such a Reshape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from onnxfuse.algebra.index_maps import squeezed, transposed, unsqueezed
from onnxfuse.algebra.sizes import evaluate, symbols
from onnxfuse.analysis.rules import axes_parameter
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.shape_rules.views import tells_empty_axes
from onnxfuse.ir.attributes import flag_attribute, int_attribute, perm_of
from onnxfuse.ir.node import Node, op_of

USUAL_SIZES: Final = (5, 7, 11, 13, 17, 19)  # primes, so that no size is a multiple of another one by chance


def gives_shape_if_empty(shapes: ShapeInfo, chain: Sequence[Node]) -> bool:
    """Return whether a chain of views either fails or gives the inferred shape whenever one dynamic size is 0.

    Two sizes of 0 at the same time are not tried, because exported models themselves then give other shapes than the
    inferred ones.
    """
    if all(_is_plain(shapes, node) for node in chain):
        return True
    source, result = shapes.shape(chain[0].inputs[0]), shapes.shape(chain[-1].outputs[0])
    targets = [shapes.value(node.inputs[1]) for node in chain if op_of(node) == "Reshape"]
    if source is None or result is None or any(target is None for target in targets):
        return True
    sizes = (*source, *(size for target in targets if target is not None for size in target.flat))
    names = sorted({name for size in sizes for name in symbols(size)})
    if len(names) > len(USUAL_SIZES):
        return False
    for empty in names:
        numbers = {name: 0 if name == empty else USUAL_SIZES[i] for i, name in enumerate(names)}
        try:
            shape = [evaluate(size, numbers) for size in source]
            for node in chain:
                shape = _viewed(shapes, node, shape, numbers)
            expected = [evaluate(size, numbers) for size in result]
        except (CannotInfer, IndexError, KeyError, ZeroDivisionError):  # the chain fails at these sizes
            continue
        if shape != expected:
            return False
    return True


def _is_plain(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a view also gives the inferred shape where sizes are 0."""
    target = shapes.value(node.inputs[1]) if op_of(node) == "Reshape" else None
    if target is None:
        return True
    return target.ndim == 1 and tells_empty_axes(node, target.tolist(), shapes.shape(node.inputs[0]))


def _viewed(shapes: ShapeInfo, node: Node, shape: list[int], numbers: Mapping[str, int]) -> list[int]:
    """Return the shape that a view makes of `shape`.  Raises CannotInfer or IndexError for a shape that it rejects."""
    rank = len(shape)
    match op_of(node):
        case "Transpose":
            return list(transposed(shape, perm_of(node, rank)))
        case "Flatten":
            axis = int_attribute(node, "axis", 1) % (rank + 1)
            return [math.prod(shape[:axis]), math.prod(shape[axis:])]
        case "Squeeze":
            found = axes_parameter(shapes, node, rank)
            axes = [i for i, size in enumerate(shape) if size == 1] if found is None else found
            if any(shape[axis] != 1 for axis in axes):
                raise CannotInfer
            return list(squeezed(shape, axes))
        case "Unsqueeze":
            count = len(shapes.shape(node.outputs[0]) or ()) - len(shapes.shape(node.inputs[0]) or ())
            axes = axes_parameter(shapes, node, rank + count) or []
            return list(unsqueezed(shape, axes, 1))
    return _reshaped(shapes, node, shape, numbers)


def _reshaped(shapes: ShapeInfo, node: Node, shape: Sequence[int], numbers: Mapping[str, int]) -> list[int]:
    found = shapes.value(node.inputs[1])
    assert found is not None  # the caller has checked all targets
    target, allows_zero = [evaluate(size, numbers) for size in found.flat], flag_attribute(node, "allowzero", False)
    if not allows_zero:
        target = [shape[i] if size == 0 else size for i, size in enumerate(target)]
    count, others = math.prod(shape), math.prod(size for size in target if size != -1)
    if -1 not in target:
        if others != count:
            raise CannotInfer
        return target
    if allows_zero and others == 0:  # onnxruntime computes the -1 from the sizes that are not 0
        count, others = (math.prod(size for size in part if size and size != -1) for part in (shape, target))
    if others == 0 or count % others:
        raise CannotInfer
    return [count // others if size == -1 else size for size in target]
