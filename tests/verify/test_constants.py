"""Test that folded constants are compared with what onnxruntime computes, and that a wrong one is taken back."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import onnx
import pytest

from onnxfuse import optimize
from onnxfuse.verify import compare_constants

fold_constants = importlib.import_module("onnxfuse.passes.fold_constants")  # the package exports its function
TEXT = """<ir_version: 9, opset_import: ["" : 17]> g (float[b, 4] x) => (float[b, 4] y, int64[n] z) {
  two = Constant<value_float = 2.0>()  three = Constant<value_float = 3.0>()  six = Mul(two, three)
  y = Mul(x, six)
  shape = Shape(x)  ends = Constant<value_ints = [1]>()  more = Constant<value_ints = [2]>()
  last = Slice(shape, ends, more)  twice = Mul(last, more)  z = Add(twice, shape) }"""


@pytest.fixture
def wrong_fold(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that lets a constant of this name be folded to a wrong value."""
    make_constant = fold_constants.make_constant

    def install(name: str) -> None:
        def wrong(tensor: object, value: np.ndarray) -> None:
            make_constant(tensor, value + 1 if tensor.name == name else value)

        monkeypatch.setattr(fold_constants, "make_constant", wrong)

    return install


@pytest.mark.parametrize(("name", "node"), [("six", "six"), ("twice", "twice")])
def test_a_wrong_constant_is_taken_back(name: str, node: str, wrong_fold: Callable[[str], None]) -> None:
    wrong_fold(name)
    model, report = optimize(onnx.parser.parse_model(TEXT))
    (dropped,) = report.dropped
    assert (dropped.fusion, dropped.node) == ("constant", node)
    assert dropped.reason.startswith(f"onnxruntime computes another value: '{name}' ")
    assert report.verified.status == "verified"
    assert name in {o for n in model.graph.node for o in n.output}


def test_right_constants_stay() -> None:
    model, report = optimize(onnx.parser.parse_model(TEXT))
    assert report.dropped == () and {one.into for one in report.folded} >= {"six", "twice"}
    assert "six" in {t.name for t in model.graph.initializer}


def test_a_bounded_number_of_bytes_is_compared(
    monkeypatch: pytest.MonkeyPatch, wrong_fold: Callable[[str], None]
) -> None:
    """The smallest ones come first: of 4 bytes, and not of 8."""
    monkeypatch.setattr(compare_constants, "MAX_BYTES_COMPARED", 5)
    wrong_fold("six")
    assert [one.node for one in optimize(onnx.parser.parse_model(TEXT))[1].dropped] == ["six"]
