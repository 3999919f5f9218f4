"""Find the nodes that lose the most precision in half precision, and should be the next to stay in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.protos import copy_without
from onnxfuse.verify.cpu_session import open_session, run

MAX_COMPARED_AT_ONCE: Final = 64  # number of tensors compared in one run
# A node whose values are not finite gets the error FIRST_INFINITE / (index of the node + 1), above all other errors.
FIRST_INFINITE: Final = 1e300
AMPLIFIED: Final = 4.0  # a node amplifies an error if its own error exceeds this many times its inputs' error
Model = tuple[onnx.ModelProto, Path | None]


def suspects(
    plain: Model,
    half: Model,
    reals: Collection[str],
    feeds: Mapping[str, Array],
    half_feeds: Mapping[str, Array],
    tell: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Return the nodes of the main graph by their contribution to the error, the largest first.

    plain  the model in float32 and the folder of its data; `half` is the same model in half precision
    reals  the names of the floating-point tensors of `plain`

    The first node whose values are not finite comes before all others.  After a node that amplifies an error, such as a
    difference of large numbers, come the producers of its inputs.  Raises whatever onnxruntime raises.
    """
    nodes = plain[0].graph.node
    written = {name for node in half[0].graph.node for name in node.output}
    names = [n for node in nodes for n in node.output if n in written and n in reals]
    errors: dict[str, float] = {}
    for start in range(0, len(names), MAX_COMPARED_AT_ONCE):
        tell(f"errors of tensors {start} to {min(start + MAX_COMPARED_AT_ONCE, len(names))} of {len(names)}")
        wanted = names[start : start + MAX_COMPARED_AT_ONCE]
        exact, rounded = _values(plain, wanted, feeds), _values(half, wanted, half_feeds)
        errors |= {name: _error(exact[name], rounded[name]) for name in wanted}
    producers = {name: _label(node) for node in nodes for name in node.output}
    added: dict[str, float] = {}
    sources: dict[str, list[str]] = {}
    for place, node in enumerate(nodes):
        before = max((errors.get(name, 0.0) for name in node.input), default=0.0)
        after = max((errors.get(name, 0.0) for name in node.output), default=0.0)
        if after > before:
            added[_label(node)] = after - before if math.isfinite(after) else FIRST_INFINITE / (1 + place)
        if before and after > AMPLIFIED * before:
            sources[_label(node)] = [producers[name] for name in node.input if name in errors]
    ordered = sorted(added, key=lambda name: -added[name])
    return list(dict.fromkeys(each for name in ordered for each in (name, *sources.get(name, ()))))


def _label(node: onnx.NodeProto) -> str:
    return node.name or next((name for name in node.output if name), "")


def _values(model: Model, names: Sequence[str], feeds: Mapping[str, Array]) -> dict[str, Array]:
    result = copy_without(model[0], "graph")
    result.graph.CopyFrom(copy_without(model[0].graph, "output"))
    result.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    found = run(open_session(result, model[1], optimize=False), feeds)
    return {name: np.asarray(value).astype(np.float64) for name, value in found.items()}


def _error(exact: Array, rounded: Array) -> float:
    """Return the error of a tensor relative to its norm; infinite where NaN or infinite values appear."""
    if exact.shape != rounded.shape:
        return 0.0
    finite = np.isfinite(exact) & (np.abs(exact) < 1e4)
    if not np.isfinite(rounded[finite]).all():
        return math.inf
    norm = float(np.sqrt(np.square(exact[finite]).sum()))
    return float(np.sqrt(np.square(rounded[finite] - exact[finite]).sum())) / norm if norm else 0.0
