"""A Match becomes one node, and its body a function of the model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxfuse.errors import PatternError
from onnxfuse.language.terms import Fusion
from onnxfuse.match import Match, Miss, node_name
from onnxfuse.match.legality import used
from onnxfuse.model.graph import DOMAIN, Graph, Tensor
from onnxfuse.rewrite.build import Variant, function, is_static
from onnxfuse.shapes.inference import Shapes


@dataclass(frozen=True)
class Fused:
    """A fused node that stands in the optimized model."""

    fusion: str
    node: str
    replaces: tuple[str, ...]
    dims: Mapping[str, Any]
    output: str  # the tensor that it computes, which has the same name in the original


@dataclass
class Functions:
    """The bodies that the model's fused nodes call; equal bodies are one function."""

    graph: Graph
    ort: bool = False
    known: dict[bytes, str] = field(default_factory=dict)
    built: dict[Hashable, str] = field(default_factory=dict)

    def name_of(self, fusion: Fusion, variant: Variant, attributes: list[str]) -> str:
        """The name of the function for a variant, which is added to the model if it is new."""
        key = fusion.name, variant.key(), tuple(sorted(attributes))
        if key not in self.built:
            self.built[key] = self._add(fusion, variant, attributes)
        return self.built[key]

    def _add(self, fusion: Fusion, variant: Variant, attributes: list[str]) -> str:
        body = function(fusion, variant, fusion.name, sorted(attributes))
        key = body.SerializeToString(deterministic=True)
        if key not in self.known:
            taken = {f.name for f in self.graph.functions if f.domain == DOMAIN}
            count, name = 1, fusion.name
            while name in taken:
                count += 1
                name = f"{fusion.name}_{count}"
            body.name = name
            self.known[key] = name
            self.graph.functions.append(body)
        return self.known[key]


def rewrite(graph: Graph, shapes: Shapes, match: Match, functions: Functions) -> Fused | Miss:
    """Replace the matched nodes by a call of the fused operator.

    A Miss, and nothing changed, where the opset has no spelling of the body.
    """
    outputs = used(graph, match.nodes, match.outputs, match.operands)
    variant = _variant(graph, shapes, match, outputs, functions.ort)
    ranks = [-1 if (rank := shapes.rank(t)) is None else rank for t in outputs]
    attributes = _attributes(match, variant, ranks)
    try:
        name = functions.name_of(match.fusion, variant, list(attributes))
    except PatternError as error:
        return _miss(match, str(error))
    replaced = tuple(n.name or n.outputs[0].name for n in match.nodes)
    place = graph.fresh(f"{node_name(match.outputs[0])}/{match.fusion.name}")
    inputs = [match.operands[operand] for operand in variant.dtypes]
    order = max(graph.place[node] for node in match.nodes)
    for node in match.nodes:
        node.inputs.clear()
        node.outputs.clear()
    graph.place[graph.add(name, inputs, outputs, place, DOMAIN, **attributes)] = order
    for tensor in outputs:
        graph.note(tensor, shapes.dtype(tensor), shapes.shape(tensor))
    dims = {k: v if is_static(v) else str(v) for k, v in match.dims.items() if k != "..."}
    return Fused(match.fusion.name, place, replaced, dims, outputs[0].name)


def _variant(graph: Graph, shapes: Shapes, match: Match, outputs: list[Tensor], ort: bool) -> Variant:
    present = [c.name for c in match.fusion.operands if c.name in match.operands]
    return Variant(
        graph.opset,
        {name: shapes.dtype(match.operands[name]) for name in present},
        tuple(shapes.dtype(t) for t in outputs),
        shapes.rank(outputs[0]) or 0,
        match.values,
        match.dims,
        match.choices,
        ort,
    )


def _attributes(match: Match, variant: Variant, ranks: list[int]) -> dict[str, Any]:
    """What a kernel must know besides the tensors."""
    dims = {name: size for name, size in match.dims.items() if is_static(size)}
    values = {name: value for name, value in match.values.items() if value is not None}
    own = {"output_ranks": ranks, **dims, **values, **match.choices}
    return {
        "fusion": match.fusion.name,
        "operands": " ".join(variant.dtypes),
        "output_types": list(variant.out),
        "attributes": " ".join(sorted(own)),  # what a reader that lost one must miss
        **own,
    }


def _miss(match: Match, reason: str) -> Miss:
    names = tuple(str(n.name) for n in match.nodes)
    place, span = node_name(match.outputs[0]), match.fusion.span
    return Miss(match.fusion, place, len(names), lambda: len(names), lambda: reason, span, names)
