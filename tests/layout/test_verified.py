"""Test that channels-last nodes are compared with what they replaced, reported, and taken back where they differ."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from layout_models import attribute, converted, parse

from onnxfuse import optimize
from onnxfuse.cli import main
from onnxfuse.layout import conversion
from onnxfuse.layout.assign import LAYOUT
from onnxfuse.verify.compare_parts import compare_parts
from onnxfuse.verify.parts import distinct_parts

TEXT = """(float[n,8,h,w] x) => (float[n,8,p,q] y)
<float[8,8,3,3] k1, float[8] b1, float[8,1,3,3] k2, float[8,8,1,1] k3>
{ a = Conv <pads = [1,1,1,1]> (x, k1, b1) b = Relu (a)
  c = Conv <group = 8, pads = [1,1,1,1]> (b, k2) d = Add (c, b) e = Sigmoid (d)
  f = MaxPool <kernel_shape = [2,2], strides = [2,2]> (e)
  y = Conv (f, k3) }"""
WRONG = '''"""A convolution whose stored body is another function."""

from onnxfuse import attribute, either, fusion, op, tensor, weight


@fusion(out="n m ...", example={"x": (2, 4, 6, 7), "w": (5, 4, 3, 3)})
def conv_bias_activation(
    x=tensor(), w=weight(), bias=weight("m", optional=True), pads=attribute(), group=attribute()
):
    """y = max(conv(x, w) + bias, 0)"""
    product = op.Conv(x, w, bias, pads=pads, group=group)
    return either(op.Abs(product), op.Relu(product))
'''


def test_every_channels_last_node_is_a_part() -> None:
    """The nodes that were fused, and those that the layout made, run beside what they replaced."""
    result = converted(parse(TEXT))
    assert result.unfused is not None
    replaced = {one.node: one.replaces for one in result.fusing.fused}
    parts = distinct_parts(result.unfused, result.model, replaced, result.layout.originals)
    assert [attribute(part.fused, "fusion") for part in parts] == [
        "conv_bias_activation", "conv_bias_activation", "max_pool", "conv_bias_activation",
    ]  # fmt: skip
    assert [part.operands for part in parts] == [["x", "k1", "b1"], ["b", "k2"], ["e"], ["f", "k3"]]
    assert all(part.is_transposed for part in parts)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 8, 6, 10)).astype("f4")}
    found = compare_parts(result.unfused, result.model, parts, feeds)
    assert (found.wrong, found.not_compared) == ((), ()) and len(found.equal) == len(parts)


def test_an_operand_that_only_the_optimized_model_has_is_computed_in_the_part() -> None:
    """A Resize reads the shape of a tensor that is made of sizes; the part has the nodes that make it."""
    text = """(float[n,8,h,w] x) => (float[n,8,p,q] y)
    <float[8,8,3,3] k1, int64[1] zero = {0}, int64[1] two = {2}, int64[1] four = {4}>
    { a = Conv <pads = [1,1,1,1]> (x, k1) p = AveragePool <kernel_shape = [3,3], strides = [2,2]> (a)
      s = Shape (p) outer = Slice (s, zero, two) i = Shape (a) inner = Slice (i, two, four)
      sizes = Concat <axis = 0> (outer, inner) b = Resize (p, , , sizes)
      y = Conv (b, k1) }"""
    model = parse(text)
    result = converted(model)
    assert result.unfused is not None
    replaced = {one.node: one.replaces for one in result.fusing.fused}
    parts = distinct_parts(result.unfused, result.model, replaced, result.layout.originals)
    (resize,) = (part for part in parts if attribute(part.fused, "fusion") == "resize")
    assert resize.operands == ["p", "a"], "of which the latter has the sizes"
    assert [node.op_type for node in resize.nodes] == [
        "Transpose", "Transpose", "Constant", "Constant", "Shape", "Constant", "Gather", "Concat", "Reshape", "resize",
        "Transpose",
    ]  # fmt: skip
    assert optimize(model, layout="nhwc", timeout=None)[1].verified.status == "verified"


def test_several_outputs_are_one_part() -> None:
    """A Split and a Concat run beside what they replaced, between Transposes of each of their tensors."""
    text = TEXT.replace("f = MaxPool", "g, i = Split <axis = 1, num_outputs = 2> (e) j = Concat <axis = 1> (i, g)"
                        " f = MaxPool").replace("(e)\n  y", "(j)\n  y")  # fmt: skip
    result = converted(parse(text))
    assert result.unfused is not None
    replaced = {one.node: one.replaces for one in result.fusing.fused}
    parts = distinct_parts(result.unfused, result.model, replaced, result.layout.originals)
    by_fusion = {attribute(part.fused, "fusion"): part for part in parts}
    assert (by_fusion["split"].operands, by_fusion["split"].outputs) == (["e"], ["g", "i"])
    assert (by_fusion["concat"].operands, by_fusion["concat"].outputs) == (["i", "g"], ["j"])
    assert [node.op_type for node in by_fusion["split"].replaced] == ["Split"]
    _, report = optimize(parse(text), layout="nhwc", regions=False)
    assert report.counts == {"concat": 1, "conv_bias_activation": 3, "max_pool": 1, "split": 1}
    assert report.verified.status == "verified" and report.verified.equal_parts == 6


def test_the_report() -> None:
    _, report = optimize(parse(TEXT), layout="nhwc")
    assert report.counts == {"conv_bias_activation": 3, "max_pool": 1}
    assert report.verified.status == "verified" and report.verified.equal_parts == 4
    data = report.to_json()["layout"]
    assert (data["nodes"], data["transposes"]) == (4, 2)
    assert data["ends"] == [
        {"tensor": "x", "reason": "'x' is an input of the graph"},
        {"tensor": "y", "reason": "'y' is an output of the graph"},
    ]
    assert "Layout: 4 nodes channels-last, 2 Transposes at borders" in [
        str(line) for line in report.table().renderables
    ]


def test_the_report_counts_channels_last_nodes_in_regions() -> None:
    given = parse("""(float[n,8,6,6] x) => (float[n,8,6,6] y) <float[8,8,3,3] v, float[8,8,3,3] w> {
        a = Conv <pads = [1, 1, 1, 1]> (x, v) b = Sin (a) c = Mul (b, a) y = Conv <pads = [1, 1, 1, 1]> (c, w) }""")
    _, report = optimize(given, layout="nhwc", verify=False)
    assert report.counts == {"conv_bias_activation": 2} and report.layout.written == frozenset()
    assert "Layout: 4 nodes channels-last (2 of them in regions and epilogues), 2 Transposes at borders" in [
        str(line) for line in report.table().renderables
    ]


def test_a_wrong_body_is_found_in_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node stays channels-first, between Transposes; the others are channels-last."""
    right = conversion.body_of_node

    def wrong(node: onnx.NodeProto, *arguments: object) -> conversion.Body:
        changed = onnx.NodeProto()
        changed.CopyFrom(node)
        if node.op_type == "MaxPool":
            changed.op_type = "AveragePool"
        return right(changed, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(conversion, "body_of_node", wrong)
    model, report = optimize(parse(TEXT), layout="nhwc")
    (dropped,) = report.dropped
    assert dropped.fusion == LAYOUT and dropped.reason.startswith("on the values of a run its output 'f' is ")
    assert report.verified.status == "verified"
    assert report.counts == {"conv_bias_activation": 3}
    pool = next(node for node in model.graph.node if node.op_type == "MaxPool")
    assert list(pool.output) == ["f"]
    _, found = optimize(parse(TEXT), layout="nchw")
    assert not found.dropped


def test_a_wrong_fusion_is_taken_back(tmp_path: Path) -> None:
    """First the node stays channels-first; then, because it is wrong there too, it is not fused."""
    (tmp_path / "conv_bias_activation.py").write_text(WRONG, encoding="utf-8")
    model, report = optimize(parse(TEXT), layout="nhwc", regions=False, patterns=[tmp_path])
    assert {one.fusion for one in report.dropped} == {LAYOUT, "conv_bias_activation"}
    assert report.verified.status == "verified"
    assert "Relu" in [node.op_type for node in model.graph.node]


def test_operators_that_are_wrong_channels_last_are_found_by_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such operators are not compared as parts, so the layout as a whole is taken back."""
    import onnxfuse.layout.neutral_rules as neutral

    monkeypatch.setattr(neutral, "last_axis", lambda axis, rank: axis % rank)
    text = TEXT.replace("f = MaxPool", "g = Softmax <axis = 1> (e) f = MaxPool").replace("(e)\n  y", "(g)\n  y")
    _, report = optimize(parse(text), layout="nhwc")
    (dropped,) = report.dropped
    assert dropped.fusion == LAYOUT and "output 'y'" in dropped.reason
    assert report.layout.nodes == 0 and report.verified.status == "verified"


def test_a_model_that_does_not_run_is_compared_by_parts() -> None:
    """The values are then drawn, from the shapes of the original's tensors."""
    text = TEXT.replace("y = Conv (f, k3)", "z = Conv (f, k3) y = com.example.Unknown (z)")
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 20, "com.example": 1]> main {text}')
    random = np.random.default_rng(0)
    for value in model.graph.value_info:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        array = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    _, report = optimize(model, layout="nhwc")
    assert report.verified.equal_parts == 4 and not report.dropped


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    """onnxruntime's CPU provider has no convolution in bfloat16, so that both sides run in float32."""
    text = TEXT.replace("float[8", f"{dtype}[8").replace("(float[n", f"({dtype}[n")
    _, report = optimize(parse(text, opset=22))  # the first with convolutions in bfloat16
    assert not report.dropped and report.verified.status == "verified"
    assert report.counts == {"conv_bias_activation": 3, "max_pool": 1} and report.verified.equal_parts == 4


def test_the_command_line(tmp_path: Path) -> None:
    source, target = tmp_path / "m.onnx", tmp_path / "o.onnx"
    onnx.save(parse(TEXT), source)
    for layout, line in (("nhwc", "Layout: 4 nodes channels-last, 2 Transposes at borders"), ("nchw", "nodes ")):
        result = CliRunner().invoke(main, ["optimize", str(source), str(target), "--layout", layout])
        assert result.exit_code == 0 and line in result.output, result.output
        assert ("Layout: " in result.output) == (layout == "nhwc")
