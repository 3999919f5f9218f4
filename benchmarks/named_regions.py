"""Regions of real networks at real sizes, as small ONNX models: what regions.py times."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
from named_region_texts import TEXTS

OPSET = 17
DRAWN = 1 << 20  # values
LARGE = re.compile(r"\b(512|1024|2048|4096)\b")
CONSTANT = re.compile(r"(\w+) := (\w+)(\[[\d, ]*\])? \{([^}]*)\}")


@dataclass(frozen=True)
class NamedRegion:
    """A part of a network that becomes regions alone; `B` in its texts is the batch."""

    name: str
    model: str
    inputs: str
    outputs: str
    nodes: str
    batch: int
    kernels: int = 1  # regions that it becomes; 0 for any number
    inexact: float = 0.0  # the share of an integer output's elements that may differ, behind a Ceil of a logarithm

    def proto(self) -> onnx.ModelProto:
        """Return the model; `c := int64[2] {1, 2}` among the nodes is a constant."""
        inputs, nodes = (re.sub(r"\bB\b", str(self.batch), text) for text in (self.inputs, self.nodes))
        constants = [_constant(*found.groups()) for found in CONSTANT.finditer(nodes)]
        declared = ", ".join(f"float[unknown] {name}" for name in self.outputs.split())
        head = f'<ir_version: 8, opset_import: ["" : {OPSET}]>'
        text = f"{head} region ({inputs}) => ({declared}) {{ {CONSTANT.sub('', nodes)} }}"
        model = onnx.parser.parse_model(text)
        model.graph.initializer.extend(constants)
        for output in model.graph.output:
            output.ClearField("type")
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
        del model.graph.output[:]
        model.graph.output.extend(inferred.graph.output)
        return model

    def smaller(self) -> NamedRegion:
        """Return the region of a batch of one, and of lengths and widths that are a sixteenth of the largest."""
        inputs, nodes = (LARGE.sub(lambda size: str(int(size[0]) // 16), text) for text in (self.inputs, self.nodes))
        return replace(self, inputs=inputs, nodes=nodes, batch=1, kernels=0)


def _constant(name: str, dtype: str, shape: str | None, values: str) -> onnx.TensorProto:
    kind = {"float": "float32"}.get(dtype, dtype)
    dims = [int(each) for each in (shape or "[]")[1:-1].split(",") if each.strip()]
    array = np.array([float(each) for each in values.split(",")]).astype(kind).reshape(dims)
    return onnx.numpy_helper.from_array(array, name)


def named_regions() -> dict[str, NamedRegion]:
    """Return all regions by name."""
    return {name: NamedRegion(name, *given) for name, given in TEXTS.items()}


def draw(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Return values for the inputs of a model, which repeat after DRAWN; indices are within what a Gather reads."""
    random, feeds = np.random.default_rng(seed), {}
    below = _index_bounds(model)
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind in "iub":
            high = 2 if dtype.kind == "b" else below.get(value.name, 100)
            drawn = random.integers(0, high, min(DRAWN, math.prod(shape)))
        else:
            drawn = random.standard_normal(min(DRAWN, math.prod(shape)), np.float32)
        feeds[value.name] = np.resize(drawn.astype(dtype), shape)
    return feeds


def of_zeros(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return zeros for the inputs of a model, which take no memory: for plans, which depend on shapes alone."""
    kinds = {each.name: each.type.tensor_type for each in model.graph.input}
    return {
        name: np.broadcast_to(
            np.zeros((), onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)), [d.dim_value for d in kind.shape.dim]
        )
        for name, kind in kinds.items()
    }


def _index_bounds(model: onnx.ModelProto) -> dict[str, int]:
    """Return how large the indices may be that Gathers read, by the name of the input."""
    shapes = {v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in model.graph.input}
    bounds: dict[str, int] = {}
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[0] in shapes:
            axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
            bounds[node.input[1]] = shapes[node.input[0]][axis]
    return bounds
