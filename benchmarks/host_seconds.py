"""Seconds that onnxfuse itself takes to optimize large models, to make templates, and to compile kernels.

    python benchmarks/host_seconds.py                       # all, and what no machine should exceed
    python benchmarks/host_seconds.py --out DIR --only optimize

The clock is the processor time of the process, and the least of the runs counts, since other programs slow some runs
and not all.  An idle machine of two cores stays below the limits that are printed; above one, the program ends with 1.
Tests count the same work in calls of functions and in bytes of machine code.  Compiling needs cuda-bindings and
nvidia-cuda-nvrtc, but no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from result_text import result_text

from onnxfuse import optimize
from onnxfuse.bench.machine import versions

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "kernels"), str(ROOT / "models")]

NODES, MANY = 5_000, 40_000  # the latter are 800 blocks of a transformer
SMALL = 2_000
GROWTH = 1.6  # allowed over growth in proportion to the nodes: caches of the processor hold the smaller model
Row = tuple[str, float, float]  # what was timed, its seconds, and the limit


def least(run: Callable[[], object], runs: int) -> float:
    """Return the least seconds of the processor of several runs."""
    seconds = []
    for _ in range(runs):
        begin = time.process_time()
        run()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def optimizing(runs: int) -> Iterator[Row]:
    """Optimize models of many nodes, from a serialized model to a serialized model."""
    from large_models import MODELS, OF_REGIONS

    def of(content: bytes) -> Callable[[], object]:
        return lambda: optimize(content, verify=False)[0].SerializeToString()

    for name, make in MODELS.items():
        few = least(of(make(SMALL).SerializeToString()), runs)
        seconds = least(of(make(NODES).SerializeToString()), runs)
        yield f"optimize {NODES} nodes: {name}", seconds, min(3.0, GROWTH * NODES / SMALL * few)
    for name, make in OF_REGIONS.items():
        yield f"optimize {2 * NODES} nodes: {name}", least(of(make(2 * NODES).SerializeToString()), runs), 6.0
    yield f"optimize {MANY} nodes: transformer", least(of(MODELS["transformer"](MANY).SerializeToString()), 1), 25.0


def planning(runs: int) -> Iterator[Row]:
    """Make the templates of attention."""
    from architectures import H200
    from attention_templates import CACHES, CASES
    from template_checks import template_of

    for case in (*CASES, *CACHES):
        yield f"plan {case.name}", least(lambda case=case: template_of(case.node, case.inputs, H200), runs), 0.6


def compiling(runs: int) -> Iterator[Row]:
    """Compile the kernels of regions for an H200."""
    from quick_regions import QUICK, first_launch

    from onnxfuse.runtime.nvrtc import compile_cubin

    for name, program in QUICK.items():
        kernel = first_launch(program).kernel
        yield f"compile {name}", least(lambda kernel=kernel: compile_cubin(kernel, 90), runs), 0.3


def compiling_models(runs: int) -> Iterator[Row]:
    """Compile all kernels of fused models for an H200, each time with an empty cache.

    The models are exported ones of few channels, which have as many distinct kernels as large ones.
    """
    from exported_models import load_exported

    from onnxfuse.compile.compile_file import CompileSettings, compile_file

    with TemporaryDirectory() as folder:
        model, plans, kernels = Path(folder, "model.onnx"), Path(folder, "model.plans"), list[int]()

        def compile_all() -> None:
            os.environ["ONNXFUSE_CACHE_DIR"] = str(Path(folder, str(len(kernels))))
            kernels.append(compile_file(model, plans, CompileSettings(archs=["sm_90"])).gpus[0].kernels)

        for name in ("bert_sdpa_ts_fp32", "detector_ts11_bn_fp32", "llama_eager_ts_fp16", "resnet50_ts13_bn_fp32"):
            onnx.save(optimize(load_exported(f"{name}.onnx"), verify=False)[0], model)
            seconds = least(compile_all, runs)
            yield f"compile {kernels[-1]} kernels of {name}", seconds, 30.0


PARTS = {"optimize": optimizing, "plan": planning, "compile": compiling, "models": compiling_models}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="time one part")
    parser.add_argument("--runs", type=int, default=3, help="runs of each, the least of which counts")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/host_seconds.json too")
    given = parser.parse_args()
    rows: list[Row] = []
    for name, part in PARTS.items():
        for row in part(given.runs) if given.only in (None, name) else ():
            rows.append(row)
            what, seconds, limit = row
            print(f"{seconds:8.3f} s of {limit:6.3f} s  {what}{'' if seconds < limit else '  TOO LONG'}", flush=True)
    if given.out:
        result = {"versions": versions(), "rows": [{"what": w, "seconds": s, "limit": m} for w, s, m in rows]}
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "host_seconds.json").write_text(result_text(result), encoding="utf-8")
    return int(any(seconds >= limit for _, seconds, limit in rows))


if __name__ == "__main__":
    sys.exit(main())
