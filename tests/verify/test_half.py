"""Test that half precision is judged by the original in float32: other roundings pass, other results fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from exported_models import read_index
from onnx import TensorProto

from onnxfuse import halving, optimize
from onnxfuse.ir.protos import nodes, tensors
from onnxfuse.report.sections import verdict
from onnxfuse.verify import reference
from onnxfuse.verify.compare import Verification, compare
from onnxfuse.verify.difference import TF32, OutputDifference, Standard, compare_output
from onnxfuse.verify.reference import run_original
from onnxfuse.verify.widen import half_precision_of, model_to_float32

HEAD = '<ir_version: 9, opset_import: ["" : 17]>'
HALF = [name for name in read_index() if name.endswith("fp16.onnx")]
NAN, INF = float("nan"), float("inf")


def elementwise(body: str, dtype: str = "float16", result: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} g ({dtype}[b, d] x) => ({result or dtype}[b, d] y) {{ {body} }}")


def scaled(by: float, dtype: str = "float16", number: int = 10) -> onnx.ModelProto:
    """Build y = softmax(x) * by, computed in float32 and rounded once."""
    body = f"f = Cast<to = 1>(x)  s = Softmax(f)  k = Constant<value_float = {by}>()  m = Mul(s, k)"
    return elementwise(f"{body}  y = Cast<to = {number}>(m)", dtype)


# Whole models


def test_fewer_roundings_pass_and_another_result_fails() -> None:
    source = elementwise("e = Exp(x)  a = Constant<value_ints = [-1]>()  s = ReduceSum(e, a)  y = Div(e, s)")
    right, wrong = compare(source, scaled(1.0)), compare(source, scaled(1.003))
    assert right.passed is True and right.reason == ""
    assert right.outputs[0].max_rel < 1e-3 and right.outputs[0].original_rel is not None
    assert wrong.passed is False and wrong.outputs[0].max_rel == pytest.approx(3e-3, rel=0.2)
    assert wrong.reason.startswith("output 'y' is off by 2.9e-03") and "; float16 allows 2.0e-03" in wrong.reason
    assert " of its largest value from the original in float32, the original itself by " in wrong.reason


OVERFLOWS = """
    k = Constant<value_float = 50000.0>()  q = Constant<value_float = 0.01>()
    o = Constant<value_ints = [0]>()  kk = Cast<to = 10>(k)  big = Mul(x, kk)  f = Cast<to = 1>(x)  b = Mul(f, k)"""


def test_an_overflow_that_the_fused_op_avoids_passes() -> None:
    """The original exceeds 65504 in an intermediate value, which as a graph output cannot stay in float32."""

    def divided(middle: str) -> onnx.ModelProto:
        text = f"""{OVERFLOWS}  row = Unsqueeze({middle}, o)
            back = Cast<to = 1>(row)  z = Mul(back, q)  y = Cast<to = 10>(z)"""
        signature = "(float16[2] x) => (float16[1, 2] y, float16[2] big)"
        return onnx.parser.parse_model(f"{HEAD} g {signature} {{ {text} }}")

    feeds = {"x": np.array([2.0, 0.5], np.float16)}
    source = divided("big")
    assert np.isinf(run_original(source, None, feeds, lambda line: None).runs[0].outputs["y"]).tolist() == [
        [True, False]
    ]
    assert compare(source, divided("b"), inputs=feeds).passed is True
    back = compare(divided("b"), source, inputs=feeds)
    assert back.passed is False and "output 'y' differs in infinite values at 1 of 2 elements" in back.reason


def test_float32_outputs_of_a_float16_model() -> None:
    """An output computed from float16 may have its rounding errors; one that was not must have float32's."""

    def kept(by: float, direct: float) -> onnx.ModelProto:
        text = f"""h = Cast<to = 10>(x)  s = Softmax(h)  f = Cast<to = 1>(s)  k = Constant<value_float = {by}>()
            y = Mul(f, k)  n = Constant<value_float = {direct}>()  z = Mul(x, n)"""
        return onnx.parser.parse_model(f"{HEAD} g (float[b, d] x) => (float[b, d] y, float[b, d] z) {{ {text} }}")

    source = kept(1.0, 1.0)
    found = compare(source, kept(1.001, 1.0))
    assert found.passed is True and [o.tolerance for o in found.outputs] == [2e-3, 1e-5]
    assert compare(source, kept(1.004, 1.0)).passed is False
    assert compare(source, kept(1.0, 1.001)).reason.startswith("output 'z' is off by 1.0e-03 of its largest value;")


def test_a_bfloat16_model_without_kernels_is_compared_in_float32() -> None:
    source = elementwise("e = Softmax(x)  y = Neg(e)", "bfloat16")
    same = compare(source, scaled(-1.0, "bfloat16", 16))
    assert same.passed is True and same.outputs[0].tolerance == 1.6e-2
    assert same.reason.startswith("compared in float32: onnxruntime cannot run the original on the CPU: ")
    wrong = compare(source, scaled(-1.1, "bfloat16", 16))
    assert wrong.passed is False
    assert wrong.reason.startswith("output 'y' is off by 1.0e-01") and "; compared in float32: " in wrong.reason
    cast = elementwise("e = Softmax(x)  n = Neg(e)  y = Cast<to = 1>(n)", "bfloat16", "float")
    assert "output 'y' is FLOAT; the original has BFLOAT16" in compare(source, cast).reason


def test_a_bfloat16_model_of_which_only_the_original_runs() -> None:
    source = elementwise("f = Cast<to = 1>(x)  n = Neg(f)  y = Cast<to = 16>(n)", "bfloat16")
    found = compare(source, elementwise("y = Neg(x)", "bfloat16"))
    assert found.passed is True
    assert found.reason.startswith("compared in float32: onnxruntime cannot run the optimized model on the CPU: ")


def test_an_original_that_does_not_run_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "model_to_float32", lambda model: elementwise("y = odd.Thing(x)", "float"))
    found = compare(scaled(1.0), scaled(1.0))
    assert found.passed is True and found.outputs[0].original_rel is None
    assert found.reason.startswith("compared with the original directly: it does not run in float32 (")
    assert "; compared with the original directly" in compare(scaled(1.0), scaled(1.01)).reason


def test_float32_outputs_are_compared_as_half_precision_where_float32_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "model_to_float32", lambda model: elementwise("y = odd.Thing(x)", "float"))

    def widened(by: float) -> onnx.ModelProto:
        body = f"f = Cast<to = 1>(x)  s = Softmax(f)  k = Constant<value_float = {by}>()  y = Mul(s, k)"
        return elementwise(body, result="float")

    source = elementwise("s = Softmax(x)  y = Cast<to = 1>(s)", result="float")
    near = compare(source, widened(1.001))
    assert near.passed is True and near.outputs[0].tolerance == 2e-3
    assert near.outputs[0].max_rel == pytest.approx(1e-3, rel=0.01)
    assert compare(source, widened(1.003)).passed is False


# One output


def compared(old: list[float], new: list[float], exact: list[float], dtype: Any = np.float16) -> OutputDifference:
    half = "float16" if dtype == np.float16 else "bfloat16"
    return compare_output("y", np.array(old, dtype), np.array(new, dtype), np.array(exact, np.float32), Standard(half))


@pytest.mark.parametrize(
    ("old", "new", "exact", "passed"),
    [
        ([1.0], [1.002], [1.0], True),
        ([1.002], [0.9985], [1.0], True),  # 3.5e-3 apart, each near the exact value
        ([1.0], [1.004], [1.0], False),
        ([1.005], [1.004], [1.0], True),  # the original's error is larger
        ([1.004], [1.005], [1.0], False),
        ([0.996], [1.004], [1.0], True),
        ([INF, 1], [INF, 1], [7e4, 1], True),
        ([INF, 1], [2, 1], [2, 1], True),  # an intermediate overflow that is gone
        ([INF, 1], [2.05, 1], [2, 1], False),
        ([INF, 1.01], [2.05, 1], [2, 1], False),  # the original's error in another element is not an excuse
        ([NAN, 1], [2, 1], [2, 1], True),
        ([NAN, 1], [2, 1], [NAN, 1], False),
        ([NAN, 1], [INF, 1], [2, 1], False),
        ([INF, 1], [-INF, 1], [2, 1], False),
        ([2, 1], [INF, 1], [2, 1], False),
        ([2, 1], [NAN, 1], [2, 1], False),
        ([2, 1], [INF, 1], [INF, 1], False),
        ([65504, 1], [INF, 1], [65490, 1], True),  # within rounding of the largest number
        ([INF, 1], [65504, 1], [65530, 1], True),
        ([65504, 1], [INF, 1], [70000, 1], True),
        ([65504, 1], [-INF, 1], [65490, 1], False),
        ([65504, 1], [NAN, 1], [65490, 1], False),
        ([60000, 1], [INF, 1], [60000, 1], False),
        ([2, 1], [2, 1], [NAN, 1], True),  # compared with the original, since float32 has NaN
        ([2, 1], [2.1, 1], [NAN, 1], False),
    ],
)
def test_what_passes(old: list[float], new: list[float], exact: list[float], passed: bool) -> None:
    found = compared(old, new, exact)
    assert found.passed is passed and (found.reason == "") is passed


@pytest.mark.parametrize(("new", "passed"), [(0.997, True), (1.006, False)])
def test_products_in_tf32_are_judged_by_float32(new: float, passed: bool) -> None:
    """The original, off by 1.5e-3 the other way, sets no standard; large numbers do not mask, as in float16."""
    old, found, exact = (np.array([first * 1e5, 1], np.float32) for first in (1.0015, new, 1.0))
    assert compare_output("y", old, found, exact, Standard(TF32)).passed is passed
    assert not compare_output("y", old, found).passed


def test_both_errors_are_told() -> None:
    found = compared([1, 4], [1, 4.03], [1, 4.01])
    assert found.max_rel == pytest.approx(5.3e-3, rel=0.1) and found.original_rel == pytest.approx(2.5e-3, rel=0.1)
    found = compared([1, 4], [1, 4.25], [1, 4], ml_dtypes.bfloat16)
    assert found.reason.endswith("is off by 6.2e-02 of its largest value from the original in float32, "
                                 "the original itself by 0.0e+00; bfloat16 allows 1.6e-02")  # fmt: skip


def test_masks_do_not_hide_errors() -> None:
    assert compared([1, -65504], [1, -65504], [1, -65514]).passed
    assert not compared([1, -65504], [1.01, -65504], [1, -65514]).passed
    low = float(np.finfo(np.float32).min)
    for new, passed in (([1, low], True), ([1.01, low], False), ([1, -3e38], False), ([low, low], False)):
        assert compare_output("y", np.array([1, low], np.float32), np.array(new, np.float32)).passed is passed
    assert not compare_output("y", np.array([1, -65504], np.float32), np.array([1.01, -65504], np.float32),
                          np.array([1, -65504], np.float32), Standard("float16")).passed  # fmt: skip


# Conversion to float32


NESTED = """
    <ir_version: 9, opset_import: ["" : 17, "own" : 1]>
    g (float16[b, 2] x, bool c) => (float16[b, 2] y, seq(float16[b, 2]) all)
     {
        a = own.as <kind = 10> (x)
        w = Constant <value = HALF> ()
        t = If (c) <
            then_branch = t () => (float16[b, 2] u)  { v = Constant <value = HALF> ()  u = Mul(a, v) },
            else_branch = e () => (float16[b, 2] n) { n = Add(a, o) } >
        k = Constant <value = HALF> ()
        r = EyeLike <dtype = 10> (t)
        z = Add(t, r)
        y = Mul(z, k)
        all = SequenceConstruct(y, t)
    }
    <domain: "own", opset_import: ["" : 17]> as <kind> (p) => (q) {
        two = Constant <value = HALF> ()
        h = Cast <to = 16> (p)
        i = Cast <to : int = @kind> (h)
        q = Mul(i, two) }"""


def nested() -> onnx.ModelProto:
    """Build a float16 model from text; the text format has no float16 values, so float ones are converted."""
    source = onnx.parser.parse_model(NESTED.replace("HALF", "float[2] {2, 4}"))
    for tensor in tensors(source.graph, *source.functions):
        tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float16)))
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 3], np.float16), "o"))
    return source


def test_everything_in_a_model_is_converted() -> None:
    source = nested()
    before, wide = source.SerializeToString(), model_to_float32(source)
    assert half_precision_of(source) == "bfloat16"
    still_rounding = [n for n in nodes(wide.graph, *wide.functions) if n.output[0].endswith("::rounded")]
    assert [(n.op_type, n.attribute[0].i) for n in still_rounding] == [("Cast", TensorProto.BFLOAT16)]
    for node in still_rounding:
        node.attribute[0].i = TensorProto.FLOAT
    assert half_precision_of(wide) == ""
    assert source.SerializeToString() == before
    onnx.checker.check_model(wide, full_check=True)
    feeds = {"x": np.ones((3, 2), np.float32), "c": np.array(True)}
    (found,) = run_original(wide, None, feeds, lambda line: None).runs
    assert found.outputs["y"].dtype == np.float32 and len(found.outputs["all"]) == 2
    np.testing.assert_array_equal(found.outputs["y"], [[10, 64], [8, 68], [8, 64]])
    assert compare(source, source).passed is True


def test_subgraphs_in_a_graph_that_rounds_are_converted() -> None:
    body = """h = Cast<to = 10>(x)  y = If (c) <
        then_branch = t () => (float16[b] u) { p = Cast<to = 1>(h)  q = Cast<to = 10>(p)  u = Neg(q) },
        else_branch = e () => (float16[b] n) { n = Abs(h) } >"""
    source = onnx.parser.parse_model(f"{HEAD} g (float16[b] x, bool c) => (float16[b] y) {{ {body} }}")
    wide = model_to_float32(source)
    onnx.checker.check_model(wide, full_check=True)
    assert [n.op_type for n in nodes(wide.graph)] == ["Cast", "Cast", "If", "Cast", "Cast", "Cast", "Neg", "Abs"]
    (found,) = run_original(source, None, {"x": np.ones(3, np.float16)}, lambda line: None).runs[:1]
    assert found.float32_outputs["y"].dtype == np.float32


def test_what_is_not_half_precision_stays() -> None:
    source = elementwise("d = Cast<to = 11>(x)  i = Cast<to = 7>(d)  y = Cast<to = 1>(i)", "float")
    assert half_precision_of(source) == "" and model_to_float32(source) == source


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_external_weights_stay_where_they_lie(tmp_path: Path, kind: Any) -> None:
    number = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    np.full(512, 1.5, kind).tofile(tmp_path / "w.bin")
    text = "g (float[2, 512] x) => (float[2, 512] y) { v = Cast<to = 1>(w)  y = Add(x, v) }"
    source = onnx.parser.parse_model(f"{HEAD} {text}")
    weight = TensorProto(name="w", data_type=number, dims=[512], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.bin")
    source.graph.initializer.append(weight)
    assert [(t.name, t.data_type) for t in model_to_float32(source).graph.initializer] == [("w::stored", number)]
    feeds = {"x": np.zeros((2, 512), np.float32)}
    (found,) = run_original(source, tmp_path, feeds, lambda line: None).runs
    assert (found.float32_outputs["y"] == 1.5).all()


# Exported models


@pytest.mark.parametrize("name", HALF)
def test_exported_models_pass_optimized(name: str, optimized: Callable[[str], Any]) -> None:
    found = optimized(name)
    verified = compare(found.original, found.path)
    assert verified.passed is True, verified.reason
    assert verified.reason == "" and len(verified.sizes) == 2


def test_an_output_too_noisy_in_half_precision_is_compared_as_by_verify() -> None:
    """A rounding decides a step of the quantizer, which the softmax amplifies, and the output moves by a fifth.

    The allowed error decides; nothing is taken back.
    """
    text = (Path(__file__).parent / "quantized_attention.txt").read_text(encoding="utf-8")
    source = onnx.parser.parse_model(text)
    model, report = optimize(source, dtype="bfloat16")
    assert not report.dropped and report.counts == {"attention": 1, "quantized_gemm": 1, "region": 2}
    assert report.verified.status == "verified" and report.verified.equal_parts == len(report.fused)
    assert report.verified.outputs == compare(source, model).outputs
    assert report.verified.outputs[0].set_by == "the error that was allowed for bfloat16"


def test_a_noisy_output_beyond_the_allowed_error_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parent / "quantized_attention.txt").read_text(encoding="utf-8")
    name, reason = onnx.parser.parse_model(text).graph.output[0].name, "it is off by 3.0e-01 of its largest value"
    wrong = Verification(False, (OutputDifference(name, 0.3, 0.3, 0.2, False, reason),), reason, ())
    monkeypatch.setattr(halving, "compare_with", lambda *_: wrong)
    _, report = optimize(onnx.parser.parse_model(text), dtype="bfloat16")
    assert (report.verified.status, report.verified.reason) == ("failed", wrong.reason)
    assert (report.verified.outputs, report.verified.not_compared) == (wrong.outputs, ())
    assert verdict(report.verified, 6).how == f"It differs from the original: {wrong.reason}."
