"""Every fusion with a wrong body: it is taken back whatever hides it, or the run says that it was not compared."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import onnxruntime
import pytest
from onnx import FunctionProto, ModelProto, TensorProto, helper, numpy_helper
from runtimes import open_on_cpu
from spellings import GENERATED, Unwritable, build, variants

from onnxfuse import Fusion, Report, optimize
from onnxfuse.fuse_model import Settings, fuse_model
from onnxfuse.rewrite import replace

FUSIONS = GENERATED
OPSET = 20
by_name = pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)

# How a body is made wrong.  Each returns False where the body has nothing to make wrong that way.


def scale_outputs(body: FunctionProto) -> bool:
    for i, name in enumerate(list(body.output)):
        like, factor, product = f"wrong_like_{i}", f"wrong_factor_{i}", f"wrong_{i}"
        value = numpy_helper.from_array(np.float32(1.01))
        body.node.append(helper.make_node("Constant", [], [like], value=value))
        body.node.append(helper.make_node("CastLike", [like, name], [factor]))
        body.node.append(helper.make_node("Mul", [name, factor], [product]))
        body.output[i] = product
    return True


def swap_operands(body: FunctionProto) -> bool:
    if len(body.input) < 2:
        return False
    body.input[0], body.input[1] = body.input[1], body.input[0]
    return True


def drop_last_operand(body: FunctionProto) -> bool:
    """Read zeros instead of the last operand, which is a bias, a residual or a mask where there is one."""
    name = body.input[-1]
    readers = [node for node in body.node if name in node.input]
    if len(body.input) < 2 or not readers:
        return False
    for node in readers:
        node.input[:] = ["dropped" if read == name else read for read in node.input]
    zero = helper.make_node("Constant", [], ["zero"], value=numpy_helper.from_array(np.float32(0)))
    cast = helper.make_node("CastLike", ["zero", name], ["zero_like"])
    shape = helper.make_node("Shape", [name], ["dropped_shape"])
    present = list(body.node)
    del body.node[:]
    body.node.extend(
        [zero, cast, shape, helper.make_node("Expand", ["zero_like", "dropped_shape"], ["dropped"]), *present]
    )
    return True


@pytest.fixture
def wrong_body(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[FunctionProto], bool]], list[bool]]:
    """Return a function that lets stored bodies be changed; its list says for each body whether it was."""
    function = replace.function

    def install(change: Callable[[FunctionProto], bool]) -> list[bool]:
        changed: list[bool] = []

        def changed_function(*arguments: object) -> FunctionProto:
            body = function(*arguments)
            changed.append(change(body))
            return body

        monkeypatch.setattr(replace, "function", changed_function)
        return changed

    return install


# What follows the fused node in the model


class Tail:
    """Appends nodes to a model."""

    def __init__(self, model: ModelProto) -> None:
        self.model = model

    def node(self, op: str, *inputs: str, domain: str = "", **attributes: object) -> str:
        name = f"tail_{len(self.model.graph.node)}"
        self.model.graph.node.append(helper.make_node(op, inputs, [name], domain=domain, **attributes))
        return name

    def number(self, value: object) -> str:
        name = f"number_{len(self.model.graph.initializer)}"
        self.model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def nan(tail: Tail, y: str) -> str:
    negative = tail.node("Neg", tail.node("Abs", y))
    return tail.node("Sqrt", tail.node("Sub", negative, tail.number(np.float32(1))))


def infinite(tail: Tail, y: str) -> str:
    big = tail.number(np.float32(3e38))
    return tail.node("Mul", tail.node("Add", tail.node("Abs", y), big), big)


def empty(tail: Tail, y: str) -> str:
    zero = tail.number(np.array([0]))
    return tail.node("Slice", y, zero, zero)


def offset(tail: Tail, y: str) -> str:
    small = tail.node("Mul", y, tail.number(np.float32(1e-3)))
    return tail.node("Add", small, tail.number(np.float32(1e6)))


def masked(tail: Tail, y: str) -> str:
    return tail.node("Add", y, tail.number(np.float32(-3e38)))


def index_of_largest(tail: Tail, y: str) -> str:
    return tail.node("ArgMax", y, axis=-1)


def random(tail: Tail, y: str) -> str:
    return tail.node("Add", y, tail.node("RandomNormalLike", y))


def lacking_operator(tail: Tail, y: str) -> str:
    tail.model.opset_import.append(helper.make_opsetid("odd", 1))
    return tail.node("Thing", y, domain="odd")


def sequence_input(tail: Tail, y: str) -> str:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    name = f"several_{y}"
    tail.model.graph.input.append(helper.make_value_info(name, kind))
    return tail.node("Add", y, tail.node("Cast", tail.node("SequenceLength", name), to=TensorProto.FLOAT))


Hide: TypeAlias = Callable[[Tail, str], str]
HIDING: list[Hide] = [nan, infinite, empty, offset, masked, index_of_largest, random]
NOT_RUNNING: list[Hide] = [lacking_operator, sequence_input]


def hidden(model: ModelProto, hide: Hide) -> ModelProto:
    """Return the model with outputs that hide what is wrong: each is computed from one that it had."""
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.output[:]
    for output in model.graph.output:
        name = hide(Tail(result), output.name)
        dtype = TensorProto.INT64 if hide is index_of_largest else TensorProto.FLOAT
        result.graph.output.append(helper.make_tensor_value_info(name, dtype, None))
    return result


@functools.cache
def smallest(fusion: Fusion) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """Return a model of a fusion that onnxruntime runs, in an opset of which it has random operators."""
    for spelling in variants(fusion):
        if spelling.dtype != TensorProto.FLOAT or spelling.parts:
            continue
        try:
            unfused = build(dataclasses.replace(spelling, opset=OPSET))
            open_on_cpu(unfused.model)
        except (Unwritable, onnxruntime.capi.onnxruntime_pybind11_state.Fail):
            continue
        return unfused.model, dict(unfused.inputs)
    raise AssertionError(f"no model of {fusion.name} runs")


def optimized(fusion: Fusion, model: ModelProto, inputs: dict[str, np.ndarray] | None) -> tuple[ModelProto, Report]:
    return optimize(model, only=[fusion.name], inputs=inputs)


@by_name
def test_wrong_bodies_are_taken_back_whatever_hides_them(fusion: Fusion, wrong_body: Callable[..., list[bool]]) -> None:
    model, inputs = smallest(fusion)
    assert optimized(fusion, model, inputs)[1].counts == {fusion.name: 1}
    wrong_body(scale_outputs)
    for hide in HIDING:
        _, report = optimized(fusion, hidden(model, hide), inputs)
        assert report.counts == {}, (hide.__name__, report.verified)
        assert {d.fusion for d in report.dropped} == {fusion.name}, hide.__name__


@by_name
def test_models_that_do_not_run_are_compared_by_parts(fusion: Fusion, wrong_body: Callable[..., list[bool]]) -> None:
    model, _ = smallest(fusion)
    models = [hidden(model, hide) for hide in NOT_RUNNING]
    for each in models:
        _, report = optimized(fusion, each, None)
        assert (report.counts, report.dropped) == ({fusion.name: 1}, ())
        assert (report.verified.status, report.verified.equal_parts) == ("partly", 1)
        assert {one.name for one in report.verified.not_compared} == {output.name for output in each.graph.output}
    wrong_body(scale_outputs)
    for each in models:
        _, report = optimized(fusion, each, None)
        assert report.counts == {} and {d.fusion for d in report.dropped} == {fusion.name}
        assert report.verified.status == "none" and report.verified.reason


@by_name
@pytest.mark.parametrize("change", [swap_operands, drop_last_operand])
def test_other_wrong_bodies_are_taken_back(
    fusion: Fusion, change: Callable[[FunctionProto], bool], wrong_body: Callable[..., list[bool]]
) -> None:
    model, inputs = smallest(fusion)
    right, _ = optimize(model, only=[fusion.name], verify=False)
    changed = wrong_body(change)
    wrong = fuse_model(model, None, Settings([fusion])).model
    _, report = optimized(fusion, hidden(model, nan), inputs)
    if any(changed) and differ(right, wrong, inputs):
        assert report.counts == {} and {d.fusion for d in report.dropped} == {fusion.name}
    else:
        assert report.counts == {fusion.name: 1}


def differ(right: ModelProto, wrong: ModelProto, inputs: dict[str, np.ndarray]) -> bool:
    """Return whether two models give different outputs, or the second one does not run."""
    expected = list(results(right, inputs))
    try:
        found = list(results(wrong, inputs))
    except Exception:
        return True
    return any(a.shape != b.shape or not np.allclose(a, b, 1e-6, 1e-6) for a, b in zip(expected, found, strict=True))


def results(model: ModelProto, inputs: dict[str, np.ndarray]) -> Iterator[np.ndarray]:
    session = open_on_cpu(model)
    yield from session.run(None, {i.name: inputs[i.name] for i in session.get_inputs()})
