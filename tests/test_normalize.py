"""Spellings that mean the same: each model before, its operators after, the same values; and what must stay."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from test_fold import apply, assert_same, ops, parse, random, run

from onnxfuse.model.linking import read_graph
from onnxfuse.passes.normalize import merge_repeats, normalize, remove_no_ops
from onnxfuse.passes.views import compose_views
from onnxfuse.shapes.inference import infer_shapes

CONSTANTS = {
    "one": np.float32(1), "zero": np.float32(0), "one11": np.ones((1, 1), np.float32), "ones": np.ones(8, np.float32),
    "one5": np.ones((1, 1, 1, 1, 1), np.float32), "i0": np.array([0]), "i1": np.array([1]), "i2": np.array([2]),
    "i3": np.array([3]), "end": np.array([2**63 - 1]), "minus1": np.array([-1]), "none": np.zeros(6, np.int64),
    "shift": np.array([1, 0, 0, -1, 0, 0]), "off": np.array(False), "on": np.array(True), "ratio": np.float32(0.5),
    "keep": np.array([1, 1, 1]), "twice": np.array([1, 2, 1]), "t08": np.array([0, -1, 8]),
    "t24": np.array([0, 0, 2, 4]),
    "flat": np.array([-1, 8]), "heads": np.array([-1, 5, 4]), "back": np.array([-1, 2, 4, 5]),
}  # fmt: skip


def check(nodes: str, rest: str, opset: int = 20, header: str = "(float[N,5,8] x) => (y)") -> onnx.ModelProto:
    """Normalize a model whose input is [N, 5, 8] and compare operators and values."""
    words = set(re.findall(r"\w+", nodes))
    used = {name: value for name, value in CONSTANTS.items() if name in words}
    model = parse(f"{header} {{ {nodes} }}", opset, **used)
    after, _ = apply(model, normalize)
    assert ops(after) == rest
    assert_same(model, after, (3, 5, 8), tol=0)
    return after


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        ("a = Relu(x) b = Identity(a) c = Identity(b) y = Abs(c)", "Relu Abs"),
        ("a = Relu(x) y = Identity(a)", "Relu"),
        ("y = Identity(x)", "Identity"),
        ("a = Dropout(x) y = Abs(a)", "Abs"),
        ("a, b = Dropout(x, ratio, off) y = Abs(a)", "Abs"),
        ("a = Cast<to=1>(x) y = Abs(a)", "Abs"),
        ("a = Cast<to=11>(x) b = Cast<to=1>(a) y = Abs(b)", "Abs"),
        ("a = Cast<to=10>(x) b = Cast<to=1>(a) y = Abs(b)", "Cast Cast Abs"),
        ("a = Cast<to=11>(x) b = Cast<to=10>(a) y = Cast<to=1>(b)", "Cast Cast"),
        ("a = CastLike(x, one) y = Abs(a)", "Abs"),
        ("a = Expand(x, keep) y = Abs(a)", "Abs"),
        ("a = Tile(x, keep) y = Abs(a)", "Abs"),
        ("a = Tile(x, twice) y = Abs(a)", "Tile Abs"),
        ("a = Slice(x, i0, end, i1) y = Abs(a)", "Abs"),
        ("a = Slice(x, i1, end, i1) y = Abs(a)", "Slice Abs"),
        ("a = Slice(x, minus1, minend, i1, minus1) y = Abs(a)", "Slice Abs"),
        ("a = Pad(x, none) y = Abs(a)", "Abs"),
        ("a = Pad(x, shift) y = Abs(a)", "Pad Abs"),
        ("a = Concat<axis=1>(x) y = Abs(a)", "Abs"),
        ("a = Slice(x, end, end, i2) b = Concat<axis=-1>(x, a) y = Abs(b)", "Abs"),
        ("a = Slice(x, end, end, i2) b = Concat<axis=2>(x, a, x) y = Abs(b)", "Concat Abs"),
        ("a = Slice(x, end, end, i2) y = Concat<axis=2>(a, a)", "Slice Concat"),
        ("a = Sum(x) y = Abs(a)", "Abs"),
        ("a = Relu(x) y = Sum(x, a)", "Relu Add"),
        ("a = Max(x) y = Abs(a)", "Abs"),
        ("a = Mul(one, x) b = Div(a, one) c = Add(b, zero) d = Sub(c, zero) y = Abs(d)", "Abs"),
        ("a = Mul(x, one11) y = Abs(a)", "Abs"),
        ("a = Mul(x, one5) y = Abs(a)", "Mul Abs"),
        ("a = Mul(x, ones) y = Abs(a)", "Mul Abs"),
        ("a = Div(one, x) y = Abs(a)", "Div Abs"),
        ("a = Sub(zero, x) y = Relu(a)", "Sub Relu"),
    ],
)
def test_no_ops(nodes: str, rest: str) -> None:
    if "minend" in nodes:
        nodes = nodes.replace("minend", "low")
        model = parse(f"(float[N,5,8] x) => (y) {{ {nodes} }}", low=np.array([-(2**62)]), i1=CONSTANTS["i1"],
                      minus1=CONSTANTS["minus1"])  # fmt: skip
        after, _ = apply(model, normalize)
        assert ops(after) == rest
        assert_same(model, after, (3, 5, 8), tol=0)
    else:
        check(nodes, rest)


@pytest.mark.parametrize(
    ("shape", "flat"),
    [((1, 8), (8,)), ((1, 1, 8), (8,)), ((5, 8), (5, 8)), ((1, 5, 1), (1, 5, 1)), ((1, 1, 1, 8), (1, 1, 1, 8))],
)
def test_rows_of_one_are_flat_where_that_broadcasts_the_same(shape: tuple[int, ...], flat: tuple[int, ...]) -> None:
    model = parse("(float[N,5,8] x) => (y) { a = Add(x, row) b = Mul(row, x) y = Sub(a, b) }", row=random(*shape))
    after, _ = apply(model, normalize)
    assert {tuple(t.dims) for t in after.graph.initializer} == {flat}
    assert_same(model, after, (3, 5, 8), tol=0)


@pytest.mark.parametrize(
    ("opset", "nodes", "rest"),
    [
        (9, "a = Dropout<ratio=0.3>(x) y = Abs(a)", "Abs"),
        (11, "a = Dropout<ratio=0.3>(x) y = Abs(a)", "Abs"),
        (13, "a = Dropout(x, ratio) y = Abs(a)", "Abs"),
        (24, "a = Dropout(x, ratio, off) y = Abs(a)", "Abs"),
        (9, "a = Slice<starts=[0], ends=[9], axes=[1]>(x) y = Abs(a)", "Abs"),
        (9, "a = Slice<starts=[1], ends=[9], axes=[1]>(x) y = Abs(a)", "Slice Abs"),
        (9, "a = Pad<pads=[0,0,0,0,0,0]>(x) y = Abs(a)", "Abs"),
        (9, "a = Pad<pads=[0,1,0,0,-1,0]>(x) y = Abs(a)", "Pad Abs"),
        (11, "a = Unsqueeze<axes=[1]>(x) b = Squeeze<axes=[1]>(a) y = Abs(b)", "Abs"),
        (13, "a = Unsqueeze(x, i1) b = Squeeze(a, i1) y = Abs(b)", "Abs"),
        (13, "a = Unsqueeze(x, i1) b = Squeeze(a, i1) c = Relu(a) d = Abs(b) e = Squeeze(c, i1) y = Add(d, e)",
         "Unsqueeze Relu Abs Squeeze Add"),
    ],
)  # fmt: skip
def test_forms_of_older_and_newer_opsets(opset: int, nodes: str, rest: str) -> None:
    check(nodes, rest, opset)


@pytest.mark.parametrize(
    ("reader", "source"),
    [
        ("Gather(sizes, i1)", "ids"), ("Gather(sizes, i0)", "ids"),
        ("Gather(sizes, i2)", "rows"), ("Gather(sizes, minus1)", "rows"),  # of the rows themselves
        ("Slice(sizes, i0, i1)", "rows"), ("Abs(sizes)", "rows"),
    ],
)  # fmt: skip
def test_sizes_of_rows_are_read_off_their_ids(reader: str, source: str) -> None:
    """So that another operator may compute the rows on the way; they are those of the ids along these axes only."""
    table = random(7, 4)
    text = f"(int64[N,M] ids) => (y, z) {{ rows = Gather(table, ids) z = Abs(rows) sizes = Shape(rows) y = {reader} }}"
    used = {name: CONSTANTS[name] for name in ("i0", "i1", "i2", "minus1") if re.search(rf"\b{name}\b", reader)}
    model = parse(text, table=table, **used)
    after, _ = apply(model, normalize)
    assert next(list(node.input) for node in after.graph.node if node.op_type == "Shape") == [source]
    feeds = {"ids": np.array([[0, 6, 3], [1, -1, 2]])}
    for a, b in zip(run(model, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


def test_dropout_that_drops_or_whose_mask_is_read_stays() -> None:
    dropouts = (
        "y, m = Dropout(x, ratio, on)",
        "y, m = Dropout(x, ratio, off) n = Not(m)",
        "y = Dropout(x, ratio, flag)",
    )
    for nodes in dropouts:
        outputs = "(y, n)" if "Not" in nodes else "(y)"
        weights = {name: CONSTANTS[name] for name in ("ratio", "on", "off") if f" {name}" in nodes}
        after, _ = apply(parse(f"(float[N,5,8] x, bool flag) => {outputs} {{ {nodes} }}", **weights), normalize)
        assert "Dropout" in ops(after)


def test_half_precision_casts() -> None:
    text = "(float16[N,5,8] x) => (y) { a = Cast<to=1>(x) b = Cast<to=10>(a) y = Abs(b) }"
    model = parse(text)
    after, _ = apply(model, normalize)
    assert ops(after) == "Abs"
    assert_same(model, after, (3, 5, 8), np.float16, 0)


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        ("a = Transpose<perm=[0,2,1]>(x) b = Transpose<perm=[0,2,1]>(a) y = Abs(b)", "Abs"),
        ("a = Transpose<perm=[1,2,0]>(x) b = Transpose<perm=[1,2,0]>(a) y = Abs(b)", "Transpose Abs"),
        ("a = Transpose<perm=[0,1,2]>(x) y = Abs(a)", "Abs"),
        ("a = Reshape(x, t24) b = Reshape(a, t08) y = Abs(b)", "Abs"),
        ("a = Reshape(x, t24) b = Reshape(a, flat) y = Abs(b)", "Reshape Abs"),
        ("a = Flatten<axis=2>(x) y = Abs(a)", "Flatten Abs"),
        ("a = Unsqueeze(x, i0) b = Unsqueeze(a, i3) y = Abs(b)", "Reshape Abs"),
        ("a = Reshape(x, t24) y = Transpose<perm=[0,2,1,3]>(a)", "Reshape Transpose"),
        ("a = Reshape(x, t24) b = Transpose<perm=[0,2,1,3]>(a) y = Unsqueeze(b, i2)", "Reshape Transpose Unsqueeze"),
        # key heads as the dynamo exporter writes them: one Transpose(0, 2, 3, 1)
        ("a = Reshape(x, t24) b = Transpose<perm=[0,2,1,3]>(a) c = Reshape(b, heads) d = Transpose<perm=[0,2,1]>(c) "
         "y = Reshape(d, back)", "Reshape Transpose"),
        # another reader of the head view: it stays, the rest is still one Transpose
        ("a = Reshape(x, t24) b = Transpose<perm=[0,2,1,3]>(a) c = Reshape(b, heads) d = Transpose<perm=[0,2,1]>(c) "
         "e = Reshape(d, back) f = Transpose<perm=[0,2,3,1]>(b) g = Abs(f) h = Transpose<perm=[0,3,2,1]>(g) "
         "k = Transpose<perm=[0,1,3,2]>(h) l = Transpose<perm=[0,2,1,3]>(k) m = Transpose<perm=[0,1,3,2]>(l) "
         "n = Transpose<perm=[0,3,1,2]>(e) p = Reshape(n, t08) q = Reshape(m, t08) y = Add(p, q)", None),
    ],
)  # fmt: skip
def test_moves(nodes: str, rest: str | None) -> None:
    used = {name: v for name, v in CONSTANTS.items() if f", {name})" in nodes}
    model = parse(f"(float[N,5,8] x) => (y) {{ {nodes} }}", **used)
    after, _ = apply(model, normalize)
    assert ops(after) == rest if rest else len(after.graph.node) < len(model.graph.node)
    for batch in (1, 3):
        assert_same(model, after, (batch, 5, 8), tol=0)


def test_key_heads_with_a_dynamic_sequence() -> None:
    text = """(float[N,S,8] x, float[N,2,S,4] q) => (y) {
        a = Reshape(x, t24) b = Transpose<perm=[0,2,1,3]>(a)
        shape = Shape(x) n = Gather<axis=0>(shape, i0) s = Gather<axis=0>(shape, i1)
        t1 = Concat<axis=0>(m1, s, i4) c = Reshape(b, t1) d = Transpose<perm=[0,2,1]>(c)
        t2 = Concat<axis=0>(n, i2, i4, s) e = Reshape(d, t2) y = MatMul(q, e) }"""
    weights = {name: np.array([int(name[1])]) for name in ("i0", "i1", "i2", "i4")}
    model = parse(text, t24=np.array([0, 0, 2, 4]), m1=np.array([-1]), **weights)
    after, _ = apply(model, normalize)
    assert ops(after) == "Reshape Transpose MatMul"
    assert list(onnx.helper.get_node_attr_value(after.graph.node[1], "perm")) == [0, 2, 3, 1]
    feeds = {"x": random(2, 3, 8), "q": random(2, 2, 3, 4)}
    np.testing.assert_array_equal(run(model, feeds)[0], run(after, feeds)[0])


def test_moves_that_need_a_computed_target_stay() -> None:
    text = """(float[A,B,C] x) => (y) {
        a = Transpose<perm=[2,0,1]>(x) s = Shape(x) b = Reshape(a, flat)
        c = Reshape(b, s) y = Reshape(c, flat) }"""
    model = parse(text, flat=np.array([-1]))
    after, _ = apply(model, compose_views)
    assert ops(after) == "Transpose Reshape"
    text = """(float[A,B,C] x) => (y) {
        a = Transpose<perm=[2,0,1]>(x) s = Shape(x) b = Reshape(a, flat) y = Reshape(b, s) }"""
    after, _ = apply(parse(text, flat=np.array([-1])), compose_views)
    assert ops(after) == "Transpose Shape Reshape Reshape"


def test_names_of_outputs_stay() -> None:
    model = parse("(float[N,8] x) => (a, y, z) { a = Relu(x) y = Identity(a) b = Abs(x) z = Identity(b) }")
    after, _ = apply(model, normalize)
    assert ops(after) == "Relu Identity Abs"
    assert [o.name for o in after.graph.output] == ["a", "y", "z"]
    assert_same(model, after, (2, 8), tol=0)


@pytest.mark.parametrize(
    ("nodes", "outputs", "rest"),
    [
        ("a = Relu(x) b = Relu(x) y = Add(a, b)", "y", "Relu Add"),
        ("a = Exp(x) b = Exp(x) c = Neg(a) d = Neg(b) y = Add(c, d)", "y", "Exp Neg Add"),
        ("a = Add(x, u) b = Add(x, v) y = Mul(a, b)", "y", "Add Mul"),
        ("a = Add(x, u) b = Add(x, w) y = Mul(a, b)", "y", "Add Add Mul"),
        ("a = Softmax<axis=1>(x) b = Softmax<axis=2>(x) y = Mul(a, b)", "y", "Softmax Softmax Mul"),
        ("a = LeakyRelu<alpha=0.1>(x) b = LeakyRelu<alpha=0.2>(x) y = Mul(a, b)", "y", "LeakyRelu LeakyRelu Mul"),
        ("a = RandomNormalLike(x) b = RandomNormalLike(x) c = Sub(a, b) y = Add(x, c)", "y", None),
        ("y = Relu(x) z = Relu(x)", "y, z", "Relu Relu"),
        ("a = Relu(x) z = Relu(x) y = Abs(a)", "y, z", "Relu Abs"),
        ("a, b = Split<num_outputs=2>(x) c, d = Split<num_outputs=2>(x) y = Add(a, d)", "y", "Split Add"),
    ],
)
def test_repeats(nodes: str, outputs: str, rest: str | None) -> None:
    weights = {"u": random(8), "v": random(8), "w": random(8, seed=5)}
    used = {name: v for name, v in weights.items() if f", {name})" in nodes}
    model = parse(f"(float[N,5,8] x) => ({outputs}) {{ {nodes} }}", **used)
    after, _ = apply(model, merge_repeats)
    assert ops(after) == (rest or ops(model))
    if rest:
        assert_same(model, after, (3, 5, 8), tol=0)


def test_what_a_subgraph_reads_keeps_its_name() -> None:
    text = """(float[N,8] x, bool c) => (y) {
        a = Relu(x) b = Identity(a)
        y = If (c) <then_branch = t () => (p) { p = Abs(b) }, else_branch = e () => (q) { q = Neg(b) }> }"""
    model = parse(text)
    after, _ = apply(model, normalize)
    assert ops(after) == "Relu If"
    assert after.graph.node[0].output[0] == "b"
    feeds = {"x": random(2, 8), "c": np.array(False)}
    np.testing.assert_array_equal(run(model, feeds)[0], run(after, feeds)[0])


def test_other_domains_are_left_alone() -> None:
    text = "(float[N,8] x) => (y) { a = com.microsoft.Identity(x) b = com.microsoft.Identity(x) y = Add(a, b) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 20, "com.microsoft": 1]> main {text}')
    graph = read_graph(model)
    assert normalize(graph, infer_shapes(graph)) == 0


def test_nothing_to_do_leaves_the_model_as_it_is() -> None:
    model = parse("(float[N,5,8] x) => (y) { a = Relu(x) y = Transpose<perm=[0,2,1]>(a) }")
    after, results = apply(model, remove_no_ops, compose_views, merge_repeats)
    assert results == [0, 0, 0]
    assert after.SerializeToString() == model.SerializeToString()
