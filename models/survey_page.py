"""Write the survey's results as docs/coverage.md."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from survey_fused import OTHER_KIND, STRUCTURES, way

Entry = Mapping
MAX_ERROR = 120  # characters shown
HEAD = """# Coverage

How much of {count} public architectures is fused. `models/survey.py` exports each of them with random weights in a tiny
size, by both exporters of torch, with attention as the library computes it by default (mostly
`scaled_dot_product_attention`) and written out ("eager"), and optimizes the {exports} exports. What there is to fuse is
counted while the torch module runs, by the functions and modules that it calls. What it computes of parameters and
buffers alone is not counted, and what it computes several times of the same tensors counts once. What fuses is counted
in the fused nodes; norms and activations in regions, by the operators of these. A norm, an activation or a biased
product that onnxfuse or an exporter computes from other constants counts as not fused. An export that onnxruntime does
not run on inputs that the module takes, because the exporter lost an axis, a size or a type, counts as failed. Of
{verified} exports, one in eight, outputs and fused nodes were also compared in onnxruntime: {statuses}.

Made with {versions}.
All numbers: [results](../benchmarks/results/{name}).

{tables}"""
TABLES = """{level} By structure

| structure | exporter | counted | fused | |
|---|---|---:|---:|---:|
{totals}

{level} By architecture

All of it is fused of {complete_count} architectures:

{complete}

{others}{level} Not exported, or not run by onnxruntime

| architecture | exporter | error |
|---|---|---|
{errors}
"""
OTHERS = """\
Of the others, fused of counted by each exporter, in the order above; one number where these are equal.

| architecture | {structures} |
|---|{columns}|
{rows}

{level} Why not

The nearest miss of each structure that is not fused everywhere, by architecture; an export that failed is listed with
the exporter's error.

| architecture | exporter | structure | fused | nearest miss |
|---|---|---|---:|---|
{reasons}

"""


OLDER = "## An older release of transformers"
FRAMEWORK_SECTIONS: Mapping[str, tuple[str, str]] = {  # by framework: the heading, and what was exported
    "packages": ("## Packages of PyTorch", """\
`models/survey.py --packages` exports {count} configurations of x-transformers and models of vit-pytorch, as the
architectures above. A norm counts as fused in a region, too: x-transformers divides by L2 norms. Talking heads, top-k
masks and pixels of windows (SepViT) are attentions of another kind: a kernel of attention does not compute them, which
the report says."""),
    "keras": ("## Keras", """\
`models/survey_frameworks.py` writes {count} models of Keras' layers by `model.export(format="onnx")`, which tf2onnx
does for the backend TensorFlow, and PyTorch's exporters for torch. Each model has one or two of the layers that it is
named after; structures are counted by the layers of the model."""),
    "keras_hub": ("## KerasHub", """\
`models/survey_frameworks.py` writes {count} backbones of KerasHub by Keras and tf2onnx, with random weights in tiny
sizes. Structures are counted while the model runs, by the layers and functions that it calls."""),
    "jax": ("## JAX", """\
`models/survey_frameworks.py` writes {count} models of flax.nnx, flax.linen and Equinox, and attentions that are written
by hand, by jax2onnx. Structures are counted by the layers of the model."""),
    "paddle": ("## Paddle", """\
`models/survey_frameworks.py` writes {count} models of Paddle by paddle2onnx: its transformers, its vision models, and
decoders that are written by hand. Structures are counted by the layers that a run calls."""),
}  # fmt: skip
HEADINGS = (OLDER, *(heading for heading, _ in FRAMEWORK_SECTIONS.values()))
OLDER_HEAD = """{heading}

The same with the {count} of these architectures that transformers {transformers} has, where attention is mostly written
out. What torch computes of parameters alone is not counted. Of {verified} of the {exports} exports, one in eight,
outputs were also compared in onnxruntime: {statuses}.

Made with {versions}.
All numbers: [results](../benchmarks/results/{name}).

{tables}"""

COMPARED = "Outputs of {verified} of the {exports} exports were also compared in onnxruntime: {statuses}."
FRAMEWORK_HEAD = """{heading}

{intro}

{made}
All numbers: [results](../benchmarks/results/{name}).

{tables}"""


def page(result: Mapping, name: str) -> str:
    """Return the page of results that are stored as the file `name`, without the sections that follow."""
    return HEAD.format(**facts(result, name), tables=tables(result["exports"], "##"))


def older_section(result: Mapping, name: str) -> str:
    """Return the section of results of an older release of transformers, which are stored as the file `name`."""
    return OLDER_HEAD.format(
        **facts(result, name),
        heading=OLDER,
        transformers=result["made_with"]["transformers"],
        tables=tables(result["exports"], "###"),
    )


def framework_section(framework: str, result: Mapping, name: str) -> str:
    """Return the section of a framework's exports, whose results are stored as the file `name`."""
    (heading, intro), known = FRAMEWORK_SECTIONS[framework], facts(result, name)
    intro = f"{intro.format(**known)} {COMPARED.format(**known)}"
    intro, made = (_filled(each) for each in (intro, "Made with {versions}.".format(**known)))
    return FRAMEWORK_HEAD.format(
        **known, heading=heading, intro=intro, made=made, tables=tables(result["exports"], "###")
    )


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 119, break_on_hyphens=False)


def sections(text: str) -> dict[str, str]:
    """Return the sections of the page that other surveys have written, by their headings."""
    starts = sorted((at, heading) for heading in HEADINGS if (at := text.find(f"{heading}\n")) >= 0)
    ends = [*(at for at, _ in starts[1:]), len(text)]
    return {heading: text[at:end].rstrip("\n") + "\n" for (at, heading), end in zip(starts, ends, strict=True)}


def with_section(text: str, heading: str, section: str) -> str:
    """Return the page with a section in place of the one with its heading, or after all others."""
    found = {**sections(text), heading: section.rstrip("\n") + "\n"}
    main = text[: min((at for each in found if (at := text.find(f"{each}\n")) >= 0), default=len(text))].rstrip("\n")
    return "\n".join([f"{main}\n", *found.values()])


def facts(result: Mapping, name: str) -> dict[str, object]:
    """Return what the introductions say of results."""
    measured = [each for each in result["exports"] if "structures" in each]
    statuses = Counter(each["verified"] for each in measured if each["verified"])
    return {
        "count": len({each["architecture"] for each in measured}),
        "exports": len(measured),
        "verified": sum(statuses.values()),
        "statuses": ", ".join(f"{count} {status}" for status, count in sorted(statuses.items())),
        "versions": ", ".join(f"{name} {version}" for name, version in result["made_with"].items()),
        "name": name,
    }


def tables(entries: Sequence[Entry], level: str) -> str:
    """Return the tables of exports, under headings of a level."""
    measured = [each for each in entries if "structures" in each]
    architectures = list(dict.fromkeys(each["architecture"] for each in measured))
    complete = set(architectures) - {each["architecture"] for each in measured if not is_complete(each)}
    return TABLES.format(
        level=level,
        totals="\n".join(totals(measured)),
        complete_count=sum(each in complete for each in architectures),
        complete="\n".join(by_library(each for each in architectures if each in complete)),
        others=others(measured, [each for each in architectures if each not in complete], level),
        errors="\n".join(error_rows(entries)),
    )


def others(measured: Sequence[Entry], incomplete: Sequence[str], level: str) -> str:
    """Return the tables of architectures of which not all is fused; "" where there are none."""
    if not incomplete:
        return ""
    return OTHERS.format(
        level=level,
        structures=" | ".join(STRUCTURES),
        columns="|".join("---:" for _ in STRUCTURES),
        rows="\n".join(architecture_row(each, measured) for each in incomplete),
        reasons="\n".join(reason_rows(measured)),
    )


def by_library(architectures: Iterable[str]) -> Iterator[str]:
    """Yield a list item for each library, with the names of its architectures."""
    names: dict[str, list[str]] = {}
    for architecture in architectures:
        library, _, name = architecture.partition("/")
        names.setdefault(library, []).append(name)
    for library, found in names.items():
        yield textwrap.fill(f"- {library}: {', '.join(found)}", 119, subsequent_indent="  ", break_on_hyphens=False)


def is_complete(entry: Entry) -> bool:
    """Return whether everything that was counted in an export is fused."""
    return all(row["fused"] == row["count"] for row in entry["structures"].values())


def totals(measured: Sequence[Entry]) -> Iterator[str]:
    """Yield a row for each structure and exporter."""
    for structure in (*STRUCTURES, OTHER_KIND):
        for exporter in dict.fromkeys(way(each) for each in measured):
            found = [each["structures"].get(structure) for each in measured if way(each) == exporter]
            rows = [row for row in found if row is not None]
            if not rows:
                continue
            count, fused = sum(row["count"] for row in rows), sum(row["fused"] for row in rows)
            share = f"{fused / count:.1%}" if count else ""
            yield f"| {structure} | {exporter} | {count} | {fused} | {share} |"


def architecture_row(architecture: str, measured: Sequence[Entry]) -> str:
    """Return the row of one architecture."""
    exports = [each["structures"] for each in measured if each["architecture"] == architecture]
    cells = []
    for structure in STRUCTURES:
        found = [f"{row['fused']}/{row['count']}" if row["count"] else "" for row in (e[structure] for e in exports)]
        cells.append(found[0] if len(set(found)) == 1 else ", ".join(each or "0" for each in found))
    return f"| {architecture} | {' | '.join(cells)} |"


def reason_rows(measured: Sequence[Entry]) -> Iterator[str]:
    """Yield a row for each structure that is not fused everywhere, with the exporters for which the same is said."""
    exporters: dict[tuple[str, str, str, str], list[str]] = {}
    for each in measured:
        for structure, row in each["structures"].items():
            if row["fused"] < row["count"]:
                why = (row["why"] or ["nothing comes near"])[0].replace("|", "\\|")
                key = each["architecture"], structure, f"{row['fused']}/{row['count']}", why
                exporters.setdefault(key, []).append(way(each))
    for (architecture, structure, fused, why), ways in exporters.items():
        yield f"| {architecture} | {', '.join(ways)} | {structure} | {fused} | {why} |"


def error_rows(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a row for each export that failed."""
    for each in entries:
        if "error" in each:
            error = each["error"].replace("|", "\\|").replace("\n", " ").replace("](", "] (")[:MAX_ERROR]
            yield f"| {each['architecture']} | {way(each)} | {error} |"
