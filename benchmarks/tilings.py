"""Time every plausible tiling of a row kernel at the shapes that matter, for the table in kernels/norms/rows.py.

python benchmarks/tilings.py --out results [--only layer_norm] [--shapes 16384x4096,4096x768]
"""

from __future__ import annotations

import command_lines

if __name__ == "__main__":
    GIVEN = command_lines.tilings(__doc__)  # before the imports, so that --help needs neither PyTorch nor a GPU

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kernel_cases import Case, row_cases
from result_text import result_text
from rows import versions

from kernels import chained, copies, difference, per_launch, rotated, sets_of
from onnxfuse.kernels.norms.rows import RowTiling, shared_bytes
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.nvrtc import compile_cubin
from onnxfuse.runtime.plan import Launch

VALUES = range(4, 41)  # per thread
RESIDENT = (2, 4, 8, 16)  # blocks per multiprocessor of a persistent grid
HELD_RESIDENT = (1, 768, 1024)  # threads per multiprocessor that must have registers


def row_variants(step: Launch, rows: int, item_bytes: list[int]) -> Iterator[Launch]:
    """Yield launches with other threads, vectors, blocks per row and rows per block, in registers or shared memory."""
    row, width = int(step.kernel.defines["ROW"]), int(step.kernel.defines["WIDTH"])
    for threads, cluster in itertools.product((8, 16, 32, 64, 128, 256, 512, 1024), (1, 2, 4, 8)):
        chunks = -(-row // (width * threads * cluster))
        for side in (1, 2, 4, 8) if threads <= 32 and cluster == 1 else (1,):
            usual = RowTiling(width, threads, chunks, side * max(1, 32 // threads), cluster, prefetch_weights=True)
            if chunks * width in VALUES:
                yield from kept_variants(step, usual, rows)
        if threads >= 128:
            for vectors, resident in itertools.product((1, 2, 4), HELD_RESIDENT):
                blocks = max(1, resident // threads)
                held = RowTiling(width, threads, vectors, 1, cluster, in_shared=True, min_blocks=blocks)
                yield with_tiling(step, held, rows, 1, item_bytes)


def kept_variants(step: Launch, usual: RowTiling, rows: int) -> Iterator[Launch]:
    threads = usual.threads * usual.rows_per_block
    capped = replace(usual, min_blocks=max(1, 1024 // threads))
    for tiles in usual, capped, replace(usual, prefetch_weights=False), replace(capped, prefetch_weights=False):
        for streamed in (0, 1):
            yield with_tiling(step, tiles, rows, streamed)
    for blocks in RESIDENT:
        if blocks * threads <= 2048:
            yield with_tiling(step, replace(usual, persistent=True, min_blocks=blocks), rows, 1)


def with_tiling(
    step: Launch, tiles: RowTiling, rows: int, streamed: int, item_bytes: list[int] | None = None
) -> Launch:
    defines = {**step.kernel.defines, **tiles.defines, "STREAMED": streamed}
    groups = -(-rows // tiles.rows_per_block)
    if tiles.persistent:
        groups = min(groups, max(1, tiles.min_blocks * gpu(0).multiprocessors // tiles.cluster))
    grid, block = (groups * tiles.cluster, 1, 1), (tiles.threads, tiles.rows_per_block, 1)
    shared = shared_bytes(tiles, int(defines["ROW"]), item_bytes or []) if tiles.in_shared else 0
    kernel = replace(step.kernel, defines=defines)
    return replace(step, kernel=kernel, grid=grid, block=block, cluster=tiles.cluster, shared=shared)


def element_variants(step: Launch, count: int) -> Iterator[Launch]:
    widest = int(step.kernel.defines["WIDTH"])
    for width, threads, chunks, streamed in itertools.product((1, 2, 4, 8), (64, 128, 256, 512), (1, 2, 4), (0, 1)):
        if width > widest or (width < 8 and count > 1 << 20):
            continue
        vectors, rest = count // width, int(count % width > 0)
        defines = {
            **step.kernel.defines, "WIDTH": width, "THREADS": threads, "CHUNKS": chunks, "STREAMED": streamed,
            "REST": rest, "WHOLE": int(vectors % (threads * chunks) == 0),
        }  # fmt: skip
        grid = (-(-vectors // (threads * chunks)) + rest, 1, 1)
        yield replace(step, kernel=replace(step.kernel, defines=defines), grid=grid, block=(threads, 1, 1))


def name(step: Launch) -> str:
    defines = step.kernel.defines
    parts = [f"W{defines['WIDTH']} T{defines['THREADS']} V{defines['CHUNKS']} streamed{defines['STREAMED']}"]
    if "CLUSTER" in defines:
        names = ("ROWS_PER_BLOCK", "CLUSTER", "PREFETCH_WEIGHTS", "PERSISTENT", "IN_SHARED", "MIN_BLOCKS")
        parts += [f"{name.lower()}{defines[name]}" for name in names]
    registers = compile_cubin(step.kernel, gpu(0).arch).registers
    return " ".join([*parts, f"grid{step.grid[0]}", f"regs{registers}"])


def sweep(case: Case) -> list[dict[str, Any]]:
    plan = case.plans()[0]
    (step,) = plan.steps
    assert isinstance(step, Launch)
    read, written, moved = sets_of(case, plan)
    copy_us, _ = per_launch(copies(moved, len(read)), moved)
    rows = case.shape[0]
    item_bytes = [tensor.element_size() for tensor in read[0] if tensor.shape == read[0][0].shape]
    variants = (
        row_variants(step, rows, item_bytes)
        if "CLUSTER" in step.kernel.defines
        else element_variants(step, read[0][0].numel())
    )
    found = []
    for variant in [step, *variants]:
        try:
            tried = replace(plan, steps=(variant,))
            us, spread = per_launch(rotated(tried, read, written), moved)
            error = difference(case, tried, read[0], written[0])
            chain_us, _ = per_launch(chained(case, tried, read[0], written[0]), moved)
            row = {"name": name(variant), "us": us, "spread": spread, "error": error, "copy": copy_us / us}
            found.append({**row, "chain_us": chain_us})
        except Exception as error:  # too many registers for a block of this size, for example
            found.append({"name": str(variant.kernel.defines), "failed": str(error)})
    return found


def report(case: Case, found: list[dict[str, Any]]) -> None:
    timed = sorted((row for row in found if "us" in row), key=lambda row: row["us"])
    shape = "x".join(map(str, case.shape))
    print(f"{case.fusion} {shape} {case.dtype}: {len(timed)} tilings, {len(found) - len(timed)} failed")
    for row in [found[0], *timed[:6]]:
        if "us" in row:
            times = f"{row['us']:8.2f} us {100 * row['copy']:4.0f}%, {row['chain_us']:.2f} in a chain"
            print(f"  {times} {row['error']:.0e}  {row['name']}", flush=True)


def main(given: argparse.Namespace) -> None:
    given.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"versions": versions()}
    for shape in given.shapes.split(","):
        for case in row_cases(tuple(int(size) for size in shape.split("x"))):
            key = f"{case.fusion} {case.attributes.get('activation', '')} {shape}"
            if case.fusion not in given.only.split(",") or case.attributes.get("activation") == "none":
                continue
            results[key] = sweep(case)
            report(case, results[key])
            torch.cuda.empty_cache()
            Path(given.out, "tilings.json").write_text(result_text(results), encoding="utf-8")


if __name__ == "__main__":
    main(GIVEN)
