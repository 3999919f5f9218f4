"""Finds the recurrences of a graph, and replaces those that kernels run by fused nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.analysis.shape_inference import infer_behind
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.control_flow.body import read_bodies
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, consumers
from onnxfuse.passes.folded import node_label
from onnxfuse.recurrences import SCAN
from onnxfuse.recurrences.form import NoScan, Recurrence
from onnxfuse.recurrences.joining import Joined, joined
from onnxfuse.recurrences.loops import read_loop
from onnxfuse.recurrences.program import Program, program_of
from onnxfuse.recurrences.unrolled import unrolled
from onnxfuse.recurrences.write import write_scan
from onnxfuse.rewrite.replace import Fused, LocalFunctions

LOOPS: Final = ("Loop", "Scan")


@dataclass
class ScanResult:
    """The records of the fused nodes, and the reasons why other recurrences do not become scans."""

    fused: tuple[Fused, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)  # by label of the Loop, the Scan, or the Concat of a trace


def assign_scans(
    shapes: ShapeInfo,
    functions: LocalFunctions,
    simplify: Callable[[Graph, ShapeInfo], object],
    exclude: Collection[tuple[str, str]] = (),
    keep: Set[str] = frozenset(),
) -> ScanResult:
    """Replace the recurrences of a sorted graph.

    simplify  folds the constants of a body
    exclude   matches that stay as they are: pairs of SCAN and the first output
    keep      labels of nodes that stay as they are
    """
    graph, result = shapes.graph, ScanResult()

    def replace(recurrence: Recurrence) -> None:
        program = program_of(recurrence, shapes, Joined())
        program.text()  # raises for a recurrence that kernels do not run
        _record_shapes(shapes, program)
        program, joins = _with_joined(shapes, recurrence, joined(shapes, recurrence, keep))
        names = {node_label(node) for node in recurrence.replaced}
        if any((SCAN, tensor.name) in exclude for _, _, tensor in program.outputs) or names & keep:
            raise NoScan("it belongs to a match that is switched off")
        result.fused += (write_scan(shapes, functions, recurrence, joins, program),)

    has_loops = not graph.operators.isdisjoint(LOOPS)
    for body in list(read_bodies(graph, shapes, LOOPS)) if has_loops else ():
        try:
            simplify(body.graph, body.shapes)
            replace(read_loop(shapes, body))
        except NoScan as error:
            result.reasons[node_label(body.node)] = str(error)
    for node, found in unrolled(shapes):
        label = node_label(node)
        try:
            if isinstance(found, str):
                raise NoScan(found)
            replace(found)
            result.reasons.pop(label, None)  # of the steps in the other order
        except NoScan as error:
            result.reasons.setdefault(label, str(error))
    if result.fused:
        graph.update_captured()
        graph.remove_dead()
        graph.sort()
    return result


def _with_joined(shapes: ShapeInfo, recurrence: Recurrence, found: Joined) -> tuple[Program, Joined]:
    """Return the program with the nodes `found`, or else those before the steps, or none; and the nodes that joined."""
    for joins in (found, Joined(found.before)):
        try:
            program = program_of(recurrence, shapes, joins)
            program.text()
            return program, joins
        except NoScan:
            continue
    return program_of(recurrence, shapes, Joined()), Joined()


def _record_shapes(shapes: ShapeInfo, program: Program) -> None:
    """Record the shapes of a recurrence's outputs, which have the length of what it slices."""
    readers = set[Node]()
    for _, axes, tensor in program.outputs:
        found = tuple(map(program.size, axes))
        if shapes.shape(tensor) != found:
            shapes.record(tensor, found, shapes.dtype(tensor))
            readers.update(consumers(tensor))
    if readers:
        infer_behind(shapes, readers)
