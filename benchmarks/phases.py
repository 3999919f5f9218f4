"""Seconds of the stages, and of the slowest pass, of `onnxfuse.optimize` on models of 20 to 4,000 nodes.

    python benchmarks/phases.py --out DIR

The seconds are of the clock, in one process, so that imports do not count: the least of three unverified runs, and
`verify` of one verified run.  `Read` is reading the graph and inferring shapes; the other stages are those of
docs/design.md, where `Bodies` contains the stages of bodies.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from result_text import result_text

from onnxfuse import fuse_model, optimize
from onnxfuse.bench.machine import device, versions

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
APPLY, READ = fuse_model._apply, fuse_model._read
spent = defaultdict[str, float](float)


def timed(name: str, run: Callable[..., Any], *given: Any) -> Any:
    """Call a function, and add its seconds to `spent`."""
    begin = time.perf_counter()
    result = run(*given)
    spent[name] += time.perf_counter() - begin
    return result


def phases(content: bytes) -> dict[str, Any]:
    """Return the seconds of one model, of the fastest of three runs."""
    best: dict[str, float] = {}
    for _ in range(3):
        spent.clear()
        timed("unverified", partial(optimize, verify=False), content)
        best = min(best or dict(spent), dict(spent), key=lambda each: each["unverified"])
    _, report = timed("verified", partial(optimize, verify="full"), content)
    slowest = max((name for name in best if name.startswith("pass ")), key=best.__getitem__)
    kept = {name: seconds for name, seconds in best.items() if not name.startswith("pass ") or name == slowest}
    return {name: round(value, 4) for name, value in {**kept, "verify": report.seconds["verify"]}.items()}


def main() -> None:
    """Time all models; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="write DIR/phases.json")
    given = parser.parse_args()
    stages = tuple(replace(each, run=partial(timed, each.name, each.run)) for each in fuse_model.STAGES)
    passes = lambda each, *given: timed(f"pass {each.__name__}", APPLY, each, *given)  # noqa: E731
    for name, value in {"STAGES": stages, "_apply": passes, "_read": partial(timed, "Read", READ)}.items():
        setattr(fuse_model, name, value)
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
