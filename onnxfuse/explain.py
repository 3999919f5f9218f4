"""Explain why a fusion did not apply: the model's node, what differs, and the pattern's source line with carets."""

from __future__ import annotations

import difflib
import linecache
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx

from onnxfuse.dsl.spans import Span
from onnxfuse.errors import UsageError
from onnxfuse.ir.protos import nodes, subgraphs
from onnxfuse.match import Miss
from onnxfuse.rewrite.replace import REGION, Fused


def explain(miss: Miss) -> str:
    """Return the explanation of one miss, in lines."""
    head = f"{miss.fusion.name}: not at '{miss.node}' ({miss.matched} of {miss.of} nodes agree)"
    lines = [head, f"  {miss.reason}", *_source(miss.span)]
    if miss.hint:
        lines.append(f"  help: {miss.hint}")
    return "\n".join(lines)


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
    """Return the misses of a fusion where some nodes agreed, or all misses around a node, nearest first."""
    found = [
        m
        for m in misses
        if (fusion is None or m.fusion.name == fusion)
        and (m.matched or fusion is None if node is None else node in (m.node, *m.around))
    ]
    return sorted(found, key=lambda m: (-m.matched, m.of, m.fusion.name, m.node))


def require_node(name: str, model: onnx.ModelProto) -> None:
    """Raise UsageError, with the most similar name, unless a node or one of its outputs has this name."""
    names = [known for node in model.graph.node for known in (node.name, *node.output) if known]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        raise UsageError(f"there is no node '{name}'" + (f". Did you mean '{near[0]}'?" if near else " in the model"))


def where_fused(fused: Sequence[Fused], node: str) -> str | None:
    """Return the fused node that replaced a node, in words; None where none did, or a region."""
    found = next((one for one in fused if node in one.replaces and one.fusion != REGION), None)
    return f"'{node}' is part of the {found.fusion} node '{found.node}'" if found else None


def why_in_no_region(fused: Sequence[Fused], reasons: Mapping[str, str], node: str | None = None) -> list[str]:
    """Return why nodes are in no region, one line each; of a named node that alone, or its region."""
    found = next((one for one in fused if node in one.replaces and one.fusion == REGION), None)
    if found is not None:
        return [f"'{node}' is part of the region node '{found.node}', which --regions makes"]
    return [f"region: not at '{name}': {why}" for name, why in reasons.items() if node in (None, name)]


def where_inside(model: onnx.ModelProto, name: str) -> str | None:
    """Return in words what the node of this name, or output, is inside of; None in the main graph, and for no node."""
    if any(name in (node.name, *node.output) for node in model.graph.node):
        return None
    for part, where in _inner_graphs(model):
        if any(name in (node.name, *node.output) for node in nodes(part)):
            return f"'{name}' is inside {where}; only nodes of the main graph are fused"
    return None


def _inner_graphs(model: onnx.ModelProto) -> Iterator[tuple[onnx.GraphProto | onnx.FunctionProto, str]]:
    """Yield the subgraphs and functions, in which nothing is fused, and what they are called in messages."""
    for node in model.graph.node:
        yield from ((part, f"a subgraph of {node.op_type} '{node.name or node.output[0]}'") for part in subgraphs(node))
    yield from ((function, f"the function '{function.domain}.{function.name}'") for function in model.functions)
