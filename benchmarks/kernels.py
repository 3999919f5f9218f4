"""Time each kernel beside a device copy, PyTorch Inductor's kernel of the formula, and onnxruntime's own kernels.

    python benchmarks/kernels.py --out results [--quick] [--only layer_norm,softmax] [--shapes 4096x768]
        [--dtypes float16] [--without inductor,ort] [--add results/kernels.json]

A time is the cost of one more node in a CUDA graph, the median of the graph's replays over its launches, in two ways:

- memory: launches over buffers that together exceed the L2 cache, where that takes no more than 64 sets of them;
  the device copy moves as many bytes.
- chain: each launch reads what the one before it wrote, as operators of a model do; so do onnxruntime's kernels, which
  run in a session of their own (ort_chain.py).  Embeddings, in front of which is nothing, read the same rows each time.

Where a host offers several plans each is timed, and the fastest one's time counts, as in a session; the results say
which one it was.  Several processes compile and prepare what the peers need, then one after the other measures.  Peers
run in float16.  Bytes are the fewest that the operator must move: every input and output once.
"""

from __future__ import annotations

import command_lines

if __name__ == "__main__":
    GIVEN = command_lines.kernels(__doc__)  # before the imports, so that --help needs neither PyTorch nor a GPU

import argparse
import contextlib
import functools
import importlib
import math
import multiprocessing
import os
import queue
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from kernel_cases import DTYPES, Case, cases
from plan_names import names_of
from rows import Rows

from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import Plan, TensorSpec

NAMES = {dtype: name for name, dtype in DTYPES.items()}
L2_BYTES = 60 << 20
MAX_SETS = 64
REPLAYS = 11
PAGE = 1 << 16  # bytes
BARRIER_SECONDS = 30.0  # for which processes wait for each other
GRAPH_US = 1000.0  # of work in a graph, at least

# ---- timing ------------------------------------------------------------------------------------------------------


def launcher(plan: Plan, read: list[torch.Tensor], written: list[torch.Tensor]) -> Callable[[], None]:
    """Return a call that runs a plan on PyTorch's current stream, as a session does."""
    specs = [TensorSpec(tuple(t.shape), NAMES[t.dtype], t.data_ptr() % 16 == 0) for t in read]
    ready = ready_plan(plan, specs)

    def launch() -> None:  # the closure keeps the tensors alive
        addresses = ([tensor.data_ptr() for tensor in each] for each in (read, written))
        ready.run(*addresses, stream=torch.cuda.current_stream().cuda_stream)

    return launch


def per_launch(calls: list[Callable[[], Any]], bytes_each: int) -> tuple[float, float]:
    """Return the median and interquartile range of the microseconds per call, in a CUDA graph of repeated `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    rounds = max(1, math.ceil(GRAPH_US / (len(calls) * (2 + bytes_each / 4e6))))
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.stream(stream):  # torch.cuda.graph() would collect garbage, which takes longer than the measurement
        graph.capture_begin()
        for _ in range(rounds):
            kept = [call() for call in calls]
        graph.capture_end()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / (rounds * len(calls)))
    del kept
    quarters = statistics.quantiles(times[2:], n=4)
    return statistics.median(times[2:]), quarters[2] - quarters[0]


def sets_of(case: Case, plan: Plan) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], int]:
    """Return sets of inputs and outputs that exceed the L2 cache four times, and the bytes of one set."""
    first = case.tensors()
    written = [torch.full(spec.shape, math.nan, device="cuda", dtype=DTYPES[spec.dtype]) for spec in plan.outputs]
    moved = case.moved((*first, *written))
    count = min(MAX_SETS, max(2, math.ceil(4 * L2_BYTES / moved)))
    read = [first] + [[t.clone() for t in first] for _ in range(count - 1)]
    return read, [written] + [[torch.empty_like(t) for t in written] for _ in range(count - 1)], moved


@dataclass(frozen=True)
class Peers:
    """The peers of a case, ready to run."""

    inductor: Callable[..., Any] | None = None
    ort: Callable[[], float] | None = None  # microseconds of one more node
    failed: Mapping[str, str] = field(default_factory=dict)


def prepare(case: Case, wanted: Collection[str]) -> Peers:
    """Compile the formula with Inductor and create the sessions of onnxruntime's kernels, or say why that fails."""
    tensors, compiled, chain, failed = case.tensors(), None, None, {}
    for plan in case.plans():
        ready_plan(plan, case.specs())
    if case.dtype != "float16":
        return Peers()
    if "inductor" in wanted:
        compiled = torch.compile(case.formula, dynamic=False)
        compiled(*tensors)
    if "ort" in wanted:
        steps = importlib.import_module("ort_chain")
        step = steps.step_of(case.fusion, case.attributes, dict(zip(case.inputs, tensors, strict=True)))
        try:
            guess_us = 1.0 + sum(t.numel() * t.element_size() for t in tensors) / 2e6
            chain = steps.prepared(step, guess_us) if step else None
        except Exception as error:  # onnxruntime's own errors have no common class
            failed = {"ort_failed": str(error).splitlines()[0]}
    return Peers(compiled, chain, failed)


def measure(case: Case, peers: Peers) -> dict[str, Any]:
    plans = case.plans()
    read, written, moved = sets_of(case, plans[0])
    row: dict[str, Any] = {
        "fusion": case.fusion, "shape": case.shape, "dtype": case.dtype, "attributes": case.attributes, "bytes": moved,
        "sets": len(read),
    }  # fmt: skip
    alone = [per_launch(rotated(plan, read, written), moved) for plan in plans]
    in_chain = [per_launch(chained(case, plan, read[0], written[0]), moved) for plan in plans]
    for name, each in ("us", alone), ("chain_us", in_chain):
        (row[name], row[f"{name}_spread"]), row[f"{name}_plan"] = min(zip(each, names_of(plans), strict=True))
    row["error"] = max(difference(case, plan, read[0], written[0]) for plan in plans)
    row["copy_us"], _ = per_launch(copies(moved, len(read)), moved)
    row["tb_per_s"], row["share_of_copy"] = moved / row["us"] / 1e6, row["copy_us"] / row["us"]
    if compiled := peers.inductor:
        row["inductor_us"], _ = per_launch([lambda r=r: compiled(*r) for r in read], moved)
        row["inductor_chain_us"], _ = per_launch([chained_formula(case, compiled, read[0])], moved)
    failed = dict(peers.failed)
    if peers.ort:
        try:
            row["ort_chain_us"] = peers.ort()
        except Exception as error:
            failed["ort_failed"] = str(error).splitlines()[0]
    return {**row, **failed}


def rotated(plan: Plan, read: list[list[torch.Tensor]], written: list[list[torch.Tensor]]) -> list[Callable[[], None]]:
    """Return one launch for each set of inputs and outputs."""
    return [launcher(plan, *pair) for pair in zip(read, written, strict=True)]


def chained(case: Case, plan: Plan, read: list[torch.Tensor], written: list[torch.Tensor]) -> list[Callable[[], None]]:
    """Return two launches that each read what the other one writes; embeddings read the same rows."""
    if case.embeds:
        return [launcher(plan, read, there) for there in (written, [torch.empty_like(t) for t in written])]
    flowing = len(written)
    copied = [tensor.clone() for tensor in read[:flowing]]
    return [launcher(plan, [*here, *read[flowing:]], there) for here, there in ((copied, written), (written, copied))]


def chained_formula(case: Case, formula: Callable[..., Any], read: list[torch.Tensor]) -> Callable[[], Any]:
    """Return a call of the formula on the result of the call before it, or on the same ids for embeddings."""
    if case.embeds:
        return functools.partial(formula, *read)
    flowing, fixed = [read[: case.outputs]], read[case.outputs :]

    def call() -> None:
        results = formula(*flowing[0], *fixed)
        results = results if isinstance(results, tuple) else (results,)
        flowing[0] = [result.view(tensor.shape) for result, tensor in zip(results, read, strict=False)]

    return call


def copies(moved: int, count: int) -> list[Callable[[], Any]]:
    """Return device copies that read and write `moved` bytes, in whole pages: others may take half as long again."""
    size = moved // 2 // PAGE * PAGE or max(16, moved // 2)
    sources = [torch.empty(size, device="cuda", dtype=torch.uint8).random_(0, 255) for _ in range(count)]
    return [functools.partial(torch.empty_like(source).copy_, source) for source in sources]


def difference(case: Case, plan: Plan, read: list[torch.Tensor], written: list[torch.Tensor]) -> float:
    """Return the largest ||y - reference|| / ||reference||; the reference is the formula in float32, or float64."""
    for tensor in written:
        tensor.fill_(math.nan)
    launcher(plan, read, written)()
    wide = torch.float64 if case.dtype == "float32" else torch.float32
    results = case.formula(*(t.to(wide) if t.is_floating_point() else t for t in read))
    pairs = zip(written, results if isinstance(results, tuple) else (results,), strict=True)
    return max(float((y.double() - r.double()).norm() / r.double().norm()) for y, r in pairs)


# ---- output ------------------------------------------------------------------------------------------------------


COLUMNS = ("us", "copy_us", "inductor_us", "chain_us", "inductor_chain_us", "ort_chain_us")
HEAD = (
    f"{'':39}{'from and to memory':^38}{'from the one before':^30}\n"
    f"{'fusion':23}{'shape':16}{'us':>9}{'copy':>9}{'inductor':>9}{'of copy':>11}{'us':>9}{'inductor':>9}{'ort':>9}"
)


def line(row: dict[str, Any]) -> str:
    shape, activation = "x".join(map(str, row["shape"])), row["attributes"].get("activation", "")
    us, copy, inductor, *chain = (f"{row[name]:9.2f}" if name in row else f"{'-':>9}" for name in COLUMNS)
    share = f"{100 * row['share_of_copy']:9.0f} %"
    return f"{row['fusion']:17}{activation:6}{shape:16}{us}{copy}{inductor}{share}{''.join(chain)}  {row['dtype']}"


def chosen(given: argparse.Namespace) -> list[Case]:
    only, shapes, dtypes = (set(filter(None, text.split(","))) for text in (given.only, given.shapes, given.dtypes))
    return [
        case
        for case in cases(given.quick)
        if (not only or case.fusion in only)
        and (not shapes or "x".join(map(str, case.shape)) in shapes)
        and (not dtypes or case.dtype in dtypes)
    ]


def work(given: argparse.Namespace, number: int, ready: Any, turn: Any, rows: Any) -> None:
    """Prepare this process's share of the cases beside other processes, then time them alone."""
    share, until = chosen(given)[number :: given.processes], time.time() + given.prepare
    torch._dynamo.config.recompile_limit = len(share) + 1  # a formula has many shapes
    wanted, peers = {"inductor", "ort"} - set(given.without.split(",")), dict[str, Peers]()
    for case in share:
        if time.time() < until:
            with contextlib.suppress(Exception):  # timing the case reports the error
                peers[case.name] = prepare(case, wanted)
    with contextlib.suppress(threading.BrokenBarrierError):  # a process that is late goes on alone
        ready.wait(max(0.0, until - time.time()) + BARRIER_SECONDS)
    with turn:
        for case in share:
            row: dict[str, Any] = {"fusion": case.fusion, "shape": case.shape, "dtype": case.dtype}
            row["attributes"] = case.attributes
            try:
                row = measure(case, peers.pop(case.name, None) or prepare(case, wanted))
            except Exception:  # the others are still worth measuring
                row["failed"] = traceback.format_exc()
            rows.put(row)
            torch.cuda.empty_cache()


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of results as they come."""
    spawn = multiprocessing.get_context("spawn")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in each process
    given.processes = min(given.processes, len(chosen(given)))
    shared = spawn.Barrier(given.processes), spawn.Lock(), spawn.Queue()
    workers = [spawn.Process(target=work, args=(given, i, *shared), daemon=True) for i in range(given.processes)]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers) or not shared[-1].empty():
        with contextlib.suppress(queue.Empty):
            yield shared[-1].get(timeout=0.2)


def main(given: argparse.Namespace) -> None:
    rows = Rows(given.out / "kernels.json", ("fusion", "shape", "dtype", "attributes"), given.add)
    print(HEAD, flush=True)
    for row in measured(given):
        rows.put(row)
        failed = row.get("failed", "").strip().splitlines()
        print(f"{row['fusion']} {row['shape']}: {failed[-1]}" if failed else line(row), flush=True)


if __name__ == "__main__":
    main(GIVEN)
