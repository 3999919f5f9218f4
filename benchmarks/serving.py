"""Serve mixed shapes with onnxruntime on the original model and with onnxfuse on the optimized one, in one run.

    python benchmarks/serving.py --out DIR                                       # everything, in ten minutes at most
    python benchmarks/serving.py --out DIR --parts memory --shapes 10000 --range batch:1..32
    python benchmarks/serving.py --out DIR --parts load --threads 8 --seconds 10 --tune never
    python benchmarks/serving.py --out DIR --model bert.onnx --decoder llama.onnx --provider cpu --range batch:1..4 ...

The models are BERT-base and, for the growing cache, four blocks of a Llama, both in float16 with dynamic dims, which
models/export.py's tables build into DIR/onnx, once.  Requests have sizes drawn from a seed over ranges of the dims;
their inputs come from the host, and their outputs stay on the device.  Everything runs on this host, without a network.

    visits      the first visit of each fresh shape against later visits of it, the engines in turns
    unprepared  the first shapes of a session that waits for no compiler, against the bodies of its nodes
    load        threads on one session, in turns: latency and throughput, for visited shapes and for unseen ones
    cache       a decoder whose cache grows from 1 token to 4096: the time of each step, on its first visit and on later
                ones, against its neighbours, and what may have interrupted those that are slow
    memory      the resident memory of the process and the GPU's memory, over shapes, an engine in a process of its own
    cold        from the start of a process to its first answer: empty caches, filled caches, a plan file
    background  requests with pauses, before, while and after a session of onnxfuse is tuned between them

Each part runs in a process of its own, so that one that fails costs its own result only.  The caches of onnxfuse and
CuPy are empty at the beginning, unless --caches names a folder, and the parts share them.  Results come into
DIR/serving.json part by part; those of other parts that were measured before under the same conditions stay.  A part
that reaches its bound of time or memory says so, and how far it came.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent))

from model_cases import Case, export
from result_text import read_result, result_text
from serving_cold import caches_in, cold
from serving_engines import ENGINES, Bounds, Served
from serving_growth import beyond_onnxruntime, growing_cache, memory
from serving_load import bodies, load, unprepared, visits
from serving_tables import table
from serving_tuning import background

from onnxfuse.bench.machine import device, versions
from onnxfuse.errors import first_line
from onnxfuse.ir.save import save
from onnxfuse.optimizer import optimize
from onnxfuse.runtime.plan import Aim
from onnxfuse.tuning.bound_session import default_provider
from onnxfuse.tuning.dispatch import TunePolicy

PARTS = ("unprepared", "visits", "load", "cache", "memory", "cold", "background")
AMOUNTS = ("first", "fresh", "threads", "seconds", "tokens", "shapes", "starts", "tuning")  # options that parts take
MODEL, DECODER = Case("bert", "bert", {}), Case("llama-decode", "llama_decode", {})
RANGES = {"batch": (1, 8), "seq": (1, 512)}
THREADS = "1,2,4,8,16"
REQUESTS = 20_000  # of an engine at a number of threads, at most
GRACE = 30  # seconds between the limit of a process, which it keeps itself, and its end by force


# --- the worker ------------------------------------------------------------------------------------------------------


def worker(task: Mapping[str, Any]) -> None:
    """Do a task; its result, or its error, goes to what was stdout, and all other output to stderr."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    try:
        result = prepare(task) if task["part"] == "prepare" else measured(task)
    except (Exception, SystemExit) as error:  # every failure is a result
        result = {"error": f"{type(error).__name__}: {first_line(error)}"}
    channel.write(json.dumps(result) + "\n")


def prepare(task: Mapping[str, Any]) -> dict[str, Any]:
    """Export a model that is missing, and optimize it; return how many nodes each fusion has."""
    original = Path(task["original"])
    if not original.exists():
        export({case.architecture: case for case in (MODEL, DECODER)}[task["architecture"]], original)
    Path(task["fused"]).parent.mkdir(parents=True, exist_ok=True)
    model, report = optimize(original, verify=False)
    save(model, Path(task["fused"]), folder=original.parent)
    return {"counts": report.counts}


def measured(task: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a part."""
    served, bounds = Served(**task["served"]), Bounds(task["limit"], task["memory"])
    match task["part"]:
        case "visits":
            return visits(served, task["fresh"], bounds)
        case "unprepared":
            return unprepared(served, task["first"], task["alone"], bounds)
        case "bodies":
            return bodies(served, task["first"], bounds)
        case "load":
            return load(served, task["threads"], task["seconds"], REQUESTS, bounds)
        case "cache":
            return growing_cache(served, task["tokens"], bounds)
        case "memory":
            return memory(served, task["engine"], task["shapes"], bounds)
        case "background":
            return background(served, task["tuning"], bounds)
        case _:
            return cold(served, task["starts"], bounds)


# --- the parent ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What every process of a run needs to know."""

    options: argparse.Namespace
    deadline: float
    caches: Path

    def limit(self) -> float:
        """Return the seconds that the next process may take."""
        return max(0.0, min(float(self.options.limit), self.deadline - time.monotonic()))

    def result(self, part: str, **task: Any) -> dict[str, Any]:
        """Do a part in a process of its own, and return its result."""
        if not self.limit():
            return {"error": f"the {self.options.budget:.0f} s are spent"}
        task |= {"part": part, "limit": self.limit(), "memory": self.options.gib * 2**30}
        command = [sys.executable, __file__, "--out", str(self.options.out), "--worker", json.dumps(task)]
        environment = os.environ | caches_in(self.caches)
        seconds = task["limit"] + GRACE
        with (self.options.out / "serving.log").open("ab") as log:
            try:
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, env=environment, timeout=seconds)
            except subprocess.TimeoutExpired:
                return {"error": f"took longer than {seconds:.0f} s"}
        if done.returncode or not done.stdout:
            return {"error": f"the process died ({done.returncode}); see serving.log"}
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def prepared(self, given: Path | None, case: Case) -> dict[str, Any]:
        """Return the paths of the original, which is exported if none is given, and of the optimized model."""
        original = given or self.options.out / "onnx" / case.file_name
        paths = {"original": str(original), "fused": str(self.options.out / "onnx" / f"fused_{original.name}")}
        return paths | self.result("prepare", architecture=case.architecture, **paths)


def measure(run: Run, part: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a part with a model that `Run.prepared` returned."""
    if "error" in model:
        return {"error": model["error"]}
    options = run.options
    ranges = {} if part == "cache" else dict(options.range or RANGES)
    served = {"original": model["original"], "fused": model["fused"], "provider": options.provider,
              "tune": options.tune, "ranges": ranges, "seed": options.seed, "aim": options.aim}  # fmt: skip
    amounts = {name: getattr(options, name) for name in AMOUNTS}
    if part == "memory":
        found = {each: run.result(part, served=served, engine=each, **amounts) for each in ENGINES}
        found["beyond_onnxruntime"] = beyond_onnxruntime(found)
    elif part == "unprepared":
        found = run.result("bodies", served=served, **amounts)
        if "error" not in found:
            found = run.result(part, served=served, alone=found, **amounts)
    else:
        found = run.result(part, served=served, **amounts)
    return {"fused": model["counts"], **found}


def range_of(text: str) -> tuple[str, tuple[int, int]]:
    """Parse `batch:1..8`.  Raises ArgumentTypeError if it is something else."""
    match = re.fullmatch(r"(.+):(\d+)\.\.(\d+)", text)
    if not match or int(match[2]) > int(match[3]):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form batch:1..8")
    return match[1], (int(match[2]), int(match[3]))


def numbers(text: str) -> list[int]:
    """Parse `1,2,4`.  Raises ValueError, which argparse reports, if it is something else."""
    found = [int(each) for each in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the exported models and the results")
    add("--parts", default=",".join(PARTS), metavar="A,B", help=f"default {','.join(PARTS)}")
    add("--model", type=Path, help="an ONNX file in place of BERT-base")
    add("--decoder", type=Path, help="an ONNX file with inputs past_key_values... in place of the Llama")
    of_ranges = "sizes of a dynamic dim of the model, repeated for others; default batch:1..8 and seq:1..512"
    add("--range", action="append", type=range_of, metavar="DIM:LOW..HIGH", help=of_ranges)
    add("--seed", type=int, default=0, help="of the shapes and their order")
    add("--first", type=int, default=24, help="shapes of `unprepared` (default 24)")
    add("--fresh", type=int, default=200, help="shapes of `visits` (default 200)")
    add("--threads", type=numbers, default=THREADS, metavar="A,B", help="of `load` (default 1,2,4,8,16)")
    add("--seconds", type=float, default=2, help="of `load`, for an engine at a number of threads (default 2)")
    add("--tokens", type=int, default=4096, help="that the cache of `cache` grows to (default 4096)")
    add("--shapes", type=int, default=1000, help="of `memory` (default 1000)")
    add("--starts", type=int, default=3, help="of `cold`, in each way (default 3)")
    add("--tuning", type=float, default=30, help="seconds of `background` while it measures (default 30)")
    add("--tune", choices=get_args(TunePolicy), default="cached", help="that of onnxfuse.InferenceSession")
    add("--aim", choices=get_args(Aim), default="latency", help="that of onnxfuse.InferenceSession")
    add("--caches", type=Path, help="folder of the caches of onnxfuse and CuPy; default: a new one")
    add("--budget", type=float, default=580, help="stop after so many seconds (default 580)")
    add("--limit", type=float, default=150, help="seconds of a process (default 150)")
    add("--gib", type=float, default=16, help="resident memory that a process may have (default 16)")
    add("--provider", choices=["cpu", "cuda"], default=default_provider(), help="default: cuda, where it exists")
    add("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    return options


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions that all parts of a file share, and the date."""
    models = {"model": MODEL, "decoder": DECODER}
    return {"schema": 1, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "provider": options.provider, "device": device(options.provider), "versions": versions(),
            "tune": options.tune, "aim": options.aim, "seed": options.seed, "ranges": dict(options.range or RANGES),
            **{name: str(getattr(options, name) or case.file_name) for name, case in models.items()}}  # fmt: skip


def earlier(path: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that were measured before under the same conditions."""
    try:
        before = read_result(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    same = read_result(result_text({**head, "date": before.get("date")}))
    return before["parts"] if {**before, "parts": None} == {**same, "parts": None} else {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for, and print tables."""
    options = parse(arguments)
    if options.worker:
        return worker(options.worker)
    options.out.mkdir(parents=True, exist_ok=True)
    path, head = options.out / "serving.json", about(options)
    parts = earlier(path, head)
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(options, time.monotonic() + options.budget, options.caches or Path(scratch))
        prepared: dict[str, dict[str, Any]] = {}
        for part in options.parts:
            case, given = (DECODER, options.decoder) if part == "cache" else (MODEL, options.model)
            if case.name not in prepared:
                prepared[case.name] = run.prepared(given, case)
            parts[part] = {"date": head["date"], **measure(run, part, prepared[case.name])}
            draft = path.with_suffix(".part")
            draft.write_text(result_text({**head, "parts": parts}), encoding="utf-8")
            draft.replace(path)
            print(table(part, parts[part]) + "\n", flush=True)
    return None


if __name__ == "__main__":
    main()
