"""Products whose rows end in an ArgMax or ArgMin, on a GPU: every plan, and sessions with dynamic rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from kernel_hosts import host_of, require_support
from kernel_runs import compile_all, launch, upload
from selection_cases import EMPTY, FLOATS, MANY_ROWS, QUANTIZED, Case

import onnxfuse
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Launch

pytestmark = pytest.mark.gpu
LM_HEADS = [Case((1,), 128256, 2048, last=1), Case((2,), 32003, 512, layout="nk", dtype="bfloat16", logits="nan")]


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", [*FLOATS, *QUANTIZED, *MANY_ROWS, *LM_HEADS], ids=str)
def test_every_plan(case: Case, aligned: bool) -> None:
    """Products of few rows do not store their logits, and all plans select the indices that the CPU provider does."""
    gpu = replace(cuda_driver.gpu(0), tf32=False)
    node, specs, arrays = case.node(), case.specs(aligned), case.arrays()
    host, expected = host_of(node.fusion), case.expected(arrays)
    require_support(host, node, [spec.dtype for spec in specs], gpu)
    plans = host.candidates(node, specs, gpu)
    launches = [[step for step in plan.steps if isinstance(step, Launch)] for plan in plans]
    compile_all((step.kernel for steps in launches for step in steps), gpu)
    assert case in MANY_ROWS or not aligned or launches[0][-1].kernel.source == "select_index"
    for plan, steps in zip(plans, launches, strict=True):
        read = [upload(array, aligned) for array in arrays.values()]
        (y,) = written = [upload(np.full(expected.shape, -1, np.int64), aligned)]
        launch(plan, read, written)
        found = y.get().view(np.int64).reshape(expected.shape)
        np.testing.assert_array_equal(found, expected, err_msg=str([step.kernel.source for step in steps]))


MODEL = """<ir_version: 10, opset_import: ["" : 21]>
main (float16[batch,rows,512] x) => (int64[batch,rows] y, bool[batch,rows] ended)
<int64 eos = {7}>
{
  p = MatMul (x, w)
  z = Add (p, b)
  f = Cast <to = 1> (z)
  y = ArgMax <axis = -1, keepdims = 0> (f)
  ended = Equal (y, eos)
}"""


def test_a_session_runs_all_numbers_of_rows() -> None:
    ort = pytest.importorskip("onnxruntime")
    model, random = onnx.parser.parse_model(MODEL), np.random.default_rng(0)
    for name, shape in (("w", (512, 1000)), ("b", (1000,))):  # small integers, so that sums are exact
        weights = random.integers(-1, 2, shape).astype(np.float16)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    optimized, _ = onnxfuse.optimize(model, verify=False)
    ort.preload_dlls()
    session = onnxfuse.InferenceSession(optimized.SerializeToString(), providers=["CUDAExecutionProvider"])
    assert {each.how for each in onnxfuse.explain_session(session)} == {"kernel"}
    body = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for rows in (1, 2, 3, 8, 9, 17, 70):
        x = random.integers(-1, 2, (2, rows, 512)).astype(np.float16)
        for own, right in zip(session.run(None, {"x": x}), body.run(None, {"x": x}), strict=True):
            np.testing.assert_array_equal(own, right)
    assert session.run(["y"], {"x": x[:, :0]})[0].shape == (2, 0)  # onnxruntime's ArgMax then gives (2, 0, 1000)


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_no_rows(case: Case) -> None:
    assert all(
        plan.steps == ()
        for plan in host_of(case.node().fusion).candidates(case.node(), case.specs(), cuda_driver.gpu(0))
    )
