"""Write the operators of a model, before and after it was fused, as a trace that Perfetto and chrome://tracing show.

The format is Chrome's: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from onnxfuse.bench.bench import Bench, write_text
from onnxfuse.errors import printable
from onnxfuse.report.times import NodeTime
from onnxfuse.tuning.op_times import OpTime

TIMED: Final = "operators, each timed alone"
Row: TypeAlias = tuple[NodeTime, Mapping[str, str]]  # with further facts about the node
ESTIMATED: Final = "operators, each by an estimate"


def write_trace(result: Bench, path: Path) -> None:
    """Write a trace with a process for each model: one node after the other, as long as it takes alone.

    Two more have `result.estimates`.  Raises ModelError if the file cannot be written.
    """
    rows: list[tuple[str, str, list[Row]]] = [
        (name, TIMED, [_timed(*each) for each in nodes]) for name, nodes in result.timelines.items()
    ]
    if found := result.estimates:
        sides = zip(result.timelines, (found.before, found.after), strict=True)
        sizes = ", ".join(f"{name} = {size}" for name, size in found.inputs.items())
        about = f"estimated for an {found.device}{f' with {sizes}' if sizes else ''}"
        rows += [(f"{name}, {about}", ESTIMATED, [(each, {}) for each in of]) for name, of in sides]
    events = [event for pid, row in enumerate(rows) for event in _events(pid, *row)]
    data = {"model": printable(result.model), "inputs": dict(result.inputs), "device": dict(result.device)}
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": data}) + "\n")


def _timed(name: str, op: OpTime) -> Row:
    time = NodeTime(name, op.fusion, op.how, op.seconds or 0.0, op.bytes, op.flops, op.roofline)
    return time, {"why": printable(op.why), "inputs": ", ".join(op.shapes)}


def _events(pid: int, model: str, thread: str, nodes: Iterable[Row]) -> Iterator[Mapping[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": printable(model)}}
    yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": thread}}
    start = 0  # in nanoseconds, in which Perfetto counts: rounded apart, a node could begin before another one ends
    for time, more in nodes:
        duration = round(1e9 * time.seconds)
        share = {} if time.roofline is None else {"share of the roofline": round(time.roofline, 4)}
        yield {
            "name": time.op, "cat": time.how, "ph": "X", "pid": pid, "tid": 0,
            "ts": start / 1000, "dur": duration / 1000,
            "args": {"node": printable(time.node), "runs as": time.how, **more,
                     "bytes": time.bytes, "FLOPs": time.flops, **share},
        }  # fmt: skip
        start += duration
