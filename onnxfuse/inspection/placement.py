"""Predict which nodes onnxruntime runs on the host and which on the GPU, and which tensors it copies between them.

The rules are those of onnxruntime's partitioning (GetCpuPreferredNodes in fallback_cpu_capability.cc, and
transformer_memcpy.cc): a node without a CUDA kernel runs on the host; so does a node that reads only shapes, small
constants and the outputs of other such nodes, unless its CUDA kernel reads these inputs on the host anyway.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from onnxfuse.algebra.operators import RANDOM
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.control_flow.body import read_bodies
from onnxfuse.inspection.ort_kernels import ORT_DOMAINS, OrtKernels
from onnxfuse.ir.node import Node, Tensor, consumers, has_subgraph, is_constant, op_of, producer
from onnxfuse.ir.protos import ONNX_DOMAINS
from onnxfuse.regions.host import HOST_INPUTS, SEEDS

SMALL: Final = 100  # onnxruntime keeps only constants of up to this many elements on the host
# Further inputs (see HOST_INPUTS) that CUDA kernels read on the host: axes, limits, ratios, flags, lengths.
MORE_HOST_INPUTS: Final[Mapping[str, range]] = {
    **{f"Reduce{name}": range(1, 2) for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum",
                                                "SumSquare")},
    "CumSum": range(1, 2), "NonMaxSuppression": range(2, 5), "Dropout": range(1, 3),
    "com.microsoft::GroupQueryAttention": range(6, 7),
}  # fmt: skip


@dataclass(frozen=True)
class Copy:
    """A tensor that is copied between host and GPU in every run, and the node that needs the copy."""

    tensor: str
    to_host: bool
    reader: Node


@dataclass(frozen=True)
class Placement:
    """The nodes that run on the host, the copied tensors, and the nodes that onnxruntime folds; others use the GPU.

    Nodes of bodies are among them.
    """

    without_kernel: Mapping[Node, str]  # nodes on the host, and why the CUDA provider cannot run them
    shape_nodes: frozenset[Node]  # nodes on the host, because they compute shapes
    copies: tuple[Copy, ...]
    folded: frozenset[Node]


@dataclass(frozen=True)
class Scope:
    """The main graph, or the body of an If, Loop or Scan, with its shapes."""

    shapes: ShapeInfo
    captured: frozenset[str]  # the tensors that a body reads from the graph around it


def scopes_of(shapes: ShapeInfo, captured: Collection[str] = frozenset()) -> Iterator[Scope]:
    """Yield a sorted graph and the bodies of its Ifs, Loops and Scans, at any depth."""
    yield Scope(shapes, frozenset(captured))
    for body in read_bodies(shapes.graph, shapes):
        yield from scopes_of(body.shapes, body.captured)


def place(scopes: Iterable[Scope], kernels: OrtKernels) -> Placement:
    """Return where the nodes run; those of other libraries are assumed to have CUDA kernels.

    Copies of tensors that a body reads from the graph around it are not foretold.
    """
    placed = [_place(scope, kernels) for scope in scopes]
    return Placement(
        {node: why for each in placed for node, why in each.without_kernel.items()},
        frozenset().union(*(each.shape_nodes for each in placed)),
        tuple(copy for each in placed for copy in each.copies),
        frozenset().union(*(each.folded for each in placed)),
    )


def _place(scope: Scope, kernels: OrtKernels) -> Placement:
    shapes, graph = scope.shapes, scope.shapes.graph
    folded = frozenset(_folded(shapes))
    nodes = [node for node in graph.nodes if node not in folded]
    own = [node for node in nodes if (node.domain or "") in (*ONNX_DOMAINS, *ORT_DOMAINS)]
    answers = {node: kernels.why_none(node, shapes, graph.opset) for node in own}
    without = {
        node: why for node, why in answers.items() if why is not None and not kernels.is_spelled_out(node, graph.opset)
    }
    shape_nodes = _shape_nodes(nodes, shapes, without, folded)
    copies = tuple(each for each in _copies(nodes, shape_nodes | without.keys()) if each.tensor not in scope.captured)
    return Placement(without, frozenset(shape_nodes), copies, folded)


def reads_on_host(node: Node, index: int) -> bool:
    """Return whether the CUDA kernel of a node reads an input on the host."""
    op = op_of(node)
    return index in HOST_INPUTS.get(op, ()) or index in MORE_HOST_INPUTS.get(op, ())


def _folded(shapes: ShapeInfo) -> list[Node]:
    """Return the nodes whose results depend only on constants and static shapes, so that onnxruntime folds them."""
    found: dict[Node, None] = {}
    for node in shapes.graph.nodes:
        if op_of(node) in RANDOM or has_subgraph(node):
            continue
        shape = shapes.shape(node.inputs[0]) if op_of(node) in SEEDS else None
        is_static = shape is not None and all(isinstance(size, int) for size in shape)
        if is_static or all(not t.name or is_constant(t) or producer(t) in found for t in node.inputs):
            found[node] = None
    return list(found)


def _shape_nodes(
    nodes: list[Node], shapes: ShapeInfo, without: Mapping[Node, str], folded: Collection[Node]
) -> set[Node]:
    """Return the nodes that run on the host because they compute shapes, although they have CUDA kernels."""
    on_host = {id(t) for node in nodes if op_of(node) in SEEDS and node not in without for t in node.outputs}
    behind = {node for node in nodes if op_of(node) in SEEDS for t in node.outputs for node in consumers(t)}
    found: set[Node] = set()
    for node in nodes:
        if node not in behind or node in without or op_of(node) in SEEDS:
            continue
        constants = {id(t) for t in node.inputs if is_constant(t) or producer(t) in folded}
        if all(
            _is_small(shapes, t) if id(t) in constants else id(t) in on_host and not reads_on_host(node, i)
            for i, t in enumerate(node.inputs)
            if t.name
        ):
            found.add(node)
            on_host |= {id(t) for t in node.outputs}
            behind |= {reader for t in node.outputs for reader in consumers(t)}
    return found


def _is_small(shapes: ShapeInfo, constant: Tensor) -> bool:
    shape = shapes.shape(constant)
    return shape is not None and math.prod(size if isinstance(size, int) else SMALL + 1 for size in shape) <= SMALL


def _copies(nodes: list[Node], on_host: set[Node]) -> list[Copy]:
    """Return the tensors that one of host and GPU writes and the other reads, and the graph inputs that both read."""
    found: list[Copy] = []
    tensors = {id(t): t for node in nodes for t in (*node.inputs, *node.outputs) if t.name and not is_constant(t)}
    inside = set(nodes)
    for tensor in tensors.values():
        maker = producer(tensor)
        if maker is not None and maker not in inside:  # the producer is folded, so the tensor is a constant
            continue
        wants: dict[bool, Node] = {}  # the first node that reads the tensor on the host (True), and on the GPU (False)
        for node in consumers(tensor):
            for index, each in enumerate(node.inputs):
                if each is tensor and node in inside:
                    wants.setdefault(node in on_host or reads_on_host(node, index), node)
        if maker is None:
            if len(wants) > 1:
                found.append(Copy(tensor.name, to_host=False, reader=wants[False]))
            continue
        is_on_host = maker in on_host or op_of(maker) in SEEDS
        if (not is_on_host) in wants:
            found.append(Copy(tensor.name, to_host=not is_on_host, reader=wants[not is_on_host]))
    return found
