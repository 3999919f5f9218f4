"""Static facts about every tensor: its symbolic shape, its dtype, and its value if it is small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx

from onnxfuse.algebra.bounds import equated, solved, substituted, without_min_constants
from onnxfuse.algebra.sizes import UNKNOWN, Broadcast, Dim, Shape, Size, broadcast_parts, is_known, symbol, symbols
from onnxfuse.analysis.value_infos import RecordedSize, ValueInfos
from onnxfuse.errors import ModelError, OnnxfuseError
from onnxfuse.ir.dtypes import EXACT_INTEGERS, INTEGER_RANGES, Array
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Constant, Tensor, is_constant
from onnxfuse.steps import LeftOut, left_out

PartialShape: TypeAlias = Sequence["Size | None"]  # None: an unknown dimension

MAX_VALUE_ELEMENTS = 64  # longer tensors are data, not shapes, and are not followed
MAX_EXACT_INTEGER = 2**24  # the largest floating-point constant that is read as an integer


class CannotInfer(Exception):
    """An inference rule needs a fact that is unknown; this is not an error of the model."""


@dataclass(frozen=True)
class OuterScope:
    """The facts about a subgraph's inputs and about the outer tensors that it reads, by name.

    `numbers` counts the unknown sizes, so that their names are unique across all graphs of a model.  `is_repeated` says
    that the subgraph runs several times; its recorded shapes may then hold for the first iteration only.
    """

    shapes: Mapping[str, Shape | None] = field(default_factory=dict)
    dtypes: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Array | None] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    is_repeated: bool = False


@dataclass(frozen=True)
class Learned:
    """Facts about sizes that the operators of a model imply, because they could not run otherwise.

    `not_limited` names symbols such as `Min(512, seq)` whose limit never applies.  `numbers` maps a symbol to the size
    that it must equal: usually a number, such as the channel count of a Conv's weights, sometimes another symbol.
    `unknown` maps a key, which says where an unknown size comes from, to the symbol of this size.  `related` maps an
    unknown symbol to a number that estimates it.
    """

    not_limited: frozenset[str] = frozenset()
    numbers: Mapping[str, Size] = field(default_factory=dict)
    unknown: dict[Hashable, Dim] = field(default_factory=dict)
    related: dict[str, int] = field(default_factory=dict)


class ShapeInfo:
    """Symbolic shapes, dtypes and values of a graph's tensors, by name.

    `infer_shapes` creates it.  `record` and `infer_node` keep it up to date while passes rewrite the graph.
    """

    def __init__(
        self,
        graph: Graph,
        strict: bool = False,
        infos: ValueInfos | None = None,
        scope: OuterScope | None = None,
        learned: Learned | None = None,
    ) -> None:
        """Start with onnx's inference; `strict` raises the errors of rules, which are otherwise collected in `raised`.

        If `infos` is given, the shapes that the model records for operators outside the ONNX domain are used.  `scope`
        holds the facts about a subgraph's inputs.  `learned` holds the sizes that an earlier inference found.
        """
        scope, self.known = scope or OuterScope(), learned or Learned()
        self.graph = graph
        self.strict = strict
        self.raised: dict[str, LeftOut] = {}
        self.infos = infos or ValueInfos(graph.model)
        self.uses_records = infos is not None
        self.not_limited = set(self.known.not_limited)  # this set also gets the names that this inference finds
        self._with_numbers: set[str] = set()  # names of tensors in whose shapes a number replaced a symbol
        self._required: dict[str, list[Size]] = {name: [number] for name, number in self.known.numbers.items()}
        self._noted: dict[str, Size] = {}  # by text of the model's note of sizes: the first size that has it
        self._unknown, self.related = self.known.unknown, self.known.related
        self.numbers, self.is_repeated = scope.numbers, scope.is_repeated
        self._shapes: dict[str, Shape | None] = {name: self._settled(name, each) for name, each in scope.shapes.items()}
        self._dtypes: dict[str, int] = dict(scope.dtypes)
        self._values: dict[str, Array | None] = dict(scope.values)

    def note(self, step: str, error: Exception) -> None:
        """Record the error of a step that was skipped for one node; if `strict`, raise it."""
        if self.strict:
            raise error
        if not isinstance(error, OnnxfuseError):
            self.raised.setdefault(step, left_out(step, error))

    def shape(self, tensor: Tensor) -> Shape | None:
        """Return the dimensions; None if the rank is unknown.

        An unknown dimension is a symbol such as `?12`, which is equal only to itself.
        """
        name = tensor.name
        if name not in self._shapes:
            known = tuple(tensor.shape) if is_constant(tensor) else self._sizes(name, self.infos.shape(name))
            self._shapes[name] = self._settled(name, known)
        return self._shapes[name]

    def rank(self, tensor: Tensor) -> int | None:
        """Return the number of dimensions; None if it is unknown."""
        shape = self.shape(tensor)
        return None if shape is None else len(shape)

    def dtype(self, tensor: Tensor) -> int:
        """Return the element type, an onnx.TensorProto.DataType; 0 if it is unknown."""
        name = tensor.name
        if name not in self._dtypes:
            self._dtypes[name] = constant_dtype(tensor) if is_constant(tensor) else self.recorded_dtype(tensor)
        return self._dtypes[name]

    def recorded_dtype(self, tensor: Tensor) -> int:
        """Return the element type that the model or onnx's inference states; 0 if they state none."""
        return self.infos.dtype(tensor.name)

    def value(self, tensor: Tensor) -> Array | None:
        """Return the elements (int, Dim, bool) of an integer or bool tensor.

        None if any element is unknown, or if there are more than 64.
        """
        return self.exact_value(tensor) if self.dtype(tensor) in INTEGER_RANGES else None

    def exact_value(self, tensor: Tensor) -> Array | None:
        """Return the elements like `value`, and also those of a float tensor whose elements are all integers."""
        if tensor.name not in self._values:
            self._values[tensor.name] = self.exact_constant(tensor) if is_constant(tensor) else None
        return self._values[tensor.name]

    def exact_constant(self, tensor: Constant) -> Array | None:
        """Return the elements of a constant (an initializer or an attribute's tensor) as `exact_value` does."""
        if math.prod(tensor.shape) > MAX_VALUE_ELEMENTS:
            return None
        try:
            return exact_elements(constant_value(self.graph, tensor))
        except ModelError:  # the file with the constant's data cannot be read
            return None

    def record(self, tensor: Tensor, shape: Sequence[Size] | None, dtype: int) -> None:
        """Record the shape and dtype of a tensor that a pass made."""
        if shape is not None and self.known.not_limited:
            shape = [each if isinstance(each, int) else self._not_limited(each) for each in shape]
        self._shapes[tensor.name] = self._settled(tensor.name, None if shape is None else tuple(shape))
        self._dtypes[tensor.name] = dtype
        self._values.pop(tensor.name, None)

    def record_value(self, tensor: Tensor, value: Array | None) -> None:
        """Record the elements of a tensor whose dtype is already recorded; `value` is None if they are not known.

        Long values count as not known.  So do numbers that the dtype cannot hold, because the runtime would wrap or
        round them.
        """
        if value is not None and self.known.numbers:
            sizes = [substituted(each, self.known.numbers) if isinstance(each, Dim) else each for each in value.flat]
            value = np.array(sizes, object).reshape(value.shape)
        fits = value is not None and value.size <= MAX_VALUE_ELEMENTS and _fits(value, self._dtypes[tensor.name])
        self._values[tensor.name] = value if fits else None
        if value is not None:
            self._shapes[tensor.name] = value.shape

    def _not_limited(self, size: Dim) -> Size:
        """Return a size without the `Min` limits that were found never to apply."""
        return without_min_constants(size, self.known.not_limited)

    def require(self, size: Size, number: Size) -> None:
        """Record that an operator runs only if `size` equals `number`, which can be symbolic.

        Calls for a subgraph that runs several times, or never, are ignored: they prove nothing about the outer graph.
        """
        found = solved(size, number) if isinstance(number, int) else equated(size, number)
        if found and not self.is_repeated:
            self._required.setdefault(found[0], []).append(found[1])

    def require_noted(self, tensor: Tensor) -> None:
        """Record that the tensor's sizes equal those that have the same texts in the model's note of sizes, if any."""
        noted = self.infos.noted.get(tensor.name, ())
        for size, text in zip(self.shape(tensor) or (), noted, strict=False):
            first = self._noted.setdefault(text, size)
            if first != size:
                self.require(size, first)
                self.require(first, size)

    def to_note(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the sizes, as texts, of those tensors that have a size to which the model's operators equate others.

        Graph inputs are added, so that their sizes have texts too.
        """
        chosen = set[str]().union(*(symbols(size) for size in self.known.numbers.values() if isinstance(size, Dim)))
        shapes = {name: self._shapes.get(name) or () for name in names}
        found = {name: shape for name, shape in shapes.items() if any(map(chosen.intersection, map(symbols, shape)))}
        inputs = {tensor.name: self.shape(tensor) or () for tensor in self.graph.linked.inputs if found}
        return {name: [str(size) for size in shape] for name, shape in (inputs | found).items() if shape}

    def learned(self) -> Learned:
        """Return the constraints found so far, without the symbols that would have to equal two different numbers."""
        numbers: dict[str, Size] = {}
        for name, found in self._required.items():
            wanted = {size for size in found if isinstance(size, int)}
            if len(wanted) < 2:
                numbers[name] = wanted.pop() if wanted else found[0]
        return Learned(frozenset(self.not_limited), numbers, self._unknown, self.related)

    def _settled(self, name: str, shape: Shape | None) -> Shape | None:
        """Return the shape of the tensor `name`, with each symbol replaced by the size that it must equal, if any."""
        if shape is None or not self.known.numbers:
            return shape
        settled = tuple(substituted(size, self.known.numbers) for size in shape)
        if any(isinstance(size, int) and size is not other for size, other in zip(settled, shape, strict=True)):
            self._with_numbers.add(name)
        return settled

    def is_settled(self, name: str) -> bool:
        """Return whether inference found a number for a dimension that was symbolic before or in the model's record."""
        if name in self._with_numbers or not self.known.numbers:
            return name in self._with_numbers
        pairs = zip(self._shapes.get(name) or (), self.infos.recorded_shape(name) or (), strict=False)
        return any(isinstance(size, int) and not isinstance(other, int) for size, other in pairs)

    def unknown(self, *key: Hashable) -> Dim:
        """Return the unknown size for this key: always the same symbol for the same key."""
        if key not in self._unknown:
            self._unknown[key] = symbol(f"{UNKNOWN}{next(self.numbers)}")
        return self._unknown[key]

    def broadcast(self, *sizes: Size) -> Size:
        """Return the size to which sizes broadcast.

        This is one of `sizes` if all others are known to broadcast to it, and otherwise an unknown size.
        """
        parts = [*map(broadcast_parts, sizes)]
        whole = frozenset[str]().union(*parts)
        if whole in parts:
            return sizes[parts.index(whole)]
        key = "broadcast", whole
        if key not in self._unknown:
            self._unknown[key] = symbol(Broadcast(f"{UNKNOWN}{next(self.numbers)}", whole))
        return self._unknown[key]

    def is_part(self, size: Size, whole: Size) -> bool:
        """Return whether `size` is 1 or equal to `whole`, because `whole` is the broadcast of it and other sizes."""
        names = [name for name, other in self.known.numbers.items() if other == whole and isinstance(name, Broadcast)]
        wholes = [broadcast_parts(whole), *(broadcast_parts(symbol(name)) for name in names)]
        return any(broadcast_parts(size) < each for each in wholes)

    def completed(self, name: str, inferred: PartialShape | None, foreign: bool = False) -> Shape | None:
        """Return the shape of a computed tensor from a rule's answer; None if the rank is unknown.

        A shape or dimension that the rule returns as None is taken from onnx's inference; if that does not know it
        either, it becomes an unknown size.  To bypass onnx's inference, a rule returns an unknown size itself.  A
        `foreign` operator's output, from outside the ONNX domain, gets the shape that the model records, if records are
        used.
        """
        if inferred is None:
            found = self._sizes(name, self.infos.shape(name))
            if found is not None or not foreign or not self.uses_records:
                return found
            recorded = self.infos.recorded_shape(name)  # a recorded 0 may mean that PyTorch did not know the size
            return self._sizes(name, recorded and [size or None for size in recorded])
        if None not in inferred:
            return tuple(size for size in inferred if size is not None)
        known = self._sizes(name, self.infos.shape(name))
        if known is None or len(known) != len(inferred):
            known = tuple(self.unknown(name, i) for i in range(len(inferred)))
        return tuple(other if size is None else size for size, other in zip(inferred, known, strict=True))

    def contradicts_record(self, name: str, *, zeros_count: bool = False) -> bool:
        """Return whether a tensor's inferred shape proves that its recorded shape is wrong for the model's inputs.

        For example, the model's inputs may have been given other shapes after the shape was recorded.
        PyTorch records 0 for sizes that it does not know.  A wrong 0 therefore does not show that the other recorded
        sizes are wrong, too, and is ignored unless `zeros_count`.
        """
        found, recorded = self._shapes.get(name), self.infos.recorded_shape(name)
        if found is None or recorded is None:
            return False
        pairs = zip(found, recorded, strict=False)
        return len(found) != len(recorded) or any(
            isinstance(other, int) and (other or zeros_count) and size != other and is_known(size)
            for size, other in pairs
        )

    def without_unproven_names(self, name: str, foreign: bool) -> list[Size | None] | None:
        """Return the recorded shape of a tensor with each unproven name replaced by None.

        Returns None where all names are proved, or there is no record.  The record of a `foreign` operator's output may
        be the only source of its sizes, so from this record, only names that an inference invented are removed.
        """
        recorded = self.infos.recorded_names(name)
        if recorded is None:
            return None
        found: PartialShape = (self.infos.recorded_shape(name) if foreign else self._shapes.get(name)) or ()
        known = found if len(found) == len(recorded) else [None] * len(recorded)
        pairs = zip(recorded, known, strict=True)
        proven = [size if isinstance(size, int) or size == other else None for size, other in pairs]
        return None if proven == recorded else proven

    def _sizes(self, name: str, dims: Sequence[RecordedSize] | None) -> Shape | None:
        if dims is None:
            return None
        return tuple(
            size if isinstance(size, int | Dim) else self.unknown("onnx", size) if size else self.unknown(name, i)
            for i, size in enumerate(dims)
        )


def constant_dtype(tensor: Constant) -> int:
    """Return a constant's onnx.TensorProto.DataType; graphsurgeon stores a NumPy dtype instead where there is one."""
    dtype = tensor.dtype
    return dtype if isinstance(dtype, int) else int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def exact_elements(value: Array) -> Array | None:
    """Return a short array of integers as Python objects; None for a longer array, or one with other elements."""
    if value.size > MAX_VALUE_ELEMENTS or value.dtype.kind not in "biuf":
        return None
    if value.dtype.kind == "f":
        whole = value.astype(np.float64)
        is_integer = np.isfinite(whole) & (whole == np.floor(whole)) & (np.abs(whole) <= MAX_EXACT_INTEGER)
        if not np.all(is_integer):
            return None
        value = whole.astype(np.int64)
    return value.astype(object)  # `tolist` would lose axes: an array of shape [3, 0, 1] becomes [[], [], []]


def number_range(dtype: int) -> tuple[int, int]:
    """Return the bounds between which a dtype holds every integer; (0, -1), an empty range, for unsupported dtypes."""
    if dtype in EXACT_INTEGERS:
        return -EXACT_INTEGERS[dtype], EXACT_INTEGERS[dtype]
    return INTEGER_RANGES.get(dtype, (0, -1))


def _fits(value: Array, dtype: int) -> bool:
    """Return whether the dtype holds each element exactly; of a symbolic element, it must hold each coefficient.

    If a floating-point dtype can represent the result of an integer operation, the operation in this dtype is exact.
    The values of symbols are assumed to be in range.
    """
    low, high = number_range(dtype)
    numbers = (n for e in value.flat for n in ((e,) if isinstance(e, int) else (c for _, c in e.terms)))
    return all(low <= number <= high for number in numbers)
