"""Test attributes of nodes: values of one type, defaults of the schema, and attributes that became inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

from onnxfuse.ir.attributes import (
    AtRunTime,
    attribute_or_input,
    int_attribute,
    ints_attribute,
    number_parameter,
    str_attribute,
    tensor_attribute,
)
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import is_constant
from onnxfuse.ir.serde import read_graph


def graph_of(body: str, opset: int = 17) -> Graph:
    text = f'<ir_version: 9, opset_import: ["" : {opset}]> g (float[2,3] x, int64[1] a) => (y) {{ {body} }}'
    return read_graph(onnx.parser.parse_model(text))


def test_attributes_have_the_type_that_is_asked_for() -> None:
    (node,) = graph_of('y = Conv <group = 2, pads = [1, 1], auto_pad = "VALID"> (x, x)').nodes
    assert int_attribute(node, "group") == 2 and ints_attribute(node, "pads") == [1, 1]
    assert str_attribute(node, "auto_pad") == "VALID"


def test_an_absent_attribute_is_the_default_or_none() -> None:
    (node,) = graph_of("y = Relu (x)").nodes
    assert int_attribute(node, "axis") is None and int_attribute(node, "axis", -1) == -1
    assert ints_attribute(node, "axes") is None and ints_attribute(node, "axes", range(2)) == [0, 1]
    assert str_attribute(node, "mode", "edge") == "edge" and tensor_attribute(node, "value") is None


@pytest.mark.parametrize("read", [ints_attribute, str_attribute, tensor_attribute])
def test_an_attribute_of_another_type_is_an_error(read: Any) -> None:
    (node,) = graph_of("y = Softmax <axis = 1> (x)").nodes
    with pytest.raises(TypeError, match=r"^attribute 'axis' of Softmax '.*' is 1; required is a value of type \w+$"):
        read(node, "axis")


def test_an_attribute_may_be_a_tensor() -> None:
    graph = graph_of("y = Constant <value = float[2] {1, 2}> ()")
    value = tensor_attribute(graph.nodes[0], "value")
    assert value is not None and is_constant(value)
    assert constant_value(graph, value).tolist() == [1, 2]


def test_a_parameter_is_an_attribute_a_constant_input_known_at_run_time_or_the_default() -> None:
    graph = graph_of("y = ReduceSum <keepdims = 0> (x, a)")
    (node,) = graph.nodes
    assert attribute_or_input(graph, node, "keepdims") == 0
    assert attribute_or_input(graph, node, "noop_with_empty_axes") == 0  # the schema's default
    axes = attribute_or_input(graph, node, "axes")
    assert isinstance(axes, AtRunTime) and axes.tensor.name == "a"
    assert axes != [1] and axes not in ([1], [-1]) and axes == axes
    node.inputs[1] = graph.constant("axes", np.array([1]))
    assert attribute_or_input(graph, node, "axes") == [1]
    before = graph_of("y = ReduceSum <axes = [1]> (x)", opset=11)
    assert attribute_or_input(before, before.nodes[0], "axes") == [1]


def test_a_number_is_required() -> None:
    graph = graph_of("y = ReduceSum (x, a)")
    assert number_parameter(graph, graph.nodes[0], "keepdims") == 1
    with pytest.raises(TypeError, match="required is a value of type int or float"):
        number_parameter(graph, graph.nodes[0], "axes")
