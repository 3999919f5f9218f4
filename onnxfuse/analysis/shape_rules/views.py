"""Shape rules of operators that regroup or permute axes, and keep all elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxfuse.algebra.bounds import limited_sizes, lower_bound, without_min_constants
from onnxfuse.algebra.index_maps import squeezed, transposed, unsqueezed
from onnxfuse.algebra.sizes import Shape, Size, cancelled, divide, product
from onnxfuse.algebra.view_layouts import identity, reshape
from onnxfuse.analysis.rules import (
    RuleTable,
    ShapeRule,
    axes_parameter,
    input_shape,
    integers,
    normalize_axis,
    shape_of_known_rank,
)
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.ir.attributes import flag_attribute, int_attribute, perm_of
from onnxfuse.ir.node import Node

RULES = RuleTable[ShapeRule]()


@RULES.rule("Transpose")
def _transpose(shapes: ShapeInfo, node: Node) -> Shape:
    shape = input_shape(shapes, node)
    return transposed(shape, perm_of(node, len(shape)))


@RULES.rule("Reshape")
def _reshape(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    try:
        found = integers(shapes, node, "shape")
    except CannotInfer:
        return shape_of_known_rank(shapes, node, 1)
    if found is None:
        raise CannotInfer
    source = shapes.shape(node.inputs[0])
    target: list[Size | None] = list(found)
    if not flag_attribute(node, "allowzero", False):
        target = [_copied_size(source, i) if size == 0 else size for i, size in enumerate(target)]
    if -1 not in target:
        return tuple(target)
    others = [size for size in target if size is not None and size != -1]
    is_known = source is not None and None not in target
    missing = _remaining_size(shapes, source or (), others) if is_known else None
    result = tuple(missing if size == -1 else size for size in target)
    return _if_empty(shapes, node, source, found, result)


def _copied_size(source: Shape | None, axis: int) -> Size | None:
    if source is not None and axis >= len(source):  # such a Reshape does not run
        raise CannotInfer
    return None if source is None else source[axis]


def _if_empty(
    shapes: ShapeInfo, node: Node, source: Shape | None, target: Sequence[Size], result: Sequence[Size | None]
) -> tuple[Size | None, ...]:
    """Return the shape after a Reshape to a target with a -1; sizes that an empty axis could change become unknown.

    For example, the target [-1, n] reshapes (n, 2) to (2, n); but if n is 0, it reshapes (0, 2) to (0, 2), because a 0
    in the target copies the size of the source's axis.  If the -1 joins or splits axes, as [-1, seq, 8] does with
    (batch, heads, seq, 8), empty axes are ignored: exported models rely on the usual result, and fail for empty axes.
    """
    usual = [size for size in result if size is not None]
    is_regrouped = len(usual) == len(result) and reshape(identity(source or ()), usual) is not None
    if is_regrouped or tells_empty_axes(node, target, source):
        return tuple(result)
    is_exact = flag_attribute(node, "allowzero", False)
    key = (node.inputs[1].name, source, is_exact) if len(node.inputs) > 1 and source else (node.outputs[0].name,)
    return tuple(
        size if given != -1 and (is_exact or _copies_empty(given, source, i)) else shapes.unknown(*key, i)
        for i, (size, given) in enumerate(zip(result, target, strict=True))
    )


def tells_empty_axes(reshape: Node, target: Sequence[Size], source: Shape | None) -> bool:
    """Return whether a Reshape with a -1 in its target fails, or gives the inferred sizes, if its input is empty.

    With `allowzero`, onnxruntime computes the size at the -1 as the element count divided by the product of the nonzero
    sizes, so each target size that may be 0 must also be a size of the source.
    """
    if flag_attribute(reshape, "allowzero", False):
        rest, divisors = cancelled(source or (), [size for size in target if size != -1])
        return source is not None and all(map(_is_never_empty, (*rest, *divisors)))
    return all(_copies_empty(size, source, axis) for axis, size in enumerate(target))


def _copies_empty(size: Size, source: Shape | None, axis: int) -> bool:
    """Return whether a target size is never 0, or is 0 only if the source's axis of the same index is empty, too.

    In the second case, the 0 in the target is correct, because it copies the size of this axis.
    """
    if isinstance(size, int) or _is_never_empty(size):
        return True
    if source is None or axis >= len(source):  # the Reshape fails where the source has no such axis
        return source is not None
    return divide(source[axis], size) is not None or isinstance(divide(size, source[axis]), int)


def _is_never_empty(size: Size) -> bool:
    return (lower_bound(size) or 0) > 0


def _remaining_size(shapes: ShapeInfo, shape: Shape, others: Sequence[Size]) -> Size | None:
    """Return the element count of a shape divided by other sizes; None if it is not divisible or not known.

    Equal sizes cancel first, even unknown ones.
    """
    rest, divisors = cancelled(shape, others)
    if 0 in divisors:
        return None
    shapes.not_limited.update(_cannot_be_limited(product(rest), product(divisors)))
    return divide(product(rest), product(divisors))


def _cannot_be_limited(dividend: Size, divisor: Size) -> Iterator[str]:
    """Yield the `Min` symbols whose limit never applies, because otherwise the divisor would not divide the dividend.

    For example, if `seq` divides `Min(512, seq)`, then seq <= 512: a larger seq does not divide 512.
    """
    names = set(limited_sizes(dividend, least=1))
    is_product = not isinstance(dividend, int) and len(dividend.terms) == 1
    if is_product and names and without_min_constants(dividend, names) == divisor:
        yield from names


@RULES.rule("Flatten")
def _flatten(shapes: ShapeInfo, node: Node) -> Shape:
    shape = input_shape(shapes, node)
    axis = int_attribute(node, "axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return (product(shape[:axis]), product(shape[axis:]))


@RULES.rule("Squeeze")
def _squeeze(shapes: ShapeInfo, node: Node) -> Shape:
    shape = input_shape(shapes, node)
    axes = axes_parameter(shapes, node, len(shape))
    if axes is None:
        if not all(isinstance(size, int) for size in shape):
            raise CannotInfer
        axes = [i for i, size in enumerate(shape) if size == 1]
    return squeezed(shape, axes)


@RULES.rule("Unsqueeze")
def _unsqueeze(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    shape = input_shape(shapes, node)
    found = integers(shapes, node, "axes") or []
    rank = len(shape) + len(found)
    if not all(isinstance(axis, int) for axis in found):
        return (None,) * rank
    return unsqueezed(shape, [normalize_axis(axis, rank) for axis in found], 1)
