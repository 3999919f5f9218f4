"""Masks that are constant along an axis: each model before, its operators after, the same values; and what stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx_models import apply, ops, parse, run

from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.attention.unbroadcast_masks import unbroadcast_masks
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.serde import read_graph
from onnxfuse.passes.fold_constants import fold_constants
from onnxfuse.passes.fold_shapes import fold_shapes
from onnxfuse.passes.normalize import normalize

CONSTANTS = {
    "zero": np.array(0), "one": np.array(1), "i0": np.array([0]), "i1": np.array([1]),
    "true": np.array(True), "first": np.array([1, 2, 3]), "queries": np.array([0, 1, 3]), "keys": np.array([0, 1, 2]),
    "column": np.array([-1]), "none": np.array(0.0, np.float32), "lowest": np.array(-np.inf, np.float32),
    "types": np.zeros((1, 9), np.int64), "table": np.arange(10, dtype=np.float32).reshape(2, 5),
    "ones": np.ones((1, 1, 1, 1), bool),
}  # fmt: skip
# The scores s (2 heads) of B sequences of N tokens, the padding p, and the ranges of their axes.
HEADER = "(float[B,2,N,N] s, bool[B,N] p) => (y)"
RANGES = """
shape = Shape(p) batch = Gather(shape, zero) length = Gather(shape, one)
b0 = Range(zero, batch, one) b = Unsqueeze(b0, first)
n = Range(zero, length, one) q = Unsqueeze(n, queries) k = Unsqueeze(n, keys)
"""
# The padding masks of transformers, as torch's two exporters write them.
BY_GATHER_ND = """
wide = Max(b, k) all = Shape(wide) be = Expand(b, all) ke = Expand(k, all)
bc = Unsqueeze(be, column) kc = Unsqueeze(ke, column) at = Concat<axis=-1>(bc, kc) padding = GatherND(p, at)
"""
BY_GATHER = """
row = Gather(shape, i1) begin = Mul(b, row) index = Add(k, begin)
flat = Flatten<axis=2>(p) found = Gather(flat, index) padding = Squeeze(found, column)
"""
ADDED = " m = Where(keep, none, lowest) y = Add(s, m)"
BOTH = pytest.mark.parametrize("gathered", [BY_GATHER_ND, BY_GATHER])


def run_pipeline(graph: Graph, shapes: ShapeInfo) -> int:
    """Run the passes on which unbroadcast_masks depends, round by round; return the number of changes to masks."""
    total = 0
    for _ in range(4):
        fold_constants(graph, shapes)
        fold_shapes(graph, shapes)
        normalize(graph, shapes)
        total += unbroadcast_masks(graph, shapes)
    return total


def shrunk(nodes: str, header: str = HEADER, sizes: Sequence[tuple[int, int]] = ((3, 5), (1, 1))) -> onnx.ModelProto:
    """Return the model after the passes, which is asserted to give the same values at all sizes."""
    used = {name: value for name, value in CONSTANTS.items() if name in nodes}
    before = parse(f"{header} {{ {nodes} }}", **used)
    after, _ = apply(before, run_pipeline)
    random = np.random.default_rng(0)
    for batch, length in sizes:
        feeds = {"s": random.standard_normal((batch, 2, length, length)).astype(np.float32)}
        feeds["p"] = random.random((batch, length)) < 0.6
        feeds["x"] = random.standard_normal((batch, length, 5)).astype(np.float32)
        feeds = {name: value for name, value in feeds.items() if name in (i.name for i in before.graph.input)}
        for expected, found in zip(run(before, feeds), run(after, feeds), strict=True):
            np.testing.assert_array_equal(expected, found)
    return after


@BOTH
def test_a_gathered_padding_mask_becomes_a_view_of_its_source(gathered: str) -> None:
    assert ops(shrunk(f"{RANGES}{gathered} keep = Identity(padding) {ADDED}")) == "Unsqueeze Where Add"


def test_scores_plus_zeros_stay_scores() -> None:
    """PyTorch's baddbmm adds an empty tensor times 0, as in the attention of diffusers."""
    zeros = "shape = Shape(s) empty = ConstantOfShape(shape) m = Mul(empty, none)"
    assert ops(shrunk(f"{zeros} t = Tanh(s) y = Add(t, m)", "(float[B,2,N,N] s) => (y)")) == "Tanh"


def test_the_batch_or_the_sequence_may_be_empty() -> None:
    after = shrunk(f"{RANGES}{BY_GATHER_ND} keep = Identity(padding) {ADDED}", sizes=[(0, 4), (3, 0), (2, 1)])
    assert ops(after) == "Unsqueeze Where Add"


@BOTH
def test_a_condition_that_always_holds_vanishes(gathered: str) -> None:
    always = "since = GreaterOrEqual(q, zero) seen = And(true, since) keep = And(seen, padding)"
    assert ops(shrunk(f"{RANGES}{gathered}{always}{ADDED}")) == "Unsqueeze Where Add"


def test_a_causal_condition_is_computed_apart_from_the_padding() -> None:
    causal = "before = LessOrEqual(k, q) seen = And(true, before) keep = And(seen, padding)"
    left = ops(shrunk(f"{RANGES}{BY_GATHER_ND}{causal}{ADDED}")).split()
    assert left[-5:] == ["LessOrEqual", "Unsqueeze", "And", "Where", "Add"]
    assert not {"GatherND", "Expand", "Max", "Concat"} & set(left)


def test_an_additive_mask_of_zeros_vanishes() -> None:
    nodes = "shape = Shape(s) keep = Expand(ones, shape) m = Where(keep, none, lowest) a = Add(s, m) y = Abs(a)"
    assert ops(shrunk(nodes)) == "Abs"


def test_a_where_whose_condition_is_true_everywhere_vanishes() -> None:
    assert ops(shrunk("shape = Shape(s) keep = Expand(ones, shape) m = Where(keep, s, lowest) y = Abs(m)")) == "Abs"


@pytest.mark.parametrize(
    ("nodes", "kept"),
    [
        (f"{RANGES} since = GreaterOrEqual(q, one) m = Where(since, none, lowest) y = Add(s, m)", "GreaterOrEqual"),
        (f"{RANGES} since = Greater(q, zero) m = Where(since, none, lowest) y = Add(s, m)", "Greater"),
        (f"{RANGES} same = Equal(q, k) m = Where(same, none, lowest) y = Add(s, m)", "Equal"),
    ],
)  # fmt: skip
def test_conditions_that_depend_on_the_index_stay(nodes: str, kept: str) -> None:
    assert kept in ops(shrunk(nodes)).split()


def test_a_transposed_gather_stays() -> None:
    """Elements (k, b) are not a Reshape of elements (b, k)."""
    nodes = f"""{RANGES} wide = Max(b, k) all = Shape(wide) be = Expand(b, all) ke = Expand(k, all)
    bc = Unsqueeze(be, column) kc = Unsqueeze(ke, column) at = Concat<axis=-1>(kc, bc)
    pt = Transpose<perm=[1,0]>(p) keep = GatherND(pt, at) {ADDED}"""
    assert "GatherND" in ops(shrunk(nodes)).split()


def test_a_gather_of_preceding_keys_stays() -> None:
    """The first index is -1, which means the last key."""
    before = BY_GATHER_ND.replace("Expand(k,", "Expand(j,")
    nodes = f"{RANGES} j = Sub(k, one) {before} keep = Identity(padding) {ADDED}"
    assert "GatherND" in ops(shrunk(nodes)).split()


def test_an_output_of_the_graph_keeps_its_size() -> None:
    nodes = f"""{RANGES}{BY_GATHER_ND} since = GreaterOrEqual(q, zero) keep = And(since, padding) {ADDED}
    z = Identity(keep)"""
    after = shrunk(nodes, "(float[B,2,N,N] s, bool[B,N] p) => (y, z)")
    assert "And" in ops(after).split()


def test_a_substitute_of_a_substitute_is_still_computed() -> None:
    """All rows of `a` in their order are `a`, and `a` is p."""
    after = shrunk(f"{RANGES} a = And(true, p) some = Gather(a, b0) c = Cast<to=1>(some) y = Neg(c)")
    assert ops(after) == "Cast Neg"


def test_a_second_run_changes_nothing() -> None:
    always = "since = GreaterOrEqual(q, zero) keep = And(since, padding)"
    after = shrunk(f"{RANGES}{BY_GATHER_ND}{always}{ADDED}")
    graph = read_graph(after)
    assert run_pipeline(graph, infer_shapes(graph)) == 0


def test_the_embedding_of_a_single_token_type_becomes_one_row() -> None:
    """BERT slices its buffer of token types to the length, expands it to the batch, and looks it up."""
    nodes = """shape = Shape(x) batch = Gather(shape, i0) length = Gather(shape, i1)
    whole = Concat<axis=0>(batch, length) some = Slice(types, i0, length, i1, i1)
    picked = GatherElements<axis=1>(types, some) all = Expand(picked, whole)
    embedded = Gather(table, all) y = Add(x, embedded)"""
    assert ops(shrunk(nodes, "(float[B,N,5] x) => (y)")) == "Add"


def test_the_embedding_of_several_token_types_stays() -> None:
    nodes = "a = Cast<to=7>(p) b = Gather(table, a) c = ReduceSum<keepdims=0>(b) y = Add(s, c)"
    assert "Gather" in ops(shrunk(nodes)).split()


@pytest.mark.parametrize("op", ["Div", "Max", "Min", "Mod<fmod=1>", "Pow", "Less", "GreaterOrEqual", "Equal"])
def test_what_is_expanded_for_an_operator_that_broadcasts_is_read_as_it_is(op: str) -> None:
    """As F.normalize of PyTorch expands the norms of rows before it divides by them."""
    nodes = f"shape = Shape(x) n = ReduceL2(x, column) e = Expand(n, shape) y = {op}(x, e)"
    assert ops(shrunk(nodes, "(float[B,N,5] x) => (y)")) == f"ReduceL2 {op.partition('<')[0]}"


def test_masks_of_unknown_rank_stay() -> None:
    model = parse("(bool a, bool b) => (y) { c = And(a, b) y = Unsqueeze(c, i0) }", i0=np.array([0]))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    graph = read_graph(model)
    assert unbroadcast_masks(graph, infer_shapes(graph)) == 0
    assert [node.op for node in graph.nodes] == ["And", "Unsqueeze"]


def test_a_gather_that_no_runtime_computes_stays() -> None:
    """A number has no axis to gather along; the passes leave this error of the model to the runtime."""
    graph = read_graph(parse("(int64[N] ids) => (y) { y = Gather(none, i0) }", **CONSTANTS))
    assert not unbroadcast_masks(graph, infer_shapes(graph))
    assert [node.op for node in graph.nodes if "y" in [t.name for t in node.outputs]] == ["Gather"]


def test_one_element_becomes_a_scalar() -> None:
    """The Reshape to a scalar reads an empty shape, which has to be int64 like any other."""
    nodes = "scalar = Gather<axis=0>(count, zero) row = Reshape(scalar, column) last = Squeeze(row, i0) "
    used = {name: CONSTANTS[name] for name in ("zero", "one", "column", "i0")}
    before = parse(f"(int64[1] count) => (y) {{ {nodes} y = Range(zero, last, one) }}", **used)
    after, _ = apply(before, run_pipeline)
    assert run(after, {"count": np.array([4])})[0].tolist() == [0, 1, 2, 3]
