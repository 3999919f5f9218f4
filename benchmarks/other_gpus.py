"""Time plans that are chosen for GPUs that are not at hand, on the one at hand, beside cuBLAS and FlashAttention 2.

    python benchmarks/other_gpus.py --out results [--gpus T4,A100] [--only gemm,attention]
        [--add results/other_gpus.json]

A node is planned for as on that GPU, and its kernels are compiled for the one at hand.  So a time tells what kernel and
tiling lose against the libraries on one and the same GPU, not how fast the other GPU is: the tiling suits its
multiprocessors and memory.  A row has the first plan and the fastest of ours, without those that call cuBLASLt, and
beside them the product alone by cuBLASLt, or FlashAttention 2 and the unfused operators through PyTorch.  Where the
fastest is slower than the operators that it replaces, `slower_than_body` is true.
"""

from __future__ import annotations

import command_lines

if __name__ == "__main__":
    GIVEN = command_lines.other_gpus(__doc__)  # before the imports, so that --help needs neither PyTorch nor a GPU

import argparse
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attention
import gemm
import torch
from compiling import compile_all
from replays import Calls, captured, in_turns
from rows import Rows
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnxfuse.kernels.attention.implementations import implementations as attention_implementations
from onnxfuse.kernels.attention.operands import attention_of
from onnxfuse.kernels.gemm.implementations import implementations as gemm_implementations
from onnxfuse.kernels.gemm.operands import gemm_of
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Matmul, Plan, TensorSpec

# As tests/kernels/other_gpus.py has them: compute capability, multiprocessors, shared memory of a block.
OTHER_GPUS = {
    "T4": Device("T4", 75, 40, 65536),
    "A100": Device("A100", 80, 108, 166912),
    "L40S": Device("L40S", 89, 142, 101376),
    "RTX 5090": Device("RTX 5090", 120, 170, 101376),
}
PRODUCTS = [
    gemm.Case(m, n, k, "float16", epilogue)
    for m, n, k in [(1, 4096, 4096), (16, 4096, 4096), (128, 3072, 768), (2048, 5632, 2048), (4096, 3072, 768)]
    for epilogue in ("none", "bias+gelu", "gate")
]
ATTENTION = [
    attention.Case("prefill", 2, 16, 16, 2048, 2048, 128),
    attention.Case("prefill", 1, 32, 8, 2048, 2048, 64, causal=True),
    attention.Case("prefill", 8, 12, 12, 512, 512, 64),
    attention.Case("short", 32, 12, 12, 197, 197, 64),
    attention.Case("prefill", 8, 12, 12, 512, 512, 64, mask="padding"),
    attention.Case("decode", 8, 32, 8, 1, 4096, 128, layout="bhsd"),
]


def products(case: gemm.Case, device: Device) -> dict[str, Plan]:
    """Return the plans of a product by name, in the order of the host, without those that only call cuBLASLt."""
    names = tuple(case.shapes())
    node = FusedNode(case.fusion, "y", names, {"activation": case.activation}, (case.dtype,))
    shapes = case.shapes().items()
    specs = [TensorSpec(shape, case.dtype, constant=name in gemm.CONSTANTS) for name, shape in shapes]
    problem, y = gemm_of(node, specs, device)
    found = gemm_implementations(problem, device)
    own = [way for way in found if not any(isinstance(step, Matmul) for step in way.steps)]
    return {way.name: Plan((y,), way.steps, way.scratch) for way in own}


def attentions(case: attention.Case, specs: Sequence[TensorSpec], device: Device) -> dict[str, Plan]:
    """Return the plans of an attention by name, in the order of the host."""
    problem, y = attention_of(case.node(), specs, device)
    return {way.name: Plan((y,), way.steps, way.scratch) for way in attention_implementations(problem, device)}


# ---- timing -------------------------------------------------------------------------------------------------------


def measured(plans: dict[str, Callable[[], Calls]], peers: dict[str, Callable[[], Calls]], body: str) -> dict[str, Any]:
    """Return the times of our plans and of their peers in turns; `body` names the peer that a fused node replaces."""
    row: dict[str, Any] = {"ours": {}, "failed": {}}
    graphs = {}
    for name, make in {**plans, **peers}.items():
        try:
            graphs[name] = captured(make())
        except Exception as error:  # the others are still worth measuring
            row["failed"][name] = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    times = in_turns(graphs)
    row |= {f"{name}_us": times[name] for name in peers if name in times}
    row["ours"] = {name: times[name] for name in plans if name in times}
    if row["ours"]:
        best = min(row["ours"], key=lambda name: row["ours"][name])
        row |= {"best": best, "us": row["ours"][best], "first_us": times.get(next(iter(plans)))}
        row["slower_than_body"] = body in times and row["us"] > times[body]
    return row


def of_product(case: gemm.Case, device: Device) -> dict[str, Any]:
    """Time a product: cuBLASLt alone, and PyTorch's operators one by one, which are the body."""
    sets = gemm.operand_sets(case)
    y = TensorSpec((case.m, case.n), case.dtype)
    out = torch.empty(y.shape, device="cuda", dtype=gemm.DTYPES[case.dtype])

    def calls(plan: Plan) -> Calls:
        return gemm.runs(Implementation("", plan.steps, plan.scratch), y, sets, out)

    plans = {name: functools.partial(calls, plan) for name, plan in products(case, device).items()}
    library = gemm.bare(case, sets)
    peers: dict[str, Callable[[], Calls]] = {
        f"cublaslt {i}": functools.partial(lambda calls: calls, each) for i, each in enumerate(library)
    }
    peers["body"] = functools.partial(gemm.eager, case, sets)
    row = measured(plans, peers, "body")
    times = [row.pop(f"{name}_us") for name in list(peers) if name != "body" and f"{name}_us" in row]
    if times:
        row["cublas_us"] = min(times)
    return row


def of_attention(case: attention.Case, device: Device) -> dict[str, Any]:
    """Time an attention: FlashAttention 2, and PyTorch's unfused operators, which are the body."""
    sets, _ = attention.sets_of(case)
    specs = attention.specs(case, sets[0])

    def in_torch(backend: SDPBackend) -> Calls:
        def call(tensors: Sequence[torch.Tensor]) -> Any:
            with sdpa_kernel(backend):
                return attention.in_torch(case, tensors)

        return [functools.partial(call, each) for each in sets]

    def calls(plan: Plan) -> Calls:
        return attention.runner(case, plan, sets)[0]

    plans = {name: functools.partial(calls, plan) for name, plan in attentions(case, specs, device).items()}
    peers = {
        "flash2": functools.partial(in_torch, SDPBackend.FLASH_ATTENTION),
        "body": functools.partial(in_torch, SDPBackend.MATH),
    }
    return measured(plans, peers, "body")


# ---- output ------------------------------------------------------------------------------------------------------


def line(row: dict[str, Any]) -> str:
    """Return a row for people."""
    ours = f"{row['us']:9.1f} us by {row['best']}" if "us" in row else f"{'no plan':>9}"
    peers = " ".join(f"{name} {row[f'{name}_us']:.1f}" for name in ("cublas", "flash2", "body") if f"{name}_us" in row)
    slower = " SLOWER THAN THE BODY" if row.get("slower_than_body") else ""
    return f"{row['gpu']:10}{row['name']:44}{ours:40}{peers}{slower}"


def specs_of(case: attention.Case) -> list[TensorSpec]:
    """Return the inputs of an attention as plans see them, without making them."""
    sizes = {"q": (case.heads, case.queries), "k": (case.kv_heads, case.keys), "v": (case.kv_heads, case.keys)}
    found = []
    for heads, length in sizes.values():
        packed = (case.batch, length, heads * case.size)
        found.append(
            TensorSpec(packed if case.layout == "packed" else (case.batch, heads, length, case.size), case.dtype)
        )
    if case.mask:
        dims, kind = attention.MASKS[case.mask]
        known = {"b": case.batch, "h": case.heads, "q": case.queries, "k": case.keys}
        shape = tuple(known.get(name, 1) for name in dims)
        found.append(TensorSpec(shape, "bool" if kind == "boolean" else case.dtype))
    return found


def plans_of(kinds: set[str], devices: Sequence[Device]) -> Iterator[Plan]:
    """Yield every plan that will be timed, so that all kernels are compiled side by side first."""
    for device in devices:
        if "gemm" in kinds:
            for case in PRODUCTS:
                yield from products(case, device).values()
        if "attention" in kinds:
            for each in ATTENTION:
                yield from attentions(each, specs_of(each), device).values()


def main(given: argparse.Namespace) -> None:
    """Time everything that the command line asks for."""
    devices = [OTHER_GPUS[name] for name in given.gpus.split(",")] if given.gpus else list(OTHER_GPUS.values())
    kinds = set(given.only.split(",")) if given.only else {"gemm", "attention"}
    found = (step.kernel for plan in plans_of(kinds, devices) for step in plan.steps if isinstance(step, Launch))
    compile_all(found)
    rows = Rows(given.out / "other_gpus.json", ("gpu", "kind", "name"), given.add)
    work: list[tuple[str, str, Callable[[Device], dict[str, Any]]]] = []
    if "gemm" in kinds:
        work += [
            ("gemm", f"{c.m}x{c.n}x{c.k} {c.dtype} {c.epilogue}", functools.partial(of_product, c)) for c in PRODUCTS
        ]
    if "attention" in kinds:
        work += [("attention", f"{c.name} {c.dtype}", functools.partial(of_attention, c)) for c in ATTENTION]
    for device in devices:
        for kind, name, time in work:
            row: dict[str, Any] = {"gpu": device.name, "arch": device.arch, "kind": kind, "name": name}
            try:
                row |= time(device)
                print(line(row), flush=True)
            except Exception:  # the others are still worth measuring
                row["failed"] = traceback.format_exc()
                print(f"{device.name} {name}: {row['failed'].strip().splitlines()[-1]}", flush=True)
            rows.put(row)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(GIVEN)
