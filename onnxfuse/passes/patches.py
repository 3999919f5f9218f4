"""A convolution whose windows lie side by side is a matrix product of patches, as vision transformers read images.

With `Conv > Reshape > Transpose` a runtime computes (batch, channels, places) and turns it; the product computes
(batch, places, channels), and what follows can be fused into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxfuse.model.graph import Graph, Node, Tensor, attribute, constant_value, is_constant, op_of
from onnxfuse.passes.fold import only_reader
from onnxfuse.shapes.dims import Size, product
from onnxfuse.shapes.inference import Shapes


def patches_to_products(graph: Graph, shapes: Shapes) -> int:
    """Replace `Conv > Reshape > Transpose` whose result is (batch, places, channels); returns how many."""
    count = sum(_replace(graph, shapes, node) for node in list(graph.nodes) if op_of(node) == "Conv")
    if count:
        graph.remove_dead()
        graph.sort()
    return count


def _replace(graph: Graph, shapes: Shapes, conv: Node) -> bool:
    image, weight, *bias = conv.inputs
    found = shapes.shape(image)
    if not is_constant(weight) or found is None or len(found) != 4 or not _side_by_side(graph, conv, found):
        return False
    end = _turned(graph, shapes, conv, found)
    if end is None:
        return False
    (batch, _, height, width), (channels, depth, rows, columns) = found, weight.shape
    high, wide = height // rows, width // columns
    x = image
    # (batch depth high rows wide columns) to (batch high wide depth rows columns), four axes at a time: runtimes have
    # kernels for that
    x = _moved(graph, shapes, x, (-1, rows, wide, columns), (product((batch, depth, high)), rows, wide, columns))
    x = _moved(graph, shapes, x, (-1, depth, high * wide, rows * columns), (batch, depth, high * wide, rows * columns))
    patches = graph.constant(f"{end.name}_patches", np.array([-1, high * wide, depth * rows * columns]))
    x = _made(graph, shapes, "Reshape", [x, patches],
              (batch, high * wide, depth * rows * columns), shapes.dtype(image))  # fmt: skip
    matrix = constant_value(graph, weight).reshape(channels, -1).T
    shape = (batch, high * wide, channels)
    y = _made(graph, shapes, "MatMul", [x, graph.constant(f"{weight.name}_matrix", matrix)], shape, shapes.dtype(end))
    if bias and bias[0].name:
        y = _made(graph, shapes, "Add", [y, bias[0]], shape, shapes.dtype(end))
    return graph.replace(end, y)


def _side_by_side(graph: Graph, conv: Node, image: Sequence[Size]) -> bool:
    """Whether each element of the image is in one window."""
    kernel = list(conv.inputs[1].shape[2:])
    zero, one = [0] * 2 * len(kernel), [1] * len(kernel)
    asked: dict[str, Any] = {"strides": kernel, "pads": zero, "dilations": one}
    given = {name: attribute(graph, conv, name) or (zero if name == "pads" else one) for name in asked}
    sizes = zip(image[2:], kernel, strict=True)
    return (
        given == asked
        and attribute(graph, conv, "group") == 1
        and attribute(graph, conv, "auto_pad") in ("NOTSET", "VALID", None)
        and all(isinstance(size, int) and size % step == 0 for size, step in sizes)
    )


def _turned(graph: Graph, shapes: Shapes, conv: Node, image: Sequence[Size]) -> Tensor | None:
    """The transposed result of the convolution, where nothing else reads it."""
    flat = only_reader(graph, conv.outputs[0])
    turn = only_reader(graph, flat.outputs[0]) if flat is not None and op_of(flat) in ("Flatten", "Reshape") else None
    if flat is None or turn is None or op_of(turn) != "Transpose" or turn.attrs.get("perm") != [0, 2, 1]:
        return None
    shape = shapes.shape(flat.outputs[0])
    same = shape is not None and shape[:2] == (image[0], conv.inputs[1].shape[0])
    return turn.outputs[0] if same else None


def _moved(graph: Graph, shapes: Shapes, x: Tensor, target: Sequence[int], shape: Sequence[Size]) -> Tensor:
    """The tensor as four axes, the middle two of which change places."""
    dtype = shapes.dtype(x)
    x = _made(graph, shapes, "Reshape", [x, graph.constant(f"{x.name}_shape", np.array(target))], shape, dtype)
    first, a, b, last = shape
    return _made(graph, shapes, "Transpose", [x], (first, b, a, last), dtype, perm=[0, 2, 1, 3])


def _made(
    graph: Graph, shapes: Shapes, op: str, inputs: list[Tensor], shape: Sequence[Size], dtype: int, **attributes: Any
) -> Tensor:
    y = graph.variable(f"{op}_of_patches")
    shapes.put(y, shape, dtype)
    graph.add(op, inputs, [y], **attributes)
    return y
