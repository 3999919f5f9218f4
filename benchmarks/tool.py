"""Seconds that `onnxfuse optimize` takes, unverified, verified quickly and in full, beside other optimizers of files.

    python benchmarks/tool.py --out DIR                             # all models and tools
    python benchmarks/tool.py --out DIR --python PEERS/bin/python   # the Python that has onnxslim, onnxsim, onnxscript
    python benchmarks/tool.py --out DIR --only 'unet*' --runs 1

The models are exported ones of models/exported, and generated ones of tests/large_models.py.  Each tool runs as a
command, from file to file, so that the start of its process counts.  The results are the least seconds of the clock and
of the processors (of all threads and processes that the command starts).  The latter depend less on other programs.  A
command of more than LONG seconds runs once.  So does one that fails, or that takes more than `--limit` seconds, and its
error is the result.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from result_text import result_text

from onnxfuse.bench.machine import device, versions

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "models"), str(ROOT / "tests")]

from exported_models import load_exported  # noqa: E402
from large_models import readers_of_one, small, sum_of_readers, transformer  # noqa: E402

MANY = 10_000  # nodes of the generated models
LONG = 20.0  # seconds of the clock after which a command is not run again
MODELS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "LayerNorm and GELU": small,
    "DenseNet": partial(load_exported, "densenet_ts13_bn_fp32.onnx"),
    "BERT": partial(load_exported, "bert_sdpa_ts_fp32.onnx"),
    "Llama": partial(load_exported, "llama_eager_ts_fp32.onnx"),
    "UNet": partial(load_exported, "unet_ts_fp32.onnx"),
    "transformer": partial(transformer, MANY),
    "one Sum of operators that read one tensor": partial(sum_of_readers, MANY),
    "operators that read one tensor": partial(readers_of_one, MANY),
}
ONNXSCRIPT = "import sys, onnx; from onnxscript.optimizer import optimize; onnx.save(optimize(onnx.load(sys.argv[1])), sys.argv[2])"  # noqa: E501
OWN: Mapping[str, Sequence[str]] = {
    f"onnxfuse, {level}": ("-W", "ignore", "-m", "onnxfuse", "optimize", "--verify", level)
    for level in ("off", "quick", "full")
}
PEERS: Mapping[str, Sequence[str]] = {
    "onnxslim": ("-m", "onnxslim"), "onnxsim": ("-m", "onnxsim"), "onnxscript": ("-c", ONNXSCRIPT),
}  # fmt: skip
# Compiled modules are kept, as where packages are installed.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
DONE = {0, 3, 4}  # exit codes of `onnxfuse optimize` that has written its file


def timed(command: Sequence[str], runs: int, limit: float) -> dict[str, Any]:
    """Return the least seconds of the clock and of the processors of several runs of a command, or its error."""
    wall, cpu = list[float](), list[float]()
    while len(wall) < runs and max(wall, default=0.0) <= LONG:
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, env=ENVIRONMENT
        )
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"error": f"more than {limit:g} s"}
        wall.append(time.perf_counter() - begun)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if process.returncode not in (DONE if "onnxfuse" in command else {0}):
            return {"error": f"exit code {process.returncode}: {errors.decode(errors='replace').strip()[-200:]}"}
    return {"wall_s": min(wall), "cpu_s": min(cpu)}


def with_shapes_of_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model, whose outputs declare their shapes, which onnxsim requires."""
    outputs = onnx.shape_inference.infer_shapes(model).graph.output
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    return model


def main() -> None:
    """Time the tools on each model; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="write DIR/tool.json")
    parser.add_argument("--python", default=sys.executable, help="the Python that has the other tools")
    parser.add_argument("--only", default="*", metavar="GLOB", help="time the models of these names")
    parser.add_argument("--runs", type=int, default=3, help="runs of each command; the shortest counts")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a command is allowed to take")
    given = parser.parse_args()
    freeze = [given.python, "-m", "pip", "freeze"]
    packages = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
    rows: list[dict[str, Any]] = []
    result = {
        "date": datetime.date.today().isoformat(), "device": device("cpu") | {"cores": os.cpu_count()},
        "versions": versions(), "peers": [each for each in packages.split() if each.startswith("onnx")],
        "load": os.getloadavg()[0],  # programs that ran at the start
        "rows": rows,
    }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        source, target = str(Path(name) / "in.onnx"), str(Path(name) / "out.onnx")
        commands = {tool: [sys.executable, *words, source, target] for tool, words in OWN.items()}
        commands |= {tool: [given.python, *words, source, target] for tool, words in PEERS.items()}
        for label, make in MODELS.items():
            if not fnmatch.fnmatch(label, given.only):
                continue
            onnx.save(with_shapes_of_outputs(make()), source)
            for tool, command in commands.items():
                row = {"model": label, "nodes": len(onnx.load(source).graph.node), "tool": tool}
                rows.append(row | timed(command, given.runs, given.limit))
                print(rows[-1], flush=True)
                (given.out / "tool.json").write_text(result_text(result), encoding="utf-8")


if __name__ == "__main__":
    main()
