"""Test what verification says of outputs that hide errors, and the tolerance that the original's own noise sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from click.testing import CliRunner

from onnxfuse.cli import main
from onnxfuse.ir.dtypes import DTYPE_NUMBERS, LARGEST_FLOAT8
from onnxfuse.verify import observed
from onnxfuse.verify.compare import Verification, compare
from onnxfuse.verify.judge import NOISE_FACTOR
from onnxfuse.verify.observed import NotCompared, what_hides
from onnxfuse.verify.reference import Reference

HEAD = '<ir_version: 9, opset_import: ["" : 17]>'
NAN, INF = float("nan"), float("inf")


def parse(signature: str, body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} g {signature} {{ {body} }}")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1.0, 2.0], ""),
        ([NAN, 2.0, 3.0], ""),
        ([NAN, NAN], "it is NaN everywhere"),
        ([INF, -INF, NAN], "it is infinite or NaN everywhere"),
        ([], "it is empty"),
        ([-3e38, -3e38], "it is masked everywhere, by values such as -3e+38"),
        ([-3e38, 1.0, 2.0], ""),
        ([4.5, 4.5], "it is 4.5 for all inputs tried"),
        ([1e6 - 2, 1e6 + 3], "it varies by 5.0e+00 about 999998 for all inputs tried, which is as much as rounding"),
        ([1e6 - 200, 1e6 + 300], ""),
        ([7.0], ""),
    ],
)
def test_what_an_output_shows(values: list[float], reason: str) -> None:
    assert what_hides([np.array(values, np.float32)]) == reason


def test_integers_show_something_where_they_differ() -> None:
    assert what_hides([np.array([3, 3]), np.array([3])]) == "it is 3 for all inputs tried"
    assert what_hides([np.array([3]), np.array([4])]) == ""
    assert what_hides([[np.zeros(0, np.float32)], [np.zeros(0, np.float32)]]) == "it is empty"


def test_of_large_outputs_a_part_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "SAMPLE", 64)
    constant = np.full((2, 500), 7, np.float32)
    assert what_hides([constant, constant]) == "it is 7 for all inputs tried"
    between = constant.copy()
    between[1, 499] = 8  # the part leaves it out
    assert what_hides([between]) == ""
    looked_at, hidden = list[int](), observed._hidden

    def noted(arrays: Sequence[np.ndarray]) -> str:
        looked_at.append(sum(each.size for each in arrays))
        return hidden(arrays)

    monkeypatch.setattr(observed, "_hidden", noted)
    assert what_hides([np.arange(1000, dtype=np.float32), np.arange(10, dtype=np.float32)]) == ""
    assert len(looked_at) == 1 and looked_at[0] < 100


# Whole models.  Each output is followed by another one, which shows what the first does not.

HIDDEN = {
    "n = Neg(a)  p = Sub(n, one)  y = Sqrt(p)": "it is NaN everywhere",
    "n = Exp(a)  t = Add(n, big)  y = Mul(t, t)": "it is infinite or NaN everywhere",
    "y = Slice(a, zero, zero)": "it is empty",
    "n = Mul(a, small)  y = Add(n, million)": "it varies by ",
    "n = Mul(a, small)  y = Add(n, mask)": "it is masked everywhere, by values such as -3e+38",
    "f = Sub(a, a)  y = Exp(f)": "it is 1 for all inputs tried",
}
CONSTANTS = {"one": 1.0, "big": 3e38, "small": 1e-3, "million": 1e6, "mask": -3e38}


def hiding(body: str) -> onnx.ModelProto:
    model = parse("(float[b, 4] x) => (float[c, d] y, float[b, 4] z)", f"a = Abs(x)  z = Neg(x)  {body}")
    weights = {name: np.float32(value) for name, value in CONSTANTS.items()} | {"zero": np.array([0])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items())
    return model


@pytest.mark.parametrize(("body", "reason"), HIDDEN.items())
def test_an_output_that_shows_nothing_is_named(body: str, reason: str) -> None:
    model = hiding(body)
    found = compare(model, model)
    assert (found.passed, found.status, [o.name for o in found.outputs]) == (True, "partly", ["z"])
    (missing,) = found.not_compared
    assert missing.name == "y" and missing.reason.startswith(reason)
    del model.graph.output[1]
    alone = compare(model, model)
    assert (alone.passed, alone.status, alone.outputs) == (None, "none", ())
    assert alone.reason == f"output 'y' is not compared: {alone.not_compared[0].reason}"


def test_other_values_are_drawn_before_an_output_counts_as_hidden() -> None:
    """Values of normal size give NaN; small positive ones do not."""
    body = "s = ReduceMax<keepdims = 1>(x)  one = Constant<value_float = 1.0>()  d = Sub(one, s)  r = Sqrt(d)"
    model = parse("(float[b, 64] x) => (float[b, 64] y)", f"{body}  y = Mul(x, r)")
    lines: list[str] = []
    found = compare(model, model, progress=lines.append)
    assert found.status == "verified"
    assert "run the original on small values" in lines and "run the original on large values" not in lines


def test_outputs_beside_a_random_one_are_compared() -> None:
    model = parse(
        "(float[b, 4] x) => (float[b, 4] y, float[b, 4] z)", "n = RandomNormalLike(x)  y = Add(x, n)  z = Neg(x)"
    )
    found = compare(model, model)
    why = "RandomNormalLike node 'n' draws random numbers: no two runs are the same"
    assert (found.status, found.not_compared) == ("partly", (NotCompared("y", why),))
    wrong = parse(
        "(float[b, 4] x) => (float[b, 4] y, float[b, 4] z)", "n = RandomNormalLike(x)  y = Add(x, n)  z = Abs(x)"
    )
    assert compare(model, wrong).status == "failed"


# The original's own noise


def detector(scale: float) -> onnx.ModelProto:
    """Build a model like a detector of text: a sigmoid of a small difference between large sums."""
    model = parse(
        "(float[b, 512] x) => (float[b, 512] y)",
        "p = MatMul(x, w)  q = MatMul(x, v)  d = Sub(p, q)  o = Sub(d, thirteen)  s = Sigmoid(o)  y = Mul(s, k)",
    )
    w = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32) * 100
    weights = {"w": w, "v": w + np.float32(1e-3), "thirteen": np.float32(13), "k": np.float32(scale)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items())
    return model


def test_what_the_originals_own_noise_explains_passes() -> None:
    """The largest value is about 3e-6, and moves by percents when an input moves by one unit in the last place."""
    found = compare(detector(1.0), detector(1.001))
    assert found.status == "verified", found.reason
    (output,) = found.outputs
    assert 1e-3 > output.max_rel > 9e-4 or output.max_rel > 1e-5
    assert output.tolerance > 1e-5 and output.tolerance / NOISE_FACTOR > output.max_rel / 10
    wrong = compare(detector(1.0), detector(3.0))
    assert wrong.status == "failed" and "the original's own noise" in wrong.reason


def test_noise_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with onnxruntime's optimizations allows the noise of the first run, which is known by then."""
    opened: list[bool] = []
    open_variant = Reference.open

    def recorded(reference: Reference, model: onnx.ModelProto, *, optimize: bool = False) -> object:
        opened.append(optimize)
        return open_variant(reference, model, optimize=optimize)

    monkeypatch.setattr(Reference, "open", recorded)
    models = [detector(scale) for scale in (1.0, 1.001)]
    for model in models:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 8  # a given size has no runs at 0 and 1
    assert compare(*models).status == "verified"
    assert opened == [False, True]  # with moved weights, and with the optimizations


def test_a_given_tolerance_replaces_both() -> None:
    def scaled(by: float) -> onnx.ModelProto:
        return parse("(float[b, 4] x) => (float[b, 4] y)", f"w = Constant<value_float = {by}>()  y = Mul(x, w)")

    assert compare(scaled(1.0), scaled(1.01)).status == "failed"
    assert compare(scaled(1.0), scaled(1.01), tolerance=0.02).status == "verified"
    assert compare(detector(1.0), detector(1.001), tolerance=1e-6).status == "failed"


# Rounding that one of both models does


ROUNDED = "h = Cast<to = {to}>(x)  w = Cast<to = 1>(h)  y = Sin(w)"


@pytest.mark.parametrize("to", [10, 16])
def test_a_rounding_that_is_dropped_or_added_is_seen(to: int) -> None:
    """A float32 reference that does not round on purpose would call both equal."""
    feeds = {"x": np.array([1001.3, 5003.7, 70000], np.float32)}
    rounded, exact = (parse("(float[n] x) => (float[n] y)", body) for body in (ROUNDED.format(to=to), "y = Sin(x)"))
    assert compare(rounded, exact, inputs=feeds).status == "failed"
    assert compare(exact, rounded, inputs=feeds).status == "failed"
    assert compare(rounded, rounded, inputs=feeds).status == "verified"


# The command line

SCHEMES = {
    "all": ("z = Neg(x)", "float[b, 4] z", 0),
    "some": ("z = Neg(x)  e = Sub(x, x)  y = Exp(e)", "float[b, 4] z, float[b, 4] y", 3),
    "nothing": ("e = Sub(x, x)  y = Exp(e)", "float[b, 4] y", 4),
}


@pytest.mark.parametrize(("body", "outputs", "code"), SCHEMES.values(), ids=SCHEMES)
def test_exit_codes(tmp_path: Path, body: str, outputs: str, code: int) -> None:
    source, target, report = tmp_path / "m.onnx", tmp_path / "out.onnx", tmp_path / "report.json"
    onnx.save(parse(f"(float[b, 4] x) => ({outputs})", body), source)
    done = CliRunner().invoke(main, ["optimize", str(source), str(target), "--no-regions", "--report", str(report)])
    assert (done.exit_code, target.exists(), report.exists()) == (code, True, True)
    assert ("is not compared: it is 1 for all inputs tried" in " ".join(done.stdout.split())) is (code != 0)
    compared = CliRunner().invoke(main, ["verify", str(source), str(target)])
    assert compared.exit_code == code
    assert ("'y' is not compared: it is 1 for all inputs tried" in compared.stdout) is (code != 0)
    assert CliRunner().invoke(main, ["optimize", str(source), str(target), "--no-verify"]).exit_code == 0


def test_a_verification_says_how_much_was_compared() -> None:
    nothing = Verification(None, (), "why", ())
    assert nothing.with_parts(2, ()).status == "verified"
    assert nothing.with_parts(0, [NotCompared("node", "why")]).status == "none"
    assert Verification(True, (), "", ()).with_parts(0, [NotCompared("node", "why")]).status == "partly"


# Ties


INDICES = {
    "ArgMax": "i = ArgMax<axis = 1, keepdims = 0>(s)  y = Unsqueeze(i, one)",
    "TopK": "v, i = TopK(s, one)  y = Identity(i)",
}


def classifier(weights: np.ndarray, indices: str) -> onnx.ModelProto:
    body = f"a = Abs(x)  s = MatMul(a, w)  one = Constant<value_ints = [1]>()  {INDICES[indices]}"
    model = parse("(float[b, 8] x) => (int64[b, 1] y)", body)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights.astype(np.float32), "w"))
    return model


@pytest.mark.parametrize("op", INDICES)
def test_indices_of_ties_are_not_compared(op: str) -> None:
    """Columns 0 and 1 of the scores are equal; the other model adds a little to column 1."""
    weights = np.tile(np.array([3.0, 3.0, 0.0]), (8, 1))
    weights[0] = [0, 0, 20]  # so that not all indices are equal
    found = compare(classifier(weights, op), classifier(weights * [1, 1 + 3e-7, 1], op))
    assert (found.status, found.outputs) == ("none", ())
    assert found.not_compared == (NotCompared("y", "its indices differ, but the scores there ('s') are ties"),)
    distinct = compare(classifier(weights * [1.005, 1, 1], op), classifier(weights * [1, 1.005, 1], op))
    assert distinct.status == "failed" and "int64 has to be equal" in distinct.reason


def quantized(factor: float, zero: int = 3, dtype: str = "int8") -> onnx.ModelProto:
    """Return a model whose rows are quantized per column; a step is 0.5 or 0.25."""
    after = "Flatten" if dtype == "int8" else "Identity"  # onnxruntime has no Flatten of float8
    body = f"a = MatMul(x, w)  q = QuantizeLinear<axis = 1>(a, s, z)  y = {after}(q)"
    model = parse("(float[b, 2] x) => (int8[b, 3] y)", body)
    weights = np.array([[1, 0.5, 0.25], [0, 1, 2]], np.float32) * np.float32(factor)
    constants = {"w": weights, "s": np.array([0.5, 0.5, 0.25], np.float32), "z": np.array([0, zero, -7], np.int8)}
    if dtype in LARGEST_FLOAT8:
        constants["z"] = np.zeros(3, dtype)
        model.graph.output[0].type.tensor_type.elem_type = DTYPE_NUMBERS[dtype]
        model.opset_import[0].version = 19
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    return model


def test_steps_of_a_quantizer_at_ties_are_told() -> None:
    """The other model's products are a little larger, which moves those beyond a tie to the next integer."""
    x = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)
    x[:3] = [1.25, 0.5], [2.25, 0.25], [-1.75, 0.75]  # two of their products are positive ties
    found = compare(quantized(1), quantized(1 + 3e-7), inputs={"x": x})
    assert (found.status, found.notes) == ("verified", (
        "1.33% of the integers of output 'y' are one step of the quantizer off, where the numbers that it rounds ('a') "
        "are ties but for rounding",
    ))  # fmt: skip
    for wrong in (quantized(1.5), quantized(1, zero=4)):
        distinct = compare(quantized(1), wrong, inputs={"x": x})
        assert distinct.status == "failed" and "int8 has to be equal" in distinct.reason


@pytest.mark.parametrize(("dtype", "tie"), [("float8_e4m3fn", 0.53125), ("float8_e5m2", 0.5625)])
def test_steps_of_a_quantizer_to_float8_at_ties_are_told(dtype: str, tie: float) -> None:
    """Float8 numbers from 1 to 2 are 1/8 or 1/4 apart: 1.0625 or 1.125 is a tie.  NaN equals NaN, and 0 equals -0."""
    x = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32)
    x[:3] = [tie, 0], [np.nan, 0], [-0.0, 0]
    found = compare(quantized(1, dtype=dtype), quantized(1 + 3e-7, dtype=dtype), inputs={"x": x})
    assert found.status == "verified" and "are one step of the quantizer off" in found.notes[0]
    wrong = compare(quantized(1, dtype=dtype), quantized(1.5, dtype=dtype), inputs={"x": x})
    assert wrong.status == "failed" and f"{dtype} has to be equal" in wrong.reason


# Flags


def decoder(branch: str, flag: str) -> onnx.ModelProto:
    """Return a model whose flag chooses between two branches, as in merged decoders; one computes `branch`."""
    return parse(
        f"(float[b, 8] x, {flag} use_cache) => (float[b, 8] y)",
        f"""shape = Constant<value_ints = [1]>()  flag = Reshape(use_cache, shape)
        y = If<then_branch = cached () => (float[b, 8] k) {{ k = Abs(x) }},
               else_branch = first () => (float[b, 8] e) {{ e = {branch}(x) }}>(flag)""",
    )


@pytest.mark.parametrize("flag", ["bool", "bool[1]"])
def test_both_branches_that_a_flag_chooses_are_compared(flag: str) -> None:
    assert compare(decoder("Neg", flag), decoder("Neg", flag)).status == "verified"
    assert compare(decoder("Neg", flag), decoder("Relu", flag)).status == "failed"


# What the original's own runs do not agree on


LENGTH = "(float[b, 512] x) => (float[n] y)"


def counted(sum_of: str) -> onnx.ModelProto:
    """Build a model whose result is as long as a large sum is in its last digits, as where a duration is predicted."""
    text = f"""{sum_of}  t = ReduceSum <keepdims = 0> (p)  a = Abs (t)  s = Mul (a, many)  l = Cast <to = 7> (s)
        r = Mod (l, ninety)  e = Unsqueeze (r, zero)  y = ConstantOfShape (e)"""
    head = '<ir_version: 9, opset_import: ["" : 18]>'
    model = onnx.parser.parse_model(
        f"""{head} g {LENGTH}
        <float many = {{10000}}, int64 ninety = {{97}}, int64[1] zero = {{0}}> {{ {text} }}"""
    )
    random = np.random.default_rng(0)
    for name in "uv":
        weight = random.standard_normal((512, 512)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return model


def test_a_length_that_depends_on_rounding_is_not_compared() -> None:
    left, right = counted("q = MatMul (x, u)  p = MatMul (q, v)"), counted("q = MatMul (u, v)  p = MatMul (x, q)")
    found = compare(left, right, inputs={"x": np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32)})
    assert found.status == "none"
    assert "the original itself gives float32 of shape " in found.reason
    assert "where inputs and weights are moved by a rounding" in found.reason


def test_another_length_of_a_steady_original_fails() -> None:
    def repeated(times: int) -> onnx.ModelProto:
        return parse("(float[b] x) => (float[n] y)", f"t = Constant<value_ints = [{times}]>()  y = Tile(x, t)")

    found = compare(repeated(2), repeated(3))
    assert found.reason == "output 'y' is float32 of shape 6; the original has float32 of shape 4"


def test_integers_that_depend_on_rounding_are_not_compared() -> None:
    def quantized(text: str) -> onnx.ModelProto:
        model = parse("(float[b, 512] x) => (uint8[b, 512] y)", f"{text}  y = QuantizeLinear (p, step, zero)")
        random = np.random.default_rng(0)
        for name in "uv":
            weight = random.standard_normal((512, 512)).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
        for name, value in {"step": np.float32(1e-4), "zero": np.uint8(128), "hundred": np.float32(1e5)}.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        return model

    rounded = "d = Div (r, hundred)  p = Sin (d)"
    left = quantized(f"q = MatMul (x, u)  r = MatMul (q, v)  {rounded}")
    right = quantized(f"q = MatMul (u, v)  r = MatMul (x, q)  {rounded}")
    found = compare(left, right)
    assert found.passed is not False, found.reason
    assert compare(left, quantized(f"q = MatMul (x, v)  r = MatMul (q, u)  {rounded}")).passed is False
