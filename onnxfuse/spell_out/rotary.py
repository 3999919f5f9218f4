"""Spelling rules of rotary embeddings: with tables gathered by position, of packed heads, or of a part of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import either, op
from onnxfuse.ir.node import consumers, op_of
from onnxfuse.spell_out.call import Call, Rule, known, stay_if
from onnxfuse.spell_out.views import join_heads, parts_of, split_heads

RULES = RuleTable[Rule]()

# A rotation of packed heads is split into heads only if all its readers are these operators, because it is then fused
# with the attention.
READERS: Final = frozenset({"Attention", "com.microsoft::MultiHeadAttention"})


@dataclass(frozen=True)
class Table:
    """A table of cosines or sines with a column per pair of elements; rows are gathered if there are positions."""

    values: Term
    positions: Term | None = None

    @property
    def rows(self) -> Term:
        """The rows of the table by which the input is rotated, of shape (batch, seq, half)."""
        return self.values if self.positions is None else op.Gather(self.values, self.positions)

    @property
    def wide_rows(self) -> Term:
        """The rows with a column per element, (batch, 1, seq, 2 half), from two copies of the table side by side."""
        wide = Table(op.Concat(self.values, self.values, axis=-1), self.positions)
        return op.Unsqueeze(wide.rows, axes=[1])


@RULES.rule("com.microsoft::RotaryEmbedding")
def _contrib_rotary_embedding(call: Call) -> dict[int, Term]:
    other = call.attribute("is_packed_batching", 0) or call.attribute("scale", 1.0) != 1 or call.rank(1) != 2
    stay_if(other, "it scales, reads a ragged batch, or counts its positions from a first one")
    half, size = _name_sizes(call, 2)
    stay_if(call.rank(0) == 3 and not _is_read_by_attention(call), "its packed heads are not read by attention alone")
    cos, sin = (Table(call.input(index), call.input(1)) for index in (2, 3))
    return {0: _rotated(call, cos, sin, half, size)}


@RULES.rule("RotaryEmbedding")
def _rotary_embedding(call: Call) -> dict[int, Term] | None:
    rank, part, interleaved = call.rank(0), call.attribute("rotary_embedding_dim", 0), call.attribute("interleaved", 0)
    packed_heads = rank == 3 and _is_read_by_attention(call)
    if not call.has(3) and not packed_heads and not (part and rank == 4 and not interleaved):
        return None
    half, size = _name_sizes(call, 1)
    positions = call.input(3) if call.has(3) else None
    cos, sin = (Table(call.input(index), positions) for index in (1, 2))
    if rank == 4 or packed_heads:
        return {0: _rotated(call, cos, sin, half, size)}
    heads = call.attribute("num_heads", 0)
    return {0: op.RotaryEmbedding(call.input(0), cos.rows, sin.rows, num_heads=heads, interleaved=interleaved,
                                  rotary_embedding_dim=part)}  # fmt: skip


def _is_read_by_attention(call: Call) -> bool:
    output = call.node.outputs[0]
    return not call.graph.is_kept(output) and all(op_of(reader) in READERS for reader in consumers(output))


def _name_sizes(call: Call, table: int) -> tuple[int, int]:
    """Store the sizes of the input in `call.dims`; return half the rotated part's size, and the size of a head."""
    no_axes = "its input has not three or four known axes"
    shape, widths = call.axes(0, no_axes, 3, 4), call.axes(table, no_axes, 2, 3)
    unknown = "the size of its heads or of its tables is not known"
    half, size, heads = known(widths[-1], unknown), known(shape[-1], unknown), call.attribute("num_heads", 0)
    stay_if(half < 1, unknown)
    if len(shape) == 3:
        heads = heads or size // (2 * half)
        size = size // heads if heads and size % heads == 0 else 0
    stay_if(2 * half > size, "its tables are wider than its heads")
    width = call.attribute("rotary_embedding_dim", 0) or 2 * half
    stay_if(width != 2 * half, "its tables are not as wide as what it rotates")
    call.dims |= {"batch": shape[0], "seq": shape[-2], "size": size, "heads": heads if len(shape) == 3 else shape[1]}
    return half, size


def _rotated(call: Call, cos: Table, sin: Table, half: int, size: int) -> Term:
    """Return the input rotated by tables of (batch, seq, half); packed heads are split, rotated and packed again."""
    packed, interleaved = call.rank(0) == 3, call.attribute("interleaved", 0) == 1
    stay_if(interleaved and 2 * half < size, "it rotates neighbours of a part of each head")
    stay_if(interleaved and call.graph.opset < 23, "it rotates neighbours, which has a spelling from opset 23 on")
    x = split_heads(call.input(0), "seq") if packed else call.input(0)
    result = rotated(x, cos, sin, half, size)
    if 2 * half == size:
        result = either(op.RotaryEmbedding(x, cos.rows, sin.rows, interleaved=int(interleaved)), result)
    return join_heads(result, "seq") if packed else result


def rotated(x: Term, cos: Table, sin: Table, half: int, size: int) -> Term:
    """Return x (batch, heads, rows, size) with the first 2 * half elements of each head rotated, in basic operators."""
    if 2 * half == size:
        return rotated_halves(x, cos, sin, half)
    part, rest = parts_of(x, 2 * half, size - 2 * half)
    return op.Concat(rotated_halves(part, cos, sin, half), rest, axis=-1)


def rotated_halves(x: Term, cos: Table, sin: Table, half: int) -> Term:
    """Return x * cos + rotate_half(x) * sin."""
    left, right = parts_of(x, half, half)
    return x * cos.wide_rows + op.Concat(-right, left, axis=-1) * sin.wide_rows
