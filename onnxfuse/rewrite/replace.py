"""Replace a match by one node, whose body is stored as a function of the model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

import onnx
from onnx import TensorProto

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.errors import PatternError
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Tensor, is_constant, op_of
from onnxfuse.match import Match, Miss
from onnxfuse.match.accept import MOVING_OPS, needed_outputs
from onnxfuse.match.diagnostics import node_name
from onnxfuse.rewrite.function_body import Variant, function, is_static

REGION: Final = "region"  # what reports call fused nodes of operators that no pattern names; see onnxfuse/regions


@dataclass(frozen=True)
class Fused:
    """A fused node that stands in the optimized model."""

    fusion: str
    node: str
    replaces: tuple[str, ...]
    dims: Mapping[str, int | str]  # sizes, or formulas of symbolic ones
    output: str  # the tensor that it computes, which has the same name in the original
    where: str = ""  # "the body of Loop 'x'", or "" for the main graph


@dataclass
class LocalFunctions:
    """The bodies that the model's fused nodes call; equal bodies are one function.

    `ort` allows operators of com.microsoft in all of them, `contrib` in those that replace one of the nodes that it
    names: a model that had such operators needs onnxruntime already.
    """

    graph: Graph
    ort: bool = False
    contrib: Set[str] = frozenset()
    names_by_variant: dict[Hashable, str] = field(default_factory=dict)

    def name_of(self, fusion: Fusion, variant: Variant, attributes: list[str]) -> str:
        """Return the name of the function for a variant, which is added to the model if it is new."""
        key = fusion.name, variant.key(), tuple(sorted(attributes))
        if key not in self.names_by_variant:
            self.names_by_variant[key] = self.add(function(fusion, variant, fusion.name, sorted(attributes)))
        return self.names_by_variant[key]

    def add(self, body: onnx.FunctionProto) -> str:
        """Add a body that is named like its fusion, unless an equal one was added; return its name in the model."""
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


def replace_match(graph: Graph, shapes: ShapeInfo, match: Match, functions: LocalFunctions) -> Fused | Miss:
    """Replace the matched nodes by a call of the fused operator.

    Returns a Miss, and changes nothing, where the opset has no spelling of the body.
    """
    outputs = needed_outputs(graph, match.nodes, match.outputs, match.operands)
    ort = functions.ort or any(node.name in functions.contrib for node in match.nodes)
    variant = _variant(graph, shapes, match, outputs, ort)
    ranks = [-1 if (rank := shapes.rank(t)) is None else rank for t in outputs]
    attributes = _attributes(match, variant, ranks)
    try:
        name = functions.name_of(match.fusion, variant, list(attributes))
    except PatternError as error:
        return _miss(match, str(error))
    replaced = tuple(n.name or n.outputs[0].name for n in match.nodes)
    fused_name = graph.unique_name(f"{node_name(match.outputs[0])}/{match.fusion.name}")
    inputs = [match.operands[operand] for operand in variant.dtypes]
    position = max(graph.position[node] for node in match.nodes)
    for node in match.nodes:
        node.inputs.clear()
        node.outputs.clear()
    graph.position[graph.add_node(name, inputs, outputs, attributes, name=fused_name, domain=DOMAIN)] = position
    # The inputs too, because what plans kernels reads the model with onnx's inference, which knows fewer dims.
    for tensor in (*outputs, *(tensor for tensor in inputs if not is_constant(tensor))):
        graph.record_type(tensor, shapes.dtype(tensor), shapes.shape(tensor))
    dims = {k: v if is_static(v) else str(v) for k, v in match.dims.items() if k != "..."}
    return Fused(match.fusion.name, fused_name, replaced, dims, outputs[0].name)


def _variant(graph: Graph, shapes: ShapeInfo, match: Match, outputs: list[Tensor], ort: bool) -> Variant:
    present = [c.name for c in match.fusion.operands if c.name in match.operands]
    dtypes = {name: shapes.dtype(match.operands[name]) for name in present}
    out = tuple(shapes.dtype(t) for t in outputs)
    return Variant(
        graph.opset,
        dtypes,
        out,
        shapes.rank(outputs[0]) or 0,
        match.values,
        match.dims,
        match.choices,
        ort,
        _is_in_float32(shapes, match, {*dtypes.values(), *out}),
    )


def _is_in_float32(shapes: ShapeInfo, match: Match, dtypes: Set[int]) -> bool:
    """Return whether the body has to compute in float32 what it reads or gives in a half precision.

    It has to where it meets both half precisions, as neither holds the values of the other, and where the replaced
    nodes compute nothing in bfloat16: onnxruntime's CPU provider lacks most operators in bfloat16, so that the body
    would not run where they do.
    """
    if TensorProto.BFLOAT16 not in dtypes:
        return False
    if TensorProto.FLOAT16 in dtypes:
        return True
    computing = [node for node in match.nodes if op_of(node) not in {"Cast", *MOVING_OPS}]
    return all(shapes.dtype(tensor) != TensorProto.BFLOAT16 for node in computing for tensor in node.outputs)


def _attributes(match: Match, variant: Variant, ranks: list[int]) -> dict[str, AttributeValue]:
    """Return what a kernel must know besides the tensors."""
    dims = {name: size for name, size in match.dims.items() if is_static(size)}
    values = {name: value for name, value in match.values.items() if value is not None}
    own = {"output_ranks": ranks, **dims, **values, **match.choices}
    return {
        "fusion": match.fusion.name,
        "operands": " ".join(variant.dtypes),
        "output_types": list(variant.out),
        "attributes": " ".join(sorted(own)),  # by which a reader notices that one was lost
        **own,
    }


def _miss(match: Match, reason: str) -> Miss:
    names = tuple(str(n.name) for n in match.nodes)
    node, span = node_name(match.outputs[0]), match.fusion.span
    return Miss(match.fusion, node, len(names), lambda: len(names), lambda: reason, span, names)
