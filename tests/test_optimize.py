"""Test the Python API: what it accepts, what it leaves unchanged, and what verification takes back."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported_models import load_exported
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

import onnxfuse
from onnxfuse import ModelError, PatternError, UsageError, fuse_model, optimize, optimizer, pipeline
from onnxfuse.ir.graph import Graph

HEAD = '<ir_version: {ir}, opset_import: ["" : {opset}]>'
BLOCK = """
block (float[batch,8] x) => (float[batch,6] y)
<float[8,6] w, float[6] b, float[6] scale, float[6] shift>
{
  product = MatMul (x, w)
  biased = Add (product, b)
  active = Relu (biased)
  y = LayerNormalization (active, scale, shift)
}
"""
BLOCK_COUNTS = {"gemm_bias_activation": 1, "layer_norm": 1}


def parse(text: str, opset: int = 20, ir: int = 8) -> onnx.ModelProto:
    """Parse a model from ONNX text; initializers without a value get random ones."""
    model = onnx.parser.parse_model(HEAD.format(ir=ir, opset=opset) + text)
    random = np.random.default_rng(0)
    known = {t.name for t in model.graph.initializer}
    for value in model.graph.value_info:
        if value.name not in known:
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            array = random.uniform(0.5, 1.5, shape).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    return model


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


# --- arguments -----------------------------------------------------------------------------------------------------


def test_a_path_bytes_and_a_model_give_the_same(tmp_path: Path) -> None:
    model = parse(BLOCK)
    onnx.save(model, tmp_path / "block.onnx")
    sources = model, model.SerializeToString(), tmp_path / "block.onnx", str(tmp_path / "block.onnx")
    results = [optimize(source) for source in sources]
    assert [report.counts for _, report in results] == [BLOCK_COUNTS] * 4
    assert all(result == results[0][0] for result, _ in results)
    assert [report.input["path"] for _, report in results] == [None, None, *map(str, sources[2:])]


def test_the_given_model_is_not_changed() -> None:
    model = parse(BLOCK)
    before = model.SerializeToString(deterministic=True)
    optimize(model)
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("record", ["float h", "float[batch,8,1] h", "float[1,8] h", "float[batch,7] h"])
@pytest.mark.parametrize("is_output", [True, False])
def test_a_wrong_recorded_shape_is_corrected(record: str, is_output: bool) -> None:
    text = f"""chain (float[batch,8] x) => (float[batch,8] y{", " + record if is_output else ""}) <{record}>
        {{ a = Neg (x)  h = LeakyRelu (a)  y = Softmax (h) }}"""
    model = onnx.parser.parse_model(HEAD.format(ir=8, opset=17) + text)
    if is_output:
        del model.graph.value_info[:]
    before = model.SerializeToString(deterministic=True)
    optimized, _ = optimize(model, regions=False)
    recorded = {v.name: v for v in (*optimized.graph.output, *optimized.graph.value_info)}["h"]
    assert [d.dim_param or d.dim_value for d in recorded.type.tensor_type.shape.dim] == ["batch", 8]
    assert model.SerializeToString(deterministic=True) == before


def test_the_shapes_of_inputs_of_fused_nodes_are_recorded() -> None:
    """What plans kernels reads the model with onnx's inference, to which a Slice of computed length is unknown."""
    fused, _ = optimize(load_exported("bert_sdpa_ts_fp32.onnx"), verify=False)
    (node,) = (each for each in fused.graph.node if each.op_type.startswith("embedding_layer_norm"))
    shapes = {value.name: value.type.tensor_type.shape.dim for value in fused.graph.value_info}
    positions = [dim.dim_param or dim.dim_value for dim in shapes[node.input[2]]]
    assert positions == [1, "seq"], "there are 32 positions, and the model adds them to seq rows"


@pytest.mark.parametrize(
    ("choice", "counts"),
    [
        ({"only": ["layer_norm"]}, {"layer_norm": 1}),
        ({"skip": ["layer_norm"]}, {"gemm_bias_activation": 1}),
        ({"only": ["layer_norm", "gemm_bias_activation"], "skip": ["layer_norm"]}, {"gemm_bias_activation": 1}),
    ],
)
def test_fusions_are_chosen(choice: dict[str, list[str]], counts: dict[str, int]) -> None:
    assert optimize(parse(BLOCK), **choice)[1].counts == counts


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"only": ["layer_nrm"]}, r"there is no fusion 'layer_nrm'\. Did you mean 'layer_norm'\?"),
        ({"skip": ["zzz"]}, r"there is no fusion 'zzz'. Known: activation, .*"),
        ({"fallback": "cuda"}, "fallback is 'onnx' or 'ort', not 'cuda'"),
        ({"patterns": ["/no/such/folder"]}, "'/no/such/folder' is not a folder; .*"),
        ({"inputs": {"z": np.zeros((2, 8), np.float32)}}, "the model has no input 'z'.*"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=f"^{sentence}$"):
        optimize(parse(BLOCK), **arguments)


def test_the_ort_fallback_computes_the_same() -> None:
    _, report = optimize(parse(BLOCK), fallback="ort")
    assert (report.counts, report.verified.passed) == (BLOCK_COUNTS, True)


def test_progress_names_the_stages() -> None:
    stages: list[str] = []
    optimize(parse(BLOCK), progress=lambda stage, done, of: stages.append(stage))
    named = list(dict.fromkeys(stages))
    assert named[:5] == ["load", "normalize", "fuse", "write", "verify"]
    steps = [stage.partition(": ")[2] for stage in named[5:]]
    assert steps[0].startswith("run the original")
    assert {"run the fused nodes", "run the optimized model"} <= {*steps}


# --- the user's own fusions ----------------------------------------------------------------------------------------

LONE_RELU = """
lone (float[batch,8] x) => (float[batch,8] y)
<float[8] scale, float[8] shift>
{
  active = Relu (x)
  y = LayerNormalization (active, scale, shift)
}
"""
SQUARE_ROOT_OF_RELU = '''"""The square root of a Relu."""

from onnxfuse import fusion, op, tensor


@fusion(out="...")
def root_of_relu(x=tensor("...")):
    """y = sqrt(max(x, 0))"""
    return op.Sqrt(op.Relu(x))
'''
# The two spellings differ: the pattern matches a Relu, and its body is stored as Abs.
WRONG = '''"""A Relu, and a wrong claim."""

from onnxfuse import either, fusion, op, tensor


@fusion(out="...")
def wrong_relu(x=tensor("...")):
    """y = max(x, 0)"""
    return either(op.Abs(x), op.Relu(x))
'''


def test_a_fusion_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "root_of_relu.py").write_text(SQUARE_ROOT_OF_RELU, encoding="utf-8")
    text = "g (float[n,4] x) => (float[n,4] y) { a = Relu (x) y = Sqrt (a) }"
    model, report = optimize(parse(text), patterns=[tmp_path])
    assert (report.counts, report.verified.passed) == ({"root_of_relu": 1}, True)
    assert ops(model) == ["root_of_relu"]


def test_a_folder_without_a_fusion_and_one_with_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="declares no fusion"):
        optimize(parse(BLOCK), patterns=[tmp_path])
    (tmp_path / "broken.py").write_text("import no_such_module\n", encoding="utf-8")
    with pytest.raises(PatternError, match=r"broken\.py: ModuleNotFoundError"):
        optimize(parse(BLOCK), patterns=[tmp_path])


def test_a_wrong_fusion_is_found_dropped_and_reported(tmp_path: Path) -> None:
    (tmp_path / "wrong_relu.py").write_text(WRONG, encoding="utf-8")
    model, report = optimize(parse(LONE_RELU), patterns=[tmp_path])
    assert ops(model) == ["region"]
    assert (report.counts, report.verified.passed) == ({"region": 1}, True)
    (dropped,) = report.dropped
    assert (dropped.fusion, dropped.node) == ("wrong_relu", "active/wrong_relu")
    assert re.match(r"on the values of a run its output 'active' is .*; the nodes that it replaced give 0, and float32 "
                    r"allows an error of ", dropped.reason)  # fmt: skip
    assert report.to_json()["dropped"] == [vars(dropped)]


def test_without_verification_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "wrong_relu.py").write_text(WRONG, encoding="utf-8")
    _, report = optimize(parse(LONE_RELU), patterns=[tmp_path], verify=False)
    assert (report.counts, report.dropped) == ({"layer_norm": 1, "wrong_relu": 1}, ())


# --- verification --------------------------------------------------------------------------------------------------


def test_a_pass_that_changes_the_model_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def relu_to_abs(graph: Graph, shapes: object) -> int:
        """Change a model, as no pass may."""
        found = [node for node in graph.nodes if node.op == "Relu"]
        for node in found:
            inputs, outputs = [*node.inputs], [*node.outputs]
            node.inputs.clear()
            node.outputs.clear()
            graph.add_node("Abs", inputs, outputs)
        graph.remove_dead()
        graph.sort()
        return len(found)

    middle = len(pipeline.PIPELINE) // 2
    monkeypatch.setattr(fuse_model, "PIPELINE", (*pipeline.PIPELINE[:middle], relu_to_abs, *pipeline.PIPELINE[middle:]))
    names = [each.__name__ for each in (*fuse_model.PIPELINE, *fuse_model.LATE_PASSES)]
    monkeypatch.setattr(optimizer, "PASS_NAMES", tuple(names))
    text = "g (float[b, 8] x) => (float[b, 8] y, float[b, 8] z) { y = Relu (x)  r = Softmax (x)  z = Sigmoid (r) }"
    _, report = optimize(parse(text))
    (dropped,) = report.dropped
    assert (dropped.fusion, dropped.node) == ("relu_to_abs", "") and dropped.reason.startswith("output 'y' is off by ")
    assert report.verified.status == "verified" and report.fused
    assert any("Dropped relu_to_abs" in str(line) for line in report.table().renderables)


def test_two_sizes_of_every_dynamic_dimension_are_compared() -> None:
    _, report = optimize(parse(BLOCK))
    assert report.verified.passed
    assert [list(sizes) for sizes in report.verified.sizes] == [["batch"], ["batch"]]
    assert len({sizes["batch"] for sizes in report.verified.sizes}) == 2
    assert [(o.name, o.tolerance) for o in report.verified.outputs] == [("y", 1e-5)]


def test_given_inputs_are_used() -> None:
    x = np.random.default_rng(0).standard_normal((17, 8)).astype(np.float32)
    _, report = optimize(parse(BLOCK), inputs={"x": x})
    assert (report.verified.passed, report.verified.sizes) == (True, ({"batch": 17},))


def test_switched_off() -> None:
    verified = optimize(parse(BLOCK), verify=False)[1].verified
    assert (verified.passed, verified.outputs) == (None, ())
    assert verified.reason == "switched off; `onnxfuse verify A B` compares two models"


def test_without_onnxruntime_the_report_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model, report = optimize(parse(BLOCK))
    assert (report.counts, len(model.graph.node)) == (BLOCK_COUNTS, 2)
    assert report.verified.passed is None
    assert report.verified.reason.startswith("onnxruntime is not installed, so nothing was compared; pip install")


# --- what stays unchanged ------------------------------------------------------------------------------------------

NORM = """
  mean = ReduceMean <axes = [-1]> (x)
  centred = Sub (x, mean)
  squared = Pow (centred, two)
  variance = ReduceMean <axes = [-1]> (squared)
  stable = Add (variance, epsilon)
  deviation = Sqrt (stable)
  normal = Div (centred, deviation)
  scaled = Mul (normal, scale)
"""
NORM_WEIGHTS = "<float[8,6] w, float[6] b, float[8] scale, float[8] bias, float two = {2}, float epsilon = {1e-5}>"
BRANCHES = """
    then_branch = yes () => (float[batch,6] t) { p = MatMul (OUTER, w) a = Add (p, b) t = Relu (a) },
    else_branch = no () => (float[batch,6] e) { q = MatMul (OUTER, w) e = Add (q, b) }
"""


def branching(outer: str) -> onnx.ModelProto:
    """Build a LayerNorm, and an If whose branches read `outer` from the graph around them."""
    branches = BRANCHES.replace("OUTER", outer)
    return parse(
        f"""g (float[batch,8] x, bool flag) => (float[batch,8] y, float[batch,6] z) {NORM_WEIGHTS}
        {{ {NORM} y = Add (scaled, bias) z = If <{branches}> (flag) }}""", opset=17,
    )  # fmt: skip


def subgraphs(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    return [a.g for node in model.graph.node for a in node.attribute if a.HasField("g")]


@pytest.mark.parametrize(("outer", "fused"), [("y", 1), ("x", 1), ("centred", 0), ("normal", 0)])
def test_branches_are_fused_and_what_they_read_stays(outer: str, fused: int) -> None:
    model = branching(outer)
    result, report = optimize(model)
    onnx.checker.check_model(result, full_check=True)
    assert report.counts.get("layer_norm", 0) == fused
    assert [[n.op_type for n in inner.node] for inner in subgraphs(result)] == [
        ["gemm_bias_activation"], ["gemm_bias_activation_2"],
    ]  # fmt: skip
    assert {n.input[0] for inner in subgraphs(result) for n in inner.node} == {outer}
    assert [(each.where, each.nodes_before, each.nodes_after, each.counts) for each in report.subgraphs] == [
        ("the then branch of If 'z'", 3, 1, {"gemm_bias_activation": 1}),
        ("the else branch of If 'z'", 2, 1, {"gemm_bias_activation": 1}),
    ]
    assert report.verified.status == "verified" and report.verified.equal_parts == sum(report.counts.values())


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
@pytest.mark.parametrize("inside", ["p", "s"])
def test_what_is_added_to_a_product_in_a_branch_or_outside_is_no_sibling(op: str, inside: str) -> None:
    text = f"""g (float[batch,8] x, bool flag) => (float[batch,6] s, float[batch,6] y)
    <float[8,6] w, float[6] b, float[6] c>
    {{ p = {op} (x, w)
      s = Add (p, b)
      y = If <then_branch = yes () => (float[batch,6] t) {{ t = Add ({inside}, c) }},
              else_branch = no () => (float[batch,6] e) {{ q = {op} (x, w) e = Add (q, c) }}> (flag) }}"""
    model = parse(text)
    result, report = optimize(model)
    onnx.checker.check_model(result, full_check=True)
    assert ops(result) == [f"gemm_bias_activation{'_2' if inside == 'p' else ''}", "If"]  # which gives p as well
    then, other = ([n.op_type for n in inner.node] for inner in subgraphs(result))
    assert (then, other) == (["Add"], ["gemm_bias_activation"])
    assert report.verified.passed


def test_a_packed_weight_that_a_branch_reads_is_not_split() -> None:
    text = """g (float[batch,8] x, bool flag) => (float[batch,6] y, float[batch,12] z)
    <float[8,12] w, int64[2] halves = {6, 6}>
    { packed = MatMul (x, w)
      gate, up = Split <axis = -1> (packed, halves)
      s = Sigmoid (gate) silu = Mul (gate, s) y = Mul (silu, up)
      z = If <then_branch = yes () => (float[batch,12] t) { t = MatMul (x, w) },
              else_branch = no () => (float[batch,12] e) { p = MatMul (x, w) e = Neg (p) }> (flag) }"""
    result, report = optimize(parse(text))
    assert [tuple(t.dims) for t in result.graph.initializer if len(t.dims) == 2] == [(8, 12)]
    assert report.verified.passed


def test_what_a_branch_reads_survives_normalizing() -> None:
    text = """g (float[batch,8] x, bool flag) => (float[batch,8] y)
    { copy = Identity (x)
      y = If <then_branch = yes () => (float[batch,8] t) { t = Relu (copy) },
              else_branch = no () => (float[batch,8] e) { e = Neg (copy) }> (flag) }"""
    model = parse(text)
    result, report = optimize(model)
    onnx.checker.check_model(result, full_check=True)
    assert subgraphs(result) == subgraphs(model)
    assert report.verified.passed


def test_a_weight_that_a_branch_reads_is_not_changed() -> None:
    text = """g (float[batch,3,h,w] x, bool flag) => (float[batch,3,h,w] y, float[batch,3,h,w] z)
    <float[3,3,1,1] kernel, float[3] scale, float[3] shift, float[3] mean, float[3] var>
    { c = Conv (x, kernel)
      y = BatchNormalization (c, scale, shift, mean, var)
      z = If <then_branch = yes () => (float[batch,3,h,w] t) { t = Conv (x, kernel) },
              else_branch = no () => (float[batch,3,h,w] e) { e = Neg (x) }> (flag) }"""
    model = parse(text)
    result, report = optimize(model, inputs={"x": np.ones((1, 3, 2, 2), np.float32), "flag": np.array(True)})
    assert [one.kind for one in report.folded] == ["batch_norm"]
    assert subgraphs(result) == subgraphs(model)
    assert report.verified.passed


def test_a_loop_is_fused() -> None:
    text = """g (float[batch,8] x) => (float[batch,8] y)
    <float[8,8] w, float[8] b, int64 trips = {3}, bool go = {1}>
    { h = Relu (x)
      y = Loop <body = step (int64 i, bool c, float[batch,8] s) => (bool d, float[batch,8] t)
                { d = Identity (c) p = MatMul (s, w) a = Add (p, b) r = Relu (a) t = Add (r, h) }> (trips, go, h) }"""
    model = parse(text)
    result, report = optimize(model)
    onnx.checker.check_model(result, full_check=True)
    (body,) = subgraphs(result)
    assert [(n.op_type, list(n.input)) for n in body.node] == [
        ("Identity", ["c"]), ("gemm_bias_activation", ["s", "w", "b", "h"]),
    ]  # fmt: skip
    assert (report.counts, report.verified.passed) == ({"gemm_bias_activation": 1}, True)


@pytest.mark.parametrize(
    "used", ["y = Abs (x)", "a = Abs (x) y = Neg (a)", "w = Constant <value_float = 2.0> () y = Mul (x, w)"]
)
def test_nodes_that_nothing_reads_go(used: str) -> None:
    """They would be in a region without results, and onnxruntime would run them."""
    model = parse(f"main (float[2,3] x) => (float[2,3] y) {{ u = Exp (x) v = Tanh (u) {used} }}")
    result, report = optimize(model)
    assert not {"Exp", "Tanh"} & set(ops(result)) and not report.left_out


def test_newer_fused_nodes_are_refused() -> None:
    model, _ = optimize(parse(BLOCK), verify=False)
    next(each for each in model.opset_import if each.domain == "onnxfuse").version = 7
    with pytest.raises(ModelError, match=r"uses version 7 .* this onnxfuse supports version 1: install a newer"):
        optimize(model)


FUNCTIONS = """
g (float[batch,8] x) => (float[batch,6] y)
<float[8,6] w, float[6] b, float[6] scale, float[6] shift>
{
  h = mine.twice_relu (x)
  product = MatMul (h, w)
  biased = Add (product, b)
  a = mine.twice_relu (biased)
  y = LayerNormalization (a, scale, shift)
}
<domain: "mine", opset_import: ["" : 20]>
twice_relu (v) => (u) { r = Relu (v)  u = Add (r, r) }
"""


def test_functions_of_the_model_are_inlined() -> None:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 20, "mine" : 1]>' + FUNCTIONS)
    weights = parse(BLOCK)
    model.graph.initializer.extend(weights.graph.initializer)
    del model.graph.value_info[:]
    result, report = optimize(model)
    onnx.checker.check_model(result, full_check=True)
    assert not [f for f in (*result.graph.node, *result.functions) if f.domain == "mine"]
    assert report.inlined is not None and (report.inlined.calls, report.inlined.kept) == (2, ())
    assert (report.counts, report.verified.passed) == (
        {"add_layer_norm": 1, "gemm_bias_activation": 1, "region": 1}, True
    )  # fmt: skip


def test_nodes_of_other_domains_stay() -> None:
    text = """g (float[batch,8] x) => (float[batch,8] y)
    <float[8] bias, float[8] scale, float[8] shift>
    { h = com.microsoft.QuickGelu <alpha = 3.0> (x) y = LayerNormalization (h, scale, shift) }"""
    model = parse(text)
    model.opset_import.add(domain="com.microsoft", version=1)
    result, report = optimize(model)
    assert [(node.domain, node.op_type) for node in result.graph.node] == [
        ("com.microsoft", "QuickGelu"), ("onnxfuse", "layer_norm"),
    ]  # fmt: skip
    assert result.graph.node[0] == model.graph.node[0]
    assert {o.domain: o.version for o in result.opset_import} == {"": 20, "com.microsoft": 1, "onnxfuse": 1}
    assert report.verified.passed


# --- older models, and weights that a caller may replace -----------------------------------------------------------


def with_weights_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return model


def test_weights_that_a_caller_may_replace_are_no_weights() -> None:
    result, report = optimize(with_weights_as_inputs(parse(BLOCK)), regions=False)
    assert report.counts == {}
    assert ops(result) == ["MatMul", "Add", "Relu", "LayerNormalization"]
    text = """g (float[n,3,4,4] x) => (float[n,2,4,4] y)
    <float[2,3,1,1] w, float[2] s, float[2] b, float[2] m, float[2] v>
    { c = Conv (x, w) y = BatchNormalization (c, s, b, m, v) }"""
    result, report = optimize(with_weights_as_inputs(parse(text)))
    assert ops(result) == ["Conv", "BatchNormalization"]
    assert report.folded == ()


def test_a_model_of_ir_version_3() -> None:
    """Before IR version 4 every initializer had to be an input too, although callers did not override it."""
    text = "g (float[n,8] x) => (float[n,6] y) <float[8,6] w, float[6] b> { p = Gemm (x, w, b) y = Relu (p) }"
    result, report = optimize(with_weights_as_inputs(parse(text, opset=9, ir=3)))
    onnx.checker.check_model(result, full_check=True)
    assert (report.counts, report.verified.passed) == ({"gemm_bias_activation": 1}, True)
    assert [value.name for value in result.graph.input] == ["x"]


@pytest.mark.parametrize("skip", [[], ["conv_bias_activation"]])
def test_folding_in_a_model_of_ir_version_3(skip: list[str]) -> None:
    text = """g (float[n,3,4,4] x) => (float[n,2,4,4] y)
    <float[2,3,1,1] w, float[2] s, float[2] b, float[2] m, float[2] v>
    { c = Conv (x, w) z = BatchNormalization (c, s, b, m, v) y = Relu (z) }"""
    result, report = optimize(with_weights_as_inputs(parse(text, opset=9, ir=3)), skip=skip)
    onnx.checker.check_model(result, full_check=True)
    assert (report.verified.passed, report.dropped) == (True, ())
    assert "BatchNormalization" not in ops(result)


@pytest.mark.parametrize("opset", range(7, 25))
def test_every_opset(opset: int) -> None:
    norm, weights = NORM, NORM_WEIGHTS
    if opset >= 18:  # the axes became an input
        norm = re.sub(r" <axes = \[-1\]> \((\w+)\)", r" (\1, last)", norm)
        weights = weights.replace(">", ", int64[1] last = {-1}>")
    model = parse(
        f"""g (float[batch,8] x) => (float[batch,6] y) {weights}
        {{ {norm} h = Add (scaled, bias) p = Gemm (h, w, b) y = Relu (p) }}""", opset,
    )  # fmt: skip
    result, report = optimize(model)
    onnx.checker.check_model(result, full_check=True)
    assert (report.counts, report.verified.passed) == (BLOCK_COUNTS, True)
    assert report.input["opset"] == opset
    assert [o.version for o in result.opset_import if o.domain == ""] == [opset]


@pytest.mark.parametrize("opset", [6, 99])
def test_an_opset_out_of_range(opset: int) -> None:
    model = parse(BLOCK)
    model.opset_import[0].version = opset
    with pytest.raises(ModelError, match=f"has opset {opset}; supported are 7 to 27"):
        optimize(model)


# --- external data -------------------------------------------------------------------------------------------------

STORED = """
g (float[batch,64] x) => (float[batch,32] y, float[batch,32,1,1] z)
<float[64,32] w, float[32] b, float[32,64,1,1] kernel, float[32] s, float[32] t, float[32] m, float[32] v,
 int64[4] image = {0, 64, 1, 1}>
{
  product = MatMul (x, w)
  y = Add (product, b)
  x4 = Reshape (x, image)
  c = Conv (x4, kernel)
  z = BatchNormalization (c, s, t, m, v)
}
"""


def test_external_weights_stay_on_disk_unless_they_change(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(parse(STORED), path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    model, report = optimize(path)
    stored = {t.name: uses_external_data(t) for t in model.graph.initializer}
    assert stored["w"]
    assert [one.kind for one in report.folded if one.kind == "batch_norm"] == ["batch_norm"]
    assert not any(outside for name, outside in stored.items() if name.startswith("kernel"))
    assert (report.counts, report.verified.passed) == ({"gemm_bias_activation": 1}, True)


def test_external_weights_are_not_read_while_nothing_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(parse(STORED), path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    read: list[str] = []
    spied: Callable[..., np.ndarray] = numpy_helper.to_array

    def spy(tensor: TensorProto, *arguments: object, **options: object) -> np.ndarray:
        read.append(tensor.name)
        return spied(tensor, *arguments, **options)

    monkeypatch.setattr(numpy_helper, "to_array", spy)
    optimize(path, only=["gemm_bias_activation"], verify=False)
    assert "w" not in read


def test_external_data_needs_a_path(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(parse(STORED), path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    with pytest.raises(ModelError, match="give the model as a path"):
        optimize(onnx.load(path, load_external_data=False))


def test_the_public_names_exist() -> None:
    assert [name for name in onnxfuse.__all__ if not hasattr(onnxfuse, name)] == []


@pytest.mark.parametrize("name", ["llama_kvcache_sdpa_dynamo_fp16", "llama_kvcache_sdpa_ts_fp32"])
def test_a_step_of_fixed_sizes_is_fused_as_one_of_any_sizes(name: str) -> None:
    """With fixed sizes, the tables of rotary embedding are constants for one position."""
    model = load_exported(f"{name}.onnx")
    _, of_any = optimize(model)
    model.graph.ClearField("value_info")
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = {"batch": 1, "seq": 1, "past": 16, "past + seq": 17}[dim.dim_param]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    _, report = optimize(model)
    assert not report.dropped
    assert {**report.counts, "rotary_table": 1} == of_any.counts


@pytest.mark.parametrize(
    "name", ["+".join("a" * 3000), "*".join(f"(a{i}+b{i})" for i in range(24)), "(" * 900 + "a" + ")" * 900]
)
def test_a_dimension_with_a_long_expression_for_a_name(name: str) -> None:
    info = onnx.helper.make_tensor_value_info
    x, y = (info(tensor, onnx.TensorProto.FLOAT, [name, 3]) for tensor in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
    optimized, report = optimize(model)
    assert report.verified.passed and [node.op_type for node in optimized.graph.node] == ["Relu"]


def test_a_model_that_a_session_wrote_may_import_the_domain() -> None:
    """onnxruntime writes every domain that is registered in its process, in version 1000."""
    model = parse(BLOCK)
    model.opset_import.append(onnx.helper.make_opsetid("onnxfuse", 1000))
    optimized, report = optimize(model)
    assert report.counts == BLOCK_COUNTS
    assert [each.version for each in optimized.opset_import if each.domain == "onnxfuse"] == [1]
