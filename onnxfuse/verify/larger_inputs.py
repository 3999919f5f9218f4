"""Choose larger inputs for a model with an output that hides errors because it is constant, all NaN or the like.

A draw is a set of dim sizes, with a function that makes random inputs of these sizes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import onnx

from onnxfuse.algebra.sizes import Dim, Shape, Size, evaluate
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.execution_order import reads
from onnxfuse.ir.extract import ancestors
from onnxfuse.verify.requested_shapes import Draw
from onnxfuse.verify.required_sizes import inferred_shapes

MAX_ELEMENTS_GIVEN: Final = 2**15  # elements per input: a second of audio, 1024 tokens
# Elements of the largest computed tensor: room for the scores of twelve heads over 512 tokens.  Comparing an output
# with four times as many elements takes 5 seconds and 1 GB, and a product of all audio samples with all others has
# 2^30 elements.
MAX_ELEMENTS_COMPUTED: Final = 2**22


def depends_on(model: onnx.ModelProto, output: str, names: Collection[str]) -> bool:
    """Return whether an output of the model is one of the tensors `names`, or computed from one."""
    nodes = ancestors(model.graph.node, [output])
    return output in names or any(name in names for node in nodes for name in reads(node))


def largest_first(
    model: onnx.ModelProto, folder: Path | None, draws: Iterable[Draw]
) -> Iterator[tuple[dict[str, int], dict[str, Array]]]:
    """Yield the dim sizes and the random inputs of the draws, the largest first.

    Draws that are too large for fast runs are left out.  Tensors whose shapes the inputs do not determine are ignored.
    """
    made = [(draw.sizes, draw.make()) for draw in draws]
    made = [each for each in made if all(array.size <= MAX_ELEMENTS_GIVEN for array in each[1].values())]
    shapes = inferred_shapes(model, folder) if made else None
    for sizes, feeds in reversed(made):
        if shapes is None or _most_elements(shapes, feeds) <= MAX_ELEMENTS_COMPUTED:
            yield sizes, feeds


def _most_elements(shapes: ShapeInfo, feeds: Mapping[str, Array]) -> int:
    """Return the number of elements of the largest tensor in the graph, if the model runs on these inputs."""
    tensors = {t.name: t for node in shapes.graph.nodes for t in (*node.inputs, *node.outputs)}
    found = {name: shapes.shape(tensor) for name, tensor in tensors.items()}
    sizes: dict[str, int] = {}
    for name, array in feeds.items():
        sizes.update(_named_sizes(found.get(name) or (), array.shape))
    return max((_elements(shape, sizes) for shape in {s for s in found.values() if s is not None}), default=0)


def _named_sizes(shape: Shape, given: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Yield the (symbol, size) pairs of an input's dims."""
    for size, number in zip(shape, given, strict=False):
        match size:
            case Dim(terms=(((name,), 1),)):
                yield name, number


def _elements(shape: Iterable[Size], sizes: Mapping[str, int]) -> int:
    """Return the number of elements of a shape; 0 if a size is not known."""
    try:
        return math.prod(max(0, evaluate(size, sizes)) for size in shape)
    except (KeyError, ZeroDivisionError):
        return 0
