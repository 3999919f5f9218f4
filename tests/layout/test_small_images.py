"""Wherever onnxruntime runs the original, the kernels' hosts have a plan: for small images, and for none.

A node that is registered as a kernel does not run its body any more, so that what a host refuses in a run fails there.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
import pytest
from architectures import A100, H200
from kernel_hosts import host_of
from onnx import helper, numpy_helper
from runtimes import run
from template_checks import concrete_plan, template_of

from onnxfuse import optimize
from onnxfuse.runtime.call_inputs import inputs_of
from onnxfuse.runtime.fused_calls import Call, read_calls
from onnxfuse.runtime.plan import Device, TensorSpec
from onnxfuse.runtime.template import Template, candidates_at, sizes_of

SIDES = ((1, 1), (2, 2), (2, 5), (3, 1), (4, 4), (9, 6))
SHAPES = [(n, 3, *side) for n in (0, 1, 2) for side in SIDES]
# What is between two convolutions, from `a` of 32 channels to `b`, and how many channels `b` has.
OPERATORS = {
    "b = MaxPool <kernel_shape = [3, 3], strides = [3, 3]> (a)": 32,
    "b = MaxPool <kernel_shape = [3, 2], strides = [2, 2], pads = [1, 0, 1, 1], ceil_mode = 1> (a)": 32,
    "b = MaxPool <kernel_shape = [2, 2], strides = [4, 2], dilations = [3, 2]> (a)": 32,
    "b = AveragePool <kernel_shape = [38, 38], strides = [38, 38], ceil_mode = 1, count_include_pad = 1> (a)": 32,
    'b = AveragePool <kernel_shape = [1, 2], strides = [2, 3], auto_pad = "SAME_UPPER"> (a)': 32,
    "b = GlobalAveragePool (a)": 32,
    "b = GlobalMaxPool (a)": 32,
    "b = ReduceMean <keepdims = 1> (a, axes)": 32,
    "b = ReduceMax <keepdims = 1> (a, axes)": 32,
    'b = Resize <mode = "linear", axes = [2, 3]> (a, none, none, sizes)': 32,
    'b = Resize <mode = "nearest"> (a, none, scales)': 32,
    "b = SpaceToDepth <blocksize = 2> (a)": 128,
    "b = DepthToSpace <blocksize = 2> (a)": 8,
    "b = Conv <strides = [2, 3], pads = [1, 0, 0, 2]> (a, w)": 32,
    "b = ConvTranspose <strides = [2, 1]> (a, w)": 32,
    "c = Relu (a) b = Concat <axis = 1> (a, c)": 64,
    "c, d = Split <axis = 1, num_outputs = 2> (a) b = Add (c, d)": 16,
    "c = GlobalAveragePool (a) d = Sigmoid (c) b = Mul (a, d)": 32,
}


def model(operators: str, channels: int) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 19]>
        g (float[n, 3, h, w] x) => (float[k, l, i, j] y)
        <int64[2] axes = {{2, 3}}, int64[2] sizes = {{5, 7}}, float[4] scales = {{1.0, 1.0, 0.6, 2.0}}> {{
            none = Constant <value_floats: floats = []> ()
            a = Conv (x, first)
            {operators}
            y = Conv (b, last)
        }}"""
    )
    random = np.random.default_rng(1)
    for name, shape in (("first", (32, 3, 1, 1)), ("last", (5, channels, 1, 1)), ("w", (32, 32, 3, 2))):
        proto.graph.initializer.append(numpy_helper.from_array(random.random(shape, np.float32), name))
    for node in proto.graph.node:  # an input that is left out has no name
        node.input[:] = ["" if name == "none" else name for name in node.input]
    del proto.graph.node[0]
    return proto


def tensors(fused: onnx.ModelProto, calls: list[Call], x: np.ndarray) -> dict[str, np.ndarray] | None:
    """Return the inputs and outputs of all fused nodes; None if onnxruntime does not run the model."""
    shown = onnx.ModelProto()
    shown.CopyFrom(fused)
    constants = {each.name: numpy_helper.to_array(each) for each in fused.graph.initializer}
    read = dict.fromkeys(name for call in calls for name in (*call.proto.input, *call.proto.output))
    named = [name for name in read if name != "x" and name not in constants]
    del shown.graph.output[:]
    shown.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in named)
    results, _ = run(shown, {"x": x})
    return None if results is None else {"x": x, **constants, **dict(zip(named, results, strict=True))}


Ways = list[tuple[Device, Template]]


def ways_of(call: Call) -> Ways:
    """Return the template of a node for all sizes, for each GPU."""
    pattern = inputs_of(call)
    assert pattern is not None
    return [(device, template_of(call.node, pattern, device)) for device in (H200, A100)]


def output_shapes(call: Call, specs: tuple[TensorSpec, ...], ways: Ways) -> Iterator[list[tuple[int, ...]]]:
    """Yield the shapes of the outputs, by the host for these inputs, and by the template for all sizes."""
    host = host_of(call.node.fusion)
    for device, template in ways:
        assert host.supports(call.node, [spec.dtype for spec in specs], device) is None
        yield [each.shape for each in host.candidates(call.node, specs, device)[0].outputs]
        sizes = sizes_of(template.inputs, specs)
        assert sizes is not None
        variant = template.chosen(sizes) or candidates_at(host, template, sizes)[0]
        yield [each.shape for each in concrete_plan(template, variant, sizes).outputs]


@pytest.mark.parametrize("operators", OPERATORS)
def test_hosts_plan_what_onnxruntime_runs(operators: str) -> None:
    original = model(operators, OPERATORS[operators])
    fused, _ = optimize(original, verify=False)
    calls = [(call, ways_of(call)) for call in read_calls(fused)]
    assert len(calls) >= 3, "what is between the convolutions is channels-last"
    ran = 0
    for shape in SHAPES:
        x = np.random.default_rng(2).standard_normal(shape, dtype=np.float32)
        if run(original, {"x": x})[0] is None:
            continue
        known = tensors(fused, [call for call, _ in calls], x)
        assert known is not None, f"the fused model runs at {shape}"
        ran += 1
        for call, ways in calls:
            inputs = zip(call.proto.input, call.constants, strict=True)
            specs = tuple(TensorSpec(known[name].shape, "float32", constant=constant) for name, constant in inputs)
            expected = [known[name].shape for name in call.proto.output]
            assert all(found == expected for found in output_shapes(call, specs, ways)), f"{call.op} at {shape}"
    assert ran >= 4, "onnxruntime runs small images"
