"""Channels-last files in plain onnxruntime on the CPU, beside the channels-first files of the same models.

    python benchmarks/layout.py --out DIR                     # models with convolutions, exported ones and built ones
    python benchmarks/layout.py --out DIR --only 'resnet*'

onnxruntime has no channels-last convolution on the CPU.  It inlines the bodies of the fused nodes and cancels their
Transposes, so that the files may differ in what it makes of the rest only.  Models, times and the limit are as in
cpu.py; results come into DIR/layout.json.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import logging
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpu import BUILT, LIMIT, SECONDS, Case, exported, relative_error, session_of, times_in_turns

from onnxfuse import optimize
from onnxfuse.bench.machine import device, versions


def cases() -> Iterator[Case]:
    """Yield the models that have convolutions."""
    for case in (*exported(), *(build() for build in BUILT)):
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


def main() -> None:
    """Time all models that are asked for, and print and write their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="the folder that layout.json is written to")
    parser.add_argument("--only", default="*", help="a pattern of names, such as 'resnet*'")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of timed runs for each model")
    arguments = parser.parse_args()
    logging.getLogger("onnxfuse").setLevel(logging.ERROR)
    chosen = [case for case in cases() if fnmatch.fnmatch(case.name, arguments.only)]
    if not chosen:
        sys.exit(f"no model with convolutions has a name like '{arguments.only}'")
    models = {}
    for case in chosen:
        models[case.name] = found = measure(case, arguments.seconds)
        slower = "  slower than the limit" if found["ratio"] > LIMIT else ""
        print(
            f"{case.name:40} {found['nchw_ms']:9.3f} {found['nhwc_ms']:9.3f} ms {found['ratio']:6.3f}{slower}",
            flush=True,
        )
    ratios = [found["ratio"] for found in models.values()]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"{len(ratios)} models: {mean:.3f} in the geometric mean, {max(ratios):.3f} at most")
    result = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "device": device("cpu"),
        "versions": versions(),
        "limit": LIMIT,
        "geometric_mean": round(mean, 3),
        "largest": max(ratios),
        "models": models,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "layout.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
