"""Computed targets of Reshape and Expand, and ends of Slice: which become constant, with the same values."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same, assert_same_at_all_sizes, ops, parse, value

from onnxfuse.algebra.sizes import symbol
from onnxfuse.passes.fold_constants import fold_constants
from onnxfuse.passes.fold_shapes import fold_shapes, reshape_target
from onnxfuse.passes.normalize import normalize


def shape_model(target: str, allowzero: int = 0) -> onnx.ModelProto:
    """Return a model that reshapes [n,s,8] to sizes that are its own (n, s) or constants."""
    names = ", ".join(e if e in "ns" else f"c{int(e) + 1}" for e in target.split())
    text = f"""(float[N,S,8] x) => (y) {{
        shape = Shape(x) n = Gather<axis=0>(shape, i0) s = Gather<axis=0>(shape, i1)
        t = Concat<axis=0>({names}) y = Reshape<allowzero={allowzero}>(x, t) }}"""
    constants = {f"c{i + 1}": np.array([i]) for i in (-1, 0, 1, 2, 4, 8)}
    return parse(text, i0=np.array([0]), i1=np.array([1]), **constants)


@pytest.mark.parametrize(
    ("target", "allowzero", "known"),
    [
        ("n s 2 4", 0, [0, 0, 2, 4]),
        ("n s 2 4", 1, [0, 0, 2, 4]),
        ("n s -1 4", 0, [0, 0, 2, 4]),
        ("n s -1 4", 1, [0, 0, 2, 4]),
        ("n 2 s 4", 0, None),  # n may be 0
        ("s n 8", 0, None),
        ("-1 s 8", 0, [-1, 0, 8]),
        ("n -1 s 4", 0, None),  # where s is 0, the target copies 8, and -1 is 0
        ("-1 n", 0, None),
        ("-1 n", 1, None),
        ("-1 s 8", 1, None),  # [-1, 0, 8] fails where s is 0, and onnxruntime runs this with allowzero
    ],
)
def test_reshape_targets(target: str, allowzero: int, known: list[int] | None) -> None:
    model = shape_model(target, allowzero)
    after, _ = apply(model, fold_shapes)
    assert_same_at_all_sizes(model, after)
    if known is None:
        assert ops(after) == ops(model)
        return
    assert ops(after) == "Reshape"
    assert value(after, after.graph.node[0].input[1]) == known


def test_a_size_beside_an_empty_axis_is_not_known() -> None:
    """Where n is 0, [-1, n] makes (0, 2) of (0, 2, 3), because a 0 copies the size of the axis."""
    text = """(float[N,2,3] x) => (y, z) {
        shape = Shape(x) n = Gather<axis=0>(shape, i0) t = Concat<axis=0>(minus, n) y = Reshape(x, t) z = Shape(y) }"""
    model = parse(text, i0=np.array([0]), minus=np.array([-1]))
    after, _ = apply(model, fold_shapes, fold_constants, normalize, fold_shapes)
    assert_same_at_all_sizes(model, after)
    assert ops(after) == ops(model)


def test_expand_and_slice_targets() -> None:
    text = """(float[N,S,1] x) => (y, z) {
        shape = Shape(x) n = Gather<axis=0>(shape, i0) s = Gather<axis=0>(shape, i1)
        t = Concat<axis=0>(n, s, i4) y = Expand(x, t) z = Slice(x, i1, s, i1) }"""
    model = parse(text, i0=np.array([0]), i1=np.array([1]), i4=np.array([4]))
    after, _ = apply(model, fold_shapes)
    assert ops(after) == "Expand Slice"
    assert_same(model, after, (2, 3, 1))
    near = parse(text.replace("z = Slice(x, i1, s, i1)", "z = Slice(x, i0, n, i1)"), i0=np.array([0]), i1=np.array([1]),
                 i4=np.array([4]))  # fmt: skip
    assert "Gather" in ops(apply(near, fold_shapes)[0])


def test_a_target_of_0_keeps_the_size_of_its_axis() -> None:
    n = symbol("n")
    assert reshape_target((n, 2, 4), (n, 8)) == [0, 8]
    assert reshape_target((n, 0, 4), (n, 0)) == [0, 0]
    assert reshape_target((0, 2, 4), (2, 0)) is None  # [2, 0] would keep the 2
    assert reshape_target(None, (2, 0)) is None
