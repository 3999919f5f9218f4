"""Raising an opset changes no result: every operator at every step of it that its schemas have, in onnxruntime.

Models are the cases of onnx's own backend tests, as far as an older version of the operator has their form, and those
of `operator_models.py`, for the forms that newer opsets do not have.  Optimizations of onnxruntime are off.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from operator_models import IMAGE, X3, X4, Case, backend_cases, case, in_opset, old_forms, run
from runtimes import evaluate

import onnxfuse
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.convert_opset import changes, convert_opset, lower_opset
from onnxfuse.ir.opset_adapters import ADAPTERS, LACKING
from onnxfuse.ir.protos import opset_of

FIRST, LAST = 7, 24


def run_reference(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any] | str:
    """Return what onnx.reference computes, or why it does not."""
    try:
        return evaluate(model, feeds)
    except Exception as error:  # whatever an operator of it raises
        return f"{type(error).__name__} {error}"


def assert_same(old: Any, new: Any) -> None:
    """Fail unless both are equal but for the rounding of float32, and of one half-precision result."""
    if isinstance(old, list | tuple):
        assert len(old) == len(new)
        for one, other in zip(old, new, strict=True):
            assert_same(one, other)
    elif old is None:
        assert new is None
    else:
        old, new = np.asarray(old), np.asarray(new)
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        if old.dtype.kind not in "fV":
            np.testing.assert_array_equal(old, new)
        else:
            tolerance = 1e-5 if old.dtype.itemsize > 2 else 2e-3
            np.testing.assert_allclose(new.astype(float), old.astype(float), rtol=tolerance, atol=1e-6)


def compare(model: onnx.ModelProto, opset: int, feeds: Mapping[str, Any]) -> str:
    """Convert a model and compare its results: return "onnxruntime", "reference", or why neither compares."""
    converted = convert_opset(model, opset)
    onnx.checker.check_model(_with_types(converted))
    old, new = run(model, feeds), run(converted, feeds)
    if isinstance(old, list):
        assert isinstance(new, list), f"only the original runs: {new}"
        assert_same(old, new)
        return "onnxruntime"
    before, after = run_reference(model, feeds), run_reference(converted, feeds)
    if isinstance(before, list) and isinstance(after, list):
        assert_same(before, after)
        return "reference"
    return f"fails: {old}"


def _with_types(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose outputs have types, which the checker wants."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.output:
        if not value.HasField("type"):
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            value.type.tensor_type.shape.SetInParent()
    return copy


@functools.cache
def operators() -> dict[str, tuple[int, ...]]:
    """Return the opsets that bring a newer version of each operator."""
    found = {each.name for each in onnx.defs.get_all_schemas_with_history() if each.domain == ""}
    return {op: tuple(steps_of(op)) for op in sorted(found) if any(steps_of(op))}


def steps_of(op: str) -> Iterator[int]:
    for opset in range(FIRST + 1, LAST + 1):
        old, new = schema(op, opset - 1), schema(op, opset)
        if old is not None and (new is None or new.since_version != old.since_version):
            yield opset


@functools.cache
def old_cases() -> dict[str, list[Case]]:
    """Return the models above by the operators in them that have other versions."""
    found = defaultdict[str, list[Case]](list)
    for each in old_forms():
        for node in {node.op_type for node in each.model(each.opsets[0]).graph.node} & operators().keys():
            found[node].append(each)
    return found


def old_models(op: str, step: int) -> Iterator[tuple[onnx.ModelProto, Mapping[str, Any]]]:
    """Yield models of the old forms of an operator in the opset before a step, with inputs."""
    for each in old_cases().get(op, ()):
        if step - 1 in each.opsets:
            yield each.model(step - 1), each.feeds


def backend_models(op: str, step: int) -> Iterator[tuple[onnx.ModelProto, Mapping[str, Any]]]:
    """Yield the models of onnx's backend tests that the opset before a step has, with inputs."""
    for model, feeds in backend_cases().get(op, ()):
        if (older := in_opset(model, step - 1)) is not None:
            yield older, feeds


# Steps whose results nothing compares: they are refused.
NOT_COMPARED: Final = {("Scan", 9), *LACKING.items()}
REFUSED: Final = {  # among the cases of onnx, by what the sentence says
    "Dropout": "its mask is read",
    "BatchNormalization": "it writes the statistics of training",
    "Scan": "opset 9 changes the attribute 'directions' of Scan",
    **dict.fromkeys(LACKING, "onnxruntime has no kernel"),
}


@pytest.mark.parametrize("op", operators())
def test_each_step_of_an_operator(op: str) -> None:
    """Results are equal after each step, and after all steps at once; what cannot be compared is listed above."""
    for step in operators()[op]:
        targets = {step, LAST} if step == operators()[op][0] else {step}
        old = {each for model, feeds in old_models(op, step) for each in outcomes(model, {step, LAST}, feeds)}
        found = old | {each for model, feeds in backend_models(op, step) for each in outcomes(model, targets, feeds)}
        assert all(REFUSED[op] in each for each in found if each.startswith("refused"))
        assert not any(each.startswith("fails") for each in old)
        if (op, step) in NOT_COMPARED:
            assert not found & {"onnxruntime", "reference"}
        else:
            assert "onnxruntime" in found, f"{op} of opset {step} is not compared: {found}"


def outcomes(model: onnx.ModelProto, opsets: Collection[int], feeds: Mapping[str, Any]) -> Iterator[str]:
    """Convert a model to opsets, and yield what compared the results, the refusal, or why neither side runs."""
    for opset in opsets:
        try:
            yield compare(model, opset, feeds)
        except onnxfuse.ModelError as error:
            yield f"refused: {error}"


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
def test_a_flattened_softmax_of_an_empty_tensor(op: str) -> None:
    """The 0 of a shape is a size there, which Reshape tells from opset 14 on."""
    for axis in range(4):
        of = case(7, 12, f"y = {op} <axis = {axis}> (x)", x=X4[:, :, :0])
        for opset in (14, LAST):
            assert compare(of.model(12), opset, of.feeds) == "onnxruntime"


LINES = {  # of operators that draw, and of those that onnxruntime has beside ONNX's
    "RandomNormal": "y = RandomNormal <shape = [2, 3]> ()",
    "RandomUniform": "y = RandomUniform <shape = [2, 3]> ()",
    "RandomNormalLike": "y = RandomNormalLike (x)",
    "RandomUniformLike": "y = RandomUniformLike (x)",
    "Multinomial": "h = Flatten (x); y = Multinomial <sample_size = 4> (h)",
    "Bernoulli": "y = Bernoulli (x)",
    "Affine": "y = Affine <alpha = 2.0, beta = 1.0> (x)",
    "Crop": "y = Crop <border = [1, 1, 1, 1]> (x)",
    "DynamicSlice": "y = DynamicSlice (x, starts, ends)",
    "ImageScaler": "y = ImageScaler <bias = [1.0, 2.0], scale = 2.0> (x)",
    "ParametricSoftplus": "y = ParametricSoftplus <alpha = 2.0, beta = 1.0> (x)",
    "Scale": "y = Scale <scale = 2.0> (x)",
    "ScaledTanh": "y = ScaledTanh <alpha = 2.0, beta = 1.0> (x)",
}


@pytest.mark.parametrize("op", sorted(LACKING))
def test_what_onnxruntime_has_no_newer_kernel_for_is_refused(op: str) -> None:
    step, found = LACKING[op], next(iter(old_cases().get(op, ())), None)
    if found is None:
        operands = {"x": IMAGE, "starts": np.array([1]), "ends": np.array([2])}
        lines = LINES[op]
        found = case(7, 24, lines, **{name: value for name, value in operands.items() if name in lines.split("(")[1]})
    assert isinstance(run(found.model(step - 1), found.feeds), list)
    assert isinstance(run(found.model(step), found.feeds), str)
    with pytest.raises(onnxfuse.ModelError, match=f"the {op} node of 'y': onnxruntime has no kernel for {op} from ops"):
        convert_opset(found.model(step - 1), LAST)


@pytest.mark.parametrize(
    "line", ["y = LayerNormalization (x, w)", "y = SimplifiedLayerNormalization (x, w)", "y = ThresholdedRelu (x)",
             "y = MeanVarianceNormalization (x)", "y = LayerNormalization <axis = 2, epsilon = 0.1> (x, v, v)"],
)  # fmt: skip
def test_operators_that_onnxruntime_has_before_onnx(line: str) -> None:
    operands = {"x": X4, "w": X4[0, 0, 0], "v": X4[0, 0]}
    found = case(7, 8, line, **{name: value for name, value in operands.items() if name in line.split("(")[1]})
    for opset in (8, 10, 16, LAST):
        converted = convert_opset(found.model(7), opset)
        assert_same(run(found.model(7), found.feeds), run(converted, found.feeds))


@pytest.mark.parametrize(
    ("opset", "line", "reason"),
    [
        (7, "y = BatchNormalization <spatial = 0> (x, w, w, w, w)", "it has spatial = 0, statistics of each pixel"),
        (9, "y, a, b, c, d = BatchNormalization (x, w, w, w, w)", "it writes the statistics of training"),
        (10, "y, mask = Dropout (x)", "its mask is read"),
        (10, "y = Resize (x, w)", "its scales, 'w', are not constant, and mode nearest rounds by them"),
        (8, "y = MeanVarianceNormalization <across_channels = 1> (x)", "it has the attribute 'across_channels'"),
        (18, "y = GroupNormalization <num_groups = 2> (x, w, x)", "its bias, 'x', does not have one axis"),
        (10, "u = Unknown (x); y = Clip <max = 1.0> (u)", "the dtype of 'u' is not known"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(opset: int, line: str, reason: str) -> None:
    model = case(7, 24, line, x=X4, w=np.ones(4, np.float32)).model(opset)
    if "Unknown" in line:
        model.graph.node[0].domain = "own"
    with pytest.raises(
        onnxfuse.ModelError, match=f"cannot convert the model from opset {opset} to 24: the .* {reason}"
    ):
        convert_opset(model, LAST)
    model.graph.node[-1].name = "here"
    with pytest.raises(onnxfuse.ModelError, match=f"to 24: node 'here' \\([A-Z][A-Za-z]*\\): {reason}"):
        convert_opset(model, LAST)


BODIES = """<ir_version: 8, opset_import: ["": 10, "own": 1]>
main (float[2,4,6] x, bool flag) => (float[2,4,6] y) {
    h = own.halves (x)
    y = If (flag) <
        then_branch = a () => (float[2,4,6] p) { p = Softmax <axis = 1> (h) },
        else_branch = b () => (float[2,4,6] q) { s = Squeeze <axes = [0]> (u)  q = Add (h, s) }>
    u = Unsqueeze <axes = [0]> (x)
}
<domain: "own", opset_import: ["": 10]> halves (a) => (b) {
    p, q = Split <axis = 2> (a)  c = Clip <min = 0.0> (p)  b = Concat <axis = 2> (c, q)
}"""


def test_bodies_and_functions() -> None:
    lines = BODIES.splitlines()
    model = onnx.parser.parse_model("\n".join([*lines[:2], lines[6], *lines[2:6], *lines[7:]]))
    converted = convert_opset(model, LAST)
    onnx.checker.check_model(converted, full_check=True)
    for flag in (True, False):
        feeds = {"x": X4[:, :, :, 0], "flag": np.array(flag)}
        assert_same(run(model, feeds), run(converted, feeds))
    assert opset_of(model) == 10, "the model itself stays as it is"


@pytest.mark.parametrize("branch", ["then_branch", "else_branch"])
def test_names_that_stand_for_several_tensors_are_not_taken_for_constants(branch: str) -> None:
    """The scales of one branch are constant, and those of the other are not, under one name."""
    constant, computed = "s = Constant <value = float[4] {1, 1, 2, 2}> ()", "s = Identity (given)"
    first, second = (constant, computed) if branch == "then_branch" else (computed, constant)
    text = f"""<ir_version: 8, opset_import: ["": 10]>
    main (float[1,2,4,4] x, bool flag, float[4] given) => (float[a,b,c,d] y) {{
        y = If (flag) <
            then_branch = t () => (float[a,b,c,d] p) {{ {first}  p = Resize <mode = "nearest"> (x, s) }},
            else_branch = e () => (float[a,b,c,d] q) {{ {second}  q = Resize <mode = "nearest"> (x, s) }}>
    }}"""
    with pytest.raises(onnxfuse.ModelError, match="its scales, 's', are not constant"):
        convert_opset(onnx.parser.parse_model(text), LAST)


def test_functions_that_stay_are_converted_too() -> None:
    text = """<ir_version: 8, opset_import: ["": 11, "com.microsoft": 1]>
    main (float[2,4,6] x) => (float[2,4,6] y) { y = com.microsoft.own (x) }
    <domain: "com.microsoft", opset_import: ["": 11]> own (a) => (b) { b = Softmax <axis = 1> (a) }"""
    model, feeds = onnx.parser.parse_model(text), {"x": X4[:, :, :, 0]}
    converted = convert_opset(model, LAST)
    assert opset_of(converted.functions[0]) == LAST
    assert_same(run(model, feeds), run(converted, feeds))


def test_inputs_before_ir_version_4_and_weights_stay_what_they_are() -> None:
    text = """<ir_version: 3, opset_import: ["": 9]>
    main (float[2,3] x, float[3] w, int64[2] s) => (float[3,2] y) <float[3] w = {1, 2, 3}, int64[2] s = {3, 2}>
    { h = Mul (x, w)  y = Reshape (h, s) }"""
    model = onnx.parser.parse_model(text)
    converted = convert_opset(model, LAST)
    assert [each.name for each in converted.graph.input] == ["x"]
    assert [each.name for each in converted.graph.initializer] == ["w", "s"]
    feeds = {"x": X4[0, :2, 0, :3]}
    assert_same(run(convert_opset(model, 10), feeds), run(converted, feeds))


def test_an_opset_is_lowered_as_far_as_nodes_mean_the_same() -> None:
    def lowered(line: str, dtype: int = TensorProto.FLOAT) -> int:
        model = case(7, 24, line, x=X3).model(LAST)
        model.graph.input[0].type.tensor_type.elem_type = dtype
        lower_opset(model, 7)
        return opset_of(model)

    assert lowered("y = Relu (x)") == 7
    assert lowered("y = Relu (x)", TensorProto.INT8) == 14
    assert lowered("y = Gelu (x)") == 20
    assert lowered("y = Softmax (x)") == 13, "its axis was another one before"
    assert lowered("y = Relu (x)", TensorProto.BFLOAT16) == 13
    assert lowered("s = Shape (x); y = Reshape <allowzero = 1> (x, s)") == 14
    assert lowered("y = Swish (x)") == 24


def test_adapters_are_for_what_the_schemas_change() -> None:
    """No adapter is left for a step that the schemas show to be none, or for an operator that is not ONNX's."""
    for op, step in ADAPTERS:
        assert (op, step) == ("MeanVarianceNormalization", 9) or step in operators()[op]
    assert {(op, s) for op in operators() for s in operators()[op] if changes(op, s)} - ADAPTERS.keys() == {("Scan", 9)}
