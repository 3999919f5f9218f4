"""Test the normal form of each operator: the program of its region computes what onnxruntime does for the operator."""

from __future__ import annotations

import pytest
from region_models import assert_programs_agree, draw, optimized, parsed, regions

from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.regions.normal_form import WRITERS, normal_form

FLOAT = (
    "Abs", "Neg", "Exp", "Erf", "Tanh", "Sin", "Cos", "Floor", "Ceil", "Round", "Sign", "Reciprocal", "Relu", "Sigmoid",
    "Softplus", "Softsign", "HardSwish", "LeakyRelu", "Elu", "Selu", "HardSigmoid",
)  # fmt: skip
# Index maps between Neg and Exp: opset, constants, and the map of a, which is Neg(x).
MAPS_OF_A: dict[str, tuple[int, str, str]] = {
    "Reshape": (17, "s := int64[3] {0, -1, 2}", "Reshape(a, s)"),
    "Expand": (17, "s := int64[4] {5, 1, 1, 4}", "Expand(a, s)"),
    "Slice": (
        17,
        "s := int64[2] {-1, 1} e := int64[2] {-9223372036854775807, 9223372036854775807} "
        "p := int64[2] {2, 1} t := int64[2] {-2, 1}",
        "Slice(a, s, e, p, t)",
    ),
    "Slice before opset 10": (9, "", "Slice <axes = [-1], starts = [1], ends = [-1]> (a)"),
    "Concat": (17, "", "Concat <axis = -2> (a, y, x)"),
    "Pad": (17, "p := int64[6] {0, 1, -1, 0, 0, 2} v := float {3}", "Pad(a, p, v)"),
    "Pad, reflect": (17, "p := int64[6] {0, 1, 2, 0, 0, 1}", 'Pad <mode = "reflect"> (a, p)'),
    "Pad, edge": (17, "p := int64[6] {0, 1, 2, 0, 0, 1}", 'Pad <mode = "edge"> (a, p)'),
    "Pad, axes": (19, "p := int64[2] {2, 1} v := float {3} w := int64[1] {-2}", "Pad(a, p, v, w)"),
    "Pad, wrap": (19, "p := int64[6] {0, 1, 2, 0, 0, 1}", 'Pad <mode = "wrap"> (a, p)'),
    "Pad before opset 11": (10, "", "Pad <pads = [0, 1, 0, 0, 0, 2], value = 2.0> (a)"),
    "Gather of one": (17, "k := int64 {-1}", "Gather <axis = 1> (a, k)"),
    "Gather of one, with an axis": (17, "k := int64[1] {1}", "Gather <axis = 2> (a, k)"),
    "Gather of constants": (17, "k := int64[4] {2, -1, 0, 2}", "Gather <axis = 1> (a, k)"),
    "Gather of computed rows": (17, "t := int64 {3} k = Mod(i, t)", "Gather <axis = 2> (a, k)"),
    "GatherElements": (
        17,
        "k := int64[2,3,2] {0, -1, 2, 3, 1, -4, 1, 1, -2, 3, 0, 2}",
        "GatherElements <axis = -1> (a, k)",
    ),
    "GatherElements of one": (17, "k := int64[1,1,1] {-1}", "GatherElements <axis = 1> (a, k)"),
    "Tile": (17, "r := int64[3] {1, 2, 3}", "Tile(a, r)"),
}
# Opset, nodes from x, y, i, b, h to z; another operator stands beside each, so that two are one region.
CASES: dict[str, tuple[int, str]] = {
    **{op: (17, f"a = {op}(x) z = Sub(a, y)") for op in FLOAT},
    "Sqrt and Log": (17, "a = Abs(x) s = Sqrt(a) l = Log(a) z = Div(s, l)"),
    "Identity": (17, "a = Neg(x) c = Identity(a) z = Sub(c, y)"),
    "Swish": (24, "a = Neg(x) z = Swish <alpha = 1.5> (a)"),
    "Mish": (18, "a = Mish(x) z = Sub(a, y)"),
    "Gelu": (20, "a = Gelu(x) z = Sub(a, y)"),
    "Gelu, tanh": (20, 'a = Gelu <approximate = "tanh"> (x) z = Sub(a, y)'),
    "LeakyRelu, alpha": (17, "a = LeakyRelu <alpha = 0.3> (x) z = Sub(a, y)"),
    "HardSigmoid, alpha": (17, "a = HardSigmoid <alpha = 0.1, beta = 0.4> (x) z = Sub(a, y)"),
    "Pow": (17, "a = Abs(x) z = Pow(a, y)"),
    "Pow, integer exponent": (17, "e := int64 {3} a = Neg(x) z = Pow(a, e)"),
    "Mod": (17, "t := int64 {3} a = Neg(i) z = Mod(a, t)"),
    "Mod, fmod": (17, "a = Neg(x) z = Mod <fmod = 1> (a, y)"),
    "Mod, fmod of integers": (17, "t := int64 {3} a = Neg(i) z = Mod <fmod = 1> (a, t)"),
    "Min and Max": (17, "a = Min(x, y) c = Neg(x) d = Max(a, c, y) z = Min(d)"),
    "Sum": (17, "a = Neg(x) z = Sum(a, y, x)"),
    "Div, integers": (17, "t := int64 {3} a = Neg(i) z = Div(a, t)"),
    "Clip": (17, "l := float {-0.5} u := float {1} a = Neg(x) z = Clip(a, l, u)"),
    "Clip, max alone": (17, "u := float {1} a = Neg(x) z = Clip(a, , u)"),
    "Clip before opset 11": (10, "a = Neg(x) z = Clip <min = -0.5, max = 1.0> (a)"),
    "Clip of infinities, min alone": (17, "o := float {0} a = Div(x, o) z = Clip(a, o)"),
    "BitwiseAnd": (
        18, "t := int64 {5} a = BitwiseAnd(i, t) c = BitwiseOr(a, i) d = BitwiseXor(c, t) e = BitwiseNot(d) "
        "z = BitwiseXor(e, i)"
    ),
    "BitShift": (
        17, 't := uint8 {7} a = Cast <to = 2> (b) c = BitShift <direction = "LEFT"> (a, t) d = Add(c, t) '
        'z = BitShift <direction = "RIGHT"> (d, a)'
    ),
    "Where": (17, "a = Neg(x) c = Not(b) z = Where(c, a, y)"),
    "comparisons": (
        17, "a = Less(x, y) c = LessOrEqual(x, y) d = Greater(x, y) e = GreaterOrEqual(x, y) f = Xor(a, d) "
        "k = And(c, e) z = Or(f, k)"
    ),
    "Equal": (17, "a = Neg(i) c = Equal(a, i) z = Not(c)"),
    "IsNaN": (17, "a = Sqrt(x) c = IsNaN(a) z = Where(c, y, a)"),
    "IsInf": (17, "o := float {0} a = Div(x, o) c = IsInf <detect_negative = 0> (a) z = Where(c, y, x)"),
    "Cast": (17, "a = Cast <to = 7> (x) c = Cast <to = 9> (a) d = Cast <to = 1> (c) z = Cast <to = 10> (d)"),
    "float16": (17, "a = Exp(h) c = Mul(a, h) d = Cast <to = 1> (c) z = Tanh(d)"),
    "QuantizeLinear": (13, "s := float {0.1} a = Neg(x) z = QuantizeLinear(a, s)"),
    "QuantizeLinear per channel": (
        13, "s := float[3] {0.1, 0.2, 0.3} t := int8[3] {0, 5, -7} a = Neg(x) z = QuantizeLinear <axis = -2> (a, s, t)"
    ),
    "QuantizeLinear by a computed scale": (
        19, "k := int64[1] {1} a = Abs(h) m = ReduceMax(a) s = Reshape(m, k) z = QuantizeLinear(a, s)"
    ),
    "QuantizeLinear by a precision": (
        23, "k := float {0.1} s = Cast <to = 10> (k) a = Neg(h) z = QuantizeLinear <precision = 1> (a, s)"
    ),
    "DequantizeLinear": (
        13, "s := float[4] {0.1, 0.2, 0.3, -0.4} t := uint8[4] {0, 5, 7, 255} a = Cast <to = 2> (b) "
        "c = DequantizeLinear <axis = 2> (a, s, t) z = Neg(c)"
    ),
    "DequantizeLinear of int32": (10, "s := float {0.1} a = Cast <to = 6> (i) c = DequantizeLinear(a, s) z = Neg(c)"),
    "DequantizeLinear of constants": (
        13, "s := float {0.5} t := uint8[3, 4] {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 255} u := int8[2] {3, -4} "
        "k := int64 {2} c = Mod(i, k) a = DequantizeLinear(t, s) d = DequantizeLinear(u, s) e = Gather(d, c) "
        "z = Add(e, a)"
    ),
    "PRelu": (17, "s := float[4] {0.1, 0.2, 0.3, 0.4} a = Neg(x) z = PRelu(a, s)"),
    "broadcast of a number with axes": (17, "o := float[1, 1, 1, 1] {2} a = Neg(x) z = Add(a, o)"),
    # --- index maps
    **{
        name: (opset, f"{constants} a = Neg(x) c = {call} z = Exp(c)")
        for name, (opset, constants, call) in MAPS_OF_A.items()
    },
    "Transpose": (17, "a = Transpose <perm = [2, 0, 1]> (x) z = Exp(a)"),
    "Transpose, reversed": (17, "a = Transpose(x) z = Exp(a)"),
    "Flatten": (17, "a = Neg(x) f = Flatten <axis = 2> (a) z = Exp(f)"),
    "Flatten, negative": (17, "a = Neg(x) f = Flatten <axis = -1> (a) z = Exp(f)"),
    "Unsqueeze and Squeeze": (
        17, "p := int64[2] {0, -1} q := int64[1] {-1} a = Neg(x) "
        "c = Unsqueeze(a, p) d = Exp(c) e = Squeeze(d, q) z = Neg(e)"
    ),
    "Unsqueeze before opset 13": (
        11, "a = Neg(x) c = Unsqueeze <axes = [1]> (a) d = Exp(c) e = Squeeze <axes = [1]> (d) z = "
        "Neg(e)"
    ),
    "Split": (17, "s := int64[2] {1, 3} a = Neg(x) c, d = Split <axis = 2> (a, s) e = Exp(c) z = Add(e, d)"),
    "Split, equal parts": (17, "a = Neg(x) c, d = Split <axis = -1> (a) e = Exp(c) z = Add(e, d)"),
    "Split before opset 13": (11, "a = Neg(x) c, d = Split <axis = 2, split = [1, 3]> (a) e = Exp(c) z = Add(e, d)"),
    # --- reductions
    "Softmax": (17, "a = Neg(x) c = Softmax <axis = 1> (a) z = Mul(c, y)"),
    "LogSoftmax": (17, "a = Neg(x) c = LogSoftmax(a) z = Mul(c, y)"),
    "Softmax of the last axis before opset 13": (11, "a = Neg(x) c = Softmax <axis = 2> (a) z = Mul(c, y)"),
    "DynamicQuantizeLinear": (
        17, "a = Neg(x) c, d, e = DynamicQuantizeLinear(a) f = DequantizeLinear(c, d, e) u = Cast <to = 1> (e) "
        "v = Mul(u, d) w = Add(f, v) z = Cast <to = 10> (w)"
    ),
    "ArgMax": (17, "a = Neg(x) c = ArgMax <axis = 1, keepdims = 0> (a) z = Neg(c)"),
    "ArgMin, last index": (17, "a = Floor(x) c = ArgMin <axis = -1, select_last_index = 1> (a) z = Neg(c)"),
    "norm": (
        17, "a = Neg(x) m = ReduceMean <axes = [-1]> (a) d = Sub(a, m) s = ReduceSumSquare <axes = [-1]> (d) z = "
        "Div(d, s)"
    ),
    "rows alone": (17, "a = Neg(x) m = ReduceMax <axes = [0, 2], keepdims = 0> (a) z = Exp(m)"),
    "sum over an input": (17, "p := int64[1] {-1} a = Neg(x) m = ReduceSum(a, p) z = Div(a, m)"),
    "reduction over an input since opset 18": (18, "p := int64[1] {1} a = Neg(x) m = ReduceL2(a, p) z = Div(a, m)"),
    "reduction of everything": (17, "a = Neg(x) m = ReduceMean <keepdims = 0> (a) z = Sub(a, m)"),
    "reduction without axes": (18, "a = Neg(x) m = ReduceMax <noop_with_empty_axes = 1> (a) z = Sub(a, y)"),
    **{
        op: (17, f"a = Tanh(x) m = {op} <axes = [1]> (a) z = Sub(a, m)")
        for op in ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp")
    },
    "ReduceLogSum": (17, "a = Exp(x) m = ReduceLogSum <axes = [1]> (a) z = Sub(a, m)"),
    "sum of integers": (17, "p := int64[1] {1} a = Neg(i) m = ReduceSum(a, p) z = Sub(a, m)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_program_computes_what_the_operators_do(name: str) -> None:
    opset, nodes = CASES[name]
    model, _ = optimized(parsed(nodes, opset=opset), only=["region"])
    assert len(regions(model)) == 1, [node.op_type for node in model.graph.node]
    assert [node.domain for node in model.graph.node] == ["onnxfuse"]
    assert assert_programs_agree(model, draw(model)) == 1


IMAGES = "float[1, 8, 4, 6] x"
OF_IMAGES = [
    "a = DepthToSpace <blocksize = 2> (x) z = Exp(a)",
    'a = DepthToSpace <blocksize = 2, mode = "CRD"> (x) z = Exp(a)',
    "a = SpaceToDepth <blocksize = 2> (x) z = Exp(a)",
    "a = Neg(x) p = GlobalAveragePool(a) z = Mul(a, p)",
    "a = Neg(x) p = GlobalMaxPool(a) f = Flatten(p) z = Exp(f)",
]


@pytest.mark.parametrize("nodes", OF_IMAGES)
def test_images(nodes: str) -> None:
    model, _ = optimized(parsed(nodes, inputs=IMAGES), only=["region"])
    assert [node.domain for node in model.graph.node] == ["onnxfuse"]
    assert assert_programs_agree(model, draw(model)) == 1


# What a QuantizeLinear must not have in a region: opset, nodes, and the reason in the report.
REFUSED = {
    "blocks": (
        21, "s := float[2, 3, 2] {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12} a = Neg(x) "
        "z = QuantizeLinear <axis = 2, block_size = 2> (a, s)",
        "its scales are given per block of 2; required is one for all, or one per channel"
    ),
    "4 bits": (
        21, "s := float {0.5} t := int4 {0} a = Neg(x) z = QuantizeLinear(a, s, t)",
        "it gives int4; kernels quantize to int8, uint8, float8_e4m3fn, float8_e5m2, int16, uint16"
    ),
    "beyond the range": (
        19, "s := float {0.5} t := float8e4m3fn {0} a = Neg(x) z = QuantizeLinear <saturate = 0> (a, s, t)",
        "it does not saturate numbers beyond the range of float8_e4m3fn"
    ),
    "computed scales": (
        13, "a = Abs(x) s = ReduceMax <axes = [0, 2], keepdims = 0> (a) z = QuantizeLinear(a, s)",
        "'s' has a number per channel and is computed; required is a constant"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_quantizers_that_stay_out(name: str) -> None:
    opset, nodes, reason = REFUSED[name]
    shapes = read_and_infer(parsed(nodes, opset=opset), None)
    (node,) = (node for node in shapes.graph.nodes if node.op == "QuantizeLinear")
    assert normal_form(shapes, node) == f"QuantizeLinear stays out of regions: {reason}"


def test_every_operator_has_a_case() -> None:
    """So that each of them is known to have a kernel, and its program to be right."""
    models = [parsed(nodes, opset=opset) for opset, nodes in CASES.values()]
    models += [parsed(nodes, inputs=IMAGES) for nodes in OF_IMAGES]
    assert set(WRITERS) - {node.op_type for model in models for node in model.graph.node} == set()


def test_dynamic_sizes() -> None:
    nodes = (
        "s := int64[4] {0, 0, 2, -1} r = Reshape(x, s) t = Transpose <perm = [0, 2, 1, 3]> (r) "
        "e = Exp(t) u := int64[3] {0, 2, -1} z = Reshape(e, u)"
    )
    model, _ = optimized(parsed(nodes, inputs="float[batch, seq, 8] x"), only=["region"])
    assert [node.domain for node in model.graph.node] == ["onnxfuse"]
    for batch, seq in ((1, 1), (2, 7)):
        assert assert_programs_agree(model, draw(model, sizes={"batch": batch, "seq": seq})) == 1
