"""Tables of which a node reads some rows: those whose numbers other inputs hold."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper


def lookups(
    op_type: str, attributes: Mapping[str, object], inputs: int, body: onnx.FunctionProto | None
) -> dict[int, int]:
    """By the place of a table among a node's inputs the place of the rows' numbers: of a Gather, or a node with a body.

    Rows are what the first axis counts; the node has so many inputs.
    """
    if body is None:
        return {0: 1} if op_type == "Gather" and not attributes.get("axis", 0) else {}
    found = {}
    for node in body.node:
        inner = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.ref_attr_name}
        for table, ids in lookups(node.op_type, inner, 2, None).items():
            names = node.input[table], node.input[ids]
            if all(name in body.input for name in names):
                table_place, ids_place = map(list(body.input).index, names)
                if max(table_place, ids_place) < inputs:  # else they are left out
                    found[table_place] = ids_place
    return found
