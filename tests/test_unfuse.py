"""Fused nodes become operators again, which compute the same and fuse again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
from exported_models import load_exported, read_index
from sampling import sampled
from test_cli import DONE, FAILED, error_line, run
from test_optimize import BLOCK, parse

import onnxfuse
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.noted_sizes import KEY, note_sizes, noted_sizes
from onnxfuse.ir.protos import nodes

BY_ONNXRUNTIME = ["bert_sdpa_ts_fp32.onnx", "vit_sdpa_dynamo_fp16.onnx"]
# Models whose bodies have another form than the model: a pool and a 1x1 convolution among Transposes, and targets of
# Reshapes that are read from tensors inside a region.
BY_OTHER_FORMS = ["convnext_ts_fp32.onnx", "detector_ts11_bn_fp32.onnx"]

# Models that fuse better again: a scan takes in a Transpose in the new order of the nodes; and one that has two Adds
# more, because the target of a Reshape is read from a tensor inside a region.
FUSED_BETTER = ["mamba_dynamo_fp32.onnx", "mamba2_dynamo_fp32.onnx"]


def fusions(report: onnxfuse.Report) -> Counter[str]:
    """Return how often each fusion applies."""
    return Counter(one.fusion for one in report.fused)


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def unfused(model: onnx.ModelProto, **options: Any) -> tuple[onnx.ModelProto, onnxfuse.Report]:
    """Return an optimized model with plain operators, and the report of its optimization."""
    optimized, report = onnxfuse.optimize(model, verify=False, **options)
    plain, verified = onnxfuse.unfuse(optimized)
    assert verified.status in ("verified", "partly"), verified.reason
    assert not any(node.domain == DOMAIN for node in plain.graph.node)
    assert not any(each.domain == DOMAIN for each in (*plain.functions, *plain.opset_import))
    onnx.checker.check_model(plain, full_check=True)
    return plain, report


@pytest.mark.parametrize(
    "name", [*BY_OTHER_FORMS, *sampled(sorted({*read_index()} - {*BY_OTHER_FORMS, *FUSED_BETTER}), 6)]
)
def test_what_was_fused_fuses_again(name: str) -> None:
    plain, report = unfused(load_exported(name))
    again, second = onnxfuse.optimize(plain, verify=False)
    assert fusions(second) == fusions(report)
    assert len(again.graph.node) == report.output["nodes"]


# tf2onnx names the batch of each input.  The product of merged batches and heads says that the mask repeats no scores.
TWO_BATCHES = """g (float[b,2,6,8] q, bool[c,1,1,6] mask) => (float[n,2,6,8] y)
    <float low = {-1e9}, int64[3] merged = {-1,6,6}, int64[3] rows = {-1,6,8}, int64[4] heads = {-1,2,6,8}> {
    k = Transpose <perm=[0,1,3,2]> (q)  scores = MatMul (q, k)  seen = Where (mask, scores, low)  p = Softmax (seen)
    p3 = Reshape (p, merged)  v3 = Reshape (q, rows)  c3 = MatMul (p3, v3)  y = Reshape (c3, heads) }"""


def test_sizes_that_operators_equated_are_known_again() -> None:
    """The bodies of fused nodes broadcast, so that equal sizes are noted in the file, until its nodes change."""
    plain, report = unfused(parse(TWO_BATCHES))
    assert fusions(report) == {"attention": 1}
    again, _ = onnxfuse.optimize(plain)
    assert len(again.graph.node) == 1
    plain.graph.node[0].name = "of another graph"
    changed, _ = onnxfuse.optimize(plain)
    assert operators(changed)["Expand"] == 1


def test_sizes_are_not_known_for_other_inputs_or_constants() -> None:
    """Equal numbers are equal texts, so that an input that is declared anew must not take the other's size."""
    text = TWO_BATCHES.replace(" mask)", " mask, float[6,4] z)").replace(" y)", " y, float[r,4] s)")
    plain, _ = unfused(parse(text.replace("y = Reshape", "s = Relu (z)  y = Reshape")))
    assert noted_sizes(plain)["z"] == ["6", "4"]
    plain.graph.input[2].type.tensor_type.shape.dim[0].dim_param = "m"
    again, _ = onnxfuse.optimize(plain)
    assert again.graph.input[2].type.tensor_type.shape.dim[0].dim_param == "m"
    model = parse(TWO_BATCHES)
    note_sizes(model, {"q": ["b"]})
    assert noted_sizes(model) == {"q": ["b"]}
    model.graph.initializer[1].int64_data[1] = 12
    assert noted_sizes(model) == {}


# The frames of a spectrogram: their number depends on that of a Slice, which becomes part of a region.
FRAMES = """g (float[b,n] x) => (float[b,257,t] y)
    <int64[1] start = {119}, int64[1] end = {-9223372036854775808}, int64[1] one = {1}, int64[1] back = {-1},
     int64[4] pads = {0,160,0,152}, int64[4] parts = {0,2,257,-1}, int64[1] axis = {1}> {
    first = Slice (x, start, end, one, back)  longer = Concat <axis=1> (first, x)  padded = Pad (longer, pads)
    lines = Unsqueeze (padded, one)  image = Conv <strides=[160]> (lines, w)  both = Reshape (image, parts)
    y = ReduceSumSquare <keepdims=0> (both, axis) }"""


def test_unknown_sizes_are_estimated_by_the_bodies_of_fused_nodes() -> None:
    """The layout of a convolution depends on the estimates, so that the second run must have those of the first."""
    model = parse(FRAMES)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((514, 1, 512), 0.01, np.float32), "w"))
    once, report = onnxfuse.optimize(model, verify=False)
    assert fusions(report)["region"]
    twice, _ = onnxfuse.optimize(once, verify=False)
    assert operators(twice) == operators(once)


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 100_000, "[1]", '{"digest": 1}', '{"digest": "DIGEST", "sizes": {"q": [1]}}']
)
def test_other_notes_of_sizes_are_ignored(text: str) -> None:
    model = parse(TWO_BATCHES)
    wanted, _ = onnxfuse.optimize(model, verify=False)
    note_sizes(model, {"q": ["b"]})
    note = next(each for each in model.metadata_props if each.key == KEY)
    note.value = text.replace("DIGEST", json.loads(note.value)["digest"])
    found, _ = onnxfuse.optimize(model, verify=False)
    assert operators(found) == operators(wanted)


@pytest.mark.parametrize("name", BY_ONNXRUNTIME)
def test_bodies_of_onnxruntime_s_operators(name: str) -> None:
    """The model then has these operators, and imports their domain."""
    plain, _ = unfused(load_exported(name), fallback="ort")
    assert any(node.domain == "com.microsoft" for node in plain.graph.node)


def test_transposes_of_channels_last_nodes_cancel() -> None:
    """A model whose images all are channels-last has no Transpose left: its input is read as it is."""
    original = load_exported("resnet50_dynamo_fp32.onnx")
    plain, report = unfused(original, layout="nhwc")
    assert report.layout.nodes > 50
    assert operators(plain)["Conv"] == operators(original)["Conv"]
    assert operators(plain)["Transpose"] == 0


def test_functions_of_the_model_stay() -> None:
    text = """<ir_version: 8, opset_import: ["": 20, "own": 1]>
    main (float[N,8] x) => (float[N,8] z) { y = own.twice(x) a = Erf(y) b = Add(a, one) c = Mul(y, b) z = Mul(c, half) }
    <domain: "own", opset_import: ["": 20]> twice (a) => (b) { b = Add(a, a) }"""
    model = onnx.parser.parse_model(text)
    for name, value in (("one", 1.0), ("half", 0.5)):
        model.graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [], [value]))
    plain, _ = unfused(parse(BLOCK))
    plain.functions.extend(model.functions)
    fused, _ = onnxfuse.optimize(plain, verify=False)
    assert [f.name for f in onnxfuse.unfuse(fused, verify=False)[0].functions] == ["twice"]


def test_what_was_fused_in_a_loop_fuses_again() -> None:
    text = """g (float[b,8] x, int64 m) => (float[b,8] y) <float[8,8] w, float[8] c, bool go = {1}> {
        y = Loop <body = step (int64 i, bool p, float[b,8] s) => (bool q, float[b,8] t) {
          q = Identity (p)  h = MatMul (s, w)  a = Add (h, c)  r = Relu (a)
          t = LayerNormalization (r, c) }> (m, go, x) }"""
    plain, report = unfused(parse(text))
    assert Counter(node.op_type for node in nodes(plain.graph)) == {
        "Loop": 1, "Identity": 1, "Gemm": 1, "Relu": 1, "LayerNormalization": 1,
    }  # fmt: skip
    assert fusions(onnxfuse.optimize(plain)[1]) == fusions(report) == {"gemm_bias_activation": 1, "layer_norm": 1}


def test_the_command(tmp_path: Path) -> None:
    block, fused, plain = (tmp_path / f"{name}.onnx" for name in ("block", "fused", "plain"))
    onnx.save(parse(BLOCK), block)
    assert run("optimize", block, fused).exit_code == DONE
    result = run("unfuse", fused, plain)
    assert (result.exit_code, result.stderr) == (DONE, "")
    assert result.stdout.splitlines() == ["Nodes: 2 -> 3", "Verified: 1 output equal (at 0% of the tolerance)"]
    assert operators(onnx.load(plain)) == {"Gemm": 1, "Relu": 1, "LayerNormalization": 1}
    result = run("unfuse", plain, plain, "--overwrite")
    sentence = "the model has no fused node; give one that `onnxfuse optimize` wrote"
    assert (result.exit_code, error_line(result)) == (FAILED, sentence)
