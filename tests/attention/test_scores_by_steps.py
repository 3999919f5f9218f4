"""Scores that are made by every short sequence of steps are written as patterns know them, with the same results."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same_at_all_sizes, parse

from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.attention.canonicalize_scores import Scores, canonicalize_scores, parse_scores
from onnxfuse.ir.node import op_of
from onnxfuse.ir.serde import read_graph

NUMBERS = {"least": -np.inf, "lowest": np.finfo(np.float32).min, "low": -1e30 * 2, "half": 0.5, "four": 4.0}
CONSTANTS = {
    **{name: np.array(value, np.float32) for name, value in NUMBERS.items()},
    "causal": np.tril(np.ones((3, 3), bool)),
}
STEPS = {
    "multiplied": "Mul ({0}, half)",
    "divided": "Div ({0}, four)",
    "biased": "Add ({0}, bias)",
    "masked by a sum": "Add (mask, {0})",
    "less a mask": "Sub ({0}, mask)",
    "kept": "Where (keep, {0}, lowest)",
    "dropped": "Where (drop, low, {0})",
    "causal": "Where (causal, {0}, least)",
}
MAX_SAMPLED = 60  # sequences of three steps
SHORT = [(a,) for a in STEPS] + [*itertools.product(STEPS, repeat=2)]
LONG = random.Random(0).sample([*itertools.product(STEPS, repeat=3)], MAX_SAMPLED)


def model(steps: tuple[str, ...]) -> onnx.ModelProto:
    """Return a Softmax of a product that goes through the steps."""
    names = ["s", *(f"s{index}" for index in range(len(steps)))]
    lines = [f"{to} = {STEPS[step].format(of)}" for step, of, to in zip(steps, names, names[1:], strict=False)]
    inputs = "float[B,2,3,4] q, float[B,2,4,3] k, bool[B,1,1,3] keep, bool[3,3] drop, float[B,1,1,3] mask"
    text = f"({inputs}, float[2,1,3] bias) => (y) {{ s = MatMul (q, k) {' '.join(lines)} y = Softmax ({names[-1]}) }}"
    return parse(text, 17, **{name: value for name, value in CONSTANTS.items() if re.search(rf"\b{name}\b", text)})


def parsed(of: onnx.ModelProto) -> Scores | None:
    """Return the scores of a model's Softmax."""
    graph = read_graph(of)
    softmax = next(node for node in graph.nodes if op_of(node) == "Softmax")
    return parse_scores(graph, infer_shapes(graph), softmax.inputs[0])


@pytest.mark.parametrize("steps", [*SHORT, *LONG], ids=", ".join)
def test_scores_get_the_usual_order(steps: tuple[str, ...]) -> None:
    before = model(steps)
    after, (*_, again) = apply(before, *[canonicalize_scores] * 3)
    scores = parsed(after)
    assert again == 0 and scores is not None and scores.is_usual
    assert_same_at_all_sizes(before, after, sizes=(1, 2), special=False)
