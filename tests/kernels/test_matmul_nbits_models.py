"""Models with quantized weights: onnxruntime computes what the references of kernels say, with and without fusing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from nbits_cases import IN_MODELS, Case, check_within, model, stored_arrays
from runtimes import run

from onnxfuse import optimize
from onnxfuse.runtime.fused_calls import read_calls

# Cases that onnxruntime's CPU kernel refuses have 8 bits and zero points of x's dtype.
ON_CPU = [case for case in IN_MODELS if (case.bits, case.zeros) != (8, "typed")]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", ON_CPU, ids=str)
def test_onnxruntime_computes_the_reference(case: Case, dtype: str) -> None:
    case = replace(case, dtype=dtype)
    stored = stored_arrays(case)
    original = model(case, stored)
    optimized, report = optimize(original)
    assert Counter(one.fusion for one in report.fused) == {case.node().fusion: 1}, report.missed
    assert report.verified.passed, report.verified
    for each in original, optimized:
        found, reason = run(each, {"x": stored["x"]})
        assert found is not None, reason
        check_within(case, stored, found)


@pytest.mark.parametrize("case", [case for case in IN_MODELS if not case.others], ids=str)
def test_the_node_of_a_model_is_that_of_the_kernel_tests(case: Case) -> None:
    """Attributes and operands of nodes that the kernels are tested with are those that fusing writes."""
    stored = stored_arrays(case)
    optimized, _ = optimize(model(case, stored), verify=False)
    (call,) = read_calls(optimized)
    wanted = case.node()
    assert sorted(call.node.operands) == sorted(wanted.operands)
    assert call.node.attributes.items() >= wanted.attributes.items()
    specs = dict(zip(case.node().operands, case.specs(), strict=True))
    assert [specs[name].dtype for name in call.node.operands] == list(call.dtypes)
