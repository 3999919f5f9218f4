"""Time every plan of products with weights of 4 or 8 bits beside onnxruntime's MatMulNBits and the float16 product.

With 4 bits, PyTorch's product by packed weights in bfloat16, as gpt-fast calls it, is timed, too.

    python benchmarks/quantized.py --out results/matmul_nbits.json [--only 1x4096x4096,...] [--bits 4] [--layout kn]

A time is the cost of one more product in a CUDA graph, in microseconds.  Each product has weights of its own, which
together exceed the L2 cache several times.  `bytes` is the time that a copy, at the rate of a long one, takes for the
weights and scales.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compiling import compile_all
from gemm import copy_bytes_per_us
from onnx import TensorProto, helper, numpy_helper
from replays import Calls, captured, in_turns
from rows import Rows

from onnxfuse.kernels.gemm.implementations import implementations
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.matmul_nbits.host import implementations as nbits_implementations
from onnxfuse.kernels.matmul_nbits.problem import product_of
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import FusedNode, Launch, Plan, Pointer, TensorSpec

L2_BYTES = 60 << 20
MAX_SETS = 64
BLOCK_SIZE = 32
SHAPES = [(m, 4096, 4096) for m in (1, 4, 8, 16, 32, 64, 128, 512, 2048, 4096)]
SHAPES += [(1, 11008, 4096), (16, 11008, 4096), (1, 4096, 14336), (1, 28672, 4096), (1, 3072, 2048), (1, 2048, 8192),
           (1, 128256, 2048)]  # fmt: skip
Operands = list[torch.Tensor]


def operand_sets(m: int, n: int, k: int, bits: int) -> list[Operands]:
    """Return x, weights and scales, which differ in where the latter are."""
    blocks = k // BLOCK_SIZE
    x = torch.randn((m, k), device="cuda", dtype=torch.float16)
    w = torch.randint(0, 256, (n, blocks, BLOCK_SIZE * bits // 8), device="cuda", dtype=torch.uint8)
    scales = (torch.rand((n, blocks), device="cuda") / 2**bits / math.sqrt(k)).to(torch.float16)
    count = min(MAX_SETS, max(2, math.ceil(4 * L2_BYTES / (w.numel() + 2 * scales.numel()))))
    return [[x, w.clone(), scales.clone()] for _ in range(count)]


def runs(plan: Plan, sets: list[Operands], out: torch.Tensor) -> Calls:
    """Return calls that run a plan on each set of operands, on PyTorch's current stream."""
    read = [TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in sets[0]]
    ready = ready_plan(plan, read)
    scratch = torch.empty(max(1, ready.scratch_bytes), dtype=torch.uint8, device="cuda")

    def call(inputs: Operands) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        ready.run([t.data_ptr() for t in inputs], [out.data_ptr()], scratch.data_ptr(), stream)

    return [functools.partial(call, each) for each in sets]


def onnxruntime_us(m: int, n: int, k: int, bits: int) -> float:
    """Return the microseconds of one more MatMulNBits of x in onnxruntime, in a CUDA graph."""
    few, many = 2, min(24, max(4, math.ceil(4 * L2_BYTES / (n * k * bits / 8))))
    return (_session_us(m, n, k, bits, many) - _session_us(m, n, k, bits, few)) / (many - few)


def _session_us(m: int, n: int, k: int, bits: int, count: int) -> float:
    ort, blocks, random = importlib.import_module("onnxruntime"), k // BLOCK_SIZE, np.random.default_rng(0)
    nodes, constants = [], []
    for i in range(count):
        w = random.integers(0, 256, (n, blocks, BLOCK_SIZE * bits // 8), dtype=np.uint8)
        scales = (random.random((n, blocks)) / 2**bits / math.sqrt(k)).astype(np.float16)
        constants += [numpy_helper.from_array(w, f"w{i}"), numpy_helper.from_array(scales, f"s{i}")]
        nodes.append(helper.make_node("MatMulNBits", ["x", f"w{i}", f"s{i}"], [f"y{i}"], domain="com.microsoft",
                                      K=k, N=n, bits=bits, block_size=BLOCK_SIZE))  # fmt: skip
    element = TensorProto.FLOAT16
    given = helper.make_tensor_value_info("x", element, [m, k])
    results = [helper.make_tensor_value_info(f"y{i}", element, [m, n]) for i in range(count)]
    graph = helper.make_graph(nodes, "products", [given], results, constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    ort.preload_dlls()
    session = ort.InferenceSession(model, providers=[("CUDAExecutionProvider", {"enable_cuda_graph": "1"})])
    binding, x = session.io_binding(), torch.randn((m, k), device="cuda", dtype=torch.float16)
    outputs = [torch.empty((m, n), device="cuda", dtype=torch.float16) for _ in range(count)]
    binding.bind_input("x", "cuda", 0, element, [m, k], x.data_ptr())
    for i, y in enumerate(outputs):
        binding.bind_output(f"y{i}", "cuda", 0, element, [m, n], y.data_ptr())
    torch.cuda.synchronize()
    for _ in range(4):
        session.run_with_iobinding(binding)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def float16_calls(m: int, n: int, k: int) -> Calls:
    """Return calls of the first plan of the float16 product, with weights that exceed the L2 cache."""
    out = Pointer("output", 0)
    gemm = Gemm(m, n, k, "float16", True, True, Pointer("input", 0), Pointer("input", 1), out, weights_constant=True)
    x = torch.randn((m, k), device="cuda", dtype=torch.float16)
    count = min(MAX_SETS, max(2, math.ceil(4 * L2_BYTES / (2 * n * k))))
    sets = [[x, torch.randn((n, k), device="cuda", dtype=torch.float16)] for _ in range(count)]
    first = implementations(gemm, gpu(0))[0]
    y = TensorSpec((m, n), "float16")
    return runs(Plan((y,), first.steps, first.scratch), sets, torch.empty((m, n), device="cuda", dtype=torch.float16))


def torch_calls(m: int, n: int, k: int) -> Calls:
    """Return calls of PyTorch's product with weights of 4 bits, which exceed the L2 cache."""
    x = torch.randn((m, k), device="cuda", dtype=torch.bfloat16)
    packed = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
    w = torch._convert_weight_to_int4pack(packed, 8)  # tiles along k in the packed order
    scales = torch.rand((k // BLOCK_SIZE, n, 2), device="cuda", dtype=torch.bfloat16)
    count = min(MAX_SETS, max(2, math.ceil(4 * L2_BYTES / (n * k / 2))))
    sets = [(x, w.clone(), BLOCK_SIZE, scales.clone()) for _ in range(count)]
    return [functools.partial(torch._weight_int4pack_mm, *each) for each in sets]


def measure(m: int, n: int, k: int, bits: int, layout: str) -> dict[str, Any]:
    """Return the times of one product; that of onnxruntime is of MatMulNBits for every layout."""
    attributes = {"k": k, "n": n, "bits": bits, "block_size": BLOCK_SIZE, "weight_layout": layout}
    node = FusedNode("matmul_nbits", "y", ("x", "w", "scales"), attributes, ("float16",))
    sets, blocks = operand_sets(m, n, k, bits), k // BLOCK_SIZE
    stored = {"nbits": tuple(sets[0][1].shape), "kn": (k, n), "nk": (n, k)}[layout]
    specs = [
        TensorSpec((m, k), "float16"),
        TensorSpec(stored, "uint8" if layout == "nbits" else f"uint{bits}", constant=True),
        TensorSpec((blocks, n) if layout == "kn" else (n, blocks), "float16", constant=True),
    ]
    product, y = product_of(node, specs, gpu(0))
    ways = nbits_implementations(product, gpu(0))
    compile_all(step.kernel for way in ways for step in way.steps if isinstance(step, Launch))
    out = torch.empty((m, n), device="cuda", dtype=torch.float16)
    torch.cuda.synchronize()
    graphs = {way.name: captured(runs(Plan((y,), way.steps, way.scratch), sets, out)) for way in ways}
    peers = {"float16": captured(float16_calls(m, n, k))}
    peers |= {"torch": captured(torch_calls(m, n, k))} if bits == 4 else {}
    times = in_turns({**graphs, **peers})
    moved = sets[0][1].numel() + 2 * sets[0][2].numel()
    return {
        "shape": [m, n, k], "bits": bits, "layout": layout, "first": ways[0].name, "us": times[ways[0].name],
        "candidates": {way.name: times[way.name] for way in ways}, "float16_us": times["float16"],
        "torch_us": times.get("torch"), "onnxruntime_us": onnxruntime_us(m, n, k, bits),
        "bytes_us": moved / copy_bytes_per_us(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="shapes MxNxK, separated by commas")
    parser.add_argument("--bits", default="4,8")
    parser.add_argument("--layout", default="nbits", choices=("nbits", "kn", "nk"), help="how weights are stored")
    given = parser.parse_args()
    wanted = [tuple(map(int, shape.split("x"))) for shape in given.only.split(",") if shape] or SHAPES
    rows = Rows(given.out, ("shape", "bits", "layout")) if given.out else None
    for bits in map(int, given.bits.split(",")):
        for m, n, k in wanted:
            torch.cuda.empty_cache()
            row = measure(m, n, k, bits, given.layout)
            others = ", ".join(f"{name} {us:.1f}" for name, us in row["candidates"].items())
            in_torch = f", PyTorch {row['torch_us']:.1f}" if row["torch_us"] else ""
            print(f"{m}x{n}x{k} {bits} bits: {row['us']:.1f} us, onnxruntime {row['onnxruntime_us']:.1f}{in_torch}, "
                  f"float16 {row['float16_us']:.1f}, bytes {row['bytes_us']:.1f} | {others}", flush=True)  # fmt: skip
            if rows is not None:
                rows.put(row)


if __name__ == "__main__":
    main()
