"""Fuzz the optimizer: each seed is a model, whose optimized form must compute the same.

    python tests/fuzz/run.py --cases 20000 --seed 1 --processes 2
    python tests/fuzz/run.py --case 4711 --case 815        # these seeds, as often as wanted

A failing case is printed with its seed and as the smallest model in ONNX text that fails in the same way.  A case that
ends a process, or twice does not end, is a failure of its own.  The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import selectors
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), *(str(TESTS / folder) for folder in ("fuzz", "patterns"))]
MAX_SECONDS = 90.0  # of one case, or of its reduction; then its process is ended
MAX_BYTES = 6 * 2**30  # that a process may take, so that no case takes the memory of the others
WORKER = [__file__, "--worker"]
MAX_REDUCED = 3  # failures of one cause that are made smaller


@dataclass
class Tally:
    """What became of the cases so far."""

    kinds: Counter[str] = field(default_factory=Counter)
    idle: Counter[str] = field(default_factory=Counter)  # why onnxruntime or onnxfuse does not take a model
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)  # seeds that did not end at first, and were judged again

    def take(self, said: dict[str, str]) -> None:
        """Count what a worker says of a case, and print it if it failed."""
        self.kinds[said["kind"]] += 1
        if said["kind"] == "idle":
            self.idle[said["key"]] += 1
        elif said["kind"] == "refused":
            self.refused[said["key"]] += 1
            print(f"--- seed {said['seed']}: refused: {said['sentence']}", flush=True)
        if said["failed"]:
            self.failures.append(said["seed"])
            print(f"--- seed {said['seed']}: {said['kind']}: {said['sentence']}\n{said['text']}", flush=True)


def worker(seeds: Sequence[int]) -> None:
    """Judge cases in this process, and write a line before and after each."""
    warnings.simplefilter("ignore")
    from judge import SECONDS

    from onnxfuse.verify.own_process import own_process

    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    with own_process(SECONDS):
        _judge_each(seeds)


def _judge_each(seeds: Sequence[int]) -> None:
    from fuzz_cases import case_of
    from judge import judge
    from reduction import reduced, text

    seen: Counter[str] = Counter()
    for seed in seeds:
        print(json.dumps({"begins": seed}), flush=True)
        case = case_of(seed)
        verdict = case.verdict()
        if verdict.kind == "hang":  # on a busy machine every call may be slow once
            verdict = case.verdict()
        said = {"seed": str(seed), "kind": verdict.kind, "key": verdict.key, "sentence": verdict.sentence, "text": ""}
        seen[verdict.key] += 1
        if verdict.is_failure and isinstance(case.model, bytes):
            said["text"] = f"{len(case.model)} damaged bytes"
        elif verdict.is_failure and seen[verdict.key] <= MAX_REDUCED:
            print(json.dumps({"found": {**said, "failed": True}}), flush=True)
            again = functools.partial(judge, verify=case.verify, fallback=case.fallback)
            model, verdict = reduced(case.model, case.sizes, seed, verdict, again)
            said |= {"sentence": verdict.sentence, "text": text(model)}
        print(json.dumps({**said, "failed": verdict.is_failure}), flush=True)


@dataclass
class Worker:
    """A process that judges cases, and the seeds that are left for it."""

    seeds: list[int]
    process: subprocess.Popen[str]
    output: IO[str]
    current: int | None = None
    since: float = 0.0
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


def fuzz(seeds: Sequence[int], processes: int) -> Tally:
    """Judge the cases of these seeds in several processes, and print failures as they are found."""
    tally, started = Tally(), time.monotonic()
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
    print(f"{sum(tally.kinds.values())} cases in {took:.0f} s: {dict(sorted(tally.kinds.items()))}")
    for name, counts in (("idle", tally.idle), ("refused", tally.refused)):
        for cause, count in counts.most_common(12 if name == "refused" else 6):
            print(f"  {count} {cause}")
    if tally.slow:
        print(f"judged again: {' '.join(map(str, tally.slow))}")
    print(f"failed: {' '.join(tally.failures) or 'none'}")
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
            tally.take(said)
        return
    selector.unregister(worker.output)
    worker.output.close()
    code = worker.process.wait()
    if code == 0:
        return
    if worker.current is None:
        sys.exit(f"a process ended with code {code} between two cases")
    left = worker.seeds[worker.seeds.index(worker.current) :]
    if worker.stopped and worker.found is None and worker.current not in tally.slow:
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
    return {"seed": str(worker.current), "kind": kind, "key": sentence, "sentence": sentence, "text": "", "failed": "y"}


def seeds_of(given: argparse.Namespace) -> Iterator[int]:
    """Yield the seeds that the command line asks for: those of `--seed 1` and `--seed 2` differ."""
    yield from given.case or range(given.seed * 1_000_000, given.seed * 1_000_000 + given.cases)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--case", type=int, action="append", help="a seed that was printed; may be given several times")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    if options.worker:
        worker(json.load(sys.stdin))
    else:
        sys.exit(bool(fuzz(list(seeds_of(options)), options.processes).failures))
