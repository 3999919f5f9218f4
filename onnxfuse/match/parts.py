"""What chains of views, Slices, Splits and Gathers take of a tensor, and whether a pattern's part is that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from onnxfuse.model.graph import Node, Tensor, op_of
from onnxfuse.shapes import layout as layouts
from onnxfuse.shapes.cuts import CUTS, taken
from onnxfuse.shapes.dims import Size, product
from onnxfuse.shapes.rules import Undecided

if TYPE_CHECKING:
    from onnxfuse.match.matcher import Matcher


def moved(m: Matcher, layout: layouts.Layout | None, node: Node) -> layouts.Layout | None:
    """The layout after a view; None where sizes do not tell it."""
    after = m.shapes.shape(node.outputs[0])
    if layout is None or after is None:
        return None
    match op_of(node):
        case "Transpose":
            return layouts.transpose(layout, node.attrs.get("perm") or range(len(after))[::-1])
        case "Expand":
            return layouts.expand(layout, after)
        case "Reshape" | "Squeeze" | "Unsqueeze" | "Flatten":
            return layouts.reshape(layout, after)
    return layout


def part_of(
    m: Matcher,
    arrangement: layouts.Arrangement,
    source: Tensor,
    chain: Sequence[Node],
    tensor: Tensor,
    known: Mapping[str, Size],
) -> tuple[dict[str, Size], int, int | None] | None:
    """(sizes, offset, pitch) with which the tensor is an arrangement of a part of the source; None where it is none.

    See `part` in dsl.py; the pitch is None where the runs lie side by side.
    """
    start, end = m.shapes.shape(source), m.shapes.shape(tensor)
    assert start is not None and end is not None
    axis, found = len(start) - 1, _place(m, start, chain, tensor)
    if axis < 0 or found is None or any(begin for place, begin in found[1].items() if place != axis):
        return None
    layout, offset = layouts.merged(found[0]), found[1].get(axis, 0)
    runs = [atom for atoms in layout for atom in atoms if atom.axis == axis]
    sizes = layouts.solve(arrangement, (*start[:-1], product([atom.size for atom in runs])), end, known)
    last = arrangement.source[-1]
    if sizes is None or not last:
        return None
    whole, run, count = start[-1], sizes[last[-1]], product([sizes[name] for name in last[:-1]])
    if not (isinstance(whole, int) and isinstance(run, int) and isinstance(count, int)):
        return None
    if layouts.arranged(arrangement, sizes) == layout:
        return sizes, offset, None
    for pitch in (atom.stride for atom in runs if isinstance(atom.stride, int)):
        if _fits(whole, offset, count, run, pitch) and layouts.arranged(arrangement, sizes, pitch) == layout:
            return sizes, offset, pitch
    return None


def _fits(whole: int, offset: int, count: int, run: int, pitch: int) -> bool:
    """Whether so many runs lie within an axis that is made of blocks of `pitch` elements, one in a block."""
    block, begin = divmod(offset, pitch)
    return whole % pitch == 0 and block + count <= whole // pitch and begin + run <= pitch


def _place(
    m: Matcher, shape: Sequence[Size], chain: Sequence[Node], tensor: Tensor
) -> tuple[layouts.Layout, dict[int, int]] | None:
    """Where the chain's result lies in a source of that shape, and how far from its beginning on each axis."""
    layout: layouts.Layout | None = layouts.identity(shape)
    begins: dict[int, int] = {}
    for node, after in zip(chain, (*chain[1:], None), strict=True):
        if op_of(node) not in CUTS:
            layout = moved(m, layout, node)
            continue
        made = tensor if after is None else next(t for t in node.outputs if any(t is read for read in after.inputs))
        try:
            cut = taken(m.shapes, node, made)
        except Undecided:
            return None
        for axis, (first, count) in cut.items():
            selected = None if layout is None else layouts.select(layout, axis, first, count)
            if selected is None:
                return None
            layout = selected[0]
            begins |= {axis: begins.get(axis, 0) + more for axis, more in selected[1].items()}
        if layout is not None and op_of(node) == "Gather" and m.shapes.rank(node.inputs[1]) == 0:
            (axis,) = cut
            layout = (*layout[:axis], *layout[axis + 1 :])
    return None if layout is None else (layout, begins)
