"""An mLSTM in chunks becomes a scan; a sentence says why other nodes around a CumSum and maxima do not."""

from __future__ import annotations

import functools
import json

import onnx
import pytest
from counted_calls import counted_calls
from mlstm_text import TEXT

from onnxfuse import optimize, unfuse
from onnxfuse.dsl.catalogue import builtin
from onnxfuse.explain import explanations
from onnxfuse.fuse_model import Settings, fuse_model

SAME = {
    "": ("", ""),
    "no epsilon": ("below = Add (most, small)", "below = Identity (most)"),
    "no scale": ("qs = Mul (qc, scale)", "qs = Identity (qc)"),
    "heads before tokens": (
        "q5 = Reshape (q, of_keys)", "q4 = Transpose <perm = [0,2,1,3]> (q)  q5 = Reshape (q4, of_keys)",
    ),
    "one row of heads": ("i4 = Reshape (i, of_gates)", "i3 = Identity (i)  i4 = Reshape (i3, of_gates)"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_spellings(name: str) -> None:
    text = TEXT.replace(*SAME[name]) if name else TEXT
    if name == "heads before tokens":
        text = text.replace("float[b,4,2,3] q", "float[b,2,4,3] q")
    model, report = optimize(onnx.parser.parse_model(text))
    assert report.counts == {"scan": 1} and report.verified.status == "verified" and not report.dropped
    assert optimize(unfuse(model, verify=False)[0], verify=False)[1].counts == report.counts


def test_it_has_three_states() -> None:
    model, _ = optimize(onnx.parser.parse_model(TEXT))
    (program,) = [each.s for node in model.graph.node for each in node.attribute if each.name == "program"]
    assert len(json.loads(program)["states"]) == 3


SOMETHING_ELSE = "it computes something else"
NEAR_MISSES = {
    "a sum below 0": ("size = Abs (sum)", "size = Identity (sum)"),
    "another maximum": ("minus = Neg (m)", "minus = Neg (inter)"),
    "no maximum": ("most = Max (size, least)", "most = Identity (size)"),
    "no states": ("outer = MatMul (qd, cs)", "twice = Concat <axis = 2> (c0, c0)  outer = MatMul (qd, twice)"),
    "a first maximum of 1": ("m0 = Sub (m1, m1)", "m0 = Div (m1, m1)"),
    "no own token": ("{0,1,0,0}", "{0,1,1,0}"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    assert NEAR_MISSES[name][0] in TEXT
    text = TEXT.replace(*NEAR_MISSES[name])
    result = fuse_model(onnx.parser.parse_model(text), None, Settings(list(builtin()), regions=True, scans=True))
    assert "scan" not in {each.fusion for each in result.fused}
    assert SOMETHING_ELSE in "".join(explanations(result, "scan"))


def test_explain_names_what_an_mlstm_has_not() -> None:
    text = TEXT.replace("outer = MatMul (qd, cs)", "product = MatMul (qd, cs)  outer = Sqrt (product)")
    result = fuse_model(onnx.parser.parse_model(text), None, Settings(list(builtin()), regions=True, scans=True))
    assert "'outer', Sqrt, is not a part" in "".join(explanations(result, "scan"))


BOUNDS = {
    "denominator": ("below = Add (most, small)", "more = Max (most, small)  below = Add (more, small)"),
    "gate": ("ic = Transpose <perm = [0,3,1,2]> (i4)", "it = Transpose <perm = [0,3,1,2]> (i4)  ic = Max (it, lowest)"),
    "joined gate": (
        "tops = ReduceMax (a, axis3)",
        "all = Concat <axis = 3> (a, lowests)  tops = ReduceMax (all, axis3)",
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_that_no_drawn_row_reaches_stays(name: str) -> None:
    assert BOUNDS[name][0] in TEXT
    more = "float lowest = {-9.0}, float[1,2,2,1] lowests = {-99.0,-99.0,-99.0,-99.0}, float small"
    text = TEXT.replace(*BOUNDS[name]).replace("float small", more).replace("float[b,", "float[1,")
    result = fuse_model(onnx.parser.parse_model(text), None, Settings(list(builtin()), regions=True, scans=True))
    assert "scan" not in {each.fusion for each in result.fused}
    assert "is of a number" in "".join(explanations(result, "scan"))


def test_linear_time_of_cumulative_sums() -> None:
    """The maxima after each of them are not searched anew."""

    def optimized(count: int) -> None:
        nodes = " ".join(f"c{i} = CumSum (e{i}, axis)  e{i + 1} = Exp (c{i})" for i in range(count))
        optimize(
            onnx.parser.parse_model(
                f"""<ir_version: 8, opset_import: ["" : 17]> main (float[b,8] e0) => (float[b,8] y)
                <int64 axis = {{1}}> {{ {nodes} y = Neg (e{count}) }}"""
            ),
            verify=False,
        )

    optimized(1)  # what is computed once
    few, many = (counted_calls(functools.partial(optimized, count)) for count in (100, 400))
    assert many < 4.4 * few
