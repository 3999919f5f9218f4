"""A hook of MkDocs: draw the plots that pages ask for by a line `<!-- plot: name -->`, from benchmarks/results."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gains import three_digits
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page
from results import result, rows
from tables import MODELS, models

from onnxfuse.bench.chart import Bar, svg

MARK: Final = re.compile(r"^<!-- plot: (\w+) -->$", re.MULTILINE)
REGIONS: Final = {
    "onnxruntime_ms": "onnxruntime", "torch_compile_ms": "torch.compile", "without_regions_ms": "without regions",
    "with_regions_ms": "with regions",
}  # fmt: skip
CHAINED: Final = {"ort_chain_us": "onnxruntime", "inductor_chain_us": "Inductor", "chain_us": "onnxfuse"}
OURS: Final = ("onnxfuse", "with regions")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Put the plots in the places of their marks.  Raises PluginError for a plot that does not exist."""

    def drawn(match: re.Match[str]) -> str:
        if match[1] not in PLOTS:
            raise PluginError(f"{page.file.src_uri} asks for the plot '{match[1]}'; there are {', '.join(PLOTS)}")
        caption, bars = PLOTS[match[1]]
        return f'<figure class="chart">\n{svg(bars())}\n<figcaption>{caption}</figcaption>\n</figure>'

    return MARK.sub(drawn, markdown)


def whole_models() -> list[Bar]:
    """Return the times of models, relative to the fastest other engine."""
    return [
        Bar(
            MODELS[model.name], model.ratio, None,
            f"{three_digits(model.ours)} ms, the other {three_digits(model.other)} ms", "fused",
        )
        for model in sorted(models(), key=lambda model: model.ratio)
    ]  # fmt: skip


def regions() -> list[Bar]:
    """Return the times of the models whose peers were timed too, relative to onnxruntime."""
    times = {row["model"]: row for row in rows("regions-models-h200", "results") if "onnxruntime_ms" in row}
    return _relative(times, REGIONS, "ms")


def chained_kernels() -> list[Bar]:
    """Return the times of launches of 4096x768 in a chain, relative to onnxruntime's."""
    found = rows("kernels-h200", shape=[4096, 768], dtype="float16")
    times = {row["fusion"]: row for row in found if "ort_chain_us" in row}
    return _relative(dict(sorted(times.items())), CHAINED, "us")


def throughput() -> list[Bar]:
    """Return the requests per second of threads that share a session, of shapes that were visited before."""
    visited = [row for row in result("serving-h200")["parts"]["load"]["rows"] if row["shapes"] == "visited"]
    return [
        Bar(
            f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}: {row['engine']}", row["requests_per_s"], None,
            f"{row['requests_per_s']:.0f}/s, 99 % in {three_digits(row['p99_ms'])} ms",
            "fused" if row["engine"] in OURS else "plain",
        )
        for row in visited
    ]  # fmt: skip


def _relative(times: Mapping[str, Mapping[str, Any]], engines: Mapping[str, str], unit: str) -> list[Bar]:
    """Return a bar for each time of the engines, relative to the first one."""
    first = next(iter(engines))
    return [
        Bar(
            f"{subject}: {label}", found[key] / found[first], None, f"{three_digits(found[key])} {unit}",
            "fused" if label in OURS else "plain",
        )
        for subject, found in times.items()
        for key, label in engines.items()
        if found.get(key) is not None
    ]  # fmt: skip


PLOTS: Final[Mapping[str, tuple[str, Callable[[], Sequence[Bar]]]]] = {
    "whole_models": ("Time of a run in a CUDA graph, relative to the fastest other engine's.", whole_models),
    "regions": ("Time of a run in a CUDA graph, relative to onnxruntime's; shorter is faster.", regions),
    "chained_kernels": ("Time of a launch in a chain, relative to onnxruntime's; shorter is faster.", chained_kernels),
    "throughput": ("Requests per second of threads that share a session; longer is faster.", throughput),
}  # fmt: skip
