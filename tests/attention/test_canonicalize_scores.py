"""Scores in the order that attention has them: what is rewritten, and that nothing is where no attention is made."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same_at_all_sizes, ops, parse

from onnxfuse import optimize
from onnxfuse.attention.canonicalize_scores import canonicalize_scores
from onnxfuse.rewrite.apply_rules import rules_pass
from onnxfuse.rules.masks import MASKED_SUMS

LOWEST = float(np.finfo(np.float32).min)
NUMBERS = {"least": -np.inf, "lowest": LOWEST, "low": -1e9, "half": 0.5, "one": 1.0, "small": -10000.0}
CONSTANTS = {
    **{name: np.array(value, np.float32) for name, value in NUMBERS.items()},
    "causal": np.tril(np.ones((3, 3), bool)),
    "factors": np.array([1.5, 2], np.float32).reshape(2, 1, 1),
    "table": np.array([0.5, 0.25], np.float32).reshape(2, 1, 1) * np.arange(-2, 1, dtype=np.float32),
}
GPT = "m = Cast <to = 1> (keep) a = Mul (s, m) b = Sub (one, m) c = Mul (b, small) masked = Add (a, c)"
# How scores become masked ones, and the operators that MASKED_SUMS and canonicalize_scores make of that.
FORMS = {
    "masked = Where (keep, s, least)": "MatMul Where",
    "masked = Where (drop, low, s)": "MatMul Where",
    "a = Add (s, bias) masked = Where (keep, a, lowest)": "MatMul Add Where",
    "a = Where (keep, s, lowest) masked = Where (drop, low, a)": "MatMul Where Add Where",
    "a = Where (keep, s, least) b = Add (a, bias) masked = Add (b, mask)": "MatMul Where Add Add Add",
    "a = Add (s, mask) masked = Max (a, lowest)": "MatMul Max Add",
    "a = Add (s, mask) masked = Mul (a, half)": "MatMul Mul Mul Add",
    "masked = Sub (s, mask)": "MatMul Mul Add",
    GPT: "MatMul Cast Cast Where",
    "a = Where (keep, bias, least) masked = Add (s, a)": "MatMul Where Add",
    "a = Mul (s, factors) masked = Where (keep, a, lowest)": "Mul MatMul Where",
    "masked = Where (causal, s, lowest)": "MatMul Where Add",
    "a = And (causal, drop) masked = Where (a, s, lowest)": "MatMul And Where Add",
    "masked = Add (s, table)": "MatMul Add",
}
ENDS = {
    "softmax": "y = Softmax (masked)",
    "over rows": "y = Softmax <axis = -2> (masked)",
    "read twice": "p = Softmax (masked) y = Add (p, p)",
    "transposed": "p = Softmax (masked) t = Transpose <perm = [0, 1, 3, 2]> (p) y = MatMul (t, p)",
}


def scores(form: str, end: str, signature: str = "float[B,2,3,4] q, float[B,2,4,3] k") -> onnx.ModelProto:
    masks = "bool[B,1,1,3] keep, bool[3,3] drop, float[B,1,1,3] mask, float[2,1,3] bias"
    text = f"({signature}, {masks}) => (y) {{ s = MatMul (q, k) {form} {end} }}"
    read = {name: value for name, value in CONSTANTS.items() if re.search(rf"\b{name}\b", form)}
    return parse(text, 17, **read)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written(form: str) -> None:
    """The results are the same for finite scores."""
    before = scores(form, ENDS["softmax"])
    after, (*_, again) = apply(
        before, rules_pass("masked_sums", MASKED_SUMS), canonicalize_scores, canonicalize_scores, canonicalize_scores
    )
    assert (ops(after), again) == (f"{FORMS[form]} Softmax", 0)
    assert_same_at_all_sizes(before, after, special=False)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("form", FORMS)
def test_scores_without_attention_stay(form: str, end: str) -> None:
    """A Where drops a score that is NaN or infinite, and a sum with a mask does not."""
    before = scores(form, ENDS[end])
    after, report = optimize(before, verify=False)
    assert "attention" not in report.counts
    assert_same_at_all_sizes(before, after, sizes=(0, 1, 3))


def test_one_softmax_with_attention_and_one_without() -> None:
    """The scores of the second are rewritten for an attention that another reader of its probabilities forbids."""
    text = """(float[B,2,3,4] q, float[B,2,3,4] k, float[B,2,3,4] v, float[B,1,1,3] mask) => (y, z) {
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        a = MatMul (q, kt) b = Sub (a, mask) c = Softmax (b) y = MatMul (c, v)
        d = MatMul (v, kt) e = Where (causal, d, lowest) f = Softmax (e) z = Relu (f) }"""
    before = parse(text, 17, causal=CONSTANTS["causal"], lowest=CONSTANTS["lowest"])
    after, report = optimize(before, verify=False, regions=False)
    assert report.counts == {"attention": 1, "softmax": 1}
    assert ops(after) == "Transpose MatMul Where Mul attention softmax Relu"
    assert_same_at_all_sizes(before, after)
