"""Test verification: equal models pass, every difference is named, and an original that cannot run is not a failure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from exported_models import read_index
from onnx import TensorProto

from onnxfuse.errors import ModelError
from onnxfuse.ir import save as saving
from onnxfuse.verify import cpu_session
from onnxfuse.verify.compare import compare
from onnxfuse.verify.difference import TOLERANCES, compare_output
from onnxfuse.verify.observed import NotCompared

HEAD = '<ir_version: 9, opset_import: ["" : 17]>'


def model(signature: str, body: str, head: str = HEAD) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{head} g {signature} {{ {body} }}")


def elementwise(body: str, dtype: str = "float", outputs: str = "y") -> onnx.ModelProto:
    results = ", ".join(f"{dtype}[b, d] {name}" for name in outputs.split())
    return model(f"({dtype}[b, d] x) => ({results})", body)


# Results


def test_equal_models_pass_at_two_sizes() -> None:
    source = elementwise("y = Relu(x)  z = Neg(x)", outputs="y z")
    lines: list[str] = []
    found = compare(source, source, progress=lines.append)
    assert found.passed is True and found.reason == ""
    assert [(o.name, o.max_abs, o.tolerance) for o in found.outputs] == [("y", 0.0, 1e-5), ("z", 0.0, 1e-5)]
    assert found.sizes == ({"b": 2, "d": 5}, {"b": 3, "d": 8})
    at_edges = ("b=1, d=1", "b=1, d=5", "b=2, d=1")
    assert lines == [
        "run the original, b=2, d=5",
        "run the original, b=3, d=8",
        *(f"run the original, {sizes}" for sizes in at_edges),
        "run the original with onnxruntime's optimizations",
        "run the optimized model",
        "run the optimized model with onnxruntime's optimizations",
    ]


def test_a_changed_weight_fails_and_says_by_how_much() -> None:
    def scaled(by: float) -> onnx.ModelProto:
        return model("(float[b, 4] x) => (float[b, 4] y)", f"w = Constant<value_float = {by}>()  y = Mul(x, w)")

    found = compare(scaled(2.0), scaled(2.001))
    assert found.passed is False
    assert found.outputs[0].max_rel == pytest.approx(5e-4, rel=1e-2)
    assert found.reason == "output 'y' is off by 5.0e-04 of its largest value; float32 allows 1.0e-05"
    assert compare(scaled(2.0), scaled(2.00001)).passed is True


@pytest.mark.parametrize("dtype", ["float", "float16", "double"])
def test_the_tolerance_of_each_dtype_is_the_limit(dtype: str) -> None:
    numpy = {"float": "float32", "float16": "float16", "double": "float64"}[dtype]
    tolerance = TOLERANCES[numpy]
    big = np.array([1024.0, 1.0], numpy)
    for factor, passed in ((0.5, ""), (4, "is off by")):
        wrong = np.array([1024.0, 1.0 + 1024 * tolerance * factor], numpy)
        assert passed in compare_output("y", big, wrong).reason
        assert compare_output("y", big, wrong).passed is (passed == "")


def test_the_tolerances() -> None:
    limits = {"float64": 1e-12, "float32": 1e-5, "complex128": 1e-12, "complex64": 1e-5}
    assert limits | {"float16": 2e-3, "bfloat16": 1.6e-2, "tf32": 4e-3} == TOLERANCES


def test_bfloat16_has_its_own_tolerance() -> None:
    one = np.ones(3, ml_dtypes.bfloat16)
    close, far = one * ml_dtypes.bfloat16(1.0078125), one * ml_dtypes.bfloat16(1.03125)
    assert compare_output("y", one, close).passed and not compare_output("y", one, far).passed


def test_integers_and_booleans_are_exact() -> None:
    for dtype, tag in ((np.int64, 7), (bool, 9)):
        old = np.zeros(1000, dtype)
        new = old.copy()
        new[3] = 1
        found = compare_output("y", old, new)
        assert found.reason == f"output 'y' differs in 1 of 1000 elements; {old.dtype} has to be equal", tag
        assert compare_output("y", old, old).passed


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ([1, NAN], [1, NAN], ""),
        ([1, INF, -INF], [1, INF, -INF], ""),
        ([1, NAN], [1, 0], "output 'y' differs in NaN at 1 of 2 elements"),
        ([1, 0], [1, NAN], "output 'y' differs in NaN at 1 of 2 elements"),
        ([INF, 0], [-INF, 0], "output 'y' differs in infinite values at 1 of 2 elements"),
        ([1, 0], [INF, 0], "output 'y' differs in infinite values at 1 of 2 elements"),
        ([INF, 1], [3e38, 1], "output 'y' differs in infinite values at 1 of 2 elements"),
        ([NAN, INF, 1], [NAN, INF, 2], "output 'y' is off by 1.0e+00 of its largest value; float32 allows 1.0e-05"),
        ([], [], ""),
        ([0, 0], [0, 1e-6], ""),
        ([0, 0], [0, 1e-4], "output 'y' is off by 1.0e-04 of its largest value; float32 allows 1.0e-05"),
    ],
)
def test_nan_and_infinity_stay_where_they_were(old: list[float], new: list[float], reason: str) -> None:
    found = compare_output("y", np.array(old, np.float32), np.array(new, np.float32))
    assert (found.reason, found.passed) == (reason, reason == "")


def test_nan_in_a_whole_model() -> None:
    found = compare(elementwise("y = Sqrt(x)"), elementwise("a = Relu(x)  y = Sqrt(a)"))
    assert found.passed is False and "differs in NaN at" in found.reason


def test_another_shape_or_dtype_fails() -> None:
    source = model("(float[b, 4] x) => (float[b, 4] y)", "y = Relu(x)")
    turned = model("(float[b, 4] x) => (float[4, b] y)", "a = Relu(x)  y = Transpose(a)")
    original = "the original has float32 of shape 2 x 4"
    assert compare(source, turned).reason == f"output 'y' is float32 of shape 4 x 2; {original}"
    cast = model("(float[b, 4] x) => (double[b, 4] y)", "a = Relu(x)  y = Cast<to = 11>(a)")
    assert compare(source, cast).reason == f"output 'y' is float64 of shape 2 x 4; {original}"
    renamed = model("(float[b, 4] x) => (float[b, 4] z)", "z = Relu(x)")
    assert compare(source, renamed).reason == "output 'y' is missing"


def test_the_worst_run_counts() -> None:
    """The output is wrong only if b is 3, which it is in the second run."""
    wrong = elementwise(
        "s = Shape(x)  i = Constant<value_int = 0>()  b = Gather(s, i)  three = Constant<value_int = 3>()"
        "e = Equal(b, three)  n = Neg(x)  y = Where(e, n, x)"
    )
    found = compare(elementwise("y = Identity(x)"), wrong)
    assert found.passed is False and found.outputs[0].max_rel == pytest.approx(2.0)


def test_sequences_are_compared_tensor_by_tensor() -> None:
    def pair(op: str) -> onnx.ModelProto:
        return model("(float[b, d] x) => (seq(float[b, d]) y)", f"z = {op}(x)  y = SequenceConstruct(x, z)")

    assert compare(pair("Identity"), pair("Identity")).passed is True
    assert "output 'y' is off by 2.0e+00" in compare(pair("Identity"), pair("Neg")).reason
    shorter = model("(float[b, d] x) => (seq(float[b, d]) y)", "y = SequenceConstruct(x)")
    assert "is not a sequence of 2 tensors" in compare(pair("Identity"), shorter).reason


def test_json_is_strict() -> None:
    source = elementwise("y = Relu(x)")
    found = compare(source, elementwise("y = Cast<to = 1>(x)  ", outputs="y")).to_json()
    assert found["passed"] is False and set(found) == {
        "level",
        "status",
        "passed",
        "reason",
        "outputs",
        "equal_parts",
        "not_compared",
        "notes",
    }
    missing = compare(source, elementwise("z = Relu(x)", outputs="z")).to_json()
    (output,) = missing["outputs"]
    assert output == {
        "name": "y", "max_abs": None, "max_rel": None, "tolerance": 1e-5, "set_by": "", "base": "original",
    }  # fmt: skip
    json.dumps([found, missing], allow_nan=False)


# What cannot run


def test_an_original_that_does_not_run_is_no_failure() -> None:
    """The reshape requires 7 columns, which no generated size has."""
    source = model("(float[b, d] x) => (float[n, 7] y)", "s = Constant<value_ints = [6, 7, 11]>()  y = Reshape(x, s)")
    found = compare(source, source)
    assert found.passed is None and found.outputs == () and found.sizes == ()
    assert found.reason.startswith("the original does not run on generated inputs (Non-zero status code returned while")
    assert "onnxruntime_src" not in found.reason and "cannot be reshaped" in found.reason
    assert found.reason.endswith("give inputs or sizes that the model accepts: --input x.npz, --shape input:8x512")
    assert compare(source, source, inputs={"x": np.eye(66, 7, dtype=np.float32)}).passed is True


def test_an_original_without_kernels_is_no_failure() -> None:
    source = elementwise("y = odd.Thing(x)")
    source.opset_import.add(domain="odd", version=1)
    found = compare(source, source)
    assert found.passed is None and found.reason.startswith("onnxruntime cannot run the original on the CPU: ")


def test_an_optimized_model_that_does_not_run_fails() -> None:
    source, broken = elementwise("y = Relu(x)"), elementwise("y = odd.Thing(x)")
    broken.opset_import.add(domain="odd", version=1)
    found = compare(source, broken)
    assert found.passed is False and found.reason.startswith("the optimized model does not run: ")
    static = elementwise("s = Constant<value_ints = [6, 7, 11]>()  y = Reshape(x, s)")
    assert "the optimized model does not run: " in compare(source, static).reason


def test_inputs_that_the_original_lacks_are_named() -> None:
    source, other = (
        elementwise("y = Relu(x)"),
        model("(float[b, d] x, float[b, d] w) => (float[b, d] y)", "y = Add(x, w)"),
    )
    found = compare(source, other)
    assert found.passed is False and found.reason == (
        "the optimized model has inputs that the original lacks: 'w'; those of the original are: 'x'"
    )
    assert compare(other, source).reason.startswith("output 'y' is off by ")


def test_an_optimized_file_that_is_damaged_fails(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"text")
    source = elementwise("y = Relu(x)")
    assert "is not an ONNX file" in compare(source, tmp_path / "bad.onnx").reason
    assert compare(source, tmp_path / "bad.onnx").passed is False
    with pytest.raises(ModelError, match="is not an ONNX file"):
        compare(tmp_path / "bad.onnx", source)


def test_without_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    source = elementwise("y = Relu(x)")
    found = compare(source, source)
    assert found.passed is None
    assert "pip install onnxruntime" in found.reason


NOISE = "n = RandomNormalLike(x)  y = Add(x, n)"
SEEDED = "n = RandomNormalLike<seed = 1.0>(x)"
DROPOUT = "half = Constant<value = float {{0.5}}>()  t = Constant<value = bool {{{}}}>()  n = Dropout(x, half, t)"
IN_A_BRANCH = """go = Constant<value = bool {1}>()
n = If<then_branch = yes () => (float[b, d] k) { k = RandomNormalLike(x) },
       else_branch = no () => (float[b, d] e) { e = Neg(x) }>(go)"""


@pytest.mark.parametrize(
    ("body", "node"),
    [
        (NOISE, "RandomNormalLike node 'n'"),
        (f"{SEEDED}  k = Bernoulli(x)  y = Mul(n, k)", "Bernoulli node 'k'"),
        (f"{DROPOUT.format(1)}  y = Add(x, n)", "Dropout node 'n'"),
        (f"{IN_A_BRANCH}  y = Add(x, n)", "RandomNormalLike node 'k'"),
    ],
    ids=["alone", "after a seeded one", "dropout", "branch"],
)
def test_a_model_that_draws_random_numbers(body: str, node: str) -> None:
    source = elementwise(body)
    found = compare(source, source)
    why = f"{node} draws random numbers: no two runs are the same"
    assert (found.passed, found.status, found.not_compared) == (None, "none", (NotCompared("y", why),))
    assert found.reason == f"output 'y' is not compared: {why}"


def test_a_function_that_draws_random_numbers() -> None:
    source = elementwise("y = mine.Noisy(x)")
    source.opset_import.add(domain="mine", version=1)
    head = '<domain: "mine", opset_import: ["" : 17]>'
    source.functions.append(onnx.parser.parse_function(f"{head} Noisy (x) => (y) {{ {NOISE} }}"))
    assert compare(source, source).not_compared[0].reason.startswith("RandomNormalLike node 'n' draws random numbers")


@pytest.mark.parametrize("body", [SEEDED, "n = Dropout(x)", DROPOUT.format(0)])
def test_what_draws_nothing_new_is_compared(body: str) -> None:
    source = elementwise(f"{body}  y = Add(x, n)")
    assert compare(source, source).passed is True


def test_dropout_that_the_caller_switches() -> None:
    source = model("(float[b, d] x, bool t) => (float[b, d] y)", "y = Dropout(x, , t)")
    assert compare(source, source).not_compared[0].reason.startswith("Dropout node 'y' draws random numbers")
    assert compare(source, source, inputs={"t": np.array(False)}).passed is True


def test_inputs_that_are_no_tensors() -> None:
    source = model("(seq(float[2]) x) => (int64 y)", "y = SequenceLength(x)")
    assert compare(source, source).reason.startswith("input 'x' is not a tensor but of type sequence")


def test_an_input_without_an_element_type() -> None:
    source = elementwise("y = Relu(x)")
    source.graph.input[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    found = compare(source, source)
    assert (found.passed, found.reason) == (None, "input 'x' has no element type; no values can be made for it")


# Models with external data


def with_external_weight(folder: Path, value: float) -> onnx.ModelProto:
    source = model("(float[b, 512] x) => (float[b, 512] y)", "y = Add(x, w)")
    np.full(512, value, np.float32).tofile(folder / f"{value}.bin")
    weight = TensorProto(name="w", data_type=1, dims=[512], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value=f"{value}.bin")
    source.graph.initializer.append(weight)
    return source


def test_external_data_is_read_where_it_lies(tmp_path: Path) -> None:
    one, two = (with_external_weight(tmp_path, value) for value in (1.0, 2.0))
    onnx.save(one, path := tmp_path / "one.onnx")
    present = sorted(tmp_path.iterdir())
    assert compare(one, one, folder=tmp_path).passed is True
    assert compare(path, one).passed is True  # the optimized model's data lies in the original's folder
    assert compare(path, path).passed is True
    assert compare(path, two).passed is False
    assert sorted(tmp_path.iterdir()) == present


def test_a_model_over_2_gib_is_run_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def added(value: float) -> onnx.ModelProto:
        result = model("(float[b, 512] x) => (float[b, 512] y)", "y = Add(x, w)")
        result.graph.initializer.append(onnx.numpy_helper.from_array(np.full(512, value, np.float32), "w"))
        return result

    saved: list[Path] = []
    monkeypatch.setattr(saving, "PROTOBUF_LIMIT", 1500)
    save = saving.save
    monkeypatch.setattr(cpu_session, "save", lambda m, path, folder: [saved.append(path), save(m, path, folder=folder)])
    assert compare(added(1), added(1)).passed is True
    assert compare(added(1), added(2)).passed is False
    assert len(saved) == 9 and not any(path.parent.exists() for path in saved)


@pytest.mark.parametrize("name", read_index())
def test_exported_models_run_at_two_sizes(name: str, exported: Callable[[str], Path]) -> None:
    found = compare(exported(name), exported(name))
    assert found.passed is True and len(found.sizes) == 2
