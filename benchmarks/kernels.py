"""Each kernel beside a device copy of the same bytes and beside what PyTorch Inductor makes of the same formula.

    python benchmarks/kernels.py --out results [--quick] [--only layer_norm,softmax] [--no-inductor]

A time is the cost of one more node in a CUDA graph: a graph of many launches, over buffers that together exceed the
L2 cache where that takes no more than 64 sets of them, replayed; the median of the replays over the launches.  Bytes
are the fewest that the operator must move: every input and output once.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import json
import math
import statistics
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
import torch.nn.functional as F

from onnxfuse.provider.compile import compile_kernel, gpu
from onnxfuse.provider.plan import FusedNode, Kernel, Launch, Plan, Pointer, TensorSpec
from onnxfuse.provider.source import options, source_text

L2_BYTES = 60 << 20
MOST_SETS = 64
REPLAYS = 15
GRAPH_US = 2000.0  # of work in a graph, at least

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
LARGE = [(16384, 4096), (8192, 8192)]
SMALL = [(4096, 768), (512, 65536), (1, 4096), (33, 1023), (128, 128), (4096, 64)]


@dataclass(frozen=True)
class Case:
    """A fused node at a shape, and its formula in PyTorch."""

    fusion: str
    inputs: dict[str, tuple[int, ...]]
    formula: Callable[..., Any]
    dtype: str = "float16"
    outputs: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.inputs.values()))

    def node(self) -> FusedNode:
        return FusedNode(self.fusion, self.fusion, tuple(self.inputs), self.attributes, (self.dtype,) * self.outputs)

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(shape, self.dtype) for shape in self.inputs.values())

    def plan(self) -> Plan:
        return importlib.import_module(f"onnxfuse.kernels.{self.fusion}").plan(self.node(), self.specs(), gpu(0))

    def tensors(self) -> list[torch.Tensor]:
        return [torch.randn(shape, device="cuda", dtype=DTYPES[self.dtype]) for shape in self.inputs.values()]


def add_norm(norm: Callable[..., Any]) -> Callable[..., Any]:
    def formula(x: Any, residual: Any, *weights: Any) -> tuple[Any, Any]:
        total = x + residual
        return norm(total, *weights), total

    return formula


def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], scale, bias, 1e-5)


def rms_norm(x: Any, scale: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * scale


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    heads = x.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
    first, second = heads.chunk(2, -1)
    return (heads * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).contiguous()


def row_cases(x: tuple[int, ...], dtype: str = "float16") -> Iterator[Case]:
    d, epsilon = x[-1:], {"epsilon": 1e-5}
    four = {"x": x, "residual": x, "scale": d, "bias": d}
    three = {"x": x, "residual": x, "scale": d}
    yield Case("layer_norm", {"x": x, "scale": d, "bias": d}, layer_norm, dtype, 1, epsilon)
    yield Case("rms_norm", {"x": x, "scale": d}, rms_norm, dtype, 1, epsilon)
    yield Case("add_layer_norm", four, add_norm(layer_norm), dtype, 2, epsilon)
    yield Case("add_rms_norm", three, add_norm(rms_norm), dtype, 2, epsilon)
    yield Case("softmax", {"x": x}, lambda x: F.softmax(x, -1), dtype)
    gelu, silu, none = ({"activation": name} for name in ("gelu", "silu", "none"))
    yield Case("bias_activation", {"x": x, "bias": d}, lambda x, b: F.gelu(x + b), dtype, 1, gelu)
    yield Case("gated_activation", {"gate": x, "up": x}, lambda g, u: F.silu(g) * u, dtype, 1, silu)
    yield Case("activation", {"x": x}, lambda x: F.silu(x), dtype, 1, silu)
    yield Case("activation", {"x": x}, lambda x: x.clone(), dtype, 1, none)  # what a plain kernel reaches


def other_cases() -> Iterator[Case]:
    for x in (2, 320, 64, 64), (8, 128, 256, 256), (2, 1280, 16, 16):
        c, options = x[1:2], {"groups": 32, "epsilon": 1e-5, "activation": "silu"}
        inputs = {"x": x, "scale": c, "bias": c}
        yield Case("group_norm", inputs, lambda x, s, b: F.silu(F.group_norm(x, 32, s, b, 1e-5)), "float16", 1, options)
    for x, size in ((1, 2048, 4096), 128), ((8, 4096, 4096), 128), ((1, 128, 2048), 64):
        table = (1, x[1], size)
        yield Case("rotary_embedding", {"x": x, "cos": table, "sin": table}, rotary, "float16", 1, {"layout": "packed"})


def cases(quick: bool) -> Iterator[Case]:
    for shape in [LARGE[0], SMALL[0], SMALL[2]] if quick else [*LARGE, *SMALL]:
        yield from row_cases(shape)
    yield from other_cases()
    for shape in [] if quick else LARGE:
        yield from row_cases(shape, "bfloat16")
    if not quick:
        yield from row_cases(LARGE[0], "float32")


# ---- timing ------------------------------------------------------------------------------------------------------


def pointers(step: Launch, read: list[torch.Tensor], written: list[torch.Tensor]) -> tuple[Any, ...]:
    numbers = {"int32": np.int32, "int64": np.int64, "float32": np.float32}
    places = {"input": read, "output": written}
    return tuple(
        np.uint64(places[a.kind][a.index].data_ptr() + a.offset) if isinstance(a, Pointer) else numbers[a.type](a.value)
        for a in step.arguments
    )


def launcher(step: Launch, read: list[torch.Tensor], written: list[torch.Tensor]) -> Callable[[], None]:
    """Launches on PyTorch's current stream."""
    function, arguments = compile_kernel(step.kernel, 0), pointers(step, read, written)

    def launch() -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            function.keep(step.grid, step.block, arguments, shared_mem=step.shared)

    return launch


def per_launch(calls: list[Callable[[], Any]], bytes_each: int) -> tuple[float, float]:
    """Median and spread (the middle half's) of the microseconds per call, in a CUDA graph that goes round `calls`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:3]:
            call()
    torch.cuda.synchronize()
    rounds = max(1, math.ceil(GRAPH_US / (len(calls) * (2 + bytes_each / 4e6))))
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            kept = [call() for call in calls]
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / (rounds * len(calls)))
    del kept
    quarters = statistics.quantiles(times[2:], n=4)
    return statistics.median(times[2:]), quarters[2] - quarters[0]


def sets_of(case: Case, plan: Plan) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], int]:
    """Inputs and outputs, as many of them as exceed L2 four times; bytes of one set."""
    first = case.tensors()
    written = [torch.full(spec.shape, math.nan, device="cuda", dtype=DTYPES[spec.dtype]) for spec in plan.outputs]
    moved = sum(t.numel() * t.element_size() for t in (*first, *written))
    count = min(MOST_SETS, max(2, math.ceil(4 * L2_BYTES / moved)))
    read = [first] + [[t.clone() for t in first] for _ in range(count - 1)]
    return read, [written] + [[torch.empty_like(t) for t in written] for _ in range(count - 1)], moved


def measure(case: Case, inductor: bool) -> dict[str, Any]:
    plan = case.plan()
    (step,) = plan.steps
    read, written, moved = sets_of(case, plan)
    calls = [launcher(step, *pair) for pair in zip(read, written, strict=True)]
    row: dict[str, Any] = {
        "fusion": case.fusion, "shape": case.shape, "dtype": case.dtype, "attributes": case.attributes, "bytes": moved,
        "sets": len(calls), "grid": step.grid, "block": step.block, "cluster": step.cluster,
        "defines": dict(step.kernel.defines),
    }  # fmt: skip
    row["us"], row["us_spread"] = per_launch(calls, moved)
    row["error"] = difference(case, read[0], written[0])
    row["copy_us"], _ = per_launch(copies(moved, len(calls)), moved)
    if inductor:
        torch.compiler.reset()
        compiled = torch.compile(case.formula, dynamic=False)
        row["inductor_us"], _ = per_launch([lambda r=r: compiled(*r) for r in read], moved)
    row["tb_per_s"], row["share_of_copy"] = moved / row["us"] / 1e6, row["copy_us"] / row["us"]
    return row


def copies(moved: int, count: int) -> list[Callable[[], Any]]:
    """Device copies that read and write `moved` bytes together."""
    half = max(16, moved // 2)
    pairs = [torch.empty((2, half), device="cuda", dtype=torch.uint8).random_(0, 255) for _ in range(count)]

    def copy(pair: torch.Tensor) -> None:
        pair[1].copy_(pair[0])

    return [functools.partial(copy, pair) for pair in pairs]


def precompile(kernels: Iterable[Kernel]) -> None:
    """Fill CuPy's disk cache with many compilers at once; what does not compile says so when it is launched."""

    def compile_one(kernel: Kernel) -> None:
        with contextlib.suppress(Exception):
            cupy.RawKernel(source_text(kernel.source), kernel.entry, options=options(kernel)).compile()

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, kernels))


def difference(case: Case, read: list[torch.Tensor], written: list[torch.Tensor]) -> float:
    """The largest of ||y - reference|| / ||reference|| against the formula in float32 (float64 for float32)."""
    wide = torch.float64 if case.dtype == "float32" else torch.float32
    results = case.formula(*(t.to(wide) for t in read))
    pairs = zip(written, results if isinstance(results, tuple) else (results,), strict=True)
    return max(float((y.double() - r.double()).norm() / r.double().norm()) for y, r in pairs)


# ---- output ------------------------------------------------------------------------------------------------------


def line(row: dict[str, Any]) -> str:
    shape = "x".join(map(str, row["shape"]))
    inductor = f"{row['inductor_us']:9.2f}" if "inductor_us" in row else "        -"
    activation = row["attributes"].get("activation", "")
    return (
        f"{row['fusion']:17}{activation:6}{shape:16}{row['dtype']:9}{row['us']:9.2f}{row['us_spread']:7.2f}"
        f"{row['copy_us']:9.2f}{inductor}{row['tb_per_s']:6.2f}{100 * row['share_of_copy']:6.0f}%  {row['error']:.1e}"
    )


def versions() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(), "torch": torch.__version__,
        "cupy": cupy.__version__, "cuda": str(torch.version.cuda),
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quick", action="store_true", help="three shapes, fp16")
    parser.add_argument("--only", default="", help="fusions, separated by commas")
    parser.add_argument("--no-inductor", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = set(filter(None, given.only.split(",")))
    chosen = [case for case in cases(given.quick) if not wanted or case.fusion in wanted]
    precompile(step.kernel for case in chosen for step in case.plan().steps)
    rows: list[dict[str, Any]] = []
    print(f"{'fusion':23}{'shape':16}{'dtype':9}{'us':>9}{'+-':>7}{'copy us':>9}{'inductor':>9}  TB/s  copy  error")
    for case in chosen:
        try:
            rows.append(measure(case, not given.no_inductor))
            print(line(rows[-1]), flush=True)
        except Exception:  # the others are still worth measuring
            rows.append({"fusion": case.fusion, "shape": case.shape, "failed": traceback.format_exc()})
            print(f"{case.fusion} {case.shape}: {rows[-1]['failed'].strip().splitlines()[-1]}", flush=True)
        torch.cuda.empty_cache()
        text = json.dumps({"versions": versions(), "rows": rows}, indent=1, default=str)
        Path(given.out, "kernels.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
