"""Run a model in float32, a slice of it at a time, and record how large and how small its tensors become."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from onnx import TensorProto

from onnxfuse.half.operators import BROADCAST_MAX_OPSET
from onnxfuse.half.precision import REAL
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.execution_order import reads
from onnxfuse.ir.protos import copy_without, opset_of
from onnxfuse.ir.validate import size_of
from onnxfuse.verify.cpu_session import input_of, open_session, run

MAX_SLICE: Final = 2**28  # bytes of weights per slice of the model
MASKED: Final = 1e30  # numbers of at least this magnitude occur only in masks of scores
Line: TypeAlias = tuple[str, list[str], str, dict[str, Any]]  # operator, inputs, label of the output, attributes

KINDS: Final = ("lowest", "highest", "smallest")  # fields of Range, and names of the outputs that hold them


@dataclass(frozen=True)
class Range:
    """The range of a tensor over all runs: its lowest and highest number, and its smallest magnitude other than 0."""

    lowest: float
    highest: float
    smallest: float

    @property
    def magnitude(self) -> float:
        """The largest magnitude."""
        return max(-self.lowest, self.highest)

    def scaled(self, factor: float) -> Range:
        """Return the range of the numbers times a factor above 0."""
        return Range(self.lowest * factor, self.highest * factor, self.smallest * factor)

    def joined(self, other: Range) -> Range:
        """Return the range that covers both ranges."""
        return Range(
            min(self.lowest, other.lowest), max(self.highest, other.highest), min(self.smallest, other.smallest)
        )


def observe(
    model: onnx.ModelProto,
    types: Mapping[str, int],
    folder: Path | None,
    runs: Sequence[Mapping[str, Array]],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Range]:
    """Return the range of each floating-point tensor of the main graph that a node computes or a caller gives.

    `runs` are sets of inputs on which the model runs.  The graph runs in slices, each with at most about MAX_SLICE
    bytes of weights; tensors that a later slice reads are kept until then.  Raises whatever onnxruntime raises.
    """
    observer = _Observer(model, types, folder)
    live: list[dict[str, object]] = [dict(feeds) for feeds in runs]
    for name, value in (each for feeds in runs for each in feeds.items()):
        if types.get(name, 0) in REAL:
            observer.record(name, range_of(value))
    pieces = list(slices(model))
    for number, piece in enumerate(pieces, 1):
        tell(f"ranges {number} of {len(pieces)}")
        observer.run(piece, live, {name for rest in pieces[number:] for node in rest for name in reads(node)})
    return observer.found


def range_of(value: Array) -> Range:
    """Return the range of the finite values of an array."""
    finite = value[np.isfinite(value)].astype(np.float32)
    magnitudes = np.abs(finite[finite != 0])
    return Range(float(finite.min(initial=0.0)), float(finite.max(initial=0.0)), float(magnitudes.min(initial=MASKED)))


def slices(model: onnx.ModelProto) -> Iterator[list[onnx.NodeProto]]:
    """Yield the nodes in execution order, in slices whose weights have at most about MAX_SLICE bytes."""
    sizes = {t.name: size_of(t) for t in model.graph.initializer}
    piece: list[onnx.NodeProto] = []
    held: set[str] = set()
    for node in model.graph.node:
        weights = {name for name in reads(node) if name in sizes}
        if piece and sum(sizes[name] for name in held | weights) > MAX_SLICE:
            yield piece
            piece, held = [], set()
        piece.append(node)
        held |= weights
    if piece:
        yield piece


@dataclass(frozen=True)
class _Observer:
    """Runs a model in slices, and records the ranges of its tensors."""

    model: onnx.ModelProto
    types: Mapping[str, int]
    folder: Path | None
    found: dict[str, Range] = field(default_factory=dict)

    def record(self, name: str, seen: Range) -> None:
        """Merge a range into the recorded range of a tensor."""
        self.found[name] = self.found[name].joined(seen) if name in self.found else seen

    def run(self, piece: Sequence[onnx.NodeProto], live: Sequence[dict[str, object]], later: set[str]) -> None:
        """Run some nodes, and record the ranges of their results.

        live   for each run, its inputs and the results of earlier nodes; afterwards only the tensors in `later`
        later  the names of the tensors that later nodes read
        """
        made = [name for node in piece for name in node.output if name]
        watched = [name for name in made if self.types.get(name, 0) in REAL]
        carried = [name for name in made if name in later]
        model = self.model_of(piece, live[0], watched, carried)
        session = open_session(model, self.folder, optimize=False)
        for values in live:
            results = run(session, {value.name: values[value.name] for value in model.graph.input})  # type: ignore[misc]
            for name in watched:
                seen = Range(*(float(np.asarray(results[f"{name}::{kind}"])) for kind in KINDS))
                if math.isfinite(seen.magnitude):
                    self.record(name, seen)
            for name in [name for name in values if name not in later]:
                del values[name]
            values.update({name: results[name] for name in carried})

    def model_of(
        self,
        piece: Sequence[onnx.NodeProto],
        values: Mapping[str, object],
        watched: Sequence[str],
        carried: Sequence[str],
    ) -> onnx.ModelProto:
        """Return a model of some nodes; its outputs are the ranges of `watched` tensors, and the `carried` tensors."""
        result, source = copy_without(self.model, "graph"), self.model.graph
        graph, read = result.graph, {name for node in piece for name in reads(node)}
        graph.name = "slice"
        graph.node.extend(piece)
        graph.initializer.extend(t for t in source.initializer if t.name in read and t.name not in values)
        graph.sparse_initializer.extend(t for t in source.sparse_initializer if t.values.name in read)
        graph.input.extend(_input(name, value, self.types) for name, value in values.items() if name in read)
        numbers: dict[str, Array] = {"::flat": np.array([-1], np.int64), "::zero": np.zeros(1, np.float32)}
        numbers |= {"::low": np.array(-MASKED, np.float32), "::up": np.array(MASKED, np.float32)}
        graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in numbers.items())
        for name in watched:
            for op, inputs, output, attributes in _range_nodes(name, opset_of(self.model)):
                graph.node.append(onnx.helper.make_node(op, inputs, [f"{name}::{output}"], **attributes))
            graph.output.extend(onnx.ValueInfoProto(name=f"{name}::{kind}") for kind in KINDS)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in carried)
        return result


def _range_nodes(name: str, opset: int) -> list[Line]:
    """Return the nodes that compute the range of a tensor."""
    return [
        ("Cast", [name], "wide", {"to": TensorProto.FLOAT}),
        ("Reshape", [f"{name}::wide", "::flat"], "row", {}),
        ("Concat", [f"{name}::row", "::zero"], "padded", {"axis": 0}),  # so that ReduceMax works on an empty tensor
        *_held(name, opset),
        ("ReduceMin", [f"{name}::held"], "lowest", {"keepdims": 0}),
        ("ReduceMax", [f"{name}::held"], "highest", {"keepdims": 0}),
        ("Abs", [f"{name}::held"], "size", {}),
        ("Greater", [f"{name}::size", "::zero"], "counts", {}),
        ("Not", [f"{name}::counts"], "is_zero", {}),
        ("Cast", [f"{name}::is_zero"], "one_of_zero", {"to": TensorProto.FLOAT}),
        ("Mul", [f"{name}::one_of_zero", "::up"], "up_of_zero", {}),
        ("Add", [f"{name}::size", f"{name}::up_of_zero"], "sizes", {}),  # serves as Where, which opset 7 lacks
        ("ReduceMin", [f"{name}::sizes"], "smallest", {"keepdims": 0}),
    ]


def _held(name: str, opset: int) -> list[Line]:
    """Return the nodes that clamp a tensor to the range from -MASKED to MASKED."""
    if opset < BROADCAST_MAX_OPSET:
        return [("Clip", [f"{name}::padded"], "held", {"min": -MASKED, "max": MASKED})]
    return [
        ("Max", [f"{name}::padded", "::low"], "above", {}),
        ("Min", [f"{name}::above", "::up"], "held", {}),
    ]


def _input(name: str, value: object, types: Mapping[str, int]) -> onnx.ValueInfoProto:
    if isinstance(value, np.ndarray):
        return input_of(name, value)
    return onnx.helper.make_tensor_sequence_value_info(name, types.get(name, 0) or TensorProto.FLOAT, None)
