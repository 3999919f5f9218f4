"""Replace a match by one node; its body is stored as a function of the model."""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

import onnx
from onnx import TensorProto

from onnxfuse.analysis.repeated_columns import COLUMNS, repeated_columns
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import OperatorSet, Term, walk
from onnxfuse.dsl.words import Stored
from onnxfuse.errors import PatternError
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor, has_subgraph, is_constant, op_of
from onnxfuse.ir.protos import nodes, subgraphs
from onnxfuse.match import Match, Miss
from onnxfuse.match.accept import needed_outputs
from onnxfuse.match.diagnostics import node_name
from onnxfuse.match.precision import MOVING_OPS, computing_dtype
from onnxfuse.passes.folded import node_label
from onnxfuse.rewrite.function_body import function, is_static
from onnxfuse.rewrite.variant import Variant
from onnxfuse.steps import step

REGION: Final = "region"  # in reports, the fusion of nodes that no pattern names; see onnxfuse/regions


@dataclass(frozen=True)
class Fused:
    """A fused node of the optimized model."""

    fusion: str
    node: str
    replaces: tuple[str, ...]
    dims: Mapping[str, int | str]  # sizes by name; a symbolic size is a formula
    output: str  # the tensor that the node computes, which has the same name in the original
    where: str = ""  # "the body of Loop 'x'", or "" for the main graph
    joined: tuple[str, ...] = ()  # the part of `replaces` that regions added as an epilogue, outside of any pattern

    @property
    def match(self) -> str:
        """A name of the match that is the same in every run."""
        return f"{self.fusion}:{self.output}" + (f" in {self.where}" if self.where else "")


def count_replaced(fused: Iterable[Fused]) -> int:
    """Return how many nodes were replaced; a node that several regions compute counts once."""
    return len({(one.where, label) for one in fused for label in one.replaces})


def labels(node: Node, records: Mapping[str, Fused]) -> tuple[str, ...]:
    """Return the labels of the original nodes that a node replaces; its own label if it has no record in `records`.

    `records` holds the records of fused nodes, by the node's name.
    """
    return records[node.name].replaces if node.name in records else (node_label(node),)


@dataclass
class LocalFunctions:
    """The bodies that the model's fused nodes call; equal bodies are one function.

    `operators` is the set of operators that are allowed in bodies.  With "onnx", operators of com.microsoft are also
    allowed in a body if it replaces a node that `contrib` names: a model with such operators needs onnxruntime already.
    """

    graph: Graph
    operators: OperatorSet = "onnx"
    contrib: Set[str] = frozenset()
    names_by_variant: dict[Hashable, str] = field(default_factory=dict)

    def name_of(self, fusion: Fusion, variant: Variant, attributes: list[str]) -> str:
        """Return the name of the function for a variant; a new one is added to the model."""
        key = fusion.name, variant.key(), tuple(sorted(attributes))
        if key not in self.names_by_variant:
            self.names_by_variant[key] = self.add(function(fusion, variant, fusion.name, sorted(attributes)))
        return self.names_by_variant[key]

    def add(self, body: onnx.FunctionProto) -> str:
        """Add a body, named after its fusion, unless an equal one was added; return its name in the model."""
        key = body.SerializeToString(deterministic=True)
        if key not in self.graph.bodies:
            taken = {f.name for f in self.graph.functions if f.domain == DOMAIN}
            stem = body.name
            count, name = 1, stem
            while name in taken:
                count += 1
                name = f"{stem}_{count}"
            body.name = name
            self.graph.bodies[key] = name
            self.graph.functions.append(body)
        return self.graph.bodies[key]


def drop_functions(graph: Graph, called: Collection[Node]) -> None:
    """Remove functions that fusing added and that only the nodes in `called` call; these will get other functions.

    The graph must be the main one, so that calls in all subgraphs are known.
    """
    present = {(f.domain, f.name) for f in graph.model.functions}
    used = {node.op for node in graph.nodes if node.domain == DOMAIN and node not in called}
    used |= {one.function for one in graph.deferred.values()}
    inner = [part for node in graph.nodes if has_subgraph(node) for part in subgraphs(graph.protos[id(node)][1])]
    used |= {node.op_type for node in nodes(*graph.functions, *inner) if node.domain == DOMAIN}
    graph.functions[:] = [
        f for f in graph.functions if f.domain != DOMAIN or f.name in used or (f.domain, f.name) in present
    ]
    kept = {f.name for f in graph.functions if f.domain == DOMAIN}
    for key in [key for key, name in graph.bodies.items() if name not in kept]:
        del graph.bodies[key]


def replace_match(graph: Graph, shapes: ShapeInfo, match: Match, functions: LocalFunctions) -> Fused | Miss:
    """Replace the matched nodes by a call of the fused operator.

    Returns a Miss, and changes nothing, if the operator's body (its ONNX function) cannot be written in the opset.
    """
    with step(match.fusion.step):
        return _replace(graph, shapes, match, functions)


def _replace(graph: Graph, shapes: ShapeInfo, match: Match, functions: LocalFunctions) -> Fused | Miss:
    outputs = needed_outputs(graph, match.nodes, match.outputs, match.operands)
    variant = _variant(graph, shapes, match, outputs, _operators(functions, match))
    attributes = _attributes(shapes, match, variant, outputs)
    try:
        name = functions.name_of(match.fusion, variant, list(attributes))
    except PatternError as error:
        return _miss(match, str(error))
    replaced = tuple(map(node_label, match.nodes))
    fused_name = graph.unique_name(f"{node_name(match.outputs[0])}/{match.fusion.name}")
    inputs = [match.operands[operand] for operand in variant.dtypes]
    position = max(graph.position[node] for node in match.nodes)
    made = put_call(shapes, match.nodes, FunctionCall(name, fused_name, inputs, outputs, attributes))
    graph.position[made] = position
    dims = {k: v if is_static(v) else str(v) for k, v in match.dims.items() if k != "..."}
    return Fused(match.fusion.name, fused_name, replaced, dims, outputs[0].name)


@dataclass(frozen=True)
class FunctionCall:
    """A fused node that calls a function of the model."""

    function: str
    name: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    attributes: Mapping[str, AttributeValue]


def put_call(shapes: ShapeInfo, nodes: Iterable[Node], call: FunctionCall) -> Node:
    """Replace `nodes` by a fused node, and return it."""
    graph = shapes.graph
    for node in nodes:
        node.inputs.clear()
        node.outputs.clear()
    made = graph.add_node(call.function, call.inputs, call.outputs, call.attributes, name=call.name, domain=DOMAIN)
    # The types of inputs are recorded too, because the planner of kernels uses onnx's own inference, which finds fewer
    # dims.  Tensors with fixed names get no shape: an If can read them in branches of different shapes, and onnxruntime
    # refuses such an If if it can infer both shapes.
    for tensor in (*call.outputs, *(tensor for tensor in call.inputs if not is_constant(tensor))):
        shape = None if tensor.name in graph.fixed_names else shapes.shape(tensor)
        graph.record_type(tensor, shapes.dtype(tensor), shape)
    return made


def write_deferred(shapes: ShapeInfo) -> None:
    """Replace the operators in `graph.deferred` by fused nodes, except those that regions took out of the graph."""
    graph = shapes.graph
    deferred, present = graph.deferred, set(graph.nodes)
    for node, one in deferred.items():
        if node in present:
            inputs, outputs = [node.inputs[i] for i in one.inputs], list(node.outputs)
            put_call(shapes, [node], FunctionCall(one.function, node.name, inputs, outputs, one.attributes))
    if deferred:
        graph.deferred = {}
        drop_functions(graph, ())
        graph.remove_dead()
        graph.sort()


def attributes_of(
    shapes: ShapeInfo,
    fusion: str,
    operands: Iterable[str],
    outputs: Sequence[Tensor],
    own: Mapping[str, AttributeValue],
) -> dict[str, AttributeValue]:
    """Return the attributes of a fused node with these outputs: those that every fused node has, and its `own`."""
    ranks = [shapes.rank(tensor) for tensor in outputs]
    own = {**own, "output_ranks": [-1 if rank is None else rank for rank in ranks]}
    return {
        "fusion": fusion,
        "operands": " ".join(operands),
        "output_types": [shapes.dtype(tensor) for tensor in outputs],
        "attributes": " ".join(sorted(own)),  # lists the names, so that a missing attribute is noticed
        **own,
    }


def own_attributes(node: Node) -> dict[str, AttributeValue]:
    """Return the attributes of a fused node that its attribute `attributes` lists."""
    return {name: node.attrs[name] for name in str(node.attrs["attributes"]).split()}


def _operators(functions: LocalFunctions, match: Match) -> OperatorSet:
    """Return the set of operators that are allowed in the ONNX function that a match becomes."""
    replaces_contrib = any(node.name in functions.contrib for node in match.nodes)
    return "ort" if functions.operators == "onnx" and replaces_contrib else functions.operators


def _variant(graph: Graph, shapes: ShapeInfo, match: Match, outputs: list[Tensor], operators: OperatorSet) -> Variant:
    present = [c.name for c in match.fusion.operands if c.name in match.operands]
    dtypes = {name: shapes.dtype(match.operands[name]) for name in present}
    out = tuple(shapes.dtype(t) for t in outputs)
    values = dict(match.values)
    if operators == "standard":
        asked = {f"{name}{COLUMNS}": name for name in present if f"{name}{COLUMNS}" in _asked_by_others(match.fusion)}
        found = {word: repeated_columns(shapes, match.operands[name]) for word, name in asked.items()}
        values |= {word: columns for word, columns in found.items() if columns}
    return Variant(
        graph.opset,
        dtypes,
        out,
        shapes.rank(outputs[0]) or 0,
        values,
        match.dims,
        match.choices,
        operators,
        _is_in_float32(shapes, match, out[0], {*dtypes.values(), *out}),
    )


@functools.cache
def _asked_by_others(fusion: Fusion) -> frozenset[str]:
    """Return the names in the conditions of bodies for other operator sets (the `others` of Stored terms)."""
    found: dict[int, Term] = {}
    work = list(fusion.outputs)
    while work:
        stored = (term for term in walk(*work) if isinstance(term, Stored))
        work = [other for term in stored for other in term.others.values() if id(other) not in found]
        found |= {id(other): other for other in work}
    return frozenset(name for term in walk(*found.values()) for guard in term.guards for name in guard.names)


def _is_in_float32(shapes: ShapeInfo, match: Match, out: int, dtypes: Set[int]) -> bool:
    """Return whether the body must compute in float32, although its operands or outputs are in half precision.

    The body must do so if the replaced nodes multiply in float32, or if both half precisions occur, because neither can
    hold the values of the other.  The body must also do so if tensors are bfloat16 but the replaced nodes compute
    nothing in bfloat16: onnxruntime's CPU provider lacks most operators in bfloat16, so that a body in bfloat16 would
    not run where the replaced nodes do.
    """
    if computing_dtype(shapes, match.nodes, out) != out:
        return True
    if TensorProto.BFLOAT16 not in dtypes:
        return False
    if TensorProto.FLOAT16 in dtypes:
        return True
    computing = [node for node in match.nodes if op_of(node) not in {"Cast", *MOVING_OPS}]
    return all(shapes.dtype(tensor) != TensorProto.BFLOAT16 for node in computing for tensor in node.outputs)


def _attributes(
    shapes: ShapeInfo, match: Match, variant: Variant, outputs: Sequence[Tensor]
) -> dict[str, AttributeValue]:
    """Return the attributes of a fused node, which give its kernel everything except the tensors.

    A list of texts becomes one text, because onnxruntime's interface for operators of libraries reads no such lists.
    """
    dims = {name: size for name, size in match.dims.items() if is_static(size)}
    values = {name: _plain(value) for name, value in match.values.items() if value is not None}
    columns = {name: str(value) for name, value in variant.values.items() if name.endswith(COLUMNS)}
    own = {**dims, **values, **match.choices, **columns}
    return attributes_of(shapes, match.fusion.name, variant.dtypes, outputs, own)


def _plain(value: Any) -> Any:
    is_texts = isinstance(value, list) and value and isinstance(value[0], str)
    return " ".join(value) if is_texts else value


def _miss(match: Match, reason: str) -> Miss:
    names = tuple(str(n.name) for n in match.nodes)
    node, span = node_name(match.outputs[0]), match.fusion.span
    return Miss(match.fusion, node, len(names), lambda: len(names), lambda: reason, span, names)
