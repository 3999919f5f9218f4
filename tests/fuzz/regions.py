"""Regions at random against onnxruntime: `python tests/fuzz/regions.py --cases 5000`, on a GPU.

`--emulated` runs them on a CPU, and `--compiled` runs nothing: NVRTC reads all kernels, on a CPU as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("kernels", ".")]

from architectures import H200  # noqa: E402
from region_drafts import RegionProgram, check, describe  # noqa: E402
from region_emulation import plan_of  # noqa: E402
from region_random import random_program  # noqa: E402
from region_texts import refused  # noqa: E402
from small_tilings import small_tilings  # noqa: E402

from onnxfuse.runtime.plan import Device, Launch  # noqa: E402

WAYS = ("gpu", "emulated", "compiled")


def results(way: str, programs: Sequence[RegionProgram], device: Device, aligned: bool) -> list[list[np.ndarray]]:
    """Run programs on a GPU, or emulated on a CPU."""
    if way == "emulated":
        import region_emulation

        return region_emulation.results(programs, device, Path(tempfile.mkdtemp()), aligned)
    import region_on_gpu

    return region_on_gpu.results(programs, device, aligned)


def device_of(way: str, multiprocessors: int) -> Device:
    """Return the GPU for which plans are made; few multiprocessors make plans for many elements."""
    if way != "gpu":
        return dataclasses.replace(H200, multiprocessors=multiprocessors)
    from onnxfuse.runtime.cuda_driver import gpu

    return dataclasses.replace(gpu(0), multiprocessors=multiprocessors)


def failures(way: str, seeds: Sequence[int], device: Device, aligned: bool) -> list[str]:
    """Compile the programs of seeds together, and run those that compile; return a text for each that fails."""
    programs, kernels, found = {seed: random_program(seed) for seed in seeds}, {}, list[str]()
    for seed, program in programs.items():
        steps = plan_of(program, device, aligned).steps
        kernels |= {f"seed_{seed}_{i}": step.kernel for i, step in enumerate(steps) if isinstance(step, Launch)}
    for entry, message in (refused(kernels, device.arch) if way != "emulated" else {}).items():
        program = programs.pop(int(entry.split("_")[1]), None)
        found += [f"{entry}: {message}\n{describe(program)}"] if program else []
    if way == "compiled":
        return found
    for (seed, program), own in zip(programs.items(), results(way, [*programs.values()], device, aligned), strict=True):
        try:
            check(program, own, program.expected())
        except AssertionError as error:
            found.append(f"seed {seed}: {error}")
    return found


def failures_of_part(way: str, seeds: Sequence[int], part: int) -> tuple[int, list[str]]:
    """Return how many programs a part has, and a text for each that fails; a third is planned like large ones."""
    try:
        with small_tilings() if part % 3 == 2 else nullcontext():
            return len(seeds), failures(way, seeds, device_of(way, 132 if part % 2 else 2), aligned=part % 5 != 4)
    except Exception:  # what stops a part is a failure of it
        return len(seeds), [f"seeds {seeds[0]} to {seeds[-1]}: {traceback.format_exc()}"]


def main() -> int:
    """Return how many programs fail, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--at-once", type=int, default=50, help="programs of one compilation")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that plan, compile and run")
    for way in WAYS[1:]:
        parser.add_argument(f"--{way}", dest="way", action="store_const", const=way, default=WAYS[0])
    options = parser.parse_args()
    end, begin, done, failed = options.seed + options.cases, time.perf_counter(), 0, 0
    parts = [range(first, min(first + options.at_once, end)) for first in range(options.seed, end, options.at_once)]
    tasks = [(options.way, seeds, part) for part, seeds in enumerate(parts)]
    workers, spawn = max(1, min(options.processes, len(tasks))), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        seeds_of = {pool.submit(failures_of_part, *task): task[1] for task in tasks}
        for ended in as_completed(seeds_of):
            try:
                count, found = ended.result()
            except BrokenProcessPool:  # a process ended by a signal, with which all others are stopped
                seeds = seeds_of[ended]
                count, found = (
                    len(seeds),
                    [f"seeds {seeds[0]} to {seeds[-1]}: not done when a process ended by a signal"],
                )
            done, failed = done + count, failed + len(found)
            print("\n".join(found), end="\n" if found else "", flush=True)
            print(f"{done} programs, {failed} fail, {time.perf_counter() - begin:.0f} s", flush=True)
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
