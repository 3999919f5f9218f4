"""Test the comparison by parts: what a part consists of, what it is run on, and what is taken back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from case_documents import read_cases
from onnx import numpy_helper
from runtimes import open_on_cpu

from onnxfuse import optimize, optimizer
from onnxfuse.dsl import catalogue
from onnxfuse.fuse_model import FusedModel, Settings, fuse_model
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.verify.compare_parts import PartsVerification, compare_parts
from onnxfuse.verify.drawn_operands import draws
from onnxfuse.verify.parts import Part, distinct_parts
from onnxfuse.verify.rounded_results import model_that_rounds

HEAD = '<ir_version: 9, opset_import: ["" : 17]>'
WRONG_RELU = '''"""A Relu whose stored body is another function."""

from onnxfuse import either, fusion, op, tensor


@fusion(out="...")
def wrong_relu(x=tensor("...")):
    """y = max(x, 0)"""
    return either({wrong}, op.Relu(x))
'''
LAYER_NORM = """
  m = ReduceMean <axes = [-1]> (h)  c = Sub (h, m)  q = Mul (c, c)  v = ReduceMean <axes = [-1]> (q)
  s = Add (v, epsilon)  d = Sqrt (s)  n = Div (c, d)  g = Mul (n, gamma)  y = Add (g, beta)
"""


def parse(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"{HEAD} {text}")
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


def fused(model: onnx.ModelProto, folder: Path | None = None, **options: Any) -> FusedModel:
    fusions = catalogue.with_folders([folder] if folder else [])
    return fuse_model(model, None, Settings(fusions, keep_unfused=True, **options))


def parts_of(result: FusedModel) -> list[Part]:
    assert result.unfused is not None
    return distinct_parts(result.unfused, result.model, {one.node: one.replaces for one in result.fusing.fused})


def compared(result: FusedModel, **feeds: np.ndarray) -> PartsVerification:
    assert result.unfused is not None
    return compare_parts(result.unfused, result.model, parts_of(result), feeds)


def wrong_relu(folder: Path, wrong: str) -> Path:
    (folder / "wrong_relu.py").write_text(WRONG_RELU.format(wrong=wrong), encoding="utf-8")
    return folder


# What a part consists of


def test_equal_nodes_are_one_part() -> None:
    model = parse("g (float[b, 8] x) => (float[b, 8] z) { a = Relu(x)  y = Sqrt(a)  s = Softmax(y)  t = Softmax(s)"
                  "u = Softmax(t)  z = Softmax <axis = 0> (u) }")  # fmt: skip
    (part,) = parts_of(fused(model))
    assert part.fused.op_type == "softmax" and len(part.equal) == 2


def test_nodes_of_other_shapes_or_other_constants_are_other_parts() -> None:
    text = "g (float[b, 8] x, float[b, 9] z) => (float[b, 8] y, float[b, 9] w) { y = Softmax(x)  w = Softmax(z) }"
    assert [len(part.equal) for part in parts_of(fused(parse(text)))] == [0, 0]


def test_the_walk_stops_at_a_mask_that_is_no_operand() -> None:
    """The padding mask is an operand of attention; the causal mask is none, so it keeps the values of the run."""
    case = read_cases(Path(__file__).parents[1] / "cases" / "attention.txt")["attention_with_a_causal_mask"]
    other = onnx.helper.make_tensor_value_info("other", onnx.TensorProto.FLOAT, [1, 1, "seq"])
    case.model.graph.input.append(other)
    next(node for node in case.model.graph.node if node.op_type == "Shape").input[:] = ["other"]
    result = fused(case.model)
    (part,) = parts_of(result)
    assert part.fused.op_type == "attention" and "rest" in part.operands and part.leaves == ("before",)
    assert {n.op_type for n in part.replaced} >= {"MatMul", "And", "Where", "Softmax"}
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((1, 2, 5, 8)).astype("f4") for name in "qkv"}
    found = compared(result, **feeds, padding=np.ones((1, 5), bool), other=np.zeros((1, 1, 5), "f4"))
    assert (found.wrong, found.not_compared) == ((), ()) and len(found.equal) == 1


# What a part is run on


@pytest.mark.parametrize(
    ("wrong", "feed", "sentence"),
    [
        (
            "op.Abs(x)",
            [-1.0, 2.0],
            "on the values of a run its output 'y' is 1 at [0]; the nodes that it replaced give 0",
        ),
        ("op.Abs(x)", [1.0, 2.0], "on drawn values its output 'y' is "),
        ("op.Clip(x, 0.0, 100.0)", [1.0, 2.0], "on large drawn values its output 'y' is 100 at "),
    ],
)
def test_values_of_a_run_and_drawn_ones(tmp_path: Path, wrong: str, feed: list[float], sentence: str) -> None:
    model = parse("g (float[n] x) => (float[n] y) { y = Relu(x) }")
    result = fused(model, wrong_relu(tmp_path, wrong))
    (finding,) = compared(result, x=np.array(feed * 20, np.float32)).wrong
    assert finding.reason.startswith(sentence), finding.reason


def test_weights_are_drawn_too() -> None:
    """Weights of one and biases of zero would hide that a body leaves them out."""
    model = parse(
        f"g (float[b, 8] h) => (float[b, 8] y) {{ {LAYER_NORM} }}",
        epsilon=np.float32(1e-5), gamma=np.ones(8, "f4"), beta=np.zeros(8, "f4"),
    )  # fmt: skip
    result = fused(model)
    (body,) = result.model.functions
    (norm,) = (node for node in body.node if node.op_type == "LayerNormalization")
    del norm.input[2:]
    feeds = {"h": np.random.default_rng(0).standard_normal((3, 8)).astype("f4")}
    (finding,) = compared(result, **feeds).wrong
    assert finding.reason.startswith("on drawn values its output 'y' is ")


def test_scales_that_a_program_copies_are_not_drawn() -> None:
    """The product reads the scale `s` as an operand; the DequantizeLinear of the residual is in the program."""
    text = """(float[n,16] x) => (uint8[n,16] y) <float s = {0.03}, uint8 z = {128}, float t = {0.01}>
    { q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)  wd = DequantizeLinear(w, t)
      m = MatMul(d, wd)  a = Add(m, d)  y = QuantizeLinear(a, s, z) }"""
    result = fused(parse(f"g {text}", w=np.arange(-128, 128, dtype=np.int8).reshape(16, 16)), regions=True)
    (part,) = (part for part in parts_of(result) if part.fused.op_type == "quantized_gemm")
    assert part.operands[:3] == ["q", "s", "z"] and part.outputs == ["y"]
    random = np.random.default_rng(0)
    assert compared(result, x=random.standard_normal((5, 16)).astype("f4")).wrong == ()


def test_the_result_of_composed_views_keeps_its_name() -> None:
    """A Flatten of a channels-last pool becomes a Reshape, which joins the quantizers before it."""
    text = """(float[n,4,8,8] x) => (float[n,5] y) <float s = {0.02}, uint8 z = {7}>
    { c = Conv(x, w)  p = GlobalAveragePool(c)  q = QuantizeLinear(p, s, z)  d = DequantizeLinear(q, s, z)
      f = Flatten(d)  y = Gemm<transB = 1>(f, v) }"""
    weights = {"w": np.ones((8, 4, 3, 3), "f4"), "v": np.ones((5, 8), "f4")}
    model, report = optimize(parse(f"g {text}", **weights), layout="nhwc")
    assert [list(node.output) for node in model.graph.node if node.op_type == "region"] == [["f"]]
    assert (report.verified.status, report.verified.equal_parts) == ("verified", 3)


def test_nan_in_another_place(tmp_path: Path) -> None:
    model = parse("g (float[n] x) => (float[n] y) { r = Sqrt(x)  y = Relu(r) }")
    result = fused(model, wrong_relu(tmp_path, "op.Where(op.IsNaN(x), 0.0, op.Relu(x))"))
    (finding,) = compared(result, x=np.array([4, -1], np.float32)).wrong
    assert finding.reason == "on the values of a run its output 'y' differs in NaN at 1 of 2 elements"


def test_what_was_nan_in_the_run_is_compared_on_drawn_values(tmp_path: Path) -> None:
    model = parse("g (float[n] x) => (float[n] y) { r = Sqrt(x)  y = Relu(r) }")
    result = fused(model, wrong_relu(tmp_path, "op.Abs(x)"))
    (finding,) = compared(result, x=np.full(8, -1, np.float32)).wrong
    assert finding.reason.startswith("on drawn values its output 'y' is ")


def test_scores_in_the_thousands_are_no_error() -> None:
    """On large values the probabilities of attention move more than a fixed tolerance when the scores are rounded."""
    model = parse(
        """g (float[1, 2, 16, 64] q, float[1, 2, 16, 64] k, float[1, 2, 16, 64] v) => (float[1, 2, 16, 64] y) {
        t = Transpose <perm = [0, 1, 3, 2]> (k)  root = Mul(q, third)  tr = Mul(t, third)  m = MatMul(root, tr)
        a = Softmax(m)  y = MatMul(a, v) }""", third=np.float32(0.35355338),
    )  # fmt: skip
    result = fused(model)
    assert [one.fusion for one in result.fusing.fused] == ["attention"]
    feeds = {n: np.random.default_rng(0).standard_normal((1, 2, 16, 64)).astype("f4") for n in "qkv"}
    assert compared(result, **feeds).wrong == ()


def test_scores_of_two_keys_that_are_nearly_equal_are_no_error() -> None:
    """Either key has all of the weight as scores in the millions are rounded, in the fused node as in its nodes."""
    model = parse(
        """g (float[1, 1, 1, 64] q, float[1, 1, 2, 64] k, float[1, 1, 2, 8] v) => (float[1, 1, 1, 8] y) {
        t = Transpose <perm = [0, 1, 3, 2]> (k)  root = Mul(q, third)  tr = Mul(t, third)  m = MatMul(root, tr)
        a = Softmax(m)  y = MatMul(a, v) }""", third=np.float32(0.35355338),
    )  # fmt: skip
    result = fused(model)
    for seed in range(60):  # one draw of moved operands shows too little in seven of them
        random = np.random.default_rng(seed)
        query, first = random.standard_normal((2, 64)) * 1000
        second = first + random.standard_normal(64) * 1000
        second -= query * (query @ (second - first)) / (query @ query)
        q, k, v = query[None], np.stack([first, second]), random.standard_normal((2, 8)) * 1000
        feeds = {name: value[None, None].astype("f4") for name, value in {"q": q, "k": k, "v": v}.items()}
        assert compared(result, **feeds).wrong == ()


def test_cosines_and_sines_are_not_drawn_large() -> None:
    """A float16 product of two queries that are rotated by numbers of 16 is infinite."""
    cases = read_cases(Path(__file__).parents[1] / "cases" / "attention_with_rotary_embedding.txt")
    result = fused(cases["attention_with_rotary_embedding_in_float32_of_float16"].model)
    (part,) = parts_of(result)
    assert result.unfused is not None and part.tables == ["cos", "sin"]
    given = {name: np.zeros((1, 4, 5, 8), np.float16) for name in "qkv"}
    given |= {name: np.zeros((1, 1, 5, 8), np.float32) for name in part.tables}
    _, (what, large) = draws(result.unfused, part, given, runs=False)
    assert what == "large drawn values" and np.abs(large["q"]).max() > 16
    assert all(np.abs(large[name]).max() < 5 for name in part.tables)


# Masks


ATTENTION = """g (float[b, 2, s, 8] q, float[b, 2, s, 8] k, float[b, 2, s, 8] v, {mask}) => (float[b, 2, s, 8] y) {{
    t = Transpose <perm = [0, 1, 3, 2]> (k)  m = MatMul(q, t)  {masked}  a = Softmax(x)  y = MatMul(a, v) }}"""


@pytest.mark.parametrize(
    ("mask", "masked", "wrong"),
    [
        ("bool[b, 1, 1, s] kept", "x = Where(kept, m, lowest)", "x = Where(kept, m, infinite)"),
        ("float[b, 1, 1, s] added", "x = Add(m, added)", "z = Clip(added, low)  x = Add(m, z)"),
    ],
)
def test_masks_are_drawn_with_rows_that_leave_nothing(mask: str, masked: str, wrong: str) -> None:
    """Only there it matters by which number keys are masked."""
    lowest = np.finfo(np.float32).min
    constants = {"lowest": lowest, "infinite": np.float32(-np.inf), "low": np.float32(-1e4)}
    result = fused(parse(ATTENTION.format(mask=mask, masked=masked), **constants))
    other = fused(parse(ATTENTION.format(mask=mask, masked=wrong), **constants))
    (part,) = parts_of(result)
    assert other.unfused is not None
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal((3, 2, 5, 8)).astype("f4") for name in "qkv"}
    kept = np.arange(5) < 4
    values = {"kept": kept, "added": np.where(kept, np.float32(0), lowest)}
    feeds |= {name: np.broadcast_to(value, (3, 1, 1, 5)) for name, value in values.items() if name in mask}
    assert compared(result, **feeds).wrong == ()
    of_other = replace(part, replaced=other.unfused.nodes)
    (finding,) = compare_parts(other.unfused, result.model, [of_other], feeds).wrong
    assert finding.reason.startswith("on masks that leave nothing its output 'y' ")


# What is taken back


EXACT_GATE = '''"""A gate whose stored body is exact where onnxruntime's Sigmoid is not."""

from onnxfuse import either, fusion, op, tensor


@fusion(out="... d")
def exact_gate(x=tensor("... d")):
    """y = tanh(x * sigmoid(mean(x)))"""
    mean = op.ReduceMean(x, axes=[-1])
    return op.Tanh(either({body}, x * op.Sigmoid(mean)))
'''
GATE = """g (float[n,8] c) => (float[n,8] y)
  { m = ReduceMean <axes = [-1]> (c) s = Sigmoid (m) p = Mul (c, s) y = Tanh (p) }"""


@pytest.mark.parametrize(
    ("body", "is_wrong"), [("x / (1 + op.Exp(op.Neg(mean)))", False), ("x / (1.001 + op.Exp(op.Neg(mean)))", True)]
)
def test_the_error_of_a_kernel_that_was_replaced_is_no_fault(tmp_path: Path, body: str, is_wrong: bool) -> None:
    """Of sigmoid(-16) times 1000, what is left depends on the kernel; moving `c` as it is drawn does not show that."""
    (tmp_path / "exact_gate.py").write_text(EXACT_GATE.format(body=body), encoding="utf-8")
    result = fused(parse(GATE), tmp_path)
    found = compared(result, c=np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32))
    assert [one.part.fused.op_type for one in found.wrong] == ["exact_gate"] * is_wrong
    assert len(found.equal) == 1 - is_wrong and not found.not_compared


def test_the_roundings_of_nodes_in_half_precision() -> None:
    """Each result is rounded, as providers that compute in half precision do."""
    model = parse("g (float16[n] x, float16[n] y) => (float16[n] z) { p = Mul (x, y) q = Add (p, x) z = Sub (q, p) }")
    names = ("p", "q", "z")
    rounding = model_that_rounds(model, dict.fromkeys(names, onnx.TensorProto.FLOAT16))
    x, y = (np.random.default_rng(i).uniform(1, 16, 100).astype(np.float16) for i in range(2))
    feeds = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    (found,) = open_on_cpu(rounding, optimize=False).run(["z"], feeds)
    expected = (x * y + x) - x * y
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert (found != x).any()


def test_the_node_at_fault_is_taken_back_and_others_stay(tmp_path: Path) -> None:
    """The stored body is wrong in one of two nodes: where the tensor has two axes."""
    text = WRONG_RELU.replace("{wrong}", "op.Mul(op.Relu(x), size_one)").replace(
        "return either", "return choose_either"
    )
    text = WRONG_RELU.format(wrong="op.Clip(x, 0.0, 100.0)").replace('"..."', '"a b"')
    (tmp_path / "wrong_relu.py").write_text(text, encoding="utf-8")
    model = parse("g (float[b, 8] x) => (float[b, 8] y) { a = Relu(x)  s = Softmax(a)  y = Sqrt(s) }")
    optimized, report = optimize(model, patterns=[tmp_path], regions=False)
    assert report.counts == {"softmax": 1} and report.verified.passed
    assert [(d.fusion, d.node) for d in report.dropped] == [("wrong_relu", "a/wrong_relu")]
    assert [node.op_type for node in optimized.graph.node] == ["Relu", "softmax", "Sqrt"]


@pytest.mark.parametrize("zero", [np.array(-3, np.int8), np.array(0, ml_dtypes.float8_e4m3fn)], ids=["int8", "float8"])
@pytest.mark.parametrize(("factor", "is_rounding"), [("1.0000003", True), ("1.01", False)])
def test_a_quantizer_may_round_ties_otherwise(factor: str, is_rounding: bool, zero: np.ndarray, tmp_path: Path) -> None:
    """The body of a node that a quantizer joined gives numbers that are a little larger than those replaced."""
    text = WRONG_RELU.format(wrong=f"op.Abs(x) * {factor}").replace('out="..."', 'out="...", epilogue=True')
    text = text.replace("op.Relu", "op.Abs")  # a Relu before a quantizer to float8 becomes a Max
    (tmp_path / "wrong_relu.py").write_text(text, encoding="utf-8")
    model = parse(
        "g (float[b, 8] x) => (int8[b, 8] y) { a = Abs(x)  y = QuantizeLinear(a, scale, zero) }",
        scale=np.array(0.5, np.float32), zero=zero,
    )  # fmt: skip
    model.graph.output[0].type.tensor_type.elem_type = DTYPE_NUMBERS[zero.dtype.name]
    model.opset_import[0].version = 19  # the first with float8
    settings = Settings(catalogue.with_folders([tmp_path]), regions=True, keep_unfused=True)
    result = fuse_model(model, None, settings)
    assert [node.op_type for node in result.model.graph.node] == ["wrong_relu"]
    x = np.arange(40, dtype=np.float32).reshape(5, 8) / 4
    found = compared(result, x=x)
    assert [len(found.wrong), len(found.equal)] == ([0, 1] if is_rounding else [1, 0])
    body, nodes = (open_on_cpu(each, optimize=False).run(None, {"x": x})[0] for each in (result.model, model))
    assert (body != nodes).sum() == (10 if zero else 5)


def test_parts_in_bfloat16_are_compared_in_float32() -> None:
    """onnxruntime's CPU provider has neither Exp nor Softmax in bfloat16."""
    model = parse("g (bfloat16[b, 8] x) => (bfloat16[b, 8] y) { e = Exp(x)  y = Softmax(e) }")
    result, report = optimize(model, regions=False)
    assert [node.op_type for node in result.graph.node] == ["Exp", "softmax"]
    assert (report.dropped, report.verified.status) == ((), "verified"), report.verified


def test_parts_that_onnxruntime_does_not_open_in_float32_either_are_not_compared() -> None:
    """onnxruntime's CPU provider has no Sigmoid in bfloat16, and no model may have two nodes of one name."""
    model = parse("g (bfloat16[b, 8] x) => (bfloat16[b, 8] y) { [same] s = Sigmoid(x)  [same] y = Mul(x, s) }")
    _, report = optimize(model)
    assert report.counts == {"activation": 1} and report.dropped == ()
    assert report.verified is not None and report.verified.status == "none"
    (output,) = report.verified.not_compared
    assert "two nodes with same node name" in output.reason


def test_operands_that_no_memory_holds_are_not_drawn() -> None:
    """Where the original does not run, operands have the shapes that the model declares, which may be wrong."""
    weights = {name: np.ones(8, np.float32) for name in ("gamma", "beta")} | {"epsilon": np.float32(1e-5)}
    model = parse(f"main (float[9999999999, 99999, 8] h) => (float[a, b, 8] y) {{ {LAYER_NORM} }}", **weights)
    result = fused(model)
    assert result.unfused is not None
    found = compare_parts(result.unfused, result.model, parts_of(result), None)
    assert [one.reason for one in found.not_compared] == [
        "the original does not run, and 'h' of shape [9999999999, 99999, 8] is too large"
    ]


def test_constants_in_another_layout_are_constants_of_the_part() -> None:
    """Only the optimized model has them, so that no run of the original gives their values."""
    model = parse(
        """g (float[b, 4, h, h] x) => (float[b, 4, h, h] y)
        { c = Conv <pads = [1, 1, 1, 1]> (x, w)  s = Sigmoid (c)  t = Mul (s, k)  y = Add (t, s) }""",
        w=np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32),
        k=np.random.default_rng(1).standard_normal((4, 1, 1)).astype(np.float32),
    )
    optimized, report = optimize(model, layout="nhwc")
    assert any(tensor.name == "k/nhwc" for tensor in optimized.graph.initializer)
    assert (report.verified.status, report.verified.equal_parts) == ("verified", len(report.fused))


X = {"x": np.ones((2, 4), np.float32)}


def by_hand(
    unfused: str, fused_nodes: str, body: str, replaced: list[str], feeds: dict[str, np.ndarray] | None = X
) -> PartsVerification:
    """Compare one fused node "n" of a model that is written by hand."""
    result = fuse_model(parse(unfused), None, Settings([], keep_unfused=True))
    assert result.unfused is not None
    signature = unfused.partition("{")[0]
    optimized = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 17, "{DOMAIN}" : 1]> {signature} {{ {fused_nodes} }} {body}'
    )
    parts = distinct_parts(result.unfused, optimized, {"n": replaced}, ORIGINALS)
    return compare_parts(result.unfused, optimized, parts, feeds)


ORIGINALS = {"a/nhwc": ("a", (1, 0))}


def test_a_tensor_that_a_part_reads_and_computes_again_in_another_layout() -> None:
    found = by_hand(
        "g (float[2, 4] x) => (float[2, 4] y) { a = Neg (x)  y = Abs (a) }",
        f'a = Neg (x) [n] "a/nhwc" = {DOMAIN}.turn (a)  b = Transpose <perm = [1, 0]> ("a/nhwc")  y = Abs (b)',
        f'<domain: "{DOMAIN}", opset_import: ["" : 17]> turn (p) => (q) {{ q = Transpose <perm = [1, 0]> (p) }}',
        [],
    )
    assert not found.wrong and not found.not_compared and len(found.equal) == 1


@pytest.mark.parametrize(("operator", "is_wrong"), [("Neg", False), ("Abs", True)])
def test_a_tensor_that_a_part_computes_in_two_layouts(operator: str, is_wrong: bool) -> None:
    found = by_hand(
        "g (float[2, 4] x) => (float[2, 4] y, float[2, 4] z) { a = Neg (x)  y = Abs (a)  z = Exp (a) }",
        f'[n] "a/nhwc", a = {DOMAIN}.both (x)  b = Transpose <perm = [1, 0]> ("a/nhwc")  y = Abs (b)  z = Exp (a)',
        f"""<domain: "{DOMAIN}", opset_import: ["" : 17]> both (p) => (r, q)
        {{ q = Neg (p)  s = {operator} (p)  r = Transpose <perm = [1, 0]> (s) }}""",
        ["a"],
    )
    assert not found.not_compared and (len(found.wrong), len(found.equal)) == (is_wrong, not is_wrong)


def test_an_operand_that_a_replaced_node_computes_too() -> None:
    """The Split is needed for its second result; the first one is an operand."""
    found = by_hand(
        """g (float[2, 4] x) => (float[2, 2] y, float[2, 2] z)
        { p, q = Split <axis = 1> (x)  y = Add (p, q)  z = Neg (p) }""",
        f"p, r = Split <axis = 1> (x)  z = Neg (p)  [n] y = {DOMAIN}.half (x, p)",
        f"""<domain: "{DOMAIN}", opset_import: ["" : 17]> half (p, q) => (r)
        {{ s, t = Split <axis = 1> (p)  r = Add (q, t) }}""",
        ["p", "y"],
    )
    assert not found.wrong and not found.not_compared and len(found.equal) == 1


@pytest.mark.parametrize(("operator", "is_wrong"), [("Exp", False), ("Abs", True)])
def test_nodes_that_run_at_sizes_of_1_alone_are_compared(operator: str, is_wrong: bool) -> None:
    """Such nodes are those of a branch for one sequence, which does not run at the sizes that are drawn first."""
    found = by_hand(
        "g (float[n, 4] x) => (float[4] y) { z = Constant <value = int64[1] {0}> ()  q = Squeeze (x, z)  y = Exp (q) }",
        f"[n] y = {DOMAIN}.first (x)",
        f"""<domain: "{DOMAIN}", opset_import: ["" : 17]> first (p) => (r)
        {{ z = Constant <value = int64[1] {{0}}> ()  q = Squeeze (p, z)  r = {operator} (q) }}""",
        ["q", "y"],
        None,
    )
    assert (len(found.wrong), len(found.equal), found.not_compared) == (is_wrong, not is_wrong, ())
    assert not is_wrong or found.wrong[0].reason.startswith("on drawn values its output 'y' is ")


MIXED_DTYPES = WRONG_RELU.format(wrong="op.Where(op.Equal(op.Size(x), 8), x, op.Relu(x))")


def test_a_body_that_onnxruntime_refuses_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Size gives an integer, and 8 is a float there."""
    monkeypatch.setattr(optimizer, "faults_of_bodies", lambda model: {})
    (tmp_path / "wrong_relu.py").write_text(MIXED_DTYPES, encoding="utf-8")
    model = parse("g (float[b, 8] x) => (float[b, 8] y) { a = Relu(x)  s = Softmax(a)  y = Sqrt(s) }")
    _, report = optimize(model, patterns=[tmp_path], regions=False)
    (dropped,) = report.dropped
    assert dropped.fusion == "wrong_relu" and dropped.reason.startswith("onnxruntime refuses its body: ")
    assert report.counts == {"softmax": 1} and report.verified.status == "verified"


@pytest.mark.parametrize("verify", [True, False])
def test_a_body_that_onnx_refuses_is_not_stored(tmp_path: Path, verify: bool) -> None:
    (tmp_path / "wrong_relu.py").write_text(MIXED_DTYPES, encoding="utf-8")
    model = parse("g (float[b, 8] x) => (float[b, 8] y) { a = Relu(x)  s = Softmax(a)  y = Sqrt(s) }")
    optimized, report = optimize(model, patterns=[tmp_path], regions=False, verify=verify)
    (dropped,) = report.dropped
    assert dropped.fusion == "wrong_relu" and dropped.reason.startswith("ONNX refuses its body: ")
    assert "inconsistent type" in dropped.reason and report.counts == {"softmax": 1}
    assert [node.op_type for node in optimized.graph.node] == ["Relu", "softmax", "Sqrt"]


def test_the_bias_of_a_quantized_product_has_its_shape() -> None:
    """Without it, onnxruntime does not open the replaced nodes, which read the constant as an input."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[n, 32] x) => (float[n, 4] y)
        { y = com.microsoft.MatMulNBits<K = 32, N = 4, bits = 4, block_size = 32>(x, w, scales, , , bias) }""")
    values = {"w": np.full((4, 1, 16), 147, np.uint8), "scales": np.ones((4, 1), "f4"), "bias": np.ones(4, "f4")}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    _, report = optimize(model)
    assert (report.counts, report.verified.status) == ({"matmul_nbits": 1}, "verified")
    assert report.verified.equal_parts == 1


def test_float8_weights_are_compared() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]> g (float[n, 32] x) => (float[n, 4] y)
        { numbers = DequantizeLinear<axis = 0, block_size = 16>(w, scales)  y = MatMul(x, numbers) }""")
    codes = np.arange(128, dtype=np.uint8)
    codes[127] = 0  # not NaN
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT8E4M3FN, (32, 4), codes.tobytes(), raw=True)
    model.graph.initializer.extend([weight, numpy_helper.from_array(np.ones((2, 4), "f4"), "scales")])
    _, report = optimize(model)
    assert (report.counts, report.verified.status) == ({"matmul_nbits": 1}, "verified")
    assert report.verified.equal_parts == 1
