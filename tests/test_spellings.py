"""Every spelling of every fusion, made from its declaration, becomes one node that computes the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from runtimes import assert_close, evaluate, run
from spellings import Spelling, Unfused, build, every_label, every_option, spellings

from onnxfuse import Fusion, Report, optimize
from onnxfuse.language import catalog
from onnxfuse.language.terms import walk
from onnxfuse.match.siblings import siblings
from onnxfuse.model.graph import DOMAIN, default
from onnxfuse.rewrite.build import body

FUSIONS = catalog.builtin()
ALL = [spelling for fusion in FUSIONS for spelling in spellings(fusion).written]
by_name = pytest.mark.parametrize("fusion", FUSIONS, ids=lambda fusion: fusion.name)


@pytest.mark.parametrize("spelling", ALL, ids=lambda spelling: spelling.id)
def test_one_node_that_computes_the_same(spelling: Spelling) -> None:
    unfused = build(spelling)
    optimized, report = optimize(unfused.model, only=[spelling.fusion.name], verify=False)
    onnx.checker.check_model(optimized, full_check=True)
    assert [(n.domain, n.op_type) for n in optimized.graph.node] == [(DOMAIN, spelling.fusion.name)], told(report)
    found, wanted = found_expressions(optimized), expected_expressions(unfused)
    if siblings(spelling.fusion):  # no output is the first one
        found, wanted = sorted(found, key=repr), sorted(wanted, key=repr)
    if not any(one.what == "scale" for one in report.folded):  # a scale that is part of the weights has left its place
        assert found == wanted
    expected, reason = run(unfused.model, unfused.inputs)
    evaluated = evaluate(optimized, unfused.inputs)
    if expected is None:
        assert_close(evaluate(unfused.model, unfused.inputs), evaluated, spelling.dtype)
        pytest.skip(f"compared with onnx.reference only: onnxruntime cannot run the unfused model: {reason}")
    assert_close(expected, evaluated, spelling.dtype)
    actual, reason = run(optimized, unfused.inputs)
    assert actual is not None, reason
    assert_close(expected, actual, spelling.dtype)


@by_name
def test_every_option_and_every_label_is_written(fusion: Fusion) -> None:
    found = spellings(fusion)
    missing = every_option(fusion) - found.options
    places = [str(t.options[i].span) for t in walk(*fusion.outputs) for key, i in missing if id(t) == key]
    assert not places, "no generated model has these options"
    assert found.labels == every_label(fusion)


@by_name
def test_what_cannot_be_written_contradicts_the_declaration(fusion: Fusion) -> None:
    """A variant that is one step from the first may break a guard; an old opset may lack an operator; nothing else."""
    for spelling, reason in spellings(fusion).unwritable:
        allowed = {"opset"} if spelling.what.split("-")[-1].startswith("opset") else {"guard"}
        assert reason.kind in allowed, f"{spelling.id}: {reason}"


@by_name
def test_no_other_fusion_takes_a_part_of_it(fusion: Fusion) -> None:
    for spelling in spellings(fusion).written:
        optimized, _ = optimize(build(spelling).model, verify=False)
        assert [n.op_type for n in optimized.graph.node] == [fusion.name], spelling.id


@by_name
def test_bodies_for_onnxruntime_compute_the_same(fusion: Fusion) -> None:
    for spelling in spellings(fusion).written:
        if "-" in spelling.what or "," in spelling.what or spelling.what.startswith(("opset", "bfloat16")):
            continue
        unfused = build(spelling)
        optimized, _ = optimize(unfused.model, only=[fusion.name], fallback="ort", verify=False)
        expected, reason = run(unfused.model, unfused.inputs)
        if expected is None:
            continue  # the test of the spelling itself says so
        actual, reason = run(optimized, unfused.inputs)
        assert actual is not None, f"{spelling.id}: {reason}"
        assert_close(expected, actual, spelling.dtype)


# --- what was found ----------------------------------------------------------------------------------------------
#
# The model that is generated as one variant may be another one too: `scores + bias` with no mask is also scores with
# an additive mask, and a weight that is turned is also the turned weight.  So not labels are compared but what they
# stand for: the standard body of what was found, as an expression over the model's inputs and weights, sums and
# products without order or grouping.


def expected_expressions(unfused: Unfused) -> list[Any]:
    nodes, outputs = body(unfused.spelling.fusion, unfused.variant)
    return expressions(nodes, outputs, {name: name for name in unfused.variant.dtypes}, unfused.model)


def found_expressions(model: onnx.ModelProto) -> list[Any]:
    node = model.graph.node[0]
    function = next(f for f in model.functions if f.name == node.op_type)
    return expressions(function.node, function.output, dict(zip(function.input, node.input, strict=True)), model)


def expressions(
    nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], leaves: Mapping[str, str], model: onnx.ModelProto
) -> list[Any]:
    """What the outputs are, over the model's tensors that `leaves` names."""
    makers = {name: node for node in nodes for name in node.output}
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    opset = model.opset_import[0].version

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
        if node.op_type == "Cast" and isinstance(inputs[0], np.ndarray):  # which is folded
            return inputs[0].astype(helper.tensor_dtype_to_np_dtype(attributes["to"]))
        inputs = [number(i) if isinstance(i, np.ndarray) else i for i in inputs]
        if node.op_type in ("Add", "Mul"):
            flat = [t for i in inputs for t in (i[1] if i[0] == node.op_type else (i,))]
            return node.op_type, tuple(sorted(flat, key=repr))
        said = [(name, rounded(v)) for name, v in attributes.items() if v != usual(node.op_type, name, opset)]
        return node.op_type, tuple(inputs), tuple(sorted(said))

    return [of(name) for name in outputs]


def usual(op: str, name: str, opset: int) -> Any:
    value = default(op, name, opset)
    return value.encode() if isinstance(value, str) else value


def number(array: np.ndarray) -> tuple[str, str]:
    """A constant without leading axes of one element, which normalizing takes away where that broadcasts the same."""
    while array.ndim > 1 and len(array) == 1:
        array = array[0]
    return "constant", str(rounded(array.astype(np.float64).tolist()))


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return f"{value:.5g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def told(report: Report) -> str:
    return "\n".join(f"{m.node}: {m.reason} ({m.matched} of {m.of})" for m in report.missed)
