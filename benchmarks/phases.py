"""Seconds of the stages, and of the slowest pass, of `onnxfuse.optimize` on models of 20 to 4,000 nodes.

    python benchmarks/phases.py --out DIR

The seconds are of the clock, the least of three runs in one process, so that imports do not count.  `Read` is reading
the graph and inferring shapes; the stages after it are those of docs/design.md.  `verified` and `verify` are of runs
that verify, all others of runs that do not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from result_text import result_text

from onnxfuse import fuse_model, optimize
from onnxfuse.bench.machine import device, versions
from onnxfuse.passes import Pass

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "models"), str(ROOT / "tests")]

from exported_models import load_exported  # noqa: E402
from large_models import decoder, small, transformer  # noqa: E402

EXPORTED = (
    "bert_sdpa_ts_fp32", "clip_text_sdpa_ts_fp32", "convnext_ts_fp32", "densenet_ts13_bn_fp32", "detector_ts11_bn_fp32",
    "efficientnet_dynamo23_bn_fp32", "gemma_sdpa_dynamo_fp32", "gpt2_eager_ts_fp32", "gpt_neox_sdpa_ts_fp32",
    "llama_eager_ts_fp32", "mamba_ts_fp32", "mobilenetv3_ts13_bn_fp32", "phi3_sdpa_ts_fp32", "qwen3_sdpa_ts_fp32",
    "resnet50_ts13_bn_fp32", "unet_ts_fp32", "vit_eager_ts_fp32",
)  # fmt: skip
MODELS: dict[str, Callable[[], onnx.ModelProto]] = {"LayerNorm and GELU": small} | {
    name: partial(load_exported, f"{name}.onnx") for name in EXPORTED
}
MODELS |= {"decoder": partial(decoder, 2_000), "transformer": partial(transformer, 4_000)}
RUNS = 3
STAGES, APPLY, READ = fuse_model.STAGES, fuse_model._apply, fuse_model._read
spent = defaultdict[str, float](float)


@contextmanager
def counted(name: str) -> Iterator[None]:
    """Add the seconds of a block to `spent`."""
    begin = time.perf_counter()
    yield
    spent[name] += time.perf_counter() - begin


def stage(run: Callable[..., None], name: str, work: fuse_model.Work) -> None:
    """Run a stage; what runs in bodies of control flow counts for the stage `Bodies`."""
    with counted(name if not work.where else "in bodies"):
        run(work)


def apply_pass(applied: Pass, *given: Any) -> Any:
    """Apply a pass of the pipeline."""
    with counted(f"pass {applied.__name__}"):
        return APPLY(applied, *given)


def read(*given: Any) -> Any:
    """Read the graph of a model."""
    with counted("Read"):
        return READ(*given)


def phases(content: bytes) -> dict[str, Any]:
    """Return the seconds of one model."""
    best: dict[str, Any] = {}
    for _ in range(RUNS):
        spent.clear()
        with counted("unverified"):
            optimize(content, verify=False)
        passes = {name: spent.pop(name) for name in list(spent) if name.startswith("pass ")}
        spent.pop("in bodies", None)
        if spent["unverified"] < best.get("unverified", float("inf")):
            slowest = max(passes, key=passes.__getitem__)
            best |= spent | {"slowest pass": slowest.removeprefix("pass "), "its seconds": passes[slowest]}
        spent.clear()
        with counted("verified"):
            _, report = optimize(content, verify="full")
        best["verified"] = min(spent["verified"], best.get("verified", float("inf")))
        best["verify"] = min(report.seconds["verify"], best.get("verify", float("inf")))
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in best.items()}


def main() -> None:
    """Time all models; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="write DIR/phases.json")
    given = parser.parse_args()
    stages = tuple(replace(each, run=partial(stage, each.run, each.name)) for each in STAGES)
    for name, timed in {"STAGES": stages, "_apply": apply_pass, "_read": read}.items():
        setattr(fuse_model, name, timed)
    optimize(small(), verify="full")
    rows: list[dict[str, Any]] = []
    result = {"versions": versions(), "device": device("cpu") | {"cores": os.cpu_count()}, "rows": rows}
    given.out.mkdir(parents=True, exist_ok=True)
    for name, make in MODELS.items():
        model = make()
        rows.append({"model": name, "nodes": len(model.graph.node)} | phases(model.SerializeToString()))
        print(rows[-1], flush=True)
        (given.out / "phases.json").write_text(result_text(result), encoding="utf-8")


if __name__ == "__main__":
    main()
