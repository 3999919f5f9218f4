"""Assign channels-last layouts to the regions of a fused graph around its convolutions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, consumers, op_of, producer
from onnxfuse.layout.activations import add_activations
from onnxfuse.layout.axes import Perm
from onnxfuse.layout.conversion import Conversion, Kind, Model
from onnxfuse.layout.gates import join_gates
from onnxfuse.layout.regions import Regions
from onnxfuse.layout.residuals import Addition, add_residuals, additions, find_residuals
from onnxfuse.layout.squeezes import join_squeezes
from onnxfuse.layout.wrapped_rules import conversion
from onnxfuse.layout.writer import Border, Writer
from onnxfuse.passes.compose_views import compose_views
from onnxfuse.passes.folded import node_label
from onnxfuse.rewrite.replace import Fused, LocalFunctions, drop_functions

Layout: TypeAlias = Literal["auto", "nchw", "nhwc"]
LAYOUT: Final = "layout"  # what reports call this step
MIN_OPSET: Final = 9  # functions hold their constants as Constant nodes of integers


@dataclass(frozen=True)
class RegionEnd:
    """A Transpose that stands where a channels-last region ends, and why it ends there, as a sentence."""

    tensor: str  # the channels-first one, which has the same name in the original
    reason: str


@dataclass(frozen=True)
class LayoutResult:
    """What became channels-last: the number of nodes, the records of fused nodes, and where Transposes stand.

    The records are those of new fused nodes, and of those that add a residual now, which have the name that they had.

    `originals` gives for each new tensor the name of the tensor that it is a Transpose of, and the perm.
    """

    nodes: int = 0
    first: str = ""  # the name of the first of them
    fused: tuple[Fused, ...] = ()
    ends: tuple[RegionEnd, ...] = ()
    originals: Mapping[str, tuple[str, Perm]] = field(default_factory=dict)

    def original(self, name: str) -> str:
        """Return the name of the tensor that a tensor is a Transpose of; its own where it is none."""
        return self.originals[name][0] if name in self.originals else name


def assign_layouts(
    graph: Graph,
    shapes: ShapeInfo,
    layout: Layout,
    channels_last: Mapping[str, Sequence[str]],
    recorded: Collection[Fused] = (),
    exclude: Collection[tuple[str, str]] = frozenset(),
    *,
    has_regions: bool = False,
) -> LayoutResult:
    """Make the regions of a sorted graph channels-last that can be (`nhwc`), or of them those where it pays (`auto`).

    A product or convolution that meets the Add of a residual, because the Transposes between them vanish, takes it in;
    so does a gate of channels, with the activation that follows it.  A pointwise convolution takes in the gate that it
    reads.

    `channels_last` names for each fusion that has a channels-last form the operands that it reads channels-last.
    `recorded` are the records of the fused nodes that there are.  `exclude` holds nodes that stay channels-first, each
    by LAYOUT and the name of its first output, and sums that stay Adds, by the name of a fusion and of the sum.
    `has_regions` says that elementwise operators become regions afterwards, which a Concat in front of them joins.
    """
    if layout == "nchw" or graph.opset < MIN_OPSET:
        return LayoutResult()
    model = Model(graph, shapes, {f.name: f for f in graph.functions if f.domain == DOMAIN}, channels_last, has_regions)
    kept = {output for name, output in exclude if name == LAYOUT}
    answers = {node: _answer(model, node, kept) for node in graph.nodes}
    chosen = _choose(model, answers, only_where_it_pays=layout == "auto")
    if not chosen:
        return LayoutResult()
    first = node_label(chosen[0].node)
    drop_functions(graph, {one.node for one in chosen if one.kind is not Kind.NEUTRAL})
    adds, known = additions(graph, shapes, {one.node for one in chosen}), frozenset(graph.names)
    writer = Writer(graph, shapes, LocalFunctions(graph), frozenset(one.node for one in recorded))
    for one in chosen:
        one.write(writer)
    writer.end_regions()
    graph.remove_dead()  # the nodes that others took the place of
    graph.sort()
    reasons = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
    ends = {border.node: _region_end(graph, border, reasons) for border in writer.borders}
    _compose(graph, shapes, writer, known)
    merged, vanished = _merge(graph, shapes, writer, adds, known, recorded, exclude)
    fused = {one.node: one for one in (*writer.fused, *merged)}
    present = set(graph.nodes)
    standing = tuple(end for node, end in ends.items() if node in present and op_of(node) == "Transpose")
    return LayoutResult(writer.nodes - vanished, first, tuple(fused.values()), standing, writer.originals)


def _choose(
    model: Model, answers: Mapping[Node, Conversion | str], *, only_where_it_pays: bool
) -> Sequence[Conversion]:
    """Return the conversions of the nodes of the regions around convolutions."""
    conversions = {node: answer for node, answer in answers.items() if isinstance(answer, Conversion)}
    convolutions = [node for node, answer in conversions.items() if answer.kind is Kind.CONVOLUTION]
    return (
        Regions(model, conversions).choose(convolutions, only_where_it_pays=only_where_it_pays) if convolutions else []
    )


def _answer(model: Model, node: Node, kept: Collection[str]) -> Conversion | str:
    if any(tensor.name in kept for tensor in node.outputs):
        return "it differed from the nodes that it replaced when it was channels-last"
    return conversion(model, node)


def _compose(graph: Graph, shapes: ShapeInfo, writer: Writer, known: Collection[str]) -> None:
    """Let Transposes at borders vanish with views of the model.

    Where a fused node then reads or computes another tensor, that is the same as the one in its place before.  What it
    reads may be one of `known`, the tensors that the graph had before nodes became channels-last.
    """
    calls = [node for node in graph.nodes if node.domain == DOMAIN]
    before = [([t.name for t in node.inputs], [t.name for t in node.outputs]) for node in calls]
    compose_views(graph, shapes)
    for node, (inputs, outputs) in zip(calls, before, strict=True):
        read = [(t.name, old) for t, old in zip(node.inputs, inputs, strict=False) if t.name not in known]
        computed = [(t.name, old) for t, old in zip(node.outputs, outputs, strict=False)]
        for name, old in (*read, *computed):
            if name != old and name not in writer.originals:
                identity: Perm = ()
                original = writer.originals.get(old, (old, identity))
                if original[0] != name:  # else it has one pixel and one channel: both layouts are one tensor
                    writer.originals[name] = original


def _merge(
    graph: Graph,
    shapes: ShapeInfo,
    writer: Writer,
    adds: Mapping[Node, Addition],
    known: Collection[str],
    recorded: Collection[Fused],
    exclude: Collection[tuple[str, str]],
) -> tuple[list[Fused], int]:
    """Let fused nodes take in the residuals and activations behind them, and convolutions the gates that they read.

    Returns the records of these fused nodes, and how many channels-last nodes vanished.
    """
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    residuals = find_residuals(graph, shapes, adds, bodies, writer.originals, exclude)
    drop_functions(graph, {one.product for one in residuals})
    records = {one.node: one for one in (*recorded, *writer.fused)}
    added = add_residuals(graph, shapes, residuals, bodies, known, writer.originals, records)
    records |= {one.node: one for one in added}
    activated = add_activations(graph, shapes, writer.originals, records, exclude)
    records |= {one.node: one for one in activated}
    gated = join_gates(graph, shapes, records)
    squeezed = join_squeezes(graph, shapes, records)
    vanished = sum(bool(one.perm) for one in residuals) + len(activated) + len(gated) + 2 * len(squeezed)
    return [*added, *activated, *gated, *squeezed], vanished


def _region_end(graph: Graph, border: Border, reasons: Mapping[Node, str]) -> RegionEnd:
    """Return why a border is where it is: because of the nodes on its channels-first side."""
    tensor = border.tensor
    if border.inward:
        node = producer(tensor)
        return RegionEnd(tensor.name, _sentence(node, reasons) if node else f"'{tensor.name}' is an input of the graph")
    if tensor.name in graph.outputs:
        return RegionEnd(tensor.name, f"'{tensor.name}' is an output of the graph")
    if graph.is_fixed(tensor.name):
        return RegionEnd(tensor.name, f"a subgraph reads '{tensor.name}'")
    return RegionEnd(tensor.name, _sentence(consumers(tensor)[0], reasons))


def _sentence(node: Node, reasons: Mapping[Node, str]) -> str:
    why = reasons.get(node, "more bytes would be transposed if it were channels-last")
    return f"{node.op} '{node_label(node)}' is channels-first: {why}"
