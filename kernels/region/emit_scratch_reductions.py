"""Writes the merge of a reduction's shares: the accumulators that several blocks stored for one result."""

from __future__ import annotations

from onnxfuse.kernels.region.codegen import Writer
from onnxfuse.kernels.region.references import Reference
from onnxfuse.kernels.region.scratch_reductions import Stored
from onnxfuse.kernels.region.tilings import Tiling


def merge_whole(writer: Writer, each: Stored, threads: int) -> None:
    """Write the merge of a reduction with a single result: all threads of a block merge the blocks' accumulators."""
    kind, name = each.instance.accumulator(writer.program), writer.new_name("merged")
    memory = writer.shared(threads // 32 * each.instance.accumulator_bytes(writer.program))
    given = f"{each.pointer}, {writer.arguments.size(each.shares)}, {memory}"
    writer.line(f"const {kind} {name} = stored_by_block<{kind}, {threads}>({given});")
    writer.keep(each.instance.key, Reference(name))


def merge_shares(writer: Writer, each: Stored, tiling: Tiling, rows: str) -> None:
    """Write the merge of the accumulators of each row, by a warp or a thread, and the stores of the merged ones."""
    kind, shares = each.instance.accumulator(writer.program), writer.arguments.size(tiling.shares)
    index = writer.arguments.index_type
    if each.is_across:
        writer.line(f"const {index} row = ({index})block * {tiling.threads} + threadIdx.x;")
        writer.line(f"if (row >= {rows}) return;")
        text = f"stored<{kind}>({each.pointer}_shares, row, {rows}, {shares})"
        writer.line(f"store_accumulator({each.pointer}, row, {text});")
        return
    writer.line(f"const {index} row = ({index})block * {tiling.threads // 32} + threadIdx.x / 32;")
    writer.line(f"if (row >= {rows}) return;")
    writer.line("const int lane = threadIdx.x % 32;")
    writer.line(f"const {kind} merged = stored_by_warp<{kind}>({each.pointer}_shares, row, {shares}, lane);")
    writer.line(f"if (lane == 0) store_accumulator({each.pointer}, row, merged);")
