"""Rearrangements and scalings against chains of nodes that only move or scale values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from onnxfuse.language.terms import Capture, Part, Rearrange, Scaled, bare
from onnxfuse.match.names import fitted
from onnxfuse.match.parts import moved, part_of
from onnxfuse.match.state import State
from onnxfuse.match.words import VIEWS, shape_text
from onnxfuse.model.graph import Node, Tensor, is_constant, op_of, producer
from onnxfuse.shapes import layout as layouts
from onnxfuse.shapes.cuts import CUTS
from onnxfuse.shapes.dims import Size as DimSize

if TYPE_CHECKING:
    from onnxfuse.match.matcher import Matcher

Source: TypeAlias = tuple[Tensor, list[Node], float]  # what is viewed, the nodes from it, the factor on the way


def match_rearrange(m: Matcher, term: Rearrange, tensor: Tensor, state: State) -> Iterator[State]:
    """Every way to read a tensor as a rearrangement; the farthest source first."""
    keep = isinstance(bare(term.inner), Capture) or m.is_output(term.inner)  # what is viewed will be there
    part = term.inner.name if isinstance(term.inner, Part) else None
    found = False
    inner = bare(term.inner)
    farthest = _sources(m, tensor, False, False)[-1][0]
    if isinstance(inner, Capture) and inner.kind == "weight" and not is_constant(farthest):
        m.fail(term, state, lambda: f"'{tensor.name}' is computed; required a constant for {inner.name}")
        return
    for source, nodes, factor in reversed(_sources(m, tensor, state.factor is not None, part is not None)):
        if not m.fits(term.inner, source):  # the cheaper question first
            continue
        after = _arrangement(m, term.pattern, source, nodes, tensor, part, state)
        if after is None:
            continue
        found = True
        after = after._replace(factor=None if state.factor is None else state.factor * factor)
        fits = False
        for inside in m.match(term.inner, source, after.with_nodes(nodes, keep=keep)):
            fits = True
            yield inside
        if fits:
            return  # the farthest source is the one to read; a nearer one would only keep the views
    if not found:
        shape = m.shapes.shape(tensor)
        m.fail(term, state, lambda: f"'{tensor.name}' ({shape_text(shape)}) is not made by {term.pattern}")


def _sources(m: Matcher, tensor: Tensor, scaling: bool, cutting: bool) -> Sequence[Source]:
    """The tensor itself and what it is a view of, nearest first; once for each tensor while matching at one place."""
    key = id(tensor), scaling, cutting
    known = m.sources.get(key)
    if known is None:
        known = m.sources[key] = list(_follow(m, tensor, scaling, cutting))
    return known


def _follow(m: Matcher, tensor: Tensor, scaling: bool, cutting: bool) -> Iterator[Source]:
    nodes: list[Node] = []
    factor = 1.0
    while True:
        yield tensor, nodes[::-1], factor
        node = producer(tensor)
        if node is None:
            return
        if op_of(node) in VIEWS or (m.casts and m.float_cast(tensor)) or (cutting and op_of(node) in CUTS):
            tensor = node.inputs[0]
        elif scaling and (step := _scale_step(m, node)) is not None:
            tensor, factor = step[0], factor * step[1]
        else:
            return
        nodes.append(node)


def unscaled(m: Matcher, tensor: Tensor, state: State) -> tuple[Tensor, State]:
    """An operand inside scaled(), without the factors that it was multiplied by."""
    factor = state.factor
    nodes: list[Node] = []
    while factor is not None and (node := producer(tensor)) is not None and (step := _scale_step(m, node)) is not None:
        tensor, factor = step[0], factor * step[1]
        nodes.append(node)
    return tensor, state.with_nodes(nodes, keep=True)._replace(factor=factor)


def _unscalable(node: Node) -> str:
    left, right = (t.name for t in node.inputs)
    return f"{op_of(node)} '{node.name}' takes '{left}' and '{right}'; required a constant number as one of them"


def _scale_step(m: Matcher, node: Node) -> tuple[Tensor, float] | None:
    """(x, c) where the node computes x * c or x / (1/c) for a constant number c."""
    if op_of(node) not in ("Mul", "Div") or m.widening(node) is not None:
        return None
    left, right = node.inputs
    value = m.number(right)
    if value is not None:
        if op_of(node) == "Mul":
            return left, value
        return (left, 1 / value) if value else None
    value = m.number(left)
    return (right, value) if value is not None and op_of(node) == "Mul" else None


def _arrangement(
    m: Matcher, pattern: str, source: Tensor, nodes: Sequence[Node], tensor: Tensor, part: str | None, state: State
) -> State | None:
    """The state with the sizes, and the `part`, that make the tensor the arrangement of its source."""
    start, end = m.shapes.shape(source), m.shapes.shape(tensor)
    if start is None or end is None:
        return None
    arrangement = fitted(pattern, len(start), len(end))
    if arrangement is None:
        return None
    known = {name: size for name, size in state.dims.items() if name != "..."}
    leading = {f"...{i}": size for i, size in enumerate(state.dims.get("...", ()))}
    if part is not None and any(op_of(node) in CUTS for node in nodes):
        taken = part_of(m, arrangement, source, nodes, tensor, {**known, **leading})
        if taken is None:
            return None
        part_sizes, offset, pitch = taken
        numbers = {f"{part}_offset": offset, **({} if pitch is None else {f"{part}_pitch": pitch})}
        if any(state.values.get(name, number) != number for name, number in numbers.items()):
            return None
        if pitch is not None:
            part_sizes = {**part_sizes, f"{part}_blocks": start[-1] // pitch}
        return _with_sizes(pattern, arrangement, part_sizes, state._replace(values={**state.values, **numbers}))
    sizes = layouts.solve(arrangement, start, end, {**known, **leading})
    if sizes is None:
        return None
    if nodes or arrangement.source != arrangement.result:  # else nothing moves
        found = _layout(m, start, nodes)
        if found is None or layouts.arranged(arrangement, sizes) != layouts.merged(found):
            return None
    return _with_sizes(pattern, arrangement, sizes, state)


def _with_sizes(
    pattern: str, arrangement: layouts.Arrangement, sizes: Mapping[str, DimSize], state: State
) -> State | None:
    extra = sum(name.startswith("...") for axis in arrangement.source for name in axis)
    dims = {name: size for name, size in sizes.items() if not name.startswith("...")}
    if "..." in pattern:
        dims_leading = tuple(sizes[f"...{i}"] for i in range(extra))
        if state.dims.get("...", dims_leading) != dims_leading:
            return None
        return state._replace(dims={**dims, "...": dims_leading})
    return state._replace(dims={**dims, **({"...": state.dims["..."]} if "..." in state.dims else {})})


def _layout(m: Matcher, shape: Sequence[DimSize], nodes: Sequence[Node]) -> layouts.Layout | None:
    found: layouts.Layout | None = layouts.identity(shape)
    for node in nodes:
        found = moved(m, found, node)
    return found


def match_scaled(m: Matcher, term: Scaled, tensor: Tensor, state: State) -> Iterator[State]:
    """Every way to read a tensor as a value times a number, collected from all around it."""
    factor = 1.0
    nodes: list[Node] = []
    while (node := producer(tensor)) is not None:
        if (step := _scale_step(m, node)) is not None:
            tensor, factor = step[0], factor * step[1]
        elif m.casts and m.float_cast(tensor):
            tensor = node.inputs[0]
        elif op_of(node) in ("Mul", "Div"):
            m.fail(term, state.with_nodes([*nodes, node]), lambda node=node: _unscalable(node))  # type: ignore[misc]
            return
        else:
            break
        nodes.append(node)
    inside = state.with_nodes(nodes)._replace(factor=factor)
    for after in m.match(term.inner, tensor, inside):
        yield from m.value(term.scale, after.factor, after._replace(factor=state.factor))
