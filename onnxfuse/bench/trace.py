"""Write the operators of a model, before and after it was fused, as a trace that Perfetto and chrome://tracing show.

The format is Chrome's: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from onnxfuse.bench.bench import Bench, write_text
from onnxfuse.errors import printable
from onnxfuse.tuning.op_times import OpTime

THREAD: Final = "operators, each timed alone"


def write_trace(result: Bench, path: Path) -> None:
    """Write a trace with a process for each model: one node after the other, as long as it takes alone.

    Raises ModelError if the file cannot be written.
    """
    events = [
        event for pid, (name, nodes) in enumerate(result.timelines.items()) for event in _events(pid, name, nodes)
    ]
    about = {"model": printable(result.model), "inputs": dict(result.inputs), "device": dict(result.device)}
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}) + "\n")


def _events(pid: int, model: str, nodes: Sequence[tuple[str, OpTime]]) -> Iterator[Mapping[str, Any]]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": printable(model)}}
    yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": THREAD}}
    start = 0.0
    for name, op in nodes:
        micros = 1e6 * (op.seconds or 0.0)
        share = {} if op.roofline is None else {"share of the roofline": round(op.roofline, 4)}
        yield {
            "name": op.fusion, "cat": op.how, "ph": "X", "pid": pid, "tid": 0,
            "ts": round(start, 3), "dur": round(micros, 3),
            "args": {"node": printable(name), "runs as": op.how, "why": printable(op.why),
                     "inputs": ", ".join(op.shapes), "bytes": op.bytes, "FLOPs": op.flops, **share},
        }  # fmt: skip
        start += micros
