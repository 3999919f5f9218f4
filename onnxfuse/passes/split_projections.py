"""Give a convolution a product of its own where it reads columns of a product with constant weights.

Kernels of convolutions read whole tensors, so that a Split would copy these columns, as in Mamba-2's projection.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from onnxfuse.analysis.shape_inference import infer_node
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Tensor, is_constant, op_of, producer
from onnxfuse.passes.emit import integers, write
from onnxfuse.passes.graph_pass import graph_pass

SIZES_SINCE: Final = 13  # the first opset whose Split has the sizes of its parts as an input


@graph_pass(opset=SIZES_SINCE)
def split_projections(graph: Graph, shapes: ShapeInfo) -> int:
    """Compute columns that a convolution reads, transposed, by products of their own; return how many products."""
    count = 0
    for node in [node for node in graph.nodes if node.op == "Conv" and op_of(node) == "Conv"]:
        source = producer(node.inputs[0])
        if source is not None and op_of(source) == "Transpose":
            count += _has_product(graph, shapes, source.inputs[0])
    return count


def _has_product(graph: Graph, shapes: ShapeInfo, part: Tensor) -> bool:
    """Compute one output of a Split of a product by a product of its own; return whether that is possible and pays.

    It pays if it moves fewer bytes to read the product's left operand twice than to copy the output.
    """
    node = producer(part)
    product = producer(node.inputs[0]) if node is not None and op_of(node) == "Split" else None
    if node is None or product is None or op_of(product) != "MatMul":
        return False
    (x, weight), whole, outputs = product.inputs, product.outputs[0], list(node.outputs)
    ends = [(shapes.shape(each) or (None,))[-1] for each in outputs]
    sizes, rank = [size for size in ends if isinstance(size, int)], shapes.rank(whole)
    read_once = graph.sole_consumer(part), graph.sole_consumer(whole)
    if None in read_once or any(map(graph.is_kept, outputs)) or len(sizes) < len(outputs) or rank is None:
        return False
    if not is_constant(weight) or len(weight.shape) != 2 or graph.sole_consumer(weight) is None:
        return False
    own = next(i for i, each in enumerate(outputs) if each is part)
    if int_attribute(node, "axis", 0) not in (-1, rank - 1) or 2 * sizes[own] <= weight.shape[0]:
        return False
    value, columns = constant_value(graph, weight), np.arange(sum(sizes))
    first = sum(sizes[:own])
    inside = (columns >= first) & (columns < first + sizes[own])

    def computed(chosen: np.ndarray, stem: str) -> Tensor:
        return write(shapes, "MatMul", [x, graph.constant(f"{stem}_columns", value[:, chosen])], stem)

    graph.replace(part, computed(inside, f"{part.name}_own"))
    rest, kept = computed(~inside, f"{whole.name}_rest"), [i for i in range(len(outputs)) if i != own]
    parts = [graph.variable(outputs[i].name) for i in kept]
    given = integers(graph, f"{whole.name}_sizes", [sizes[i] for i in kept])
    infer_node(shapes, graph.add_node("Split", [rest, given], parts, {"axis": -1}))
    for i, new in zip(kept, parts, strict=True):
        graph.replace(outputs[i], new)
    return True
