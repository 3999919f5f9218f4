"""Make a model that fails smaller, as long as it fails for the same reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import onnx
from drafts import type_outputs, types
from judge import Verdict, judge
from onnx import helper

from onnxfuse.ir.protos import nodes

SECONDS = 60.0  # that one reduction may take


def reduced(
    model: onnx.ModelProto, sizes: Mapping[str, int], seed: int, verdict: Verdict, again: Callable[..., Verdict] = judge
) -> tuple[onnx.ModelProto, Verdict]:
    """Return the smallest model found whose verdict has the key of `verdict`, and its verdict."""
    until = time.monotonic() + SECONDS
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(model):
            if time.monotonic() > until:
                return model, verdict
            now = again(smaller, sizes, seed)
            if now.kind == verdict.kind and (verdict.kind == "wrong" or now.key == verdict.key):
                model, verdict, changed = smaller, now, True
                break
    return model, verdict


def _smaller(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Yield models with one output, that end earlier, that begin later, and without a node, in bodies too."""
    outputs = [o.name for o in model.graph.output]
    if len(outputs) > 1:
        yield from (_with_outputs(model, [name]) for name in outputs)
        yield from (_with_outputs(model, [n for n in outputs if n != name]) for name in outputs)
    for node in reversed(model.graph.node):
        if set(node.output) & set(outputs):
            for name in dict.fromkeys(node.input):
                if name and name not in outputs and any(name in n.output for n in model.graph.node):
                    yield _with_outputs(model, [*(n for n in outputs if n not in node.output), name])
    known = types(model)
    for node in model.graph.node:
        made = [name for name in node.output if name]
        if node.op_type != "Constant" and len(made) == 1 and made[0] in known and made[0] not in outputs:
            yield _beginning_at(model, made[0], known[made[0]])
    for node in model.graph.node:
        passed = [name for name in node.input if name in known][:1]
        if len(node.output) == 1 and passed and node.output[0] not in outputs:
            yield _without(model, node, passed[0])
    for index, node in enumerate(_nodes_of_bodies(model)):
        if len(node.output) == 1 and node.input and node.input[0] and node.op_type != "Identity":
            yield _passing_in_body(model, index)


def _nodes_of_bodies(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return list(nodes(model.graph))[len(model.graph.node) :]


def _passing_in_body(model: onnx.ModelProto, index: int) -> onnx.ModelProto:
    """Return the model with a node of a body replaced by an Identity."""
    copy = _copy(model)
    node = _nodes_of_bodies(copy)[index]
    node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output, node.name))
    return _pruned(copy)


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _with_outputs(model: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    copy = _copy(model)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names))
    return _pruned(copy)


def _beginning_at(model: onnx.ModelProto, name: str, kind: onnx.TypeProto) -> onnx.ModelProto:
    copy = _copy(model)
    kept = [node for node in copy.graph.node if name not in node.output]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    copy.graph.input.append(helper.make_value_info(name, kind))
    return _pruned(copy)


def _without(model: onnx.ModelProto, gone: onnx.NodeProto, instead: str) -> onnx.ModelProto:
    copy = _copy(model)
    kept = [node for node in copy.graph.node if gone.output[0] not in node.output]
    for node in kept:
        node.input[:] = [instead if name == gone.output[0] else name for name in node.input]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    return _pruned(copy)


def _pruned(model: onnx.ModelProto) -> onnx.ModelProto:
    """Remove what no output needs, and infer the types of the outputs."""
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    needed: set[str] = set()
    work = [o.name for o in graph.output]
    while work:
        name = work.pop()
        if name not in needed:
            needed.add(name)
            work += _reads(makers[name]) if name in makers else []
    for part in (graph.node, graph.input, graph.initializer):
        kept = [each for each in part if needed & set(each.output if isinstance(each, onnx.NodeProto) else [each.name])]
        del part[:]
        part.extend(kept)
    del graph.value_info[:]
    type_outputs(model)
    return model


def _reads(node: onnx.NodeProto) -> list[str]:
    inner = [name for a in node.attribute if a.HasField("g") for each in a.g.node for name in _reads(each)]
    return [*node.input, *inner]


def text(model: onnx.ModelProto) -> str:
    """Return the model in the text form of ONNX, or, where that has none of it, that of the message."""
    try:
        return onnx.printer.to_text(model)
    except Exception:
        return str(model)
