"""Linear attention in chunks of tokens becomes linear_attention; a sentence says why other sums of decays do not."""

from __future__ import annotations

import onnx
import pytest
from exported_models import load_exported

from onnxfuse import optimize, unfuse
from onnxfuse.dsl.catalogue import builtin
from onnxfuse.explain import explanations
from onnxfuse.fuse_model import Settings, fuse_model
from onnxfuse.ir.dtypes import DTYPE_NUMBERS

EXPORTED = {"mamba2_dynamo_fp32.onnx": 2, "mamba2_ts_fp32.onnx": 2, "qwen3_next_dynamo_fp32.onnx": 1}


@pytest.mark.parametrize("name", EXPORTED)
def test_exported_models(name: str) -> None:
    """Each layer becomes one node, equal layers call one function, and what was inlined is found again."""
    model, report = optimize(load_exported(name))
    assert report.counts["linear_attention"] == EXPORTED[name] and report.verified.status == "verified"
    assert not report.dropped and {"CumSum", "Exp", "Einsum"}.isdisjoint(node.op_type for node in model.graph.node)
    assert sum(function.name.startswith("linear_attention") for function in model.functions) == 1
    assert optimize(unfuse(model, verify=False)[0], verify=False)[1].counts == report.counts


@pytest.mark.parametrize(
    ("name", "dtype"), [("mamba2_ts_fp32.onnx", "float16"), ("qwen3_next_dynamo_fp32.onnx", "bfloat16")]
)
def test_half_precision(name: str, dtype: str) -> None:
    """The operands have half precision, although the model then adds decays up in float32."""
    model, report = optimize(load_exported(name), dtype=dtype)
    assert report.counts["linear_attention"] == EXPORTED[name] and report.verified.status == "verified"
    nodes = [node for node in model.graph.node if node.op_type.startswith("linear_attention")]
    types = {info.name: info.type.tensor_type.elem_type for info in model.graph.value_info}
    assert {types[name] for node in nodes for name in node.input} == {DTYPE_NUMBERS[dtype]}


# Four tokens in chunks of two; the state before the second chunk is what the first one adds.
HEAD = '<ir_version: 8, opset_import: ["" : 18]> main '
INPUTS = "(float[b,4,2,3] q, float[b,4,2,3] k, float[b,4,2,5] v, float[b,4,2] g) => (float[b,4,2,5] y)"
CONSTANTS = """<int64[5] of_keys = {0,2,2,2,3}, int64[5] of_values = {0,2,2,2,5}, int64[4] of_decays = {0,2,2,2},
    int64 three = {3}, int64[1] axis3 = {3}, int64[1] axis4 = {4}, int64[1] first = {1}, int64[1] end = {2},
    bool[2,2] future = {0,1,0,0}, float low = {-inf}, int64[10] shift = {0,0,1,0,0,0,0,-1,0,0},
    int64[4] whole = {0,4,2,5}>"""
NODES = """{
    q5 = Reshape (q, of_keys)  qc = Transpose <perm = [0,3,1,2,4]> (q5)
    k5 = Reshape (k, of_keys)  kc = Transpose <perm = [0,3,1,2,4]> (k5)
    v5 = Reshape (v, of_values)  vc = Transpose <perm = [0,3,1,2,4]> (v5)
    g4 = Reshape (g, of_decays)  gc = Transpose <perm = [0,3,1,2]> (g4)
    s = CumSum (gc, three)  rows = Unsqueeze (s, axis4)  columns = Unsqueeze (s, axis3)
    between = Sub (rows, columns)  past = Where (future, low, between)  decays = Exp (past)
    kt = Transpose <perm = [0,1,2,4,3]> (kc)  scores = MatMul (qc, kt)  p = Mul (scores, decays)  inner = MatMul (p, vc)
    last = Slice (s, first, end, axis3)  left = Sub (last, s)  after = Exp (left)  factors = Unsqueeze (after, axis4)
    kd = Mul (kc, factors)  kdt = Transpose <perm = [0,1,2,4,3]> (kd)  added = MatMul (kdt, vc)
    states = Pad (added, shift)
    before = Exp (s)  own = Unsqueeze (before, axis4)  qd = Mul (qc, own)  outer = MatMul (qd, states)
    sum = Add (inner, outer)  yc = Transpose <perm = [0,2,3,1,4]> (sum)  y = Reshape (yc, whole)
}"""
TEXT = HEAD + INPUTS + CONSTANTS + NODES


def test_by_hand() -> None:
    model, report = optimize(onnx.parser.parse_model(TEXT))
    assert report.counts == {"linear_attention": 1} and report.verified.status == "verified"
    (node,) = model.graph.node
    attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    assert (node.input, node.output) == (["q", "k", "v", "g"], ["y"]) and attributes[
        "operands"
    ] == b"query key value decay"
    expected = {
        "update_rule": b"gated",
        "q_num_heads": 2,
        "kv_num_heads": 2,
        "width": 6,
        "value_width": 10,
        "decays": 2,
    }
    assert expected.items() <= attributes.items() and attributes["scale"] == pytest.approx(1)


def test_a_scale_anywhere() -> None:
    """The queries' factor is found, although it is applied to scores and to queries after they are decayed."""
    text = TEXT.replace("scores = MatMul (qc, kt)", "dots = MatMul (qc, kt)  scores = Mul (dots, half)")
    text = text.replace("outer = MatMul (qd, states)", "h = MatMul (qd, states)  outer = Mul (h, half)")
    model, report = optimize(onnx.parser.parse_model(text.replace("float low", "float half = {0.5}, float low")))
    (scale,) = [each.f for node in model.graph.node for each in node.attribute if each.name == "scale"]
    assert report.counts == {"linear_attention": 1} and scale == pytest.approx(0.5) and report.verified.passed


def test_heads_before_tokens() -> None:
    """Operands and results are transposed outside of the node."""
    text = TEXT.replace(
        "q5 = Reshape (q, of_keys)", "q4 = Transpose <perm = [0,2,1,3]> (q)  q5 = Reshape (q4, of_keys)"
    )
    text = text.replace("float[b,4,2,3] q", "float[b,2,4,3] q")
    _, report = optimize(onnx.parser.parse_model(text))
    assert report.counts == {"linear_attention": 1} and report.verified.status == "verified"


SOMETHING_ELSE = "it computes something else"
NEAR_MISSES = {
    "exclusive sums": (("CumSum (gc", "CumSum <exclusive = 1> (gc"), SOMETHING_ELSE),
    "no own token": (("{0,1,0,0}", "{1,1,0,1}"), SOMETHING_ELSE),
    "no decay of a state": (("qd = Mul (qc, own)", "qd = Identity (qc)"), SOMETHING_ELSE),
    "no state": (("{0,0,1,0,0,0,0,-1,0,0}", "{0,0,0,0,0,0,0,0,0,0}"), SOMETHING_ELSE),
    "a number near 1": (("before = Exp (s)", "e = Exp (s)  before = Mul (e, most)"), SOMETHING_ELSE),
    "a limit": (("after = Exp (left)", "some = Relu (left)  after = Exp (some)"), ", Relu, is not a part"),
    "a condition": (
        ("past = Where (future, low, between)", "far = Less (between, most)  past = Where (far, low, between)"),
        ", Less, is not a part",
    ),
    "a condition on values": (
        ("added = MatMul (kdt, vc)", "is = Less (vc, most)  some = Where (is, vc, most)  added = MatMul (kdt, some)"),
        ", Less, is not a part",
    ),
    "another output": (("=> (", "=> (float[b,2,2,2,2] decays, "), "'decays' is read as an output"),
    "another operand": (
        ("added = MatMul (kdt, vc)", "more = Mul (vc, w)  added = MatMul (kdt, more)"), SOMETHING_ELSE
    ),
    "one chunk": (("s = CumSum (gc, three)", "s = CumSum (gc, two)"), SOMETHING_ELSE),
    "a scale that depends on the batch": (
        (
            "qc = Transpose <perm = [0,3,1,2,4]> (q5)",
            """batch = Shape <end = 1> (q)  factor = Cast <to = 1> (batch)  some = Transpose <perm = [0,3,1,2,4]> (q5)
            qc = Mul (some, factor)""",
        ),
        SOMETHING_ELSE,
    ),
    "a maximum": (
        (
            "s = CumSum (gc, three)",
            """sums = CumSum (gc, three)  at = Constant <value = int64[1,4] {0,0,0,0}> ()
            least = Constant <value = float[1] {-1000}> ()  s = ScatterND <reduction = "max"> (sums, at, least)""",
        ),
        ", ScatterND, is not a part",
    ),
    "one row of decays for all": (("float[b,4,2] g", "float[1,4,2] g"), "required are one batch"),
    "decays that may be one row": (("float[b,4,2] g", "float[c,4,2] g"), "required are one batch"),
    "no rows": ((INPUTS, INPUTS.replace("[b,", "[0,")), "sizes above 0"),
    "two operands": (("Reshape (k, of_keys)", "Reshape (q, of_keys)"), SOMETHING_ELSE),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name: str) -> None:
    (old, new), reason = NEAR_MISSES[name]
    assert old in TEXT
    text = TEXT.replace(old, new).replace("float low", "float most = {0.999}, int64 two = {2}, float low")
    text = text.replace("<int64[5] of_keys", "<float[5] w = {1,2,3,4,5}, int64[5] of_keys")
    result = fuse_model(onnx.parser.parse_model(text), None, Settings(list(builtin()), regions=True))
    assert not any(one.fusion == "linear_attention" for one in result.fused)
    (sentence,) = explanations(result, "linear_attention")
    assert "(CumSum) adds up no decays of linear attention in chunks: " in sentence and reason in sentence


def test_tokens_beyond_a_fixed_length_are_cut_off() -> None:
    """A dynamic length that is padded to four tokens has four results, and no more, for five tokens."""
    text = TEXT.replace("[b,4,", "[b,length,")
    text = text.replace("y = Reshape (yc, whole)", "all = Reshape (yc, whole)  y = Slice (all, zero, tokens, first)")
    text = text.replace("int64 three", "int64[1] zero = {0}, int64[1] four = {4}, int64 three")
    pads = "tokens = Shape <start = 1, end = 2> (q)  missing = Sub (four, tokens)\n"
    for name, sizes in ("q", 4), ("k", 4), ("v", 4), ("g", 3):
        zeros = "zero, " * (sizes + 1)
        after = ", zero" * (sizes - 2)
        pads += f"{name}_pads = Concat <axis = 0> ({zeros}missing{after})  {name}_all = Pad ({name}, {name}_pads)\n"
        text = text.replace(f"Reshape ({name}, ", f"Reshape ({name}_all, ")
    text = text.replace("q5 = Reshape", f"{pads}q5 = Reshape")
    result = fuse_model(onnx.parser.parse_model(text), None, Settings(list(builtin()), regions=True))
    (sentence,) = explanations(result, "linear_attention")
    assert "adds up no decays" in sentence and SOMETHING_ELSE not in sentence  # they are not even compared


def test_switched_off() -> None:
    assert "linear_attention" not in optimize(onnx.parser.parse_model(TEXT), skip=["linear_attention"])[1].counts
