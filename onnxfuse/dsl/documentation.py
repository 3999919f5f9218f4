"""Describe fusions as text: signatures, one-line summaries, and the names of variants."""

from __future__ import annotations

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import Alternatives, Capture, walk


def signature(fusion: Fusion) -> str:
    """Return the fused operator as one line: `layer_norm(x: "... d", …) -> "... d"`."""
    parameters = ", ".join(_parameter(c) for c in fusion.captures)
    return f"{fusion.name}({parameters}) -> {', '.join(fusion.out)}"


def summary(fusion: Fusion) -> str:
    """Return the first line of a fusion's documentation: its formula."""
    return fusion.doc.partition("\n")[0]


def variants(fusion: Fusion) -> dict[str, list[str]]:
    """Return the attributes that distinguish variants of the fused node, each with its possible values."""
    found: dict[str, list[str]] = {}
    for term in walk(*fusion.outputs):
        if isinstance(term, Alternatives) and term.name is not None:
            labels = found.setdefault(term.name, [])
            labels += [label for label in term.labels if label not in labels]
    return found


def _parameter(capture: Capture) -> str:
    dims = f': "{capture.dims}"' if capture.dims else ""
    return f"{capture.name}{'?' if capture.optional else ''}{dims}"
