"""Scaled dot-product attention, as the hosts of every attention kernel see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from onnxfuse.kernels.epilogue_program import EpilogueProgram
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.rotary.rotary import Rotary
from onnxfuse.runtime.plan import Launch, Pointer
from onnxfuse.runtime.symint import gcd, is_symbolic

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
    aligned: bool  # the data begins at a multiple of 16 bytes

    @property
    def strides(self) -> tuple[int, int, int]:
        """The strides of batch, head and query."""
        return self.batch_stride, self.head_stride, self.query_stride

    @property
    def differs(self) -> tuple[bool, bool, bool]:
        """Whether the elements differ along batch, head and query; a stride that is symbolic is not 0."""
        batch, head, query = (is_symbolic(stride) or stride != 0 for stride in self.strides)
        return batch, head, query

    def reads_pairs(self, dynamic: int | str, *extents: int) -> int | str:
        """Return a macro: 1 if two keys can be one access, because all strides and these extents are even, else 0.

        Where that depends on dynamic sizes, it is `dynamic`, by which the kernel finds out.
        """
        numbers = (*self.strides, *extents)
        if self.key_stride != 1 or not self.aligned or any(number % 2 for number in numbers if isinstance(number, int)):
            return 0
        if gcd(2, *numbers) == 2:
            return 1
        return dynamic


@dataclass(frozen=True)
class HeadNumbers:
    """A number of each query head, side by side."""

    pointer: Pointer
    dtype: str  # "float32", "float16", "bfloat16"


@dataclass(frozen=True)
class Attention:
    """out = softmax(mask(softcap(scale q k^T) + bias)) v for each head, with fp32 scores and sums.

    Query head h reads key and value head h // (heads // kv_heads).

    - A boolean mask keeps the scores where it is true and puts `masked_score` in place of the others; an inverted one
      keeps those where it is false; an additive one is added.
    - With `slopes`, the bias of a head is its slope times the elements of `bias`, which are the same for all heads.
    - `causal` is None, or the number c for which query i sees the keys up to i + c: the scores of others are -inf.
    - With `add_masked_score`, `masked_score` is instead added to the scores that `causal`, or a boolean mask if there
      is one, leaves out.
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
    aligned: bool  # all four begin at multiples of 16 bytes
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
    softcap: float = 0.0  # softcap(s) = softcap * tanh(s / softcap); 0: no cap
    zero_masked_rows: bool = False
    tf32: bool = False  # float32 operands may be rounded to TF32
    out_dtype: str = ""
    program: EpilogueProgram | None = None  # operators that follow
    rotation: Rotary | None = None  # makes q and k from two tensors; a kernel may make q itself instead of reading it

    def with_program(self, launch: Launch) -> Launch:
        """Return the launch that stores the results, with the operators that follow."""
        return self.program.launch(launch) if self.program else launch

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes that may be dynamic."""
        return self.batch, self.queries, self.keys

    @property
    def is_symbolic(self) -> bool:
        """Whether a size is dynamic, and the plan is one for many sizes."""
        return is_symbolic(*self.sizes)

    @property
    def gqa_group(self) -> int:
        """The number of query heads that share a key head."""
        return self.heads // self.kv_heads
