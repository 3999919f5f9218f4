"""Chains of views: each model before, its operators after, the same values; and which chains stay."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same, assert_same_at_all_sizes, ops, parse, random, run

from onnxfuse.passes.compose_views import View, compose_views, written_from
from onnxfuse.passes.normalize import normalize

CONSTANTS = {
    "i0": np.array([0]), "i1": np.array([1]), "i2": np.array([2]), "i3": np.array([3]), "t08": np.array([0, -1, 8]),
    "t24": np.array([0, 0, 2, 4]), "flat": np.array([-1, 8]), "heads": np.array([-1, 5, 4]),
    "back": np.array([-1, 2, 4, 5]),
}  # fmt: skip


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
        # heads of keys as torch's dynamo exporter writes them become one Transpose (0, 2, 3, 1)
        ("a = Reshape(x, t24) b = Transpose<perm=[0,2,1,3]>(a) c = Reshape(b, heads) d = Transpose<perm=[0,2,1]>(c) "
         "y = Reshape(d, back)", "Reshape Transpose"),
        # the view of heads has another consumer, so it stays; the rest still becomes one Transpose
        ("a = Reshape(x, t24) b = Transpose<perm=[0,2,1,3]>(a) c = Reshape(b, heads) d = Transpose<perm=[0,2,1]>(c) "
         "e = Reshape(d, back) f = Transpose<perm=[0,2,3,1]>(b) g = Abs(f) h = Transpose<perm=[0,3,2,1]>(g) "
         "k = Transpose<perm=[0,1,3,2]>(h) l = Transpose<perm=[0,2,1,3]>(k) m = Transpose<perm=[0,1,3,2]>(l) "
         "n = Transpose<perm=[0,3,1,2]>(e) p = Reshape(n, t08) q = Reshape(m, t08) y = Add(p, q)", None),
    ],
)  # fmt: skip
def test_chains(nodes: str, rest: str | None) -> None:
    used = {name: v for name, v in CONSTANTS.items() if f", {name})" in nodes}
    model = parse(f"(float[N,5,8] x) => (y) {{ {nodes} }}", **used)
    after, _ = apply(model, normalize)
    assert ops(after) == rest if rest else len(after.graph.node) < len(model.graph.node)
    for batch in (1, 3):
        assert_same(model, after, (batch, 5, 8), tol=0)


def test_a_batch_of_1_stays_in_its_place() -> None:
    """A Transpose that moves an axis of size 1, too, is slow in onnxruntime."""
    heads, image = (1, 4, 30, 6), (1, 5, 6, 24)
    to_image = (View((0, 1, 3, 2), (1, 4, 6, 30)), View(None, (1, 24, 5, 6)), View((0, 2, 3, 1), image))
    back = (View((0, 3, 1, 2), (1, 24, 5, 6)), View(None, (1, 4, 6, 30)), View((0, 1, 3, 2), heads))
    assert written_from(heads, to_image) == (View((0, 2, 1, 3), (1, 30, 4, 6)), View(None, image))
    assert written_from(image, back) == (View(None, (1, 30, 4, 6)), View((0, 2, 1, 3), heads))


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


def test_repeated_heads_of_keys_run_with_an_empty_batch() -> None:
    """One Reshape from (n, 2, 1, s, 4) to (n, 2, s, 4) would keep n by 0 and infer s, which an empty n forbids."""
    text = """(float[N,2,1,S,4] x) => (y) {
        a = Expand(x, five) b = Reshape(a, merged) c = Squeeze(b, i2) y = Abs(c) }"""
    numbers = {"five": np.array([1, 1, 5, 1, 1]), "merged": np.array([0, 10, 1, 0, 4]), "i2": np.array([2])}
    model = parse(text, **numbers)
    after, _ = apply(model, normalize)
    for batch in (0, 3):
        assert_same(model, after, (batch, 2, 1, 6, 4), tol=0)


@pytest.mark.parametrize(("shape", "sizes"), [("N,S", (5,)), ("N,1,S", (1, 5))])
def test_axes_of_size_1_are_added_and_removed_without_a_reshape(shape: str, sizes: tuple[int, ...]) -> None:
    text = f"""(float[{shape}] x) => (y, z) {{
        a = Unsqueeze(x, i1) b = Unsqueeze(a, i1) y = Abs(b) c = Squeeze(y, i1) d = Squeeze(c, i1) z = Neg(d) }}"""
    model = parse(text, i1=np.array([1]))
    after, _ = apply(model, normalize)
    assert ops(after) == "Unsqueeze Abs Squeeze Neg"
    for batch in (0, 3):
        assert_same(model, after, (batch, *sizes), tol=0)


def test_chains_that_need_a_computed_target_stay() -> None:
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


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        # where m is 0, the target copies n: (n, 0), and no (0, 6)
        ("nm = Mul (n, m) t = Concat <axis = 0> (nm, minus) a = Reshape (x, t) y = Unsqueeze (a, i0)", "Unsqueeze"),
        ("f = Flatten <axis = 0> (x) t = Concat <axis = 0> (n, m, minus) y = Reshape (f, t)", "Flatten"),
    ],
)  # fmt: skip
def test_views_of_an_empty_axis(nodes: str, rest: str) -> None:
    """A chain stays whose shape is another one than its sizes say where one of them is 0."""
    sizes = "s = Shape (x) n = Gather <axis = 0> (s, i0) m = Gather <axis = 0> (s, i1)"
    text = f"(float[N,M,2,3] x) => (y) {{ {sizes} {nodes} }}"
    numbers = {"i0": [0], "i1": [1], "i6": [6], "minus": [-1]}
    read = {name: np.array(value) for name, value in numbers.items() if f"{name})" in text or f"{name}," in text}
    model = parse(text, **read)
    after, _ = apply(model, compose_views)
    assert_same_at_all_sizes(model, after)
    assert rest in ops(after).split()
