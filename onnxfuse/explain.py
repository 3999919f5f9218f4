"""Explain why a fusion did not apply: name the node and the difference, and show the pattern's source line."""

from __future__ import annotations

import difflib
import linecache
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import onnx

from onnxfuse.dsl.spans import Span
from onnxfuse.errors import UsageError, printable
from onnxfuse.fuse_model import FusedModel
from onnxfuse.ir.inline_functions import Inlined
from onnxfuse.ir.protos import is_control_flow, nodes, subgraphs
from onnxfuse.layout.fusions import LAYOUT_FUSIONS
from onnxfuse.match import Miss
from onnxfuse.printing import counted
from onnxfuse.recurrences import SCAN
from onnxfuse.report.similar import group
from onnxfuse.rewrite.replace import REGION, Fused
from onnxfuse.rules import RULES
from onnxfuse.spell_out import Stays

MAX_NAMED: Final = 5  # maximum number of nodes that a text names
SIZE: Final = re.compile(r"(?<=\w)=\d+")  # of an axis, as in "channels=24"; misses that differ in it alone are alike
RULE_NAMES: Final = frozenset(rule.left.name for rule in RULES)
CONVOLUTIONS: Final = ("conv_bias_activation", "conv_transpose_bias_activation")


def explanations(result: FusedModel, fusion: str | None = None, node: str | None = None) -> list[str]:
    """Return why a fusion does not apply, or why a node is not fused: one text per reason.

    Near misses come last, the nearest first.  If `fusion` is the name of a rewrite rule, a line before them names the
    nodes that the rule replaced.

    `result` must have been made with regions.  If neither a fusion nor a node is named, the near misses are only those
    that `FusedModel.near` returns, without rules of which only half matches: they are small.
    """
    found = [f"Left out: {one}\n" for one in result.left_out]
    if fusion == REGION or (node and not fusion):
        found += why_in_no_region(result.fused, result.no_region, node)
    if fusion == SCAN or (node and not fusion):
        found += [printable(f"scan: not at '{name}': {why}") + "\n" for name, why in result.no_scan.items()
                  if node in (None, name)]  # fmt: skip
    if node or fusion in CONVOLUTIONS or fusion in LAYOUT_FUSIONS:
        found += why_channels_first(result, fusion, node)
    if fusion is None:
        found += explain_stays(result.stays, node)
    found += where_rewritten(result, fusion)
    if fusion not in (REGION, SCAN):
        misses = nearest(result.missed if fusion or node else _near(result), fusion, node)
        once = {(miss.fusion.name, miss.node, miss.reason): miss for miss in reversed(misses)}
        misses = [miss for miss in misses if once[miss.fusion.name, miss.node, miss.reason] is miss]
        alike = group(misses, lambda miss: SIZE.sub("=…", miss.reason), lambda miss: (miss.fusion.name, miss.span))
        found += [explain(*each.items) + "\n" for each in sorted(alike, key=lambda each: misses.index(each.items[0]))]
    return found


def _near(result: FusedModel) -> list[Miss]:
    near = result.near(with_regions=True)
    return [miss for miss in near if miss.fusion.name not in RULE_NAMES or 2 * miss.matched > miss.of]


def where_rewritten(result: FusedModel, rule: str | None) -> list[str]:
    """Return a line that names the nodes that a rule replaced; nothing if there are none."""
    nodes = [node for _, each in result.everywhere() for name, node in each.graph.rewritten if name == rule]
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return [printable(f"{rule}: applied at '{nodes[0]}'{more}\n")] if nodes else []


def explain(miss: Miss, *alike: Miss) -> str:
    """Return the explanation of a near miss (a match that failed late), in several lines.

    `alike` are misses that differ from `miss` only in names.
    """
    what = f"rule {miss.fusion.name}" if miss.fusion.name in RULE_NAMES else miss.fusion.name
    head = f"{what}: not at '{miss.node}' ({miss.matched} of {miss.of} nodes agree)"
    lines = [head, f"  {miss.reason}", *_source(miss.span)]
    if miss.hint:
        lines.append(f"  help: {miss.hint}")
    if alike:
        others = list(dict.fromkeys(each.node for each in alike))  # nodes of several bodies can share a name
        equal = ", some of them with equal names" if len({miss.node, *others}) <= len(alike) else ""
        names = ", ".join(f"'{each}'" for each in others[:MAX_NAMED]) + (" ..." if len(others) > MAX_NAMED else "")
        lines.append(f"  the same at {counted(len(alike), 'more node')}{equal}: {names}")
    return "\n".join(map(printable, lines))


def explain_stays(stays: Iterable[Stays], node: str | None = None) -> list[str]:
    """Return why composite operators of other tools were not decomposed: one text per reason."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for one in stays:
        if node in (None, one.node):
            nodes.setdefault((one.op, one.reason), []).append(one.node)
    return [
        printable(f"{op}: '{first}'{f' and {len(more)} more stay' if more else ' stays'} as written")
        + f"\n  {printable(reason)}\n"
        for (op, reason), (first, *more) in nodes.items()
    ]


def why_channels_first(result: FusedModel, fusion: str | None = None, node: str | None = None) -> list[str]:
    """Return why convolutions, or operators of a layout fusion, are channels-first: one text per reason.

    A layout fusion replaces operators only where the layout stage makes them channels-last.  `node` can also be the
    name of a node that a fused convolution replaced, or of its output.
    """
    nodes: dict[str, list[str]] = {}
    replaced = {one.node: one.replaces for one in result.fused}
    made = LAYOUT_FUSIONS.get(fusion or "")
    others = [one for one in result.layout.others if fusion is None or (made and one.op in made.operators)]
    for one in (*(() if made else result.layout.stays), *others):
        if node in (None, one.node, one.output, *replaced.get(one.node, ())):
            nodes.setdefault(one.reason, []).append(one.node)
    return [
        printable(f"layout: '{first}'{f' and {len(more)} more are' if more else ' is'} channels-first")
        + f"\n  {printable(reason)}\n"
        for reason, (first, *more) in nodes.items()
    ]


def _source(span: Span) -> list[str]:
    """Return the source line that the span points into, with carets under it."""
    text = linecache.getline(span.file, span.line).rstrip("\n")
    if not text:
        return [f"  --> {span}"]
    number = str(span.line)
    end = span.end_column if span.end_column > span.column else len(text)
    margin = " " * len(number)
    carets = " " * span.column + "^" * max(end - span.column, 1)
    return [f"  --> {span}", f"  {margin} |", f"  {number} | {text}", f"  {margin} | {carets}"]


def nearest(misses: Iterable[Miss], fusion: str | None = None, node: str | None = None) -> list[Miss]:
    """Return the misses of a fusion in which some nodes matched, or all misses around a node, nearest first."""
    found = [
        m
        for m in misses
        if (fusion is None or m.fusion.name == fusion)
        and (m.matched or fusion is None if node is None else node in (m.node, *m.around))
    ]
    return sorted(found, key=lambda m: (-m.matched, m.of, m.fusion.name, m.node))


def require_node(name: str, model: onnx.ModelProto) -> None:
    """Raise UsageError, with the most similar name, unless a node or one of its outputs has this name."""
    names = [known for node in nodes(model.graph) for known in (node.name, *node.output) if known]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        raise UsageError(f"there is no node '{name}'" + (f". Did you mean '{near[0]}'?" if near else " in the model"))


def where_fused(fused: Sequence[Fused], node: str) -> str | None:
    """Return a sentence that names the fused node that replaced a node; None if no pattern replaced it."""
    matched = (one for one in fused if one.fusion != REGION and node not in one.joined)
    found = next((one for one in matched if node in one.replaces), None)
    if found is None:
        return None
    return f"'{node}' is part of the {found.fusion} node '{found.node}'" + (f" in {found.where}" if found.where else "")


def why_in_no_region(fused: Sequence[Fused], reasons: Mapping[str, str], node: str | None = None) -> list[str]:
    """Return why nodes are in no region, one line each; for a named node, only its reason or its fused node."""
    found = next((one for one in fused if node in one.replaces), None)
    if found is not None and found.fusion == REGION:
        return [f"'{node}' is part of the region node '{found.node}', which --regions makes"]
    if found is not None and node in found.joined:
        return [f"'{node}' is in the epilogue of the {found.fusion} node '{found.node}', which --epilogues makes"]
    return [printable(f"region: not at '{name}': {why}") for name, why in reasons.items() if node in (None, name)]


def where_inside(model: onnx.ModelProto, inlined: Inlined, name: str) -> str | None:
    """Describe the unfused body that holds a node with this name or output; None if no body does."""
    for outer, node in _nodes_outside_bodies(inlined.model.graph):
        if name in (node.name, *node.output):
            where = f"a subgraph of {outer.op_type} '{outer.name or outer.output[0]}'" if outer else ""
            return f"'{name}' is inside {where}; fused are subgraphs of If, Loop and Scan alone" if outer else None
    function = next((f for f in model.functions if any(name in (node.name, *node.output) for node in nodes(f))), None)
    if function is None:
        return None
    where = f"'{name}' is inside the function '{function.domain}.{function.name}'"
    if function in inlined.model.functions:
        return f"{where}, which is not inlined, so that its nodes are not fused"
    known = (each for node in nodes(inlined.model.graph) for each in (node.name, *node.output))
    copies = [f"'{each}'" for each in known if each.startswith(f"{name}__")]  # names made by onnx's function inliner
    return f"{where}, which is inlined where it is called: {', '.join(copies[:3])}{' ...' if len(copies) > 3 else ''}"


def _nodes_outside_bodies(
    graph: onnx.GraphProto, outer: onnx.NodeProto | None = None
) -> Iterator[tuple[onnx.NodeProto | None, onnx.NodeProto]]:
    """Yield (outer, node) for every node: `outer` is the outermost node around it with unfused subgraphs, or None."""
    for node in graph.node:
        yield outer, node
        for inner in subgraphs(node):
            yield from _nodes_outside_bodies(inner, outer or (None if is_control_flow(node) else node))
