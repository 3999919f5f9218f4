"""Regions with wrong bodies: each is taken back whatever hides it, also where operators joined a node or are copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onnx import FunctionProto, ModelProto
from region_models import draw, parsed
from test_wrong_bodies import (
    Hide,
    Tail,
    differ,
    drop_last_operand,
    empty,
    hidden,
    index_of_largest,
    lacking_operator,
    masked,
    random,
    scale_outputs,
    swap_operands,
)

from onnxfuse import optimize
from onnxfuse.regions import epilogue_fusion, write

INPUTS = "float[4, 8] x, float[4, 8] y"
# By what they show: the nodes that compute v, what they become, and what is left of that where regions are wrong.
REGIONS: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "elements": ("a = Exp(x) v = Mul(a, y)", {"region": 1}, {}),
    "rows": ("m = ReduceMax <axes = [1]> (x) a = Sub(x, m) v = Mul(a, y)", {"region": 1}, {}),
    "moved elements": ("a = Transpose(x) b = Transpose(y) v = Sub(a, b)", {"region": 1}, {}),
    "copied elements": (
        "e = Exp(x) a = ReduceMax <axes = [0]> (e) b = ReduceMax <axes = [1]> (e) c = Mul(a, y) v = Sub(c, b)",
        {"region": 2},
        {},
    ),
    "readers of one tensor": (
        "t = Transpose(y) a = Exp(x) b = Abs(x) c = MatMul(a, t) d = MatMul(b, t) v = Mul(c, d)",
        {"region": 1},
        {},
    ),
    "joined": (
        "g := float[8] {1, 2, 3, 4, 5, 6, 7, 8} a = LayerNormalization <axis = -1> (x, g) b = Tanh(a) v = Mul(b, y)",
        {"layer_norm": 1},
        {"layer_norm": 1},
    ),
}
by_name = pytest.mark.parametrize("name", REGIONS)


def model_of(name: str) -> ModelProto:
    """Return the model with regions, behind which an operator keeps out what hides their results."""
    return parsed(f"{REGIONS[name][0]} axis := int64 {{1}} z = CumSum(v, axis)", inputs=INPUTS)


# What follows in the model, of operators that are in no region: more than one of the others would be a region.


def nan(tail: Tail, y: str) -> str:
    return tail.node("Asin", tail.node("Cosh", tail.node("Cosh", y)))


def infinite(tail: Tail, y: str) -> str:
    for _ in range(6):
        y = tail.node("Cosh", y)
    return y


HIDING: list[Hide] = [infinite, empty, masked, index_of_largest, random]


def changed(
    right: Callable[..., FunctionProto], change: Callable[[FunctionProto], bool]
) -> Callable[..., FunctionProto]:
    """Return a function that makes a body as `right` does, and changes it."""

    def wrong(*arguments: object) -> FunctionProto:
        body = right(*arguments)
        change(body)
        return body

    return wrong


@pytest.fixture
def wrong_body(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[FunctionProto], bool]], None]:
    """Return a function that lets the stored bodies of regions be changed, and those of operators that join nodes."""

    def install(change: Callable[[FunctionProto], bool]) -> None:
        for module, name in ((write, "body"), (epilogue_fusion, "chained")):
            monkeypatch.setattr(module, name, changed(getattr(module, name), change))

    return install


@pytest.mark.parametrize(("name", "hide"), [*((name, nan) for name in REGIONS), *(("rows", hide) for hide in HIDING)])
def test_wrong_regions_are_taken_back_whatever_hides_them(
    name: str, hide: Hide, wrong_body: Callable[..., None]
) -> None:
    model, (_, counts, left) = model_of(name), REGIONS[name]
    inputs = draw(model)
    assert optimize(model, inputs=inputs)[1].counts == counts
    wrong_body(scale_outputs)
    _, report = optimize(hidden(model, hide), inputs=inputs)
    assert report.counts == left, report.verified
    assert {one.fusion for one in report.dropped} == {*counts, "region"}


@by_name
def test_models_that_do_not_run_are_compared_by_parts(name: str, wrong_body: Callable[..., None]) -> None:
    model, (_, counts, left) = hidden(model_of(name), lacking_operator), REGIONS[name]
    _, report = optimize(model)
    assert (report.counts, report.dropped) == (counts, ())
    assert (report.verified.status, report.verified.equal_parts) == ("partly", sum(counts.values()))
    wrong_body(scale_outputs)
    _, report = optimize(model)
    assert report.counts == left and {one.fusion for one in report.dropped} == {*counts, "region"}


@pytest.mark.parametrize("name", ["moved elements", "copied elements", "joined"])
@pytest.mark.parametrize("change", [swap_operands, drop_last_operand])
def test_other_wrong_bodies_are_taken_back(
    name: str, change: Callable[[FunctionProto], bool], wrong_body: Callable[..., None]
) -> None:
    model = model_of(name)
    inputs = draw(model)
    right, _ = optimize(model, verify=False)
    wrong_body(change)
    wrong, _ = optimize(model, verify=False)
    _, report = optimize(hidden(model, nan), inputs=inputs)
    assert differ(right, wrong, inputs)
    assert "region" in {one.fusion for one in report.dropped}
