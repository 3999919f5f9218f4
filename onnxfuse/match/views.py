"""Match rearrangements with chains of views (Reshape, Transpose, Expand, …), and with slices of a packed last axis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from onnxfuse.algebra import view_layouts as layouts
from onnxfuse.algebra.index_maps import squeezed, transposed
from onnxfuse.algebra.operators import SLICING, VIEWS
from onnxfuse.algebra.sizes import Size, product
from onnxfuse.analysis.shape_info import CannotInfer
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.dsl.terms import Capture, Rearrange
from onnxfuse.ir.attributes import perm_of
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.match.context import MatchContext
from onnxfuse.match.diagnostics import Agreed, arranged_axes_text, shape_text
from onnxfuse.match.named_dims import arranged_axes_fit, fitted_arrangement, has_axes_of
from onnxfuse.match.scaling import scale_step
from onnxfuse.match.state import State

REPEATING: Final = VIEWS | {"Tile"}


class ViewSource(NamedTuple):
    """A tensor that another one is a view of."""

    tensor: Tensor
    nodes: list[Node]  # the nodes from the source to the view
    factor: float  # the product of the constant factors of the nodes


class ViewSources:
    """A cache of the sources of tensors, while matching at one tensor."""

    def __init__(self, m: MatchContext) -> None:
        self._m = m
        self._known: dict[tuple[int, bool, bool], Sequence[ViewSource]] = {}

    def forget(self) -> None:
        """Clear the cache, before matching at another tensor."""
        self._known.clear()

    def of(self, tensor: Tensor, *, scaling: bool, slicing: bool) -> Sequence[ViewSource]:
        """Return the tensor itself and the tensors that it is a view of, nearest first.

        With `scaling`, the nodes between the tensor and a source can also multiply by numbers; with `slicing`, they can
        also take slices.
        """
        key = id(tensor), scaling, slicing
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = list(self._follow(tensor, scaling, slicing))
        return known

    def _follow(self, tensor: Tensor, scaling: bool, slicing: bool) -> Iterator[ViewSource]:
        m, nodes, factor = self._m, list[Node](), 1.0
        while True:
            yield ViewSource(tensor, nodes[::-1], factor)
            node = producer(tensor)
            if node is None:
                return
            if op_of(node) in REPEATING or (m.casts and m.float_cast(tensor)) or (slicing and op_of(node) in SLICING):
                tensor = node.inputs[0]
            elif scaling and (step := scale_step(m, node)) is not None:
                tensor, factor = step[0], factor * step[1]
            else:
                return
            nodes.append(node)


def match_rearrange(
    m: MatchContext, sources: ViewSources, term: Rearrange, tensor: Tensor, state: State
) -> Iterator[State]:
    """Yield the state after each way to match a tensor with a rearranged value.

    The value can be `tensor`, or any tensor that `tensor` is a view of.  The one most views away is tried first.
    """
    inner, pattern, value = term.inner, term.pattern, term.inner.unwrapped
    arranged, nearest_source = False, tensor
    if isinstance(value, Capture) and value.kind == "weight":
        farthest = sources.of(tensor, scaling=False, slicing=False)[-1].tensor
        if not is_constant(farthest):
            m.fail(term, state, lambda: f"'{tensor.name}' is computed; required a constant for {value.name}")
            return
    candidates = sources.of(tensor, scaling=state.factor is not None, slicing=term.slice_name is not None)
    for view in reversed(candidates):
        source, nodes, factor = view
        if not m.fits(inner, source) or (isinstance(value, Capture) and _is_rounded(m, source, nodes)):
            continue
        after = _arrange(m, term, view, tensor, state)
        if after is None:
            nearest_source = source
            continue
        arranged = True
        after = after._replace(factor=None if state.factor is None else state.factor * factor)
        keep = isinstance(value, Capture) or m.is_output(value)  # true if the source stays in the graph
        fits = False
        for inside in m.match(inner, source, after.with_nodes(nodes, keep=keep)):
            fits = True
            yield inside
        if fits:
            return  # a nearer source would only leave more views in the graph
    if not arranged:
        shape = m.shapes.shape(tensor)
        is_like = shape is None or has_axes_of(pattern.partition("->")[2], len(shape))
        agreed: Agreed = "a part" if is_like else "nothing"
        m.fail(term, state, lambda: _not_arranged(m, pattern, tensor, nearest_source, state), agreed=agreed)


def _is_rounded(m: MatchContext, source: Tensor, nodes: Sequence[Node]) -> bool:
    """Return whether a Cast in `nodes` rounds the source; the pattern's operand is then the Cast's result."""
    casts = [node for node in nodes if op_of(node) == "Cast" and not m.is_to_float32(node)]
    return any(m.shapes.dtype(cast.outputs[0]) != m.shapes.dtype(source) for cast in casts)


def _not_arranged(m: MatchContext, pattern: str, tensor: Tensor, source: Tensor, state: State) -> str:
    shape, axes = m.shapes.shape(tensor), pattern.partition("->")[2].strip()
    if shape is not None and not arranged_axes_fit(axes, shape, state.dims):
        return f"'{tensor.name}' has shape ({shape_text(shape)}); required ({arranged_axes_text(axes, state.dims)})"
    sentence = f"'{tensor.name}' ({shape_text(shape)}) is not made by {pattern}"
    return sentence if source is tensor else f"{sentence} of '{source.name}' ({shape_text(m.shapes.shape(source))})"


def _arrange(m: MatchContext, term: Rearrange, view: ViewSource, tensor: Tensor, state: State) -> State | None:
    """Return the state with the sizes (and a slice, if any) that make the arrangement give the tensor.

    Returns None if the term's arrangement of the view's source does not give the tensor.
    """
    source, nodes, _ = view
    pattern, slice_name = term.pattern, term.slice_name
    start, end = m.shapes.shape(source), m.shapes.shape(tensor)
    if start is None or end is None:
        return None
    arrangement = fitted_arrangement(pattern, len(start), len(end))
    if arrangement is None:
        return None
    known = {name: size for name, size in state.dims.items() if name != "..."}
    known |= {f"...{i}": size for i, size in enumerate(state.dims.get("...", ()))}
    if slice_name is not None and any(op_of(node) in SLICING for node in nodes):
        found = packed_slice(m, arrangement, source, nodes, tensor, known)
        return None if found is None else _with_packed_slice(pattern, arrangement, slice_name, found, start[-1], state)
    sizes = layouts.solve_sizes(arrangement, start, end, known)
    if sizes is None:
        return None
    if nodes or arrangement.source != arrangement.result:  # otherwise no axis moves
        layout: layouts.ViewLayout | None = layouts.identity(start)
        for node in nodes:
            layout = _layout_after(m, layout, node)
        if layout is None or layouts.arrangement_layout(arrangement, sizes) != layouts.coalesce(layout):
            return None
    return _with_sizes(pattern, arrangement, sizes, state)


def _with_sizes(
    pattern: str, arrangement: layouts.Arrangement, sizes: Mapping[str, Size], state: State
) -> State | None:
    """Return the state with the sizes of an arrangement; None if "..." is bound to other sizes already."""
    dims = {name: size for name, size in sizes.items() if not name.startswith("...")}
    if "..." in pattern:
        count = sum(name.startswith("...") for axis in arrangement.source for name in axis)
        leading = tuple(sizes[f"...{i}"] for i in range(count))
        if state.dims.get("...", leading) != leading:
            return None
        return state._replace(dims={**dims, "...": leading})
    return state._replace(dims={**dims, **({"...": state.dims["..."]} if "..." in state.dims else {})})


def _layout_after(m: MatchContext, layout: layouts.ViewLayout | None, node: Node) -> layouts.ViewLayout | None:
    """Return the layout after a view; None if the sizes do not determine it."""
    after = m.shapes.shape(node.outputs[0])
    if layout is None or after is None:
        return None
    match op_of(node):
        case "Transpose":
            return transposed(layout, perm_of(node, len(after)))
        case "Expand":
            return layouts.expand(layout, after)
        case "Tile":
            return layouts.tile(layout, after)
        case "Reshape" | "Squeeze" | "Unsqueeze" | "Flatten":
            return layouts.reshape(layout, after)
    return layout


# --- slices of a packed last axis --------------------------------------------------------------------------------


class FoundSlice(NamedTuple):
    """A slice of a last axis, which a pattern matches as "(a b)": `a` runs of `b` adjacent elements."""

    sizes: dict[str, Size]  # sizes of the names in the arrangement
    offset: int  # elements before the first run
    pitch: int | None  # elements from the start of one run to the start of the next; None if runs are adjacent


def _with_packed_slice(
    pattern: str, arrangement: layouts.Arrangement, name: str, found: FoundSlice, width: Size, state: State
) -> State | None:
    """Return the state with the attributes that describe a slice; None if they are bound to other values already."""
    numbers = {f"{name}_offset": found.offset, **({} if found.pitch is None else {f"{name}_pitch": found.pitch})}
    if any(state.values.get(key, number) != number for key, number in numbers.items()):
        return None
    sizes = found.sizes if found.pitch is None else {**found.sizes, f"{name}_blocks": width // found.pitch}
    return _with_sizes(pattern, arrangement, sizes, state._replace(values={**state.values, **numbers}))


def packed_slice(
    m: MatchContext,
    arrangement: layouts.Arrangement,
    source: Tensor,
    chain: Sequence[Node],
    tensor: Tensor,
    known: Mapping[str, Size],
) -> FoundSlice | None:
    """Return the slice of the source's last axis that, once arranged, equals the tensor; None if there is none."""
    start, end = m.shapes.shape(source), m.shapes.shape(tensor)
    assert start is not None and end is not None
    axis, found = len(start) - 1, _layout_and_offsets(m, start, chain, tensor)
    if axis < 0 or found is None or any(offset for other, offset in found[1].items() if other != axis):
        return None
    layout, offset = layouts.coalesce(found[0]), found[1].get(axis, 0)
    runs = [sub_axis for axes in layout for sub_axis in axes if sub_axis.axis == axis]
    sizes = layouts.solve_sizes(arrangement, (*start[:-1], product([run.size for run in runs])), end, known)
    last = arrangement.source[-1]
    if sizes is None or not last:
        return None
    width, run, count = start[-1], sizes[last[-1]], product([sizes[name] for name in last[:-1]])
    if not (isinstance(width, int) and isinstance(run, int) and isinstance(count, int)):
        return None
    if layouts.arrangement_layout(arrangement, sizes) == layout:
        return FoundSlice(sizes, offset, None)
    for pitch in (each.stride for each in runs if isinstance(each.stride, int)):
        fits = _is_within(width, offset, count, run, pitch)
        if fits and layouts.arrangement_layout(arrangement, sizes, pitch) == layout:
            return FoundSlice(sizes, offset, pitch)
    return None


def _is_within(width: int, offset: int, count: int, run: int, pitch: int) -> bool:
    """Return whether `count` runs fit into an axis of `width` elements, one run in each block of `pitch` elements."""
    block, begin = divmod(offset, pitch)
    return width % pitch == 0 and block + count <= width // pitch and begin + run <= pitch


def _layout_and_offsets(
    m: MatchContext, shape: Sequence[Size], chain: Sequence[Node], tensor: Tensor
) -> tuple[layouts.ViewLayout, dict[int, int]] | None:
    """Return the layout of the chain's result, and for each sliced axis of the source the first index that is kept."""
    layout: layouts.ViewLayout | None = layouts.identity(shape)
    offsets: dict[int, int] = {}
    for node, after in zip(chain, (*chain[1:], None), strict=True):
        if op_of(node) not in SLICING:
            layout = _layout_after(m, layout, node)
            continue
        made = tensor if after is None else next(t for t in node.outputs if any(t is read for read in after.inputs))
        try:
            ranges = slice_ranges(m.shapes, node, made)
        except CannotInfer:
            return None
        for axis, (first, count) in ranges.items():
            selected = None if layout is None else layouts.select(layout, axis, first, count)
            if selected is None:
                return None
            layout = selected[0]
            offsets |= {axis: offsets.get(axis, 0) + more for axis, more in selected[1].items()}
        if layout is not None and op_of(node) == "Gather" and m.shapes.rank(node.inputs[1]) == 0:
            (axis,) = ranges
            layout = squeezed(layout, (axis,))
    return None if layout is None else (layout, offsets)
