"""Float products that norms have joined against float64: every plan, and a session with dynamic rows."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from case_documents import with_weights
from kernel_runs import compile_all, launch, result, upload
from normalized_cases import CASES, FEW_ROWS, NUMPY, Case, check
from onnx import numpy_helper

import onnxfuse
from onnxfuse.ir.domain import PROLOGUE
from onnxfuse.kernels.gemm.host import candidates
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.fused_calls import read_calls
from onnxfuse.runtime.plan import Launch

pytestmark = pytest.mark.gpu
MISALIGNED = [FEW_ROWS[i] for i in (0, 2, 5, 8)]


@pytest.mark.parametrize(
    ("case", "aligned"), [*((case, True) for case in CASES), *((case, False) for case in MISALIGNED)], ids=str
)
def test_every_plan(case: Case, aligned: bool) -> None:
    gpu = cuda_driver.gpu(0)
    arrays, plans = case.arrays(), candidates(case.node(), case.specs(aligned), gpu)
    compile_all((step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)), gpu)
    for plan in plans:
        read = [upload(array, aligned) for array in arrays.values()]
        written = [upload(np.full(y.shape, np.nan, NUMPY[y.dtype]), aligned) for y in plan.outputs]
        launch(plan, read, written)
        check(case, arrays, [result(each, y, aligned) for each, y in zip(written, plan.outputs, strict=True)])


MODEL = """<ir_version: 10, opset_import: ["" : 21]>
main (float16[rows,512] x, float16[rows,512] r) => (float16[rows,72] y, float16[rows,512] sum)
<float16[512] norm_scale, float16[512,72] w>
{
  sum = Add (x, r)
  n = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001, stash_type = 1> (sum, norm_scale)
  y = MatMul (n, w)
}"""


def test_a_session_runs_all_numbers_of_rows() -> None:
    ort = pytest.importorskip("onnxruntime")
    model = with_weights(onnx.parser.parse_model(MODEL))
    weights = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    optimized, _ = onnxfuse.optimize(model, verify=False)
    assert [PROLOGUE in call.node.attributes for call in read_calls(optimized)] == [True]
    ort.preload_dlls()
    session = onnxfuse.InferenceSession(optimized.SerializeToString(), providers=["CUDAExecutionProvider"])
    assert {each.how for each in onnxfuse.explain_session(session)} == {"kernel"}
    for rows in (1, 2, 3, 5, 8, 9, 17, 70):
        case = Case(rows, (72,), 512)
        arrays = case.arrays() | weights
        check(case, arrays, session.run(None, {"x": arrays["x"], "r": arrays["norm_residual"]}))
