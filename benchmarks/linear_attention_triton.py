# ruff: noqa: ANN001, ANN202 - Triton reads the annotations of its functions
"""The gated delta rule in chunks by Triton: the launches of flash-linear-attention, written again for a comparison.

q, k and v are (tokens, heads, 128), and decay and beta (tokens, heads).  As in flash-linear-attention, the sequential
launch stores the state before each chunk, and another launch computes the results of all chunks from these.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

CHUNK: Final = 64
PREPARE: Final = [triton.Config({}, num_warps=n, num_stages=2) for n in (2, 4, 8)]
STATES: Final = [
    triton.Config({"BLOCK": b}, num_warps=n, num_stages=s)
    for b, n in ((16, 2), (32, 2), (32, 4), (64, 4))
    for s in (2, 3)
]
RESULTS: Final = [triton.Config({"BLOCK": b}, num_warps=n, num_stages=2) for b, n in ((64, 4), (128, 4), (128, 8))]


@triton.autotune(PREPARE, key=["tokens"])
@triton.jit
def _prepare(k, v, decay, beta, sums, w, u, tokens, HEADS, D: tl.constexpr, C: tl.constexpr):
    chunk, head = tl.program_id(0), tl.program_id(1)
    rows, columns = chunk * C + tl.arange(0, C), tl.arange(0, D)
    inside = rows < tokens
    at = (rows * HEADS + head)[:, None] * D + columns[None, :]
    b = tl.cumsum(tl.load(decay + rows * HEADS + head, mask=inside, other=0.0).to(tl.float32), 0)
    rate = tl.load(beta + rows * HEADS + head, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + rows * HEADS + head, b, mask=inside)
    keys = tl.load(k + at, mask=inside[:, None], other=0.0)
    index = tl.arange(0, C)
    below = index[:, None] > index[None, :]
    a = tl.dot(keys, tl.trans(keys)) * rate[:, None]
    a = -tl.where(below, a * tl.exp(tl.where(below, b[:, None] - b[None, :], 0.0)), 0.0)
    for i in range(1, C):
        row = tl.sum(tl.where(index[:, None] == i, a, 0.0), 0)
        row += tl.sum(row[:, None] * a, 0)
        a = tl.where(index[:, None] == i, row[None, :], a)
    a = (a + tl.where(index[:, None] == index[None, :], 1.0, 0.0)).to(keys.dtype)
    values = tl.load(v + at, mask=inside[:, None], other=0.0)
    tl.store(u + at, tl.dot(a, (values * rate[:, None]).to(keys.dtype)).to(keys.dtype), mask=inside[:, None])
    scaled = (keys * (rate * tl.exp(b))[:, None]).to(keys.dtype)
    tl.store(w + at, tl.dot(a, scaled).to(keys.dtype), mask=inside[:, None])


@triton.autotune(STATES, key=["tokens"])
@triton.jit
def _states(
    k, w, u, sums, added, states, past, present, tokens, HEADS, D: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows, columns = tl.arange(0, D), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = head * D * D + rows[:, None] * D + columns[None, :]
    state = tl.load(past + own).to(tl.float32)
    for chunk in range(tl.cdiv(tokens, C)):
        tl.store(states + chunk * HEADS * D * D + own, state.to(k.dtype.element_ty))
        t = chunk * C + tl.arange(0, C)
        inside = t < tokens
        of_keys = (t * HEADS + head)[:, None] * D + rows[None, :]
        of_values = (t * HEADS + head)[:, None] * D + columns[None, :]
        weights = tl.load(w + of_keys, mask=inside[:, None], other=0.0)
        new = tl.load(u + of_values, mask=inside[:, None], other=0.0).to(tl.float32)
        new -= tl.dot(weights, state.to(weights.dtype))
        tl.store(added + of_values, new.to(k.dtype.element_ty), mask=inside[:, None])
        last = tl.load(sums + (tl.minimum(chunk * C + C, tokens) - 1) * HEADS + head)
        b = tl.load(sums + t * HEADS + head, mask=inside, other=0.0)
        new = tl.where(inside[:, None], new * tl.exp(last - b)[:, None], 0.0)
        keys = tl.load(k + of_keys, mask=inside[:, None], other=0.0)
        state = state * tl.exp(last) + tl.dot(tl.trans(keys), new.to(keys.dtype))
    tl.store(present + own, state)


@triton.autotune(RESULTS, key=["tokens"])
@triton.jit
def _results(
    q, k, sums, added, states, y, scale, tokens, HEADS, D: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(1), tl.program_id(2)
    t, rows, columns = chunk * C + tl.arange(0, C), tl.arange(0, D), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < tokens
    of_keys = (t * HEADS + head)[:, None] * D + rows[None, :]
    of_values = (t * HEADS + head)[:, None] * D + columns[None, :]
    queries = tl.load(q + of_keys, mask=inside[:, None], other=0.0)
    keys = tl.load(k + of_keys, mask=inside[:, None], other=0.0)
    state = tl.load(states + (chunk * HEADS + head) * D * D + rows[:, None] * D + columns[None, :])
    b = tl.load(sums + t * HEADS + head, mask=inside, other=0.0)
    sums_of_rows = tl.dot(queries, state) * tl.exp(b)[:, None]
    index = tl.arange(0, C)
    kept = index[:, None] >= index[None, :]
    scores = tl.dot(queries, tl.trans(keys))
    scores = tl.where(kept, scores * tl.exp(tl.where(kept, b[:, None] - b[None, :], 0.0)), 0.0)
    new = tl.load(added + of_values, mask=inside[:, None], other=0.0)
    sums_of_rows += tl.dot(scores.to(new.dtype), new)
    tl.store(y + of_values, (sums_of_rows * scale).to(new.dtype), mask=inside[:, None])


class GatedDelta:
    """The memory of the launches for some tokens."""

    def __init__(self, q: torch.Tensor) -> None:
        """Allocate scratch memory for q, k and v of this shape."""
        tokens, heads, size = q.shape
        self.w, self.u, self.added, self.y = (torch.empty_like(q) for _ in range(4))
        self.sums = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        self.states = torch.empty(-(-tokens // CHUNK), heads, size, size, dtype=q.dtype, device=q.device)

    def run(self, q: Any, k: Any, v: Any, past: Any, decay: Any, beta: Any, present: Any) -> torch.Tensor:
        """Return the results; write the state after the last token, (heads, 128, 128), to `present`."""
        (tokens, heads, size), chunks = q.shape, -(-q.shape[0] // CHUNK)
        fixed = {"HEADS": heads, "D": size, "C": CHUNK}
        _prepare[chunks, heads](k, v, decay, beta, self.sums, self.w, self.u, tokens, **fixed)
        _states[lambda meta: (size // meta["BLOCK"], heads)](
            k, self.w, self.u, self.sums, self.added, self.states, past, present, tokens, **fixed
        )
        _results[lambda meta: (size // meta["BLOCK"], chunks, heads)](
            q, k, self.sums, self.added, self.states, self.y, size**-0.5, tokens, **fixed
        )
        return self.y
