"""The times of a model's nodes before and after fusing, as a report holds and draws them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from onnxfuse.passes.folded import Folded
from onnxfuse.report.fates import find_fates
from onnxfuse.report.outline import Rewritten
from onnxfuse.rewrite.replace import Fused

WIDTH, HEIGHT = 720, 340  # of the roofline, in units of its drawing, without the labels of its axes
MAX_SEGMENTS: Final = 1000  # of a strip, about; a browser draws narrower ones as nothing
UNITS: Final = {0: "", 3: "K", 6: "M", 9: "G", 12: "T", 15: "P"}  # prefixes of FLOP/s, by powers of 10


@dataclass(frozen=True)
class NodeTime:
    """A node that was timed alone: its seconds, the bytes that it moves, and its floating-point operations."""

    node: str
    op: str  # the fusion; for an unfused node, its operator
    how: str  # kernel or body; onnxruntime for an unfused node; estimate
    seconds: float
    bytes: int
    flops: int | None  # None: not known
    roofline: float | None = None  # the share of its time that the device needs at least; None: not known


@dataclass(frozen=True)
class Times:
    """The nodes of the main graph before and after fusing that were timed, each in the order of the graph.

    `inputs` has the shapes of the inputs; of estimates, the sizes of the dynamic dims.  `copy_rate` is the bytes that a
    copy reads and writes in a second, or None, and `product_rates` has the FLOP/s of a product of large matrices by its
    dtype.
    """

    device: str
    inputs: Mapping[str, str]
    before: tuple[NodeTime, ...]
    after: tuple[NodeTime, ...]
    copy_rate: float | None
    product_rates: Mapping[str, float] = field(default_factory=dict)
    launch: float | None = None  # of estimates: the seconds of a launch; None if the nodes were timed

    def to_json(self) -> dict[str, Any]:
        """Return the times as JSON values; those of nodes are in seconds."""
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """A node after fusing, by its index, with the seconds of the nodes before fusing that it stands for."""

    node: int
    name: str
    time: NodeTime | None  # None if the node was not timed
    before: float

    @property
    def after(self) -> float:
        """The seconds of the node; 0 if it was not timed."""
        return self.time.seconds if self.time else 0.0


@dataclass(frozen=True)
class Segment:
    """The part of a strip that is a node's: its index and time, and the fusion that gives it its colour, or "".

    Where the parts would be too narrow to see, a part is that of `count` nodes, from `node` on.
    """

    node: int
    time: NodeTime
    fusion: str
    count: int = 1
    seconds: float = 0.0  # of all of them


@dataclass(frozen=True)
class TimedGraph:
    """The rows of the nodes after fusing, the longest first, and all timed nodes of both sides in their order."""

    rows: tuple[Row, ...]
    before: tuple[Segment, ...]
    after: tuple[Segment, ...]


def timed_graph(times: Times, graph: Rewritten, fused: Sequence[Fused], folded: Iterable[Folded]) -> TimedGraph:
    """Return the times of the main graph's nodes; `fused` and `folded` are the records of a report."""
    fates = find_fates(graph, [one for one in fused if one.where == graph.where], folded)
    old, new = ({one.node: one for one in side} for side in (times.before, times.after))
    fusions = {index: one.fusion for index, one in fates.records.items()}
    spent: dict[int | None, float] = defaultdict(float)
    before = []
    for index, (node, by) in enumerate(zip(graph.before.nodes, fates.stands_for, strict=True)):
        if one := old.get(node.label):
            spent[by] += one.seconds
            before.append(Segment(index, one, fusions.get(by, "") if by is not None else "", 1, one.seconds))
    after = [
        Segment(index, new[node.label], fusions.get(index, ""), 1, new[node.label].seconds)
        for index, node in enumerate(graph.after.nodes)
        if node.label in new
    ]
    rows = [Row(i, node.label, new.get(node.label), spent[i]) for i, node in enumerate(graph.after.nodes)]
    timed = sorted((row for row in rows if row.time or row.before), key=lambda row: -max(row.before, row.after))
    return TimedGraph(tuple(timed), _wide_enough(before), _wide_enough(after))


def _wide_enough(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Join neighbours until a segment has 1/MAX_SEGMENTS of the seconds; a joined one has a colour if all share it."""
    least = sum(one.seconds for one in segments) / MAX_SEGMENTS
    result: list[Segment] = []
    for one in segments:
        last = result[-1] if result else None
        if last and last.seconds + one.seconds <= least:
            fusion = last.fusion if last.fusion == one.fusion else ""
            result[-1] = replace(last, fusion=fusion, count=last.count + 1, seconds=last.seconds + one.seconds)
        else:
            result.append(one)
    return tuple(result)


@dataclass(frozen=True)
class Dot:
    """A node in the roofline: its place, and its row."""

    x: float
    y: float
    row: Row


@dataclass(frozen=True)
class Roofline:
    """FLOP/s over FLOPs per byte, both logarithmic; `ticks` has places and labels.

    `roof` is the line of a copy, up to the highest of the level lines: those of large products, by their dtypes.
    """

    dots: tuple[Dot, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    roof: tuple[tuple[float, float], tuple[float, float]] | None
    levels: Mapping[str, tuple[tuple[float, float], tuple[float, float]]]


def roofline(rows: Iterable[Row], times: Times) -> Roofline | None:
    """Return the roofline of the nodes with products, convolutions and attentions; None if no such node was timed."""
    found = [
        (row, math.log10(row.time.flops / row.time.bytes), math.log10(row.time.flops / row.time.seconds))
        for row in rows
        if row.time and row.time.flops and row.time.bytes and row.time.seconds
    ]
    if not found:
        return None
    rate = math.log10(times.copy_rate) if times.copy_rate else None
    peaks = {dtype: math.log10(each) for dtype, each in times.product_rates.items()} if rate else {}
    xs, ys = [x for _, x, _ in found], [y for _, _, y in found]
    left, right = _decades([*xs, *(peak - rate for peak in peaks.values() if rate)])
    highest = max(peaks.values(), default=(rate or 0.0) + max(xs))
    bottom, top = _decades([*ys, *([highest] if rate else [])])

    def place(x: float, y: float) -> tuple[float, float]:
        return round(WIDTH * (x - left) / (right - left), 1), round(HEIGHT * (top - y) / (top - bottom), 1)

    roof = (max(left, bottom - rate), min(right, highest - rate if peaks else top - rate)) if rate else (0.0, 0.0)
    return Roofline(
        tuple(Dot(*place(x, y), row) for row, x, y in found),
        tuple((place(x, bottom)[0], f"{10**x:g}") for x in range(left, right + 1)),
        tuple((place(left, y)[1], _flops_text(y)) for y in range(bottom, top + 1)),
        (place(roof[0], roof[0] + rate), place(roof[1], roof[1] + rate)) if rate else None,
        {dtype: (place(max(left, peak - (rate or 0)), peak), place(right, peak)) for dtype, peak in peaks.items()},
    )  # fmt: skip


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(min(values)), math.ceil(max(values))
    return low, max(high, low + 1)


def _flops_text(power: int) -> str:
    power = max(power, 0)
    unit = min(power - power % 3, max(UNITS))
    return f"{10 ** (power - unit):g} {UNITS[unit]}FLOP/s"


def rate_text(rate: float) -> str:
    """Return a rate in FLOP/s with three digits and a prefix."""
    unit = next((power for power in sorted(UNITS, reverse=True) if rate >= 10**power), 0)
    return f"{rate / 10**unit:.3g} {UNITS[unit]}FLOP/s"
