"""What a mask leaves of each tile of the scores, for _attention_hopper.py: the host of attention_blocks.cu."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.kernels._attention import Attention, Scores
from onnxfuse.kernels._types import ITEM_BYTES, STORAGE, VECTOR_BYTES, Defines
from onnxfuse.provider.plan import Kernel, Launch, Pointer, Scalar

MASKS: Final = {"none": 0, "boolean": 1, "inverted": 1, "additive": 2}
ROWS: Final = 64  # of a tile
THREADS: Final = 128

# Of an additive mask: what is left out at first, and a row's best score up to which it may count after all. In between
# is more than what it is added to can make up for: scores of 2e4 in fp16 are 16 apart, those of 5e7 in fp32 are 4.
NEGLIGIBLE: Final = {"float16": (-3e4, -1e4), "bfloat16": (-1e8, -5e7), "float32": (-1e8, -5e7)}


def tiles(problem: Attention, mask: Scores, keys: int) -> int:
    """The number of tiles of `keys` keys of a mask that differs along queries: so many bytes have their flags."""
    planes = (problem.batch if mask.batch else 1) * (problem.heads if mask.head else 1)
    return planes * math.ceil(problem.queries / ROWS) * math.ceil(problem.keys / keys)


def bit_bytes(keys: int) -> int:
    """Bytes of the bits of a tile."""
    return 4 * THREADS * math.ceil(keys / 64)


def mask_defines(problem: Attention) -> Defines:
    """How attention_blocks.cuh reads a mask's elements."""
    additive = problem.mask is not None and problem.mask_kind == "additive"
    return {
        "MASK": MASKS[problem.mask_kind],
        "INVERTED": int(problem.mask_kind == "inverted"),
        "NEGLIGIBLE": NEGLIGIBLE[problem.mask.dtype][0] if problem.mask and additive else 0.0,
    }


def launch(problem: Attention, mask: Scores, keys: int, flags: Pointer, bits: Pointer) -> Launch:
    """The pass over the mask, of which tiles of `keys` keys are wanted."""
    defines: Defines = {
        "KEYS_TILE": keys,
        "WIDTH": _width(problem, mask, keys),
        **mask_defines(problem),
        "MASK_T": STORAGE.get(mask.dtype, "b8"),
        "MASK_KEY": mask.key,
    }
    arguments = (
        mask.pointer,
        flags,
        bits,
        Scalar(problem.queries, "int32"),
        Scalar(problem.keys, "int32"),
        Scalar(problem.heads if mask.head else 1, "int32"),
        *(Scalar(stride, "int64") for stride in (mask.batch, mask.head, mask.query)),
    )
    kernel = Kernel("attention_blocks", "attention_blocks", defines)
    return Launch(kernel, (tiles(problem, mask, keys), 1, 1), (THREADS, 1, 1), arguments, early=True)


def _width(problem: Attention, mask: Scores, keys: int) -> int:
    """Elements of an access: all of them are before the last key, or none, and half a tile's row is whole accesses."""
    if not (mask.aligned and mask.key):
        return 1
    strides = (mask.batch, mask.head, mask.query, problem.keys, keys // 2)
    return math.gcd(VECTOR_BYTES // ITEM_BYTES.get(mask.dtype, 1), *strides)
