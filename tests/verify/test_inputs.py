"""Test inputs: generated sizes fit together, generated values suit their use, and given arrays are checked."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from onnx import TensorProto

from onnxfuse.errors import UsageError
from onnxfuse.optimizer import optimize
from onnxfuse.verify.compare import compare
from onnxfuse.verify.extent import WITHOUT_EXTREMES
from onnxfuse.verify.input_uses import Use, bound_uses, integer_uses
from onnxfuse.verify.inputs import load_inputs, load_samples
from onnxfuse.verify.mask_rows import mask_inputs, with_mask_rows
from onnxfuse.verify.reference import run_original

HEAD = '<ir_version: 9, opset_import: ["" : 17]>'


def model(signature: str, body: str, head: str = HEAD) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{head} g {signature} {{ {body} }}")


def elementwise(body: str, dtype: str = "float", outputs: str = "y") -> onnx.ModelProto:
    results = ", ".join(f"{dtype}[b, d] {name}" for name in outputs.split())
    return model(f"({dtype}[b, d] x) => ({results})", body)


def feeds(source: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """Return the generated inputs of every run, without those of other rows of masks."""
    return [r.feeds for r in run_original(source, None, {}, lambda line: None, extent=WITHOUT_EXTREMES).runs]


def shapes(source: onnx.ModelProto) -> list[dict[str, tuple[int, ...]]]:
    return [{name: value.shape for name, value in feed.items()} for feed in feeds(source)]


# Generated inputs


def with_dims(*inputs: tuple[str, list[int | str | None]], dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Build a model whose inputs have these dims (the text format has no expressions)."""
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
    """`decoder-length` is a name, because neither `decoder` nor `length` is a dim; `a b` is not an expression."""
    source = with_dims(("x", ["decoder-length", "a b"]), ("z", ["a b", "decoder-length"]), ("u", ["f(n)", 3]))
    assert [s["x"] == s["z"][::-1] for s in shapes(source)] == [True, True]
    assert compare(source, source).sizes[0] == {"decoder-length": 2, "a b": 5, "f(n)": 7}


def test_unnamed_dims_get_their_own_sizes() -> None:
    found = compare(source := with_dims(("x", [None, None]), ("z", ["?", 3]), ("u", ["-1", "0"])), source)
    assert found.sizes[0] == {"x[0]": 2, "x[1]": 5, "z[0]": 7, "u[0]": 13, "u[1]": 3}


def test_static_models_run_once() -> None:
    assert shapes(with_dims(("x", [2, 3]))) == [{"x": (2, 3)}]


def test_other_sizes_are_tried_where_the_first_do_not_fit() -> None:
    """Two names stand for one size, and a reshape requires a multiple of 32."""
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
    assert integer_uses(source) == {"ids": Use("row", 3)}
    assert [(f["ids"].max(), bool(f["c"])) for f in feeds(source)] == [(2, True), (2, True), (2, False)]


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


MASKS = {
    "attention_mask": ("int64", "y = Cast<to = 1>(NAME)", "flags"), "m": ("int64", "y = Cast<to = 1>(NAME)", "flags"),
    "kept": ("bool", "y = Cast<to = 1>(NAME)", "flags"), "bias": ("float", "a = Add(NAME, x)  y = Softmax(a)", "added"),
    "half_bias": ("bfloat16", "c = Cast<to = 1>(NAME)  a = Add(x, c)  y = Softmax(a)", "added"),
    "factor": ("float", "m = Mul(NAME, x)  a = Add(m, x)  y = Softmax(a)", ""),
    "float_mask": ("float", "r = Sub(x, NAME)  y = Softmax(r)", "flags"),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_have_rows_that_leave_nothing_the_end_and_all_in_other_runs(name: str) -> None:
    dtype, body, kind = MASKS[name]
    body = f"x = Tanh(z)  {body.replace('NAME', name)}"
    source = model(f"({dtype}[b, s] {name}, float[b, s] z) => (float[b, s] y)", body)
    assert mask_inputs(source, {}) == ({name: kind} if kind else {}) and mask_inputs(source, {name}) == {}
    runs = run_original(source, None, {}, lambda line: None).runs
    assert len(runs) == (3 if kind else 2)
    if kind:
        first, other = runs[1].feeds, runs[2].feeds
        left = np.arange(8) >= [[8], [4], [0]]
        lowest = {"float": np.finfo(np.float32), "bfloat16": ml_dtypes.finfo(ml_dtypes.bfloat16)}.get(dtype)
        wanted = np.where(left, 0, lowest.min) if kind == "added" and lowest else left
        assert (other[name] == wanted.astype(other[name].dtype)).all() and np.isfinite(other[name]).all()
        assert other[name].dtype == first[name].dtype and (other["z"] == first["z"]).all()


def test_float16_is_not_run_on_rows_that_leave_nothing() -> None:
    """onnxruntime rounds scores beside -65504 to it, or does not where Casts of two nodes cancel."""
    source = model("(float16[b, s] bias, float16[b, s] z) => (float16[b, s] y)", "a = Add(z, bias)  y = Softmax(a)")
    assert "bias" in mask_inputs(source, {})
    assert len(run_original(source, None, {}, lambda line: None).runs) == 2


def test_a_mask_of_few_rows_is_drawn_several_times() -> None:
    feeds = {"m": np.zeros((2, 4, 1, 1), bool), "n": np.zeros((1, 3), bool), "o": np.zeros((2, 1), bool)}
    found = list(with_mask_rows(feeds, dict.fromkeys("mno", "flags")))
    assert [each["n"].tolist() for each in found] == [[[False] * 3], [[False, True, True]], [[True] * 3]]
    assert found[1]["m"].reshape(2, 4).tolist() == [[False, False, True, True], [True] * 4]
    assert found[2]["o"].tolist() == [[True], [False]]
    assert list(with_mask_rows({"p": np.zeros((0, 3), bool)}, {"p": "flags"})) == []


def test_the_sum_of_two_masks_is_not_one_mask_of_both() -> None:
    """Keys that two masks leave out differ from others in rows without a key, which the first draws do not have."""
    signature = "(float[b, s] x, int64[b, s] mask, bool[b, s] other) => (float[b, s] y)"
    numbers = "l = Constant<value_float = -3.4028234663852886e38>()  z = Constant<value_float = 0.0>()"
    begin = f"{numbers}  k = Cast<to = 9>(mask)"
    nested = model(signature, f"{begin}  a = Where(k, x, l)  b = Where(other, a, l)  y = Softmax(b)")
    added = "n = Where(k, z, l)  m = Where(other, z, l)  a = Add(n, m)  b = Add(x, a)  y = Softmax(b)"
    summed = model(signature, f"{begin}  {added}")
    assert compare(nested, nested).passed is True
    assert compare(nested, summed).reason.startswith("output 'y' differs in NaN at ")
    given = {"x": np.ones((1, 3), "f4"), "mask": np.array([[1, 1, 0]]), "other": np.array([[False, True, True]])}
    assert compare(nested, summed, inputs=given).passed is True, "given masks are not drawn again"


def test_positions_and_other_integers() -> None:
    source = model(
        "(int64[b, s] position_ids, int64[b, s] n, bool[s] flag) => (float[b, s] y, int64[b, s] z, bool[s] w)",
        "y = Cast<to = 1>(position_ids)  z = Neg(n)  w = Identity(flag)",
    )
    for feed in feeds(source):
        assert (feed["position_ids"] == np.arange(feed["n"].shape[1])).all()
        assert set(feed["n"].ravel()) <= {0, 1}
        assert feed["flag"][0] and feed["flag"].dtype == bool


BOUNDED = {
    "clip": ("float[b, d] x, float low, float high", "y = Clip(x, low, high)", "low high"),
    "half": ("float[b, d] x, float16 low, float16[1] high",
             "a = Cast<to = 1>(low)  c = Cast<to = 1>(high)  s = Squeeze(c)  y = Clip(x, a, s)", "low high"),
    "negated": ("float[b, d] x, float high", "low = Neg(high)  y = Clip(x, low, high)", "high"),
    "max_of_min": ("float[b, d] x, float[1, 1] low, float high", "m = Min(x, high)  y = Max(low, m)", "low high"),
    "integers": ("int32[b, d] x, uint8 low, int32 high",
                 "a = Cast<to = 6>(low)  c = Clip(x, a, high)  y = Cast<to = 1>(c)", "low high"),
    "constant": ("float[b, d] z, float[1] n",
                 "e = Constant<value_float = 0.0>()  m = Max(n, e)  y = Add(z, m)", ""),
    "singles": ("float[b, d] z, float[1] n, float m", "l = Max(n, m)  y = Add(z, l)", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDED)
def test_bounds_leave_numbers_between_them(name: str) -> None:
    """Max and Min of a number and a constant, or of two numbers, have no bounds."""
    signature, body, found = BOUNDED[name]
    source, values = model(f"({signature}) => (float[b, d] y)", body), {"low": (-1, 0), "high": (1, 1)}
    assert bound_uses(source) == {each: Use(each) for each in found.split()}
    assert all(feeds(source)[0][each].item() in values[each] for each in found.split())
    assert compare(source, source).passed is True


def test_quantized_inputs_take_all_values() -> None:
    source = model(
        "(uint8[b, 3, 300, 9] x, int8[b, 3, 300, 9] w) => (float[b, 3, 300, 9] y)",
        "s = Constant<value_float = 1.0>()  v = DequantizeLinear(x, s)  u = DequantizeLinear(w, s)  y = Add(v, u)",
    )
    for feed in feeds(source):
        for values, least in (feed["x"], 0), (feed["w"], -128):
            assert (values.min(), values.max(), len(np.unique(values))) == (least, least + 255, 256)


# A mask of lengths: 0, 1, 2, ... < length, as exporters write it.
SEQUENCE_MASK = """s = Shape(x)  one = Constant<value_int = 1>()  n = Gather(s, one)  zero = Constant<value_int = 0>()
    r = Range(zero, n, one)  last = Constant<value_ints = [1]>()  u = Unsqueeze(NAME, last)  m = Less(r, u)
    f = Cast<to = 1>(m)  y = Mul(x, f)"""


@pytest.mark.parametrize("name", ["lengths", "x_lens", "k"])
def test_lengths_count_elements_of_their_rows(name: str) -> None:
    source = model(f"(float[b, t] x, int64[b] {name}) => (float[b, t] y)", SEQUENCE_MASK.replace("NAME", name))
    for feed in feeds(source):
        values, (rows, size) = feed[name], feed["x"].shape
        assert values.shape == (rows,) and values.max() == size and values.min() >= 1 and len(set(values)) > 1


def test_a_length_counts_the_input_that_it_is_named_after() -> None:
    source = model(
        "(float[b, 80, t] speech, float[b, u] text, int64[b] text_lengths, int64[b] speech_lengths) => (int64[b] y)",
        "y = Add(text_lengths, speech_lengths)",
    )
    for feed in feeds(source):
        assert feed["text_lengths"].max() == feed["text"].shape[1]
        assert feed["speech_lengths"].max() == feed["speech"].shape[2]


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        ("int64 n", "zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()  r = Range(zero, n, one)"),
        ("int64[1] n", "r = Expand(x, n)"),
        ("int64[1] n", "r = ConstantOfShape(n)"),
        ("int64[1] n", "zero = Constant<value_ints = [0]>()  r = Slice(x, zero, n)"),
        ("int64[1] n", "r = Tile(x, n)"),
        ("int64[1] n", "v, r = TopK(w, n)"),
        ("int64 n", "two = Constant<value_int = 2>()  r = Mod(two, n)"),
        ("int64[1] n", "two = Constant<value_int = 2>()  r = Div(two, n)"),
    ],
)
def test_sizes_are_small_and_positive(signature: str, body: str) -> None:
    source = model(f"({signature}, float[1] x, float[4] w, float[b, t] z) => (int64[o] y)", f"{body}  y = Shape(r)")
    for feed in feeds(source):
        assert feed["n"].min() >= 1 and feed["n"].max() <= feed["z"].shape[1]


def test_a_number_that_the_model_compares_with_a_constant_is_that_constant() -> None:
    source = model(
        "(float[b, t] x, int64 rate) => (float[b, t] y)",
        """expected = Constant<value_int = 16000>()  c = Equal(rate, expected)
           y = If (c) < then_branch = t () => (float[b, t] u) { u = Neg(x) },
                        else_branch = e () => (float[b, t] v) { v = Abs(x) } >""",
    )
    assert all(feed["rate"] == 16000 for feed in feeds(source))


def test_sizes_of_images_and_their_scales() -> None:
    source = model(
        "(float[b, 3, h, w] image, float[b, 2] im_shape, float[b, 2] scale_factor) => (float[b, 2] y)",
        "y = Div(im_shape, scale_factor)",
    )
    for feed in feeds(source):
        assert (feed["im_shape"] == feed["image"].shape[2:]).all() and (feed["scale_factor"] == 1).all()


@pytest.mark.parametrize(
    ("signature", "weight", "shape"),
    [
        ("float[b, 3, h, w] x", "1, 3, 300, 300", (1, 3, 448, 448)),
        ("float[b, 1, t] x", "1, 1, 5000", (1, 1, 8192)),
        ("float[t] x", "1, 1, 400", (448,)),
    ],
)
def test_inputs_that_are_too_small_are_drawn_again_larger(signature: str, weight: str, shape: tuple[int, ...]) -> None:
    """Images and samples of audio, these also without a batch."""
    rank, large = weight.count(","), ", ".join(["400"] * (weight.count(",") - 1))
    three = "s = Constant<value_ints = [1, 1, -1]>()  u = Reshape(x, s)" if len(shape) == 1 else "u = Identity(x)"
    body = f"t = Constant<value_ints = [{weight}]>()  w = ConstantOfShape(t)  y = Conv<strides = [{large}]>(u, w)"
    source = model(f"({signature}) => (float[{', '.join('opqr'[: rank + 1])}] y)", f"{three}  {body}")
    assert feeds(source)[0]["x"].shape == shape


def test_images_have_the_channels_of_their_filters() -> None:
    """Without this, onnxruntime runs the Conv on images of five channels: its blocked layout does not compare them."""
    body = "k = Constant<value_ints = [16, 16, 3, 3]>()  w = ConstantOfShape(k)  p = MaxPool<kernel_shape = [2, 2]>(x)"
    source = model("(float[n, c, h, w] x) => (float[n, 16, s, t] y)", f"{body}  z = Conv(p, w)  y = Relu(z)")
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((16, 16, 3, 3), np.float32), "w"))
    del source.graph.node[:2]
    assert {feed["x"].shape[1] for feed in feeds(source)} == {16}
    with pytest.raises(UsageError, match="input 'x' has shape 1 x 5 x 8 x 8; the model takes n x 16 x h x w"):
        run_original(source, None, {"x": np.ones((1, 5, 8, 8), np.float32)}, lambda line: None)


def test_samples_of_audio_beside_the_state_of_a_network() -> None:
    """The second input has a batch of its own name on its middle axis."""
    body = """t = Constant<value_ints = [1, 1, 250]>()  w = ConstantOfShape(t)  one = Constant<value_ints = [1]>()
        u = Unsqueeze(x, one)  c = Conv<strides = [250]>(u, w)  z = Reshape(h, k)  y = Mul(c, z)"""
    source = model("(float[b, t] x, float[1, c, 1] h) => (float[b, p, q] y)", body)
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1, 1]), "k"))
    (feed, *_) = feeds(source)
    assert (feed["x"].shape, feed["h"].shape) == ((1, 256), (1, 1, 1))


def test_a_larger_size_is_tried_where_an_output_shows_nothing() -> None:
    """Frames of 1000 samples: of the sizes that are tried first, none has one."""
    body = """s = Shape(x)  i = Constant<value_int = 1>()  t = Gather(s, i)  f = Constant<value_int = 1000>()
        n = Div(t, f)  one = Constant<value_ints = [1]>()  zero = Constant<value_ints = [0]>()
        e = Reshape(n, one)  y = Slice(x, zero, e, one)"""
    source = model("(float[b, t] x) => (float[b, n] y)", body)
    found = compare(source, source)
    assert (found.status, found.sizes[-1]) == ("verified", {"b": 1, "t": 32768})


def test_no_size_is_tried_at_which_a_result_is_huge() -> None:
    """`h` is 0 everywhere; of 32768 samples, the product of all with all others would have 2^30 elements."""
    body = """t = Transpose<perm = [0, 2, 1]>(x)  y = MatMul(x, t)  a = Abs(x)  n = Neg(a)  h = Relu(n)"""
    source = model("(float[b, t, 1] x) => (float[b, t, t] y, float[b, t, 1] h)", body)
    found = compare(source, source)
    assert [each.name for each in found.not_compared] == ["h"]
    assert max(sizes["t"] for sizes in found.sizes) == 2048


def test_no_other_inputs_are_tried_for_an_output_that_depends_on_none_that_is_drawn() -> None:
    source = model("(float[b, t] x, float[u] z) => (float[b, t] y, float[u] c)", "y = Relu(x)  c = Neg(z)")
    found = compare(source, source, inputs={"z": np.ones(2, np.float32)})
    assert [each.name for each in found.not_compared] == ["c"]
    assert [sizes["t"] for sizes in found.sizes] == [5, 8]
    drawn = compare(source, source, inputs={"x": np.ones((2, 3), np.float32)})
    assert [each.name for each in drawn.not_compared] == ["y"]
    assert len(drawn.sizes) == 2


def test_the_sizes_that_were_tried_are_told() -> None:
    body = "s = Constant<value_ints = [-1, 99999]>()  y = Reshape(x, s)"
    source = model("(float[b, t] x) => (float[b, 99999] y)", body)
    reason = compare(source, source).reason
    assert reason.startswith("the original does not run on generated inputs (Non-zero status code returned")
    tried = r"\) and at 16 other sizes, at last b=1, t=32768 \(.*\); give inputs or sizes that the model accepts: "
    assert re.search(tried + "--input x.npz, --shape input:8x512$", reason)


def test_no_larger_size_is_tried_after_a_large_one_that_was_refused_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one would take longer, and perhaps all memory."""
    monkeypatch.setattr("onnxfuse.verify.reference.MAX_SECONDS_REFUSED", 0.0)
    body = "s = Constant<value_ints = [-1, 99999]>()  y = Reshape(x, s)"
    source = model("(float[b, t] x) => (float[b, 99999] y)", body)
    assert " and at 9 other sizes, at last b=1, t=1024 (" in compare(source, source).reason


def test_requested_sizes_replace_chosen_ones() -> None:
    source = model("(float[b, t] x, float[b, u] z) => (float[b, t] y)", "y = Relu(x)")
    found = compare(source, source, shapes=["x:3x70"])
    assert [sizes["t"] for sizes in found.sizes] == [70, 70] and found.sizes[0]["b"] == 3
    with pytest.raises(UsageError, match=r"is not of the form input:8x512; the model's inputs: x:bxt, z:bxu"):
        compare(source, source, shapes=["8x512"])
    with pytest.raises(UsageError, match="has 1 dims; the model takes 2"):
        compare(source, source, shapes=["x:3"])


@pytest.mark.parametrize("dtype", ["float", "float16", "double", "bfloat16"])
def test_floats_are_normal_and_the_same_every_time(dtype: str) -> None:
    source = elementwise("y = Identity(x)", dtype)
    one, two = feeds(source)[0]["x"], feeds(source)[0]["x"]
    assert one.dtype == onnx.helper.tensor_dtype_to_np_dtype(source.graph.input[0].type.tensor_type.elem_type)
    assert (one == two).all() and 0.3 < one.astype(float).std() < 2
    assert compare(source, source).passed is True


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


UNRANKED = model("(float[] x, float[b, 4] z) => (float[] y)", "a = Exp(x)  y = Mul(a, z)")


def test_arrays_give_unknown_ranks(tmp_path: Path) -> None:
    """The ranks serve the run, the samples and half precision; a file without the input is told by name."""
    arrays = {"x": np.ones((3, 1), np.float32), "z": np.arange(12, dtype=np.float32).reshape(3, 4)}
    np.savez(tmp_path / "x.npz", **arrays)
    loaded = load_inputs(tmp_path / "x.npz", UNRANKED)
    assert compare(UNRANKED, UNRANKED, inputs=loaded).passed is True
    assert [each["x"].shape for each in load_samples(arrays, UNRANKED)] == [(3, 1)]
    many = {name: np.stack([value, value]) for name, value in arrays.items()}
    assert [each["x"].shape for each in load_samples(many, UNRANKED)] == [(3, 1), (3, 1)]
    _, report = optimize(UNRANKED, dtype="float16", inputs=loaded)
    assert report.verified.passed is True and report.half is not None and report.half.errors
    np.savez(tmp_path / "z.npz", z=arrays["z"])
    with pytest.raises(UsageError, match="has no input 'x'"):
        load_inputs(tmp_path / "z.npz", UNRANKED)


def test_requested_shapes_give_unknown_ranks() -> None:
    """One array is given and the other drawn; without a shape the refusal says what to give."""
    drawn = compare(UNRANKED, UNRANKED, shapes=["x:3x4"], inputs={"z": np.ones((3, 4), np.float32)})
    assert drawn.passed is True and not drawn.sizes[0].keys() - {"x[0]", "x[1]", "b"}
    refused = compare(UNRANKED, UNRANKED)
    assert refused.passed is None and "'x' is a tensor of unknown rank; give" in refused.reason


def test_files_that_hold_no_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", GOOD["ids"])
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 cut")
    os.mkfifo(tmp_path / "pipe.npz")
    np.savez(tmp_path / "code.npz", ids=np.array([print], object), hidden_states=GOOD["hidden_states"])
    header = np.lib.format.magic(1, 0) + (118).to_bytes(2, "little")
    for name, shape in (("huge.npz", "(1000000000000,)"), ("deep.npz", "(" * 30 + "4,")):
        described = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("ids.npy", header + described.encode())
    for name, expected in (
        ("none.npz", "does not exist"),
        ("huge.npz", "is no .npz file of plain arrays: Unable to allocate"),
        ("deep.npz", "is no .npz file of plain arrays"),
        ("one.npy", "holds one array without a name"),
        ("text.npz", "is no .npz file"),
        ("empty.npz", "is no .npz file"),
        ("cut.npz", "is no .npz file"),
        ("code.npz", "is no .npz file of plain arrays"),
        ("pipe.npz", "it is a device or a pipe"),
    ):
        with pytest.raises(UsageError, match=expected):
            load_inputs(tmp_path / name, TWO)
