"""Rotary embedding: with tables gathered by position, of packed heads, and of a part of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import either, op, rearrange
from onnxfuse.ir.node import consumers, op_of
from onnxfuse.spell_out.call import Call, Rule

RULES = RuleTable[Rule]()

READERS: Final = frozenset({"Attention", "com.microsoft::MultiHeadAttention"})  # fusible with packed heads
BY_HEADS: Final = "batch heads seq size"
PACKED: Final = "batch seq (heads size)"


@dataclass(frozen=True)
class Table:
    """A table of cosines or sines with a column per pair of elements; rows are gathered if there are positions."""

    values: Term
    positions: Term | None = None

    @property
    def rows(self) -> Term:
        """The rows for the input, of shape (batch, seq, half)."""
        return self.values if self.positions is None else op.Gather(self.values, self.positions)

    @property
    def wide_rows(self) -> Term:
        """The rows with a column per element, (batch, 1, seq, 2 half); the table is doubled before the Gather."""
        wide = Table(op.Concat(self.values, self.values, axis=-1), self.positions)
        return op.Unsqueeze(wide.rows, axes=[1])


@RULES.rule("com.microsoft::RotaryEmbedding")
def _contrib_rotary_embedding(call: Call) -> dict[int, Term] | str:
    if call.integer("is_packed_batching") or call.number("scale", 1.0) != 1 or call.rank(1) != 2:
        return "it scales, reads a ragged batch, or counts its positions from a first one"
    if reason := _name_sizes(call, 2):
        return reason
    if call.rank(0) == 3 and not _is_read_by_attention(call):
        return "its packed heads are not read by attention alone"
    return _rotated(call, *(Table(call.input(index), call.input(1)) for index in (2, 3)))


@RULES.rule("RotaryEmbedding")
def _rotary_embedding(call: Call) -> dict[int, Term] | str | None:
    rank, part = call.rank(0), call.integer("rotary_embedding_dim")
    packed_heads = rank == 3 and _is_read_by_attention(call)
    if not call.has(3) and not packed_heads and not (part and rank == 4 and not call.integer("interleaved")):
        return None
    if reason := _name_sizes(call, 1):
        return reason
    if not call.has(3):
        return _rotated(call, Table(call.input(1)), Table(call.input(2)))
    tables = Table(call.input(1), call.input(3)), Table(call.input(2), call.input(3))
    if rank == 4 or packed_heads:
        return _rotated(call, *tables)
    cos, sin = (table.rows for table in tables)
    heads, interleaved = call.integer("num_heads"), call.integer("interleaved")
    return {0: op.RotaryEmbedding(call.input(0), cos, sin, num_heads=heads, interleaved=interleaved,
                                  rotary_embedding_dim=part)}  # fmt: skip


def _is_read_by_attention(call: Call) -> bool:
    output = call.node.outputs[0]
    return not call.graph.is_kept(output) and all(op_of(reader) in READERS for reader in consumers(output))


def _name_sizes(call: Call, table: int) -> str | None:
    """Name the sizes of the input and of half the rotated part; return the reason if they are not known."""
    shape, widths = call.shape(0), call.shape(table)
    if shape is None or widths is None or len(shape) not in (3, 4):
        return "its input has not three or four known axes"
    half, size, heads = widths[-1], shape[-1], call.integer("num_heads")
    if not isinstance(size, int) or not isinstance(half, int) or half < 1:
        return "the size of its heads or of its tables is not known"
    if len(shape) == 3:
        heads = heads or size // (2 * half)
        size = size // heads if heads and size % heads == 0 else 0
    if 2 * half > size:
        return "its tables are wider than its heads"
    if call.integer("rotary_embedding_dim", 2 * half) not in (0, 2 * half):
        return "its tables are not as wide as what it rotates"
    rows = shape[2] if len(shape) == 4 else shape[1]
    call.dims |= {"batch": shape[0], "seq": rows, "size": size, "half": half}
    call.dims["heads"] = shape[1] if len(shape) == 4 else heads
    return None


def _rotated(call: Call, cos: Table, sin: Table) -> dict[int, Term] | str:
    """Return the input rotated by tables of (batch, seq, half); packed heads are split, rotated and packed again."""
    packed, interleaved = call.rank(0) == 3, call.integer("interleaved") == 1
    x = rearrange(call.input(0), f"{PACKED} -> {BY_HEADS}") if packed else call.input(0)
    half, size = call.dims["half"], call.dims["size"]
    assert isinstance(half, int) and isinstance(size, int)
    if interleaved and 2 * half < size:
        return "it rotates neighbours of a part of each head"
    if interleaved and call.graph.opset < 23:
        return "it rotates neighbours, which has a spelling from opset 23 on"
    if 2 * half == size:
        operator = op.RotaryEmbedding(x, cos.rows, sin.rows, interleaved=int(interleaved))
        result = either(operator, rotated(x, cos, sin, half, size))
    else:
        result = rotated(x, cos, sin, half, size)
    return {0: rearrange(result, f"{BY_HEADS} -> {PACKED}") if packed else result}


def rotated(x: Term, cos: Table, sin: Table, half: int, size: int) -> Term:
    """Return x (batch, heads, rows, size) with the first 2 * half elements of each head rotated, in basic operators."""
    if 2 * half == size:
        return rotated_halves(x, cos, sin, half)
    return op.Concat(rotated_halves(part_of(x, 0, 2 * half), cos, sin, half), part_of(x, 2 * half, size), axis=-1)


def rotated_halves(x: Term, cos: Table, sin: Table, half: int) -> Term:
    """Return x * cos + rotate_half(x) * sin."""
    swapped = op.Concat(-part_of(x, half, 2 * half), part_of(x, 0, half), axis=-1)
    return x * cos.wide_rows + swapped * sin.wide_rows


def part_of(x: Term, start: int, end: int) -> Term:
    """Return the elements of the last axis from `start` to `end`."""
    return op.Slice(x, starts=[start], ends=[end], axes=[-1], steps=[1])
