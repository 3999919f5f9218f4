"""Test which norms join the product that reads their result, what the file then says, and that it computes the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx
import pytest
from architectures import DEVICES, H200
from case_documents import with_weights
from kernel_hosts import host_of, require_support

from onnxfuse import optimize, unfuse
from onnxfuse.fuse_model import Regions
from onnxfuse.runtime.fused_calls import read_calls
from onnxfuse.runtime.plan import Device, Launch, TensorSpec

NORM = "n = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001, stash_type = 1> ({x}, g)"
PRODUCT = "y{i} = com.microsoft.MatMulNBits <K = 64, N = {n}, bits = 4, block_size = 32> ({x}, w{i}, s{i})"
SUM = "sum = Add (x, r)"
QKV = [PRODUCT.format(i=i, n=n, x="n") for i, n in ((1, 64), (2, 16), (3, 16))]
OF_GATE = "s = Sigmoid (y1) a = Mul (y1, s) y = Mul (a, y2)"
GATE = [*(PRODUCT.format(i=i, n=64, x="n") for i in (1, 2)), OF_GATE]
FLOAT = [f"y{i} = MatMul (n, m{i})" for i in (1, 2, 3)]


def model_of(
    *nodes: str, outputs: str = "float16[rows, n] y1", dtype: str = "float16", rows: str = "rows"
) -> onnx.ModelProto:
    """Return a model of these nodes with weights."""
    kind = dtype.replace("float32", "float")
    weights = "".join(f", uint8[{n}, 2, 16] w{i}, {kind}[{n}, 2] s{i}" for i, n in ((1, 64), (2, 64), (3, 16)))
    weights += f", {kind}[64, 64] m1, {kind}[64, 64] m2, {kind}[64, 16] m3, {kind}[64] b"
    if "y2 = com.microsoft.MatMulNBits <K = 64, N = 16" in "".join(nodes):
        weights = weights.replace("[64, 2, 16] w2", "[16, 2, 16] w2").replace("[64, 2] s2", "[16, 2] s2")
    text = f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        main ({kind}[{rows}, 64] x, {kind}[{rows}, 64] r) => ({outputs.replace("float16", kind).replace("rows", rows)})
        <{kind}[64] g{weights}> {{ {" ".join(nodes)} }}"""
    model = with_weights(onnx.parser.parse_model(text))
    used = {name for node in model.graph.node for name in node.input}
    kept = [each for each in model.graph.initializer if each.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


def fused_of(model: onnx.ModelProto, regions: Regions = True) -> list[tuple[str, list[str], int]]:
    """Return the fusion, operands and number of outputs of each fused node; the model computes what it did."""
    result, report = optimize(model, regions=regions)
    assert report.verified.passed, report.verified
    return [(call.node.fusion, list(call.node.operands), len(call.node.output_dtypes)) for call in read_calls(result)]


ONE = [NORM.format(x="x"), PRODUCT.format(i=1, n=64, x="n")]
OF_SUM = [SUM, NORM.format(x="sum"), PRODUCT.format(i=1, n=64, x="n")]
FLOAT_OF_SUM = [SUM, NORM.format(x="sum"), FLOAT[0]]
WITH_SUM = "float16[rows, 64] y1, float16[rows, 64] sum"


@pytest.mark.parametrize("rows", ["rows", "64"])
@pytest.mark.parametrize(
    ("nodes", "outputs", "fused"),
    [
        (ONE, "float16[rows, 64] y1", ("matmul_nbits", ["x", "norm_scale", "w", "scales"], 1)),
        (OF_SUM, WITH_SUM, ("matmul_nbits", ["x", "norm_residual", "norm_scale", "w", "scales"], 2)),
        ([NORM.format(x="x"), *GATE], "float16[rows, 64] y",
         ("gated_matmul_nbits", ["x", "norm_scale", "w", "scales", "up", "up_scales"], 1)),
        ([SUM, NORM.format(x="sum"), *QKV],
         "float16[rows, 64] y1, float16[rows, 16] y2, float16[rows, 16] y3, float16[rows, 64] sum",
         ("parallel_matmul_nbits", ["x", "norm_residual", "norm_scale", "w", "scales", "w_2", "scales_2", "w_3",
                                    "scales_3"], 4)),
        ([NORM.format(x="x"), FLOAT[0]], "float16[rows, 64] y1", ("gemm_bias_activation", ["x", "norm_scale", "w"], 1)),
        ([*FLOAT_OF_SUM, "y = Add (y1, b)"], "float16[rows, 64] y, float16[rows, 64] sum",
         ("gemm_bias_activation", ["x", "norm_residual", "norm_scale", "w", "bias"], 2)),
        ([NORM.format(x="x"), *FLOAT[:2], OF_GATE], "float16[rows, 64] y",
         ("gated_gemm", ["x", "norm_scale", "w", "up"], 1)),
        ([*FLOAT_OF_SUM, "y = Cast <to = 1> (y1)"], "float[rows, 64] y, float16[rows, 64] sum",
         ("gemm_bias_activation", ["x", "norm_residual", "norm_scale", "w"], 2)),
        ([*OF_SUM, "y = Mul (y1, b)"], "float16[rows, 64] y, float16[rows, 64] sum",
         ("matmul_nbits", ["x", "norm_residual", "norm_scale", "w", "scales", "x1"], 2)),
        ([*OF_SUM, "f = Cast <to = 1> (y1)", "y = ArgMax <axis = -1> (f)"], "int64[rows, 1] y",
         ("matmul_nbits", ["x", "norm_residual", "norm_scale", "w", "scales"], 1)),
        ([SUM, NORM.format(x="sum"), *FLOAT],
         "float16[rows, 64] y1, float16[rows, 64] y2, float16[rows, 16] y3, float16[rows, 64] sum",
         ("parallel_gemm", ["x", "norm_residual", "norm_scale", "w", "w_2", "w_3"], 4)),
    ],
    ids=["one product", "the sum is read", "a gate", "three products", "a bare product", "a bias", "a gate of floats",
         "a Cast follows", "a scale follows", "an index of each row follows", "three products of floats"],
)  # fmt: skip
def test_a_norm_joins_the_product_that_alone_reads_it(
    nodes: list[str], outputs: str, fused: tuple[str, list[str], int], rows: str
) -> None:
    assert fused_of(model_of(*nodes, outputs=outputs, rows=rows)) == [fused]


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (OF_SUM, "float16[rows, 64] y1, float16[rows, 64] n"),
        ([*OF_SUM, "z = Neg (n)"], "float16[rows, 64] y1, float16[rows, 64] z"),
        ([*OF_SUM, "z = Sin (y1)"], "float16[rows, 64] z, float16[rows, 64] y1"),
        ([*OF_SUM, "z = Add (y1, r)"], "float16[rows, 64] z"),
        (["n = LayerNormalization <axis = -1> (x, g)", PRODUCT.format(i=1, n=64, x="n")], "float16[rows, 64] y1"),
        (FLOAT_OF_SUM, "float16[rows, 64] y1, float16[rows, 64] n"),
        ([*FLOAT_OF_SUM, "z = Neg (n)"], "float16[rows, 64] y1, float16[rows, 64] z"),
        ([*FLOAT_OF_SUM, "t = Transpose (n)", "z = MatMul (t, n)"], "float16[rows, 64] y1, float16[64, 64] z"),
        ([SUM, NORM.format(x="sum"), "y1 = MatMul (n, r)"], "float16[rows, 64] y1"),
        ([*FLOAT_OF_SUM, "y = Add (y1, x)"], "float16[rows, 64] y"),
    ],
    ids=[
        "a graph output",
        "read elsewhere",
        "operators of two results follow the product",
        "operators that follow read a tensor that is not a weight",
        "another norm",
        "of floats: an output",
        "of floats: read elsewhere",
        "of floats: read by two products",
        "no weight",
        "a residual",
    ],
)
def test_other_norms_stay_apart(nodes: list[str], outputs: str) -> None:
    rows = "64" if "(n, r)" in nodes[-1] else "rows"
    found = fused_of(model_of(*nodes, outputs=outputs, rows=rows))
    assert all("norm_scale" not in operands for _, operands, _ in found)
    assert any(fusion.endswith("_norm") for fusion, *_ in found)


@pytest.mark.parametrize(("dtype", "rows"), [("float32", "rows"), ("float16", "65")])
@pytest.mark.parametrize("nodes", [OF_SUM, FLOAT_OF_SUM], ids=["quantized", "float"])
def test_norms_that_no_kernel_of_a_product_computes_stay_apart(nodes: list[str], dtype: str, rows: str) -> None:
    found = fused_of(model_of(*nodes, outputs=WITH_SUM, dtype=dtype, rows=rows))
    assert [fusion for fusion, *_ in found] == ["add_rms_norm", "matmul_nbits"][: 2 if nodes is OF_SUM else 1]


def test_it_stays_apart_without_epilogues() -> None:
    found = fused_of(model_of(*OF_SUM, outputs=WITH_SUM), regions="apart")
    assert [fusion for fusion, *_ in found] == ["add_rms_norm", "matmul_nbits"]
    assert [fusion for fusion, *_ in fused_of(model_of(*FLOAT_OF_SUM, outputs=WITH_SUM), regions="apart")] == [
        "add_rms_norm"
    ]


@pytest.mark.parametrize("nodes", [OF_SUM, FLOAT_OF_SUM], ids=["quantized", "float"])
def test_the_report_names_all_nodes_and_the_body_unfuses(nodes: list[str]) -> None:
    original = model_of(*nodes, outputs=WITH_SUM)
    result, report = optimize(original)
    (one,) = report.fused
    assert set(one.replaces) == {"sum", "n", "y1"} and not one.joined
    unfused, _ = unfuse(result)
    assert not any(node.domain == "onnxfuse" for node in unfused.graph.node)
    again, _ = optimize(unfused)
    assert [call.node.fusion for call in read_calls(again)] == [one.fusion]


def test_a_function_that_was_dropped_is_written_again() -> None:
    """Neg joins a product, so that regions drop the function of a product without it, which the other product needs."""
    nodes = [*FLOAT_OF_SUM, NORM.format(x="y1").replace("n =", "n2 ="), "t = MatMul (n2, m2)", "y = Neg (t)"]
    found = fused_of(model_of(*nodes, outputs="float16[rows, 64] y, float16[rows, 64] sum"))
    assert [operands[1:] for _, operands, _ in found] == [
        ["norm_residual", "norm_scale", "w"], ["norm_scale", "w"]
    ]  # fmt: skip


def _plans(rows: int, device: Device, nodes: list[str]) -> Iterator[list[str]]:
    result, _ = optimize(model_of(*nodes, outputs=WITH_SUM), verify=False)
    (call,) = read_calls(result)
    shapes = {"w": (64, 2, 16) if nodes is OF_SUM else (64, 64), "scales": (64, 2), "norm_scale": (64,)}
    specs = [
        TensorSpec(shapes.get(name, (rows, 64)), dtype, constant=name in shapes)
        for name, dtype in zip(call.node.operands, call.dtypes, strict=True)
    ]
    host = host_of(call.node.fusion)
    require_support(host, call.node, list(call.dtypes), device)
    for plan in host.candidates(call.node, specs, device):
        assert [spec.shape for spec in plan.outputs] == [(rows, 64), (rows, 64)]
        yield [step.kernel.source if isinstance(step, Launch) else "product" for step in plan.steps]


@pytest.mark.parametrize(("nodes", "kernel"), [(OF_SUM, "nbits_mma"), (FLOAT_OF_SUM, "gemm_stream")])
def test_few_rows_are_normalized_by_the_product_and_many_before_it(nodes: list[str], kernel: str) -> None:
    few, many = list(_plans(1, H200, nodes)), list(_plans(300, H200, nodes))
    assert few[0] == [kernel]
    assert all(sources[0] == "add_rms_norm" for sources in many)
    assert Counter(sources[0] for sources in few)["add_rms_norm"], "there is a plan to compare with"


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("nodes", [OF_SUM, FLOAT_OF_SUM], ids=["quantized", "float"])
def test_every_gpu_has_a_plan(nodes: list[str], device: Device) -> None:
    many = (9, 64, 65) if device.arch >= 80 else ()  # with older GPUs, products of many rows need cuBLASLt
    assert all(list(_plans(rows, device, nodes)) for rows in (1, 3, 8, *many))
