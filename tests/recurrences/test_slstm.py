"""An sLSTM (Beck et al. 2024, arXiv:2405.04517), as a Loop, a Scan and unrolled, stays, and a sentence says why."""

from __future__ import annotations

import re

import onnx
import pytest

from onnxfuse.dsl.catalogue import builtin
from onnxfuse.explain import explanations
from onnxfuse.fuse_model import Settings, fuse_model

STEP = """
    p = MatMul (h, r)  q = Reshape (p, split)  raw = Add (xt, q)  i, f, zt, ot = Split <axis = 1> (raw)
    is = Squeeze (i, along)  fs = Squeeze (f, along)  zs = Squeeze (zt, along)  os = Squeeze (ot, along)
    neg = Neg (fs)  soft = Softplus (neg)  logs = Neg (soft)  lm = Add (m, logs)  mn = Max (is, lm)
    ei = Sub (is, mn)  added = Exp (ei)  ef = Sub (lm, mn)  kept = Exp (ef)  z = Tanh (zs)  o = Sigmoid (os)
    kc = Mul (kept, c)  az = Mul (added, z)  cn = Add (kc, az)  kn = Mul (kept, n)  nn = Add (kn, added)
    ratio = Div (cn, nn)  hn = Mul (o, ratio)
"""
STATES = ("h", "c", "n", "m")
BEGUN = ", ".join(f"float[2,8] {each}" for each in STATES)
ENDED = ", ".join(f"float[2,8] {each}n" for each in STATES)
FIRST = ", ".join(f"{each}0" for each in STATES)
STEPS = 6


def _model(nodes: str) -> str:
    given = ", ".join(f"float[2,8] {each}0" for each in STATES)
    return (
        f'<ir_version: 8, opset_import: ["" : 17]> main (float[6,2,4,8] x, {given}, float[8,32] r) => (float[6,2,8] y) '
        "<bool yes = {1}, int64 six = {6}, int64[3] split = {2,4,8}, int64[1] along = {1}, int64[1] first = {0}>"
        f" {{ {nodes} }}"
    )


def _unrolled() -> str:
    """Return the nodes of all steps, whose tensors have the number of the step after their names."""
    own, before, nodes = {*re.findall(r"(\w+)(?=(?:, \w+)* = [A-Z])", STEP), "xt"}, dict[str, str](), list[str]()
    for i in range(STEPS):
        now = {each: before.get(each, f"{each}0") for each in STATES} | {each: f"{each}_{i}" for each in own}
        step = re.sub(r"\b\w+\b", lambda word, now=now: now.get(word[0], word[0]), STEP)  # type: ignore[misc]
        nodes.append(f"at{i} = Constant <value_int = {i}> ()  xt_{i} = Gather <axis = 0> (x, at{i})  {step}")
        nodes.append(f"u{i} = Unsqueeze (hn_{i}, first)")
        before = {each: f"{each}n_{i}" for each in STATES}
    return " ".join(nodes) + f" y = Concat <axis = 0> ({', '.join(f'u{i}' for i in range(STEPS))})"


LOOP = f"""last, lc, ln, lm, y = Loop <body = step (int64 t, bool on, {BEGUN}) => (bool still, {ENDED}, float[2,8] out)
    {{ still = Identity (on)  xt = Gather <axis = 0> (x, t) {STEP} out = Identity (hn) }}> (six, yes, {FIRST})"""
SCAN = f"""last, lc, ln, lm, y = Scan <num_scan_inputs = 1, body = step ({BEGUN}, float[2,4,8] xt)
    => ({ENDED}, float[2,8] out) {{ {STEP} out = Identity (hn) }}> ({FIRST}, x)"""


@pytest.mark.parametrize("nodes", [LOOP, SCAN, _unrolled()], ids=["loop", "scan", "unrolled"])
def test_explain_names_the_product(nodes: str) -> None:
    result = fuse_model(
        onnx.parser.parse_model(_model(nodes)), None, Settings(list(builtin()), regions=True, scans=True)
    )
    (sentence,) = explanations(result, "scan")
    assert re.search(r"'p(_1)?', MatMul, multiplies a state by a matrix", sentence)
