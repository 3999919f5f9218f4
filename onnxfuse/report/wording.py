"""Numbers as reports say them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """Return a number of bytes with its unit, in three digits."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def counted(count: int, what: str, several: str = "") -> str:
    """Return "1 node", "2 nodes"."""
    return f"{count:,} {what if count == 1 else several or what + 's'}"
