"""Verification: equal models pass, every kind of difference is named, and what cannot run is not called a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from onnx import TensorProto

from onnxfuse import files, verify
from onnxfuse.errors import ModelError, UsageError, VerificationError
from onnxfuse.verify import compare, first_difference, load_inputs

HEAD = '<ir_version: 9, opset_import: ["" : 17]>'
EXPORTED = sorted((Path(__file__).parent.parent / "models" / "exported").glob("*.onnx"))


def model(signature: str, body: str, head: str = HEAD) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{head} g {signature} {{ {body} }}")


def elementwise(body: str, dtype: str = "float", outputs: str = "y") -> onnx.ModelProto:
    results = ", ".join(f"{dtype}[b, d] {name}" for name in outputs.split())
    return model(f"({dtype}[b, d] x) => ({results})", body)


def feeds(source: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """The generated inputs of every round that runs."""
    return [r.feeds for r in verify._run_original(source, None, {}, lambda line: None)]


def shapes(source: onnx.ModelProto) -> list[dict[str, tuple[int, ...]]]:
    return [{name: value.shape for name, value in feed.items()} for feed in feeds(source)]


# Verdicts


def test_equal_models_pass_at_two_sizes() -> None:
    source = elementwise("y = Relu(x)  z = Neg(x)", outputs="y z")
    lines: list[str] = []
    found = compare(source, source, progress=lines.append)
    assert found.passed is True and found.reason == ""
    assert [(o.name, o.max_abs, o.tolerance) for o in found.outputs] == [("y", 0.0, 1e-5), ("z", 0.0, 1e-5)]
    assert found.sizes == ({"b": 2, "d": 5}, {"b": 3, "d": 8})
    assert lines == ["run the original, b=2, d=5", "run the original, b=3, d=8", "run the optimized model"]


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
    tolerance = verify.TOLERANCES[numpy]
    big = np.array([1024.0, 1.0], numpy)
    for factor, passed in ((0.5, ""), (4, "is off by")):
        wrong = np.array([1024.0, 1.0 + 1024 * tolerance * factor], numpy)
        assert passed in verify._difference("y", big, wrong).reason
        assert verify._difference("y", big, wrong).passed is (passed == "")


def test_the_tolerances() -> None:
    limits = {"float64": 1e-12, "float32": 1e-5, "complex128": 1e-12, "complex64": 1e-5}
    assert limits | {"float16": 2e-3, "bfloat16": 1.6e-2} == verify.TOLERANCES


def test_bfloat16_has_its_own_tolerance() -> None:
    one = np.ones(3, ml_dtypes.bfloat16)
    close, far = one * ml_dtypes.bfloat16(1.0078125), one * ml_dtypes.bfloat16(1.03125)
    assert verify._difference("y", one, close).passed and not verify._difference("y", one, far).passed


def test_integers_and_booleans_are_exact() -> None:
    for dtype, tag in ((np.int64, 7), (bool, 9)):
        old = np.zeros(1000, dtype)
        new = old.copy()
        new[3] = 1
        found = verify._difference("y", old, new)
        assert found.reason == f"output 'y' differs in 1 of 1000 elements; {old.dtype} has to be equal", tag
        assert verify._difference("y", old, old).passed


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ([1, NAN], [1, NAN], ""),
        ([1, INF, -INF], [1, INF, -INF], ""),
        ([1, NAN], [1, 0], "output 'y' differs in NaN at 1 of 2 places"),
        ([1, 0], [1, NAN], "output 'y' differs in NaN at 1 of 2 places"),
        ([INF, 0], [-INF, 0], "output 'y' differs in infinite values at 1 of 2 places"),
        ([1, 0], [INF, 0], "output 'y' differs in infinite values at 1 of 2 places"),
        ([INF, 1], [3e38, 1], "output 'y' differs in infinite values at 1 of 2 places"),
        ([NAN, INF, 1], [NAN, INF, 2], "output 'y' is off by 1.0e+00 of its largest value; float32 allows 1.0e-05"),
        ([], [], ""),
        ([0, 0], [0, 1e-6], ""),
        ([0, 0], [0, 1e-4], "output 'y' is off by 1.0e-04 of its largest value; float32 allows 1.0e-05"),
    ],
)
def test_nan_and_infinity_stay_where_they_were(old: list[float], new: list[float], reason: str) -> None:
    found = verify._difference("y", np.array(old, np.float32), np.array(new, np.float32))
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


def test_the_worst_round_counts() -> None:
    """Wrong only where b is 3, which is the second round."""
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
    assert "is no sequence of 2 tensors" in compare(pair("Identity"), shorter).reason


def test_json_is_strict() -> None:
    source = elementwise("y = Relu(x)")
    found = compare(source, elementwise("y = Cast<to = 1>(x)  ", outputs="y")).to_json()
    assert found["passed"] is False and set(found) == {"passed", "reason", "outputs"}
    missing = compare(source, elementwise("z = Relu(x)", outputs="z")).to_json()
    assert missing["outputs"] == [{"name": "y", "max_abs": None, "max_rel": None, "tolerance": 1e-5}]
    json.dumps([found, missing], allow_nan=False)


# What cannot run


def test_an_original_that_does_not_run_is_no_failure() -> None:
    """The reshape wants 7 columns, which no generated size has."""
    source = model("(float[b, d] x) => (float[n, 7] y)", "s = Constant<value_ints = [6, 7, 11]>()  y = Reshape(x, s)")
    found = compare(source, source)
    assert found.passed is None and found.outputs == () and found.sizes == ()
    assert found.reason.startswith("the original does not run on generated inputs (Non-zero status code returned while")
    assert "onnxruntime_src" not in found.reason and "cannot be reshaped" in found.reason
    assert found.reason.endswith("give inputs that the model accepts: --input x.npz")
    assert compare(source, source, inputs={"x": np.ones((66, 7), np.float32)}).passed is True


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
    assert "pip install 'onnxfuse[cpu]' or pip install 'onnxfuse[cuda]'" in found.reason
    with pytest.raises(VerificationError, match="not installed"):
        first_difference(source, source, ["y"])


def test_a_model_that_draws_random_numbers() -> None:
    source = elementwise("n = RandomNormalLike(x)  y = Add(x, n)")
    assert compare(source, source).passed is None
    assert "RandomNormalLike node '' draws random numbers" in compare(source, source).reason


def test_inputs_that_are_no_tensors() -> None:
    source = model("(seq(float[2]) x) => (int64 y)", "y = SequenceLength(x)")
    assert compare(source, source).reason.startswith("input 'x' is no tensor but sequence")


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
    assert compare(path, one).passed is True  # the optimized model's data lies where the original's does
    assert compare(path, path).passed is True
    assert compare(path, two).passed is False
    assert sorted(tmp_path.iterdir()) == present


def test_a_model_over_2_gib_is_run_from_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def added(value: float) -> onnx.ModelProto:
        result = model("(float[b, 512] x) => (float[b, 512] y)", "y = Add(x, w)")
        result.graph.initializer.append(onnx.numpy_helper.from_array(np.full(512, value, np.float32), "w"))
        return result

    saved: list[Path] = []
    save = files.save
    monkeypatch.setattr(files, "PROTOBUF_LIMIT", 1500)
    monkeypatch.setattr(files, "save", lambda m, path, folder: [saved.append(path), save(m, path, folder=folder)])
    assert compare(added(1), added(1)).passed is True
    assert compare(added(1), added(2)).passed is False
    assert len(saved) == 4 and not any(path.parent.exists() for path in saved)


# Generated inputs


def with_dims(*inputs: tuple[str, list[int | str | None]], dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A model whose inputs have these dims (the text format knows no expressions)."""
    values = [onnx.helper.make_tensor_value_info(name, dtype, dims) for name, dims in inputs]
    result = elementwise("y = Relu(x)")
    result.graph.ClearField("input")
    result.graph.input.extend(values)
    result.graph.node[0].input[0] = inputs[0][0]
    result.graph.output[0].type.tensor_type.elem_type = dtype
    del result.graph.output[0].type.tensor_type.shape.dim[:]
    result.graph.output[0].type.tensor_type.ClearField("shape")
    return result


def test_dims_that_are_expressions_fit_together() -> None:
    source = with_dims(
        ("new", ["batch", "seq", 4]),
        ("cache", ["batch", "past", 4]),
        ("both", ["batch", "past + seq"]),
        ("step", ["2*seq", "past_sequence_length + 1", "seq // 2"]),
    )
    assert shapes(source) == [
        {"new": (2, 5, 4), "cache": (2, 3, 4), "both": (2, 8), "step": (10, 10, 2)},
        {"new": (3, 8, 4), "cache": (3, 4, 4), "both": (3, 12), "step": (16, 7, 4)},
    ]


def test_the_total_length_is_the_sum_of_past_and_new() -> None:
    source = with_dims(
        ("mask", ["b", "total_sequence_length"]),
        ("ids", ["b", "sequence_length"]),
        ("k", ["b", "past_sequence_length"]),
    )
    (first, second) = shapes(source)
    assert first["mask"][1] == first["ids"][1] + first["k"][1]
    assert second["mask"][1] == second["ids"][1] + second["k"][1] != first["mask"][1]


def test_names_that_only_look_like_expressions() -> None:
    """`decoder-length` is a name: neither `decoder` nor `length` is a dim.  `a b` is no arithmetic at all."""
    source = with_dims(("x", ["decoder-length", "a b"]), ("z", ["a b", "decoder-length"]), ("u", ["f(n)", 3]))
    assert [s["x"] == s["z"][::-1] for s in shapes(source)] == [True, True]
    assert compare(source, source).sizes[0] == {"decoder-length": 2, "a b": 5, "f(n)": 7}


def test_unnamed_dims_get_their_own_sizes() -> None:
    found = compare(source := with_dims(("x", [None, None]), ("z", ["?", 3])), source)
    assert found.sizes[0] == {"x[0]": 2, "x[1]": 5, "z[0]": 7}


def test_static_models_run_once() -> None:
    assert shapes(with_dims(("x", [2, 3]))) == [{"x": (2, 3)}]


def test_other_sizes_are_tried_where_the_first_do_not_fit() -> None:
    """Two names for one size, and a stride that wants a multiple of 32."""
    same = model("(float[a, b] x, float[c, d] z) => (float[a, b] y)", "y = Add(x, z)")
    assert [s["x"] == s["z"] for s in shapes(same)] == [True, True]
    body = "s = Constant<value_ints = [0, 32, -1]>()  y = Reshape(x, s)"
    strided = model("(float[b, n] x) => (float[b, 32, m] y)", body)
    assert [s["x"][1] % 32 for s in shapes(strided)] == [0, 0]


def test_indices_stay_inside_their_table() -> None:
    body = "i = Cast<to = 6>(ids)  u = Unsqueeze(i, zero)  s = Squeeze(u, zero)  y = Gather(table, s)"
    source = model("(int64[b, s] ids) => (float[b, s, 4] y)", body)
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((9, 4), np.float32), "table"))
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "zero"))
    values = np.concatenate([f["ids"].ravel() for f in feeds(source)])
    assert values.min() >= 0 and values.max() < 9 and len(set(values)) > 4


def test_indices_inside_functions_and_branches() -> None:
    source = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17, "own" : 1]>
        g (int64[b, s] ids, bool c) => (float[b, s, 2] y) {
            y = If (c) <
                then_branch = t () => (float[b, s, 2] u) { u = own.look(ids) },
                else_branch = e () => (float[b, s, 2] v) { v = own.look(ids) } > }
        <domain: "own", opset_import: ["" : 17]> look (i) => (o) {
            table = Constant<value = float[3, 2] {0, 1, 2, 3, 4, 5}>()  o = Gather(table, i) }""")
    assert verify._roles(source) == {"ids": 3}
    assert all(f["ids"].max() == 2 and f["c"][()] for f in feeds(source))


@pytest.mark.parametrize(
    ("name", "body"),
    [("attention_mask", "y = Identity(NAME)"), ("m", "f = Cast<to = 1>(NAME)  n = Neg(f)  y = Cast<to = 7>(n)"),
     ("m", "z = Constant<value_int = 0>()  e = Equal(NAME, z)  y = Cast<to = 7>(e)")],
)  # fmt: skip
def test_masks_keep_a_prefix_of_every_row(name: str, body: str) -> None:
    source = model(f"(int64[b, s] {name}) => (int64[b, s] y)", body.replace("NAME", name))
    for feed in feeds(source):
        mask = feed[name]
        assert set(np.unique(mask)) == {0, 1} and (mask[:, 0] == 1).all() and (mask[:, -1] == 0).all()
        assert (np.diff(mask) <= 0).all() and len(set(mask.sum(axis=1))) > 1


def test_positions_and_other_integers() -> None:
    source = model(
        "(int64[b, s] position_ids, int64[b, s] n, bool[s] flag) => (float[b, s] y, int64[b, s] z, bool[s] w)",
        "y = Cast<to = 1>(position_ids)  z = Neg(n)  w = Identity(flag)",
    )
    for feed in feeds(source):
        assert (feed["position_ids"] == np.arange(feed["n"].shape[1])).all()
        assert set(feed["n"].ravel()) <= {0, 1}
        assert feed["flag"][0] and feed["flag"].dtype == bool


@pytest.mark.parametrize("dtype", ["float", "float16", "double", "bfloat16"])
def test_floats_are_normal_and_the_same_every_time(dtype: str) -> None:
    source = elementwise("y = Identity(x)", dtype)
    one, two = feeds(source)[0]["x"], feeds(source)[0]["x"]
    assert one.dtype == onnx.helper.tensor_dtype_to_np_dtype(source.graph.input[0].type.tensor_type.elem_type)
    assert (one == two).all() and 0.3 < one.astype(float).std() < 2
    assert compare(source, source).passed is True


@pytest.mark.skipif(not EXPORTED, reason="models/exported is empty")
@pytest.mark.parametrize("path", EXPORTED, ids=lambda path: path.stem)
def test_exported_models_run_at_two_sizes(path: Path) -> None:
    found = compare(path, path)
    assert found.passed is True and len(found.sizes) == 2


# Given inputs


def test_given_inputs_replace_generated_ones_and_set_the_sizes() -> None:
    source = model("(float[b, d] x, float[b, d] z) => (float[b, d] y)", "y = Add(x, z)")
    found = compare(source, source, inputs={"x": np.ones((6, 7), np.float32)})
    assert found.passed is True and found.sizes == ({"b": 6, "d": 7},)
    both = compare(source, source, inputs={n: np.ones((s, 7), np.float32) for n, s in (("x", 6), ("z", 5))})
    assert both.passed is None and both.reason.startswith("the original does not run on the given inputs (")


TWO = model(
    "(float[b, 3] hidden_states, int64[b] ids) => (float[b, 3] y, int64[b] z)", "y = Relu(hidden_states)  z = Neg(ids)"
)
GOOD = {"hidden_states": np.ones((2, 3), np.float32), "ids": np.ones(2, np.int64)}


def test_inputs_from_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **GOOD)
    loaded = load_inputs(tmp_path / "x.npz", TWO)
    assert loaded.keys() == GOOD.keys() and (loaded["ids"] == 1).all()
    half = elementwise("y = Identity(x)", "bfloat16")
    np.savez(tmp_path / "h.npz", x=np.ones((2, 3), ml_dtypes.bfloat16))
    assert load_inputs(tmp_path / "h.npz", half)["x"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ids": None}, "has no input 'ids'; known: hidden_states"),
        ({"hidden_states": None, "hidden_state": GOOD["ids"]}, "Did you mean 'hidden_state'?"),
        ({"id": GOOD["ids"]}, "the model has no input 'id'. Did you mean 'ids'?"),
        ({"ids": np.ones(2, np.int32)}, "input 'ids' is int32; the model takes int64"),
        ({"ids": np.ones((2, 2), np.int64)}, "input 'ids' has 2 dims; the model takes 1: b"),
        ({"hidden_states": np.ones((2, 4), np.float32)}, "has shape 2 x 4; the model takes b x 3"),
    ],
)
def test_inputs_that_do_not_fit(tmp_path: Path, change: dict[str, np.ndarray | None], expected: str) -> None:
    arrays = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UsageError) as caught:
        load_inputs(tmp_path / "x.npz", TWO)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_hold_no_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", GOOD["ids"])
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 cut")
    np.savez(tmp_path / "code.npz", ids=np.array([print], object), hidden_states=GOOD["hidden_states"])
    for name, expected in (
        ("none.npz", "does not exist"),
        ("one.npy", "holds one array without a name"),
        ("text.npz", "is no .npz file"),
        ("empty.npz", "is no .npz file"),
        ("cut.npz", "is no .npz file"),
        ("code.npz", "is no .npz file of plain arrays"),
    ):
        with pytest.raises(UsageError, match=expected):
            load_inputs(tmp_path / name, TWO)


# The guilty fusion


def test_the_first_tensor_that_differs() -> None:
    source = elementwise("a = Neg(x)  b = Neg(a)  c = Neg(b)  y = Neg(c)")
    wrong = elementwise("a = Neg(x)  b = Abs(x)  c = Neg(b)  y = Neg(c)")
    assert first_difference(source, wrong, ["a", "b", "c", "y"]) == "b"
    assert first_difference(source, wrong, ["a", "unknown", "c", "y"]) == "c"
    assert first_difference(source, source, ["a", "b", "c", "y"]) is None
    assert first_difference(source, wrong, ["a"]) is None
    assert len(source.graph.output) == 1


def test_no_first_difference_where_a_model_does_not_run() -> None:
    source, broken = elementwise("y = Relu(x)"), elementwise("y = odd.Thing(x)")
    broken.opset_import.add(domain="odd", version=1)
    with pytest.raises(VerificationError, match="the optimized model does not run: "):
        first_difference(source, broken, ["y"])
    with pytest.raises(VerificationError, match="cannot run the original"):
        first_difference(broken, source, ["y"])
