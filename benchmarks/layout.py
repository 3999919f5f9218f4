"""Channels-last files in plain onnxruntime on the CPU, beside the channels-first files of the same models.

    python benchmarks/layout.py --out DIR                     # models with convolutions, exported ones and built ones
    python benchmarks/layout.py --out DIR --only 'resnet*'

onnxruntime has no channels-last convolution on the CPU.  It inlines the bodies of the fused nodes and cancels their
Transposes, so that the files may differ in what it makes of the rest only.  Models, times and the limit are as in
cpu.py; results come into DIR/layout.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpu import Case, cases, compare_files, relative_error, session_of, times_in_turns

from onnxfuse import optimize


def cases_with_convolutions() -> Iterator[Case]:
    """Yield the models that have convolutions."""
    for case in cases():
        if any(node.op_type == "Conv" for node in case.model.graph.node):
            yield case


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Return the times of both files, their ratio, and how far their outputs are apart."""
    models, reports = zip(
        *(optimize(case.model, layout=layout, verify=False) for layout in ("nchw", "nhwc")), strict=True
    )
    sessions = [session_of(model) for model in models]
    expected, found = (session.run(None, dict(case.feeds)) for session in sessions)
    times = times_in_turns(sessions, case.feeds, seconds)
    first, last = map(statistics.median, times)
    return {
        "nchw_ms": round(first, 5),
        "nhwc_ms": round(last, 5),
        "ratio": round(last / first, 3),
        "runs": len(times[0]),
        "channels_last_nodes": reports[1].layout.nodes,
        "transposes": len(reports[1].layout.ends),
        "relative_error": float(f"{max(map(relative_error, expected, found)):.2g}"),
    }


if __name__ == "__main__":
    compare_files(Path(__file__), __doc__ or "", cases_with_convolutions, measure)
