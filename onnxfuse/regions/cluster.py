"""Clusters: nodes that are to be one region, with what they read and compute, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.tensor_bytes import FREE_OPS, item_bytes, tensor_bytes
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.region_operators import GATHERS
from onnxfuse.regions.pointwise import POINTWISE
from onnxfuse.regions.rows import Kind, is_reduction, kinds_of
from onnxfuse.regions.steps import Step

MAX_STEPS, MAX_OPERANDS, MAX_OUTPUTS = 64, 24, 8
LAUNCH_BYTES: Final = 8_000_000  # what an H200 moves at 4 TB/s in the 2 us that a launch takes
OPERATIONS_PER_BYTE: Final = 8  # what it computes while it moves a byte, of 32 Tflop/s
COSTLY: Final[Mapping[str, int]] = {  # operations of an element; 1 of others
    **dict.fromkeys(("Div", "Sqrt", "Reciprocal", "Exp", "Log", "Tanh", "Sin", "Cos", "Sigmoid", "Softplus"), 8),
    **dict.fromkeys(("Pow", "Erf", "Gelu", "Mish", "Elu", "Selu", "Mod"), 16),
}


@dataclass
class Cluster:
    """Nodes that are merged, and the values at their border."""

    nodes: list[Node]  # in execution order
    operands: dict[str, Tensor]
    outputs: dict[str, Tensor]
    steps: int
    cost: float  # in bytes
    is_free: bool  # without anything that takes time at run time
    has_reduction: bool
    repeats: bool  # whether a value may be computed more than once for an element


@dataclass
class Clusters:
    """Makes and merges clusters of the nodes of a graph."""

    graph: Graph
    shapes: ShapeInfo
    forms: Mapping[Node, tuple[Step, ...]]
    of: dict[Node, Cluster] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _bytes: dict[str, int] = field(default_factory=dict)

    def add(self, node: Node) -> Cluster:
        """Return the cluster of one node."""
        forms = self.forms[node]
        read = {name for step in forms for name in step.inputs}
        operands = {t.name: t for t in node.inputs if t.name in read}
        outputs = {t.name: t for t in node.outputs if t.outputs or self.graph.is_kept(t)}
        sizes = {self.count(t) for t in (*operands.values(), *node.outputs)}
        made = Cluster(
            [node], operands, outputs, len(forms), 0.0, op_of(node) in FREE_OPS,
            any(is_reduction(step) for step in forms), len(sizes) > 1 or node.op in ("Concat", "Pad", *GATHERS),
        )  # fmt: skip
        made.cost = self._cost(made)
        self.of[node] = made
        return made

    def part(self, nodes: Sequence[Node]) -> Cluster:
        """Return a cluster of some nodes of one that was made, in execution order; `split` makes it theirs."""
        steps, inside = [step for node in nodes for step in self.forms[node]], set(nodes)
        read, made = {name for step in steps for name in step.inputs}, {t.name for node in nodes for t in node.outputs}
        outputs = {
            t.name: t
            for node in nodes
            for t in node.outputs
            if self.graph.is_kept(t) or any(each not in inside for each in consumers(t))
        }
        operands = {t.name: t for node in nodes for t in node.inputs if t.name in read and t.name not in made}
        found = Cluster(
            list(nodes), operands, outputs, len(steps), 0.0, all(op_of(node) in FREE_OPS for node in nodes),
            any(map(is_reduction, steps)), True,
        )  # fmt: skip
        found.cost = self._cost(found)
        return found

    def split(self, *parts: Cluster) -> None:
        """Let parts of a cluster be clusters of their own."""
        self.of.update((node, part) for part in parts for node in part.nodes)

    def count(self, tensor: Tensor) -> int:
        """Return the number of elements of a tensor, with assumed sizes for dynamic dims."""
        if tensor.name not in self._counts:
            dtype = self.shapes.dtype(tensor)
            self._bytes[tensor.name] = tensor_bytes(self.shapes, self.shapes.shape(tensor), dtype)
            self._counts[tensor.name] = self._bytes[tensor.name] // item_bytes(dtype) if dtype else 0
        return self._counts[tensor.name]

    def merged(self, a: Cluster, b: Cluster) -> Cluster | str:
        """Return the cluster of the nodes of two, or a sentence that says why they are better apart."""
        if a.steps + b.steps > MAX_STEPS:
            return f"together they have {a.steps + b.steps} operators; at most {MAX_STEPS} are one region"
        both = Cluster(
            sorted((*a.nodes, *b.nodes), key=self.graph.position.__getitem__), {}, {}, a.steps + b.steps, 0.0,
            a.is_free and b.is_free, a.has_reduction or b.has_reduction, a.repeats or b.repeats,
        )  # fmt: skip
        inside = (a, b)
        made = {**a.outputs, **b.outputs}
        both.operands = {name: t for name, t in {**a.operands, **b.operands}.items() if name not in made}
        both.outputs = {name: t for name, t in made.items() if self._leaves(t, inside)}
        if len(both.operands) > MAX_OPERANDS or len(both.outputs) > MAX_OUTPUTS:
            return f"together they have {len(both.operands)} operands and {len(both.outputs)} outputs; at most " \
                   f"{MAX_OPERANDS} and {MAX_OUTPUTS} are one region"  # fmt: skip
        kinds: dict[str, Kind] | None = {}
        if both.has_reduction and (kinds := kinds_of(self.shapes, both.nodes, self.forms)) is None:
            return "they reduce over other axes, or move the rows that are reduced"
        both.cost = self._cost(both) + (self._repeated(both, kinds or {}) if both.repeats else 0.0)
        if both.cost > a.cost + b.cost:
            return f"together they would cost {both.cost - a.cost - b.cost:.3g} bytes more"
        return both

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of tensors, with assumed sizes for dynamic dims."""
        return sum(tensor_bytes(self.shapes, self.shapes.shape(t), self.shapes.dtype(t)) for t in tensors)

    def _leaves(self, tensor: Tensor, inside: Sequence[Cluster]) -> bool:
        if self.graph.is_kept(tensor):
            return True
        return any(not any(self.of.get(node) is each for each in inside) for node in consumers(tensor))

    def _cost(self, cluster: Cluster) -> float:
        """Return the bytes that a cluster reads and writes, and those that could be moved while it is launched."""
        if cluster.is_free:
            return 0.0
        moved = {**cluster.operands, **cluster.outputs}
        total = 0
        for name, tensor in moved.items():
            self.count(tensor)
            total += self._bytes[name]
        return float(total + LAUNCH_BYTES)

    def _repeated(self, cluster: Cluster, kinds: Mapping[str, Kind]) -> float:
        """Return what it costs, in bytes, that elements are computed again for each element that is made of them."""
        needed: dict[str, float] = {name: float(self.count(t)) for name, t in cluster.outputs.items()}
        again = 0.0
        for node in reversed(cluster.nodes):
            out = max((self.count(t) for t in node.outputs), default=0)
            evaluated = max((needed.get(t.name, 0.0) for t in node.outputs), default=0.0)
            if kinds.get(node.outputs[0].name) is Kind.ROW:
                evaluated = min(evaluated, float(out))
            work = sum(COSTLY.get(step.op, 1) for step in self.forms[node])
            again += max(evaluated - out, 0.0) * work
            is_pointwise, reduces = node.op in POINTWISE, any(map(is_reduction, self.forms[node]))
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
        return again / OPERATIONS_PER_BYTE if math.isfinite(again) else math.inf
