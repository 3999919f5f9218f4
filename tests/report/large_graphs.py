"""Models of many nodes, for the tests of reports."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def transformer_like(layers: int, widths: tuple[int, ...] = (16,)) -> onnx.ModelProto:
    """Return layers of 20 nodes: a normalization that is spelled out, two products with a GELU between, and an Add.

    The hidden sizes of the layers are `widths` in turn, so that layers of one width are equal.
    """
    size, weights = 8, dict[str, np.ndarray]()
    nodes, x = list[onnx.NodeProto](), "x"
    for number in range(layers):
        at, width = f"/encoder/layer.{number}", widths[number % len(widths)]

        def add(op: str, *inputs: str | np.ndarray, at: str = at, **attributes: object) -> str:
            name = f"{at}/{op}_{len(nodes)}"
            read = []
            for each in inputs:
                if not isinstance(each, str):
                    weights[f"{name}.weight"] = each.astype(np.float32)
                    each = f"{name}.weight"
                read.append(each)
            nodes.append(helper.make_node(op, read, [f"{name}_output"], name, **attributes))
            return f"{name}_output"

        random = np.random.default_rng(number)
        centred = add("Sub", x, add("ReduceMean", x, axes=[-1], keepdims=1))
        variance = add("ReduceMean", add("Pow", centred, np.array(2.0)), axes=[-1], keepdims=1)
        normal = add("Div", centred, add("Sqrt", add("Add", variance, np.array(1e-5))))
        normal = add("Add", add("Mul", normal, random.normal(size=size)), random.normal(size=size))
        up = add("Add", add("MatMul", normal, random.normal(size=(size, width))), random.normal(size=width))
        erf = add("Add", add("Erf", add("Div", up, np.array(2**0.5))), np.array(1.0))
        gelu = add("Mul", add("Mul", up, erf), np.array(0.5))
        down = add("Add", add("MatMul", gelu, random.normal(size=(width, size))), random.normal(size=size))
        x = add("Add", x, add("Identity", down))
    graph = helper.make_graph(
        nodes, "large", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", size])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["batch", size])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
