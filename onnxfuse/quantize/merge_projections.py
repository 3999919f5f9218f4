"""Merge the projections of an attention before they are quantized: one product of all columns, and a Split.

A product has one quantized operand and one launch then.  Kernels of attention read the parts where they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.algebra.operators import REARRANGING
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import take_name
from onnxfuse.ir.protos import defined_names, graphs, nodes, operator_name, overridable_initializers

Reader: TypeAlias = Callable[[onnx.NodeProto], onnx.NodeProto | None]  # the only node that reads a node's result


@dataclass(frozen=True)
class Projection:
    """A MatMul by a constant of two axes, the Add of a constant bias after it, if any, and both constants."""

    chain: tuple[onnx.NodeProto, ...]
    weight: TensorProto
    bias: TensorProto | None

    @property
    def columns(self) -> int:
        """The size of the last axis of the result."""
        return int(self.weight.dims[1])

    @property
    def constants(self) -> tuple[TensorProto, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def bias_values(self) -> Array:
        """Return the bias; zeros if there is none."""
        return np.zeros(self.columns, np.float32) if self.bias is None else numpy_helper.to_array(self.bias)


def merge_projections(model: onnx.ModelProto) -> None:
    """Merge MatMuls of one tensor whose results are rearranged to heads.

    The model, of opset 13 or later, is changed in place.  Only nodes of the main graph are merged, whose weights and
    biases are constants in float32 that no other node reads.
    """
    of_input = defaultdict[str, list[Projection]](list)
    for each in _projections(model):
        of_input[each.chain[0].input[0]].append(each)
    for x, found in of_input.items():
        if len(found) > 1:
            _merge(model.graph, x, found)


def _projections(model: onnx.ModelProto) -> list[Projection]:
    graph, readers = model.graph, defaultdict[str, list[onnx.NodeProto]](list)
    for node in nodes(graph):
        for name in node.input:
            readers[name].append(node)
    fixed = overridable_initializers(model) | {each.name for each in graph.output}
    constants = {
        each.name: each for each in graph.initializer
        if each.data_type == TensorProto.FLOAT and each.name not in fixed and len(readers[each.name]) == 1
    }  # fmt: skip

    def reader(node: onnx.NodeProto) -> onnx.NodeProto | None:
        (result,) = node.output
        return readers[result][0] if len(readers[result]) == 1 and result not in fixed else None

    return [one for node in graph.node if (one := _projection(node, constants, reader)) is not None]


def _projection(node: onnx.NodeProto, constants: Mapping[str, TensorProto], reader: Reader) -> Projection | None:
    weight = constants.get(node.input[1]) if operator_name(node) == "MatMul" else None
    if weight is None or len(weight.dims) != 2:
        return None
    chain, bias, after = [node], None, reader(node)
    if after is not None and operator_name(after) == "Add":
        bias = next((constants[name] for name in after.input if name in constants), None)
        if bias is None or list(bias.dims) != [weight.dims[1]]:
            return None
        chain, after = [node, after], reader(after)
    is_of_heads = after is not None and operator_name(after) in REARRANGING
    return Projection(tuple(chain), weight, bias) if is_of_heads else None


def _merge(graph: onnx.GraphProto, x: str, found: Sequence[Projection]) -> None:
    names = set[str]().union(*map(defined_names, graphs(graph)))
    ends = [each.chain[-1].output[0] for each in found]

    def constant(kind: str, values: Array) -> str:
        name = take_name(names, f"{ends[0]}_{kind}")
        graph.initializer.append(numpy_helper.from_array(values, name))
        return name

    weight = constant("weights", np.concatenate([numpy_helper.to_array(each.weight) for each in found], axis=1))
    bias = constant("biases", np.concatenate([each.bias_values() for each in found]))
    parts = constant("columns", np.array([each.columns for each in found], np.int64))
    product, total = (take_name(names, f"{ends[0]}_{kind}") for kind in ("product", "merged"))
    stem = found[0].chain[0].name
    made = [
        helper.make_node("MatMul", [x, weight], [product], stem),
        helper.make_node("Add", [product, bias], [total], f"{stem}_biases"),
        helper.make_node("Split", [total, parts], ends, f"{stem}_parts", axis=-1),
    ]
    first, gone = found[0].chain[0].output[0], {node.output[0] for each in found for node in each.chain}
    kept = list[onnx.NodeProto]()
    for node in graph.node:
        if not gone.intersection(node.output):
            kept.append(node)
        elif node.output[0] == first:
            kept += made
    unread = {each.name for one in found for each in one.constants}
    initializers = [each for each in graph.initializer if each.name not in unread]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(initializers)
