"""Run a model in float32, a slice of it at a time, and record how large and how small its tensors become."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from onnxfuse.verify.cpu_session import open_session, run

MAX_SLICE: Final = 2**28  # bytes of the weights of the nodes that run at a time
MASKED: Final = 1e30  # numbers of this size only mask scores
Line: TypeAlias = tuple[str, list[str], str, dict[str, Any]]  # operator, inputs, what its output is, and attributes

KINDS: Final = ("lowest", "highest", "smallest")  # of the fields of Range, which each tensor's outputs are named after


@dataclass(frozen=True)
class Range:
    """The numbers that a tensor held in all runs: the lowest, the highest, and the smallest magnitude but 0."""

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
        """Return the range of both."""
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

    `runs` are inputs, which the model takes.  The graph runs in slices, each of which holds MAX_SLICE bytes of weights;
    what a later slice reads is kept until then.  Raises whatever onnxruntime raises.
    """
    found: dict[str, Range] = {}

    def record(name: str, seen: Range) -> None:
        found[name] = found[name].joined(seen) if name in found else seen

    live: list[dict[str, object]] = [dict(feeds) for feeds in runs]
    for feeds in runs:
        for name, value in feeds.items():
            if types.get(name, 0) in REAL:
                record(name, range_of(value))
    pieces = list(slices(model))
    for number, piece in enumerate(pieces):
        tell(f"ranges {number + 1} of {len(pieces)}")
        wanted = _read_later(model, pieces[number + 1 :])
        _run_piece(model, piece, types, folder, live, wanted, record)
    return found


def range_of(value: Array) -> Range:
    """Return the range of the finite values of an array."""
    finite = value[np.isfinite(value)].astype(np.float32)
    magnitudes = np.abs(finite[finite != 0])
    return Range(float(finite.min(initial=0.0)), float(finite.max(initial=0.0)), float(magnitudes.min(initial=MASKED)))


def slices(model: onnx.ModelProto) -> Iterator[list[onnx.NodeProto]]:
    """Yield the nodes in execution order, cut where their weights exceed MAX_SLICE."""
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


def _read_later(model: onnx.ModelProto, pieces: Sequence[Sequence[onnx.NodeProto]]) -> set[str]:
    return {name for piece in pieces for node in piece for name in reads(node)}


def _run_piece(
    model: onnx.ModelProto,
    piece: Sequence[onnx.NodeProto],
    types: Mapping[str, int],
    folder: Path | None,
    live: Sequence[dict[str, object]],
    later: set[str],
    record: Callable[[str, Range], None],
) -> None:
    """Run some nodes on what is live, record the ranges of what they compute, and keep what is read later."""
    made = [name for node in piece for name in node.output if name]
    read = {name for node in piece for name in reads(node)}
    watched = [name for name in made if types.get(name, 0) in REAL]
    carried = [name for name in made if name in later]
    session = open_session(_piece_model(model, piece, read, live, types, watched, carried), folder, optimize=False)
    for values in live:
        results = run(session, {name: values[name] for name in values if name in read})  # type: ignore[misc]
        for name in watched:
            seen = Range(*(float(np.asarray(results[f"{name}::{kind}"])) for kind in KINDS))
            if math.isfinite(seen.magnitude):
                record(name, seen)
        for name in [name for name in values if name not in later]:
            del values[name]
        values.update({name: results[name] for name in carried})


def _piece_model(
    model: onnx.ModelProto,
    piece: Sequence[onnx.NodeProto],
    read: set[str],
    live: Sequence[Mapping[str, object]],
    types: Mapping[str, int],
    watched: Sequence[str],
    carried: Sequence[str],
) -> onnx.ModelProto:
    """Return a model of some nodes whose outputs are the ranges of what they compute, and what is carried on."""
    result, opset = copy_without(model, "graph"), opset_of(model)
    graph = result.graph
    graph.name = "slice"
    graph.node.extend(piece)
    graph.initializer.extend(t for t in model.graph.initializer if t.name in read and t.name not in live[0])
    graph.sparse_initializer.extend(t for t in model.graph.sparse_initializer if t.values.name in read)
    for name, value in live[0].items():
        if name in read:
            graph.input.append(_input(name, value, types))
    flat = onnx.numpy_helper.from_array(np.array([-1], np.int64), "::flat")
    zero = onnx.numpy_helper.from_array(np.zeros(1, np.float32), "::zero")
    bounds = [
        onnx.numpy_helper.from_array(np.array(v, np.float32), n) for n, v in (("::low", -MASKED), ("::up", MASKED))
    ]
    graph.initializer.extend([flat, zero, *bounds])
    for name in watched:
        nodes: list[Line] = [
            ("Cast", [name], "wide", {"to": TensorProto.FLOAT}),
            ("Reshape", [f"{name}::wide", "::flat"], "row", {}),
            ("Concat", [f"{name}::row", "::zero"], "padded", {"axis": 0}),  # an empty tensor has no largest element
            *_held(name, opset),
            ("ReduceMin", [f"{name}::held"], "lowest", {"keepdims": 0}),
            ("ReduceMax", [f"{name}::held"], "highest", {"keepdims": 0}),
            ("Abs", [f"{name}::held"], "size", {}),
            ("Greater", [f"{name}::size", "::zero"], "counts", {}),
            ("Not", [f"{name}::counts"], "is_zero", {}),
            ("Cast", [f"{name}::is_zero"], "one_of_zero", {"to": TensorProto.FLOAT}),
            ("Mul", [f"{name}::one_of_zero", "::up"], "up_of_zero", {}),
            ("Add", [f"{name}::size", f"{name}::up_of_zero"], "sizes", {}),  # Where is younger than opset 7
            ("ReduceMin", [f"{name}::sizes"], "smallest", {"keepdims": 0}),
        ]
        for op, inputs, output, attributes in nodes:
            graph.node.append(onnx.helper.make_node(op, inputs, [f"{name}::{output}"], **attributes))
        graph.output.extend(onnx.ValueInfoProto(name=f"{name}::{kind}") for kind in KINDS)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in carried)
    return result


def _held(name: str, opset: int) -> list[Line]:
    """Return the nodes that bring a tensor between the bounds."""
    if opset < BROADCAST_MAX_OPSET:
        return [("Clip", [f"{name}::padded"], "held", {"min": -MASKED, "max": MASKED})]
    return [
        ("Max", [f"{name}::padded", "::low"], "above", {}),
        ("Min", [f"{name}::above", "::up"], "held", {}),
    ]


def _input(name: str, value: object, types: Mapping[str, int]) -> onnx.ValueInfoProto:
    if isinstance(value, np.ndarray):
        text = value.dtype.kind in "OUS"
        kind = int(TensorProto.STRING if text else onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
        return onnx.helper.make_tensor_value_info(name, kind, [None] * value.ndim)
    assert isinstance(value, list)
    kind = types.get(name, 0) or int(TensorProto.FLOAT)
    return onnx.helper.make_tensor_sequence_value_info(name, kind, None)
