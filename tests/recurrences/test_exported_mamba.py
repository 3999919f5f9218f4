"""A Mamba of transformers, as torch's exporters write it: each layer has one scan."""

from __future__ import annotations

import pytest
from exported_models import load_exported

from onnxfuse import optimize, unfuse


@pytest.mark.parametrize("name", ["mamba_dynamo_fp32.onnx", "mamba_ts_fp32.onnx"])
def test_an_exported_mamba(name: str) -> None:
    """Each layer becomes one scan with all operators from the step sizes to the gate, also after it is inlined."""
    model, report = optimize(load_exported(name))
    assert report.counts["scan"] == 2 and report.verified.status == "verified" and not report.dropped
    left = {node.op_type for node in model.graph.node if not node.domain}
    assert left <= {"MatMul", "Transpose"}  # one before each scan, which reads channels first
    assert optimize(unfuse(model, verify=False)[0], verify=False)[1].counts["scan"] == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    """The function computes in float32, as onnxruntime's CPU provider computes the trace and as the kernel does."""
    model, report = optimize(load_exported("mamba_dynamo_fp32.onnx"), dtype=dtype)
    assert report.counts["scan"] == 2 and report.verified.status == "verified" and not report.dropped
    (body, *_) = (function for function in model.functions if function.name.startswith("scan"))
    assert [node.op_type for node in body.node].count("Cast") == len(body.input) + 1
