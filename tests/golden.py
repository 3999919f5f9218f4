"""The golden record: what optimizing each file of models/exported gives, held by test_golden.py.

A change that alters a record on purpose (a new fusion, a new export) rewrites it, and its diff shows what it altered:

    python tests/golden.py                # rewrite tests/golden.json with what the code gives now
    git diff --stat tests/golden.json
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from runtimes import open_on_cpu
from test_models import INDEX, draw, load_exported

RECORD = Path(__file__).parent / "golden.json"
SAMPLES = 4  # elements kept of each output
DIGITS = 6  # test_golden.py compares by 1e-4 of the largest value


# What the record holds of a model and of each of its outputs: it is written as lists in this order.
FIELDS = ("nodes", "counts", "folded", "results")
SUMMARY = ("shape", "dtype", "largest", "norm", "samples")


def record(name: str, optimized: onnx.ModelProto, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the record holds of one optimized model: counts, numbers of nodes, folded records and results."""
    return {
        "nodes": [report["input"]["nodes"], report["output"]["nodes"]],
        "counts": report["counts"],
        "folded": folded(report),
        "results": results(name, optimized),
    }


def folded(report: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return for each kind of folded record how many there are, and a checksum of them: the names would fill 250 KB."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for one in report["folded"]:
        kinds[one["what"]].append(f"{one['node']} -> {one['into']}")
    return {what: [len(names), zlib.crc32("\n".join(sorted(names)).encode())] for what, names in sorted(kinds.items())}


def results(name: str, optimized: onnx.ModelProto) -> dict[str, dict[str, Any]]:
    """Return what onnxruntime computes on the CPU from seeded inputs, summarized by output."""
    session = open_on_cpu(optimized)
    feeds = draw(INDEX[name]["inputs"], INDEX[name]["verified_sizes"][0])
    used = {each.name: feeds[each.name] for each in session.get_inputs()}
    names = [output.name for output in session.get_outputs()]
    return {output: summary(value) for output, value in zip(names, session.run(names, used), strict=True)}


def summary(value: np.ndarray) -> dict[str, Any]:
    """Return the shape, the largest magnitude, the L2 norm and a few evenly spaced elements of an array."""
    flat = value.astype(np.float64).reshape(-1)
    indices = np.linspace(0, flat.size - 1, SAMPLES).astype(int)
    return {
        "shape": list(value.shape),
        "dtype": value.dtype.name,
        "largest": rounded(np.abs(flat).max()),
        "norm": rounded(np.linalg.norm(flat)),
        "samples": [rounded(each) for each in flat[indices]],
    }


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def read() -> dict[str, dict[str, Any]]:
    """Return the record of every exported model by name."""
    named = {name: dict(zip(FIELDS, row, strict=True)) for name, row in json.loads(RECORD.read_text("utf-8")).items()}
    for model in named.values():
        outputs = model["results"].items()
        model["results"] = {output: dict(zip(SUMMARY, row, strict=True)) for output, row in outputs}
    return named


def text(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the record of models as JSON with a line for each."""
    lines = []
    for name, found in sorted(records.items()):
        outputs = {output: [values[each] for each in SUMMARY] for output, values in found["results"].items()}
        row = [{**found, "results": outputs}[field] for field in FIELDS]
        lines.append(f"{json.dumps(name)}:{json.dumps(row, separators=(',', ':'))}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write() -> None:
    """Write the record of every exported model."""
    from onnxfuse import optimize

    records = {}
    for name in INDEX:
        model, report = optimize(load_exported(name), verify=False)
        records[name] = record(name, model, report.to_json())
    RECORD.write_text(text(records), encoding="utf-8")
    print(f"{len(records)} models, {RECORD.stat().st_size} bytes in {RECORD}")


if __name__ == "__main__":
    write()
