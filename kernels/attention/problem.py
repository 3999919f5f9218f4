"""The description of an attention problem, from which the plans of all attention kernels are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.kernels.epilogue_program import EpilogueProgram
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.rotary.rotary import Rotary
from onnxfuse.kernels.tensors import ABSENT, int64
from onnxfuse.runtime.plan import Launch, Pointer, Struct, Value
from onnxfuse.runtime.symint import gcd, is_symbolic

INDEX_STORAGE: Final = {"int32": "int", "int64": "i64"}  # types of indices in kernels, by dtype

MaskKind: TypeAlias = Literal["none", "boolean", "inverted", "additive"]


@dataclass(frozen=True)
class ScoreTensor:
    """A mask or a bias of (batch, heads, queries, keys); the strides are in elements, and a stride of 0 broadcasts."""

    pointer: Pointer
    dtype: str  # "bool", "float32", "float16", "bfloat16"
    batch_stride: int
    head_stride: int
    query_stride: int
    key_stride: int  # 0 or 1
    aligned: bool  # the address is a multiple of 16 bytes

    @property
    def strides(self) -> tuple[int, int, int]:
        """The strides of batch, head and query."""
        return self.batch_stride, self.head_stride, self.query_stride

    @property
    def differs(self) -> tuple[bool, bool, bool]:
        """Whether the elements differ along batch, head and query; a symbolic stride counts as not 0."""
        batch, head, query = (is_symbolic(stride) or stride != 0 for stride in self.strides)
        return batch, head, query

    def reads_pairs(self, dynamic: int | str, *extents: int) -> int | str:
        """Return the value of a macro: 1 if one access can read two keys (all strides and `extents` are even), else 0.

        If the answer depends on dynamic sizes, the value is `dynamic`, an expression that the kernel evaluates.
        """
        numbers = (*self.strides, *extents)
        if self.key_stride != 1 or not self.aligned or any(number % 2 for number in numbers if isinstance(number, int)):
            return 0
        if gcd(2, *numbers) == 2:
            return 1
        return dynamic


def score_argument(scores: ScoreTensor | None) -> Struct:
    """Return the struct ScoreTensor of attention_score_tensor.cuh; its address is null for None."""
    return Struct((scores.pointer, *int64(*scores.strides)) if scores else (ABSENT, *int64(0, 0, 0)))


@dataclass(frozen=True)
class HeadNumbers:
    """A contiguous vector with one number per query head; all numbers are 0 if the address is null."""

    pointer: Value
    dtype: str  # "float32", "float16", "bfloat16"


@dataclass(frozen=True)
class Positions:
    """Contiguous vectors of (heads, count, head_dim), and the index of the vector of each query and key.

    The index depends on the distance between query and key alone.
    """

    vectors: Pointer
    indices: Pointer
    index_dtype: str  # "int32", "int64"
    count: int
    scale: float  # a factor of the products with these vectors

    @property
    def argument(self) -> Struct:
        """The struct Positions of attention_mma_tiles.cuh."""
        return Struct((self.vectors, self.indices, *int64(self.count)))


@dataclass(frozen=True)
class Quantized:
    """The numbers of a quantized cache: a number times its scale is an element of a key or value."""

    dtype: str  # "int8", "float8_e4m3fn"
    per_channel: bool  # a scale for each element of each key head; otherwise one for all
    scales: tuple[Value, Value]  # addresses of the float32 scales of keys and of values

    @property
    def defines(self) -> dict[str, int | float | str]:
        """The macros of quantized_cache.cuh."""
        return {"QUANTIZED": 2 if self.dtype == FLOAT8 else 1, "PER_CHANNEL": int(self.per_channel)}


@dataclass(frozen=True)
class Attention:
    """out = softmax(mask(softcap(scale q k^T) + bias)) v for each head, with fp32 scores and sums.

    Query head h reads key and value head h // (heads // kv_heads).

    - A boolean mask keeps the scores where it is true and replaces the others by `masked_score`; an inverted mask
      keeps the scores where it is false; an additive mask is added to the scores.
    - With `slopes`, the bias of a head is the head's slope times `bias`, which all heads share.
    - If `causal` is a number c, query i sees only the keys up to i + c, and its other scores are -inf.
    - With `add_masked_score`, `masked_score` is added to the scores that `causal` or a boolean mask excludes, instead
      of replacing them.
    - With `lengths`, an int32 per element of the batch, only the first lengths[b] + 1 keys of batch element b exist.
      The last query sees the last of them; but if there are more queries than keys, `causal` is 0.
    - With `window`, a query sees only the last `window` of the keys that `causal` leaves.
    - With `sinks`, each row has one more score, its head's number, for a value vector of zeros.
    - With `positions`, the products of each query with vectors of (queries, keys), and of each key with vectors of
      (keys, queries), times their scales, are added to the scores. There are as many key heads as heads.
    - With `quantized`, k and v hold bytes, whose numbers times their scales are the keys and values.
    - A row whose scores are all -inf gives 0 if `zero_masked_rows`, else NaN.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int  # elements per head of queries and keys
    head_dim_v: int  # elements per head of values and results
    dtype: str  # dtype of q, k and v, and of out unless `out_dtype` differs
    aligned: bool  # the addresses of q, k, v and out are multiples of 16 bytes
    q: HeadTensor
    k: HeadTensor
    v: HeadTensor
    out: HeadTensor
    scale: float
    mask_kind: MaskKind = "none"
    mask: ScoreTensor | None = None
    masked_score: float = float("-inf")
    bias: ScoreTensor | None = None
    slopes: HeadNumbers | None = None
    causal: int | None = None
    add_masked_score: bool = False
    lengths: Pointer | None = None
    window: int | None = None  # needs `causal`
    sinks: HeadNumbers | None = None
    softcap: float = 0.0  # softcap(s) = softcap * tanh(s / softcap); 0: no cap
    zero_masked_rows: bool = False
    tf32: bool = False  # the kernel is allowed to round float32 operands to TF32
    out_dtype: str = ""
    program: EpilogueProgram | None = None  # elementwise operators applied to the results before they are stored
    positions: tuple[Positions, Positions] | None = None  # only attention_mma.cu takes them
    quantized: Quantized | None = None  # only attention_with_cache.cu takes it
    rotation: Rotary | None = None  # the rotation that produces q and k; some kernels rotate q themselves

    def with_program(self, launch: Launch) -> Launch:
        """Return `launch`, which stores the results, extended by `program`."""
        return self.program.launch(launch) if self.program else launch

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes that can be dynamic dims."""
        return self.batch, self.queries, self.keys

    @property
    def is_symbolic(self) -> bool:
        """Whether any size is dynamic, so that one plan serves many sizes."""
        return is_symbolic(*self.sizes)

    @property
    def gqa_group(self) -> int:
        """The number of query heads that share a key head."""
        return self.heads // self.kv_heads
