"""Time every plan of fused convolutions beside cuDNN's bare convolution and its fused ones, channels-last.

    python benchmarks/conv.py --out results [--only '64-64 56,depthwise'] [--dtypes float16] [--activation relu]
        [--quick] [--add results/conv.json]

A time is the cost of one more convolution in a CUDA graph.  As in a model each has weights and biases of its own, while
x and the residual are where the convolution before left them.  What is compared runs in turns, so that all find the GPU
as warm.  "cudnn" is PyTorch's convolution alone, in the memory format channels_last, by the engine that cuDNN's own
measurements find to be the fastest; "fused" is PyTorch's operator with bias, ReLU and the residual, which cuDNN
computes with the convolution.  "copy" is a device copy that reads and writes as many bytes as the fused node must.  An
error is the largest difference from PyTorch in float32 (float64 for float32), relative to the largest value.
"""

from __future__ import annotations

import command_lines

if __name__ == "__main__":
    GIVEN = command_lines.conv(__doc__)  # before the imports, so that --help needs neither PyTorch nor a GPU

import argparse
import functools
import math
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from compiling import compile_all
from gemm import L2_BYTES, copy_bytes_per_us, copy_us
from plan_names import names_of
from replays import REPLAYS, Calls, captured, in_turns
from rows import Rows

from onnxfuse.errors import KernelError
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import FusedNode, Kernel, Launch, Plan, TensorSpec

FUSION, TRANSPOSED_FUSION = "conv_bias_activation", "conv_transpose_bias_activation"
QUICK_REPLAYS = 3
MAX_SETS = 64  # of weights and biases
MAX_CHANNELS_OF_STEMS = 4  # such an input is read channels first, as the model has it
LARGEST_ERROR = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-3}  # of float32 with TF32
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """A convolution of rows, square images or cubes, padded by half of its filter, which is as long on each axis.

    Of a transposed one, so much is cut off that y is as large as x times the stride.
    """

    batch: int
    c: int
    m: int
    size: int
    taps: int
    stride: int = 1
    group: int = 1
    transposed: bool = False
    axes: int = 2
    dilation: int = 1

    @property
    def depthwise(self) -> bool:
        return self.group == self.c

    @property
    def stem(self) -> bool:
        return self.c <= MAX_CHANNELS_OF_STEMS

    @property
    def kind(self) -> str:
        if self.transposed:
            return "transposed"
        if self.axes != 2:
            return f"{self.axes}-D"
        return "depthwise" if self.depthwise else "grouped" if self.group > 1 else "stem" if self.stem else "dense"

    @property
    def name(self) -> str:
        channels = f"{self.c} {self.size} depthwise" if self.depthwise else f"{self.c}-{self.m} {self.size}"
        groups = f" {self.group} groups" if self.kind == "grouped" else ""
        taps = "x".join([str(self.taps)] * self.axes) + f"/{self.stride}" * (self.stride > 1)
        taps += f" dilated {self.dilation}" * (self.dilation > 1)
        return f"b{self.batch} {channels} {taps}{groups}{' transposed' * self.transposed}"

    @property
    def pad(self) -> int:
        return (self.taps - self.stride) // 2 if self.transposed else self.taps // 2 * self.dilation

    @property
    def out_size(self) -> int:
        if self.transposed:
            return (self.size - 1) * self.stride + self.taps - 2 * self.pad
        return (self.size + 2 * self.pad - (self.taps - 1) * self.dilation - 1) // self.stride + 1

    @property
    def flops(self) -> int:
        size = self.size if self.transposed else self.out_size  # of the image whose pixels all taps meet
        return 2 * self.batch * size**self.axes * self.m * self.taps**self.axes * (self.c // self.group)


SHAPES = (
    Shape(32, 3, 64, 224, 7, 2),
    Shape(32, 64, 64, 56, 3),
    Shape(32, 256, 64, 56, 1),
    Shape(32, 64, 256, 56, 1),
    Shape(32, 128, 128, 56, 3, 2),
    Shape(32, 128, 128, 28, 3),
    Shape(32, 512, 128, 28, 1),
    Shape(32, 256, 256, 14, 3),
    Shape(32, 1024, 256, 14, 1),
    Shape(32, 1024, 2048, 14, 1, 2),
    Shape(32, 512, 512, 7, 3),
    Shape(1, 256, 256, 14, 3),
    Shape(1, 64, 64, 56, 3),
    Shape(2, 320, 320, 64, 3),
    Shape(2, 640, 640, 32, 3),
    Shape(2, 1280, 1280, 16, 3),
    Shape(2, 1280, 1280, 8, 3),
    Shape(1, 128, 128, 512, 3),
    Shape(8, 3, 32, 640, 3, 2),
    Shape(8, 64, 64, 80, 3),
    Shape(32, 96, 96, 112, 3, 2, 96),
    Shape(32, 240, 240, 28, 5, 1, 240),
    Shape(32, 480, 480, 14, 3, 1, 480),
    Shape(16, 96, 96, 56, 7, 1, 96),
    Shape(16, 384, 384, 14, 7, 1, 384),
    Shape(32, 256, 256, 28, 3, 1, 32),
    Shape(8, 256, 128, 32, 2, 2, transposed=True),
    Shape(8, 64, 64, 160, 2, 2, transposed=True),
    Shape(8, 64, 1, 320, 2, 2, transposed=True),
    Shape(32, 512, 256, 16, 4, 2, transposed=True),
    Shape(8, 64, 64, 128, 4, 2, 64, transposed=True),
    Shape(8, 80, 768, 3000, 3, axes=1),  # Whisper small's first two
    Shape(8, 768, 768, 3000, 3, 2, axes=1),
    Shape(1, 512, 512, 32000, 3, 2, axes=1),  # wav2vec 2.0's second, of 10 s
    Shape(1, 256, 256, 1376, 7, axes=1, dilation=3),  # HiFi-GAN's blocks, 2 s
    Shape(1, 128, 128, 11008, 11, axes=1, dilation=5),
    Shape(1, 32, 32, 44032, 11, axes=1, dilation=5),
    Shape(2, 32, 32, 128, 3, axes=3),  # a UNet of volumes, in patches of 128x128x128
    Shape(2, 64, 64, 64, 3, axes=3),
    Shape(2, 128, 256, 32, 3, 2, axes=3),
    Shape(1, 512, 512, 16, 3, axes=3),
)


@dataclass(frozen=True)
class Case:
    """A fused node: a shape, a dtype, an activation, and whether a residual is added in front of it."""

    shape: Shape
    dtype: str
    activation: str
    residual: bool

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.epilogue}"

    @property
    def epilogue(self) -> str:
        return "+".join(["bias"] + ["residual"] * self.residual + [self.activation] * (self.activation != "none"))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The operands' shapes, as the node has them."""
        s = self.shape
        sizes, taps = (s.size,) * s.axes, (s.taps,) * s.axes
        x = (s.batch, s.c, *sizes) if s.stem else (s.batch, *sizes, s.c)
        w = (*taps, 1, s.m) if s.depthwise else (s.m, *taps, s.c // s.group)
        if s.transposed and not s.depthwise:
            w = (s.c, *taps, s.m // s.group)
        every = {"x": x, "w": w, "bias": (s.m,)}
        return every | ({"residual": self.y_shape} if self.residual else {})

    @property
    def y_shape(self) -> tuple[int, ...]:
        return (self.shape.batch, *[self.shape.out_size] * self.shape.axes, self.shape.m)

    @property
    def fusion(self) -> str:
        return TRANSPOSED_FUSION if self.shape.transposed else FUSION

    def node(self) -> FusedNode:
        s = self.shape
        layouts = ("ihwo", "hwoi") if s.transposed else ("ohwi", "hwio")
        attributes: dict[str, Any] = {
            "layout": "nhwc", "w_layout": layouts[s.depthwise], "kernel_shape": [s.taps] * s.axes,
            "strides": [s.stride] * s.axes, "dilations": [s.dilation] * s.axes, "pads": [s.pad] * (2 * s.axes),
            "group": s.group,
            "activation": self.activation, "residual_position": "before",
        }  # fmt: skip
        attributes |= {"x_layout": "nchw"} if s.stem else {}
        return FusedNode(self.fusion, self.name, tuple(self.shapes()), attributes, (self.dtype,))

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(shape, self.dtype, constant=name in ("w", "bias")) for name, shape in self.shapes().items()]

    def plans(self) -> list[Plan]:
        """Return the candidates that a session would time.  Raises ValueError if the host refuses the node."""
        host = find_host(self.fusion)
        if host is None:
            raise ValueError(f"{self.fusion} has no host")
        if why := host.supports(self.node(), [spec.dtype for spec in self.specs()], gpu(0)):
            raise ValueError(why)
        return host.candidates(self.node(), self.specs(), gpu(0))

    def tensors(self) -> dict[str, torch.Tensor]:
        s = self.shape
        made = {name: torch.randn(shape, device="cuda") for name, shape in self.shapes().items()}
        made["w"] /= math.sqrt(s.taps**s.axes * s.c // s.group)
        return {name: tensor.to(DTYPES[self.dtype]) for name, tensor in made.items()}

    def in_torch(self, sets: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Return operands as PyTorch takes them: axes N, C, H, W (M, C, H, W for weights), memory channels-last.

        Rows are images of one row, because PyTorch has no channels-last convolution of rows.
        """
        in_memory = torch.channels_last_3d if self.shape.axes == 3 else torch.channels_last

        def turned(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name == "bias":
                return tensor
            if name == "w" and self.shape.depthwise:
                tensor = tensor.permute(3, 2, 0, 1)
            elif name != "x" or not self.shape.stem:
                tensor = tensor.movedim(-1, 1)
            return (tensor if self.shape.axes > 1 else tensor.unsqueeze(2)).contiguous(memory_format=in_memory)

        shared = {name: turned(name, tensor) for name, tensor in sets[0].items() if name in ("x", "residual")}
        return [{n: shared[n] if n in shared else turned(n, t) for n, t in each.items()} for each in sets]


# ---- what is timed ------------------------------------------------------------------------------------------------


def operand_sets(case: Case) -> list[dict[str, torch.Tensor]]:
    """Operands that differ in where their weights and biases are."""
    first = case.tensors()
    moved = sum(first[name].numel() * first[name].element_size() for name in ("w", "bias"))
    count = min(MAX_SETS, max(2, math.ceil(4 * L2_BYTES / moved)))
    return [{n: t.clone() if n in ("w", "bias") else t for n, t in first.items()} for _ in range(count)]


def runs(plan: Plan, sets: Sequence[dict[str, torch.Tensor]], out: torch.Tensor) -> Calls:
    """Return calls that run a plan on each set of operands, on PyTorch's current stream."""
    first = sets[0].values()
    specs = [TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.data_ptr() % 16 == 0) for t in first]
    ready = ready_plan(plan, specs)
    scratch = torch.empty(max(1, ready.scratch_bytes), dtype=torch.uint8, device="cuda")

    def call(inputs: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        ready.run([t.data_ptr() for t in inputs], [out.data_ptr()], scratch.data_ptr(), stream)

    return [functools.partial(call, list(each.values())) for each in sets]


def geometry(s: Shape) -> tuple[list[int], list[int], list[int]]:
    """Return strides, pads and dilations as PyTorch takes them, of an image of one row where x is rows."""
    before, axes = ([1], [0], [1]) if s.axes == 1 else ([], [], []), s.axes
    return before[0] + [s.stride] * axes, before[1] + [s.pad] * axes, before[2] + [s.dilation] * axes


def bare(case: Case) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """Return PyTorch's convolution alone."""
    s = case.shape
    convolve = F.conv_transpose2d if s.transposed else F.conv3d if s.axes == 3 else F.conv2d
    steps, pads, dilations = geometry(s)
    options = {"stride": steps, "padding": pads, "dilation": dilations, "groups": s.group}
    return lambda given: convolve(given["x"], given["w"], **options)


def fused(case: Case) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """Return PyTorch's operator for convolution, bias, residual and ReLU in one call of cuDNN."""
    s, aten = case.shape, torch.ops.aten
    options = (*geometry(s), s.group)
    if case.residual:
        return lambda g: aten.cudnn_convolution_add_relu(g["x"], g["w"], g["residual"], 1.0, g["bias"], *options)
    return lambda g: aten.cudnn_convolution_relu(g["x"], g["w"], g["bias"], *options)


def reference(case: Case, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what the node should compute, in float32 without TF32 (in float64 for float32), shaped as y is."""
    wide = torch.float64 if case.dtype == "float32" else torch.float32
    exact = {name: tensor.to(wide) for name, tensor in given.items()}
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
        y = (bare(case)(exact).movedim(1, -1) + exact["bias"]).movedim(-1, 1)
    y = y + exact["residual"] if case.residual else y
    y = {"relu": F.relu, "silu": F.silu, "none": lambda y: y}[case.activation](y)
    return y.movedim(1, -1).reshape(case.y_shape)


def measure(case: Case, replays: int) -> dict[str, Any]:
    sets = operand_sets(case)
    in_torch = case.in_torch(sets)
    expected = reference(case, in_torch[0])
    graphs = {"cudnn": captured([functools.partial(bare(case), each) for each in in_torch])}
    row: dict[str, Any] = {"sets": len(sets), "flops": case.shape.flops, "candidates": {}}
    # Of depthwise ones that takes 0.1 to 0.7 ms, and there is none that is transposed.
    if case.activation == "relu" and not case.shape.depthwise and not case.shape.transposed:
        try:
            graphs["fused"] = captured([functools.partial(fused(case), each) for each in in_torch])
        except RuntimeError as error:  # cuDNN has no engine for it
            row["fused_failed"] = str(error).splitlines()[0]
    try:
        plans = case.plans()
    except ValueError as error:
        plans, row["refused"] = [], str(error)
    out = torch.empty(case.y_shape, device="cuda", dtype=DTYPES[case.dtype])
    names, errors = names_of(plans), dict[str, float]()
    for name, plan in zip(names, plans, strict=True):
        out.fill_(math.nan)
        torch.cuda.synchronize()  # the first call runs on another stream
        try:
            calls = runs(plan, sets, out)
            calls[0]()
            torch.cuda.synchronize()
            errors[name] = float((out.to(expected.dtype) - expected).abs().max() / expected.abs().max())
            graphs[name] = captured(calls)
        except Exception:  # the others are still worth measuring
            row.setdefault("failed_candidates", {})[name] = traceback.format_exc()
            torch.cuda.synchronize()  # raises where the GPU runs nothing any more
    times = in_turns(graphs, replays)
    row |= {f"{name}_us": times[name] for name in ("cudnn", "fused") if name in times}
    row["candidates"] = {name: times[name] for name in errors if name in times}
    if wrong := {name: error for name, error in errors.items() if not error <= LARGEST_ERROR[case.dtype]}:
        row["wrong_candidates"] = wrong
    moved = sum(t.numel() * t.element_size() for t in (*sets[0].values(), out))
    row |= {"bytes": moved, "copy_us": copy_us(moved)}
    if timed := {name: us for name, us in row["candidates"].items() if name not in wrong}:
        best, us = min(timed.items(), key=lambda each: each[1])
        row |= {"best": best, "us": us, "first_us": row["candidates"].get(names[0]), "error": errors[best]}
        row |= {"tflops": case.shape.flops / us / 1e6, "over_cudnn": us / row["cudnn_us"]}
        row["over_copy"] = us / row["copy_us"]
    return row


# ---- output ------------------------------------------------------------------------------------------------------


def kernels_of(cases: Sequence[Case]) -> Iterator[Kernel]:
    for case in cases:
        try:
            plans = case.plans()
        except ValueError:  # measuring the case records it
            continue
        yield from (step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch))


HEAD = f"{'':46}{'cudnn':>8}{'fused':>8}{'ours':>8}{'ratio':>7}{'copy':>8}{'TFLOP/s':>9}{'error':>10}  best"


def line(row: dict[str, Any]) -> str:
    numbers = [f"{row[name]:8.1f}" if name in row else f"{'-':>8}" for name in ("cudnn_us", "fused_us", "us")]
    ratio = f"{row['over_cudnn']:7.2f}" if "us" in row else f"{'-':>7}"
    bad, wrong = ([name.split(":")[0] for name in row.get(f"{kind}_candidates", ())] for kind in ("failed", "wrong"))
    notes = f" FAILED {','.join(bad)}" * bool(bad) + f" WRONG {','.join(wrong)}" * bool(wrong)
    rest = (
        f"{row['tflops']:9.0f}{row['error']:10.1e}  {row['best']}" if "us" in row else f"{'-':>9}{'-':>10}  no kernel"
    )
    name = f"{row['shape']} {row['epilogue']}" + f" {row['dtype']}" * (row["dtype"] != "float16")
    return f"{name:46}{''.join(numbers)}{ratio}{row['copy_us']:8.1f}{rest}{notes}"


def means(rows: Sequence[dict[str, Any]]) -> str:
    """Return the geometric means of the ratios to cuDNN's bare convolution, by kind of shape and epilogue."""
    lines = []
    for kind, epilogue in sorted({(row["kind"], row["epilogue"]) for row in rows}):
        ratios = [r["over_cudnn"] for r in rows if (r["kind"], r["epilogue"]) == (kind, epilogue) and "us" in r]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(f"{kind:10} {epilogue:20} geometric mean {mean:.3f}, worst {max(ratios):.2f} of {len(ratios)}")
    return "\n".join(lines)


def chosen(given: argparse.Namespace) -> Iterator[Case]:
    parts = [part.strip() for part in given.only.split(",") if part.strip()]
    for dtype in given.dtypes.split(","):
        for shape in SHAPES:
            if parts and not any(part in shape.name for part in parts):
                continue
            with_residual = shape.kind in ("dense", "1-D", "3-D")
            for residual in (False, True) if with_residual and not given.quick else (with_residual,):
                yield Case(shape, dtype, given.activation, residual)


def main(given: argparse.Namespace) -> None:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    cases = list(chosen(given))
    try:
        compile_all(kernels_of(cases))
    except KernelError:  # its case records it
        print("a kernel does not compile", flush=True)
    rows = Rows(
        given.out / "conv.json", ("shape", "dtype", "epilogue"), given.add, copy_tb_per_s=copy_bytes_per_us() / 1e6
    )
    print(HEAD, flush=True)
    done = []
    for case in cases:
        row: dict[str, Any] = {"shape": case.shape.name, "kind": case.shape.kind, "dtype": case.dtype}
        row["epilogue"] = case.epilogue
        try:
            row |= measure(case, QUICK_REPLAYS if given.quick else REPLAYS)
            done.append(row)
            print(line(row), flush=True)
        except Exception as error:  # the others are still worth measuring
            row["failed"] = traceback.format_exc()
            print(f"{case.name}: {row['failed'].strip().splitlines()[-1]}", flush=True)
            if "CUDA error" in str(error):
                rows.put(row)
                sys.exit("the GPU runs nothing any more in this process")
        rows.put(row)
        torch.cuda.empty_cache()
    print(means(done))


if __name__ == "__main__":
    main(GIVEN)
