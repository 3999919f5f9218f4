"""Optimize the trained models of public packages, and time them on the CPU in plain onnxruntime before and after.

    python benchmarks/trained.py --out benchmarks/results/trained-cpu.json [--only rapidocr]

Each model runs at the shapes that it is meant for, in one thread, the original and the fused file in turns.  Times are
medians, and those of the thread's processor, which other processes of the machine change little.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from result_text import result_text

from onnxfuse import optimize
from onnxfuse.bench.machine import device
from onnxfuse.tuning.timing import RunTimes
from onnxfuse.verify.input_uses import integer_uses
from onnxfuse.verify.inputs import generate_inputs, model_inputs, sizes_to_try

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
trained = __import__("trained")
MIN_RUNS, MAX_RUNS, SECONDS = 11, 501, 1.0  # of each file: as many runs as take so long


def measured(model: Any) -> dict[str, Any]:
    """Return the row of a model: nodes and fusions, what verification says, and milliseconds before and after."""
    path = trained.fetch(model)
    original = onnx.load(path)
    optimized, report = optimize(path)
    inputs = model_inputs(original)
    generator = np.random.default_rng(0)
    given = {
        i.name: generator.uniform(0, 1, model.shapes[i.name]).astype(i.dtype) for i in inputs if i.name in model.shapes
    }
    feeds = generate_inputs(inputs, next(sizes_to_try(inputs, given)), integer_uses(original), given)
    runs = [_runner(each, feeds) for each in (original, optimized)]
    before, after = _thread_times(runs)
    return {
        "model": model.name, "version": model.version, "task": model.task, "opset": report.input["opset"],
        "nodes": [len(original.graph.node), len(optimized.graph.node)], "fused": report.counts,
        "dropped": [each.fusion for each in report.dropped], "verified": report.verified.passed,
        "original_ms": round(1e3 * before.median, 4), "optimized_ms": round(1e3 * after.median, 4),
        "ratio": round(after.median / before.median, 3),
    }  # fmt: skip


def _runner(model: onnx.ModelProto, feeds: dict[str, Any]) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, feeds)
    return lambda: session.run(None, feeds)


def _thread_times(runs: list[Any]) -> list[RunTimes]:
    """Return the processor seconds of the runs of each callable, taken in turns."""
    seconds: list[list[float]] = [[] for _ in runs]
    while len(seconds[0]) < MIN_RUNS or (len(seconds[0]) < MAX_RUNS and sum(seconds[0]) < SECONDS):
        for each, run in zip(seconds, runs, strict=True):
            start = time.thread_time()
            run()
            each.append(time.thread_time() - start)
    return [RunTimes.of(each) for each in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--only", default="", help="models whose name contains this")
    arguments = parser.parse_args()
    rows = []
    for model in trained.MODELS:
        if arguments.only in model.name:
            try:
                rows.append(measured(model))
                row = rows[-1]
                times = f"{row['original_ms']:8.2f} {row['optimized_ms']:8.2f} ms {row['ratio']:.2f}"
                print(f"{model.name:70} {row['nodes']} {times} verified={row['verified']} dropped={row['dropped']}")
            except Exception as error:  # a model that does not come through is a row, too
                rows.append({"model": model.name, "version": model.version, "task": model.task, "error": str(error)})
                print(f"{model.name:70} {type(error).__name__}: {error}")
    head = {
        "date": datetime.date.today().isoformat(), "device": device("cpu"),
        "versions": {name: version(name) for name in ("onnxfuse", "onnx", "onnxruntime", "numpy")}, "rows": rows,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(result_text(head), encoding="utf-8")


if __name__ == "__main__":
    main()
