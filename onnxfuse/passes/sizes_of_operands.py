"""Read the sizes of computed tensors from operands instead, because a tensor that is read cannot stay inside a fusion.

An elementwise operator takes each size from an operand, a matrix product from its left or right operand, and so on.
Sizes are followed in this way towards the graph's inputs, as far as they are known to be equal.  A mask that is built
from the sizes of the scores then does not need the scores, which stay inside the attention, and equal masks of all
layers become one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Final, TypeAlias

import numpy as np

from onnxfuse.algebra.operators import REGROUPING, SLICING, VIEWS
from onnxfuse.algebra.sizes import Size, name_of
from onnxfuse.analysis.scores import is_computed_from_product
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.shape_rules import SHAPE_RULES
from onnxfuse.ir.attributes import attribute_or_input, int_attribute, perm_of
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer
from onnxfuse.passes.emit import integers, write
from onnxfuse.passes.graph_pass import graph_pass

RANGE_OPSET: Final = 15  # from this opset on, Shape can give the sizes of some axes only
MIN_RANK: Final = 3  # lowest rank of scores
# Operators that keep the order of the axes, and the sizes of most axes.
KEEPING_ORDER: Final = frozenset({"Concat", "Pad", "Slice", "Split"})
BROADCASTING: Final = frozenset(op for op, rule in SHAPE_RULES.items() if rule is SHAPE_RULES["Add"])
SAME_SHAPE: Final = frozenset(op for op, rule in SHAPE_RULES.items() if rule is SHAPE_RULES["Softmax"])
Origin: TypeAlias = "tuple[Tensor, int] | int"  # a size: a tensor and its axis, or a number


@graph_pass()
def sizes_of_operands(graph: Graph, shapes: ShapeInfo) -> int:
    """Replace the Shape of a product or elementwise result by the Shape of the tensor that its sizes come from.

    The Shape of a view stays: otherwise the view could be composed with others into a view whose target is computed.
    But if a Reshape or an Expand of the view has its target from that Shape, the target is computed anyway.  Sizes
    of slices, and of tensors whose Shape is cast, as TensorFlow does, are also read from graph inputs, and those of
    scores from any operand.
    Returns the number of sizes, or groups of sizes, that are now read from another tensor.
    """
    origins = Origins(shapes)
    found = [node for node in graph.nodes if op_of(node) == "Shape"]
    return sum(_read_elsewhere(graph, shapes, origins, node) for node in found if producer(node.inputs[0]) is not None)


def _is_inside(node: Node | None) -> bool:
    """Return whether the node's result can be inside a fusion."""
    return node is not None and (op_of(node) in ("Concat", "MatMul") or op_of(node) in BROADCASTING | SAME_SHAPE)


def _is_target_of_own(shape: Node) -> bool:
    """Return whether a Shape reads a view, and a Reshape or Expand of this view uses the sizes in its target."""
    node = producer(shape.inputs[0])
    if node is None or op_of(node) not in VIEWS:
        return False
    targets = [each.inputs[1] for each in consumers(shape.inputs[0]) if op_of(each) in ("Reshape", "Expand")]
    joined = [each for target in targets for each in target.inputs if op_of(each) == "Concat"]
    return any(shape.outputs[0] is size for each in joined for size in each.inputs)


def _read_elsewhere(graph: Graph, shapes: ShapeInfo, origins: Origins, shape: Node) -> int:
    """Replace a Shape by Shapes of other tensors, separately for each consumer; return the number of replacements."""
    tensor, whole = shape.inputs[0], shape.outputs[0]
    sizes = shapes.shape(tensor)
    if sizes is None:
        return 0
    axes = [*range(len(sizes))][int_attribute(shape, "start", 0) : int_attribute(shape, "end", len(sizes))]
    found = [origins.of(tensor, axis) for axis in axes]
    of_scores = len(sizes) >= MIN_RANK and is_computed_from_product(tensor, BROADCASTING | SAME_SHAPE)
    maker = producer(tensor)
    is_inside, is_slice = _is_inside(maker) or _is_target_of_own(shape), maker is not None and op_of(maker) in SLICING
    readers = [*_readers(graph, whole, len(axes))]
    count = 0
    for reader, picked, cast in readers:
        sources = [found[i] for i in picked[0]] if picked is not None else []
        are_of_inputs = all(map(_is_of_input, sources)) and (cast is not None or is_slice)
        if picked is not None and (are_of_inputs or (is_inside and (cast is None or of_scores))):
            made = _written(shapes, tensor, sources, reader.outputs[0], picked[1], of_scores)
            if made is not None and cast is not None:
                made = write(shapes, "Cast", [made], f"{reader.outputs[0].name}_cast", cast.attrs)
            count += made is not None and graph.replace(reader.outputs[0], made)
    if is_inside and (graph.is_kept(whole) or any(picked is None for _, picked, _ in readers)):
        made = _written(shapes, tensor, found, whole, 1, of_scores)
        count += made is not None and graph.replace(whole, made)
    return count


def _is_of_input(origin: Origin) -> bool:
    """Return whether a size is a number, or that of a graph input."""
    return isinstance(origin, int) or producer(origin[0]) is None


def _readers(
    graph: Graph, whole: Tensor, count: int
) -> Iterator[tuple[Node, tuple[list[int], int] | None, Node | None]]:
    """Yield each consumer of a Shape, what it takes of the sizes, and the Cast of all sizes that it reads, if any.

    TensorFlow casts each Shape to int32.  Such a Cast is followed where each of its consumers takes some of the sizes.
    """
    for reader in consumers(whole):
        is_followed = op_of(reader) == "Cast" and not graph.is_kept(reader.outputs[0])
        taken = [(each, _picked(graph, each, count)) for each in consumers(reader.outputs[0])] if is_followed else []
        if taken and all(picked is not None for _, picked in taken):
            yield from ((each, picked, reader) for each, picked in taken)
        else:
            yield reader, _picked(graph, reader, count), None


def _picked(graph: Graph, reader: Node, count: int) -> tuple[list[int], int] | None:
    """Return the indices of the sizes that a Gather or Slice takes, and its result's rank; None for other consumers."""
    if op_of(reader) == "Gather" and is_constant(reader.inputs[1]):
        indices = constant_value(graph, reader.inputs[1])
        if indices.ndim < 2 and all(-count <= index < count for index in indices.reshape(-1).tolist()):
            return indices.reshape(-1).tolist(), indices.ndim
    if op_of(reader) == "Slice":
        bounds = [attribute_or_input(graph, reader, name) for name in ("starts", "ends", "steps")]
        numbers = [bound[0] for bound in bounds if isinstance(bound, list) and len(bound) == 1]
        known = [number for number in numbers if isinstance(number, int)]
        if len(known) == len(bounds) - (bounds[2] is None):
            return [*range(count)][slice(*known)], 1
    return None


def _written(
    shapes: ShapeInfo, tensor: Tensor, picked: Sequence[Origin], sizes: Tensor, rank: int, of_scores: bool
) -> Tensor | None:
    """Return a tensor of rank 0 or 1 that holds the sizes `picked`, computed by Shapes of other tensors than `tensor`.

    Returns None if `tensor` itself would have to be read.  Without `of_scores`, also returns None if several tensors
    would have to be read, or if a Shape would become a Shape and a Gather.
    """
    maker = producer(sizes)
    replaces_shape = maker is not None and op_of(maker) == "Shape"
    picked = _of_one_tensor(shapes, picked)
    runs = [[*run] for _, run in groupby(picked, key=lambda each: None if isinstance(each, int) else id(each[0]))]
    sources = [run[0][0] for run in runs if not isinstance(run[0], int)]
    if not sources or any(source is tensor for source in sources) or (len(runs) > 1 and not of_scores):
        return None
    if replaces_shape and not of_scores and not _is_range(shapes, runs[0]):
        return None  # this would add a Gather to the graph
    stem = f"{sizes.name}_of_operand"
    parts = [_run(shapes, run, stem, rank) for run in runs]
    return parts[0] if len(parts) == 1 else write(shapes, "Concat", parts, stem, {"axis": 0})


def _of_one_tensor(shapes: ShapeInfo, picked: Sequence[Origin]) -> Sequence[Origin]:
    """Return sizes that are the whole shape of one tensor as axes of this tensor; return other sizes unchanged.

    Sizes of the shape that are given as numbers become axes, too.
    """
    source = next((each[0] for each in picked if not isinstance(each, int)), None)
    shape = None if source is None else shapes.shape(source)
    if source is None or shape is None or len(shape) != len(picked):
        return picked
    pairs = zip(picked, shape, strict=True)
    is_whole = all(
        each == size if isinstance(each, int) else each[0] is source and each[1] == axis
        for axis, (each, size) in enumerate(pairs)
    )
    return [(source, axis) for axis in range(len(shape))] if is_whole else picked


def _run(shapes: ShapeInfo, run: Sequence[Origin], stem: str, rank: int) -> Tensor:
    """Write a run of sizes as a tensor; a run has either only numbers, or only sizes of a single tensor."""
    numbers = [each for each in run if isinstance(each, int)]
    if numbers:
        return integers(shapes.graph, f"{stem}_numbers", numbers)
    (source, *_), axes = zip(*(each for each in run if not isinstance(each, int)), strict=True)
    count = shapes.rank(source) or 0
    is_whole = [*axes] == [*range(count)]
    if rank == 1 and not is_whole and _is_range(shapes, run):
        return write(shapes, "Shape", [source], stem, {"start": axes[0], "end": axes[-1] + 1})
    whole = write(shapes, "Shape", [source], f"{stem}_shape")
    if rank == 1 and is_whole:
        return whole
    index = shapes.graph.constant(f"{stem}_axis", np.array(axes, np.int64) if rank else np.array(axes[0], np.int64))
    return write(shapes, "Gather", [whole, index], stem, {"axis": 0})


def _is_range(shapes: ShapeInfo, run: Sequence[Origin]) -> bool:
    """Return whether one Shape gives the sizes: they are a whole shape, or adjacent axes that a Shape can select."""
    found = [each for each in run if not isinstance(each, int)]
    axes = [axis for _, axis in found]
    is_whole = axes == [*range(shapes.rank(found[0][0]) or 0)]
    return is_whole or (shapes.graph.opset >= RANGE_OPSET and axes == [*range(axes[0], axes[0] + len(axes))])


@dataclass
class Origins:
    """Finds, for the size of a tensor's axis, the earliest tensor and axis that give it; results are cached."""

    shapes: ShapeInfo
    _known: dict[tuple[int, int], Origin] = field(default_factory=dict)  # by the tensor's id and axis

    def of(self, tensor: Tensor, axis: int) -> Origin:
        """Return the tensor nearest to the graph's inputs that gives a size, and its axis; or a constant size.

        If an input of the graph has a size of the same name, it is returned in place of any other tensor.
        """
        path: list[tuple[int, int]] = []
        while True:
            key = id(tensor), axis
            known, shape = self._known.get(key), self.shapes.shape(tensor)
            size = None if shape is None else shape[axis]
            found = None if known is not None or size is None else self._step(tensor, axis, size)
            path.append(key)
            if found is None or isinstance(size, int):
                break
            tensor, axis = found
        end = known or (size if isinstance(size, int) else (tensor, axis))
        if not isinstance(end, int) and producer(end[0]) is not None:
            end = self._of_inputs.get(name_of(size) or "", end)
        self._known.update(dict.fromkeys(path, end))
        return end

    @cached_property
    def _of_inputs(self) -> dict[str, tuple[Tensor, int]]:
        """The named sizes of the graph's inputs, each with an input and its axis."""
        found: dict[str, tuple[Tensor, int]] = {}
        for tensor in self.shapes.graph.linked.inputs:
            for axis, size in enumerate(self.shapes.shape(tensor) or ()):
                if not isinstance(size, int) and (name := name_of(size)) is not None:
                    found.setdefault(name, (tensor, axis))
        return found

    def _step(self, tensor: Tensor, axis: int, size: Size) -> tuple[Tensor, int] | None:
        """Return the operand, and its axis, that gives an axis of a computed tensor its size; None if none does."""
        node = producer(tensor)
        candidates = () if node is None else _candidates(self.shapes, node, axis, self.shapes.rank(tensor) or 0)
        for operand, index in candidates:
            shape = self.shapes.shape(operand)
            if not is_constant(operand) and shape is not None and 0 <= index < len(shape) and shape[index] == size:
                return operand, index
        return None


def _candidates(shapes: ShapeInfo, node: Node, axis: int, rank: int) -> Iterator[tuple[Tensor, int]]:
    """Yield operands and their axes that could give an axis of the result its size.

    The caller takes the first axis whose size is equal.  `rank` is the rank of the result.  If an operand lacks the
    axis, the yielded index is out of range.
    """
    op, first, behind = op_of(node), node.inputs[0] if node.inputs else None, axis - rank

    def aligned(tensor: Tensor) -> tuple[Tensor, int]:
        return tensor, (shapes.rank(tensor) or 0) + behind

    if first is None:
        return
    if op in BROADCASTING:
        yield from map(aligned, node.inputs)
    elif op in SAME_SHAPE or op in KEEPING_ORDER or op == "LayerNormalization":
        yield first, axis
    elif op == "Expand":
        yield aligned(first)
    elif op == "GatherElements":
        yield node.inputs[1], axis
    elif op == "Transpose":
        yield first, perm_of(node, rank)[axis]
    elif op in REGROUPING:
        yield first, axis
        yield aligned(first)
        yield from ((first, i) for i in range(shapes.rank(first) or 0))
    elif op == "MatMul" and min(shapes.rank(each) or 0 for each in node.inputs) > 1:
        operands = {-1: node.inputs[1:], -2: node.inputs[:1]}.get(behind, node.inputs)
        yield from map(aligned, operands)
    elif op == "Gather":
        yield from _of_gather(shapes, node, axis)


def _of_gather(shapes: ShapeInfo, node: Node, axis: int) -> Iterator[tuple[Tensor, int]]:
    data, indices = node.inputs
    gathered, count = int_attribute(node, "axis", 0) % (shapes.rank(data) or 1), shapes.rank(indices)
    if count is None:
        return
    if axis < gathered:
        yield data, axis
    elif axis < gathered + count:
        yield indices, axis - gathered
    else:
        yield data, axis - count + 1


def origin_of_size(shapes: ShapeInfo, tensor: Tensor, axis: int) -> tuple[Tensor, int]:
    """Return the tensor and axis that a dynamic size comes from; a constant size comes from the tensor itself."""
    found = Origins(shapes).of(tensor, axis)
    return (tensor, axis) if isinstance(found, int) else found
