"""Time whole models in onnxruntime, PyTorch and onnxfuse, on inputs and outputs that stay on the device.

    python benchmarks/models.py --out DIR --budget 560                     # the default set, and exporting the models
    python benchmarks/models.py --out DIR                                  # the default set, up to seven minutes
    python benchmarks/models.py --out DIR --quick                          # onnxruntime and onnxfuse only
    python benchmarks/models.py --out DIR --only 'bert-*' --peers ort,onnxfuse,torch-max-autotune
    python benchmarks/models.py --out DIR --turns --peers onnxfuse-graph,onnxfuse-static-graph  # plans of one size
    python benchmarks/models.py --out DIR --group conv --only 'resnet50-*' --budget 280      # peers in turns

Models are exported by models/export.py's tables into DIR/onnx, once; results come into DIR/models.json one by one, and
those of other models and peers that were measured before on the same device with the same versions stay.
Every peer's outputs are compared with the model in float32.  The measuring runs in a process of its own, so that a
peer that crashes or hangs costs its own result only.

The group conv is the convolutional models, whose peers are timed in turns in one process: all of them are prepared
first, and each run of one follows a run of another, so that all find the GPU as warm.  Before that, processes side by
side export the models and compile, because most of the time would go into that.

A peer is timed twice: back to back, where large models make a GPU lower its clock to stay within its power limit, and
paced, with pauses of PAUSE times a run between runs, where it stays below that.  Both clocks are in the results.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fnmatch
import importlib
import json
import logging
import math
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from clocks import Clocks
from model_cases import Case, Work, export
from model_tables import cell, tables
from peers import CONVOLUTIONS, MAX_AUTOTUNE, PEERS, QUICK, TOLERANCE, Peer, reference, relative_error, release
from result_text import read_result, result_text
from warm import in_processes

from onnxfuse.bench.machine import device, versions
from onnxfuse.errors import first_line
from onnxfuse.tuning.bound_session import WARM_UP_RUNS, default_provider
from onnxfuse.tuning.timing import interleaved, runs_within

GROUPS = ("default", "conv", "regions", "eight bits", "slow")
BOTH, CONV, REGIONS, EIGHT, SLOW = GROUPS[:2], ("conv",), ("regions",), ("eight bits",), ("slow",)
CASES = (
    Case("bert-b8-s512", "bert", {"batch": 8, "seq": 512}, "bert"),
    Case("bert-b8-s512-tf32", "bert", {"batch": 8, "seq": 512}, "bert", dtype="fp32", groups=SLOW),
    Case("bert-b1-s128", "bert", {"batch": 1, "seq": 128}, "bert", groups=("default", "slow")),
    Case("llama-s2048", "llama", {"batch": 1, "seq": 2048}, "qwen3"),
    Case("llama-s128", "llama", {"batch": 1, "seq": 128}, "qwen3"),
    Case("llama-decode-4k", "llama_decode", {"batch": 1, "past": 4096, "seq": 1}, fixed=True),
    Case("vit-b32", "vit", {"batch": 32}, "vit"),
    Case("vit-b1", "vit", {"batch": 1}, "vit", groups=("default", "slow")),
    Case("clip-text-b32", "clip_text", {"batch": 32, "seq": 77}, "clip", fixed=True, groups=SLOW),
    Case("dinov2-b8", "dinov2", {"batch": 8}, "vit", groups=SLOW),
    Case("gpt-neox-s1024", "gpt_neox", {"batch": 1, "seq": 1024}, "gpt_neox", fixed=True, groups=SLOW),
    Case("resnet50-b32", "resnet50", {"batch": 32}, convolutions=True, groups=BOTH),
    Case("resnet50-b1", "resnet50", {"batch": 1}, convolutions=True, groups=BOTH),
    Case("resnet50-b32-tf32", "resnet50", {"batch": 32}, convolutions=True, dtype="fp32", groups=CONV),
    Case("mobilenetv3-b32", "mobilenetv3_large", {"batch": 32}, convolutions=True, fixed=True, groups=CONV),
    Case("efficientnet-b32", "efficientnet", {"batch": 32}, convolutions=True, fixed=True, groups=CONV),
    Case("convnext-b16", "convnext", {"batch": 16}, convolutions=True, fixed=True, groups=CONV),
    Case("densenet-b16", "densenet", {"batch": 16}, convolutions=True, fixed=True, groups=CONV),
    Case("detector-b8", "detector", {"batch": 8}, convolutions=True, fixed=True, groups=CONV),
    Case("detector-b1", "detector", {"batch": 1}, convolutions=True, fixed=True, groups=CONV),
    Case("unet-b2", "unet", {"batch": 2}, convolutions=True, fixed=True, groups=CONV),
    Case("vae-decoder-b1", "vae_decoder", {"batch": 1}, convolutions=True, fixed=True, groups=CONV),
    Case("t5-b8-s256", "t5_encoder", {"batch": 8, "seq": 256}, fixed=True, groups=REGIONS),
    Case("swin-b16", "swin", {"batch": 16}, fixed=True, groups=REGIONS),
    Case("deberta-b8-s128", "deberta", {"batch": 8, "seq": 128}, fixed=True, groups=REGIONS),
    Case("resnet50-b32-int8", "resnet50", {"batch": 32}, convolutions=True, dtype="int8", groups=EIGHT),
    Case("resnet50-b128-int8", "resnet50", {"batch": 128}, convolutions=True, dtype="int8", groups=EIGHT),
    Case("resnet50-b128", "resnet50", {"batch": 128}, convolutions=True, groups=EIGHT),
    Case("bert-b8-s512-int8", "bert", {"batch": 8, "seq": 512}, dtype="int8", groups=EIGHT),
    Case("bert-b8-s512-dynamic8", "bert", {"batch": 8, "seq": 512}, dtype="dynamic8", groups=EIGHT),
)
SECONDS, QUICK_SECONDS = 0.6, 0.25  # of timed runs
PAUSE, PACED_RUNS = 2.0, 60
LOST = ("illegal memory access", "CUDA failure 700", "CUDA failure 716", "CUDA failure 719", "misaligned address",
        "unspecified launch failure", "illegal instruction")  # fmt: skip
EXPORT_SECONDS, REFERENCE_SECONDS = 14, 3  # of an architecture, of a model; estimated
PACKAGES = ("torch", "transformers", "onnxscript", "triton")
AT_ONCE = 12  # processes that export or compile
Pair = tuple[Case, Peer]


# --- the worker ------------------------------------------------------------------------------------------------------


def measure(
    work: Work, peers: Sequence[Peer], seconds: float, clocks: Clocks | None, begin: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Prepare peers, warm them up, time them in turns and compare; if one fails, its result is its error.

    `begin` is called with the name of each peer.  If a peer leaves the GPU unusable, its result is the only one.
    """
    rows, ready = list[dict[str, Any]](), list[tuple[dict[str, Any], Any]]()
    for peer in peers:
        begin(peer.name)
        row: dict[str, Any] = {"model": work.case.name, "peer": peer.name}
        started = time.perf_counter()
        with recorded(row):
            if not work.path.exists():
                export(work.case, work.path)
                row["export_s"] = round(time.perf_counter() - started, 2)
            reference(work)
            prepared = peer.prepare(work)
            for _ in range(WARM_UP_RUNS):
                prepared.run()
            row["prepare_s"] = round(time.perf_counter() - started - row.get("export_s", 0.0), 2)
            ready.append((row, prepared))
        row["total_s"] = round(time.perf_counter() - started, 2)
        rows.append(row)
        if lost(row):
            return [row]
    started = time.perf_counter()
    with recorded(*(row for row, _ in ready)):
        time_in_turns(ready, seconds, clocks)
        for row, prepared in ready:
            prepared.run()  # PyTorch frees what a CUDA graph wrote when another one runs
            error = relative_error(reference(work), prepared.outputs())
            row |= {"relative_error": error if error < math.inf else "inf", "agrees": error <= TOLERANCE}
    for row, _ in ready:
        row["total_s"] = round(row["total_s"] + (time.perf_counter() - started) / len(ready), 2)
    return rows


@contextlib.contextmanager
def recorded(*rows: dict[str, Any]) -> Iterator[None]:
    """Write what is raised into the rows: every failure of a peer is a result."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed"
    except Exception as error:
        message = f"{type(error).__name__}: {first_line(error)}"
    else:
        return
    for row in rows:
        row["error"] = message


def lost(row: Mapping[str, Any]) -> bool:
    """Return whether the error is one after which nothing runs in this process any more."""
    return any(text in row.get("error", "") for text in LOST)


def time_in_turns(ready: Sequence[tuple[dict[str, Any], Any]], seconds: float, clocks: Clocks | None) -> None:
    """Write the milliseconds of runs into the rows: back to back, and each after a pause; and the clock meanwhile."""
    if not ready:
        return
    rows, runs = [row for row, _ in ready], [prepared.run for _, prepared in ready]

    def one_of_each() -> None:
        for run in runs:
            run()

    count = runs_within(seconds * len(runs), one_of_each, least=15)
    for row, times in zip(rows, timed(runs, count, 0.0, clocks), strict=True):
        row |= times
    pause = PAUSE * statistics.fmean(row["median_ms"] for row in rows) / 1e3
    for row, times in zip(rows, timed(runs, min(PACED_RUNS, count), pause, clocks), strict=True):
        row["paced"] = times


def timed(runs: Sequence[Callable[[], None]], count: int, pause: float, clocks: Clocks | None) -> list[dict[str, Any]]:
    """Return the milliseconds of runs in turns, each after a pause in seconds, and the clock meanwhile."""

    def wait() -> None:  # busy: after a sleep the first steps of the host take longer
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            pass

    start = time.perf_counter()
    times = interleaved(runs, count, wait)
    sampled = clocks.since(start) if clocks else {}
    return [each.to_json() | sampled for each in times]


def worker(task: Mapping[str, Any]) -> None:
    """Measure the pairs of a task; messages to the parent go to what was stdout, and all other output to stderr."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    cases, peers = {each.name: each for each in CASES}, {each.name: each for each in PEERS}

    def work_of(case: str) -> Work:
        return Work(cases[case], Path(task["out"], "onnx", cases[case].file_name), task["provider"])

    if "export" in task:
        return export(cases[task["export"]], work_of(task["export"]).path)
    if "warm" in task:
        case, peer = task["warm"]
        return importlib.import_module("warm").warm(work_of(case), peers[peer])
    clocks = Clocks() if task["provider"] == "cuda" else None
    for case, names in rounds(task["pairs"], task["turns"]):

        def begin(peer: str, case: str = case) -> None:
            channel.write(json.dumps({"start": [case, peer]}) + "\n")

        rows = measure(work_of(case), [peers[name] for name in names], task["seconds"], clocks, begin)
        for row in rows:
            channel.write(json.dumps({"result": row}) + "\n")
        release()
        if any(map(lost, rows)):
            os._exit(3)
    return None


def rounds(pairs: Sequence[tuple[str, str]], turns: bool) -> list[tuple[str, list[str]]]:
    """Return the names of a case and of the peers that are measured together: all of the case's in turns, else one."""
    if not turns:
        return [(case, [peer]) for case, peer in pairs]
    return [(name, [peer for case, peer in pairs if case == name]) for name in dict.fromkeys(case for case, _ in pairs)]


# --- the parent ------------------------------------------------------------------------------------------------------


def measured(pairs: Sequence[Pair], task: Mapping[str, Any], limit: float, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield results as they come; a worker that dies, or is silent for `limit`, is started again."""
    pending = [(case.name, peer.name) for case, peer in pairs]
    while pending and time.monotonic() < deadline:
        running, before = None, len(pending)
        for message in messages({**task, "pairs": pending}, limit, deadline):
            if "start" in message:
                running = tuple(message["start"])
            elif "result" in message:
                running = None
                pending.remove((message["result"]["model"], message["result"]["peer"]))
                yield message["result"]
            elif message["end"] != "budget" and (running or len(pending) == before):
                case, peer = running or pending[0]
                pending.remove((case, peer))
                yield {"model": case, "peer": peer, "error": message["end"]}


def warm_up(pairs: Sequence[Pair], task: Mapping[str, Any], limit: float, deadline: float) -> None:
    """Export the models that are missing, then let every peer that compiles do so, in processes side by side."""
    program = [sys.executable, __file__, "--out", task["out"], "--worker"]
    files = {Path(task["out"], "onnx", case.file_name): case for case, _ in pairs}
    exports = [{**task, "export": case.name} for path, case in files.items() if not path.exists()]
    compiles = [{**task, "warm": [case.name, peer.name]} for case, peer in pairs if peer.compiles]
    start = time.monotonic()
    with Path(task["out"], "models.log").open("ab") as log:
        for each in (exports, compiles if task["provider"] == "cuda" else []):
            commands = [[*program, json.dumps(one)] for one in each]
            in_processes(commands, AT_ONCE, min(limit, deadline - time.monotonic()), log)
            print(f"{len(each)} exported or compiled, {time.monotonic() - start:.0f} s", flush=True)


def messages(task: Mapping[str, Any], limit: float, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the messages of a worker, and last the reason why it ended, unless it finished."""
    with Path(task["out"], "models.log").open("ab") as log:
        command = [sys.executable, __file__, "--out", str(task["out"]), "--worker", json.dumps(task)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    try:
        while line := lines.get(timeout=max(0.0, min(limit, deadline - time.monotonic()))):
            yield json.loads(line)
        code = process.wait(timeout=30)
        if code not in (0, 3):
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            yield {"end": f"the process died ({how}); see models.log"}
    except (queue.Empty, subprocess.TimeoutExpired):
        yield {"end": "budget" if time.monotonic() >= deadline else f"took longer than {limit:g} s"}
    finally:
        process.kill()
        process.wait()


def _read(stream: Any, lines: queue.Queue[str]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")


def pairs_of(only: Sequence[str], names: Sequence[str], group: str = "default") -> list[Pair]:
    """Return the pairs to measure, onnxruntime's peers first.  Raises SystemExit for unknown names."""
    known = {each.name: each for each in PEERS}
    cases = [case for case in CASES
             if (any(fnmatch.fnmatch(case.name, each) for each in only) if only else group in case.groups)]  # fmt: skip
    unknown = [each for each in names if each not in known]
    if unknown or not cases:
        sys.exit(f"unknown: {', '.join(unknown or only)}; models: {', '.join(case.name for case in CASES)}; "
                 f"peers: {', '.join(known)}")  # fmt: skip
    default = CONVOLUTIONS if group == "conv" else [peer.name for peer in PEERS if peer.by_default]
    peers = [known[name] for name in names or default]
    return [(case, peer) for torch in (False, True) for case in cases for peer in peers
            if peer.torch == torch and peer.applies(case)]  # fmt: skip


def estimate(pairs: Sequence[Pair], out: Path) -> float:
    """Return the estimated seconds on an H200."""
    missing = {case.file_name for case, _ in pairs if not (out / "onnx" / case.file_name).exists()}
    cases = {case.name for case, _ in pairs}
    once = {(case.file_name, peer.name): peer.once for case, peer in pairs}
    measuring = sum(peer.seconds for _, peer in pairs) + sum(once.values())
    return 15 + EXPORT_SECONDS * len(missing) + REFERENCE_SECONDS * len(cases) + measuring


def earlier(out: Path, head: Mapping[str, Any], pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return the results of an earlier run on the same device with the same versions, for pairs not measured now."""
    try:
        before = read_result((out / "models.json").read_text(encoding="utf-8"))
        if any(before[key] != head[key] for key in ("schema", "provider", "device", "versions")):
            return []
    except (OSError, ValueError, KeyError):
        return []
    now = {(case.name, peer.name) for case, peer in pairs}
    return [row for row in before["results"] if (row["model"], row["peer"]) not in now]


def write(out: Path, head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the results so far; readers see the old file or the new one."""
    part = out / "models.json.part"
    part.write_text(result_text({**head, "results": rows}), encoding="utf-8")
    part.replace(out / "models.json")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported models and the results")
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL", help="names or patterns of models")
    parser.add_argument("--group", choices=GROUPS, default="default", help="a set of models and peers")
    parser.add_argument(
        "--turns", action="store_true", help="time the peers of a model in turns, as for the group conv"
    )
    parser.add_argument("--max-autotune", action="store_true", help=f"also {MAX_AUTOTUNE}, which takes minutes a model")
    parser.add_argument("--peers", default="", metavar="A,B", help="comma-separated names of peers")
    parser.add_argument("--quick", action="store_true", help=f"fewer runs, and only {', '.join(QUICK)}")
    parser.add_argument("--budget", type=float, default=420, help="stop after so many seconds (default 420)")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one peer on one model (default 120)")
    parser.add_argument("--provider", choices=["cpu", "cuda"], help="default: cuda, where onnxruntime has it")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for, and print the table."""
    options = parse(arguments)
    if options.worker:
        return worker(json.loads(options.worker))
    deadline = time.monotonic() + options.budget
    named = [p for p in options.peers.split(",") if p] or (QUICK if options.quick and options.group != "conv" else ())
    pairs = pairs_of(options.only, named, options.group)
    if options.max_autotune:
        pairs += pairs_of(options.only, [MAX_AUTOTUNE], options.group)
    options.out.mkdir(parents=True, exist_ok=True)
    provider = options.provider or default_provider()
    guess = estimate(pairs, options.out)
    print(f"{len(pairs)} results; about {guess:.0f} s on an H200, {options.budget:.0f} s allowed", flush=True)
    task = {"out": str(options.out), "provider": provider, "seconds": QUICK_SECONDS if options.quick else SECONDS,
            "turns": options.turns or options.group == "conv"}  # fmt: skip
    if task["turns"]:
        warm_up(pairs, task, options.limit, deadline)
    head, rows = about(provider), list[dict[str, Any]]()
    before = earlier(options.out, head, pairs)
    for row in measured(pairs, task, options.limit, deadline):
        rows.append({**row, "date": head["date"]})
        write(options.out, head, [*before, *rows])
        print(f"{row['model']:18} {row['peer']:26} {row.get('error') or cell(row)}"[:140], flush=True)
    left = [f"{case.name} {peer.name}" for case, peer in pairs[len(rows) :]]
    write(options.out, {**head, "left_out": left}, [*before, *rows])
    print("\n" + tables([*before, *rows], [case.name for case in CASES]))
    if left:
        print(f"not measured, the {options.budget:.0f} s are spent: {', '.join(left)}")
    return None


def about(provider: Any) -> dict[str, Any]:
    """Return the date, the device and the versions."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"schema": 1, "date": date, "provider": provider, "device": device(provider),
            "versions": versions(PACKAGES), "cases": [dataclasses.asdict(case) for case in CASES]}  # fmt: skip


if __name__ == "__main__":
    main()
