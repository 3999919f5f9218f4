"""The forms of attention that benchmarks/attention_forms.py times: each is fused into one attention."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import pytest

import onnxfuse

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from attention_form_texts import FORMS, form_model


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_one_attention(name: str) -> None:
    model = form_model(FORMS[name], "float32", size=12, batch=2, rows=16)
    onnx.checker.check_model(model)
    _, report = onnxfuse.optimize(model)
    assert sum(count for fusion, count in report.counts.items() if fusion.startswith("attention")) == 1
