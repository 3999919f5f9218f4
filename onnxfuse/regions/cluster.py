"""Clusters: groups of nodes that will become one region, with their operands, results and costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.algebra.operators import FREE
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.tensor_bytes import item_bytes, tensor_bytes
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.region_operators import GATHERS
from onnxfuse.regions.pointwise import POINTWISE
from onnxfuse.regions.rows import Kind, Rows, is_reduction, kinds_of, rows_of
from onnxfuse.regions.steps import Step

MAX_STEPS, MAX_OPERANDS, MAX_OUTPUTS = 64, 24, 8
NOTHING_BESIDE: Final = "nothing beside it can be merged with it"  # reason why a node is in no region
LAUNCH_BYTES: Final = 8_000_000  # cost of a launch, in bytes: an H200 moves them in 2 us, at 4 TB/s
OPERATIONS_PER_BYTE: Final = 8  # operations that take as long as moving one byte, at 32 Tflop/s
# Number of operations per element that an operator computes or reduces; operators not listed count as one operation.
OPERATIONS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("Constant", "Identity", "Reshape", "Squeeze", "Unsqueeze"), 0),
    **dict.fromkeys(("Div", "Sqrt", "Reciprocal", "Exp", "Log", "Tanh", "Sin", "Cos", "Sigmoid", "Softplus"), 8),
    **dict.fromkeys(("Pow", "Erf", "Gelu", "Mish", "Elu", "Selu", "Mod"), 16),
    **dict.fromkeys(("Softmax", "LogSoftmax", "ReduceLogSumExp", "QuantizeLinear"), 16),
}


@dataclass(eq=False)
class Cluster:
    """Nodes that will become one region, with their operands and results; hashable, because equality is identity."""

    nodes: list[Node]  # in execution order
    operands: dict[str, Tensor]
    outputs: dict[str, Tensor]
    steps: int  # number of operators in the region's program
    operations: float  # total number of operations
    cost: float  # estimated time, as the number of bytes that an H200 could move in this time
    is_free: bool  # True if none of the operators takes time at run time
    rows: Rows | None  # the shape that the reductions reduce, and the reduced axes; None without reductions
    repeats: bool  # True if a value can be computed more than once per element
    # Position among the clusters of its level (see `order.levels`); each cluster follows the clusters that it reads.
    place: int = 0

    @property
    def is_too_large(self) -> bool:
        """Whether it stays too large for a region when others take operators from it, or compute its operands."""
        return self.steps > MAX_STEPS or len(self.operands) > MAX_OPERANDS + MAX_OUTPUTS


@dataclass
class Clusters:
    """Creates, merges and splits clusters of a graph's nodes.

    `forms` maps each node that can be in a region to its steps, the operators of a region's program that compute it.
    `level` maps each node to a number (see order.py); only clusters of the same level are merged.  `reasons` maps the
    label of a node to the reason why it stays separate.  `of` maps a node to its cluster.  `copies` are copied nodes;
    until the regions are written, they have the labels of the original nodes.
    """

    graph: Graph
    shapes: ShapeInfo
    forms: dict[Node, tuple[Step, ...]]
    level: dict[Node, int]
    reasons: dict[str, str]
    of: dict[Node, Cluster] = field(default_factory=dict)
    copies: list[Node] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)
    _bytes: dict[str, int] = field(default_factory=dict)
    _front: int = 0  # the lowest place so far: `move` puts a cluster before all others at the next lower place

    def add(self, node: Node) -> Cluster:
        """Return a new cluster that consists of one node."""
        forms = self.forms[node]
        read = {name for step in forms for name in step.inputs}
        operands = {t.name: t for t in node.inputs if t.name in read}
        outputs = {t.name: t for t in node.outputs if t.outputs or self.graph.is_kept(t)}
        sizes = {self.count(t) for t in (*operands.values(), *node.outputs)}
        made = Cluster(
            [node], operands, outputs, len(forms), self._work(node) * self._evaluations(node), 0.0,
            op_of(node) in FREE, rows_of(self.shapes, node, forms),
            len(sizes) > 1 or node.op in ("Concat", "Pad", *GATHERS), self.graph.position[node],
        )  # fmt: skip
        made.cost = self._cost(made)
        self.of[node] = made
        return made

    def part(self, nodes: Sequence[Node], outputs: Iterable[Tensor] | None = None) -> Cluster:
        """Return a new cluster of nodes in execution order; only `split` makes it the cluster of its nodes.

        Without `outputs`, its outputs are the graph outputs and the tensors that other nodes read.  If it cannot be a
        region, its cost is infinite.
        """
        inside, made = set(nodes), [t for node in nodes for t in node.outputs]
        if outputs is None:
            outputs = [t for t in made if self.graph.is_kept(t) or any(each not in inside for each in t.outputs)]
        steps, names = [step for node in nodes for step in self.forms[node]], {t.name for t in made}
        read = {name for step in steps for name in step.inputs} - names
        operands = {t.name: t for node in nodes for t in node.inputs if t.name in read}
        found = Cluster(
            list(nodes), operands, {t.name: t for t in outputs}, len(steps), math.inf, math.inf,
            all(op_of(node) in FREE for node in nodes), self._rows(nodes), True,
        )  # fmt: skip
        kinds = kinds_of(self.shapes, nodes, self.forms) if found.rows is not None else {}
        is_small = len(steps) <= MAX_STEPS and len(operands) <= MAX_OPERANDS and len(found.outputs) <= MAX_OUTPUTS
        if kinds is not None and is_small:
            found.operations = self._operations(found, kinds)
            found.cost = self._cost(found)
        return found

    def _rows(self, nodes: Iterable[Node]) -> Rows | None:
        found = (rows_of(self.shapes, node, self.forms[node]) for node in nodes)
        return next((rows for rows in found if rows is not None), None)

    def unite(self, parts: Sequence[Cluster]) -> None:
        """Merge clusters that do not depend on each other."""
        if len(parts) > 1:
            nodes = (node for part in parts for node in part.nodes)
            self.split(self.part(sorted(nodes, key=self.graph.position.__getitem__)))

    def split(self, *parts: Cluster) -> None:
        """Make each part the cluster of its nodes, in place of the cluster that these nodes belonged to."""
        self.of.update((node, part) for part in parts for node in part.nodes)

    def move(self, cluster: Cluster, level: int, place: int | None = None) -> None:
        """Move a cluster to another level (see order.py), at `place` in its order, or before all others if None."""
        self.level.update(dict.fromkeys(cluster.nodes, level))
        self._front -= 1
        cluster.place = self._front if place is None else place

    def bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor, with assumed sizes for dynamic dims."""
        self.count(tensor)
        return self._bytes[tensor.name]

    def count(self, tensor: Tensor) -> int:
        """Return the number of elements of a tensor, with assumed sizes for dynamic dims."""
        if tensor.name not in self._counts:
            dtype = self.shapes.dtype(tensor)
            self._bytes[tensor.name] = tensor_bytes(self.shapes, self.shapes.shape(tensor), dtype)
            self._counts[tensor.name] = self._bytes[tensor.name] // item_bytes(dtype) if dtype else 0
        return self._counts[tensor.name]

    def merged(self, a: Cluster, b: Cluster) -> Cluster | str:
        """Return a cluster of both clusters' nodes, or a sentence that says why they stay separate."""
        if a.steps + b.steps > MAX_STEPS:
            return f"together they have {a.steps + b.steps} operators; at most {MAX_STEPS} are one region"
        if (read := max(len(a.operands) - len(b.outputs), len(b.operands) - len(a.outputs))) > MAX_OPERANDS:
            return f"together they have {read} operands or more; at most {MAX_OPERANDS} are operands of one region"
        if (made := max(len(a.outputs) - len(b.operands), len(b.outputs) - len(a.operands))) > MAX_OUTPUTS:
            return f"together they have {made} outputs or more; at most {MAX_OUTPUTS} are outputs of one region"
        if a.rows is not None and b.rows is not None and a.rows != b.rows:
            return "they reduce over other axes"
        both = Cluster(
            sorted((*a.nodes, *b.nodes), key=self.graph.position.__getitem__), {}, {}, a.steps + b.steps,
            a.operations + b.operations, 0.0, a.is_free and b.is_free, a.rows or b.rows, a.repeats or b.repeats,
        )  # fmt: skip
        inside = (a, b)
        computed = {**a.outputs, **b.outputs}
        both.operands = {name: t for name, t in {**a.operands, **b.operands}.items() if name not in computed}
        both.outputs = {name: t for name, t in computed.items() if self._leaves(t, inside)}
        if len(both.operands) > MAX_OPERANDS or len(both.outputs) > MAX_OUTPUTS:
            return f"together they have {len(both.operands)} operands and {len(both.outputs)} outputs; at most " \
                   f"{MAX_OPERANDS} and {MAX_OUTPUTS} are one region"  # fmt: skip
        kinds: dict[str, Kind] | None = {}
        if both.rows is not None and (kinds := kinds_of(self.shapes, both.nodes, self.forms)) is None:
            return "they reduce over other axes, or move the rows that are reduced"
        if both.repeats:
            both.operations = self._operations(both, kinds or {})
        both.cost = self._cost(both)
        if both.cost > a.cost + b.cost:
            return f"together they would cost {both.cost - a.cost - b.cost:.3g} bytes more"
        return both

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the total bytes of tensors, with assumed sizes for dynamic dims."""
        return sum(map(self.bytes, tensors))

    def _leaves(self, tensor: Tensor, inside: Sequence[Cluster]) -> bool:
        if self.graph.is_kept(tensor):
            return True
        return any(self.of.get(node) not in inside for node in tensor.outputs)

    def _cost(self, cluster: Cluster) -> float:
        """Return a cluster's cost: the larger of its memory time and its compute time, plus its launch.

        The larger time counts, because kernels compute while they move data.  This was measured on an H200 with the
        regions of benchmarks/regions.py whose compute time is more than a tenth of their memory time: they take 1.06
        times the larger time, or 0.89 times the sum.
        """
        if cluster.is_free:
            return 0.0
        moved = {**cluster.operands, **cluster.outputs}
        total = sum(map(self.bytes, moved.values()))
        return max(total, cluster.operations / OPERATIONS_PER_BYTE) + LAUNCH_BYTES

    def _work(self, node: Node) -> int:
        """Return the number of operations per element that a node computes or reduces."""
        return sum(OPERATIONS.get(step.op, 1) for step in self.forms[node])

    def _evaluations(self, node: Node) -> int:
        """Return the number of elements that a node computes; for a reduction, the number of elements that it reads."""
        tensors = node.inputs[:1] if any(map(is_reduction, self.forms[node])) else node.outputs
        return max(map(self.count, tensors), default=0)

    def _operations(self, cluster: Cluster, kinds: Mapping[str, Kind]) -> float:
        """Return how many operations a cluster's kernel executes.

        The kernel computes an inner value again for each use, except values that exist once per reduced row.
        """
        needed: dict[str, float] = {name: float(self.count(t)) for name, t in cluster.outputs.items()}
        total = 0.0
        for node in reversed(cluster.nodes):
            out = max((self.count(t) for t in node.outputs), default=0)
            evaluated = max((needed.get(t.name, 0.0) for t in node.outputs), default=0.0)
            if kinds.get(node.outputs[0].name) is Kind.ROW:
                evaluated = min(evaluated, float(out))
            is_pointwise, reduces = node.op in POINTWISE, any(map(is_reduction, self.forms[node]))
            total += self._work(node) * (max(evaluated - out, 0.0) + self._evaluations(node) if reduces else evaluated)
            for tensor in node.inputs:
                if (maker := producer(tensor)) is None or self.of.get(maker) is None:
                    continue
                size, known = float(self.count(tensor)), needed.get(tensor.name, 0.0)
                if reduces:
                    needed[tensor.name] = max(known, size)
                elif is_pointwise and size == out:
                    needed[tensor.name] = max(known, evaluated)
                else:
                    needed[tensor.name] = known + evaluated
        return total if math.isfinite(total) else math.inf
