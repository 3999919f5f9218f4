"""Backward Slices to the largest integer: which ends are rewritten, and that onnxruntime computes the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import apply, assert_same, ops, parse, run, value

from onnxfuse import optimize
from onnxfuse.ir.protos import nodes, tensors
from onnxfuse.passes.normalize_backward_slices import normalize_backward_slices

LOW32, LOW64 = -(2**31), -(2**63)


@pytest.mark.parametrize(
    ("dtype", "ends", "steps", "settled"),
    [
        (np.int64, [2**63 - 1], [-1], [LOW64]),
        (np.int64, [2**31 - 1], [-2], [LOW64]),
        (np.int32, [2**31 - 1], [-1], [LOW32]),
        (np.int64, [2**63 - 1, 2**31 - 1], [1, -1], [2**63 - 1, LOW64]),
        (np.int64, [2**31 - 2], [-1], None),  # empty for all
        (np.int64, [0], [-1], None),
        (np.int64, [2**63 - 1], [1], None),
    ],
)
def test_ends_of_slices(dtype: type, ends: list[int], steps: list[int], settled: list[int] | None) -> None:
    starts = [-1 if step < 0 else 0 for step in steps]
    model = parse(
        "(float[N,5] x) => (y) { y = Slice(x, starts, ends, axes, steps) }",
        starts=np.array(starts, dtype), ends=np.array(ends, dtype), axes=np.arange(len(ends)).astype(dtype),
        steps=np.array(steps, dtype),
    )  # fmt: skip
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, None]))
    after, (count,) = apply(model, normalize_backward_slices)
    assert ops(after) == "Slice"
    assert (count, value(after, after.graph.node[0].input[2])) == (settled is not None, settled or ends)
    assert_same(model, after, (4, 5), tol=0)


def test_memory_is_planned_with_the_size_that_the_slice_has() -> None:
    """Without the unused Concat, onnxruntime lets results of 3 and of 9 elements share memory, and refuses to run."""
    text = """(float[4] x) => (y) {
        s = Slice(x, start, far, axis, step) c = Concat<axis=0>(s, s, s) a = Abs(c) y = Exp(a)
        unused = Concat<axis=0>(s, c, a, y) }"""
    model = parse(text, start=np.array([-2]), far=np.array([2**31 - 1]), axis=np.array([0]), step=np.array([-1]))
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None]))
    optimized, report = optimize(model, regions=False)
    assert ops(optimized) == "Slice Concat Abs Exp"
    assert report.verified is not None and not report.verified.not_compared
    assert_same(model, optimized, (4,))


BRANCHES = """g (float[2,3] x, bool c) => (float[] y) <int64[1] start = {-1}, int64[1] far = {2147483647},
    int64[1] axis = {-1}, int64[1] step = {-1}, float[2] sizes = {2, 3}> {
      target = Cast <to = 7> (sizes)  known = Reshape (x, target)
      y = If (c) <
        then_branch = yes () => (float[] a) {
          s = Slice (known, start, far, axis, step)  t = Concat <axis = 0> (s, s, s)  r = Abs (t)  a = Exp (r) },
        else_branch = no () => (float[] b) { NEAR
          s = Slice (known, start, END, axis, step)  t = Concat <axis = 0> (s, s, s)  r = Neg (t)  b = Exp (r) }> }"""
FUNCTION = """g (float[6] x) => (float[] y) <float[1] size = {6}> {
      target = Cast <to = 7> (size)  r = Reshape (x, target)  known = Softplus (r)
      z = own.reverse (known)  y = Neg (z) }
    <domain: "own", opset_import: ["" : 17]> reverse (x) => (y) {
      start = Constant <value_ints = [-2]> ()  far = Constant <value_ints = [9223372036854775807]> ()
      axis = Constant <value_ints = [0]> ()  step = Constant <value_ints = [-1]> ()
      s = Slice (x, start, far, axis, step)  t = Concat <axis = 0> (s, s, s)  r = Abs (t)  y = Exp (r) }"""
HEAD = '<ir_version: 8, opset_import: ["" : 17, "own" : 1]>'


@pytest.mark.parametrize(
    "text",
    [
        BRANCHES.replace("NEAR", "").replace("END", "far"),
        BRANCHES.replace("NEAR", "near = Constant <value_ints = [9223372036854775807]> ()").replace("END", "near"),
        FUNCTION,
    ],
    ids=["a constant outside", "a constant inside", "a function"],
)
def test_slices_in_subgraphs_and_functions(text: str) -> None:
    """Once the target is constant, onnxruntime knows the shape, and plans memory for an empty slice."""
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    before = model.SerializeToString(deterministic=True)
    optimized, _ = optimize(model, verify=False, regions=False)
    values = {tensor.name: tensor for tensor in tensors(optimized.graph)}
    ends = [values[n.input[2]] for n in nodes(optimized.graph) if n.op_type == "Slice"]
    assert ends and all(numpy_helper.to_array(end).tolist() == [LOW64] for end in ends)
    assert "far" not in {t.name for t in optimized.graph.initializer}
    assert model.SerializeToString(deterministic=True) == before
    x = np.arange(6, dtype=np.float32).reshape([d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim])
    for flag in (True, False):
        feeds = {"x": x, "c": np.array(flag)} if "If" in text else {"x": x}
        (old,), (new,) = run(model, feeds), run(optimized, feeds)
        np.testing.assert_array_equal(new, old)
        assert new.size >= 15


def test_what_a_model_declares_behind_a_settled_slice_is_corrected() -> None:
    """onnxruntime believed the 0 of `v`, where its own inference tells nothing, and refused to join `s` and `v`."""
    text = """g (float[n,1] x) => (float[n,0] v, float[m,0] y)
        <int64[1] start = {1}, int64[1] far = {9223372036854775807}, int64[1] axis = {-1}, int64[1] step = {-2}> {
          s = Slice (x, start, far, axis, step)  t = Shape (s)  v = Expand (x, t)  y = Concat <axis = 0> (s, v) }"""
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    optimized, _ = optimize(model, verify=False)
    assert_same(model, optimized, (2, 1), tol=0)
    dims = [[d.dim_param or d.dim_value for d in o.type.tensor_type.shape.dim] for o in optimized.graph.output]
    assert dims == [["n", 1], ["2*n", 1]]


REVERSE = """start = Constant <value_ints = [-1]> ()  far = Constant <value_ints = [9223372036854775807]> ()
    axis = Constant <value_ints = [1]> ()  step = Constant <value_ints = [-1]> ()
    r = Slice (x, start, far, axis, step)"""


@pytest.mark.parametrize(("outside", "inside"), [("r = Neg (x)", REVERSE), (REVERSE, "r = Neg (x)")])
@pytest.mark.parametrize("record", ["", "<float[n,0] f>"])
def test_the_shape_of_what_a_function_returns_is_not_taken_from_onnx(outside: str, inside: str, record: str) -> None:
    """The shape was folded to the 0 that onnx infers, or that a tool has recorded, where onnxruntime has 3."""
    text = f"""g (float[n,3] x) => (float[m] y) {record} {{
          {outside}  f = own.f (r)  s = Shape <start = 1> (f)  one = Constant <value_floats = [1.0]> ()
          y = Expand (one, s) }}
        <domain: "own", opset_import: ["" : 17]> f (x) => (r) {{ {inside} }}"""
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    optimized, _ = optimize(model, verify=False)
    (y,) = run(optimized, {"x": np.ones((2, 3), np.float32)})
    assert y.tolist() == [1, 1, 1]


def test_bounds_of_inner_slices_that_are_not_constant_stay() -> None:
    """`far` is what the Loop carries, although the graph around it has a constant of that name."""
    text = """g (float[4] x, int64[1] end) => (y) <int64[1] start = {-1}, int64[1] far = {9223372036854775807},
        int64[1] axis = {0}, int64[1] step = {-1}, int64 n = {1}, bool go = {1}> {
          k, y = Loop (n, go, end) <body = one (int64 i, bool p, int64[1] far) => (bool q, int64[1] f, float[m] s) {
            s = Slice (x, start, far, axis, step)  q = Identity (p)  f = Identity (far) }> }"""
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, None]))
    _, (count,) = apply(model, normalize_backward_slices)
    assert count == 0
