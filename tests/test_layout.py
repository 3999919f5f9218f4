"""The algebra of Reshape, Transpose and Expand, against what numpy does to an array of indices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.shapes.dims import Size, symbol
from onnxfuse.shapes.layout import (
    Arrangement,
    Atom,
    Layout,
    arranged,
    expand,
    identity,
    merged,
    parse_arrangement,
    reshape,
    select,
    solve,
    transpose,
)

B, S, H = symbol("b"), symbol("s"), symbol("h")


# --- chains of moves ---------------------------------------------------------------------------------------------

Chain = tuple[Layout | None, np.ndarray]  # the layout, None once sizes did not tell, and the indices that it stands for
SHAPES = [(2, 3, 4), (6, 4), (12, 2), (2, 1, 12), (4, 3, 2), (24,), (2, 2, 6), (1, 8, 3), (3, 8)]


@st.composite
def chains(draw: st.DrawFn, shape: tuple[int, ...] | None = None, expands: bool = True) -> Chain:
    """A chain of up to five moves of an array of 24 elements."""
    shape = shape or draw(st.sampled_from(SHAPES))
    layout: Layout | None = identity(shape)
    indices = np.arange(math.prod(shape)).reshape(shape)
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["reshape", "transpose", "expand" if expands else "reshape"]))
        if kind == "transpose":
            perm = draw(st.permutations(range(indices.ndim)))
            layout, indices = layout and transpose(layout, perm), indices.transpose(perm)
        elif kind == "reshape":
            target = draw(splits(indices.size))
            layout, indices = layout and reshape(layout, target), indices.reshape(target)
        elif indices.size < 200:
            target = tuple(draw(st.sampled_from([1, 2, 3])) if size == 1 else size for size in indices.shape)
            target = (*draw(st.sampled_from([(), (1,), (2,)])), *target)
            layout, indices = layout and expand(layout, target), np.broadcast_to(indices, target)
        if layout is None:
            break
    return layout, indices


@st.composite
def splits(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """A shape with that many elements."""
    shape = []
    while size > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0])))
        size //= shape[-1]
    return (*shape, size)


def index_map(layout: Layout, source: tuple[int, ...]) -> np.ndarray:
    """For each element of the result its place in the source, counted in C order."""
    weights = [math.prod(source[i + 1 :]) for i in range(len(source))]
    flat = [
        sum(
            np.arange(atom.size).reshape([-1 if j == i else 1 for j in range(len(axis))])
            * (0 if atom.axis is None else atom.stride * weights[atom.axis])
            for i, atom in enumerate(axis)
        )
        for axis in layout
    ]
    sizes = [math.prod(atom.size for atom in axis) for axis in layout]
    result = np.zeros(sizes, int)
    for i, part in enumerate(flat):
        result = result + np.broadcast_to(part, [a.size for a in layout[i]]).reshape(
            [-1 if j == i else 1 for j in range(len(layout))]
        )
    return result


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.sampled_from(SHAPES).flatmap(lambda shape: st.tuples(st.just(shape), chains(shape))))
def test_a_layout_tells_where_every_element_comes_from(case: tuple[tuple[int, ...], Chain]) -> None:
    shape, (layout, indices) = case
    if layout is not None:
        np.testing.assert_array_equal(index_map(layout, shape), indices)
        np.testing.assert_array_equal(index_map(merged(layout), shape), indices)


@settings(derandomize=True, max_examples=600, deadline=None)
@given(st.sampled_from(SHAPES).flatmap(lambda shape: st.tuples(chains(shape), chains(shape))))
def test_layouts_are_equal_exactly_when_the_index_maps_are(case: tuple[Chain, Chain]) -> None:
    (one, first), (other, second) = case
    if one is not None and other is not None:
        same = first.shape == second.shape and bool((first == second).all())
        assert (merged(one) == merged(other)) == same


@settings(derandomize=True, max_examples=200, deadline=None)
@given(chains(expands=False))
def test_merging_all_axes_and_splitting_them_again_changes_nothing(case: Chain) -> None:
    layout, indices = case
    if layout is not None:
        flat = reshape(layout, (indices.size,))
        assert flat is not None
        back = reshape(flat, indices.shape)
        assert back is not None
        assert merged(back) == merged(layout)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.data())
def test_what_is_selected_lies_where_its_layout_begins(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    layout, indices = data.draw(chains(shape))
    axis = data.draw(st.integers(0, indices.ndim - 1))
    start = data.draw(st.integers(0, indices.shape[axis] - 1))
    count = data.draw(st.integers(1, indices.shape[axis] - start))
    found = None if layout is None else select(layout, axis, start, count)
    if found is not None:
        begin = sum(more * math.prod(shape[place + 1 :]) for place, more in found[1].items())
        np.testing.assert_array_equal(
            index_map(found[0], shape) + begin, indices.take(range(start, start + count), axis)
        )


@pytest.mark.parametrize(
    ("shape", "axis", "start", "size", "layout", "begins"),
    [
        ((B, S, 48), 2, 16, 16, ((0, 1, B), (1, 1, S), (2, 1, 16)), {2: 16}),
        ((B, S, 48), 2, 47, 1, ((0, 1, B), (1, 1, S), None), {2: 47}),
        ((B, 4), 0, 1, 2, ((0, 1, 2), (1, 1, 4)), {0: 1}),
        ((1, 4), 0, 0, 1, (None, (1, 1, 4)), {}),
        ((1, 4), 0, 1, 1, None, {}),  # beyond the end
    ],
)
def test_select(
    shape: tuple[Size, ...], axis: int, start: int, size: int, layout: tuple[object, ...] | None, begins: dict[int, int]
) -> None:
    wanted = layout and tuple(() if atom is None else (Atom(*atom),) for atom in layout)  # type: ignore[misc]
    assert select(identity(shape), axis, start, size) == (wanted and (wanted, begins))


def test_of_heads_within_a_row_one_part_each_is_selected() -> None:
    heads = reshape(identity((B, S, 6 * 24)), (B, S, 6, 3, 8))
    assert heads is not None
    found = select(heads, 3, 1, 1)
    assert found == (((Atom(0, 1, B),), (Atom(1, 1, S),), (Atom(2, 24, 6),), (), (Atom(2, 1, 8),)), {2: 8})


def test_a_split_across_axes_that_are_apart_is_left_undecided() -> None:
    turned = transpose(identity((4, 6)), (1, 0))
    assert reshape(turned, (4, 6)) is None
    assert reshape(turned, (3, 8)) is not None
    assert reshape(turned, (5, 5)) is None


def test_an_expanded_axis_repeats_one_element() -> None:
    assert expand(identity((3, 1)), (2, 3, 5)) == ((Atom(None, 0, 2),), (Atom(0, 1, 3),), (Atom(None, 0, 5),))


# --- symbolic sizes ----------------------------------------------------------------------------------------------


def test_heads_are_split_off_a_symbolic_sequence() -> None:
    split = reshape(identity((B, S, H * 64)), (B, S, H, 64))
    assert split == ((Atom(0, 1, B),), (Atom(1, 1, S),), (Atom(2, 64, H),), (Atom(2, 1, 64),))
    moved = transpose(split, (0, 2, 1, 3))
    assert reshape(moved, (B * H, S, 64)) == ((Atom(0, 1, B), Atom(2, 64, H)), (Atom(1, 1, S),), (Atom(2, 1, 64),))
    assert merged(reshape(transpose(moved, (0, 2, 1, 3)), (B, S, H * 64)) or ()) == identity((B, S, H * 64))


def test_a_symbol_that_does_not_divide_leaves_the_reshape_undecided() -> None:
    assert reshape(identity((B, 12)), (S, 12)) is None
    assert reshape(identity((B, 12)), (B * 2, 6)) == ((Atom(0, 1, B), Atom(1, 6, 2)), (Atom(1, 1, 6),))
    assert reshape(identity((B * S,)), (B, S)) == ((Atom(0, S, B),), (Atom(0, 1, S),))
    assert reshape(identity((B + 1, 4)), (4, B + 1)) is None


# --- einops patterns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "extra", "source", "result"),
    [
        ("b s (h d) -> b h s d", 0, (("b",), ("s",), ("h", "d")), (("b",), ("h",), ("s",), ("d",))),
        ("b 1 s -> b s", 0, (("b",), (), ("s",)), (("b",), ("s",))),
        ("... k -> (...) k", 2, (("...0",), ("...1",), ("k",)), (("...0", "...1"), ("k",))),
        ("... k -> (...) k", 0, (("k",),), ((), ("k",))),
        ("k n->n k", 0, (("k",), ("n",)), (("n",), ("k",))),
        ("h -> (h r)", 0, (("h",),), (("h", "r"),)),
    ],
)
def test_parse(pattern: str, extra: int, source: tuple[object, ...], result: tuple[object, ...]) -> None:
    assert parse_arrangement(pattern, extra) == Arrangement(source, result)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "source", "result", "known", "sizes"),
    [
        ("b s (h d) -> b h s d", (2, 5, 12), (2, 3, 5, 4), {}, {"b": 2, "s": 5, "h": 3, "d": 4}),
        ("b s (h d) -> b h s d", (2, 5, 12), (2, 3, 5, 4), {"h": 4}, None),
        ("b s (h d) -> b h s d", (2, 5, 13), (2, 3, 5, 4), {}, None),
        ("b (h d) -> (b h) d", (2, 12), (6, 4), {}, {"b": 2, "d": 4, "h": 3}),
        ("(a b) -> (b a)", (6,), (6,), {}, None),
        ("(a b) -> (b a)", (6,), (6,), {"a": 2}, {"a": 2, "b": 3}),
        ("b (h d) -> b h d", (B, H * 8), (B, H, 8), {}, {"b": B, "h": H, "d": 8}),
        ("b (h d) -> b h d", (B, H * 8), (S, H, 8), {}, None),
        ("(b s) d -> b s d", (B * S, 8), (B, S, 8), {}, {"b": B, "s": S, "d": 8}),
        ("h d -> (h r) d", (2, 4), (6, 4), {}, {"h": 2, "d": 4, "r": 3}),
        ("b 1 d -> b d", (2, 1, 4), (2, 4), {}, {"b": 2, "d": 4}),
        ("b 1 d -> b d", (2, 3, 4), (2, 4), {}, None),
    ],
)
def test_solve(
    pattern: str, source: tuple[Size, ...], result: tuple[Size, ...], known: dict[str, Size], sizes: object
) -> None:
    assert solve(parse_arrangement(pattern), source, result, known) == sizes


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.permutations(["b", "s", "h", "d"]), st.lists(st.integers(1, 3), min_size=4, max_size=4), st.data())
def test_an_arrangement_is_what_its_moves_are(order: list[str], numbers: list[int], data: st.DataObject) -> None:
    sizes = dict(zip("bshd", numbers, strict=True))
    cuts = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    groups = [[order[0]]]
    for name, joined in zip(order[1:], cuts, strict=True):
        groups[-1].append(name) if joined else groups.append([name])
    pattern = "b s (h d) -> " + " ".join(f"({' '.join(group)})" for group in groups)
    split = reshape(identity((sizes["b"], sizes["s"], sizes["h"] * sizes["d"])), [sizes[name] for name in "bshd"])
    assert split is not None
    moved = transpose(split, ["bshd".index(name) for name in order])
    whole = reshape(moved, [math.prod(sizes[name] for name in group) for group in groups])
    assert whole is not None
    assert arranged(parse_arrangement(pattern), sizes) == merged(whole)


def test_repeated_heads_are_expanded_ones() -> None:
    sizes: dict[str, Size] = {"b": B, "h": 2, "r": 3, "s": S, "d": 4}
    kept: Layout = identity((B, 2, 1, S, 4))
    repeated = reshape(expand(kept, (B, 2, 3, S, 4)), (B, 6, S, 4))
    assert repeated is not None
    found = arranged(parse_arrangement("b h 1 s d -> b (h r) s d"), sizes)
    assert found == merged(repeated)
