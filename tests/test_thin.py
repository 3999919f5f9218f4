"""Masks no larger than what they say: each model before, its operators after, the same values; and what must stay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from test_fold import apply, ops, parse, run

from onnxfuse.model.graph import Graph
from onnxfuse.model.linking import read_graph
from onnxfuse.passes.fold import fold_constants, fold_shapes
from onnxfuse.passes.normalize import normalize
from onnxfuse.passes.thin import thin_masks
from onnxfuse.shapes.dims import symbol
from onnxfuse.shapes.indices import AtMostZero, Entry, Index, along
from onnxfuse.shapes.inference import Shapes, infer_shapes
from onnxfuse.shapes.places import Places

CONSTANTS = {
    "zero": np.array(0), "one": np.array(1), "minus": np.array(-1), "i0": np.array([0]), "i1": np.array([1]),
    "true": np.array(True), "first": np.array([1, 2, 3]), "queries": np.array([0, 1, 3]), "keys": np.array([0, 1, 2]),
    "column": np.array([-1]), "none": np.array(0.0, np.float32), "lowest": np.array(-np.inf, np.float32),
    "types": np.zeros((1, 9), np.int64), "table": np.arange(10, dtype=np.float32).reshape(2, 5),
    "huge": np.array(2**63 - 1), "beyond": np.array(2**32 - 1),
    "ones": np.ones((1, 1, 1, 1), bool), "mixed": np.array([[[[True, False, True, True, True]]]]),
}  # fmt: skip
# The scores s (2 heads) of B sequences of N tokens, the padding p, and the ranges of their axes.
HEADER = "(float[B,2,N,N] s, bool[B,N] p) => (y)"
RANGES = """
shape = Shape(p) batch = Gather(shape, zero) length = Gather(shape, one)
b0 = Range(zero, batch, one) b = Unsqueeze(b0, first)
n = Range(zero, length, one) q = Unsqueeze(n, queries) k = Unsqueeze(n, keys)
"""
# What transformers' masks look like, through torch's two exporters.
BY_GATHER_ND = """
wide = Max(b, k) all = Shape(wide) be = Expand(b, all) ke = Expand(k, all)
bc = Unsqueeze(be, column) kc = Unsqueeze(ke, column) at = Concat<axis=-1>(bc, kc) padding = GatherND(p, at)
"""
BY_GATHER = """
row = Gather(shape, i1) begin = Mul(b, row) place = Add(k, begin)
flat = Flatten<axis=2>(p) found = Gather(flat, place) padding = Squeeze(found, column)
"""
ADDED = " m = Where(keep, none, lowest) y = Add(s, m)"
BOTH = [(BY_GATHER_ND, "Unsqueeze"), (BY_GATHER, "Reshape")]


def until_settled(graph: Graph, shapes: Shapes) -> int:
    """The steps that the pipeline takes before it fuses; how many masks became thinner."""
    total = 0
    for _ in range(4):
        fold_constants(graph, shapes)
        fold_shapes(graph, shapes)
        normalize(graph, shapes)
        total += thin_masks(graph, shapes)
    return total


def thinned(nodes: str, header: str = HEADER, sizes: Sequence[tuple[int, int]] = ((3, 5), (1, 1))) -> onnx.ModelProto:
    """The model afterwards, which gives the same values at all sizes."""
    used = {name: value for name, value in CONSTANTS.items() if name in nodes}
    before = parse(f"{header} {{ {nodes} }}", **used)
    after, _ = apply(before, until_settled)
    random = np.random.default_rng(0)
    for batch, length in sizes:
        feeds = {"s": random.standard_normal((batch, 2, length, length)).astype(np.float32)}
        feeds["p"] = random.random((batch, length)) < 0.6
        feeds["x"] = random.standard_normal((batch, length, 5)).astype(np.float32)
        feeds = {name: value for name, value in feeds.items() if name in (i.name for i in before.graph.input)}
        for expected, found in zip(run(before, feeds), run(after, feeds), strict=True):
            np.testing.assert_array_equal(expected, found)
    return after


@pytest.mark.parametrize(("gathered", "view"), BOTH)
def test_a_padding_mask_is_a_view_of_what_it_was_gathered_from(gathered: str, view: str) -> None:
    assert ops(thinned(f"{RANGES}{gathered} keep = Identity(padding) {ADDED}")) == f"{view} Where Add"


def test_there_may_be_no_sequence_or_no_token() -> None:
    after = thinned(f"{RANGES}{BY_GATHER_ND} keep = Identity(padding) {ADDED}", sizes=[(0, 4), (3, 0), (2, 1)])
    assert ops(after) == "Unsqueeze Where Add"


@pytest.mark.parametrize(("gathered", "view"), BOTH)
def test_a_condition_that_always_holds_makes_a_mask_no_larger(gathered: str, view: str) -> None:
    always = "since = GreaterOrEqual(q, zero) seen = And(true, since) keep = And(seen, padding)"
    assert ops(thinned(f"{RANGES}{gathered}{always}{ADDED}")) == f"{view} Where Add"


def test_causality_stays_beside_the_padding() -> None:
    causal = "before = LessOrEqual(k, q) seen = And(true, before) keep = And(seen, padding)"
    left = ops(thinned(f"{RANGES}{BY_GATHER_ND}{causal}{ADDED}")).split()
    assert left[-5:] == ["LessOrEqual", "Unsqueeze", "And", "Where", "Add"]
    assert not {"GatherND", "Expand", "Max", "Concat"} & set(left)


def test_a_mask_that_is_true_everywhere_is_none() -> None:
    nodes = "shape = Shape(s) keep = Expand(ones, shape) m = Where(keep, none, lowest) a = Add(s, m) y = Abs(a)"
    assert ops(thinned(nodes)) == "Abs"


def test_a_condition_that_is_true_everywhere_takes_its_branch() -> None:
    assert ops(thinned("shape = Shape(s) keep = Expand(ones, shape) m = Where(keep, s, lowest) y = Abs(m)")) == "Abs"


@pytest.mark.parametrize(
    ("nodes", "kept"),
    [
        (f"{RANGES} since = GreaterOrEqual(q, one) m = Where(since, none, lowest) y = Add(s, m)", "GreaterOrEqual"),
        (f"{RANGES} since = Greater(q, zero) m = Where(since, none, lowest) y = Add(s, m)", "Greater"),
        (f"{RANGES} same = Equal(q, k) m = Where(same, none, lowest) y = Add(s, m)", "Equal"),
    ],
)  # fmt: skip
def test_what_differs_from_place_to_place_stays(nodes: str, kept: str) -> None:
    assert kept in ops(thinned(nodes)).split()


def test_a_transposed_gather_stays() -> None:
    """Entries (k, b) are no Reshape of (b, k)."""
    nodes = f"""{RANGES} wide = Max(b, k) all = Shape(wide) be = Expand(b, all) ke = Expand(k, all)
    bc = Unsqueeze(be, column) kc = Unsqueeze(ke, column) at = Concat<axis=-1>(kc, bc)
    pt = Transpose<perm=[1,0]>(p) keep = GatherND(pt, at) {ADDED}"""
    assert "GatherND" in ops(thinned(nodes)).split()


def test_a_gather_of_the_keys_before_stays() -> None:
    """The first of them is -1, the last key."""
    before = BY_GATHER_ND.replace("Expand(k,", "Expand(j,")
    nodes = f"{RANGES} j = Sub(k, one) {before} keep = Identity(padding) {ADDED}"
    assert "GatherND" in ops(thinned(nodes)).split()


def test_an_output_of_the_graph_keeps_its_size() -> None:
    nodes = f"""{RANGES}{BY_GATHER_ND} since = GreaterOrEqual(q, zero) keep = And(since, padding) {ADDED}
    z = Identity(keep)"""
    after = thinned(nodes, "(float[B,2,N,N] s, bool[B,N] p) => (y, z)")
    assert "And" in ops(after).split()


def test_what_others_were_told_of_is_still_computed() -> None:
    """The rows of `a`, all of them in order, are `a`, and `a` is p."""
    after = thinned(f"{RANGES} a = And(true, p) some = Gather(a, b0) c = Cast<to=1>(some) y = Neg(c)")
    assert ops(after) == "Cast Neg"


def test_a_second_pass_finds_nothing_left() -> None:
    always = "since = GreaterOrEqual(q, zero) keep = And(since, padding)"
    after = thinned(f"{RANGES}{BY_GATHER_ND}{always}{ADDED}")
    graph = read_graph(after)
    assert until_settled(graph, infer_shapes(graph)) == 0


def test_the_embedding_of_one_type_is_a_row() -> None:
    """As in BERT, where the buffer of token types is cut to the length, expanded to the batch, and looked up."""
    nodes = """shape = Shape(x) batch = Gather(shape, i0) length = Gather(shape, i1)
    whole = Concat<axis=0>(batch, length) some = Slice(types, i0, length, i1, i1)
    picked = GatherElements<axis=1>(types, some) all = Expand(picked, whole)
    embedded = Gather(table, all) y = Add(x, embedded)"""
    assert ops(thinned(nodes, "(float[B,N,5] x) => (y)")) == "Add"


def test_the_embedding_of_several_types_stays() -> None:
    nodes = "a = Cast<to=7>(p) b = Gather(table, a) c = ReduceSum<keepdims=0>(b) y = Add(s, c)"
    assert "Gather" in ops(thinned(nodes)).split()


# --- what is told of a place -----------------------------------------------------------------------------------------


def told(nodes: str, name: str) -> object:
    used = {key: value for key, value in CONSTANTS.items() if key in nodes}
    graph = read_graph(parse(f"{HEADER} {{ {nodes} y = Identity(s) }}", **used))
    graph.sort()
    return Places(graph, infer_shapes(graph)).values.get(name)


BATCH, LENGTH = symbol("B"), symbol("N")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("v = Unsqueeze(n, keys)", along(-1, LENGTH)),
        ("v = Unsqueeze(n, queries)", along(-2, LENGTH)),
        ("r = Unsqueeze(n, keys) v = Transpose<perm=[0,1,3,2]>(r)", along(-2, LENGTH)),
        ("v = Add(n, one)", Index(((-1, LENGTH, 1),), 1)),
        ("v = Sub(q, k)", Index(((-2, LENGTH, 1), (-1, LENGTH, -1)))),
        ("v = Sub(n, n)", Index()),
        ("v = Less(n, zero)", False),
        ("v = Less(n, length)", True),
        ("v = LessOrEqual(n, zero)", AtMostZero(along(-1, LENGTH))),
        ("a = Less(n, zero) v = Not(a)", True),
        ("a = Less(n, zero) c = Equal(n, zero) v = And(a, c)", False),
        ("a = Less(n, length) c = Equal(n, zero) v = Or(a, c)", True),
        ("v = Less(k, b)", AtMostZero(Index(((-4, BATCH, -1), (-1, LENGTH, 1)), 1))),
        ("v = Equal(k, b)", None),
        ("a = Greater(k, q) v = Not(a)", AtMostZero(Index(((-2, LENGTH, -1), (-1, LENGTH, 1))))),
        ("a = LessOrEqual(k, q) v = And(a, true)", AtMostZero(Index(((-2, LENGTH, -1), (-1, LENGTH, 1))))),
        ("a = LessOrEqual(k, q) c = LessOrEqual(b, q) v = And(a, c)", None),
        ("a = Add(n, huge) b2 = Add(a, one) v = GreaterOrEqual(b2, zero)", None),
        ("a = Add(n, beyond) b2 = Cast<to=6>(a) v = Cast<to=7>(b2)", None),
        ("v = ConstantOfShape<value = int64[1] {9007199254740993}>(shape)", Index(offset=2**53 + 1)),
    ],
)  # fmt: skip
def test_places(nodes: str, expected: object) -> None:
    assert told(f"{RANGES} {nodes}", "v") == expected


def test_entries_are_told_with_their_indices() -> None:
    found = told(RANGES + BY_GATHER, "padding")
    assert isinstance(found, Entry)
    assert (found.name, found.indices) == ("p", (along(-4, BATCH), along(-1, LENGTH)))


def test_masks_of_unknown_rank_stay() -> None:
    model = parse("(bool a, bool b) => (y) { c = And(a, b) y = Unsqueeze(c, i0) }", i0=np.array([0]))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    graph = read_graph(model)
    assert thin_masks(graph, infer_shapes(graph)) == 0
    assert [node.op for node in graph.nodes] == ["And", "Unsqueeze"]
