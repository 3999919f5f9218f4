"""Time every plan of fused matrix products beside the bare product of cuBLASLt, PyTorch and onnxruntime.

    python benchmarks/gemm.py --out results [--only 4096x3072x768,…] [--dtypes float16] [--epilogues none,…]
        [--eager] [--inductor] [--onnxruntime] [--add results/gemm.json]

A time is the cost of one more product in a CUDA graph.  As in a model each has constants (weights and biases) of its
own, which together exceed the L2 cache, while x and the residual are where the product before left them.  What is
compared runs in turns, so that all find the GPU as warm.  The bare product is cuBLASLt's, of the same sizes without an
epilogue (of both weights side by side where it is gated), by the fastest of the algorithms that it proposes.  Where x
has few rows the time is that of reading the weights: told is the share of their bytes in what a large copy moves in
that time, and in the results also the time of a copy of as many.
"""

from __future__ import annotations

import command_lines

if __name__ == "__main__":
    GIVEN = command_lines.gemm(__doc__)  # before the imports, so that --help needs neither PyTorch nor a GPU

import argparse
import functools
import importlib
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from compiling import compile_all
from replays import Calls, captured, in_turns, per_call
from rows import Rows

from onnxfuse.kernels.epilogue_node import is_joined, joined
from onnxfuse.kernels.gemm import cublaslt, host, implementations
from onnxfuse.kernels.gemm.operands import gemm_of
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import FusedNode, Kernel, Launch, Plan, TensorSpec

L2_BYTES = 60 << 20
MAX_SETS = 128
FEW_ROWS = 64
COPY_BYTES = 1 << 30

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SHAPES = [
    (4096, 768, 768), (4096, 3072, 768), (4096, 768, 3072), (2048, 5632, 2048), (2048, 2048, 5632),
    (8192, 8192, 8192), (128, 3072, 768), (1, 4096, 4096), (16, 4096, 4096), (8, 14336, 4096), (1000, 1001, 1003),
]  # fmt: skip
CONSTANTS = ("w", "up", "bias")
# operands beyond x and w, and the activation
EPILOGUES: dict[str, tuple[tuple[str, ...], str]] = {
    "none": ((), "none"),
    "bias+gelu": (("bias",), "gelu"),
    "bias+relu": (("bias",), "relu"),
    "bias+residual": (("bias", "residual"), "none"),
    "silu": ((), "silu"),
    "gate": (("up",), "silu"),
    "program": (("bias", "x1", "x2", "x3"), "none"),
}
# What follows the product of the epilogue "program": (tanh(y) * x1 + x2) * x3, of elements, columns and rows.
STEPS = [["Tanh", ["x0"], ["v0"], {}], ["Mul", ["v0", "x1"], ["v1"], {}], ["Add", ["v1", "x2"], ["v2"], {}],
         ["Mul", ["v2", "x3"], ["v3"], {}]]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A fused product of x [m, k] and w [k, n]."""

    m: int
    n: int
    k: int
    dtype: str
    epilogue: str

    @property
    def fusion(self) -> str:
        return "gated_gemm" if self.epilogue == "gate" else "gemm_bias_activation"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        every = {"up": (self.k, self.n), "bias": (self.n,), "residual": (self.m, self.n)}
        every |= {"x1": (self.m, self.n), "x2": (self.n,), "x3": (self.m, 1)}
        return {"x": (self.m, self.k), "w": (self.k, self.n), **{name: every[name] for name in self.extra}}

    @property
    def extra(self) -> tuple[str, ...]:
        return EPILOGUES[self.epilogue][0]

    @property
    def activation(self) -> str:
        return EPILOGUES[self.epilogue][1]

    def node(self) -> tuple[FusedNode, list[TensorSpec]]:
        attributes: dict[str, Any] = {"activation": self.activation}
        if "x1" in self.extra:
            dtypes = dict.fromkeys(("x0", "x1", "x2", "x3", "v0", "v1", "v2", "v3"), self.dtype)
            attributes["program"] = json.dumps({"ops": STEPS, "outputs": ["v3"], "dtypes": dtypes})
        node = FusedNode(self.fusion, "y", tuple(self.shapes()), attributes, (self.dtype,))
        shapes = self.shapes().items()
        return node, [TensorSpec(shape, self.dtype, constant=name in CONSTANTS) for name, shape in shapes]

    def product(self) -> tuple[Gemm, TensorSpec]:
        node, given = self.node()
        if is_joined(node):
            node = joined(node).product
        return gemm_of(node, given[: len(node.operands)], gpu(0))

    def ways(self) -> list[Implementation]:
        node, given = self.node()
        if not is_joined(node):
            return implementations.implementations(self.product()[0], gpu(0))
        return [Implementation(f"{i} {names_of(plan)}", plan.steps, plan.scratch)
                for i, plan in enumerate(host.candidates(node, given, gpu(0)))]  # fmt: skip

    def formula(self, x: Any, w: Any, *others: Any) -> Any:
        given = dict(zip(self.extra, others, strict=True))
        y = torch.addmm(given["bias"], x, w) if "bias" in given else x @ w
        y = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "none": lambda y: y}[self.activation](y)
        y = y * (x @ given["up"]) if "up" in given else y
        if "x1" in given:
            return (torch.tanh(y) * given["x1"] + given["x2"]) * given["x3"]
        return y + given["residual"] if "residual" in given else y

    def tensors(self) -> list[torch.Tensor]:
        made = {name: torch.randn(shape, device="cuda") for name, shape in self.shapes().items()}
        return [(t / math.sqrt(self.k) if n in ("w", "up") else t).to(DTYPES[self.dtype]) for n, t in made.items()]


# ---- what is timed ------------------------------------------------------------------------------------------------


def names_of(plan: Plan) -> str:
    """Return the kernels of a plan."""
    kernels = (step.kernel if isinstance(step, Launch) else None for step in plan.steps)
    return " and ".join(
        f"{each.source} {each.defines.get('TILE_M', '')}x{each.defines.get('TILE_N', '')}" if each else "cublaslt"
        for each in kernels
    )


def runs(way: Implementation, y: TensorSpec, sets: list[list[torch.Tensor]], out: torch.Tensor) -> Calls:
    """Return calls that run a plan on each set of operands, on PyTorch's current stream."""
    read = [TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in sets[0]]
    ready = ready_plan(Plan((y,), way.steps, way.scratch), read)
    scratch = torch.empty(max(1, ready.scratch_bytes), dtype=torch.uint8, device="cuda")

    def call(inputs: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        ready.run([t.data_ptr() for t in inputs], [out.data_ptr()], scratch.data_ptr(), stream)

    return [functools.partial(call, each) for each in sets]


def operand_sets(case: Case) -> list[list[torch.Tensor]]:
    """Operands that differ in where their constants are."""
    first = dict(zip(case.shapes(), case.tensors(), strict=True))
    moved = sum(t.numel() * t.element_size() for name, t in first.items() if name in CONSTANTS)
    count = min(MAX_SETS, max(2, math.ceil(4 * L2_BYTES / moved)))
    return [[t.clone() if name in CONSTANTS else t for name, t in first.items()] for _ in range(count)]


def bare(case: Case, sets: list[list[torch.Tensor]]) -> list[Calls]:
    """Return calls of cuBLASLt's product of the same sizes, for each of the algorithms that it proposes first."""
    twice = case.epilogue == "gate"
    wide = Case(case.m, case.n * (2 if twice else 1), case.k, case.dtype, "none")
    gemm, y = wide.product()
    used = operand_sets(wide) if twice else [each[:2] for each in sets]
    out = torch.empty(y.shape, device="cuda", dtype=DTYPES[case.dtype])
    return [runs(way, y, used, out) for way in cublaslt.implementations(gemm, gpu(0))[:4]]


@functools.cache
def copy_bytes_per_us() -> float:
    """Return the bytes that a large device copy reads and writes in a microsecond."""
    pair = torch.empty((2, COPY_BYTES), dtype=torch.uint8, device="cuda").random_(0, 255)
    return 2 * COPY_BYTES / min(per_call([lambda: pair[1].copy_(pair[0])]) for _ in range(20))  # clocks rise slowly


def copy_us(moved: int) -> float:
    """Return the microseconds of a device copy that reads and writes so many bytes together, not from the L2 cache."""
    shape = (min(MAX_SETS, max(2, math.ceil(4 * L2_BYTES / moved))), 2, max(1, moved // 2))
    pairs = torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 255)
    return per_call([functools.partial(pair[1].copy_, pair[0]) for pair in pairs])


Peer = Callable[[Case, list[list[torch.Tensor]]], Calls]


def measure(case: Case, peers: list[Peer], with_onnxruntime: bool) -> dict[str, Any]:
    gemm, y = case.product()
    sets = operand_sets(case)
    reference = case.formula(*(t.double() for t in sets[0]))
    torch.cuda.synchronize()  # later work runs on other streams and may reuse the memory of these operands
    row: dict[str, Any] = {"sets": len(sets), "flops": gemm.flops, "candidates": {}}
    graphs = {f"bare {i}": captured(calls) for i, calls in enumerate(bare(case, sets))}
    graphs |= {peer.__name__: captured(peer(case, sets)) for peer in peers}
    ways, errors = case.ways(), dict[str, float]()
    for way in ways:
        out = torch.full(y.shape, math.nan, device="cuda", dtype=DTYPES[case.dtype])
        try:
            graphs[way.name] = captured(runs(way, y, sets, out))
            errors[way.name] = float((out.double() - reference).norm() / reference.norm().clamp(min=1e-30))
        except Exception:  # the others are still worth measuring
            row.setdefault("failed_candidates", {})[way.name] = traceback.format_exc()
    times = in_turns(graphs)
    row |= {f"{peer.__name__}_us": times[peer.__name__] for peer in peers}
    if with_onnxruntime:
        row["onnxruntime_us"] = onnxruntime(case, sets)
    row["bare_us"] = min(us for name, us in times.items() if name.startswith("bare "))
    row["candidates"] = {name: times[name] for name in errors}
    best, us = min(row["candidates"].items(), key=lambda each: each[1])
    row |= {"best": best, "us": us, "first_us": row["candidates"].get(ways[0].name), "error": max(errors.values())}
    row |= {"tflops": gemm.flops / us / 1e6, "over_bare": us / row["bare_us"]}
    if case.m <= FEW_ROWS:
        weights = (2 if gemm.up else 1) * case.n * case.k * 2
        row["share_of_copy"] = weights / us / copy_bytes_per_us()
        row["copy_us"] = copy_us(weights)
    return row


# ---- peers -------------------------------------------------------------------------------------------------------


def eager(case: Case, sets: list[list[torch.Tensor]]) -> Calls:
    return [functools.partial(case.formula, *each) for each in sets]


def inductor(case: Case, sets: list[list[torch.Tensor]]) -> Calls:
    torch.compiler.reset()
    compiled = torch.compile(case.formula, dynamic=False)
    return [functools.partial(compiled, *each) for each in sets]


def unfused(case: Case) -> bytes:
    """Return the model for onnxruntime, with one operator for each step of the formula."""
    shapes = {**case.shapes(), "y": (case.m, case.n)}
    gemm = case.epilogue == "bias+relu"  # exporters write Gemm for two axes; for more axes, and for GELU, MatMul
    nodes = ["biased = Gemm (x, w, bias)" if gemm else "p = MatMul (x, w)"]

    def then(name: str, op: str, inputs: str) -> str:
        nodes.append(f"{name} = {op} ({inputs})")
        return name

    last = "biased" if gemm else then("biased", "Add", "p, bias") if "bias" in case.extra else "p"
    if case.activation in ("gelu", "relu"):
        last = then("activated", case.activation.title(), last)
    if case.activation == "silu":
        then("sigmoid", "Sigmoid", last)
        last = then("activated", "Mul", f"{last}, sigmoid")
    if "up" in case.extra:
        then("other", "MatMul", "x, up")
        last = then("gated", "Mul", f"{last}, other")
    if "x1" in case.extra:
        last = then("scaled", "Mul", f"{then('bounded', 'Tanh', last)}, x1")
        last = then("of_rows", "Mul", f"{then('shifted', 'Add', f'{last}, x2')}, x3")
    if "residual" in case.extra:
        last = then("added", "Add", f"{last}, residual")
    then("y", "Identity", last)
    values = {name: f"{case.dtype}[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items()}
    inputs = ", ".join(values[name] for name in case.shapes())
    text = f"g ({inputs}) => ({values['y']}) {{ " + " ".join(nodes) + " }"
    parse = importlib.import_module("onnx.parser").parse_model
    model: bytes = parse(f'<ir_version: 9, opset_import: ["" : 20]> {text}').SerializeToString()
    return model


def onnxruntime(case: Case, sets: list[list[torch.Tensor]]) -> float:
    """Return the microseconds of a run in onnxruntime with all its optimizations, as a CUDA graph, launch included."""
    ort, element = importlib.import_module("onnxruntime"), {"float16": 10, "bfloat16": 16}[case.dtype]
    ort.preload_dlls()
    provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1"})
    session = ort.InferenceSession(unfused(case), providers=[provider])
    binding, out = session.io_binding(), torch.empty((case.m, case.n), device="cuda", dtype=DTYPES[case.dtype])
    for name, tensor in zip(case.shapes(), sets[0], strict=True):
        binding.bind_input(name, "cuda", 0, element, list(tensor.shape), tensor.data_ptr())
    binding.bind_output("y", "cuda", 0, element, list(out.shape), out.data_ptr())
    torch.cuda.synchronize()
    for _ in range(4):  # the third run captures the graph
        session.run_with_iobinding(binding)
    times = [run_us(functools.partial(session.run_with_iobinding, binding)) for _ in range(30)]
    return statistics.median(times)


def run_us(run: Callable[[], Any]) -> float:
    """Return the microseconds of `run`, which starts work on a stream of its own and waits for it."""
    start = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - start)


# ---- output ------------------------------------------------------------------------------------------------------


def kernels_of(cases: list[Case]) -> Iterator[Kernel]:
    for case in cases:
        for way in case.ways():
            yield from (step.kernel for step in way.steps if isinstance(step, Launch))


def line(row: dict[str, Any]) -> str:
    shape = "x".join(map(str, row["shape"]))
    times = ("eager_us", "inductor_us", "onnxruntime_us")
    peers = " ".join(f"{name[:-3]} {row[name]:.1f}" for name in times if name in row)
    share = f" {100 * row['share_of_copy']:3.0f}% of copy" if "share_of_copy" in row else ""
    each = ", ".join(f"{name} {us:.1f}" for name, us in row["candidates"].items())
    failed = "".join(f", {name} FAILED" for name in row.get("failed_candidates", ()))
    return (
        f"{shape:16}{row['dtype']:9}{row['epilogue']:14}{row['us']:8.1f} us {row['tflops']:6.0f} TFLOP/s "
        f"{row['over_bare']:5.2f} x bare {row['bare_us']:.1f}{share} {peers} | {each}{failed}"
    )


def chosen(given: argparse.Namespace) -> Iterator[Case]:
    wanted = [tuple(map(int, shape.split("x"))) for shape in given.only.split(",") if shape] or SHAPES
    for dtype in given.dtypes.split(","):
        for m, n, k in wanted:
            for epilogue in given.epilogues.split(",") if given.epilogues else EPILOGUES:
                yield Case(m, n, k, dtype, epilogue)


def main(given: argparse.Namespace) -> None:
    peers = [peer for peer, wanted in ((eager, given.eager), (inductor, given.inductor)) if wanted]
    cases = list(chosen(given))
    compile_all(kernels_of(cases))
    copied = copy_bytes_per_us() / 1e6
    rows = Rows(given.out / "gemm.json", ("shape", "dtype", "epilogue"), given.add, copy_tb_per_s=copied)
    for case in cases:
        row: dict[str, Any] = {"shape": [case.m, case.n, case.k], "dtype": case.dtype, "epilogue": case.epilogue}
        try:
            row |= measure(case, peers, given.onnxruntime)
            print(line(row), flush=True)
        except Exception:  # the others are still worth measuring
            row["failed"] = traceback.format_exc()
            print(f"{case}: {row['failed'].strip().splitlines()[-1]}", flush=True)
        rows.put(row)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(GIVEN)
