"""The content of a page's sections: verdict, charts, fused nodes, near misses, unfused nodes, and advice."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from onnxfuse.dsl.spans import Span
from onnxfuse.half.result import HalfResult
from onnxfuse.match import Miss
from onnxfuse.passes.folded import Folded
from onnxfuse.printing import counted
from onnxfuse.quantize.result import WeightsResult
from onnxfuse.recurrences import SCAN
from onnxfuse.recurrences import SUMMARY as SCAN_SUMMARY
from onnxfuse.report.facts import Facts, FusionNote
from onnxfuse.report.fates import FATES, find_fates
from onnxfuse.report.similar import group
from onnxfuse.report.times import Times
from onnxfuse.rewrite.replace import REGION, Fused, count_replaced
from onnxfuse.spell_out import Stays
from onnxfuse.verify.compare import Verification

REGION_FORMULA: Final = "operators that no pattern names, in one kernel that is generated from them"
NO_REASON: Final = "no fusion has this operator in this place"
# Maps a word in the names of a family of fusions to the family's hue (a colour angle in degrees) in the picture.
HUES: Final = (
    ("attention", 295), ("gemm", 255), ("conv", 155), ("norm", 75), (REGION, 25), ("embedding", 340), ("rotary", 320),
    ("softmax", 110), ("concat", 205), ("resize", 225), ("pool", 185), ("channel_scale", 130), ("squeeze", 120),
    ("activation", 50), (SCAN, 275),
)  # fmt: skip
OTHER_HUE, HUE_STEP = 0, 12
ON_HOST: Final = "runs on the host"  # a part of the reason why shape arithmetic is in no region
MANY_STAY: Final = 0.2  # share of nodes; if more stay unfused, the page says so at its top


class Shown(Protocol):
    """The data from which a page is written: the report of an optimization."""

    @property
    def input(self) -> Mapping[str, Any]:
        """The facts about the original: its path, and its numbers of nodes and bytes."""

    @property
    def only_bodies_changed(self) -> bool:
        """Whether only bodies of If, Loop and Scan changed, so that estimates of the main graph say nothing."""

    @property
    def fused(self) -> Sequence[Fused]:
        """The fused nodes."""

    @property
    def folded(self) -> Sequence[Folded]:
        """The nodes that were removed."""

    @property
    def missed(self) -> Sequence[Miss]:
        """The near misses."""

    @property
    def stays(self) -> Sequence[Stays]:
        """The operators that could be decomposed, but stay as they are."""

    @property
    def verified(self) -> Verification:
        """The result of the verification."""

    @property
    def facts(self) -> Facts | None:
        """Further facts about the model and the run."""

    @property
    def half(self) -> HalfResult | None:
        """The result of a conversion to half precision."""

    @property
    def weights(self) -> WeightsResult | None:
        """The result of quantizing weights."""

    @property
    def times(self) -> Times | None:
        """The times of nodes before and after fusing."""

    @property
    def estimated_times(self) -> Times | None:
        """Estimates of them, where nothing was timed."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on the result: a word, its tone (good, fair or bad), and a sentence that explains it."""

    word: str
    tone: str
    how: str


def verdict(verified: Verification, fused: int) -> Verdict:
    """Return the verdict of the verification as a word and a sentence."""
    outputs, parts = counted(len(verified.outputs), "output"), counted(verified.equal_parts, "fused node")
    if not verified.passed:
        what = "Nothing was compared with the original" if verified.passed is None else "It differs from the original"
        return Verdict("Not verified", "bad", f"{what}: {verified.reason}.")
    equal = " and ".join([*([outputs] if verified.outputs else []), *([parts] if verified.equal_parts else [])])
    how = f"{equal} of {counted(fused, 'fused node')}" if verified.equal_parts < fused else equal
    base = " or the ".join(sorted({each.base for each in verified.outputs})) or "original"
    sentence = f"{how} computed what the {base} computes, in onnxruntime on the CPU"
    if verified.status == "verified":
        return Verdict("Verified", "good", f"{sentence}.")
    return Verdict("Partly verified", "fair", f"{sentence}; {len(verified.not_compared)} could not be compared.")


@dataclass(frozen=True)
class Bar:
    """A row of the chart of operators: an operator, and its numbers of nodes before and after."""

    name: str
    before: int
    after: int
    is_fused: bool


def operators(plain: Mapping[str, Any]) -> list[Bar]:
    """Return the number of nodes per operator before and after, the most frequent first."""
    rows = [Bar(one["op"], one["before"], one["after"], False) for one in plain["operators"]]
    rows += [Bar(name, 0, count, True) for name, count in plain["counts"].items() if not plain["standard"]]
    return sorted(rows, key=lambda row: (-max(row.before, row.after), row.is_fused, row.name))


def fate_counts(report: Shown) -> dict[str, int]:
    """Return how many nodes of the original had each fate: fused, merged or another of FATES.

    Nodes of branches that are never taken count as merged.  Nodes that the conversion to a newer opset added do not
    count.
    """
    graphs = report.facts.graphs if report.facts else ()
    total: Counter[str] = Counter()
    for each in graphs:
        fused = [one for one in report.fused if one.where == each.where]
        total.update(find_fates(each, fused, report.folded).counts)
    if graphs:
        total["merged"] = max(0, total["merged"] + report.input["nodes"] - total.total())
    return {fate: total[fate] for fate in FATES}


@dataclass(frozen=True)
class Group:
    """The fused nodes of one fusion: how many there are, and how many nodes they replace."""

    name: str
    count: int
    replaced: int
    note: FusionNote
    hue: int


def groups(report: Shown) -> list[Group]:
    """Return the applied fusions, sorted by the number of replaced nodes, the largest first."""
    notes = report.facts.fusions if report.facts else {}
    counts = Counter(one.fusion for one in report.fused)
    replaced = {name: count_replaced(one for one in report.fused if one.fusion == name) for name in counts}
    hues = hues_of(replaced)
    known = {REGION: FusionNote(REGION_FORMULA, ""), SCAN: FusionNote(SCAN_SUMMARY, "")} | dict(notes)
    found = [
        Group(name, counts[name], count, known.get(name, FusionNote("", "")), hues[name])
        for name, count in replaced.items()
    ]
    return sorted(found, key=lambda each: (-each.replaced, each.name))


def hues_of(fusions: Iterable[str]) -> dict[str, int]:
    """Return a hue (a colour angle in degrees) for each fusion: its family's, shifted if another fusion uses it."""
    taken: dict[str, int] = {}
    for name in sorted(set(fusions)):
        hue = next((hue for word, hue in HUES if word in name), OTHER_HUE)
        while any(abs(hue - other) < HUE_STEP for other in taken.values()):
            hue = (hue + HUE_STEP) % 360
        taken[name] = hue
    return taken


@dataclass(frozen=True)
class MissGroup:
    """Near misses of one fusion with one reason: the first miss, all nodes, and the pattern's line with carets."""

    first: Miss
    reason: str
    nodes: tuple[str, ...]
    source: tuple[str, ...]

    @property
    def is_near(self) -> bool:
        """Whether at least half of the pattern's nodes matched."""
        return 2 * self.first.matched >= self.first.of


def miss_groups(report: Shown) -> list[MissGroup]:
    """Group misses whose reasons differ only in the quoted names, and return the groups, the nearest misses first."""
    made = [
        MissGroup(
            some.items[0], some.sentence, tuple(miss.node for miss in some.items),
            tuple(source_lines(some.items[0].span)),
        ) for some in group(report.missed, lambda miss: miss.reason, lambda miss: (miss.fusion.name, str(miss.span)))
    ]  # fmt: skip
    return sorted(made, key=lambda each: (not each.is_near, -len(each.nodes)))


def source_lines(span: Span) -> Iterator[str]:
    """Yield the pattern's source line of a span, and a line of carets under it; nothing if the file is gone."""
    if text := linecache.getline(span.file, span.line).rstrip("\n"):
        end = span.end_column if span.end_column > span.column else len(text)
        indent = len(text) - len(text.lstrip())
        yield text[indent:]
        yield " " * (span.column - indent) + "^" * max(end - span.column, 1)


@dataclass(frozen=True)
class Stayed:
    """Nodes of one operator that are unchanged in the optimized model, and why."""

    op: str
    reason: str
    nodes: tuple[str, ...]


def stayed(report: Shown, plain: Mapping[str, Any]) -> list[Stayed]:
    """Return the nodes that are not fused, by operator and reason, the most frequent first."""
    if report.facts is None:
        return []
    reasons = reasons_of(report)
    left = [node for each in report.facts.graphs for node in each.after.nodes if not node.is_fused]
    if plain["standard"]:  # with emit="standard", operators written for fused nodes are not counted
        known = {node.label for each in report.facts.graphs for node in each.before.nodes}
        known -= {label for one in report.fused for label in one.replaces}
        left = [node for node in left if node.label in known]
    made = [
        Stayed(some.items[0].op, some.sentence, tuple(node.label for node in some.items))
        for some in group(left, lambda node: reasons.get(node.label, NO_REASON), lambda node: node.op)
    ]
    return sorted(made, key=lambda each: (-len(each.nodes), each.op))


def reasons_of(report: Shown) -> dict[str, str]:
    """Return the reason why each unfused node is not fused, by the node's label."""
    found = dict(report.facts.why_not) if report.facts else {}
    return found | {one.node: one.reason for one in report.stays}


@dataclass(frozen=True)
class Advice:
    """A piece of advice: a title, sentences, and the section of the page with more about it."""

    title: str
    text: str
    section: str


def advice(
    report: Shown, plain: Mapping[str, Any], misses: Sequence[MissGroup], left: Sequence[Stayed]
) -> Iterator[Advice]:
    """Yield advice to the user; advice about wrong or unverified results comes first."""
    verified = report.verified
    if not verified.passed:
        yield Advice("Verify before you deploy", "`onnxfuse verify A B` compares two models.", "trust")
    if verified.not_compared:
        first = verified.not_compared[0]
        yield Advice(
            f"{counted(len(verified.not_compared), 'value')} could not be compared",
            f"'{first.name}': {first.reason}. If other inputs would show it, give them with `--input FILE.npz`, "
            "or sizes with `--shape INPUT:1x3x640x640`.", "trust",
        )  # fmt: skip
    if dropped := plain["dropped"]:
        where = f" at '{dropped[0]['node']}'" if dropped[0]["node"] else ""
        yield Advice(
            f"{counted(len(dropped), 'change')} taken back",
            f"{dropped[0]['fusion']}{where}: {dropped[0]['reason']}. The model is right without it.", "trust",
        )  # fmt: skip
    if of_optimizations := [note for note in verified.notes if "graph optimizations" in note]:
        yield Advice(
            "onnxruntime's graph optimizations do not suit this model",
            f"{of_optimizations[0]}. `SessionOptions.graph_optimization_level = ORT_DISABLE_ALL` switches them off.",
            "trust",
        )  # fmt: skip
    near = [each for each in misses if each.is_near]
    if near:
        most = near[0]
        hint = f" {most.first.hint}" if most.first.hint else ""
        yield Advice(
            f"{counted(len({node for each in near for node in each.nodes}), 'node')} nearly fused",
            f"Most often {most.first.fusion.name}, {len(most.nodes)}x: {most.reason}.{hint}", "missed",
        )  # fmt: skip
    computing = [each for each in left if ON_HOST not in each.reason]
    if len(computing) and sum(len(each.nodes) for each in computing) > MANY_STAY * plain["output"]["nodes"]:
        yield Advice(
            counted(sum(len(each.nodes) for each in computing), "node stays as it was", "nodes stay as they were")
            + (", besides shape arithmetic" if computing != left else ""),
            f"Most often {len(computing[0].nodes)}x {computing[0].op}: {computing[0].reason}.", "stayed",
        )  # fmt: skip
    for name, why in plain["unmatched"].items():
        yield Advice(f"{name} matches nothing", f"{why}.", "missed")
    if quantized := plain["quantized"]:
        listed = ", ".join(f"{count} {op}" for op, count in quantized.items())
        yield Advice("Quantized operators are not fused", f"{listed}. `onnxfuse inspect` says how they run.", "stayed")
    for why in plain["functions"].get("kept", ())[:1]:
        yield Advice("A function of the model is not inlined", f"{why}; its nodes are not fused.", "stayed")
    if not report.times:
        yield Advice(
            "Measure on your GPU",
            "Launches and memory traffic are estimates. `onnxfuse bench MODEL` times the model, as it was and fused, "
            "and compares their outputs; `onnxfuse tune` chooses the fastest way to run each fused node.", "trust",
        )  # fmt: skip
