"""Finds the inputs that a node gathers: it reads only the rows that another input selects."""

from __future__ import annotations

from collections.abc import Sequence

import onnx


def gathered_tables(
    op: str, axis: int | None, inputs: Sequence[object], body: onnx.FunctionProto | None
) -> dict[int, int]:
    """Return a map from the index of each gathered input to the index of the input that holds its row numbers.

    op      the operator as `op_of` names it
    axis    the operator's attribute `axis`; a Gather is reported only if it gathers rows, so that this is 0 or None
    inputs  the node's inputs; optional ones at the end may be left out
    body    the function that the node calls; a Gather in it is reported if the table and the row numbers are both
            inputs of the function.  None for an operator that is not a function
    """
    if body is None:
        return {0: 1} if op == "Gather" and not axis else {}
    index_of = {name: index for index, name in enumerate(body.input[: len(inputs)])}
    gathers = (n for n in body.node if n.op_type == "Gather" and not any(a.name == "axis" and a.i for a in n.attribute))
    pairs = (gather.input[:2] for gather in gathers)
    return {index_of[table]: index_of[rows] for table, rows in pairs if table in index_of and rows in index_of}
