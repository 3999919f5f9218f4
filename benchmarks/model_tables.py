"""Print the results of whole models as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peers import PEERS


def tables(rows: Sequence[Mapping[str, Any]], order: Sequence[str]) -> str:
    """Return the tables of times back to back and paced, with the models in this order, and the errors."""
    paced = [{**row, **row["paced"]} for row in rows if "paced" in row]
    errors = [f"{row['model']}, {row['peer']}: {row['error']}" for row in rows if "error" in row]
    errors += [f"{row['model']}, {row['peer']}: off by {row['relative_error']} of the reference's norm"
               for row in rows if row.get("agrees") is False]  # fmt: skip
    parts = [table(rows, order, "back to back, ms"), *([table(paced, order, "paced, ms")] if paced else [])]
    return "\n".join(["\n\n".join(parts), *(line[:160] for line in errors)])


def table(rows: Sequence[Mapping[str, Any]], order: Sequence[str], title: str) -> str:
    """Return a table of medians, peers down and models across, without times of results that are wrong."""
    cases = [name for name in order if any(row["model"] == name for row in rows)]
    cells = {(row["model"], row["peer"]): cell(row) for row in rows}
    names = [peer.name for peer in PEERS if any(row["peer"] == peer.name for row in rows)]
    wide = [max(9, len(case)) for case in cases]
    lines = [" ".join([f"{title:26}", *(f"{case:>{w}}" for case, w in zip(cases, wide, strict=True))])]
    lines += [" ".join([f"{peer:26}", *(f"{cells.get((case, peer), ''):>{w}}" for case, w in
                                        zip(cases, wide, strict=True))]) for peer in names]  # fmt: skip
    return "\n".join(lines)


def cell(row: Mapping[str, Any]) -> str:
    """Return the median in milliseconds, "failed" or "wrong"."""
    if "error" in row:
        return "failed"
    return f"{row['median_ms']:.3f}" if row["agrees"] else "wrong"
