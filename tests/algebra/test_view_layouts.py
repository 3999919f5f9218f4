"""The algebra of Reshape, Transpose, Expand and Slice, compared with what numpy does to an array of indices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.algebra.index_maps import transposed
from onnxfuse.algebra.sizes import Size, symbol
from onnxfuse.algebra.view_layouts import (
    Arrangement,
    SubAxis,
    ViewLayout,
    arrangement_layout,
    coalesce,
    expand,
    identity,
    parse_arrangement,
    reshape,
    select,
    solve_sizes,
    tile,
)

B, S, H = symbol("b"), symbol("s"), symbol("h")


# --- chains of views ---------------------------------------------------------------------------------------------

Chain = tuple[ViewLayout | None, np.ndarray]  # the layout, None if not known, and the indices that it describes
SHAPES = [(2, 3, 4), (6, 4), (12, 2), (2, 1, 12), (4, 3, 2), (24,), (2, 2, 6), (1, 8, 3), (3, 8)]


@st.composite
def chains(draw: st.DrawFn, shape: tuple[int, ...] | None = None, expands: bool = True) -> Chain:
    """Draw a chain of up to five views of an array of 24 elements."""
    shape = shape or draw(st.sampled_from(SHAPES))
    layout: ViewLayout | None = identity(shape)
    indices = np.arange(math.prod(shape)).reshape(shape)
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["reshape", "transpose", *(["expand", "tile"] if expands else [])]))
        if kind == "transpose":
            perm = draw(st.permutations(range(indices.ndim)))
            layout, indices = layout and transposed(layout, perm), indices.transpose(perm)
        elif kind == "reshape":
            target = draw(splits(indices.size))
            layout, indices = layout and reshape(layout, target), indices.reshape(target)
        elif kind == "tile" and indices.size < 200:
            indices = np.tile(indices, [draw(st.sampled_from([1, 1, 2, 3])) for _ in indices.shape])
            layout = layout and tile(layout, indices.shape)
        elif indices.size < 200:
            target = tuple(draw(st.sampled_from([1, 2, 3])) if size == 1 else size for size in indices.shape)
            target = (*draw(st.sampled_from([(), (1,), (2,)])), *target)
            layout, indices = layout and expand(layout, target), np.broadcast_to(indices, target)
        if layout is None:
            break
    return layout, indices


@st.composite
def splits(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    """Draw a shape with that many elements."""
    shape = []
    while size > 1 and len(shape) < 4:
        shape.append(draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0])))
        size //= shape[-1]
    return (*shape, size)


def index_map(layout: ViewLayout, source: tuple[int, ...]) -> np.ndarray:
    """Return, for each element of the view, its index in the flattened source."""
    weights = [math.prod(source[i + 1 :]) for i in range(len(source))]
    flat = [
        sum(
            np.arange(sub_axis.size).reshape([-1 if j == i else 1 for j in range(len(axis))])
            * (0 if sub_axis.axis is None else sub_axis.stride * weights[sub_axis.axis])
            for i, sub_axis in enumerate(axis)
        )
        for axis in layout
    ]
    sizes = [math.prod(sub_axis.size for sub_axis in axis) for axis in layout]
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
        np.testing.assert_array_equal(index_map(coalesce(layout), shape), indices)


@settings(derandomize=True, max_examples=600, deadline=None)
@given(st.sampled_from(SHAPES).flatmap(lambda shape: st.tuples(chains(shape), chains(shape))))
def test_layouts_are_equal_exactly_when_the_index_maps_are(case: tuple[Chain, Chain]) -> None:
    (one, first), (other, second) = case
    if one is not None and other is not None:
        same = first.shape == second.shape and bool((first == second).all())
        assert (coalesce(one) == coalesce(other)) == same


@settings(derandomize=True, max_examples=200, deadline=None)
@given(chains(expands=False))
def test_flattening_and_reshaping_back_changes_nothing(case: Chain) -> None:
    layout, indices = case
    if layout is not None:
        flat = reshape(layout, (indices.size,))
        assert flat is not None
        back = reshape(flat, indices.shape)
        assert back is not None
        assert coalesce(back) == coalesce(layout)


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.data())
def test_a_selection_is_its_layout_at_its_offsets(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    layout, indices = data.draw(chains(shape))
    axis = data.draw(st.integers(0, indices.ndim - 1))
    start = data.draw(st.integers(0, indices.shape[axis] - 1))
    count = data.draw(st.integers(1, indices.shape[axis] - start))
    found = None if layout is None else select(layout, axis, start, count)
    if found is not None:
        begin = sum(offset * math.prod(shape[source_axis + 1 :]) for source_axis, offset in found[1].items())
        np.testing.assert_array_equal(
            index_map(found[0], shape) + begin, indices.take(range(start, start + count), axis)
        )


@pytest.mark.parametrize(
    ("shape", "axis", "start", "size", "layout", "offsets"),
    [
        ((B, S, 48), 2, 16, 16, ((0, 1, B), (1, 1, S), (2, 1, 16)), {2: 16}),
        ((B, S, 48), 2, 47, 1, ((0, 1, B), (1, 1, S), None), {2: 47}),
        ((B, 4), 0, 1, 2, ((0, 1, 2), (1, 1, 4)), {0: 1}),
        ((1, 4), 0, 0, 1, (None, (1, 1, 4)), {}),
        ((1, 4), 0, 1, 1, None, {}),  # beyond the end
    ],
)
def test_select(
    shape: tuple[Size, ...],
    axis: int,
    start: int,
    size: int,
    layout: tuple[object, ...] | None,
    offsets: dict[int, int],
) -> None:
    wanted = layout and tuple(() if each is None else (SubAxis(*each),) for each in layout)  # type: ignore[misc]
    assert select(identity(shape), axis, start, size) == (wanted and (wanted, offsets))


def test_one_of_three_parts_of_each_head_is_selected() -> None:
    heads = reshape(identity((B, S, 6 * 24)), (B, S, 6, 3, 8))
    assert heads is not None
    found = select(heads, 3, 1, 1)
    assert found == (((SubAxis(0, 1, B),), (SubAxis(1, 1, S),), (SubAxis(2, 24, 6),), (), (SubAxis(2, 1, 8),)), {2: 8})


def test_a_reshape_that_splits_transposed_axes_unevenly_has_no_layout() -> None:
    turned = transposed(identity((4, 6)), (1, 0))
    assert reshape(turned, (4, 6)) is None
    assert reshape(turned, (3, 8)) is not None
    assert reshape(turned, (5, 5)) is None


def test_an_expanded_axis_repeats_one_element() -> None:
    assert expand(identity((3, 1)), (2, 3, 5)) == ((SubAxis(None, 0, 2),), (SubAxis(0, 1, 3),), (SubAxis(None, 0, 5),))


# --- symbolic sizes ----------------------------------------------------------------------------------------------


def test_a_tiled_axis_repeats_all_its_elements() -> None:
    assert tile(identity((3, 1)), (6, 1)) == ((SubAxis(None, 0, 2), SubAxis(0, 1, 3)), ())
    assert tile(identity((12, 4)), (12 * B, 4)) == ((SubAxis(None, 0, B), SubAxis(0, 1, 12)), (SubAxis(1, 1, 4),))
    assert tile(identity((S, 4)), (B, 4)) is None


def test_heads_are_split_off_beside_a_symbolic_sequence() -> None:
    split = reshape(identity((B, S, H * 64)), (B, S, H, 64))
    assert split == ((SubAxis(0, 1, B),), (SubAxis(1, 1, S),), (SubAxis(2, 64, H),), (SubAxis(2, 1, 64),))
    permuted = transposed(split, (0, 2, 1, 3))
    merged = ((SubAxis(0, 1, B), SubAxis(2, 64, H)), (SubAxis(1, 1, S),), (SubAxis(2, 1, 64),))
    assert reshape(permuted, (B * H, S, 64)) == merged
    assert coalesce(reshape(transposed(permuted, (0, 2, 1, 3)), (B, S, H * 64)) or ()) == identity((B, S, H * 64))


def test_a_reshape_by_a_symbol_that_does_not_divide_has_no_layout() -> None:
    assert reshape(identity((B, 12)), (S, 12)) is None
    assert reshape(identity((B, 12)), (B * 2, 6)) == ((SubAxis(0, 1, B), SubAxis(1, 6, 2)), (SubAxis(1, 1, 6),))
    assert reshape(identity((B * S,)), (B, S)) == ((SubAxis(0, S, B),), (SubAxis(0, 1, S),))
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
def test_parse_arrangement(pattern: str, extra: int, source: tuple[object, ...], result: tuple[object, ...]) -> None:
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
def test_solve_sizes(
    pattern: str, source: tuple[Size, ...], result: tuple[Size, ...], known: dict[str, Size], sizes: object
) -> None:
    assert solve_sizes(parse_arrangement(pattern), source, result, known) == sizes


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.permutations(["b", "s", "h", "d"]), st.lists(st.integers(1, 3), min_size=4, max_size=4), st.data())
def test_an_arrangement_has_the_layout_of_its_views(order: list[str], numbers: list[int], data: st.DataObject) -> None:
    sizes = dict(zip("bshd", numbers, strict=True))
    cuts = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    groups = [[order[0]]]
    for name, joined in zip(order[1:], cuts, strict=True):
        groups[-1].append(name) if joined else groups.append([name])
    pattern = "b s (h d) -> " + " ".join(f"({' '.join(group)})" for group in groups)
    split = reshape(identity((sizes["b"], sizes["s"], sizes["h"] * sizes["d"])), [sizes[name] for name in "bshd"])
    assert split is not None
    permuted = transposed(split, ["bshd".index(name) for name in order])
    whole = reshape(permuted, [math.prod(sizes[name] for name in group) for group in groups])
    assert whole is not None
    assert arrangement_layout(parse_arrangement(pattern), sizes) == coalesce(whole)


def test_an_arrangement_that_repeats_heads_has_the_layout_of_an_expand() -> None:
    sizes: dict[str, Size] = {"b": B, "h": 2, "r": 3, "s": S, "d": 4}
    kept: ViewLayout = identity((B, 2, 1, S, 4))
    repeated = reshape(expand(kept, (B, 2, 3, S, 4)), (B, 6, S, 4))
    assert repeated is not None
    found = arrangement_layout(parse_arrangement("b h 1 s d -> b (h r) s d"), sizes)
    assert found == coalesce(repeated)
