"""Fusions as text: signatures, one-line summaries and the catalogue page docs/fusions.md."""

from __future__ import annotations

from collections.abc import Iterable

from onnxfuse.dsl.catalogue import builtin
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
    """Return the attributes of the fused node that say which variant it is, with their values."""
    found: dict[str, list[str]] = {}
    for term in walk(*fusion.outputs):
        if isinstance(term, Alternatives) and term.name is not None:
            labels = found.setdefault(term.name, [])
            labels += [label for label in term.labels if label not in labels]
    return found


def catalogue_page(fusions: Iterable[Fusion]) -> str:
    """Return docs/fusions.md: a section for each fusion."""
    head = (
        "# Fusions\n\n"
        "Generated from the declarations in `patterns/` by `python -m onnxfuse.dsl.documentation > docs/fusions.md`.\n"
        "A `?` marks an operand or parameter that may be absent.\n"
    )
    return head + "".join(map(_section, fusions))


def _section(fusion: Fusion) -> str:
    lines = [f"\n## {fusion.name}\n", f"{fusion.doc}\n"]
    lines += [f"- `{c.name}{'?' if c.optional else ''}`: {_kind(c)}" for c in fusion.captures]
    lines += [f"- output: `{out}`" for out in fusion.out]
    lines += [f"- `{name}`: {', '.join(labels)}" for name, labels in variants(fusion).items()]
    lines += [f"- required: {guard.sentence}" for guard in fusion.guards]
    return "\n".join(lines) + f"\n\n```python\n{fusion.source}```\n"


def _parameter(capture: Capture) -> str:
    dims = f': "{capture.dims}"' if capture.dims else ""
    return f"{capture.name}{'?' if capture.optional else ''}{dims}"


def _kind(capture: Capture) -> str:
    dims = f" `{capture.dims}`" if capture.dims else ""
    value = f", {capture.if_absent} if absent" if capture.if_absent is not None else ""
    return f"{capture.kind}{dims}{value}"


if __name__ == "__main__":
    print(catalogue_page(builtin()), end="")
