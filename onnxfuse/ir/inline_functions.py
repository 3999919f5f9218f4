"""Inline a model's own functions: replace calls by the functions' nodes, so that these nodes can be fused."""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

import onnx
import onnx.inliner

from onnxfuse.errors import ModelError
from onnxfuse.ir.domain import DOMAIN, ORT_DOMAIN, is_fused
from onnxfuse.ir.protos import (
    ONNX_DOMAINS,
    NodeContainer,
    copy_without,
    import_opset,
    nodes,
    opset_of,
    subgraphs,
    without_initializers,
)

Key: TypeAlias = tuple[str, str, str]  # (domain, name, overload) of a function

MAX_NODES_INLINED: Final = 100_000  # optimizing this many nodes takes about a minute; further functions are not inlined
# Limit of the nodes after all calls are expanded; onnx's shape inference takes 33 us per node.
MAX_NODES_EXPANDED: Final = 1_000_000
MAX_DEPTH: Final = 30  # limit of nested subgraphs; each takes 3 of the 100 message levels that protobuf reads
# In these domains, onnxruntime prefers its own operator to a function of the same name in the model.
KERNEL_DOMAINS: Final = frozenset({DOMAIN, ORT_DOMAIN, "ai.onnx.ml", *ONNX_DOMAINS})


@dataclass(frozen=True)
class Inlined:
    """A model after inlining, and the number of inlined calls; `kept` holds sentences that say why functions remain."""

    model: onnx.ModelProto
    calls: int = 0
    kept: tuple[str, ...] = ()


def inline_functions(model: onnx.ModelProto, fused: bool = False) -> Inlined:
    """Return the model with calls of its own functions inlined; `model` is not changed.

    Fused operators remain, unless `fused` is given.  Functions also remain if inlining them would add more than
    MAX_NODES_INLINED nodes.
    """
    if not model.functions:
        return Inlined(model)
    functions = {_key(f): f for f in model.functions}
    kept = {key: "" for key in functions if key[0] in KERNEL_DOMAINS and not (fused and key[0] == DOMAIN)}
    for key in _calls_of_others(model):
        kept.pop(key, None)
    kept |= _too_many(model, functions, kept)
    calls = sum(count for key, count in _calls(model.graph, functions).items() if key not in kept)
    if not calls:
        return Inlined(model, 0, tuple(filter(None, kept.values())))
    return Inlined(_inlined(model, functions, kept), calls, tuple(filter(None, kept.values())))


def _inlined(
    model: onnx.ModelProto, functions: Mapping[Key, onnx.FunctionProto], kept: Collection[Key]
) -> onnx.ModelProto:
    """Return the model with all functions except `kept` inlined; weights are not read.

    onnx's inliner skips functions whose opset number differs from the model's, so functions get the model's number
    first.  This is safe: onnx and onnxruntime refuse a function if the two opsets define one of its operators
    differently.
    """
    light = copy_without(without_initializers(model), "functions")
    needed = _reached(functions, kept)
    for key, function in functions.items():
        if key not in kept:
            light.functions.add().CopyFrom(function)
            import_opset(light.functions[-1], opset_of(model))
    for part in (light.graph, *light.functions):
        _state_defaults(part, functions)
    result = onnx.inliner.inline_local_functions(light)
    result.graph.initializer.extend(model.graph.initializer)
    del result.functions[:]
    result.functions.extend(function for key, function in functions.items() if key in needed)
    present = {o.domain for o in result.opset_import}
    for function in functions.values():
        missing = [o for o in function.opset_import if o.domain not in present]
        result.opset_import.extend(missing)
        present |= {o.domain for o in missing}
    return result


def _calls_of_others(model: onnx.ModelProto) -> Iterator[Key]:
    """Yield the called functions that are in onnxfuse's domain but that onnxfuse did not write."""
    for node in nodes(model.graph, *model.functions):
        if node.domain == DOMAIN and not is_fused(node):
            yield node.domain, node.op_type, node.overload


def _key(function: onnx.FunctionProto) -> Key:
    return function.domain, function.name, function.overload


def _calls(part: onnx.GraphProto | onnx.FunctionProto, functions: Collection[Key]) -> Counter[Key]:
    """Return how often a graph or a function calls each function."""
    found = ((n.domain, n.op_type, n.overload) for n in nodes(part))
    return Counter(key for key in found if key in functions)


def _reached(functions: Mapping[Key, onnx.FunctionProto], kept: Collection[Key]) -> set[Key]:
    """Return the functions that remain in the model: `kept`, and all that they call, directly or indirectly."""
    reached, work = set[Key](), list(kept)
    while work:
        key = work.pop()
        if key not in reached:
            reached.add(key)
            work += _calls(functions[key], functions)
    return reached


def _too_many(
    model: onnx.ModelProto, functions: Mapping[Key, onnx.FunctionProto], kept: Collection[Key]
) -> dict[Key, str]:
    """Return which functions to keep, each with the reason, so that the rest adds at most MAX_NODES_INLINED nodes.

    The functions whose calls add the most nodes are kept first.  All functions are kept if some call each other in a
    cycle, which no runtime accepts.
    """
    inner = {key: _calls(function, functions) for key, function in functions.items()}
    try:
        called_first = _called_first(inner)
    except graphlib.CycleError as error:
        domain, name, _ = error.args[1][0]
        return dict.fromkeys(functions, "") | {error.args[1][0]: f"the function {domain}.{name} stays: it calls itself"}
    own = {key: sum(1 for _ in nodes(function)) for key, function in functions.items()}
    main = _calls(model.graph, functions)
    left: dict[Key, str] = {}
    while True:
        stay, sizes, calls = {*kept, *left}, dict[Key, int](), Counter[Key]()
        for key in called_first:
            sizes[key] = own[key] + sum(count * (sizes[k] - 1) for k, count in inner[key].items() if k not in stay)
        for key in reversed(called_first):
            calls[key] += 0 if key in stay else main[key]
            for k, count in inner[key].items():
                calls[k] += 0 if k in stay else count * calls[key]
        if sum(count * sizes[key] for key, count in main.items() if key not in stay) <= MAX_NODES_INLINED:
            return left
        worst = max(calls, key=lambda key: (calls[key] * sizes[key], key))
        brought = calls[worst] * sizes[worst]
        left[worst] = f"the function {worst[0]}.{worst[1]} stays: its calls would become {brought:,} nodes"


def _called_first(inner: Mapping[Key, Counter[Key]]) -> list[Key]:
    """Return functions ordered so that each follows the functions it calls.  Raises CycleError for a cycle of calls."""
    return list(graphlib.TopologicalSorter({key: set(calls) for key, calls in inner.items()}).static_order())


def check_expanded(model: onnx.ModelProto, name: str) -> None:
    """Raise ModelError if expanding all calls, including fused operators, gives too many nodes or too deep nesting.

    onnx's shape inference visits all expanded nodes.  Their number can grow exponentially: if each of 60 functions
    calls the next one twice, the number doubles 60 times.  A cycle of calls, which no runtime accepts, is not expanded.
    """
    if not model.functions:
        return
    functions = {_key(f): f for f in model.functions}
    inner = {key: _calls(function, functions) for key, function in functions.items()}
    sizes = {key: sum(1 for _ in nodes(function)) for key, function in functions.items()}
    depths: dict[Key, int] = {}
    with suppress(graphlib.CycleError):
        for key in _called_first(inner):
            sizes[key] += sum(count * (sizes[k] - 1) for k, count in inner[key].items())
            depths[key] = _depth(functions[key], depths)
    main = _calls(model.graph, functions)
    if (total := sum(count * sizes[key] for key, count in main.items())) > MAX_NODES_EXPANDED:
        raise ModelError(
            f"{name} calls functions that would become {total:,} nodes; expected at most {MAX_NODES_EXPANDED:,}: "
            "export it without these functions"
        )
    if (depth := _depth(model.graph, depths)) > MAX_DEPTH:
        raise ModelError(
            f"{name} has subgraphs in subgraphs, {depth} deep with its functions inlined; expected at most "
            f"{MAX_DEPTH}: export it without these functions"
        )


def _depth(part: NodeContainer, depths: Mapping[Key, int]) -> int:
    """Return the depth of nested subgraphs in a graph or function after inlining; `depths` maps functions to theirs."""
    found = 0
    for node in part.node:
        called = depths.get((node.domain, node.op_type, node.overload), 0)
        found = max(found, called, *(1 + _depth(inner, depths) for inner in subgraphs(node)))
    return found


def _state_defaults(part: onnx.GraphProto | onnx.FunctionProto, functions: Mapping[Key, onnx.FunctionProto]) -> None:
    """Add a function's default attributes to the calls that omit them, because onnx's inliner would drop them."""
    for node in nodes(part):
        function = functions.get((node.domain, node.op_type, node.overload))
        if function is not None and function.attribute_proto:
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(a for a in function.attribute_proto if a.name not in given)
