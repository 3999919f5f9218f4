"""List the kernels of a model's run in a CUDA graph, in their order, with the times that CUPTI saw.

    python benchmarks/model_kernels.py unet-b2 --out DIR [--peer onnxfuse-graph]

A kernel's time is what it adds: from the end of the kernel before to its own end.  Its duration is longer where it
starts early and waits (programmatic dependent launch).  The model is that of models.py, exported into DIR/onnx once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from model_cases import Work, export
from peers import PEERS
from result_text import result_text

from models import CASES

WARM_UP_RUNS, RUNS = 20, 9
KINDS = ("kernel", "gpu_memcpy", "gpu_memset")  # of events in a trace


def traced(run: Any) -> list[Mapping[str, Any]]:
    """Return the events of RUNS runs on the GPU, by their start."""
    profiler: Any = importlib.import_module("torch.profiler")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(RUNS):
            run()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return sorted((each for each in events if each.get("cat") in KINDS), key=lambda each: float(each["ts"]))


def kernels_of(events: Sequence[Mapping[str, Any]], runs: int) -> list[dict[str, Any]]:
    """Return a row for each kernel of a run: medians over all runs, in microseconds."""
    count = len(events) // runs
    ends = [each["ts"] + each["dur"] for each in events]
    rows = []
    for i in range(count):
        of_runs = range(i, count * runs, count)
        added = [ends[at] - (ends[at - 1] if i else events[at]["ts"]) for at in of_runs]
        rows.append(
            {
                "kernel": events[i]["name"], "grid": events[i].get("args", {}).get("grid"),
                "us": statistics.median(added), "duration_us": statistics.median(events[at]["dur"] for at in of_runs),
            }
        )  # fmt: skip
    return rows


def sums(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the number of launches and the sum of the times of each kernel, the longest first."""
    times = defaultdict[str, list[float]](list)
    for row in rows:
        times[row["kernel"]].append(row["us"])
    found = [{"kernel": name, "launches": len(each), "us": sum(each)} for name, each in times.items()]
    return sorted(found, key=lambda each: -each["us"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[case.name for case in CASES])
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported model and the results")
    parser.add_argument("--peer", default="onnxfuse-graph", choices=[peer.name for peer in PEERS])
    return parser.parse_args()


def main() -> None:
    given = parse()
    case = next(each for each in CASES if each.name == given.model)
    work = Work(case, Path(given.out, "onnx", case.file_name), "cuda")
    if not work.path.exists():
        export(case, work.path)
    prepared = next(each for each in PEERS if each.name == given.peer).prepare(work)
    for _ in range(WARM_UP_RUNS):
        prepared.run()
    rows = kernels_of(traced(prepared.run), RUNS)
    result = {"model": case.name, "peer": given.peer, "sums": sums(rows), "rows": rows}
    Path(given.out, f"{case.name}_kernels.json").write_text(result_text(result), encoding="utf-8")
    for each in sums(rows):
        print(f"{each['us']:9.1f} us  {each['launches']:4} x  {each['kernel'][:80]}")
    print(f"{sum(row['us'] for row in rows):9.1f} us  {len(rows):4} x")


if __name__ == "__main__":
    main()
