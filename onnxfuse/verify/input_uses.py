"""Find out how a model uses the values of its inputs: as indices of table rows, as masks, lengths, sizes or bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import onnx
import onnx.inliner
import onnx.numpy_helper
from onnx import TensorProto

from onnxfuse.algebra.operators import COMPARISONS, ORDERINGS, VIEWS
from onnxfuse.ir.dtypes import FLOATS
from onnxfuse.ir.protos import nodes, stored_integers

REORDERING_OPS: Final = VIEWS | {"Cast", "Clip", "Gather", "Slice"}
# Operators that compute a length from a length, such as a number of frames from a number of samples.
ARITHMETIC_OPS: Final = {
    "Add", "Ceil", "Concat", "Div", "Floor", "Max", "Min", "Mod", "Mul", "ReduceMax", "ReduceMin", "Round", "Sub",
}  # fmt: skip
AFTER_SUMS: Final = {"Div", "Max", "Min", "Mul", "Where"}  # allowed between the Add of a mask and the Softmax
LOGICAL_OPS: Final = {*COMPARISONS, "And", "Not", "Or"}
COUNTING_OPS: Final = {"CumSum", "NonZero", "Range"}  # old exporters write Range as NonZero of ones
Bound: TypeAlias = Literal["low", "high"]
INTEGERS: Final = {
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
}  # fmt: skip
MASK_DTYPES: Final = {TensorProto.BOOL, *FLOATS}  # dtypes of the Cast that follows a mask of integers

# Pairs of an operator and the index of its input that holds lengths, each from 1 to the size of an axis.
LENGTH_INPUTS: Final = {
    ("Attention", 6), ("Div", 1), ("GRU", 4), ("LSTM", 4), ("Mod", 1), ("OneHot", 1), ("RNN", 4), ("Range", 1),
    ("ReverseSequence", 1), ("Slice", 2),
}  # fmt: skip
# Pairs of an operator and the index of its input that holds small positive numbers: sizes of a result, steps, or
# numbers of iterations.
SIZE_INPUTS: Final = {
    ("BlackmanWindow", 0), ("CenterCropPad", 1), ("ConstantOfShape", 0), ("DFT", 1), ("Expand", 1),
    ("HammingWindow", 0), ("HannWindow", 0), ("Loop", 0), ("Range", 0), ("Range", 2), ("Reshape", 1), ("Resize", 3),
    ("STFT", 1), ("STFT", 3), ("Slice", 1), ("Slice", 4), ("Split", 1), ("Tile", 1), ("TopK", 1),
}  # fmt: skip
# Maps an operator and the index of its input that holds row numbers to the index of its input that holds the table.
TABLES: Final = {
    ("EmbedLayerNormalization", 0): 2, ("EmbedLayerNormalization", 1): 4, ("GatherBlockQuantized", 1): 0,
    ("GroupQueryAttention", 9): 7,
}  # fmt: skip
# Input 5 of GroupQueryAttention holds the number of keys of each sequence minus 1; input 6 holds the number of keys of
# the longest sequence.
KEY_COUNTS: Final = {("GroupQueryAttention", 5): -1, ("GroupQueryAttention", 6): 0}
QUERY, PAST_KEY = 0, 3  # inputs of GroupQueryAttention
BOUND_INPUTS: Final[Mapping[tuple[str, int], Bound]] = {("Clip", 1): "low", ("Clip", 2): "high"}
# Operators that bound a tensor by another input of one element; the order of the two inputs does not matter.
BOUNDING_OPS: Final[Mapping[str, Bound]] = {"Max": "low", "Min": "high"}
OPPOSITE: Final[Mapping[Bound, Bound]] = {"low": "high", "high": "low"}


@dataclass(frozen=True)
class Use:
    """How a model uses the values of an input; the kinds "low" and "high" exist for inputs of any dtype.

    kind "row"     the values index a table of `number` rows
    kind "mask"    the values are compared, or cast to floats
    kind "length"  the values count elements along an axis
    kind "size"    the values are the size of a result, or a step
    kind "equal"   the model compares the values with the constant `number`, such as a sampling rate
    kind "keys"    the values are the number of past and new keys of a GroupQueryAttention, plus `number`
    kind "ones"    the values are a mask with as many ones as a GroupQueryAttention has past and new keys
    kind "low"     the values are the lower bound to which a tensor is clipped
    kind "high"    the values are the upper bound to which a tensor is clipped

    For "keys" and "ones", the sizes of `axes` add up to the number of keys.
    """

    kind: Literal["row", "mask", "length", "size", "equal", "keys", "ones", "low", "high"]
    number: int = 0
    axes: tuple[tuple[str, int], ...] = ()  # (name of an input of the model, axis)


@dataclass(frozen=True)
class Links:
    """Tables of a graph, its subgraphs and functions: consumers and producers of tensors, shapes, and constants."""

    consumers: Mapping[str, list[tuple[onnx.NodeProto, int]]]
    producers: Mapping[str, onnx.NodeProto]
    shapes: Mapping[str, tuple[int, ...]]
    constants: Mapping[str, TensorProto]

    def is_input(self, name: str) -> bool:
        """Return whether a tensor is an input of the model."""
        return name not in self.producers and name not in self.constants


def integer_uses(model: onnx.ModelProto) -> dict[str, Use]:
    """Return the uses of integer inputs by name; inputs with an unrecognised use are left out."""
    links = links_of(model)
    inputs = [v for v in model.graph.input if v.type.tensor_type.elem_type in INTEGERS]
    found = {value.name: _use(value, links) for value in inputs if value.name not in links.constants}
    return {name: use for name, use in found.items() if use is not None}


def trip_counts(model: onnx.ModelProto) -> set[str]:
    """Return the names of inputs that a Loop reads, directly or through views and Casts, as its trip count."""
    links = links_of(model)
    return {value.name for value in model.graph.input if _counts_trips(value.name, links)}


def _counts_trips(name: str, links: Links) -> bool:
    readers = links.consumers.get(name, ())
    return any(index == 0 and node.op_type == "Loop" for node, index in readers) or any(
        _counts_trips(node.output[0], links)
        for node, index in readers
        if index == 0 and (node.op_type in VIEWS or node.op_type == "Cast")
    )


def bound_uses(model: onnx.ModelProto) -> dict[str, Use]:
    """Return the uses "low" and "high" of inputs by name.

    A Clip reads bounds.  A Max or Min reads an input of one element as a bound, if none of its other operands is such
    an input or a constant.  These operators read the input directly, or through views, Casts and Negs.
    """
    links = links_of(model)
    values = [value for value in model.graph.input if value.name not in links.constants]
    single = {v.name for v in values if all(dim.dim_value == 1 for dim in v.type.tensor_type.shape.dim)}
    constants = {name for name, node in links.producers.items() if node.op_type == "Constant"} | links.constants.keys()
    found = ((value.name, next(_bounds(value.name, links, single, constants), None)) for value in values)
    return {name: Use(bound) for name, bound in found if bound is not None}


def _bounds(name: str, links: Links, single: Set[str], constants: Set[str]) -> Iterator[Bound]:
    """Yield the use "low" or "high" for each node that reads the tensor `name` as a bound.

    single     the model's inputs of one element, and those views of them that the search has passed
    constants  the names of constants
    """
    for node, index in links.consumers.get(name, ()):
        others = {*node.input} - {name}
        if (node.op_type, index) in BOUND_INPUTS:
            yield BOUND_INPUTS[node.op_type, index]
        elif node.op_type in BOUNDING_OPS and name in single and others.isdisjoint(single | constants):
            yield BOUNDING_OPS[node.op_type]
        elif index == 0 and (node.op_type in VIEWS or node.op_type in ("Cast", "Neg")):
            made = {node.output[0]} if name in single else set()
            found = _bounds(node.output[0], links, single | made, constants)
            yield from (OPPOSITE[each] for each in found) if node.op_type == "Neg" else found


def added_to_scores(model: onnx.ModelProto) -> set[str]:
    """Return the floating-point inputs that are added to a Softmax's input, as masks and position biases are."""
    inputs = {v.name for v in model.graph.input if v.type.tensor_type.elem_type in FLOATS}
    return added_to_scores_by(nodes(_without_weights(model)), inputs) if inputs else set()


def added_to_scores_by(computing: Iterable[onnx.NodeProto], names: Iterable[str]) -> set[str]:
    """Return the tensors in `names` that the nodes `computing` add to the input of a Softmax in `computing`."""
    consumers = _consumers(computing)
    return {name for name in names if _is_added_to_scores(name, consumers)}


def _consumers(computing: Iterable[onnx.NodeProto]) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
    """Map the name of each tensor to the (node, input index) pairs that read it."""
    found: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in computing:
        for index, name in enumerate(node.input):
            found.setdefault(name, []).append((node, index))
    return found


def _is_added_to_scores(name: str, consumers: Mapping[str, Sequence[tuple[onnx.NodeProto, int]]]) -> bool:
    """Return whether a tensor, or a view of it, is added to the input of a Softmax.

    Only views, sums and operators of AFTER_SUMS are allowed between the Add and the Softmax.
    """
    work, seen = [(name, False)], {(name, False)}
    while work:
        tensor, is_added = work.pop()
        for node, index in consumers.get(tensor, ()):
            if node.op_type == "Softmax" and is_added:
                return True
            adds = node.op_type == "Add" or (node.op_type == "Sub" and index == 0)
            goes_on = (
                adds
                or (index == 0 and node.op_type in REORDERING_OPS)
                or (is_added and node.op_type in AFTER_SUMS and (index > 0 or node.op_type != "Where"))
            )
            found = [(output, is_added or adds) for output in node.output] if goes_on else []
            work += [each for each in found if each not in seen]
            seen.update(found)
    return False


def links_of(model: onnx.ModelProto) -> Links:
    """Return the consumers, producers, shapes and constants of a model whose functions are inlined."""
    graph = _without_weights(model)
    constants = {t.name: t for t in model.graph.initializer}
    shapes = {name: tuple(t.dims) for name, t in constants.items()}
    producers: dict[str, onnx.NodeProto] = {}
    for node in nodes(graph):
        tensor = _tensor_of_constant(node) if node.op_type == "Constant" else None
        if tensor is not None:
            shapes[node.output[0]], constants[node.output[0]] = tuple(tensor.dims), tensor
        elif node.op_type in ("Cast", "DequantizeLinear", "Identity") and node.input[0] in shapes:
            shapes[node.output[0]] = shapes[node.input[0]]
        producers.update((name, node) for name in node.output)
    return Links(_consumers(nodes(graph)), producers, shapes, constants)


def _use(value: onnx.ValueInfoProto, links: Links) -> Use | None:
    dims = value.type.tensor_type.shape.dim
    few = len(dims) < 2 or dims[-1].dim_value == 1  # one number, or one per batch element
    found = list(_uses(value.name, links))
    if counts := [use for use in found if use.kind in ("keys", "ones")]:
        return counts[0]
    rows = [use.number for use in found if use.kind == "row"]
    if rows:
        return Use("row", min(rows))
    kinds = {use.kind: use for use in found}
    order = ("equal", "length", "size", "mask") if few else ("mask", "length", "size")
    return next((kinds[kind] for kind in order if kind in kinds), None)


def _uses(name: str, links: Links) -> Iterator[Use]:
    """Yield the uses of a tensor's values by its consumers; lengths are followed through arithmetic, too."""
    work, seen = [(name, True)], {name}
    while work:
        tensor, unchanged = work.pop()
        for node, index in links.consumers.get(tensor, ()):
            numbers = {a.name: a.i for a in node.attribute}
            table = _table_rows(node, index, numbers, links) if unchanged else None
            if table is not None:
                yield Use("row", table)
            elif (node.op_type, index) in KEY_COUNTS and unchanged:
                yield Use("keys", KEY_COUNTS[node.op_type, index], tuple(axes_of_keys(node, links)))
            elif node.op_type == "ReduceSum" and index == 0 and _counts_keys(node.output[0], links):
                yield Use("ones")
            elif (node.op_type, index) in LENGTH_INPUTS or _compares_with_range(node, index, links):
                yield Use("length")
            elif (node.op_type, index) in SIZE_INPUTS:
                yield Use("size")
            elif node.op_type in LOGICAL_OPS:
                constant = _constant(node.input[1 - index], links) if node.op_type == "Equal" else 0
                yield Use("equal", constant) if constant and unchanged else Use("mask")
            elif node.op_type == "Cast" and numbers["to"] in MASK_DTYPES and unchanged:
                yield Use("mask")
            reorders = (index == 0 and node.op_type in REORDERING_OPS) or (index > 0 and node.op_type == "Where")
            if reorders or node.op_type in ARITHMETIC_OPS:
                still = unchanged and reorders
                work += [(o, still) for o in node.output if o not in seen]
                seen.update(node.output)


def _table_rows(node: onnx.NodeProto, index: int, numbers: Mapping[str, int], links: Links) -> int | None:
    """Return the number of rows of the table that the node's input `index` indexes; None if it indexes no table."""
    if node.op_type in ("Gather", "GatherElements") and index == 1:
        name, axis = node.input[0], numbers.get("axis", 0)
    elif (node.op_type, index) in TABLES:
        name, axis = node.input[TABLES[node.op_type, index]], 0
    else:
        return None
    table = links.shapes.get(name)
    return table[axis] if table and axis < len(table) else None


def axes_of_keys(node: onnx.NodeProto, links: Links) -> Iterator[tuple[str, int]]:
    """Yield the (model input, axis) pairs whose size is a GroupQueryAttention's number of past or new keys."""
    past = node.input[PAST_KEY] if len(node.input) > PAST_KEY else ""
    if past and links.is_input(past):
        yield past, 2
    work, seen = [node.input[QUERY]], set[str]()
    while work:
        name = work.pop(0)
        if name and links.is_input(name):
            yield name, 1
            return
        seen.add(name)
        producer = links.producers.get(name)
        work += [each for each in producer.input if each not in seen] if producer is not None else []


def _counts_keys(name: str, links: Links) -> bool:
    """Return whether GroupQueryAttention reads a tensor, or a number computed from it, as a number of keys."""
    work, seen = [name], {name}
    while work:
        for node, index in links.consumers.get(work.pop(), ()):
            if (node.op_type, index) in KEY_COUNTS:
                return True
            if node.op_type in REORDERING_OPS | ARITHMETIC_OPS:
                work += [each for each in node.output if each not in seen]
                seen.update(node.output)
    return False


def _compares_with_range(node: onnx.NodeProto, index: int, links: Links) -> bool:
    """Return whether the node compares its input `index` with 0, 1, 2, ..., as models do to make masks from lengths."""
    if node.op_type not in ORDERINGS:
        return False
    work, seen = [node.input[1 - index]], set[str]()
    while work:
        name = work.pop()
        producer = links.producers.get(name)
        if name in seen:
            continue
        seen.add(name)
        if (producer is not None and producer.op_type in COUNTING_OPS) or _counts(links.constants.get(name)):
            return True
        if producer is not None and producer.op_type in REORDERING_OPS | ARITHMETIC_OPS:
            work += producer.input
    return False


def _counts(constant: TensorProto | None) -> bool:
    """Return whether a constant is 0, 1, 2, ... along its last axis."""
    values = stored_integers(constant)
    return values.ndim > 0 and values.shape[-1] > 1 and bool((values == range(values.shape[-1])).all())


def _constant(name: str, links: Links) -> int:
    """Return the value of a constant of one integer; 0 for anything else."""
    values = stored_integers(links.constants.get(name))
    return int(values.reshape(-1)[0]) if values.size == 1 else 0


def _tensor_of_constant(node: onnx.NodeProto) -> TensorProto | None:
    """Return the value of a Constant node as a tensor.

    Returns None for values other than tensors and integers, because they say nothing about how inputs are used.
    """
    for attribute in node.attribute:
        if attribute.name == "value":
            tensor: TensorProto = attribute.t
            return tensor
        if attribute.name == "value_int":
            return onnx.numpy_helper.from_array(np.asarray(attribute.i))
        if attribute.name == "value_ints":
            return onnx.numpy_helper.from_array(np.asarray(attribute.ints, np.int64))
    return None


def _without_weights(model: onnx.ModelProto) -> onnx.GraphProto:
    """Return a model's graph; if the model has functions, a copy with these inlined and without initializers."""
    if not model.functions:
        return model.graph
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    for field in ("node", "input", "output"):
        getattr(light.graph, field).extend(getattr(model.graph, field))
    return onnx.inliner.inline_local_functions(light).graph
