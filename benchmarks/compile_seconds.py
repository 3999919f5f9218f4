"""Seconds that `onnxfuse compile` takes for one GPU with an empty cache, and the compiler's part of them.

    python benchmarks/compile_seconds.py --out DIR                          # all models, on 2 and on 16 processors
    python benchmarks/compile_seconds.py --out DIR --only 'b*' --processors 2

The models are those of models.py in float16, which models/export.py's tables build into DIR/onnx, once, and which are
optimized without a verification.  A process of its own compiles each on so many processors.  `nvrtc_s` adds up the time
that its threads spend in the compiler, on processors; `clock_s` is the time from reading the model to the plan file.
No GPU is needed.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model_cases import Case, export
from result_text import result_text

from onnxfuse.bench.machine import device, versions
from onnxfuse.compile.compile_file import CompileSettings, compile_file
from onnxfuse.ir.save import save
from onnxfuse.optimizer import optimize
from onnxfuse.runtime import code_cache, nvrtc

CASES = (
    Case("BERT-base", "bert", {}),
    Case("Llama, 4 layers", "llama", {}),
    Case("ResNet-50", "resnet50", {}),
    Case("YOLO-like detector", "detector", {}),
)


def worker(model: Path, processors: int, arch: str) -> None:
    """Compile a model on so many processors, and print a row."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processors])
    seconds: list[float] = []
    own = nvrtc.compile_cubin

    def counted(*given: Any) -> Any:
        start = time.thread_time()
        try:
            return own(*given)
        finally:
            seconds.append(time.thread_time() - start)

    vars(code_cache)["compile_cubin"] = counted  # the module imports it by name
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ONNXFUSE_CACHE_DIR"] = folder
        made = compile_file(model, Path(folder) / "plans", CompileSettings(archs=[arch]))
    print(json.dumps({"processors": processors, "kernels": len(seconds), "nvrtc_s": round(sum(seconds), 3),
                      "longest_s": round(max(seconds), 3), "clock_s": round(made.seconds, 3)}))  # fmt: skip


def fused(case: Case, folder: Path) -> Path:
    """Return the file of the optimized model, which is made if it is missing."""
    original, path = folder / case.file_name, folder / f"fused_{case.file_name}"
    if not path.exists():
        if not original.exists():
            export(case, original)
        save(optimize(original, verify=False)[0], path, folder=folder)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the models and of compile_seconds.json")
    parser.add_argument("--only", default="*", help="models whose names match, such as 'b*'")
    parser.add_argument("--processors", default="2,16", help="numbers of processors, separated by commas")
    parser.add_argument("--arch", default="sm_90", help="the compute capability to compile for")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return worker(options.worker, int(options.processors), options.arch)
    rows: list[dict[str, Any]] = []
    for case in (each for each in CASES if fnmatch.fnmatch(each.architecture, options.only)):
        path = fused(case, options.out / "onnx")
        for processors in options.processors.split(","):
            command = [sys.executable, __file__, "--out", str(options.out), "--worker", str(path), "--arch",
                       options.arch, "--processors", processors]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append({"model": case.name, **json.loads(done.stdout.splitlines()[-1])})
            print(rows[-1], flush=True)
    found = {"schema": 1, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
             "device": device("cpu"), "versions": versions(), "arch": options.arch, "rows": rows}  # fmt: skip
    (options.out / "compile_seconds.json").write_text(result_text(found), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
