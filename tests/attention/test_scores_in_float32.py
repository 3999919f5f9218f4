"""Attention in half precision whose scores are computed in float32: fused nodes are at least as exact as the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from case_documents import read_cases
from onnx_models import run

import onnxfuse

CASES = Path(__file__).parents[1] / "cases"
ROTATED = "attention_with_rotary_embedding"


@pytest.mark.parametrize("options", [{}, {"fallback": "ort"}, {"emit": "standard"}], ids=str)
@pytest.mark.parametrize("case", ["attention_of_products_in_float32", "attention_of_products_in_float32_under_a_mask"])
def test_bodies_have_scores_that_float16_lacks(case: str, options: Mapping[str, str]) -> None:
    model = read_cases(CASES / "attention.txt")[case].model
    if "emit" in options:
        model.opset_import[0].version = 23
        model.ir_version = 11
    fused, report = onnxfuse.optimize(model, verify=False, **options)
    assert {one.fusion for one in report.fused} == {"attention"}
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((2, 2, 5, 8)).astype(np.float16) for name in "qkv"}
    feeds |= {
        "q": feeds["q"] * 300,
        "k": feeds["k"] * 300,
        "r": feeds["q"],
        "mask": np.arange(10).reshape(2, 1, 1, 5) != 3,
    }
    feeds = {given.name: feeds[given.name] for given in model.graph.input}
    assert np.abs(feeds["q"].astype(np.float32) @ feeds["k"].swapaxes(2, 3).astype(np.float32)).max() > 65504
    for expected, found in zip(run(model, feeds), run(fused, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


def test_rotations_that_are_not_rounded_stay_apart() -> None:
    """A kernel that rotates queries rounds them, and this model multiplies them as they are."""
    model = read_cases(CASES / f"{ROTATED}.txt")[f"{ROTATED}_in_float32_of_float16"].model
    text = onnx.printer.to_text(model)
    for line in ("queries = Cast <to: int = 10> (q_sum)", "keys = Cast <to: int = 10> (k_sum)"):
        assert line in text
        text = text.replace(line, line.replace("Cast <to: int = 10>", "Identity"))
    text = text.replace("y = MatMul (weights, v)", "p = Cast <to = 10> (weights)  y = MatMul (p, v)")
    _, report = onnxfuse.optimize(onnx.parser.parse_model(text), regions=False)
    assert report.verified.passed
    assert Counter(one.fusion for one in report.fused) == {"rotary_embedding": 2, "attention": 1}


def test_keys_that_are_copied_before_probabilities_in_float32() -> None:
    """The Cast of the probabilities is not a part of the match, whose keys must not depend on it."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float16[2,4,6,8] q, float16[2,4,8,6] k, float16[2,4,6,8] v) => (float16[2,4,6,8] y) <float zero = {0}> {
          r = Relu (k)  s = MatMul (q, r)  p = Softmax <axis = -1> (s)  is_nan = IsNaN (p)  wide = Cast <to = 1> (p)
          weights = Where (is_nan, zero, wide)  half = Cast <to = 10> (weights)  y = MatMul (half, v) }""")
    _, report = onnxfuse.optimize(model)
    assert report.counts == {"attention": 1, "region": 1}
    assert not report.left_out
    assert report.verified.passed
