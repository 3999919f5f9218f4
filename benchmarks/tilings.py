"""Which tiling is fastest: every plausible one of a kernel at the shapes that matter, for the tables in kernels/_*.py.

python benchmarks/tilings.py --out results [--only layer_norm] [--shapes 16384x4096,4096x768]
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kernel_cases import Case, row_cases

from kernels import copies, difference, launcher, per_launch, sets_of, versions
from onnxfuse.kernels._rows import Tiling
from onnxfuse.provider.compile import compile_kernel, gpu
from onnxfuse.provider.plan import Launch

SHAPES = ["16384x4096", "8192x8192", "4096x768", "512x65536"]
FUSIONS = ["layer_norm", "add_rms_norm", "softmax", "bias_activation", "gated_activation"]
VALUES = range(8, 33)  # per thread
RESIDENT = (2, 4, 8)  # blocks per multiprocessor of a persistent grid


def row_variants(step: Launch, rows: int) -> Iterator[Launch]:
    """Threads, vectors per thread and blocks per row; in one wave after another or persistent; hints."""
    row, width = int(step.kernel.defines["ROW"]), int(step.kernel.defines["WIDTH"])
    for threads, cluster in itertools.product((32, 64, 128, 256, 512, 1024), (1, 2, 4, 8)):
        chunks = -(-row // (width * threads * cluster))
        if chunks * width not in VALUES:
            continue
        side = 128 // threads if threads <= 32 else 1
        usual = Tiling(width, threads, chunks, side, cluster, early=True)
        capped = replace(usual, min_blocks=max(1, 1024 // (threads * side)))
        for tiles, streamed in (usual, 1), (usual, 0), (replace(usual, early=False), 1), (capped, 1):
            yield with_tiling(step, tiles, -(-rows // side), streamed)
        for blocks in RESIDENT:
            if blocks * threads * side <= 2048:
                looped = replace(usual, loop=True, min_blocks=blocks)
                grid = max(1, blocks * gpu(0).multiprocessors // cluster)
                yield with_tiling(step, looped, min(grid, -(-rows // side)), 1)


def with_tiling(step: Launch, tiles: Tiling, groups: int, streamed: int) -> Launch:
    kernel = replace(step.kernel, defines={**step.kernel.defines, **tiles.defines, "STREAMED": streamed})
    grid, block = (groups * tiles.cluster, 1, 1), (tiles.threads, tiles.rows_per_block, 1)
    return replace(step, kernel=kernel, grid=grid, block=block, cluster=tiles.cluster)


def element_variants(step: Launch, count: int) -> Iterator[Launch]:
    vectors = count // int(step.kernel.defines["WIDTH"])
    for threads, chunks, streamed in itertools.product((128, 256, 512, 1024), (1, 2, 4, 8), (0, 1)):
        defines = {**step.kernel.defines, "THREADS": threads, "CHUNKS": chunks, "STREAMED": streamed}
        grid = (max(1, -(-vectors // (threads * chunks))), 1, 1)
        yield replace(step, kernel=replace(step.kernel, defines=defines), grid=grid, block=(threads, 1, 1))


def name(step: Launch) -> str:
    defines = step.kernel.defines
    parts = [f"T{defines['THREADS']} V{defines['CHUNKS']} streamed{defines['STREAMED']}"]
    if "CLUSTER" in defines:
        parts.append(f"C{defines['CLUSTER']} early{defines['EARLY']} loop{defines['LOOP']} min{defines['MIN_BLOCKS']}")
    registers = compile_kernel(step.kernel, 0).keep.num_regs
    return " ".join([*parts, f"grid{step.grid[0]}", f"regs{registers}"])


def sweep(case: Case) -> list[dict[str, Any]]:
    plan = case.plan()
    (step,) = plan.steps
    read, written, moved = sets_of(case, plan)
    copy_us, _ = per_launch(copies(moved, len(read)), moved)
    rows = case.shape[0]
    variants = (
        row_variants(step, rows) if "CLUSTER" in step.kernel.defines else element_variants(step, read[0][0].numel())
    )
    found = []
    for variant in [step, *variants]:
        try:
            calls = [launcher(variant, *pair) for pair in zip(read, written, strict=True)]
            us, spread = per_launch(calls, moved)
            error = difference(case, read[0], written[0])
            found.append({"name": name(variant), "us": us, "spread": spread, "error": error, "copy": copy_us / us})
        except Exception as error:  # too many registers for a block of this size, for example
            found.append({"name": str(variant.kernel.defines), "failed": str(error)})
    return found


def report(case: Case, found: list[dict[str, Any]]) -> None:
    timed = sorted((row for row in found if "us" in row), key=lambda row: row["us"])
    shape = "x".join(map(str, case.shape))
    print(f"{case.fusion} {shape} {case.dtype}: {len(timed)} tilings, {len(found) - len(timed)} failed")
    for row in [found[0], *timed[:6]]:
        if "us" in row:
            print(f"  {row['us']:8.2f} us {100 * row['copy']:4.0f}% {row['error']:.0e}  {row['name']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", default=",".join(FUSIONS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"versions": versions()}
    for shape in options.shapes.split(","):
        for case in row_cases(tuple(int(size) for size in shape.split("x"))):
            key = f"{case.fusion} {case.attributes.get('activation', '')} {shape}"
            if case.fusion not in options.only.split(",") or case.attributes.get("activation") == "none":
                continue
            results[key] = sweep(case)
            report(case, results[key])
            torch.cuda.empty_cache()
            Path(options.out, "tilings.json").write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
