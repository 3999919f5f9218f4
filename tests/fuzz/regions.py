"""Regions at random against onnxruntime: `python tests/fuzz/regions.py --cases 5000`, on a GPU or `--emulated`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("kernels", ".")]

from architectures import H200  # noqa: E402
from region_drafts import RegionProgram, check  # noqa: E402
from region_random import random_program  # noqa: E402

from onnxfuse.runtime.plan import Device  # noqa: E402

Run = Callable[[Sequence[RegionProgram], Device, bool], list[list[np.ndarray]]]


def runner(emulated: bool) -> Run:
    """Return what runs programs: the emulation on a CPU, or a GPU."""
    if emulated:
        import region_emulation

        folder = Path(tempfile.mkdtemp())
        return lambda programs, device, aligned: region_emulation.results(programs, device, folder, aligned)
    import region_on_gpu

    return region_on_gpu.results


def device_of(emulated: bool, multiprocessors: int) -> Device:
    """Return the GPU for which plans are made; few multiprocessors make plans for many elements."""
    if emulated:
        return dataclasses.replace(H200, multiprocessors=multiprocessors)
    from onnxfuse.runtime.cuda_driver import gpu

    return dataclasses.replace(gpu(0), multiprocessors=multiprocessors)


def failures(seeds: Sequence[int], run: Run, device: Device, aligned: bool) -> list[str]:
    """Run the programs of seeds together; return a text for each that fails."""
    programs = [random_program(seed) for seed in seeds]
    found = []
    for seed, program, own in zip(seeds, programs, run(programs, device, aligned), strict=True):
        try:
            check(program, own, program.expected())
        except AssertionError as error:
            found.append(f"seed {seed}: {error}")
    return found


def main() -> int:
    """Return how many programs fail, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--at-once", type=int, default=50, help="programs of one compilation")
    parser.add_argument("--emulated", action="store_true", help="on the CPU, without a GPU")
    options = parser.parse_args()
    run, failed = runner(options.emulated), 0
    for part, first in enumerate(range(options.seed, options.seed + options.cases, options.at_once)):
        seeds = range(first, min(first + options.at_once, options.seed + options.cases))
        device = device_of(options.emulated, 132 if part % 2 else 2)
        found = failures(seeds, run, device, aligned=part % 5 != 4)
        failed += len(found)
        print("\n".join(found), end="\n" if found else "", flush=True)
        print(f"{seeds[-1] + 1 - options.seed} programs, {failed} fail", flush=True)
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
