"""The report as a page: one HTML file that contains all its data, and needs no network."""

from __future__ import annotations

import functools
import json
import re
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from onnxfuse.errors import printable
from onnxfuse.half.result import half_sentences
from onnxfuse.printing import bytes_text, counted
from onnxfuse.report.fates import FATES
from onnxfuse.report.picture import Table, picture
from onnxfuse.report.sections import (
    NO_REASON,
    Shown,
    advice,
    fate_counts,
    groups,
    hues_of,
    miss_groups,
    operators,
    reasons_of,
    stayed,
    verdict,
)
from onnxfuse.report.times import rate_text, roofline, timed_graph
from onnxfuse.rewrite.replace import Fused

ASSETS: Final = files("onnxfuse.report") / "assets"


def write_page(report: Shown) -> str:
    """Return the HTML text of the whole page."""
    return _render("page.html.j2", report, asset=_asset, data=_as_script(data(report)))


def write_summary(report: Shown) -> str:
    """Return a compact HTML fragment for notebooks: the fusions, the savings and the result of the verification."""
    return _render("summary.html.j2", report)


def data(report: Shown) -> dict[str, Any]:
    """Return, as JSON values, the data that the page's script draws and searches, and from which it writes plans.

    A match is a list: its fusion, node, output, graph (a text), dims, the nodes in its epilogue, and the nodes that it
    replaces.  The list of replaced nodes is empty if the entry "graphs" has them.
    """
    texts, facts = Table(), report.facts
    reasons = reasons_of(report)
    graphs = [
        picture(each, report.fused, report.folded, texts) | {"why": {
            i: texts.number(reasons.get(node.label, NO_REASON))
            for i, node in enumerate(each.after.nodes) if not node.is_fused
        }}
        for each in (facts.graphs if facts else ())
    ]  # fmt: skip
    drawn = {number for each in graphs for number in each["matches"]}
    matches = [
        [one.fusion, one.node, one.output, one.where, texts.number(_dims_text(one)), list(one.joined),
         [] if number in drawn else list(one.replaces)]
        for number, one in enumerate(report.fused)
    ]  # fmt: skip
    plain = report.to_dict()
    plan = {"name": facts.name, "digest": plain["input"]["digest"]} if facts else None
    hues = hues_of(one.fusion for one in report.fused)
    off = plain["switched_off"]
    return {
        "plan": plan,
        "off": off,
        "fates": FATES,
        "hues": hues,
        "graphs": graphs,
        "matches": matches,
        "texts": texts.texts,
    }


def _dims_text(one: Fused) -> str:
    return "\n".join(f"{name} = {size}" for name, size in one.dims.items())


def _render(template: str, report: Shown, **values: Any) -> str:
    return _templates().get_template(template).render(**_shown(report), **values)


def _as_script(value: Any) -> Markup:
    """Return plain data as JSON that is safe inside a script element."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def _asset(name: str) -> Markup:
    return Markup((ASSETS / name).read_text(encoding="utf-8"))


@functools.cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("onnxfuse.report", "assets"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_printable,
    )  # fmt: skip
    environment.filters |= {
        "bytes": bytes_text,
        "count": counted,
        "rate": rate_text,
        "code": code_text,
        "soft": soft_text,
    }
    return environment


def _printable(value: object) -> object:
    """Return a template's value; in texts, which can quote a model, non-printing characters are escaped."""
    return printable(value, keep="\n") if type(value) is str else value


def _shown(report: Shown) -> dict[str, Any]:
    """Return the variables for the page's templates."""
    plain, misses = report.to_dict(), miss_groups(report)
    left = stayed(report, plain)
    times = report.times or report.estimated_times
    graph = next(iter(report.facts.graphs), None) if report.facts else None
    timed = timed_graph(times, graph, report.fused, report.folded) if times and graph else None
    return {
        "report": plain,
        "only_bodies": report.only_bodies_changed,
        "facts": report.facts,
        "times": times,
        "timed": timed,
        "roofline": roofline(timed.rows, times) if timed and times else None,
        "hues": hues_of(one.fusion for one in report.fused),
        "single": sum(len(one.replaces) <= 1 for one in report.fused),
        "sizes": report.verified.sizes,
        "weights": report.weights,
        "half": list(half_sentences(report.half)) if report.half else [],
        "verdict": verdict(report.verified, len(report.fused)),
        "fates": fate_counts(report),
        "operators": operators(plain),
        "groups": groups(report),
        "misses": misses,
        "stayed": left,
        "advice": list(advice(report, plain, misses, left)),
    }


def code_text(text: str) -> Markup:
    """Return a sentence as HTML; text between backticks becomes <code> elements."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(printable(text)))))


def soft_text(name: str) -> Markup:
    """Return a name as HTML in which lines may break after underscores."""
    return Markup(str(escape(printable(name))).replace("_", "_<wbr>"))
