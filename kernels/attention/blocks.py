"""The host side of attention_blocks.cu, which finds the unmasked part of each tile of the scores."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.kernels.attention.problem import Attention, ScoreTensor, score_argument
from onnxfuse.kernels.tensors import ITEM_BYTES, STORAGE, VECTOR_BYTES, Defines, int32
from onnxfuse.runtime.plan import Argument, Kernel, Launch, Pointer
from onnxfuse.runtime.symint import gcd, is_symbolic

MASK_MACROS: Final = {"none": 0, "boolean": 1, "inverted": 1, "additive": 2}  # MASK of attention_blocks.cuh
BLOCK_M: Final = 64  # queries of a tile
THREADS: Final = 128

# Two limits for an additive mask, by dtype. In the first pass, scores whose mask element is at most the first limit are
# skipped. If a row's best score does not exceed the second limit, a second pass takes the skipped scores into account.
# Scores are assumed not to differ by as much as the two limits do: numbers of that size are too coarse for a softmax,
# because fp16 numbers near 2e4 are 16 apart, and fp32 numbers near 5e7 are 4 apart.
NEGLIGIBLE: Final = {"float16": (-3e4, -1e4), "bfloat16": (-1e8, -5e7), "float32": (-1e8, -5e7)}


def tile_count(problem: Attention, mask: ScoreTensor, block_n: int) -> int:
    """Return the number of tiles of 64 queries and `block_n` keys in a mask; each has a flag of one byte."""
    by_batch, by_head, _ = mask.differs
    planes = (problem.batch if by_batch else 1) * (problem.heads if by_head else 1)
    return planes * -(-problem.queries // BLOCK_M) * -(-problem.keys // block_n)


def bit_bytes(block_n: int) -> int:
    """Return how many bytes the mask bits of one tile take."""
    return 4 * THREADS * math.ceil(block_n / 64)


def mask_defines(problem: Attention) -> Defines:
    """Return the macros that tell attention_blocks.cuh how to read the elements of the mask."""
    additive = problem.mask is not None and problem.mask_kind == "additive"
    return {
        "MASK": MASK_MACROS[problem.mask_kind],
        "INVERTED": int(problem.mask_kind == "inverted"),
        "NEGLIGIBLE": NEGLIGIBLE[problem.mask.dtype][0] if problem.mask and additive else 0.0,
    }


def launch(problem: Attention, mask: ScoreTensor, block_n: int, flags: Pointer, bits: Pointer) -> Launch:
    """Return the launch of attention_blocks.cu, which writes flags and bits of the mask for tiles of `block_n` keys."""
    width, divides = _width(problem, mask, block_n)
    defines: Defines = {
        "BLOCK_N": block_n,
        "WIDTH": width,
        "WIDTH_DIVIDES": divides,
        **mask_defines(problem),
        "MASK_T": STORAGE.get(mask.dtype, "b8"),
        "MASK_KEY": mask.key_stride,
    }
    sizes = int32(problem.queries, problem.keys, problem.heads if mask.differs[1] else 1)
    arguments: tuple[Argument, ...] = (score_argument(mask), flags, bits, *sizes)
    kernel = Kernel("attention_blocks", "attention_blocks", defines)
    return Launch(kernel, (tile_count(problem, mask, block_n), 1, 1), (THREADS, 1, 1), arguments, pdl=True)


def _width(problem: Attention, mask: ScoreTensor, block_n: int) -> tuple[int, int | str]:
    """Return (elements per access to the mask, the macro WIDTH_DIVIDES).

    No access crosses the last key or the middle of a tile's row. For dynamic lengths the first number is the maximum;
    the kernel makes such wide accesses only if the expression WIDTH_DIVIDES is true.
    """
    if not (mask.aligned and mask.key_stride):
        return 1, 1
    widest = gcd(VECTOR_BYTES // ITEM_BYTES.get(mask.dtype, 1), block_n // 2)
    extents = (*mask.strides, problem.keys)
    if is_symbolic(*extents):
        return widest, f"mask.multiples_of({widest}, keys)"
    return gcd(widest, *extents), 1
