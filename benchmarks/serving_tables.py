"""Print the results of serving.py as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serving_engines import ENGINES

Row = list[object]
PASSES = {"first": "first visits", "first_of_all": "the shortest first visits", "later": "later visits"}


def table(part: str, result: Mapping[str, Any]) -> str:
    """Return the lines that tell the result of a part."""
    if "error" in result:
        return f"{part}: {result['error']}"
    title, rows = TABLES[part](result)
    stopped = f"; stopped early: {result['stopped']}" if result.get("stopped") else ""
    wrong = "; WRONG: the engines' outputs differ" if result.get("agrees") is False else ""
    return f"{part}: {title}{stopped}{wrong}\n{grid(rows)}"


def grid(rows: Sequence[Row]) -> str:
    """Return rows as columns; numbers have four digits, and a row of one cell is a sentence."""
    cells = [[f"{each:.4g}" if isinstance(each, float) else str(each) for each in row] for row in rows]
    wide = [max((len(row[i]) for row in cells if 1 < len(row) > i), default=0) for i in range(max(map(len, cells)))]
    sides = [str.ljust, *[str.rjust] * (len(wide) - 1)]
    aligned = ([side(text, w) for side, text, w in zip(sides, row, wide, strict=False)] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def _visits(result: Mapping[str, Any]) -> tuple[str, list[Row]]:
    rows: list[Row] = [["", "median", "p90", "worst"]]
    for engine in ENGINES:
        for name, words in (("first_ms", "first, ms"), ("later_ms", "later, ms"), ("first_to_later", "first to later")):
            found = result[engine][name]
            rows.append([f"{engine}: {words}", found["median"], found["p90"], found["worst"]])
    return f"{result['shapes']} of {result['asked']} fresh shapes", rows


def _load(result: Mapping[str, Any]) -> tuple[str, list[Row]]:
    columns = ("threads", "requests", "requests_per_s", "p50_ms", "p90_ms", "p99_ms", "worst_ms")
    rows: list[Row] = [["", *columns]]
    rows += [[f"{row['engine']}, {row['shapes']} shapes", *(row[name] for name in columns)] for row in result["rows"]]
    return f"{result['shapes']} shapes that were visited, and unseen ones", rows


def _cache(result: Mapping[str, Any]) -> tuple[str, list[Row]]:
    rows: list[Row] = [["", "median ms", "p99", "worst", "largest ratio to neighbours", "at past", "over 1.2"]]
    for engine in ENGINES:
        for which, found in result[engine].items():
            times = [found["step_ms"][name] for name in ("median", "p99", "worst")]
            ratio = found["to_neighbours"]["worst"]
            rows.append([f"{engine}, {PASSES[which]}", *times, ratio, found["worst_at_past"], found["over_limit"]])
    return f"{result['steps']} of {result['asked']} steps, {result['passes']} times in new sessions", rows


def _memory(result: Mapping[str, Any]) -> tuple[str, list[Row]]:
    rows: list[Row] = [["", "shapes", "session", "requests", "their second half"]]
    for engine in ENGINES:
        found = result[engine]
        for kind in (name for name in ("host_mib", "gpu_mib") if name in found.get("session", ())):
            growth = [found[span][kind] for span in ("session", "requests", "second_half")]
            rows.append([f"{engine}, {kind.removesuffix('_mib')}", found["shapes"], *growth])
        rows += [[f"{engine}: {found[why]}"] for why in ("error", "stopped") if found.get(why)]
    for kind, share in result.get("beyond_onnxruntime", {}).items():
        rows.append([f"onnxfuse takes {100 * share:+.1f} % of {kind} memory beyond onnxruntime's"])
    return "growth in MiB", rows


def _cold(result: Mapping[str, Any]) -> tuple[str, list[Row]]:
    rows: list[Row] = [["", "median", *(f"start {i + 1}" for i in range(result["asked"]))]]
    for row in result["rows"]:
        if row["seconds"]:
            rows.append([row["start"], row["median_s"], *row["seconds"]])
        rows += [[f"{row['start']}: {row['error']}"]] if "error" in row else []
        rows += (
            [[f"{row['start']}: WRONG: the outputs differ from onnxruntime's"]] if row.get("agrees") is False else []
        )
    sizes = ", ".join(f"{name} {size}" for name, size in result["sizes"].items())
    return f"seconds from the start of a process to its first answer ({sizes})", rows


def _background(result: Mapping[str, Any]) -> tuple[str, list[Row]]:
    sizes = [" ".join(f"{name} {size}" for name, size in each.items()) for each in result["sizes"]]
    rows: list[Row] = [["", "requests", "p50 ms", "p99", "worst", *(f"p50 at {each}" for each in sizes)]]
    for row in result["rows"]:
        times = [row[name] for name in ("requests", "p50_ms", "p99_ms", "worst_ms")]
        rows.append([f"{row['phase']}, tune={row['tune']}", *times, *row["median_ms_by_size"]])
    return f"{result['measured']} kernels and sizes measured between requests {result['pause_ms']:.0f} ms apart", rows


def _unprepared(result: Mapping[str, Any]) -> tuple[str, list[Row]]:
    rows: list[Row] = [["", "median", "p90", "worst"]]
    kinds = {"first": "first visits", "body": "of bodies alone", "later": "later", "body_later": "of bodies alone"}
    others = {name: words for name, words in kinds.items() if f"{name}_ms" in result}  # absent if one shape was visited
    for name, words in others.items():
        rows.append([f"{words}, ms", *(result[f"{name}_ms"][each] for each in ("median", "p90", "worst"))])
    first, bodies = result["first_run_ms"], result["first_run_body_ms"]
    rows.append([f"the first run of all: {first:.4g} ms; of bodies alone: {bodies:.4g} ms"])
    if others:
        beyond, later = result["beyond_body_ms"], result["beyond_body_later_ms"]
        rows.append(
            [f"the slowest of the others beyond bodies alone: {beyond:.4g} ms; beyond their later run: {later:.4g}"]
        )
    times = ", ".join(f"{name} {result[f'{name}_s']:.3g} s" for name in ("session", "all_answered", "all_compiled"))
    return f"{len(result['rows'])} of {result['asked']} shapes while kernels are compiled ({times})", rows


TABLES = {"unprepared": _unprepared, "visits": _visits, "load": _load, "cache": _cache, "memory": _memory,
          "cold": _cold, "background": _background}  # fmt: skip
