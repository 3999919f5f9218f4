"""`onnxfuse inspect`: what a model is, and what will hurt on a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from case_documents import with_weights
from click.testing import CliRunner
from exported_models import load_exported
from genai_graphs import load_genai
from test_optimize import parse

from onnxfuse import optimize
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.cli import main
from onnxfuse.inspection.inspect_model import inspect_model
from onnxfuse.inspection.ort_kernels import ort_kernels
from onnxfuse.inspection.placement import Placement, place, scopes_of
from onnxfuse.ir.inline_functions import inline_functions
from onnxfuse.ir.serde import read_graph

# What onnxruntime 1.31.1 copies when a session with the CUDA provider opens these models, optimizations included.
COPIED = json.loads((Path(__file__).parent / "ort_copies.json").read_text(encoding="utf-8"))


def placed(model: onnx.ModelProto) -> Placement:
    graph = read_graph(inline_functions(model).model, None)
    graph.sort()
    return place(scopes_of(infer_shapes(graph)), ort_kernels())


def copies(model: onnx.ModelProto) -> list[str]:
    return sorted(f"{'to host' if one.to_host else 'to GPU'}: {one.tensor}" for one in placed(model).copies)


@pytest.mark.parametrize("name", COPIED)
def test_copies_are_those_that_onnxruntime_makes(name: str) -> None:
    assert copies(load_exported(name)) == COPIED[name]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Reshape reads its shape on the host, where Shape and Concat compute it.
        ("""g (float[n,4] x) => (float[a,b] y) <int64[1] last = {-1}, int64[1] zero = {0}>
            { s = Shape (x)  n = Gather (s, zero)  t = Concat <axis = 0> (n, last)  y = Reshape (x, t) }""", []),
        # A size that is computed with is copied to the GPU.
        ("""g (float[n,4] x) => (float[n,4] y) <int64 zero = {0}>
            { s = Shape (x)  n = Gather (s, zero)  f = Cast <to = 1> (n)  y = Div (x, f) }""", ["to GPU: f"]),
        # The shape of a static tensor is a constant.
        ("""g (float[3,4] x) => (float[3,4] y) <int64 zero = {0}>
            { s = Shape (x)  n = Gather (s, zero)  f = Cast <to = 1> (n)  y = Div (x, f) }""", []),
        # There is no CUDA kernel of Det, so what it reads and gives is copied.
        ("""g (float[n,3,3] x) => (float[n] y) { r = Relu (x)  d = Det (r)  y = Neg (d) }""",
         ["to GPU: d", "to host: r"]),
    ],
)  # fmt: skip
def test_copies(text: str, expected: Sequence[str]) -> None:
    assert copies(parse(text)) == expected


@pytest.mark.parametrize(
    ("node", "opset", "why"),
    [
        ("y = Add (x, x)", 17, None),
        ("y = Det (x)", 17, "the CUDA provider has no kernel of Det"),
        ("y = ReduceL1 (x)", 17, None),
        ("y = com.microsoft.FastGelu (x)", 17, None),
        ("y = Celu (x)", 17, "the CUDA provider has no kernel of Celu"),  # the CPU provider has one
        ("y = Mish (x)", 18, None),  # neither provider has one: onnxruntime writes it in other operators
    ],
)
def test_kernels(node: str, opset: int, why: str | None) -> None:
    model = parse(f"g (float[2,3,4,4] x) => (float[a,b,c,d] y) {{ {node} }}", opset)
    model.opset_import.add(domain="com.microsoft", version=1)
    assert list(placed(model).without_kernel.values()) == ([why] if why else [])


def test_a_kernel_for_other_dtypes() -> None:
    model = parse("g (int16[4] x) => (int64 y) { y = ArgMax <keepdims = 0> (x) }")
    (why,) = placed(model).without_kernel.values()
    assert why == "the CUDA provider has no kernel of ArgMax for int16"


def test_the_table_is_of_one_version_and_small() -> None:
    kernels = ort_kernels()
    assert kernels.version.count(".") == 2 and len(kernels.cuda) > 200
    assert Path(__file__).parents[2].joinpath("onnxfuse/inspection/ort_kernels.json").stat().st_size < 30_000


SICK = """
g (float[1,n,4] boxes, float[1,1,n] scores, int64[b,s] attention_mask, double[n] d, bool c, float[2,3,3] m)
  => (int64[k,3] kept, double[n] e, float[a] z, float[a] q, float[2] det)
<int64 limit = {10}, float[600,600] w>
{
  kept = NonMaxSuppression (boxes, scores, limit)
  e = Exp (d)
  z = custom.Thing (scores, w)
  [volume] det = Det (m)
  q = If <
    then_branch = yes () => (float[a] t) { t = Abs (z) [inner] inside = Det (m) },
    else_branch = no () => (float[a] f) { f = Neg (z) }> (c)
}
"""


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    """Write a model in which everything hurts."""
    model = parse(SICK)
    model.opset_import.add(domain="custom", version=1)
    onnx.save(model, tmp_path / "sick.onnx")
    return tmp_path / "sick.onnx"


def test_what_hurts(sick: Path) -> None:
    found = inspect_model(sick)
    assert [one.what for one in found.findings] == [
        "2 nodes on the CPU, for want of a CUDA kernel", "1 node of other libraries", "1 node in float64",
        "weights in float32", "masks of int64",
    ]  # fmt: skip
    assert found.findings[0].details == ("2x the CUDA provider has no kernel of Det: 'volume', 'inner'",)
    assert found.no_cuda_graph == (
        "1 If, whose branch the host chooses", "2 nodes on the CPU",
        "1 NonMaxSuppression, whose sizes are read back from the GPU",
    )  # fmt: skip
    assert all(one.advice.endswith(".") for one in found.findings)


def test_what_it_prints(sick: Path) -> None:
    """The text fits a terminal of 80 columns, and ends with the verdict and the next step."""
    result = CliRunner().invoke(main, ["inspect", str(sick)])
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert result.exit_code == 0 and max(map(len, lines)) <= 80
    assert lines[:3] == [
        "sick.onnx: opset 20, 1.44 MB on disk",
        "  360,000 float32 constants, 1.44 MB",
        "  1 int64 constant, 8 B",
    ]
    assert "input   attention_mask  int64    b, s" in lines and "output  kept            int64    k, 3" in lines
    assert "8 operators of 7 kinds  nodes" in lines
    assert any(line.startswith("  1. 2 nodes on the CPU") for line in lines)
    assert lines[-1] == "`onnxfuse optimize MODEL --dry-run` says what would be fused."


def test_a_fused_model_is_not_told_to_be_fused(tmp_path: Path) -> None:
    """Fused nodes have the names of their fusions, though the second function of a fusion has another name."""
    ends = "(float[64,64] x, float[64,64] m) => (float[64,64] y, float[64,64] z)"
    nodes = "a = Exp (x) b = Abs (a) y = Mul (a, b)  d = Det (m) e = Neg (x) f = Sin (e) z = Mul (f, d)"
    given = parse(f"g {ends} {{ {nodes} }}")
    model, report = optimize(given, verify=False)
    onnx.save(model, tmp_path / "m.onnx")
    lacking, copied, *_ = inspect_model(tmp_path / "m.onnx").findings
    assert report.counts == {"region": 2} and copied.details[-1] == "1x to the GPU: 'd' for onnxfuse::region"
    assert not any("onnxfuse optimize" in each.advice for each in (lacking, copied))
    onnx.save(given, tmp_path / "m.onnx")
    assert all("`onnxfuse optimize`" in each.advice for each in inspect_model(tmp_path / "m.onnx").findings[:2])


def test_layers_are_named_once(tmp_path: Path) -> None:
    """Six layers of eight operators, with two operators in front."""
    layer = "".join(f"h{{i}}{b} = {op} (h{{i}}{a})  " for op, a, b in zip(
        ("Relu", "Neg", "Exp", "Abs", "Sqrt", "Tanh", "Erf"), "abcdefg", "bcdefgh", strict=True))  # fmt: skip
    layers = "".join(layer.format(i=i) + f"h{i + 1}a = Add (h{i}h, h{i}a)  " for i in range(6))
    text = f"g (float[n] x) => (float[n] y) {{ s = Sin (x)  h0a = Cos (s)  {layers} y = Sigmoid (h6a) }}"
    onnx.save(parse(text), tmp_path / "m.onnx")
    ((copies, length),) = [(one.copies, one.length) for one in inspect_model(tmp_path / "m.onnx").blocks]
    assert (copies, length) == (6, 8)
    chain = "".join(f"h{i + 1} = Relu (h{i}) " for i in range(20))
    onnx.save(parse(f"g (float[n] h0) => (float[n] h20) {{ {chain} }}"), tmp_path / "chain.onnx")
    assert inspect_model(tmp_path / "chain.onnx").blocks == ()  # "20x 1 operators" says nothing


def test_sizes_that_are_not_known(tmp_path: Path) -> None:
    """Paddle writes -1 where others write nothing."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1,2] x) => (float y) { y = Relu (x) }'
    )
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    model.graph.input[0].type.tensor_type.shape.dim[1].Clear()
    onnx.save(model, tmp_path / "m.onnx")
    assert inspect_model(tmp_path / "m.onnx").inputs[0].dims == ("?", "?")


def test_a_model_without_trouble(tmp_path: Path) -> None:
    onnx.save(parse("g (float[2] x) => (float[2] y) { y = Relu (x) }"), tmp_path / "m.onnx")
    output = CliRunner().invoke(main, ["inspect", str(tmp_path / "m.onnx")]).output
    assert "  nothing that hurts: all operators have CUDA kernels, and nothing is copied\n" in output
    assert "A CUDA graph can hold it\n" in output


def quantized_lines(model: onnx.ModelProto, path: Path) -> list[str]:
    onnx.save(model, path / "model.onnx")
    lines = CliRunner().invoke(main, ["inspect", str(path / "model.onnx")]).stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Quantized operators and caches"))
    text = " ".join(" ".join(lines[first : lines.index("", first)]).split())  # lines are wrapped
    return re.split(r" (?=\d+x )", text)[1:]


def test_a_quantized_language_model(tmp_path: Path) -> None:
    """The total length is read on the host, and a mask that is counted need not be narrow: nothing is copied."""
    products, attentions = quantized_lines(load_genai("int4.onnx"), tmp_path)
    assert re.fullmatch(r"11x MatMulNBits, 4 bits, blocks of 32, \d+ KB of constants: reads .*", products)
    assert attentions.startswith("2x GroupQueryAttention, 4 heads on 2, a cache of float16, rotation inside, ")
    found = inspect_model(tmp_path / "model.onnx")
    assert (found.findings, found.no_cuda_graph) == ((), ())


QUANTIZED = {
    "w = DequantizeLinear<axis = 0, block_size = 16>(q, scales)  y = MatMul(x, w)":
        "1x DequantizeLinear of int8 weights, blocks of 16, 1.28 KB of constants: joined with its MatMul",
    "w = DequantizeLinear<axis = 0, block_size = 16>(q, scales)  y = MatMul(x, w)  z = Neg(w)":
        "1x DequantizeLinear of int8 weights, blocks of 16, 1.28 KB of constants: dequantizes the whole weight",
    "w = DequantizeLinear(q, one)  y = MatMul(x, w)":
        "1x DequantizeLinear of int8 weights, 1.03 KB of constants: dequantizes the whole weight in every run",
    "w = DequantizeLinear<axis = 0, block_size = 16>(f8, scales)  y = MatMul(x, w)":
        "1x DequantizeLinear of float8_e4m3fn weights, blocks of 16, 1.28 KB of constants: dequantizes the whole",
    "w = DequantizeLinear(f8, one)  v = DequantizeLinear(s, one)  y = MatMul(v, w)":
        "1x DequantizeLinear of float8_e4m3fn weights, 1.03 KB of constants: dequantizes the whole weight in every run",
    "w = DequantizeLinear(f8, one)  c = QuantizeLinear(x, one, zero)  v = DequantizeLinear(c, one)  y = MatMul(v, w)":
        "1x DequantizeLinear of float8_e4m3fn weights, 1.03 KB of constants: dequantizes the whole weight in every "
        "run; onnxfuse multiplies its float8 numbers",
    "w = DequantizeLinear(q, one)  v = DequantizeLinear(s, one)  y = MatMul(v, w)":
        "1x DequantizeLinear of int8 weights, 1.03 KB of constants: dequantizes the whole weight in every run; "
        "onnxfuse multiplies its integers",
    "w = MatMulInteger(s, q)  y = Cast<to = 1>(w)":
        "1x MatMulInteger, 1.02 KB of constants: a launch of its own, because no float operator is joined with it on "
        "CUDA; onnxfuse multiplies its integers",
    "c = QuantizeLinear(x, one)  d = DequantizeLinear(c, one)  y = Neg(d)":
        "1x QuantizeLinear, 4 B of constants: a launch of its own, because no float operator is joined with it on "
        "CUDA; onnxfuse fuses it with the elementwise operators and norms beside it",
    "c = QuantizeLinear<output_dtype = 5>(x, one)  d = DequantizeLinear(c, one)  y = Neg(d)":
        "1x QuantizeLinear, 4 B of constants: a launch of its own, because no float operator is joined with it on "
        "CUDA; onnxfuse fuses it with the elementwise operators and norms beside it",
    "c = com.microsoft.QuantizeLinear(x, one, i8)  d = com.microsoft.DequantizeLinear(c, one, i8)  y = Neg(d)":
        "1x QuantizeLinear, 5 B of constants: on the CPU, for want of a CUDA kernel; onnxfuse fuses it with",
    "c = com.microsoft.QuantizeLinear(x, one, i16)  d = com.microsoft.DequantizeLinear(c, one, i16)  y = Neg(d)":
        "1x QuantizeLinear, 6 B of constants: on the CPU, for want of a CUDA kernel",
    "w = com.microsoft.DequantizeLinear(q, one)  v = com.microsoft.DequantizeLinear(s, one)  y = MatMul(v, w)":
        "1x DequantizeLinear of int8 weights, 1.03 KB of constants: dequantizes the whole weight in every run; "
        "onnxfuse multiplies its integers",
    "c = QLinearMatMul(s, one, i8, q, one, i8, one, i8)  y = DequantizeLinear(c, one)":
        "1x QLinearMatMul, 1.03 KB of constants: on the CPU, for want of a CUDA kernel; onnxfuse multiplies its "
        "integers",
    "t = Transpose(s)  c = QLinearMatMul(s, one, i8, t, one, i8, one, i8)  y = DequantizeLinear(c, one)":
        "1x QLinearMatMul, 5 B of constants: on the CPU, for want of a CUDA kernel; onnxfuse writes it as a MatMul of "
        "floats between quantizers",
    "c = com.microsoft.QGemm(s, one, i8, q, one, i8)  y = Neg(c)":
        "1x QGemm, 1.03 KB of constants: on the CPU, for want of a CUDA kernel; onnxfuse multiplies its integers",
    "c = com.microsoft.QLinearAdd(s, one, i8, s, one, i8, one, i8)  y = DequantizeLinear(c, one)":
        "1x QLinearAdd, 5 B of constants: on the CPU, for want of a CUDA kernel; onnxfuse fuses it with the",
    "g = com.microsoft.GatherBlockQuantized<block_size = 16, bits = 8>(u, ids, wide, zeros)  y = Neg(g)":
        "1x GatherBlockQuantized, 8 bits, blocks of 16, zero points, ",
    "c = DynamicQuantizeLinear(x)  y = Cast<to = 1>(c)":
        "1x DynamicQuantizeLinear: on the CPU, for want of a CUDA kernel; onnxfuse fuses it with",
}  # fmt: skip


@pytest.mark.parametrize("body", QUANTIZED)
def test_quantized_operators(body: str, tmp_path: Path) -> None:
    if "Dynamic" in body:
        body = body.replace("c = D", "c, t, p = D")
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float[n, 32] x, int8[n, 32] s, int64[b] ids) => (float[n, m] y)
        <int8[32, 32] q, float[2, 32] scales, float one = {{1}}, int8 i8 = {{0}}, int16 i16 = {{0}},
         float8e4m3fn[32, 32] f8, float8e4m3fn zero = {{0}}, uint8[8, 32] u, float[8, 2] wide, uint8[8, 2] zeros>
        {{ {body} }}""")
    line, expected = quantized_lines(with_weights(model), tmp_path)[0], QUANTIZED[body.replace("c, t, p = D", "c = D")]
    assert line.startswith(expected) and ("onnxfuse" in line) == ("onnxfuse" in expected)


@pytest.mark.parametrize(
    ("dtype", "kind", "told"),
    [("int8", "PER_TENSOR", "int8, one scale for all"),
     ("float8e4m3fn", "PER_CHANNEL", "float8_e4m3fn, a scale for each channel")],
)  # fmt: skip
def test_quantized_caches(dtype: str, kind: str, told: str, tmp_path: Path) -> None:
    quantized = f'k_quant_type = "{kind}", v_quant_type = "{kind}", kv_cache_bit_width = 8'
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (float16[b, s, 64] x, {dtype}[b, 1, p, 16] k, {dtype}[b, 1, p, 16] v, int32[b] lengths, int32 total)
          => (float16[b, s, 32] y, {dtype}[b, 1, r, 16] t, {dtype}[b, 1, r, 16] u)
        <float[16] c, float[16] d> {{
          y, t, u = com.microsoft.GroupQueryAttention
              <num_heads = 2, kv_num_heads = 1, {quantized}>
              (x, , , k, v, lengths, total, , , , , , c, d) }}""")
    (line,) = quantized_lines(with_weights(model), tmp_path)
    assert line.startswith(f"1x GroupQueryAttention, 2 heads on 1, a cache of {told}, 128 B of constants: writes new")
    assert inspect_model(tmp_path / "model.onnx").findings == ()


def test_operators_of_onnxruntime_that_no_checker_sees(tmp_path: Path) -> None:
    ms = "com.microsoft"
    for body, sentence in (
        (f'y = {ms}.MatMulNBits<bits = "a">(x)', "the attribute 'bits' of type STRING; MatMulNBits requires INT"),
        (f"y = {ms}.GroupQueryAttention<num_heads = 0.5>(x)", "the attribute 'num_heads' of type FLOAT; GroupQuery"),
        (f"y = {ms}.DequantizeLinear()", ""),
    ):
        head = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> g (float[n] x) => (float[m] y)'
        onnx.save(onnx.parser.parse_model(f"{head} {{ {body} }}"), tmp_path / "m.onnx")
        result = CliRunner().invoke(main, ["inspect", str(tmp_path / "m.onnx")])
        assert result.exit_code == bool(sentence) and sentence in result.stderr
