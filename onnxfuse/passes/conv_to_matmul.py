"""Replace a convolution whose windows do not overlap, as vision transformers read images, by a product of patches.

`Conv > Reshape > Transpose` computes (batch, channels, patches) and transposes it.  The product computes
(batch, patches, channels), so that what follows can be fused into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxfuse.algebra.sizes import Size, product
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import attribute_or_input, ints_attribute
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant, op_of
from onnxfuse.passes.emit import emit
from onnxfuse.passes.graph_pass import graph_pass


@graph_pass()
def conv_to_matmul(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace each `Conv > Reshape > Transpose` whose result is (batch, patches, channels); return their number."""
    return sum(_replace(graph, shapes, node) for node in list(graph.nodes) if op_of(node) == "Conv")


def _replace(graph: Graph, shapes: ShapeInfo, conv: Node) -> bool:
    image, weight, *bias = conv.inputs
    image_shape = shapes.shape(image)
    if not is_constant(weight) or image_shape is None or not len(image_shape) == len(weight.shape) == 4:
        return False
    if not _is_patch_embedding(graph, conv, weight.shape[2:], image_shape):
        return False
    end = _transposed_output(graph, shapes, conv, (image_shape[0], weight.shape[0]))
    if end is None:
        return False
    (batch, _, height, width), (channels, depth, rows, columns) = image_shape, weight.shape
    assert isinstance(height, int) and isinstance(width, int)
    down, across = height // rows, width // columns  # the number of patches along each axis
    patches, features, dtype = down * across, depth * rows * columns, shapes.dtype(image)
    # (batch depth down rows across columns) becomes (batch down across depth rows columns) in two steps of four axes
    # each, because runtimes have kernels for the transpose of the middle two of four axes.
    x = _swap_middle_axes(
        graph, shapes, image, (-1, rows, across, columns), (product((batch, depth, down)), rows, across, columns)
    )
    x = _swap_middle_axes(
        graph, shapes, x, (-1, depth, patches, rows * columns), (batch, depth, patches, rows * columns)
    )
    target = graph.constant(f"{end.name}_patches", np.array([-1, patches, features]))
    x = _emit(graph, shapes, "Reshape", [x, target], (batch, patches, features), dtype)
    matrix = graph.constant(f"{weight.name}_matrix", constant_value(graph, weight).reshape(channels, -1).T)
    shape, dtype = (batch, patches, channels), shapes.dtype(end)
    y = _emit(graph, shapes, "MatMul", [x, matrix], shape, dtype)
    if bias and bias[0].name:
        y = _emit(graph, shapes, "Add", [y, bias[0]], shape, dtype)
    return graph.replace(end, y)


def _is_patch_embedding(graph: Graph, conv: Node, kernel: Sequence[int], image: Sequence[Size]) -> bool:
    """Return whether each element of the image is in exactly one window."""
    zeros, ones = [0] * 2 * len(kernel), [1] * len(kernel)
    required = {"strides": list(kernel), "pads": zeros, "dilations": ones}
    found = {name: attribute_or_input(graph, conv, name) or (zeros if name == "pads" else ones) for name in required}
    sizes = zip(image[2:], kernel, strict=True)
    return (
        found == required
        and attribute_or_input(graph, conv, "group") == 1
        and attribute_or_input(graph, conv, "auto_pad") in ("NOTSET", "VALID", None)
        and all(isinstance(size, int) and size % step == 0 for size, step in sizes)
    )


def _transposed_output(graph: Graph, shapes: ShapeInfo, conv: Node, first_axes: tuple[Size, Size]) -> Tensor | None:
    """Return the convolution's result as (batch, patches, channels); None if anything reads it in another form."""
    flatten = graph.sole_consumer(conv.outputs[0])
    if flatten is None or op_of(flatten) not in ("Flatten", "Reshape"):
        return None
    transpose = graph.sole_consumer(flatten.outputs[0])
    if transpose is None or op_of(transpose) != "Transpose" or ints_attribute(transpose, "perm") != [0, 2, 1]:
        return None
    shape = shapes.shape(flatten.outputs[0])
    return transpose.outputs[0] if shape is not None and shape[:2] == first_axes else None


def _swap_middle_axes(
    graph: Graph, shapes: ShapeInfo, x: Tensor, target: Sequence[int], shape: Sequence[Size]
) -> Tensor:
    """Return the tensor reshaped to four axes, of which the middle two are then transposed."""
    dtype = shapes.dtype(x)
    x = _emit(graph, shapes, "Reshape", [x, graph.constant(f"{x.name}_shape", np.array(target))], shape, dtype)
    first, second, third, last = shape
    return _emit(graph, shapes, "Transpose", [x], (first, third, second, last), dtype, {"perm": [0, 2, 1, 3]})


def _emit(
    graph: Graph,
    shapes: ShapeInfo,
    op: str,
    inputs: list[Tensor],
    shape: Sequence[Size],
    dtype: int,
    attributes: dict[str, AttributeValue] | None = None,
) -> Tensor:
    return emit(graph, shapes, op, inputs, f"{op}_of_patches", shape, dtype, attributes)
