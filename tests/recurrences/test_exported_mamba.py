"""A Mamba of transformers, as torch's exporters write it: each layer has one scan."""

from __future__ import annotations

import pytest
from exported_models import load_exported

from onnxfuse import optimize, unfuse


@pytest.mark.parametrize("name", ["mamba_dynamo_fp32.onnx", "mamba_ts_fp32.onnx"])
def test_an_exported_mamba(name: str) -> None:
    """Each layer has one scan, with all operators from the step sizes to the gate; and fuses again when inlined."""
    model, report = optimize(load_exported(name))
    assert report.counts["scan"] == 2 and report.verified.status == "verified" and not report.dropped
    left = {node.op_type for node in model.graph.node if not node.domain}
    assert left <= {"MatMul"}
    assert optimize(unfuse(model, verify=False)[0], verify=False)[1].counts["scan"] == 2
