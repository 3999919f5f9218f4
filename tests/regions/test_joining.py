"""Test which elementwise operators join the fused node in front of them, and what the file then says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from architectures import H200
from case_documents import with_weights
from click.testing import CliRunner
from kernel_hosts import host_of, require_support
from region_models import draw, optimized, parsed, run

from onnxfuse import optimize, unfuse
from onnxfuse.cli import main
from onnxfuse.dsl import catalogue
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.fuse_model import Settings, fuse_model
from onnxfuse.ir.dtypes import Array
from onnxfuse.runtime.plan import FusedNode, Launch, TensorSpec

INPUTS = "float[batch, 6, 8] x, float[batch, 6, 16] y, float[16] v, float[batch, 6, 1] r"
PRODUCT = "a = MatMul(x, w) b = Add(a, bias) c = Relu(b)"
WEIGHTS = {
    "w": (8, 16), "bias": (16,), "w2": (16, 16), "w_up": (8, 16), "k1": (8, 8, 3, 3), "k2": (8, 8, 1, 1),
    "gamma": (16,), "beta": (16,),
}  # fmt: skip


def model_of(nodes: str, inputs: str = INPUTS, outputs: str = "z", dtype: str = "float32") -> onnx.ModelProto:
    """Return a model of these nodes, which read some of WEIGHTS."""
    random = np.random.default_rng(1)
    read = {name: shape for name, shape in WEIGHTS.items() if f"{name})" in nodes or f"{name}," in nodes}
    kind = "float16" if dtype == "float16" else "float"
    given = "".join(f", {kind}[{','.join(map(str, shape))}] {name}" for name, shape in read.items())
    model = parsed(nodes, inputs=inputs + given, outputs=outputs)
    for name, shape in read.items():
        value = (random.standard_normal(shape) / 4).astype(dtype)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    kept = [each for each in model.graph.input if each.name not in read]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


def joined_of(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[tuple[str, list[str]]]]:
    """Return the optimized model, and of each fused node its fusion and the operators of its program.

    Every joined node has a plan, and the model computes what it did.
    """
    result, _ = optimized(model)
    found = []
    for node in result.graph.node:
        own = attributes(node)
        if not node.domain:
            continue
        program = json.loads(own["program"])["ops"] if "program" in own else []
        found.append((own["fusion"], [op for op, *_ in program if op != "Constant"]))
        if own["fusion"] != "region" and program:
            plan(node)
    return result, found


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def plan(node: onnx.NodeProto) -> None:
    """Check that kernels take a fused node."""
    fused = FusedNode.read(node.name, attributes(node))
    dtypes = [fused.output_dtypes[0]] * len(fused.operands)
    if set(json.loads(str(fused.attributes["program"]))["dtypes"].values()) == {"float32"}:
        require_support(host_of(fused.fusion), fused, dtypes, H200)


def same(model: onnx.ModelProto, other: onnx.ModelProto) -> dict[str, Array]:
    """Check that two models compute the same; return it."""
    feeds = draw(model, sizes={"batch": 3})
    expected, found = run(model, feeds), run(other, feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)
    return found


def test_a_chain_joins_the_product() -> None:
    source = model_of(f"{PRODUCT} d = Tanh(c) e = Mul(d, y) f = Add(e, v) z = Sub(f, r)")
    result, found = joined_of(source)
    assert found == [("gemm_bias_activation", ["Tanh", "Mul", "Add", "Sub"])]
    (node,), (function,) = result.graph.node, result.functions
    assert list(node.input) == ["x", "w", "bias", "y", "v", "r"] and attributes(node)["operands"] == "x w bias x1 x2 x3"
    ops = [each.op_type for each in function.node]
    assert ops[-4:] == ["Tanh", "Mul", "Add", "Sub"] and function.name == "gemm_bias_activation"
    same(source, result)


@pytest.mark.parametrize("op", ["Neg", "Cast <to = 10>"])
def test_one_operator_joins(op: str) -> None:
    """It would be no region by itself."""
    assert [len(ops) for _, ops in joined_of(model_of(f"{PRODUCT} z = {op}(c)"))[1]] == [1]


def test_one_operator_joins_although_others_read_the_result() -> None:
    """So does the activation of a residual unit whose input is added again; the node gives both."""
    source = model_of(f"{PRODUCT} d = Neg(c) e = MatMul(d, w2) f = Add(e, bias) z = Add(f, c)")
    result, found = joined_of(source)
    assert found == [("gemm_bias_activation", ["Neg"]), ("gemm_bias_activation", [])]
    assert len(result.graph.node[0].output) == 2
    same(source, result)


def test_one_operator_that_reads_what_is_computed_of_the_result_stays() -> None:
    """The Hardmax of c, which the Sub reads too, cannot be computed before the node that gives c ends."""
    source = model_of(f"{PRODUCT} d = Hardmax(c) z = Sub(c, d)")
    result, found = joined_of(source)
    assert found == [("gemm_bias_activation", [])]
    assert [node.op_type for node in result.graph.node if node.domain == ""] == ["Hardmax", "Sub"]
    same(source, result)


def test_several_outputs() -> None:
    """The product's own result is an output of the node where the graph gives it."""
    source = model_of(f"{PRODUCT} d = Tanh(c) z = Mul(d, y) q = Less(d, y)", outputs="z c q")
    result, found = joined_of(source)
    assert found == [("gemm_bias_activation", ["Tanh", "Mul", "Less"])]
    (node,) = result.graph.node
    assert set(node.output) == {"z", "c", "q"}
    assert json.loads(attributes(node)["program"])["outputs"].count("x0") == 1
    same(source, result)


def test_a_gated_product() -> None:
    nodes = "a = MatMul(x, w) s = Sigmoid(a) t = Mul(a, s) b = MatMul(x, w_up) c = Mul(t, b) d = Exp(c) z = Mul(d, r)"
    assert joined_of(model_of(nodes))[1] == [("gated_gemm", ["Exp", "Mul"])]


def test_the_gate_of_a_product_is_a_part_of_a_tensor() -> None:
    """It is read where it lies, as the gate in front of the residual of a DiT: no Slice is left."""
    nodes = (
        f"{PRODUCT} at := int64[1] {{16}} end := int64[1] {{32}} one := int64[1] {{1}} s = Slice(parts, at, end, one) "
        "g = Unsqueeze(s, one) d = Mul(c, g) z = Add(d, y)"
    )
    source = model_of(nodes, INPUTS + ", float[batch, 96] parts")
    result, found = joined_of(source)
    assert found == [("gemm_bias_activation", ["Slice", "Unsqueeze", "Mul", "Add"])]
    same(source, result)


def test_casts_between_the_product_and_a_float32_residual() -> None:
    inputs = "float16[batch, 6, 8] x, float[batch, 6, 16] y"
    nodes = f"{PRODUCT} d = Cast <to = 1>(c) s = Add(d, y) e = Tanh(s) z = Cast <to = 10>(e)"
    source = model_of(nodes, inputs, outputs="z e", dtype="float16")
    result, found = joined_of(source)
    assert found == [("gemm_bias_activation", ["Cast", "Add", "Tanh", "Cast"])]
    node = FusedNode.read("n", attributes(result.graph.node[0]))
    dtypes = ["float16", "float16", "float16", "float32"]
    require_support(host_of(node.fusion), node, dtypes, H200)
    shapes = ((3, 6, 8), (8, 16), (16,), (3, 6, 16))
    specs = [TensorSpec(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    plans = host_of(node.fusion).candidates(node, specs, H200)
    assert sorted(spec.dtype for spec in plans[0].outputs) == ["float16", "float32"]
    assert [len(each.steps) for each in (plans[0], plans[-1])] == [1, 2]
    (step,) = plans[0].steps
    assert isinstance(step, Launch) and "tanhf(" in step.kernel.text  # to the last bits of float32


def test_of_two_products_the_last_takes_what_reads_both() -> None:
    nodes = f"{PRODUCT} g = MatMul(c, w2) h = Add(g, bias) i = MatMul(y, w2) j = Add(i, bias) k = Exp(h) z = Mul(k, j)"
    result, found = joined_of(model_of(nodes))
    assert sorted(len(ops) for _, ops in found) == [0, 0, 2]
    same(model_of(nodes), result)


ALONE_INPUTS = INPUTS + ", float[batch, 96] parts, bool[batch, 6, 1] mask"
ALONE = {
    "p = MatMul(x, w) z = Cast <to = 10>(p)": ["Cast"],
    "p = MatMul(x, w) z = Mul(p, r)": ["Mul"],
    "p = MatMul(x, w) a = Mul(p, r) z = Add(a, y)": ["Mul", "Add"],
    "p = MatMul(x, w) z = Where(mask, p, y)": ["Where"],
    "half := int64[3] {-1, 3, 8} f = Reshape(x, half) p = MatMul(f, w) six := int64[3] {-1, 6, 16} q = Reshape(p, six) "
    "z = Add(q, y)": ["Reshape", "Add"],
    "p = MatMul(x, w) heads := int64[4] {0, 0, 4, 4} q = Reshape(p, heads) e = Mul(q, q) z = Sin(e)":
        ["Reshape", "Mul", "Sin"],
    "p = MatMul(x, w) at := int64[1] {16} end := int64[1] {32} one := int64[1] {1} s = Slice(parts, at, end, one) "
    "g = Unsqueeze(s, one) a = Mul(p, g) z = Add(a, y)": ["Slice", "Unsqueeze", "Mul", "Add"],
}  # fmt: skip


@pytest.mark.parametrize("nodes", ALONE)
def test_what_follows_a_product_alone(nodes: str) -> None:
    """The product is fused because operators join it; a Reshape between them divides its rows or columns otherwise."""
    source = model_of(nodes, ALONE_INPUTS)
    result, found = joined_of(source)
    assert found == [("gemm_bias_activation", ALONE[nodes])]
    same(source, result)


@pytest.mark.parametrize("nodes", [
    "p = MatMul(x, w) z = ReduceMax <axes = [-1]>(p)", "p = MatMul(x, w) z = Transpose <perm = [0, 2, 1]>(p)",
    "p = MatMul(x, w) six := int64[3] {-1, 4, 6} q = Reshape(p, six) z = Neg(q)",
], ids=["a reduction", "moved elements", "other rows"])  # fmt: skip
def test_a_product_that_nothing_joins_stays(nodes: str) -> None:
    result, report = optimized(model_of(nodes))
    assert "MatMul" in {node.op_type for node in result.graph.node} and "gemm_bias_activation" not in report.counts


SELECTIONS = {
    "p = MatMul(x, w) z = ArgMax <axis = -1>(p)": ["ArgMax"],
    f"{PRODUCT} z = ArgMin <axis = 2, keepdims = 0, select_last_index = 1>(c)": ["ArgMin"],
    "p = MatMul(x, w) d = Cast <to = 10>(p) z = ArgMax <axis = -1>(d)": ["Cast", "ArgMax"],
    "p = MatMul(x, w) d = Sin(p) e = Mul(d, v) f = Add(e, d) z = ArgMax <axis = -1>(f)":
        ["Sin", "Mul", "Add", "ArgMax"],
    "p = MatMul(x, w) rows := int64[2] {-1, 16} q = Reshape(p, rows) z = ArgMax <axis = 1, keepdims = 0>(q)":
        ["Reshape", "ArgMax"],
    "p = MatMul(x, w) last := int64 {-1} q = Gather <axis = 1>(p, last) z = ArgMax <axis = -1>(q)": ["ArgMax"],
    "p = MatMul(x, w) a = ArgMax <axis = -1>(p) seven := int64[1] {7} z = Equal(a, seven)": ["ArgMax"],
}  # fmt: skip


@pytest.mark.parametrize("nodes", SELECTIONS)
def test_an_index_of_each_row_ends_what_joins_a_product(nodes: str) -> None:
    source = model_of(nodes)
    result, found = joined_of(source)
    assert found == [("gemm_bias_activation", SELECTIONS[nodes])]
    assert all(len(node.output) == 1 for node in result.graph.node if node.domain)
    same(source, result)


@pytest.mark.parametrize(("nodes", "outputs"), [
    ("p = MatMul(x, w) z = ArgMax <axis = -1>(p)", "z p"), ("p = MatMul(x, w) z = ArgMax <axis = 1>(p)", "z"),
    ("p = MatMul(x, w) s = Softmax(p) z = ArgMax <axis = -1>(s)", "z"),
    ("p = MatMul(x, w) n = Neg(p) z = ArgMax <axis = -1>(n) m = ReduceMax <axes = [-1]>(n)", "z m"),
    ("p = MatMul(x, w) parts := int64[4] {0, 0, 4, 4} q = Reshape(p, parts) z = ArgMax <axis = -1>(q)", "z"),
], ids=["an output", "another axis", "a softmax", "another reader", "parts of rows"])  # fmt: skip
def test_other_indices_do_not_join(nodes: str, outputs: str) -> None:
    source = model_of(nodes, outputs=outputs)
    result, found = joined_of(source)
    assert not any({"ArgMax", "ArgMin"} & set(ops) for fusion, ops in found if fusion != "region")
    same(source, result)


def test_an_index_of_each_row_ends_what_joins_a_quantized_product() -> None:
    source = with_weights(onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n'
        "main (float16[batch,6,32] x) => (int64[batch,6] z) <uint8[40,2,16] w, float16[40,2] scales> {"
        "p = com.microsoft.MatMulNBits <K = 32, N = 40, bits = 8, block_size = 16> (x, w, scales)"
        "d = Cast <to = 1> (p) z = ArgMax <axis = -1, keepdims = 0> (d) }"
    ))  # fmt: skip
    result, found = joined_of(source)
    assert found == [("matmul_nbits", ["Cast", "ArgMax"])]
    same(source, result)


def test_what_is_excluded_leaves_the_product_alone() -> None:
    source = model_of("p = MatMul(x, w) a = Mul(p, r) z = Add(a, y)")
    for exclude, kept in (({("gemm_bias_activation", "z")}, {}), (set(), {"": {"p"}})):
        found = fuse_model(source, None, Settings(optimize_fusions(), regions=True, exclude=exclude, keep_nodes=kept))
        assert [one.fusion for one in found.fusing.fused] == ["region"]


SECOND_READERS = {
    "f = MatMul(c, w2) g = Softmax(f) d = Tanh(c) e = Mul(d, y) z = Neg(e)": {"z", "c"},
    "d = Tanh(c) z = Mul(d, y) g = MatMul(d, w2)": {"z", "d"},
    "d = Tanh(c) z = Mul(d, y) g = MatMul(d, w2) h = MatMul(c, w2)": {"z", "d", "c"},
}


@pytest.mark.parametrize("nodes", SECOND_READERS)
def test_values_that_other_nodes_read_too_are_outputs(nodes: str) -> None:
    source = model_of(f"{PRODUCT} {nodes}", outputs="z g" + " h" * ("h =" in nodes))
    result, found = joined_of(source)
    assert any(ops for fusion, ops in found if fusion == "gemm_bias_activation")
    assert [set(node.output) for node in result.graph.node if "bias" in node.input] == [SECOND_READERS[nodes]]
    same(source, result)


NEAR_MISSES = {
    "it depends on what reads the product": f"{PRODUCT} d = Tanh(c) e = Mul(d, y) f = MatMul(c, square) z = Sub(e, f)",
    "the product is broadcast": f"{PRODUCT} d = Tanh(c) z = Add(d, wide)",
    "a reduction follows": f"{PRODUCT} d = Neg(c) e = ReduceMax <axes = [-1]>(d) z = Sub(d, e)",
    "elements are moved": f"{PRODUCT} d = Tanh(c) e = Transpose <perm = [0, 2, 1]>(d) z = Neg(e)",
}


@pytest.mark.parametrize("what", NEAR_MISSES)
def test_what_does_not_join(what: str) -> None:
    inputs = INPUTS + ", float[2, batch, 6, 16] wide, float[16, 16] square"
    source = model_of(NEAR_MISSES[what], inputs)
    result, found = joined_of(source)
    joined = [ops for fusion, ops in found if fusion == "gemm_bias_activation"]
    assert joined and not any(joined), what
    same(source, result)


def test_an_output_of_another_shape_stays_apart() -> None:
    """What gives it is a region of its own, and the rest joins."""
    source = model_of(f"{PRODUCT} p = Neg(v) q = Tanh(p) z = Mul(c, q)", outputs="z q")
    result, found = joined_of(source)
    assert sorted(found) == [("gemm_bias_activation", ["Mul"]), ("region", ["Neg", "Tanh"])]
    same(source, result)


NORM_INPUTS = "float[batch, 6, 16] x, float[batch, 6, 16] y, float[batch, 96] parts, float[batch, 6, 64] pairs"
MODULATED = (
    "one := int64[1] {1} ones := float[1] {1.0} s1, s2, s3, s4, s5, s6 = Split <axis = 1>(parts) "
    "shift = Unsqueeze(s1, one) scale = Unsqueeze(s2, one) gain = Add(scale, ones) "
)


def test_the_modulation_of_an_adaptive_norm() -> None:
    """Shift and scale are read as views of one tensor, other parts of which other nodes read, as in DiT."""
    nodes = f"{MODULATED} n = LayerNormalization(x, gamma, beta) m = Mul(n, gain) z = Add(m, shift) u = Neg(s6)"
    source = model_of(nodes, NORM_INPUTS, "z u")
    result, found = joined_of(source)
    assert ("layer_norm", ["Unsqueeze", "Unsqueeze", "Add", "Mul", "Add"]) in found
    assert all(program == [] or fusion == "layer_norm" for fusion, program in found if fusion != "region")
    same(source, result)


def test_views_are_read_in_place() -> None:
    """Without other readers, the view of the gate is in the program, and one launch is left."""
    nodes = (
        "heads := int64[4] {0, 0, 4, 16} flat := int64[3] {0, 0, 16} n = LayerNormalization(x, gamma, beta) "
        "h = Reshape(pairs, heads) g1, g2, g3, g4 = Split <axis = 2>(h) g = Reshape(g2, flat) s = Sigmoid(g) "
        "z = Mul(n, s)"
    )
    source = model_of(nodes, NORM_INPUTS)
    result, found = joined_of(source)
    assert found == [("layer_norm", ["Reshape", "Split", "Reshape", "Sigmoid", "Mul"])]
    same(source, result)


def test_a_norm_that_gives_its_sum_too(tmp_path: Path) -> None:
    """The sum is the last output, and what the product behind it computes may be read by the next join."""
    nodes = (
        f"t = Add(x, y) n = LayerNormalization(t, gamma, beta) {MODULATED} m = Mul(n, gain) a = Add(m, shift) "
        "p = MatMul(a, w2) z = Add(p, t)"
    )
    source = model_of(nodes, NORM_INPUTS)
    result, found = joined_of(source)
    assert ("add_layer_norm", ["Split", "Unsqueeze", "Unsqueeze", "Add", "Mul", "Add"]) in found
    (node,) = (node for node in result.graph.node if attributes(node).get("fusion") == "add_layer_norm")
    assert len(node.output) == 2 and node.output[1] == "t"
    same(source, result)
    path = tmp_path / "m.onnx"
    onnx.save(result, path)
    shown = CliRunner().invoke(main, ["show", "region", str(path), "--node", "a"]).output.splitlines()
    assert shown[-2:] == ["  a = v11", "  t = result 2 of add_layer_norm"]
    back, verified = unfuse(result)
    assert verified.passed and "LayerNormalization" in {node.op_type for node in back.graph.node}
    kept = fuse_model(source, None, Settings(optimize_fusions(), regions=True, exclude={("add_layer_norm", "a")}))
    assert sorted(one.fusion for one in kept.fusing.fused if not one.joined) == [
        "add_layer_norm", "gemm_bias_activation", "region",
    ]  # fmt: skip


ATTENTION_INPUTS = "float[batch, 6, 64] qg, float[batch, 6, 32] k, float[batch, 6, 32] v, float[batch, 6, 32] r"
ATTENTION = """
    heads := int64[4] {0, 0, 4, 16} flat := int64[3] {0, 0, 32} eights := int64[4] {0, 0, 4, 8} c := float[1] {0.35}
    h = Reshape(qg, heads) q, g4 = Split <axis = 3>(h) g = Reshape(g4, flat) qt = Transpose <perm = [0, 2, 1, 3]>(q)
    k4 = Reshape(k, eights) v4 = Reshape(v, eights) kt = Transpose <perm = [0, 2, 3, 1]>(k4)
    vt = Transpose <perm = [0, 2, 1, 3]>(v4) s = MatMul(qt, kt) ss = Mul(s, c) p = Softmax <axis = -1>(ss)
    o = MatMul(p, vt) ot = Transpose <perm = [0, 2, 1, 3]>(o) a = Reshape(ot, flat) """


@pytest.mark.parametrize(("nodes", "ops"), [
    ("sg = Sigmoid(g) z = Mul(a, sg)", ["Reshape", "Split", "Reshape", "Sigmoid", "Mul"]),
    ("sg = Sigmoid(g) m = Mul(a, sg) z = Add(m, r)", ["Reshape", "Split", "Reshape", "Sigmoid", "Mul", "Add"]),
    ("z = Add(a, r)", ["Add"]),
], ids=["gate", "gate and residual", "residual"])  # fmt: skip
def test_what_follows_attention_joins_it(nodes: str, ops: list[str]) -> None:
    """The gate lies beside the queries, as in Qwen3-Next, and is read there."""
    source = model_of(f"{ATTENTION} {nodes}", ATTENTION_INPUTS)
    result, found = joined_of(source)
    assert found == [("attention", ops)]
    same(source, result)


def test_operators_that_depend_on_the_sum_do_not_join() -> None:
    """The joined node would have to wait for itself."""
    for last in ("z = Mul(n, p)", "q = Mul(n, t) z = Mul(q, p)", "q = Neg(n) z = Mul(q, t)"):
        nodes = f"t = Add(x, y) n = LayerNormalization(t, gamma, beta) p = MatMul(t, w2) {last} u = Neg(p)"
        source = model_of(nodes, NORM_INPUTS, "z u")
        result, found = joined_of(source)
        assert ("add_layer_norm", []) in found, last
        same(source, result)


def test_operators_between_dynamic_quantizers_do_not_join() -> None:
    """The sum joins no product whose result the first quantizer needs before: that would be a cycle."""
    nodes = (
        "q, s, o = DynamicQuantizeLinear(c) d = DequantizeLinear(q, s, o) e = Add(d, y) "
        "z, r, p = DynamicQuantizeLinear(e)"
    )
    inputs = "float[6, 8] x, float[6, 16] y"
    _, found = joined_of(model_of(f"{PRODUCT} {nodes}", inputs=inputs, outputs="z r p"))
    assert [(fusion, ops) for fusion, ops in found if "region" not in fusion] == [("gemm_bias_activation", [])]
    assert [ops.count("ReduceMin") for fusion, ops in found if fusion == "region"] == [2]


def test_what_is_excluded_stays_a_region() -> None:
    source = model_of(f"{PRODUCT} d = Tanh(c) z = Mul(d, y)")
    fusions = optimize_fusions()
    kept = fuse_model(source, None, Settings(fusions, regions=True, exclude={("gemm_bias_activation", "z")}))
    assert [one.fusion for one in kept.fusing.fused] == ["gemm_bias_activation", "region"]
    joined = fuse_model(source, None, Settings(fusions, regions=True))
    (one,) = joined.fusing.fused
    assert (one.fusion, one.output, set(one.replaces)) == ("gemm_bias_activation", "z", {"a", "b", "c", "d", "z"})
    assert one.joined == ("d", "z") and not joined.no_region
    assert joined.after.launches == 1 and joined.without_regions.launches == 3


def optimize_fusions() -> Sequence[Fusion]:
    return catalogue.select(catalogue.with_folders(()), (), (), also=["region"])


def test_regions_can_be_kept_apart() -> None:
    result, report = optimize(model_of(f"{PRODUCT} d = Neg(c) z = Mul(d, y)"), regions="apart")
    assert report.counts == {"gemm_bias_activation": 1, "region": 1} and len(result.graph.node) == 2


def test_unfusing_gives_the_operators_back() -> None:
    source = model_of(f"{PRODUCT} d = Tanh(c) e = Mul(d, y) z = Sub(e, r)")
    result, _ = optimized(source)
    back, verified = unfuse(result)
    assert verified.passed and {node.op_type for node in back.graph.node} >= {"Relu", "Tanh", "Mul", "Sub"}
    assert optimized(back)[1].counts == {"gemm_bias_activation": 1}


def test_the_program_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(optimized(model_of(f"{PRODUCT} d = Tanh(c) z = Mul(d, y)", outputs="z c"))[0], path)
    run = CliRunner().invoke
    listed = run(main, ["show", "region", str(path)]).output
    assert listed == "c/gemm_bias_activation: 2 operators, 4 operands, 2 outputs: Tanh Mul\n"
    assert run(main, ["show", "region", str(path), "--node", "z"]).output.splitlines()[1:] == [
        "  x0: float32 = gemm_bias_activation(x, w, bias)",
        "  x1: float32 = y",
        "  v0: float32 = Tanh(x0)",
        "  v1: float32 = Mul(v0, x1)",
        "  z = v1",
        "  c = x0",
    ]
    shown = run(main, ["show", "region", str(path), "--node", "z", "--cuda", "--arch", "sm_80"]).output
    assert "struct Program {" in shown and "tanhf(x0[j])" in shown


def test_control_flow() -> None:
    """Bodies join like the main graph; the functions of the other graphs stay."""
    body = "t = Add(p, bias) u = Relu(t) s = Tanh(u) o = Mul(s, s)"
    nodes = (
        f"{PRODUCT} d = Tanh(c) e = Mul(d, y) k = ReduceSum(e) n = CastLike(k, bool_like) "
        f"z = If(n) <then_branch = g1 () => (float[batch, 6, 16] o) {{ p = MatMul(e, w2) {body} }}, "
        f"else_branch = g2 () => (float[batch, 6, 16] o2) {{ o2 = Neg(e) }}>"
    )
    source = model_of(nodes, INPUTS + ", bool[1] bool_like")
    result, report = optimized(source)
    assert report.counts["gemm_bias_activation"] == 2
    called = {node.op_type for node in (*result.graph.node, *result.graph.node[-1].attribute[0].g.node) if node.domain}
    assert called <= {function.name for function in result.functions}
    same(source, result)


def test_a_channels_last_convolution_takes_a_vector_of_each_image() -> None:
    """A UNet adds its embedding of the time so; the Transposes of the layout stand around both."""
    inputs = "float[batch, 8, 6, 6] x, float[batch, 8, 1, 1] t"
    nodes = (
        "a = Conv <pads = [1, 1, 1, 1]>(x, k1) b = Relu(a) c = Add(b, t) d = Conv <pads = [1, 1, 1, 1]>(c, k1) "
        "e = Relu(d) z = Conv(e, k2)"
    )
    source = model_of(nodes, inputs)
    result, report = optimized(source, layout="nhwc")
    programs = [
        json.loads(own["program"])["ops"] for node in result.graph.node if "program" in (own := attributes(node))
    ]
    assert [[op for op, *_ in ops] for ops in programs] == [["Reshape", "Add"]]
    assert report.counts == {"conv_bias_activation": 3} and report.regions.nodes == 0
    same(source, result)
    apart, _ = optimized(source, layout="nchw")
    assert not any("program" in attributes(node) for node in apart.graph.node)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_an_instance_norm_takes_what_follows_it(layout: Literal["nhwc", "nchw"]) -> None:
    """The scale and the shift of each image of an AdaIN, which are parts of one tensor, and its activation."""
    inputs = "float[batch, 8, 6, 6] x, float[batch, 16, 1, 1] style"
    nodes = (
        "a = Conv <pads = [1, 1, 1, 1]>(x, k1) n = InstanceNormalization(a, ones, zeros) "
        "scale, shift = Split <axis = 1>(style) m = Mul(n, scale) b = Add(m, shift) c = LeakyRelu(b) z = Conv(c, k2)"
    )
    source = model_of(nodes, inputs)
    for name, value in {"ones": np.ones(8, np.float32), "zeros": np.zeros(8, np.float32)}.items():
        source.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    result, report = optimized(source, layout=layout)
    norm = next(own for node in result.graph.node if (own := attributes(node)).get("fusion") == "group_norm")
    program = [op for op, *_ in json.loads(norm["program"])["ops"]]
    assert [op for op in program if op in ("Mul", "Add", "LeakyRelu")] == ["Mul", "Add", "LeakyRelu"]
    assert report.counts.get("channel_scale") is None
    same(source, result)


def test_a_transposed_convolution_takes_what_follows_it() -> None:
    """The periodic activation of a vocoder (Snake), in the epilogue."""
    inputs = "float[batch, 8, 6, 6] x"
    nodes = (
        "a = Conv <pads = [1, 1, 1, 1]>(x, k1) b = ConvTranspose <strides = [2, 2]>(a, k2) c = Sin(b) d = Mul(c, c) "
        "e = Add(b, d) z = Conv(e, k2)"
    )
    source = model_of(nodes, inputs)
    result, report = optimized(source, layout="nhwc")
    (own,) = (own for node in result.graph.node if "program" in (own := attributes(node)))
    assert own["fusion"] == "conv_transpose_bias_activation" and report.regions.nodes == 0
    assert [op for op, *_ in json.loads(own["program"])["ops"]] == ["Sin", "Mul", "Add"]
    same(source, result)


def test_a_fused_node_of_an_earlier_run_joins_a_region() -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]>
    again (float16[batch,8,4] x) => (float16[batch,4] y) <int64[1] last = {-1}, float16[4] s = {1,1,1,1}>
    { g = Gather <axis = 1> (x, last)  t = LayerNormalization (g, s)  q = Squeeze (t, one)  y = Mul (q, q) }"""
    model = onnx.parser.parse_model(text.replace("int64[1] last", "int64[1] one = {1}, int64[1] last"))
    first, _ = optimize(model, regions=False, verify=False)
    assert fusions_of(first) == ["layer_norm"]
    again, _ = optimized(first)
    assert fusions_of(again) == ["region"]


def fusions_of(model: onnx.ModelProto) -> list[str]:
    return [attributes(node)["fusion"] for node in model.graph.node if node.domain]


def test_what_an_operator_has_joined_is_no_region_of_its_own() -> None:
    text = """<ir_version: 10, opset_import: ["" : 17]>
    cube (float[3,2,10] x) => (float[3,2,12] y) <int64[2] rows = {6,10}, int64[3] shape = {3,2,12}>
    { v = Reshape (x, rows)  t = Gemm <transB = 1> (v, w)  r = Reshape (t, shape)  s = Mul (r, r)  y = Mul (r, s) }"""
    model = onnx.parser.parse_model(text)
    weight = np.random.default_rng(0).standard_normal((12, 10)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    made, _ = optimize(model, layout="nhwc", verify=False)
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 2, 10)).astype(np.float32)}
    np.testing.assert_allclose(run(made, feeds)["y"], run(model, feeds)["y"], rtol=1e-5, atol=1e-5)
