"""Shapes in a body that runs several times: a size of a carried value is known only if no iteration changes it.

A carried value starts with the shape of the Loop's input.  Where the body computes another size for the next iteration,
as for a cache that grows by a Concat, that size gets a new name.  The name stands for the size in any iteration, and
the body is inferred again.  Sizes that start equal and change equally, such as those of cached keys and values, share a
name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, TypeAlias

import onnx

from onnxfuse.algebra.sizes import Dim, Shape, Size, symbol
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.analysis.shape_info import OuterScope, ShapeInfo
from onnxfuse.control_flow.inputs import carried, leading_results
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node

CARRIED: Final = "carried_"  # prefix of the names of sizes that differ between iterations
MAX_ROUNDS: Final = 8  # after this many rounds, the shapes of carried values count as unknown

CarriedAxis: TypeAlias = tuple[str, int]  # (name of a carried value, axis)


def infer_repeated(graph: Graph, node: Node, body: onnx.GraphProto, scope: OuterScope) -> ShapeInfo:
    """Return the facts about a body's tensors that hold in every iteration; the body's graph is sorted."""
    names = [value.name for value in body.input]
    results = [value.name for value in body.output][leading_results(node) :]
    pairs = list(zip(carried(node, names), results, strict=False))
    named: set[Size] = set()
    for _ in range(MAX_ROUNDS):
        shapes = infer_shapes(graph, scope=scope)
        changed = _changed(graph, shapes, scope, pairs, named)
        if not changed:
            return shapes
        scope = replace(scope, shapes={**scope.shapes, **changed})
        graph.recorded_types.clear()  # the recorded types may be wrong after the first iteration
        graph.misdeclared.clear()
    return infer_shapes(graph, scope=replace(scope, shapes={**scope.shapes, **{name: None for name, _ in pairs}}))


def _changed(
    graph: Graph, shapes: ShapeInfo, scope: OuterScope, pairs: Iterable[tuple[str, str]], named: set[Size]
) -> dict[str, Shape | None]:
    """Return the new shapes of carried values that the body changes, with names for the changed sizes.

    A value whose rank changes gets the shape None.  `named` holds the sizes that earlier rounds named; the sizes that
    this round names are added to it.
    """
    tensors = graph.linked.tensors()
    changed: dict[str, Shape | None] = {}
    steps: dict[Size, dict[Size, list[CarriedAxis]]] = defaultdict(
        lambda: defaultdict(list)
    )  # steps[before][after]: the carried axes whose size an iteration changes from `before` to `after`
    for begun, ended in pairs:
        before, after = scope.shapes.get(begun), shapes.shape(tensors[ended]) if ended in tensors else None
        if before is not None and (after is None or len(after) != len(before)):
            changed[begun] = None
        elif before is not None and after is not None:
            for axis, (old, new) in enumerate(zip(before, after, strict=True)):
                steps[old][new].append((begun, axis))
    for place, size in _renamed(scope, steps, named).items():
        name, axis = place
        shape = list(changed.get(name) or scope.shapes[name] or ())
        shape[axis] = size
        changed[name] = tuple(shape)
    return changed


def _renamed(
    scope: OuterScope, steps: dict[Size, dict[Size, list[CarriedAxis]]], named: set[Size]
) -> dict[CarriedAxis, Dim]:
    """Return new names for sizes that an iteration changes, by carried axis (a carried value and an axis).

    Sizes that were equal and change to equal sizes get one name.  If axes that got one name in an earlier round now
    change in different ways, the axes that change in the first of these ways keep the name; the others get new names.
    """
    renamed: dict[CarriedAxis, Dim] = {}
    for old, following in steps.items():
        groups = list(following.items())[1:] if old in named else [each for each in following.items() if each[0] != old]
        for _, places in groups:
            size = symbol(f"{CARRIED}{next(scope.numbers)}")
            named.add(size)
            renamed |= dict.fromkeys(places, size)
    return renamed
