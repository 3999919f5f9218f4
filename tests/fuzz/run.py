"""Fuzz the optimizer: each seed is a model, whose optimized form must compute the same.

    python tests/fuzz/run.py --cases 50000 --seed 1 --processes 2 --results results.json --failures found
    python tests/fuzz/run.py --case 4711 --case 815        # these seeds, as often as wanted

At the end a table counts what became of the cases, by kind of model.  A case fails if its result is wrong, onnxruntime
refuses the optimized model though it runs the original, or there is a traceback, no end or a crash.  It is printed
with its seed and as the smallest model in ONNX text that fails in the same way, which `--failures` stores.  Cases that
end a process, or twice do not end, are failures of their own.  The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import resource
import selectors
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), *(str(TESTS / folder) for folder in ("", "fuzz", "patterns"))]
MAX_SECONDS = 90.0  # of one case, or of its reduction; then its process is ended
MAX_BYTES = 6 * 2**30  # that a process may take, so that no case takes the memory of the others
LACKS_MEMORY = "std::bad_alloc"
MAX_RESIDENT = 2 * 2**30  # bytes; a process that has grown more is followed by a fresh one
MAX_TEXT = 20_000  # characters of a failing model that are printed
WORKER = [__file__, "--worker"]
MAX_REDUCED = 3  # failures of one cause that a process makes smaller
KINDS = ("spelled", "random", "images", "control flow", "sizes", "quantized", "special values", "hostile", "bytes")
COLUMNS = {
    "same": ("same",), "wrong": ("wrong",), "tracebacks": ("traceback",), "hangs and crashes": ("hang", "crash"),
    "refused by onnxruntime": ("unrunnable",), "refused by onnxfuse": ("refused",), "lost verification": ("lost",),
    "not comparable": ("idle",),
}  # fmt: skip


@dataclass
class Tally:
    """What became of the cases so far."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # of verdicts, by kind
    seconds: Counter[str] = field(default_factory=Counter)  # that processes took, by kind
    causes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # by verdict
    failures: list[dict[str, str]] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)  # seeds that did not end at first, and were judged again
    folder: Path | None = None  # in which failing cases are stored

    def take(self, said: dict[str, str]) -> None:
        """Count what a worker says of a case, and print and store it if it failed."""
        verdict = said["verdict"]
        self.counts[said["kind"]][verdict] += 1
        self.seconds[said["kind"]] += float(said.get("seconds", 0))
        if verdict != "same":
            self.causes[verdict][said["key"]] += 1
        line = f"--- seed {said['seed']}, {said['kind']}, {said['options']}: {verdict}: {said['sentence']}"
        if verdict in ("refused", "lost") and self.causes[verdict][said["key"]] == 1:
            print(line, flush=True)
        if said["failed"]:
            self.failures.append({name: said[name] for name in ("seed", "kind", "options", "verdict", "sentence")})
            print(f"{line}\n{said['text']}", flush=True)
            if self.folder is not None:
                self._store(said)

    def _store(self, said: dict[str, str]) -> None:
        assert self.folder is not None
        stem = f"{said['verdict']}_{said['seed']}"
        data = base64.b64decode(said.get("model", "")) or _drawn_elsewhere(int(said["seed"]))
        if data is not None:
            (self.folder / f"{stem}.onnx").write_bytes(data)
        (self.folder / f"{stem}.txt").write_text(
            f"{said['kind']}, {said['options']}: {said['verdict']}: {said['sentence']}\n"
            f"python tests/fuzz/run.py --case {said['seed']}\n\n{said['text']}\n"
        )

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each kind of model, and one for all of them."""
        rows = []
        for kind in [*(k for k in KINDS if k in self.counts), *(k for k in self.counts if k not in KINDS)]:
            counts = self.counts[kind]
            rows.append({"kind": kind, "cases": counts.total(), **{name: sum(counts[v] for v in verdicts)
                         for name, verdicts in COLUMNS.items()}, "seconds": round(self.seconds[kind], 1)})  # fmt: skip
        totals = {name: round(sum(row[name] for row in rows), 1) for name in ("cases", *COLUMNS, "seconds")}
        rows.append({"kind": "all", **totals})
        return rows

    def print(self) -> None:
        """Print the table, and the commonest reasons for which cases are not compared, refused or not verified."""
        rows = self.table()
        print("  ".join(f"{name:>{max(len(name), 7)}}" if name != "kind" else f"{name:14}" for name in rows[0]))
        for row in rows:
            print(
                "  ".join(
                    f"{value:>{max(len(name), 7)}}" if name != "kind" else f"{value:14}" for name, value in row.items()
                )
            )
        for verdict, name in (("idle", "not comparable"), ("refused", "refused"), ("lost", "lost verification")):
            for cause, count in self.causes[verdict].most_common(8):
                print(f"  {name}: {count} {cause}")
        if self.slow:
            print(f"judged again: {' '.join(map(str, self.slow))}")
        print(f"failed: {' '.join(each['seed'] for each in self.failures) or 'none'}")


def _drawn_elsewhere(seed: int) -> bytes | None:
    """Draw the model of a case in a process of its own, which that may end too; then return None."""
    with ProcessPoolExecutor(1) as pool, suppress(BrokenProcessPool):
        return pool.submit(_serialized, seed).result()
    return None


def _serialized(seed: int) -> bytes | None:
    """Return the model of a case whose process has ended; None if drawing it raises, which its worker has said."""
    from fuzz_cases import case_of

    try:
        model = case_of(seed).model
    except Exception:
        return None
    return model if isinstance(model, bytes) else model.SerializeToString()


def worker(seeds: Sequence[int]) -> None:
    """Judge cases in this process, and write a line before and after each, until it has grown too large."""
    warnings.simplefilter("ignore")
    from judge import SECONDS

    from onnxfuse.verify import own_process

    own_process.START_WORKER = own_process.START_WORKER.replace(
        "from onnxfuse", "import single_thread; from onnxfuse", 1
    )
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    with own_process.own_process(SECONDS):
        for seed in seeds:
            _judge_one(seed)
            if resident_bytes() > MAX_RESIDENT:
                return


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


SEEN: Counter[str] = Counter()  # failures of this process, by their cause


def _judge_one(seed: int) -> None:
    from fuzz_cases import case_of
    from judge import SECONDS, Verdict
    from reduction import reduced, text

    from onnxfuse.verify.own_process import own_process

    print(json.dumps({"begins": seed}), flush=True)
    started = time.monotonic()
    case = None
    try:
        case = case_of(seed)
        verdict = case.verdict()
        if verdict.kind == "hang" or LACKS_MEMORY in verdict.sentence:  # every call may be slow once, or lack memory
            with own_process(SECONDS):  # which models before this one may have taken
                verdict = case.verdict()
    except Exception as error:  # a fault of the fuzzer, which must not end the run
        last = traceback.extract_tb(error.__traceback__)[-1]
        verdict = Verdict("crash", f"the fuzzer raises {type(error).__name__} in {last.name}: {str(error)[:200]}")
    kind, options = (case.kind, str(case.options)) if case else ("not drawn", "")
    said = {"seed": str(seed), "kind": kind, "options": options, "verdict": verdict.kind, "key": verdict.key,
            "sentence": verdict.sentence, "text": "", "failed": verdict.is_failure,
            "seconds": time.monotonic() - started}  # fmt: skip
    if case and verdict.is_failure and verdict.kind != "crash":
        SEEN[verdict.key] += 1
        model = case.model
        if SEEN[verdict.key] <= MAX_REDUCED:
            print(json.dumps({"found": said}), flush=True)
            if not isinstance(model, bytes) and verdict.kind != "hang":
                model, verdict = reduced(model, case.sizes, seed, verdict, case.judge)
        data = model if isinstance(model, bytes) else model.SerializeToString()
        shown = f"{len(data)} damaged bytes" if isinstance(model, bytes) else text(model)
        said |= {"sentence": verdict.sentence, "text": shown[:MAX_TEXT], "model": base64.b64encode(data).decode()}
    print(json.dumps(said), flush=True)


@dataclass
class Worker:
    """A process that judges cases, and the seeds that are left for it."""

    seeds: list[int]
    process: subprocess.Popen[str]
    output: IO[str]
    current: int | None = None
    since: float = 0.0
    done: int = 0
    found: dict[str, str] | None = None  # the verdict on the current case, which is being reduced
    stopped: bool = False  # because the current case took too long


def start(seeds: list[int]) -> Worker:
    """Start a worker; it reads its seeds from its input, as there may be many."""
    command = [sys.executable, *WORKER]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(seeds))
    process.stdin.close()
    return Worker(seeds, process, process.stdout, None, time.monotonic())


def fuzz(seeds: Sequence[int], processes: int, folder: Path | None = None) -> Tally:
    """Judge the cases of these seeds in several processes; print failures as they are found, and store them."""
    tally, started = Tally(folder=folder), time.monotonic()
    shares = [list(seeds[i::processes]) for i in range(processes)]
    workers = [start(share) for share in shares if share]
    with selectors.DefaultSelector() as selector:
        for each in workers:
            selector.register(each.output, selectors.EVENT_READ, each)
        while selector.get_map():
            for key, _ in selector.select(1.0):
                step(selector, key.data, tally)
            for key in list(selector.get_map().values()):
                if time.monotonic() - key.data.since > MAX_SECONDS:
                    key.data.stopped = True
                    key.data.process.kill()  # its output then ends, and the next one begins with or behind that case
    took = time.monotonic() - started
    count = sum(each.total() for each in tally.counts.values())
    print(f"{count} cases in {took:.0f} s, {1000 * took * processes / max(count, 1):.0f} ms of a process for each")
    tally.print()
    return tally


def step(selector: selectors.BaseSelector, worker: Worker, tally: Tally) -> None:
    """Take one line of a worker, or its end: a worker that ended in the midst of a case is followed by another one."""
    line = worker.output.readline()
    if line:
        said = json.loads(line)
        worker.since = time.monotonic()
        if "begins" in said:
            worker.current, worker.found = said["begins"], None
        elif "found" in said:
            worker.found = said["found"]
        else:
            worker.current = None
            worker.done += 1
            tally.take(said)
        return
    selector.unregister(worker.output)
    worker.output.close()
    code = worker.process.wait()
    left = worker.seeds[worker.done :]
    if worker.current is None:
        if code != 0:
            sys.exit(f"a process ended with code {code} between two cases")
    elif worker.stopped and worker.found is None and worker.current not in tally.slow:
        tally.slow.append(worker.current)
        print(f"--- seed {worker.current}: not done after {MAX_SECONDS:g} s, and judged again", flush=True)
    else:
        tally.take(worker.found or ended(worker, code))
        del left[0]
    if left:
        following = start(left)
        selector.register(following.output, selectors.EVENT_READ, following)


def ended(worker: Worker, code: int) -> dict[str, str]:
    """Return what is said of a case whose process was stopped, or ended with a code."""
    kind = "hang" if worker.stopped else "crash"
    sentence = f"not done after {MAX_SECONDS:g} s" if worker.stopped else f"the process ended with code {code}"
    return {"seed": str(worker.current), "kind": "ended", "options": "", "verdict": kind, "key": sentence,
            "sentence": sentence, "text": "", "failed": "y"}  # fmt: skip


def seeds_of(given: argparse.Namespace) -> Iterator[int]:
    """Yield the seeds that the command line asks for: those of `--seed 1` and `--seed 2` differ."""
    yield from given.case or range(given.seed * 1_000_000, given.seed * 1_000_000 + given.cases)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50000)
    parser.add_argument("--seed", type=int, default=0, help="cases of other seeds are others")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="write versions, the table and the failures to this JSON file")
    parser.add_argument("--failures", type=Path, help="store failing cases, made smaller, in this folder")
    parser.add_argument("--case", type=int, action="append", help="a seed that was printed; may be given several times")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Judge the cases of the command line; return 1 if one failed."""
    options = parse()
    if options.worker:
        worker(json.load(sys.stdin))
        return 0
    if options.failures:
        options.failures.mkdir(parents=True, exist_ok=True)
    started, seeds = time.monotonic(), list(seeds_of(options))
    tally = fuzz(seeds, options.processes, options.failures)
    if options.results:
        results = {
            "command": " ".join(sys.argv), "seed": options.seed, "cases": len(seeds), "processes": options.processes,
            "seconds": round(time.monotonic() - started, 1), "versions": versions(), "table": tally.table(),
            "causes": {verdict: dict(causes.most_common(30)) for verdict, causes in tally.causes.items()},
            "failures": tally.failures,
        }  # fmt: skip
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    return int(bool(tally.failures))


def versions() -> dict[str, str]:
    """Return the versions of what takes part, and the commit."""
    import numpy
    import onnx
    import onnxruntime

    import onnxfuse

    git = ["git", "-C", str(TESTS.parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {"onnxfuse": onnxfuse.__version__, "commit": commit, "python": platform.python_version(),
            "onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__, "numpy": numpy.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores"}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
