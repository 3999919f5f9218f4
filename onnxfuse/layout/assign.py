"""Assign channels-last layouts to regions around the convolutions of a fused graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from onnxfuse.algebra import operators
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.layout.activations import activations
from onnxfuse.layout.axes import Perm
from onnxfuse.layout.channels_last_regions import MAX_BORDER_SHARE, Refused, Regions
from onnxfuse.layout.conversion import Conversion, Kind, LayoutOptions, Model
from onnxfuse.layout.fusions import CONVOLUTIONS, LAYOUT_FUSIONS, SQUEEZE
from onnxfuse.layout.gates import gates
from onnxfuse.layout.joins import Joins, Rule
from onnxfuse.layout.norms_of_parts import norms_of_parts
from onnxfuse.layout.residuals import residuals
from onnxfuse.layout.rules import conversion, is_channels_last
from onnxfuse.layout.squeezes import squeezes
from onnxfuse.layout.writer import Writer
from onnxfuse.passes.compose_views import compose_views
from onnxfuse.passes.folded import node_label
from onnxfuse.printing import bytes_text
from onnxfuse.rewrite.replace import Fused, LocalFunctions, drop_functions

LAYOUT: Final = "layout"  # the name of the layout step in reports
MAX_NODES_BETWEEN: Final = 8  # maximum number of nodes from a region's end to the node whose reason explains this end
MIN_OPSET: Final = 9  # functions need integer Constant nodes, which exist since this opset


@dataclass(frozen=True)
class RegionEnd:
    """A Transpose at the end of a channels-last region, and a sentence that says why the region ends there."""

    tensor: str  # name of the channels-first tensor, the same as in the original model
    reason: str


@dataclass(frozen=True)
class ChannelsFirst:
    """A convolution, or another image operator, that stays channels-first; `reason` says why, as a sentence."""

    node: str  # the node's name, or else its output's name
    output: str
    reason: str
    op: str = ""


@dataclass(frozen=True)
class LayoutResult:
    """The results of assigning layouts: how many nodes became channels-last, their records, and the Transposes.

    `fused` holds the records of new fused nodes, and of existing ones that now add a residual; these keep their names.
    `originals` maps each new tensor to the tensor that it is a Transpose of, and to the perm.
    """

    nodes: int = 0
    joined: int = 0  # how many of these nodes became parts of regions and other nodes
    first: str = ""  # name of the first channels-last node
    fused: tuple[Fused, ...] = ()
    ends: tuple[RegionEnd, ...] = ()
    stays: tuple[ChannelsFirst, ...] = ()
    others: tuple[ChannelsFirst, ...] = ()  # channels-first operators that could become one of LAYOUT_FUSIONS
    originals: Mapping[str, tuple[str, Perm]] = field(default_factory=dict)
    written: frozenset[str] = frozenset()  # the names of the channels-last nodes, until `counted`

    def counted(self, graph: Graph) -> LayoutResult:
        """Return the results, with the number of channels-last nodes that later steps joined to other nodes."""
        return replace(self, joined=len(self.written.difference(map(node_label, graph.nodes))), written=frozenset())

    def original(self, name: str) -> str:
        """Return the name of the tensor that this tensor is a Transpose of; its own name if it is not a Transpose."""
        return self.originals[name][0] if name in self.originals else name

    def is_transposed(self, names: Iterable[str]) -> bool:
        """Return whether any of these tensors is a Transpose of a tensor of the original model."""
        return any(self.originals[name][1] for name in names if name in self.originals)


def assign_layouts(
    graph: Graph, shapes: ShapeInfo, options: LayoutOptions, recorded: Collection[Fused] = ()
) -> LayoutResult:
    """Make regions of a sorted graph channels-last: all that can be (`nhwc`), or those where it pays (`auto`).

    Between channels-last nodes, Transposes vanish, so further fusions become possible.  A product or convolution is
    fused with the Add of a residual, if no Transpose is left between them.  A channel gate (a product of an image and
    one number per channel) is fused with such an Add, too, and with the activation after it.  A pointwise convolution
    is fused with the gate that it reads.  `recorded` holds the records of the existing fused nodes.

    Nodes in `graph.deferred` have records, too: elementwise regions can still take them, and `write_deferred` makes the
    rest fused nodes.
    """
    if options.layout == "nchw":
        return LayoutResult()
    if graph.opset < MIN_OPSET:
        why = f"the model has opset {graph.opset}, and layouts need opset {MIN_OPSET}"
        return LayoutResult(stays=_stays(dict.fromkeys(filter(_is_convolution, graph.nodes), why)))
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    model = Model(graph, shapes, bodies, options)
    kept = {output for name, output in options.exclude if name == LAYOUT}
    answers = {node: _answer(model, node, kept) for node in graph.nodes}
    chosen, refused = _choose(model, answers)
    reasons = {node: answer for node, answer in answers.items() if isinstance(answer, str)}
    why_first = {node: why for node, why in reasons.items() if _is_convolution(node) and not is_channels_last(node)}
    why_first |= {node: _why_refused(graph, one, reasons) for one in refused for node in one.convolutions}
    stays, others = _stays(why_first), _others(graph, {one.node for one in chosen}, reasons)
    written = _write(model, chosen, reasons, recorded) if chosen else LayoutResult()
    return replace(written, stays=stays, others=others)


def _write(
    model: Model, chosen: Sequence[Conversion], reasons: Mapping[Node, str], recorded: Collection[Fused]
) -> LayoutResult:
    """Make the `chosen` nodes channels-last; `reasons` says why other nodes stay channels-first."""
    graph, shapes, first = model.graph, model.shapes, node_label(chosen[0].node)
    drop_functions(graph, {one.node for one in chosen if one.kind is not Kind.NEUTRAL})
    known = frozenset(graph.names)
    writer = Writer(graph, shapes, LocalFunctions(graph), frozenset(one.node for one in recorded))
    for one in chosen:
        one.write(writer)
    writer.end_regions()
    graph.remove_dead()  # removes the nodes that were replaced
    graph.sort()
    ends = {
        border.node: RegionEnd(border.tensor.name, _why_border(graph, border.tensor, border.inward, reasons))
        for border in writer.borders
    }
    _compose(graph, shapes, writer, known)
    records = {one.node: one for one in (*recorded, *writer.fused)}
    joins = Joins(writer, records, known, model.options.exclude)
    rules: list[Rule] = [residuals, activations, gates, norms_of_parts, squeezes]
    for rule in rules[:-1] if SQUEEZE in model.options.left_out else rules:
        joins.apply(rule)
    fused = {one.node: one for one in (*writer.fused, *joins.made)}
    # Puts deferred nodes as late as their consumers allow.
    graph.linked.nodes.sort(key=lambda node: node in graph.deferred)
    graph.sort()
    present = set(graph.nodes)
    standing = tuple(end for node, end in ends.items() if node in present and op_of(node) == "Transpose")
    written = frozenset(map(node_label, writer.written & present))
    return LayoutResult(
        len(written), 0, first, tuple(fused.values()), standing, originals=writer.originals, written=written
    )


def _choose(model: Model, answers: Mapping[Node, Conversion | str]) -> tuple[Sequence[Conversion], Sequence[Refused]]:
    """Return the conversions of the nodes that become channels-last, and the regions for which that does not pay."""
    conversions = {node: answer for node, answer in answers.items() if isinstance(answer, Conversion)}
    convolutions = [node for node, answer in conversions.items() if answer.kind is Kind.CONVOLUTION]
    if all(answer.kind is Kind.NEUTRAL for answer in conversions.values()):
        return [], []
    regions = Regions(model, conversions)
    return regions.choose(convolutions, only_where_it_pays=model.options.layout == "auto"), regions.refused


def _answer(model: Model, node: Node, kept: Collection[str]) -> Conversion | str:
    if any(tensor.name in kept for tensor in node.outputs):
        return "it differed from the nodes that it replaced when it was channels-last"
    return conversion(model, node)


def _compose(graph: Graph, shapes: ShapeInfo, writer: Writer, known: Collection[str]) -> None:
    """Merge the Transposes at the ends of regions with views of the model, so that both vanish.

    A fused node or an Add can then read or compute another tensor with the same values; `writer.originals`
    maps this tensor to the one that it replaces.  An input is not recorded if it is in `known`, the names of the
    tensors that existed before any node became channels-last.
    """
    calls = [node for node in graph.nodes if node.domain == DOMAIN or node in graph.deferred or op_of(node) == "Add"]
    before = [([t.name for t in node.inputs], [t.name for t in node.outputs]) for node in calls]
    compose_views(graph, shapes)
    for node, (inputs, outputs) in zip(calls, before, strict=True):
        read = [(t.name, old) for t, old in zip(node.inputs, inputs, strict=False) if t.name not in known]
        computed = [(t.name, old) for t, old in zip(node.outputs, outputs, strict=False)]
        for name, old in (*read, *computed):
            if name != old and name not in writer.originals:
                identity: Perm = ()
                original = writer.originals.get(old, (old, identity))
                if original[0] != name:  # with one pixel or one channel, one tensor has both layouts
                    writer.originals[name] = original


# --- reasons -----------------------------------------------------------------------------------------------------


def _why_border(graph: Graph, tensor: Tensor, inward: bool, reasons: Mapping[Node, str]) -> str:
    """Return why a channels-last region ends at a tensor: the reason why the node beyond it is channels-first.

    `inward` says that the tensor is the region's input.
    """
    if not inward and tensor.name in graph.outputs:
        return f"'{tensor.name}' is an output of the graph"
    if not inward and graph.is_fixed(tensor.name):
        return f"a subgraph reads '{tensor.name}'"
    first = _beside(tensor, inward, reasons)
    if first is None:
        return f"'{tensor.name}' is an input of the graph"
    # The adjacent node can be channels-first only because of a node farther away.
    node: Node | None = first
    for _ in range(MAX_NODES_BETWEEN):
        if node is None or node in reasons or not node.inputs:
            break
        node = _beside(node.inputs[0] if inward else node.outputs[0], inward, reasons)
    if node is None or node not in reasons:
        return f"{_named(first)} is channels-first: more bytes would be transposed if it were channels-last"
    as_another = "" if node is first else f", as {_named(node)} is"
    return f"{_named(first)} is channels-first{as_another}: {reasons[node]}"


def _beside(tensor: Tensor, inward: bool, reasons: Mapping[Node, str]) -> Node | None:
    """Return the producer of a tensor if `inward`, else the consumer that decides its layout; None if there is none.

    If there are several consumers, one without a channels-last form decides.  Other consumers are preferred to a Shape,
    because a Shape reads either layout.
    """
    if inward:
        return producer(tensor)
    readers = sorted(consumers(tensor), key=lambda node: (node not in reasons, op_of(node) == "Shape"))
    return readers[0] if readers else None


def _named(node: Node) -> str:
    return f"{node.op} '{node_label(node)}'"


def _is_convolution(node: Node) -> bool:
    return op_of(node) in operators.CONVOLUTIONS or str_attribute(node, "fusion", "") in CONVOLUTIONS


def _stays(why: Mapping[Node, str]) -> tuple[ChannelsFirst, ...]:
    return tuple(ChannelsFirst(node_label(n), n.outputs[0].name, reason, op_of(n)) for n, reason in why.items())


def _others(graph: Graph, chosen: Collection[Node], reasons: Mapping[Node, str]) -> tuple[ChannelsFirst, ...]:
    """Return the operators that stay channels-first although they have channels-last kernels, with the reasons."""
    known = {op for each in LAYOUT_FUSIONS.values() for op in each.operators}
    left = [node for node in graph.nodes if op_of(node) in known and node not in chosen]
    return _stays({node: reasons.get(node, "no channels-last convolution gains by it") for node in left})


def _why_refused(graph: Graph, one: Refused, reasons: Mapping[Node, str]) -> str:
    if one.widest is None:
        return "it computes one pixel, for which no layout is faster"
    why = _why_border(graph, one.widest, one.inward, reasons)
    return (
        f"Transposes around its region would move {bytes_text(one.border)}, which is more than {MAX_BORDER_SHARE:.0%} "
        f"of the {bytes_text(one.moved)} that its convolutions move; most are for '{one.widest.name}', because {why}"
    )
