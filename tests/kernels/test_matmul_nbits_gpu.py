"""Products with quantized weights against float64: every plan, aligned and not, with operators that joined them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import pytest
from kernel_runs import NUMPY, compile_all, launch, result, upload
from nbits_cases import CASES, IN_MODELS, ULP, Case, check_within, model, stored_arrays

import onnxfuse
from onnxfuse.kernels.matmul_nbits.host import candidates
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Plan, TensorSpec

pytestmark = pytest.mark.gpu
# x0 is the product: silu(x0) * x1 + x2, where x2 has a value for each column.
STEPS = [["Sigmoid", ["x0"], ["v0"], {}], ["Mul", ["x0", "v0"], ["v1"], {}], ["Mul", ["v1", "x1"], ["v2"], {}],
         ["Add", ["v2", "x2"], ["v3"], {}]]  # fmt: skip
SUM = [["Add", ["x0", "x1"], ["v3"], {}]]  # a residual


@pytest.fixture(scope="module")
def gpu() -> Device:
    return dataclasses.replace(cuda_driver.gpu(0), tf32=False)  # whose rounding is not that of weights


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_plan(gpu: Device, case: Case, aligned: bool) -> None:
    stored = stored_arrays(case)
    for found in outputs(case.node(), case.specs(aligned), list(stored.values()), gpu):
        check_within(case, stored, found)


@pytest.mark.parametrize("steps", [STEPS, SUM], ids=["silu, scale, shift", "residual"])
@pytest.mark.parametrize("m", [1, 12, 70])
@pytest.mark.parametrize("layout", ["nbits", "kn"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_operators_that_joined(gpu: Device, m: int, dtype: str, layout: str, steps: list) -> None:
    element = "uint8" if layout == "nbits" else "uint4"
    case = Case(m, 72, 512, dtype, zeros="packed", bias=True, layout=layout, stored=element)
    plain, random, is_sum = case.node(), np.random.default_rng(3), steps is SUM
    added = {"x1": random.standard_normal((m, 72))} | ({} if is_sum else {"x2": random.standard_normal(72)})
    stored = stored_arrays(case) | {name: a.astype(NUMPY[dtype]) for name, a in added.items()}
    names = {name for step in steps for name in (*step[1], *step[2])}
    program = json.dumps({"ops": steps, "outputs": ["v3"], "dtypes": dict.fromkeys(sorted(names), dtype)})
    node = dataclasses.replace(
        plain, operands=(*plain.operands, *added), attributes={**plain.attributes, "program": program}
    )
    specs = [*case.specs(), *(TensorSpec(a.shape, dtype, constant=name == "x2") for name, a in added.items())]
    ((y, noise),) = case.expected(stored)
    scale = stored["x1"].astype(np.float64)
    expected = y + scale if is_sum else y / (1 + np.exp(-y)) * scale + stored["x2"].astype(np.float64)
    moved = noise if is_sum else 1.1 * (np.abs(y) + noise) * np.abs(scale)  # the slope of silu is at most 1.1
    for (found,) in outputs(node, specs, list(stored.values()), gpu):
        errors = np.abs(found.astype(np.float64) - expected)
        assert (errors <= ULP[dtype] * (moved + np.abs(y) + np.abs(expected) + 1)).all(), errors.max()


@pytest.mark.parametrize("case", IN_MODELS, ids=str)
def test_a_session_runs_the_kernel(case: Case) -> None:
    """The operators of a model become a node that its kernel runs, also if bytes hold two elements of a weight."""
    ort = pytest.importorskip("onnxruntime")
    stored = stored_arrays(case)
    optimized, report = onnxfuse.optimize(model(case, stored), verify=False)
    assert [one.fusion for one in report.fused] == [case.node().fusion], report.missed
    ort.preload_dlls()
    session = onnxfuse.InferenceSession(optimized.SerializeToString(), providers=["CUDAExecutionProvider"])
    assert {each.how for each in onnxfuse.explain_session(session)} == {"kernel"}
    check_within(case, stored, session.run(None, {"x": stored["x"]}))


def outputs(
    node: FusedNode, specs: Sequence[TensorSpec], arrays: Sequence[np.ndarray], gpu: Device
) -> list[list[np.ndarray]]:
    """Return the outputs of every plan of a node."""
    plans = candidates(node, specs, gpu)
    compile_all((step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)), gpu)
    return [output(plan, arrays, specs[0].aligned) for plan in plans]


def output(plan: Plan, arrays: Sequence[np.ndarray], aligned: bool) -> list[np.ndarray]:
    read = [upload(array, aligned) for array in arrays]
    written = [upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), aligned) for spec in plan.outputs]
    launch(plan, read, written)
    return [result(buffer, spec, aligned) for buffer, spec in zip(written, plan.outputs, strict=True)]
