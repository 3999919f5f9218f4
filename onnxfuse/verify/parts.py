"""Parts of an optimized model: a fused node and the nodes that it replaced, as two models with the same inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeAlias

import onnx
from onnx.external_data_helper import uses_external_data

from onnxfuse.algebra.index_maps import inverse
from onnxfuse.algebra.operators import VIEWS
from onnxfuse.algebra.sizes import Shape
from onnxfuse.analysis.magnitudes import MASKS_FROM, Bounds
from onnxfuse.analysis.repeated_columns import COLUMNS
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import HALF_PRECISION, Array
from onnxfuse.ir.execution_order import reads
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.graphsurgeon import constant_of, stored_value
from onnxfuse.ir.node import Constant, Tensor, is_constant, op_of, producer
from onnxfuse.ir.protos import copy_without, subgraphs
from onnxfuse.ir.serde import constant_proto, node_proto

LOOKED_THROUGH: Final = VIEWS | {"Cast", "Slice"}
# Maximum number of nodes between an operand and a replaced node: views, Casts and scalings that were not replaced,
# because nodes outside of the part read them, too.
MAX_NODES_LOOKED_THROUGH = 12
TABLES: Final = ("cos", "sin")  # names of operands that hold cosines and sines
MAX_HASHED_BYTES = 4096  # per constant; larger constants are compared by name, not by value


# A tensor of the original that the optimized model holds in another layout: the tensor's name in the original, and the
# perm that transposes it to that layout, or () if the optimized model only renames the tensor.
Original: TypeAlias = tuple[str, tuple[int, ...]]
# A tensor's name in the optimized model, and the nodes, found only in that model, that compute an operand from it.  The
# name is "" where the nodes compute the operand from constants alone, such as a table in another layout.
Derived: TypeAlias = tuple[str, tuple[onnx.NodeProto, ...]]


@dataclass(frozen=True)
class UnfusedGraph:
    """The normalized graph before fusing; constants are read from the model when they are needed, not copied."""

    graph: Graph
    nodes: tuple[onnx.NodeProto, ...]
    constants: Mapping[str, Constant]
    types: Mapping[str, tuple[int, Shape | None]]  # the dtype and the symbolic shape of every tensor
    ordinary: frozenset[str] = frozenset()  # operands of Adds that hold no mask values such as -inf

    @cached_property
    def producer(self) -> dict[str, onnx.NodeProto]:
        """The node that computes each tensor."""
        return {name: node for node in self.nodes for name in node.output if name}

    @cached_property
    def position(self) -> dict[int, int]:
        """The index of each node in execution order, by `id(node)`."""
        return {id(node): i for i, node in enumerate(self.nodes)}

    def constant(self, name: str) -> Array:
        """Return the value of a constant."""
        return constant_value(self.graph, self.constants[name])

    def initializer(self, name: str) -> onnx.TensorProto:
        """Return a constant as an initializer; external data stays external."""
        return constant_proto(self.graph, self.constants[name], name)

    def model(
        self, nodes: Iterable[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[str]
    ) -> onnx.ModelProto:
        """Return a model of the given nodes, with the constants that they read and that are not in `inputs`."""
        result = copy_without(self.graph.model, "graph", "functions")
        result.functions.extend(self.graph.model.functions)
        graph, given = result.graph, {value.name for value in inputs}
        graph.name = "part"
        graph.node.extend(nodes)
        read = dict.fromkeys(name for node in graph.node for name in self.reads(node))
        graph.initializer.extend(self.initializer(n) for n in read if n in self.constants and n not in given)
        graph.input.extend(inputs)
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        return result

    def reads(self, node: onnx.NodeProto) -> set[str]:
        """Return the names of the tensors that a node and its subgraphs read."""
        return set(reads(node))


def unfused_graph(graph: Graph, shapes: ShapeInfo) -> UnfusedGraph:
    """Return a copy of a sorted graph, to keep the nodes that fused nodes are about to replace."""
    tensors: dict[str, Tensor] = {**graph.outer_constants, **graph.folded_for_subgraphs}
    # Only bodies of Loops read some inputs and initializers.
    tensors |= {t.name: constant_of(t) for t in graph.model.graph.initializer if t.name in graph.captured}
    tensors |= {t.name: t for t in graph.linked.inputs}
    tensors |= {t.name: t for node in graph.nodes for t in (*node.inputs, *node.outputs) if t.name}
    constants = {name: tensor for name, tensor in tensors.items() if is_constant(tensor)}
    types = {name: (shapes.dtype(t), shapes.shape(t)) for name, t in tensors.items()}
    nodes = tuple(node_proto(graph, node) for node in graph.nodes)
    return UnfusedGraph(graph, nodes, constants, types, frozenset(_ordinary(graph, shapes)))


def _ordinary(graph: Graph, shapes: ShapeInfo) -> Iterator[str]:
    """Yield the operands of Adds without mask values such as -inf, and the tensors that these operands are views of."""
    bounds, seen = Bounds(shapes), set[str]()
    for tensor in (each for node in graph.nodes if op_of(node) == "Add" for each in node.inputs):
        while tensor.name not in seen and bounds.of(tensor) < MASKS_FROM:
            seen.add(tensor.name)
            yield tensor.name
            node = producer(tensor)
            if node is None or op_of(node) not in LOOKED_THROUGH:
                break
            tensor = node.inputs[0]


@dataclass(frozen=True)
class Part:
    """A fused node, the nodes that it replaced, and further tensors that the replaced nodes read.

    `equal` are other fused nodes that differ from this one only in the names of tensors.
    """

    fused: onnx.NodeProto
    replaced: tuple[onnx.NodeProto, ...]
    leaves: tuple[str, ...]  # tensors, other than operands and constants, that the replaced nodes read
    key: str
    originals: Mapping[str, Original] = field(default_factory=dict)
    derived: Mapping[str, Derived] = field(default_factory=dict)
    equal: list[onnx.NodeProto] = field(default_factory=list)

    @property
    def operands(self) -> list[str]:
        """The tensors of the original that the fused node reads, each of them once."""
        return list(dict.fromkeys(_original(self.originals, name) for name in self._sources if name))

    @property
    def _sources(self) -> list[str]:
        """The fused node's inputs; for each input in `derived`, the tensor that it is computed from."""
        return [self.derived[name][0] if name in self.derived else name for name in self.fused.input]

    @property
    def outputs(self) -> list[str]:
        """The tensors of the original that the fused node computes."""
        return list(dict.fromkeys(_original(self.originals, name) for name in self.fused.output if name))

    @property
    def is_transposed(self) -> bool:
        """Whether the fused node computes the Transpose of a tensor of the original."""
        return any(self.originals[name][1] for name in self.fused.output if name in self.originals)

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        """The nodes that compute the fused node's inputs from `operands`, the fused node, and those for `outputs`."""
        before = [transpose(*self.originals[n], n) for n in dict.fromkeys(self._sources) if n in self.originals]
        before += [node for _, nodes in self.derived.values() for node in nodes]
        after = [
            transpose_back(name, perm, original)
            for name in self.fused.output
            if name in self.originals
            for original, perm in [self.originals[name]]
            if original not in self.fused.output  # which the node gives in both layouts
        ]
        return [*before, self.fused, *after]

    @cached_property
    def repeated(self) -> dict[str, str]:
        """Maps an operand's name to the pattern in which its columns repeat, if the fused node relies on it."""
        attributes = {each.name: each.s.decode() for each in self.fused.attribute if each.s}
        named = self._named_inputs.items()
        return {name: attributes[f"{word}{COLUMNS}"] for word, name in named if f"{word}{COLUMNS}" in attributes}

    @property
    def tables(self) -> list[str]:
        """The operands that hold cosines and sines, which must not be drawn from large values."""
        named = (self._named_inputs.get(word, "") for word in TABLES)
        return [_original(self.originals, name) for name in named if name]

    @cached_property
    def _named_inputs(self) -> dict[str, str]:
        """Maps the operand names that the fusion declares, such as "cos", to the fused node's inputs."""
        words = next((each.s.decode() for each in self.fused.attribute if each.name == "operands"), "")
        return dict(zip(words.split(), self.fused.input, strict=False))

    def computes_in_half(self, unfused: UnfusedGraph) -> bool:
        """Return whether an operand, an output or a replaced node other than a Cast is in half precision."""
        inner = (o for node in self.replaced if node.op_type != "Cast" for o in node.output)
        names = (*self.operands, *self.outputs, *inner)
        return any(unfused.types[name][0] in HALF_PRECISION for name in names if name in unfused.types)


def transpose(source: str, perm: tuple[int, ...], result: str) -> onnx.NodeProto:
    """Return a Transpose of the tensor `source`; an Identity if `perm` is ()."""
    if not perm:
        return onnx.helper.make_node("Identity", [source], [result])
    return onnx.helper.make_node("Transpose", [source], [result], perm=perm)


def transpose_back(source: str, perm: tuple[int, ...], result: str) -> onnx.NodeProto:
    """Return a Transpose that inverts the one of `transpose` with the same `perm`."""
    return transpose(source, inverse(perm), result)


def distinct_parts(
    unfused: UnfusedGraph,
    optimized: onnx.ModelProto,
    replaced: Mapping[str, Collection[str]],
    originals: Mapping[str, Original] | None = None,
) -> list[Part]:
    """Return the parts: one for each group of fused nodes that differ only in the names of their tensors.

    `replaced` maps a fused node's name to the names, or first outputs, of the nodes that it replaced.  `originals` maps
    a tensor of the optimized model to the original's tensor that it is a Transpose of.
    """
    originals = originals or {}
    parts: dict[str, Part] = {}
    functions = {f.name: hashlib.sha256(f.SerializeToString(deterministic=True)).hexdigest()
                 for f in optimized.functions if f.domain == DOMAIN}  # fmt: skip
    derive = _Derivations(unfused, optimized, originals)
    for node in optimized.graph.node:
        if node.domain != DOMAIN or node.name not in replaced:
            continue
        derived = {name: found for name in node.input if (found := derive.of(name)) is not None}
        sources = {name: (source, ()) for name, (source, _) in derived.items()}
        read = [derived[name][0] if name in derived else name for name in node.input]
        own = {name: originals[name] for name in (*read, *node.output) if name in originals}
        as_original = _renamed(_renamed(node, sources), own)
        nodes, leaves = _between(unfused, as_original, replaced[node.name])
        again = {name: (f"{name}/again", ()) for name in as_original.output if name and name in as_original.input}
        as_original, part = _renamed(as_original, again, of_inputs=False), _renamed(node, again, of_inputs=False)
        own |= {name: (again[own[name][0]][0], own[name][1])
                for name in node.output if name in own and own[name][0] in again}  # fmt: skip
        nodes += tuple(onnx.helper.make_node("Identity", [name], [copy]) for name, (copy, _) in again.items())
        copies = _in_several_layouts(part.output, own)
        own |= {name: (copy, own[name][1]) for name, (_, copy) in copies.items()}
        as_original.output[:] = [_original(own, name) for name in part.output]
        nodes += tuple(onnx.helper.make_node("Identity", [name], [copy]) for name, copy in copies.values())
        perms = [own[name][1] if name in own else () for name in (*read, *node.output)]
        made = [_without_names(derived[name][1]) if name in derived else () for name in node.input]
        key = _key(unfused, as_original, nodes, f"{functions.get(node.op_type, '')} {perms} {made}")
        if key in parts:
            parts[key].equal.append(node)
        else:
            parts[key] = Part(part, nodes, leaves, key, own, derived)
    return list(parts.values())


def _in_several_layouts(outputs: Iterable[str], originals: Mapping[str, Original]) -> dict[str, tuple[str, str]]:
    """Return, for each output whose original another output computes too, the names of the original and of a copy."""
    known, copies = {name for name in outputs if name not in originals}, dict[str, tuple[str, str]]()
    for name in (each for each in outputs if each in originals):
        original = originals[name][0]
        if original in known:
            copies[name] = original, f"{original}/{name}"
        known.add(original)
    return copies


class _Derivations:
    """Finds the nodes that compute operands that only the optimized model has, such as Reshapes of shared tensors."""

    def __init__(self, unfused: UnfusedGraph, optimized: onnx.ModelProto, originals: Mapping[str, Original]) -> None:
        """Store the nodes and constants of the optimized model, and the tensors that the original has, too."""
        self.given = {*unfused.types, *originals}
        self.nodes = {name: n for n in optimized.graph.node if not n.domain for name in n.output}
        self.constants = {tensor.name: tensor for tensor in optimized.graph.initializer}

    def of(self, name: str) -> Derived | None:
        """Return a tensor, and the nodes that compute the operand `name` from that tensor and small constants.

        The tensor is "" where the operand is computed from constants alone.  The result is None where the original has
        the operand, or where the operand is computed from several tensors.
        """
        if name in self.given:
            return None
        if name in self.constants:
            return "", (self._constant(name),)
        if name not in self.nodes:
            return None
        made: dict[str, onnx.NodeProto] = {}
        sources = self._sources(name, made)
        return (min(sources, default=""), tuple(made.values())) if len(sources) < 2 and sources <= self.given else None

    def _sources(self, name: str, made: dict[str, onnx.NodeProto]) -> set[str]:
        """Return the original's tensors that `name` is computed from; add the nodes that compute it to `made`."""
        constant, node = self.constants.get(name), self.nodes.get(name)
        if constant is not None and constant.ByteSize() <= MAX_HASHED_BYTES:
            made[name] = self._constant(name)
            return set()
        if name in self.given or node is None or any(subgraphs(node)):
            return {name}
        if node.output[0] in made:
            return set()
        found = set[str]().union(*(self._sources(each, made) for each in node.input if each))
        made[node.output[0]] = node
        return found

    def _constant(self, name: str) -> onnx.NodeProto:
        return onnx.helper.make_node("Constant", [], [name], value=self.constants[name])


def _without_names(nodes: Iterable[onnx.NodeProto]) -> list[str]:
    """Return a text for each node; the texts of two lists are equal if the nodes differ only in names."""
    numbers: dict[str, int] = {}
    texts = []
    for node in nodes:
        bare = onnx.NodeProto(op_type=node.op_type, attribute=node.attribute)
        for attribute in bare.attribute:
            if attribute.HasField("t"):
                attribute.t.name = ""
        places = [numbers.setdefault(name, len(numbers)) for name in (*node.input, *node.output)]
        texts.append(f"{hashlib.sha256(bare.SerializeToString(deterministic=True)).hexdigest()} {places}")
    return texts


def _original(originals: Mapping[str, Original], name: str) -> str:
    return originals[name][0] if name in originals else name


def _renamed(node: onnx.NodeProto, originals: Mapping[str, Original], of_inputs: bool = True) -> onnx.NodeProto:
    """Return a fused node with its tensors, or only its outputs, renamed to the original's names."""
    if not originals:
        return node
    result = onnx.NodeProto()
    result.CopyFrom(node)
    if of_inputs:
        result.input[:] = [_original(originals, name) for name in node.input]
    result.output[:] = [_original(originals, name) for name in node.output]
    return result


def _between(
    unfused: UnfusedGraph, fused: onnx.NodeProto, replaced: Collection[str]
) -> tuple[tuple[onnx.NodeProto, ...], tuple[str, ...]]:
    """Return the original nodes that compute a fused node's outputs from its operands, and other tensors they read.

    The search goes back from the outputs.  It passes replaced nodes, and views, Casts and scalings that lead to an
    operand, and stops at other tensors.  No nodes are needed for an output that is an operand in another layout.
    """
    ends, gone = set(fused.input), set(replaced)
    distances: dict[tuple[str, int], bool] = {}

    def leads_to_operand(name: str, steps: int) -> bool:
        if name in ends:
            return True
        node = unfused.producer.get(name)
        if node is None or not steps:
            return False
        key = name, steps
        if key not in distances:
            inside = node.name in gone or node.output[0] in gone
            distances[key] = False
            distances[key] = inside or any(leads_to_operand(n, steps - 1) for n in node.input if n)
        return distances[key]

    found: dict[int, onnx.NodeProto] = {}
    leaves: dict[str, None] = {}
    work = [name for name in fused.output if name and name not in ends]
    while work:
        name = work.pop()
        node = unfused.producer.get(name)
        if node is not None and (id(node) in found or leads_to_operand(name, MAX_NODES_LOOKED_THROUGH)):
            if id(node) not in found:
                found[id(node)] = node
                work += [n for n in unfused.reads(node) if n not in ends and n not in unfused.constants]
        else:
            leaves[name] = None
    position = unfused.position
    nodes = sorted(found.values(), key=lambda node: position[id(node)])
    return tuple(with_other_outputs(node, {*ends, *leaves}) for node in nodes), tuple(leaves)


def with_other_outputs(node: onnx.NodeProto, names: Collection[str]) -> onnx.NodeProto:
    """Return a node with its outputs in `names` renamed, because other nodes compute tensors of these names."""
    if not any(name and name in names for name in node.output):
        return node
    result = onnx.NodeProto()
    result.CopyFrom(node)
    result.output[:] = [f"{name}/again" if name and name in names else name for name in node.output]
    return result


def _key(unfused: UnfusedGraph, fused: onnx.NodeProto, nodes: Sequence[onnx.NodeProto], function: str) -> str:
    """Return a text that is the same for all parts that differ only in the names of their tensors."""
    digest, numbers = hashlib.sha256(function.encode()), dict[str, int]()

    def number(name: str) -> str:
        if not name or name in numbers:
            return str(numbers.get(name, ""))
        numbers[name] = len(numbers)
        constant = unfused.constants.get(name)
        value = f"{numbers[name]} {unfused.types.get(name)}"
        if constant is not None and name not in fused.input:
            stored = stored_value(constant)
            small = not (isinstance(stored, onnx.TensorProto) and uses_external_data(stored))
            array = unfused.constant(name) if small and unfused.types[name][0] else None
            if array is None or array.nbytes > MAX_HASHED_BYTES or array.dtype == object:
                value += f" {name}"
            else:
                value += hashlib.sha256(array.tobytes()).hexdigest()
        return value

    for node in (*nodes, fused):
        bare = onnx.NodeProto(op_type=node.op_type, domain=node.domain, attribute=node.attribute)
        digest.update(bare.SerializeToString(deterministic=True))
        digest.update("|".join([*map(number, node.input), "->", *map(number, node.output)]).encode())
    return digest.hexdigest()
