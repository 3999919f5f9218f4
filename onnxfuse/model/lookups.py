"""Tables of which a node reads some rows: those whose numbers other inputs hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx


def lookups(op: str, axis: Any, inputs: Sequence[object], body: onnx.FunctionProto | None) -> dict[int, int]:
    """By the place of a table among a node's inputs that of its rows' numbers: of a Gather, or of those in its `body`.

    `op` is the operator as `op_of` names it; rows are what the first axis counts.
    """
    if body is None:
        return {0: 1} if op == "Gather" and not axis else {}
    given = {name: place for place, name in enumerate(body.input[: len(inputs)])}  # the others are left out
    gathers = (n for n in body.node if n.op_type == "Gather" and not any(a.name == "axis" and a.i for a in n.attribute))
    pairs = (gather.input[:2] for gather in gathers)
    return {given[table]: given[ids] for table, ids in pairs if table in given and ids in given}
