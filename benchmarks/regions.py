"""Time generated kernels of regions beside torch.compile's kernels for the same graphs, and a copy of the same bytes.

    python benchmarks/regions.py [--out results | --results FILE] [--add FILE] [--only 'swin windows,seed 7']
        [--generated 200] [--random-from 0] [--no-named] [--quick] [--processes 16] [--max-autotune]
    python benchmarks/regions.py --check-cpu        # PyTorch's programs against onnxruntime, without a GPU

Named regions are parts of real networks at real sizes (named_region_texts.py), which `optimize(regions=True)` turns
into regions alone; the others are programs at random by fixed seeds, at sizes of some MB.  A time is the cost of one
more run in a CUDA graph, the median of its replays, over buffers that together exceed the L2 cache, where no more than
64 sets of them do.  The engines are replayed in turns.  PyTorch gets the region's program as a function; each output
must be a tensor of its own in row-major order, as an ONNX output is.  Bytes are what must be moved: what is needed of
each input once, and each output once; the copy reads and writes as many together.  All results are compared with the
program in float32, by PyTorch's own operators, before anything is timed.

Several processes compile a share of the problems each, and then time them, one process after the other.  A long run can
be two: `--generated 100`, and then `--random-from 100 --no-named --add FILE` with the results of the first.
"""

from __future__ import annotations

import command_lines

if __name__ == "__main__":
    GIVEN = command_lines.regions(__doc__)  # before the imports, so that --help needs neither PyTorch nor a GPU

import argparse
import contextlib
import functools
import math
import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Lock
from typing import Any

import numpy as np
import torch
from named_regions import named_regions
from region_problems import Part, Problem, generated_problems, named_problem
from region_torch import dtype_of, module_of

LEAST, MOST = 1 << 20, 1 << 24  # elements of the first operand, and of any value, of a program at random
# Relative to each value, and to the largest one: roundings of the dtype, and of the sums and functions in float32.
TOLERANCE = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 5e-5, "float64": 1e-9}
# Relative to how large values become on the way: where one of these is stored, its rounding is carried on.
CARRIED = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-5, "float64": 1e-9}
LARGE_BYTES = 32 << 20  # from which on a region should move its bytes as fast as a copy
Tensors = list[torch.Tensor]


def chosen(given: argparse.Namespace, share: int = 0, shares: int = 1) -> Iterator[Problem]:
    """Yield the problems that the command line asks for, or one of several shares of them."""
    only = set(filter(None, given.only.split(",")))
    named = [each for name, each in named_regions().items() if given.named and (not only or name in only)]
    for region in named[share::shares]:
        yield named_problem(region)
    for i, problem in enumerate(generated_problems(given.generated, LEAST, MOST) if given.generated else ()):
        is_own = i >= given.random_from and i % shares == share
        if is_own and (not only or problem.name in only):
            yield problem


# --- what runs --------------------------------------------------------------------------------------------------------


def as_tensor(array: np.ndarray, device: str) -> torch.Tensor:
    """Return an array as a tensor; NumPy has no bfloat16 of its own."""
    array = np.array(array, order="C")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def plan_of(part: Part, problem: Problem) -> Any:
    """Return the plan of a part for the shapes of a problem."""
    from onnxfuse.runtime.cuda_driver import gpu
    from onnxfuse.runtime.hosts import find_host

    host = find_host(part.node.fusion)
    assert host is not None
    return host.candidates(part.node, specs(part, problem), gpu(0))[0]


def specs(part: Part, problem: Problem) -> list[Any]:
    """Return the inputs of a part."""
    from onnxfuse.runtime.plan import TensorSpec

    shapes = problem.tensors()
    return [TensorSpec(shapes[name], problem.dtype(name)) for name in part.inputs]


def own_calls(problem: Problem, sets: Sequence[Tensors], results: Sequence[Tensors]) -> list[Callable[[], None]]:
    """Return calls that run the plans of a problem on each set of operands, and write each set of results."""
    from onnxfuse.runtime.loaded_templates import ready_plan

    steps = [(part, ready_plan(plan_of(part, problem), specs(part, problem))) for part in problem.parts]
    bytes_needed = max(ready.scratch_bytes for _, ready in steps)
    scratch = torch.empty(max(1, bytes_needed), dtype=torch.uint8, device="cuda")  # parts run one after the other
    shapes = problem.tensors()
    between = {t for part in problem.parts for t in part.outputs} - set(problem.outputs)
    inner = {t: torch.empty(shapes[t], dtype=dtype_of(problem.dtype(t)), device="cuda") for t in between}

    def call(tensors: dict[str, torch.Tensor]) -> None:
        for part, ready in steps:
            read, written = ([tensors[t].data_ptr() for t in names] for names in (part.inputs, part.outputs))
            ready.run(read, written, scratch.data_ptr(), torch.cuda.current_stream().cuda_stream)

    named = [
        inner | dict(zip(problem.operands, own, strict=True)) | dict(zip(problem.outputs, made, strict=True))
        for own, made in zip(sets, results, strict=True)
    ]
    return [functools.partial(call, each) for each in named]


def compiled(problem: Problem, given: argparse.Namespace) -> Callable[..., Any]:
    """Return what torch.compile makes of a problem."""
    mode = "max-autotune-no-cudagraphs" if given.max_autotune else None
    return torch.compile(module_of(problem, "cuda"), fullgraph=True, dynamic=False, mode=mode)


def keeping(call: Callable[..., Any], sets: Sequence[Tensors]) -> list[Callable[[], None]]:
    """Return calls whose results are kept until the next round, so that they write to different memory."""
    kept: list[Any] = [None] * len(sets)

    def run(i: int) -> None:
        kept[i] = call(*sets[i])

    return [functools.partial(run, i) for i in range(len(sets))]


# --- what they must compute -------------------------------------------------------------------------------------------


def reference(problem: Problem, operands: Tensors, device: str) -> Tensors:
    """Return the outputs, of which floats of 16 bits are computed in float32."""
    wide = [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in operands]
    return list(module_of(problem, device, wide=True)(*wide))


def carried(problem: Problem) -> float:
    """Return the error of values on the way that are stored in the coarsest dtype of a problem."""
    dtypes = {dtype for part in problem.parts for dtype in part.program.dtypes.values()}
    return problem.scale * max((CARRIED[dtype] for dtype in dtypes if dtype in CARRIED), default=0.0)


def difference(problem: Problem, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str | None:
    """Return how outputs differ from what they must be; None where they agree."""
    for name, own, other in zip(problem.outputs, found, wanted, strict=True):
        dtype = str(own.dtype).removeprefix("torch.")
        if own.shape != other.shape:
            return f"{name} has the shape {list(own.shape)}; required {list(other.shape)}"
        if dtype not in TOLERANCE:
            share = float((own != other).double().mean())
            if share > problem.inexact:
                return f"{name}: {100 * share:.3g} % of the elements differ"
            continue
        required = other.to(own.dtype).double()
        finite = required[required.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        absolute = TOLERANCE[dtype] * largest + carried(problem)
        close = torch.isclose(own.double(), required, TOLERANCE[dtype], absolute, equal_nan=True)
        if not bool(close.all()):
            worst = float((own.double() - required)[~close].abs().max())
            return f"{name} is off by {worst:.3g} where the largest value is {largest:.3g}"
    return None


def check_cpu(given: argparse.Namespace) -> int:
    """Compare PyTorch's programs of the named regions, of a batch of one, with onnxruntime; return how many differ."""
    import onnxruntime

    failed = 0
    for name, region in named_regions().items():
        if given.only and name not in given.only.split(","):
            continue
        problem, model = named_problem(region.smaller()), region.smaller().proto()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feeds = {each.name: problem.operands[each.name] for each in session.get_inputs()}
        wanted = dict(zip((each.name for each in session.get_outputs()), session.run(None, feeds), strict=True))
        expected = [torch.from_numpy(wanted[name]) for name in problem.outputs]
        operands = [as_tensor(each, "cpu") for each in problem.operands.values()]
        for way, found in (
            ("as compiled", module_of(problem, "cpu")(*operands)),
            ("in float32", [t.to(e.dtype) for t, e in zip(reference(problem, operands, "cpu"), expected, strict=True)]),
        ):
            why = difference(problem, found, expected)
            failed += bool(why)
            print(f"{name:28} {way}: {why or 'equal'}", flush=True)
    return failed


# --- timing -----------------------------------------------------------------------------------------------------------


def measure(problem: Problem, call: Callable[..., Any], given: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a problem, of which `call` is what torch.compile makes."""
    from replays import REPLAYS, captured, in_turns

    from kernels import L2_BYTES, MAX_SETS, copies

    moved = problem.moved()
    row: dict[str, Any] = {"name": problem.name, "model": problem.model, "bytes": moved}
    operands = [as_tensor(each, "cuda") for each in problem.operands.values()]
    count = min(MAX_SETS, max(2, math.ceil(4 * L2_BYTES / max(1, moved))))
    sets = [operands] + [[t.clone() for t in operands] for _ in range(count - 1)]
    shapes = problem.tensors()
    results = [
        [torch.empty(shapes[t], dtype=dtype_of(problem.dtype(t)), device="cuda") for t in problem.outputs] for _ in sets
    ]
    calls = {"us": own_calls(problem, sets, results)}
    calls["us"][0]()
    torch.cuda.synchronize()
    wanted = reference(problem, operands, "cuda")
    if why := difference(problem, results[0], wanted):
        raise ValueError(f"onnxfuse: {why}")
    try:
        found = call(*operands)
        if why := difference(problem, found, wanted):
            raise ValueError(why)
        if len({t.data_ptr() for t in found}) < len(found):  # which may be equal, but are stored once
            raise ValueError("two outputs are one tensor")
        calls["inductor_us"] = keeping(call, sets)
    except Exception as error:  # the kernel is still worth measuring
        row["inductor_failed"] = (str(error).splitlines() or [repr(error)])[0]
    del wanted
    calls["copy_us"] = copies(max(32, moved), count)
    torch.cuda.synchronize()
    row |= in_turns({name: captured(each) for name, each in calls.items()}, 3 if given.quick else REPLAYS)
    row |= {"share_of_copy": row["copy_us"] / row["us"], "kernels": len(problem.parts), "sets": count}
    return row | ({"of_inductor": row["us"] / row["inductor_us"]} if "inductor_us" in row else {})


def work(
    given: argparse.Namespace, share: int, turn: Lock, all_compiled: Barrier, rows: Queue[dict[str, Any] | None]
) -> None:
    """Compile a share of the problems; when all processes have compiled theirs, put the rows of these, and then None.

    Only the process whose turn it is uses the GPU while times are taken.
    """
    torch.set_grad_enabled(False)
    torch._dynamo.config.recompile_limit = 10000
    calls = [(problem, compiled(problem, given)) for problem in chosen(given, share, given.processes)]
    for problem, call in calls:
        with contextlib.suppress(Exception):  # timing the problem reports the error
            call(*(as_tensor(each, "cuda") for each in problem.operands.values()))
        with contextlib.suppress(Exception):
            for part in problem.parts:
                compile_plan(part, problem)
        torch.cuda.empty_cache()
    all_compiled.wait()
    for problem, call in calls:
        with turn:
            try:
                rows.put(measure(problem, call, given))
            except Exception:  # the others are still worth measuring
                rows.put({"name": problem.name, "model": problem.model, "failed": traceback.format_exc()})
            torch.cuda.empty_cache()
    rows.put(None)


def compile_plan(part: Part, problem: Problem) -> None:
    """Compile the kernels of a part into the cache."""
    from onnxfuse.runtime.code_cache import cached_cubin
    from onnxfuse.runtime.cuda_driver import gpu
    from onnxfuse.runtime.plan import Launch

    for step in plan_of(part, problem).steps:
        if isinstance(step, Launch):
            cached_cubin(step.kernel, gpu(0).arch)


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all problems, as processes measure them.  Raises RuntimeError if one of them dies."""
    spawn = multiprocessing.get_context("spawn")
    turn, all_compiled, rows = spawn.Lock(), spawn.Barrier(given.processes), spawn.Queue()
    workers = [
        spawn.Process(target=work, args=(given, share, turn, all_compiled, rows), daemon=True)
        for share in range(given.processes)
    ]
    for worker in workers:
        worker.start()
    left = len(workers)
    while left:
        try:
            row = rows.get(timeout=5)
        except queue.Empty:
            if died := [share for share, worker in enumerate(workers) if worker.exitcode]:
                raise RuntimeError(f"the processes of the shares {died} have died") from None
            continue
        left -= row is None
        if row is not None:
            yield row


# --- output -----------------------------------------------------------------------------------------------------------


HEAD = f"{'region':28}{'MB':>8}{'us':>9}{'inductor':>9}{'copy':>9}{'of copy':>9}{'/ inductor':>11}"


def line(row: dict[str, Any]) -> str:
    """Return the row of a problem as text."""
    if "failed" in row:
        return f"{row['name']:28} {row['failed'].strip().splitlines()[-1]}"
    inductor = f"{row['inductor_us']:9.2f}" if "inductor_us" in row else f"{'-':>9}"
    ratio = f"{row['of_inductor']:11.2f}" if "of_inductor" in row else f"  {row['inductor_failed'][:60]}"
    share = f"{100 * row['share_of_copy']:7.0f} %"
    return f"{row['name']:28}{row['bytes'] / 1e6:8.2f}{row['us']:9.2f}{inductor}{row['copy_us']:9.2f}{share}{ratio}"


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the geometric means of the named regions, of the programs at random, and of those of many bytes."""
    timed = [row for row in rows if "us" in row]
    groups = {
        "named": [row for row in timed if row["model"] != "generated"],
        "generated": [row for row in timed if row["model"] == "generated"],
        "large": [row for row in timed if row["bytes"] >= LARGE_BYTES],
        "all": timed,
    }
    return [summary(name, each) for name, each in groups.items() if each]


def summary(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric means of a group of rows, and the worst of them."""
    shares = [row["share_of_copy"] for row in rows]
    ratios = {row["name"]: row["of_inductor"] for row in rows if "of_inductor" in row}
    found: dict[str, Any] = {"group": name, "count": len(rows), "share_of_copy": geometric_mean(shares)}
    found["below_90_of_copy"] = sum(share < 0.9 for share in shares)
    if ratios:
        worst = max(ratios, key=lambda each: ratios[each])
        found |= {"of_inductor": geometric_mean(list(ratios.values())), "worst": worst, "worst_ratio": ratios[worst]}
        found["above_1.1"] = sum(ratio > 1.1 for ratio in ratios.values())
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def main(given: argparse.Namespace) -> int:
    """Time everything that is asked for; return how many problems failed."""
    torch.set_grad_enabled(False)
    if given.check_cpu:
        return min(100, check_cpu(given))
    from rows import Rows

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in each process
    path = given.results or given.out / "regions.json"
    found, rows = list[dict[str, Any]](), Rows(path, ("name",), given.add)
    print(HEAD, flush=True)
    for row in measured(given):
        found.append(row)
        rows.put(row)
        print(line(row), flush=True)
    for each in summaries(found):
        print(each, flush=True)
    return min(100, sum("failed" in row for row in found))


if __name__ == "__main__":
    raise SystemExit(main(GIVEN))
