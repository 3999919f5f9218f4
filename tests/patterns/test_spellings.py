"""Every spelling of every fusion, made from its declaration, becomes one node that computes the same."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import EachCase
from onnx import TensorProto, helper, numpy_helper
from runtimes import assert_close, evaluate, run
from sampling import by_parts, part_of
from spellings import GENERATED, Spelling, Unfused, build, every_label, every_option, spellings

from onnxfuse import Fusion, Report, optimize
from onnxfuse.dsl.terms import walk
from onnxfuse.ir.attributes import attribute_default
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.match.side_outputs import side_outputs
from onnxfuse.rewrite.function_body import body

PARTS = 9  # of the spellings of a fusion
FUSIONS = GENERATED
by_name = pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)


@by_parts(3)
@by_name
def test_one_node_that_computes_the_same(fusion: Fusion, part: int, each_case: EachCase) -> None:
    for spelling, subtest in each_case(part_of(spellings(fusion).written, part, 3)):
        with subtest:
            assert_one_node_that_computes_the_same(spelling)


def assert_one_node_that_computes_the_same(spelling: Spelling) -> None:
    unfused = build(spelling)
    optimized, report = optimize(unfused.model, only=[spelling.fusion.name], verify=False)
    onnx.checker.check_model(optimized, full_check=True)
    assert [(n.domain, n.op_type) for n in optimized.graph.node] == [(DOMAIN, spelling.fusion.name)], told(report)
    found, wanted = found_expressions(optimized), expected_expressions(unfused)
    if side_outputs(spelling.fusion):  # the outputs have no order
        found, wanted = sorted(found, key=repr), sorted(wanted, key=repr)
    if not any(one.kind == "scale" for one in report.folded):  # a scale that was folded into weights is not in the body
        assert found == wanted or found == in_float32(unfused)
    expected, reason = run(unfused.model, unfused.inputs)
    evaluated = evaluate(optimized, unfused.inputs)
    if expected is None:  # onnx.reference alone says what the model computes
        assert_known_limit(spelling, reason)
        assert_close(evaluate(unfused.model, unfused.inputs), evaluated, spelling.dtype)
        return
    assert_close(expected, evaluated, spelling.dtype)
    actual, reason = run(optimized, unfused.inputs)
    assert actual is not None, reason
    assert_close(expected, actual, spelling.dtype)


# onnxruntime's RotaryEmbedding does not accept cos and sin tables that are broadcast over the batch.
ROTARY_TABLES = "Inputs 'cos_cache' and 'sin_cache' are expected to have the same shape"


def assert_known_limit(spelling: Spelling, reason: str) -> None:
    """Fail unless it is known that onnxruntime cannot run such a model on the CPU: bfloat16, and rotary tables."""
    known = spelling.dtype == TensorProto.BFLOAT16 or ROTARY_TABLES in reason
    assert known, f"onnxruntime {onnxruntime.__version__} cannot run the unfused model: {reason}"


@by_name
def test_every_option_and_every_label_is_written(fusion: Fusion) -> None:
    found = spellings(fusion)
    missing = every_option(fusion) - found.options
    places = [str(t.options[i].span) for t in walk(*fusion.outputs) for key, i in missing if id(t) == key]
    assert not places, "no generated model has these options"
    assert found.labels == every_label(fusion)


@by_name
def test_what_cannot_be_written_contradicts_the_declaration(fusion: Fusion) -> None:
    """A variant may only be unwritable because a guard refuses it, or because an old opset lacks an operator."""
    for spelling, reason in spellings(fusion).unwritable:
        allowed = {"opset"} if spelling.what.split("-")[-1].startswith("opset") else {"guard"}
        assert reason.kind in allowed, f"{spelling.id}: {reason}"


@by_parts(PARTS)
@by_name
def test_no_other_fusion_takes_a_part_of_it(fusion: Fusion, part: int, each_case: EachCase) -> None:
    for spelling, subtest in each_case(part_of(spellings(fusion).written, part, PARTS)):
        with subtest:
            optimized, _ = optimize(build(spelling).model, layout="nchw", verify=False)  # without Transposes
            assert [n.op_type for n in optimized.graph.node] == [fusion.name]


@by_name
def test_bodies_for_onnxruntime_compute_the_same(fusion: Fusion, each_case: EachCase) -> None:
    """Labels and dtypes change these bodies; opsets, spellings and absent operands do not, so those are left out."""
    plain = [each for each in spellings(fusion).written if not re.search("[-,]|^opset|^bfloat16", each.what)]
    for spelling, subtest in each_case(plain):
        with subtest:
            unfused = build(spelling)
            optimized, _ = optimize(unfused.model, only=[fusion.name], fallback="ort", verify=False)
            expected, reason = run(unfused.model, unfused.inputs)
            if expected is None:
                assert_known_limit(spelling, reason)
                expected = evaluate(unfused.model, unfused.inputs)
            actual, reason = run(optimized, unfused.inputs)
            if actual is None:  # the body has the operator that onnxruntime does not run in the unfused model
                assert_known_limit(spelling, reason)
            else:
                assert_close(expected, actual, spelling.dtype)


def test_gelu_tanh_of_a_number_is_stored_in_standard_operators() -> None:
    """onnxruntime's FastGelu takes no tensor without axes."""
    fusion = next(each for each in FUSIONS if each.name == "activation")
    unfused = build(Spelling(fusion, "of-a-number", opset=16, choices={"activation": "gelu_tanh"}, leading=0))
    assert next(iter(unfused.inputs.values())).shape == ()
    optimized, _ = optimize(unfused.model, only=["activation"], fallback="ort", verify=False)
    expected, actual = (run(model, unfused.inputs) for model in (unfused.model, optimized))
    assert expected[0] is not None and actual[0] is not None, expected[1] or actual[1]
    assert_close(expected[0], actual[0], TensorProto.FLOAT)


# --- what was found ----------------------------------------------------------------------------------------------
#
# A model that is generated as one variant may also be another one: `scores + bias` without a mask is also scores with
# an additive mask, and a transposed weight is also a weight.  So the tests do not compare labels, but the standard
# bodies of the variants, as expressions over the inputs and weights of the model; sums and products are unordered.


def expected_expressions(unfused: Unfused) -> list[Any]:
    nodes, outputs = body(unfused.spelling.fusion, unfused.variant)
    return expressions(nodes, outputs, {name: name for name in unfused.variant.dtypes}, unfused.model)


def in_float32(unfused: Unfused) -> list[Any]:
    """Return what is expected where the unfused model computes in float32 what it reads in bfloat16."""
    if unfused.spelling.dtype != TensorProto.BFLOAT16:
        return []
    found = expected_expressions(replace(unfused, variant=replace(unfused.variant, in_float32=True)))
    return sorted(found, key=repr) if side_outputs(unfused.spelling.fusion) else found


def found_expressions(model: onnx.ModelProto) -> list[Any]:
    node = model.graph.node[0]
    function = next(f for f in model.functions if f.name == node.op_type)
    return expressions(function.node, function.output, dict(zip(function.input, node.input, strict=True)), model)


def expressions(
    nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], leaves: Mapping[str, str], model: onnx.ModelProto
) -> list[Any]:
    """Return the outputs as expressions over the tensors of the model that `leaves` names."""
    makers = {name: node for node in nodes for name in node.output}
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    opset = model.opset_import[0].version

    @functools.cache
    def of(name: str) -> Any:
        if name not in makers:
            return weights.get(leaves.get(name, name), leaves.get(name, name))
        node = makers[name]
        if node.op_type == "Constant":
            return numpy_helper.to_array(node.attribute[0].t)
        inputs = [of(i) for i in node.input]
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Transpose" and isinstance(inputs[0], np.ndarray):
            return inputs[0].transpose(attributes["perm"])
        if node.op_type == "Cast" and isinstance(inputs[0], np.ndarray):  # a cast constant is folded
            return inputs[0].astype(helper.tensor_dtype_to_np_dtype(attributes["to"]))
        inputs = [number(i) if isinstance(i, np.ndarray) else i for i in inputs]
        if node.op_type in ("Add", "Mul"):
            flat = [t for i in inputs for t in (i[1] if i[0] == node.op_type else (i,))]
            return node.op_type, tuple(sorted(flat, key=repr))
        said = [(name, rounded(v)) for name, v in attributes.items() if v != usual(node.op_type, name, opset)]
        return node.op_type, tuple(inputs), tuple(sorted(said))

    return [of(name) for name in outputs]


def usual(op: str, name: str, opset: int) -> Any:
    value = attribute_default(op, name, opset)
    return value.encode() if isinstance(value, str) else value


def number(array: np.ndarray) -> tuple[str, str]:
    """Return a constant as text, without the leading axes of size one, which normalizing removes."""
    while array.ndim > 1 and len(array) == 1:
        array = array[0]
    return "constant", str(rounded(array.astype(np.float64).tolist()))


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return f"{value:.5g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def told(report: Report) -> str:
    return "\n".join(f"{m.node}: {m.reason} ({m.matched} of {m.of})" for m in report.missed)
