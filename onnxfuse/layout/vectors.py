"""Permute vectors with one or two integers per axis, such as sizes and pads, to the order of channels-last axes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from onnx import helper

from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Tensor, is_constant, op_of, producer
from onnxfuse.layout.writer import Writer

Element: TypeAlias = "int | tuple[Tensor, int]"  # a number, or (tensor, index) for an element of a tensor


def in_order(
    writer: Writer, vector: Tensor, places: Sequence[int | None], known: Mapping[int, int] = MappingProxyType({})
) -> Tensor:
    """Return the elements of a vector at the indices `places`, with 0 where an index is None.

    `known` maps indices to numbers that are written instead of the vector's elements.  Elements of a Concat's result
    are taken from the tensors that it joins; this adds no nodes for tensors that are used whole.
    """
    key = vector.name, tuple(places), tuple(known.items())
    if key not in writer.vectors:
        writer.vectors[key] = _in_order(writer, vector, places, known)
    return writer.vectors[key]


def _in_order(writer: Writer, vector: Tensor, places: Sequence[int | None], known: Mapping[int, int]) -> Tensor:
    elements = _elements(writer, vector, max((place for place in places if place is not None), default=0) + 1)
    taken: list[Element] = [0 if place is None else known.get(place, elements[place]) for place in places]
    parts = [_part(writer, vector, list(run)) for _, run in itertools.groupby(taken, _source)]
    return parts[0] if len(parts) == 1 else writer.computed_by("Concat", parts, f"{vector.name}/nhwc", {"axis": 0})


def _elements(writer: Writer, vector: Tensor, count: int) -> list[Element]:
    """Return the first `count` or more elements of a vector.

    Elements that a Concat or Gather copies are given as elements of its inputs.
    """
    if is_constant(vector):
        return [int(number) for number in constant_value(writer.graph, vector).tolist()]
    node = producer(vector)
    if node is not None and op_of(node) == "Gather" and is_constant(indices := node.inputs[1]):
        places = constant_value(writer.graph, indices)
        if places.ndim == 1 and (places >= 0).all() and writer.shapes.rank(node.inputs[0]) == 1:
            return [(node.inputs[0], int(place)) for place in places]
    if node is not None and op_of(node) == "Concat":
        lengths = [(writer.shapes.shape(part) or (None,))[0] for part in node.inputs]
        known = [length for length in lengths if isinstance(length, int)]
        if len(known) == len(lengths) and sum(known) >= count:
            parts = zip(node.inputs, known, strict=True)
            return [each for part, length in parts for each in _elements(writer, part, length)]
    return [(vector, place) for place in range(count)]


def _source(element: Element) -> str:
    return "" if isinstance(element, int) else element[0].name


def _part(writer: Writer, vector: Tensor, run: Sequence[Element]) -> Tensor:
    """Return a tensor with the elements of `run`, which are all of one tensor, or all numbers."""
    pairs = [each for each in run if not isinstance(each, int)]
    if not pairs:
        dtype = helper.tensor_dtype_to_np_dtype(writer.shapes.dtype(vector))
        return writer.graph.constant(f"{vector.name}/numbers", np.array(run, dtype))
    source, places = pairs[0][0], [place for _, place in pairs]
    if writer.shapes.shape(source) == (len(places),) and places == list(range(len(places))):
        return source
    stored = writer.graph.constant(f"{source.name}/order", np.array(places, np.int64))
    return writer.computed_by("Gather", [source, stored], f"{source.name}/nhwc", {"axis": 0})
