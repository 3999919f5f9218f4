"""Backward Slices to the largest integer: which ends are rewritten, and that onnxruntime computes the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same, ops, parse, value

from onnxfuse import optimize
from onnxfuse.passes.settle_backward_slices import settle_backward_slices

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
    after, (count,) = apply(model, settle_backward_slices)
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
    optimized, report = optimize(model)
    assert ops(optimized) == "Slice Concat Abs Exp"
    assert report.verified is not None and not report.verified.not_compared
    assert_same(model, optimized, (4,))
