"""Time every plan of attention beside PyTorch's backends and onnxruntime's MultiHeadAttention.

    python benchmarks/attention.py --out results [--only prefill,decode] [--dtypes float16,bfloat16] [--onnxruntime]
        [--add results/attention.json]

A time is the cost of one more node in a CUDA graph, over sets of operands that together exceed the L2 cache where
memory allows; onnxruntime's is that of one more step of a chain.  Operations are those of both products, half of them
where causality leaves half; bytes are those of q, k, v, mask and result, each once.
"""

from __future__ import annotations

import command_lines

if __name__ == "__main__":
    GIVEN = command_lines.attention(__doc__)  # before the imports, so that --help needs neither PyTorch nor a GPU

import argparse
import dataclasses
import functools
import importlib
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from compiling import compile_all
from rows import Rows
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import copies, per_launch
from onnxfuse.kernels.attention.implementations import implementations
from onnxfuse.kernels.attention.operands import attention_of
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import FusedNode, Launch, Plan, TensorSpec

L2_BYTES = 60 << 20
MAX_SETS = 12
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


# Axes and kind of each mask; a mask of models mostly has equal rows.
MASKS = {
    "padding": ("b11k", "boolean"),  # the last sixth of every other sequence is masked
    "padding rows": ("b1qk", "additive"),
    "all": ("b1qk", "boolean"),  # nothing is masked
    "triangle": ("11qk", "additive"),  # causal, as a tensor
    "bias": ("1hqk", "additive"),
}


@dataclass(frozen=True)
class Case:
    """One attention node; `mask` is one of MASKS."""

    kind: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    causal: bool = False
    mask: str = ""
    target: str = ""  # the goal on an H200, which the table shows
    dtype: str = "float16"
    layout: str = field(default="packed")

    @property
    def name(self) -> str:
        heads = f"h{self.heads}" + (f" kv{self.kv_heads}" if self.kv_heads != self.heads else "")
        lengths = f"s{self.queries}" if self.queries == self.keys else f"q{self.queries} k{self.keys}"
        extra = (" causal" if self.causal else "") + (f" {self.mask}" if self.mask else "")
        return f"b{self.batch} {heads} {lengths} d{self.size}{extra}"

    @property
    def flops(self) -> float:
        share = 0.5 if self.causal or self.mask == "triangle" else 1.0
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.size * share

    def node(self) -> FusedNode:
        given: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "out_layout": "packed"}
        given |= {f"{name}_layout": self.layout for name in "qkv"} | {"scale": self.size**-0.5}
        given |= {"repeats": self.heads // self.kv_heads, "form": "operator" if self.causal else "softmax"}
        given |= {"is_causal": int(self.causal), "fully_masked": "zero", "masked_score": -math.inf}
        given["mask_kind"] = MASKS[self.mask][1] if self.mask else "none"
        names = ("q", "k", "v", "mask") if self.mask else ("q", "k", "v")
        return FusedNode("attention", self.name, names, given, (self.dtype,))

    def tensors(self) -> list[torch.Tensor]:
        def heads(count: int, length: int) -> torch.Tensor:
            packed = (self.batch, length, count * self.size)
            shape = packed if self.layout == "packed" else (self.batch, count, length, self.size)
            return torch.randn(shape, device="cuda", dtype=DTYPES[self.dtype])

        made = [heads(self.heads, self.queries), heads(self.kv_heads, self.keys), heads(self.kv_heads, self.keys)]
        if self.mask:
            made.append(self.mask_values())
        return made

    def mask_values(self) -> torch.Tensor:
        dimensions, kind = MASKS[self.mask]
        sizes = {"b": self.batch, "h": self.heads, "q": self.queries, "k": self.keys}
        shape, dtype = [sizes.get(name, 1) for name in dimensions], DTYPES[self.dtype]
        if self.mask == "bias":
            return torch.randn(shape, device="cuda", dtype=dtype)
        kept = torch.ones(shape, device="cuda", dtype=torch.bool)
        if self.mask == "triangle":
            kept = kept.tril()
        if self.mask.startswith("padding"):
            lengths = torch.tensor([self.keys - i % 2 * self.keys // 6 for i in range(self.batch)], device="cuda")
            kept &= (torch.arange(self.keys, device="cuda") < lengths[:, None])[:, None, None, :]
        if kind == "boolean":
            return kept
        return torch.zeros(shape, device="cuda", dtype=dtype).masked_fill(~kept, torch.finfo(dtype).min)

    def views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return q, k and v as (batch, heads, length, size), which PyTorch takes."""
        if self.layout != "packed":
            return list(tensors[:3])
        counts = (self.heads, self.kv_heads, self.kv_heads)
        return [x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip(tensors, counts, strict=False)]


def cases(dtype: str) -> Iterator[Case]:
    for causal, target in (False, "600 TFLOP/s"), (True, "540 TFLOP/s"):
        yield Case("prefill", 2, 16, 16, 8192, 8192, 128, causal, target=target, dtype=dtype)
    yield Case("prefill", 1, 32, 8, 2048, 2048, 64, True, target="300 TFLOP/s", dtype=dtype)
    yield Case("prefill", 8, 12, 12, 512, 512, 64, mask="padding", target="220 TFLOP/s", dtype=dtype)
    yield Case("prefill", 1, 32, 8, 2048, 2048, 64, mask="triangle", dtype=dtype)
    yield Case("prefill", 8, 12, 12, 512, 512, 64, mask="padding rows", dtype=dtype)
    yield Case("short", 32, 12, 12, 197, 197, 64, target="140 TFLOP/s", dtype=dtype)
    yield Case("short", 32, 12, 12, 197, 197, 64, mask="all", dtype=dtype)
    for length in 1024, 2048, 4096:
        target = "2x efficient"
        yield Case("bias", 1, 12, 12, length, length, 64, mask="bias", target=target, dtype=dtype)
    for length in 4096, 8192, 16384, 32768:
        target = "80 % of copy"
        yield Case("decode", 8, 32, 8, 1, length, 128, target=target, dtype=dtype, layout="bhsd")
    yield Case("decode", 1, 32, 8, 1, 4096, 128, dtype=dtype, layout="bhsd")
    yield Case("short", 1, 12, 12, 128, 128, 64, target="6 us", dtype=dtype)
    yield Case("short", 256, 4, 4, 49, 49, 32, mask="bias", dtype=dtype)


# ---- running -------------------------------------------------------------------------------------------------------


def specs(tensors: Sequence[torch.Tensor]) -> tuple[TensorSpec, ...]:
    names = {dtype: name for name, dtype in DTYPES.items()} | {torch.bool: "bool"}
    return tuple(TensorSpec(tuple(x.shape), names[x.dtype]) for x in tensors)


def ways(case: Case, tensors: Sequence[torch.Tensor]) -> dict[str, Plan]:
    """Return the plans of the host by name, its first choice first."""
    problem, y = attention_of(case.node(), specs(tensors), gpu(0))
    return {way.name: Plan((y,), way.steps, way.scratch) for way in implementations(problem, gpu(0))}


def sets_of(case: Case) -> tuple[list[list[torch.Tensor]], int]:
    """Return sets of inputs that exceed the L2 cache four times, and the bytes of one set and its result."""
    first = case.tensors()
    moved = sum(t.numel() * t.element_size() for t in (*first, first[0]))
    count = min(MAX_SETS, max(1, math.ceil(4 * L2_BYTES / moved)))
    return [first] + [[t.clone() for t in first] for _ in range(count - 1)], moved


def runner(case: Case, plan: Plan, sets: Sequence[Sequence[torch.Tensor]]) -> tuple[list[Callable[[], Any]], Any]:
    """Return calls that run a plan on each set, on PyTorch's current stream, and the result of the first."""
    ready = ready_plan(plan, specs(sets[0]))
    scratch = torch.empty(ready.scratch_bytes + 256, device="cuda", dtype=torch.uint8)
    start = -(-scratch.data_ptr() // 256) * 256
    results = [torch.full(plan.outputs[0].shape, math.nan, device="cuda", dtype=DTYPES[case.dtype]) for _ in sets]

    def run(read: Sequence[torch.Tensor], y: torch.Tensor, keep: Any = scratch) -> None:
        ready.run([x.data_ptr() for x in read], [y.data_ptr()], start, torch.cuda.current_stream().cuda_stream)

    return [functools.partial(run, read, y) for read, y in zip(sets, results, strict=True)], results[0]


def in_torch(case: Case, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    q, k, v = case.views(tensors)
    mask = tensors[3] if case.mask else None
    shared = case.heads != case.kv_heads
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=case.causal, enable_gqa=shared)


def reference(case: Case, tensors: Sequence[torch.Tensor], y: torch.Tensor) -> float:
    """Return ||y - exact|| / ||exact|| of the first batch and the first key head, in float64."""
    q, k, v = (x[:1].double() for x in case.views(tensors))
    group, rows = case.heads // case.kv_heads, min(case.queries, 512)
    scores = q[:, :group, -rows:] @ k[:, :1].transpose(-1, -2) * case.size**-0.5
    if case.mask:
        mask = tensors[3][:1, :group, -rows:]
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    if case.causal:
        kept = torch.ones(case.queries, case.keys, device="cuda", dtype=torch.bool).tril()[-rows:]
        scores = scores.masked_fill(~kept, -math.inf)
    exact = scores.softmax(-1) @ v[:, :1]
    found = y.view(case.batch, case.queries, case.heads, case.size).transpose(1, 2)[:1, :group, -rows:].double()
    return float((found - exact).norm() / exact.norm())


def measure(case: Case, onnxruntime: bool) -> dict[str, Any]:
    sets, moved = sets_of(case)
    row: dict[str, Any] = {**dataclasses.asdict(case), "name": case.name, "flops": case.flops, "bytes": moved}
    row["ours"] = {}
    for name, plan in ways(case, sets[0]).items():
        calls, y = runner(case, plan, sets)
        us, spread = per_launch(calls, cost(case, moved))
        row["ours"][name] = {"us": us, "spread": spread, "error": reference(case, sets[0], y)}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                calls = [functools.partial(in_torch, case, each) for each in sets]
                row[f"{name}_us"], _ = per_launch(calls, cost(case, moved))
        except RuntimeError as error:  # the backend does not take this case
            row[f"{name}_why"] = str(error).splitlines()[0][:200]
    if case.kind == "decode":
        row["copy_us"], _ = per_launch(copies(moved, len(sets)), moved)
    if onnxruntime:
        row |= in_onnxruntime(case, sets[0], min(way["us"] for way in row["ours"].values()))
    return row


def cost(case: Case, moved: int) -> int:
    """Return bytes that a copy moves in about that time; they decide the number of launches in a graph."""
    return max(moved, int(case.flops / 300e12 * 4e12))


def in_onnxruntime(case: Case, tensors: Sequence[torch.Tensor], guess_us: float) -> dict[str, Any]:
    """Return the microseconds of com.microsoft's MultiHeadAttention: without grouped heads and boolean masks."""
    if case.kv_heads != case.heads or (case.mask and MASKS[case.mask][1] == "boolean") or case.layout != "packed":
        return {}
    chain = importlib.import_module("ort_chain")
    named = dict(zip(case.node().operands, tensors, strict=True))
    others = ["k", "v", "", "", "mask"] if case.mask else ["k", "v"]
    attributes = {"num_heads": case.heads, "unidirectional": int(case.causal)}
    step = chain.Step(*chain.single("q", "MultiHeadAttention", *others, **attributes), named)
    try:
        return {"ort_us": chain.step_us(step, guess_us)}
    except Exception as error:  # onnxruntime's errors have no common class
        return {"ort_why": str(error).splitlines()[0][:200]}


# ---- output --------------------------------------------------------------------------------------------------------

PEERS = (*BACKENDS, "ort")


def text(row: dict[str, Any]) -> Iterator[str]:
    best = min(row["ours"], key=lambda name: row["ours"][name]["us"])
    first = next(iter(row["ours"]))
    us = row["ours"][best]["us"]
    rate = f"{row['flops'] / us / 1e6:6.0f} TFLOP/s"
    if row["kind"] == "decode":
        rate = f"{row['bytes'] / us / 1e6:6.2f} TB/s, {100 * row['copy_us'] / us:3.0f} % of a copy"
    peers = "".join(f"{row[f'{peer}_us']:10.2f}" if f"{peer}_us" in row else f"{'-':>10}" for peer in PEERS)
    chosen = "" if best == first else f"; first: {first} {row['ours'][first]['us']:.2f}"
    yield f"{row['name']:36}{us:10.2f}{peers}  {rate} (target {row['target'] or 'none'}; {best}{chosen})"


def main(given: argparse.Namespace) -> None:
    kinds = set(filter(None, given.only.split(",")))
    chosen = [case for dtype in given.dtypes.split(",") for case in cases(dtype) if not kinds or case.kind in kinds]
    plans = [plan for case in chosen for plan in ways(case, case.tensors()).values()]
    compile_all(step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch))
    rows = Rows(given.out / "attention.json", ("name", "dtype"), given.add)
    print(f"{'':36}{'ours us':>10}{''.join(f'{peer:>10}' for peer in PEERS)}")
    for case in chosen:
        try:
            row = measure(case, given.onnxruntime)
            print(*text(row), sep="\n", flush=True)
        except Exception:  # the others are still worth measuring
            row = {"name": case.name, "dtype": case.dtype, "failed": traceback.format_exc()}
            print(f"{case.name}: {row['failed'].strip().splitlines()[-1]}", flush=True)
        rows.put(row)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(GIVEN)
