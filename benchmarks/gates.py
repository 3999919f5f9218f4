"""Time gates of channels: every tile that multiplies by a gate in front of a product, and what computes a gate.

    python benchmarks/gates.py --out results

The blocks are those of EfficientNet-B0 and MobileNetV3 with 32 images, and larger ones, in float16.  A time is the cost
of one more launch, or sequence of launches, in a CUDA graph; weights differ from one to the next, and x is where the
node before left it.  "plain" is the pointwise convolution of a gated image, "two" a channel_scale and that convolution,
and "three" the mean and the two products that compute a gate.  An error is the largest difference from PyTorch in
float32, relative to the largest value.
"""

from __future__ import annotations

import command_lines

if __name__ == "__main__":
    GIVEN = command_lines.parser(__doc__).parse_args()  # before the imports: --help needs neither PyTorch nor a GPU

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from compiling import compile_all
from replays import Calls, captured, in_turns
from rows import Rows

from onnxfuse.kernels.conv import gate as conv_gate
from onnxfuse.kernels.conv import host as conv_host
from onnxfuse.kernels.conv import matrix
from onnxfuse.kernels.conv.operands import conv_of
from onnxfuse.kernels.gemm import hopper, mma
from onnxfuse.kernels.squeeze_excite import host as squeeze_host
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import FusedNode, Launch, Plan, TensorSpec

IMAGES, SETS, REPLAYS = 32, 16, 5
MAX_WGMMA = 5  # configs of wgmma for each block
SHARED = ("x", "gate", "residual")  # operands that are where they were; weights move


@dataclass(frozen=True)
class Block:
    """An image of side x side pixels and c channels, whose gate is squeezed, and a convolution to m channels."""

    side: int
    c: int
    m: int
    squeezed: int
    residual: bool = False

    @property
    def name(self) -> str:
        return f"{self.side}x{self.side} {self.c}-{self.m}{' with a residual' * self.residual}, to {self.squeezed}"

    def product_shapes(self) -> dict[str, tuple[int, ...]]:
        image = (IMAGES, self.side, self.side)
        shapes: dict[str, tuple[int, ...]] = {
            "x": (*image, self.c), "w": (self.m, 1, 1, self.c), "bias": (self.m,),
            "residual": (*image, self.m), "gate": (IMAGES, 1, 1, self.c),
        }  # fmt: skip
        return {name: shape for name, shape in shapes.items() if name != "residual" or self.residual}

    def gate_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "x": (IMAGES, self.side, self.side, self.c), "w": (self.squeezed, 1, 1, self.c), "bias": (self.squeezed,),
            "w_2": (self.c, 1, 1, self.squeezed), "bias_2": (self.c,),
        }  # fmt: skip


BLOCKS = (
    Block(112, 32, 16, 8), Block(56, 96, 24, 4), Block(56, 144, 24, 6, True), Block(28, 144, 40, 6),
    Block(28, 240, 40, 10, True), Block(14, 240, 80, 10), Block(14, 480, 80, 20, True), Block(14, 480, 112, 20),
    Block(14, 672, 112, 28, True), Block(7, 672, 192, 28), Block(7, 1152, 192, 48, True), Block(7, 1152, 320, 48),
    Block(28, 72, 40, 24), Block(28, 120, 40, 32, True), Block(14, 480, 112, 120), Block(14, 672, 112, 168, True),
    Block(7, 672, 160, 168), Block(7, 960, 160, 240, True), Block(28, 224, 224, 56), Block(28, 448, 448, 112),
    Block(14, 896, 896, 224),
)  # fmt: skip


def specs(shapes: Mapping[str, tuple[int, ...]]) -> list[TensorSpec]:
    return [TensorSpec(shape, "float16", constant=name not in SHARED) for name, shape in shapes.items()]


def product_plans(block: Block) -> dict[str, Plan]:
    """Return the plan that comes first, the two launches, the convolution alone, and every tile with the gate."""
    shapes, device = block.product_shapes(), gpu(0)
    plain = {name: shape for name, shape in shapes.items() if name != "gate"}
    attributes: dict[str, Any] = {"layout": "nhwc", "activation": "none", "residual_position": "before"}
    node = FusedNode("conv_bias_activation", block.name, tuple(shapes), attributes, ("float16",))
    without = FusedNode("conv_bias_activation", block.name, tuple(plain), attributes, ("float16",))
    conv, y = conv_of(node, specs(shapes), device)
    gemm = matrix.as_gemm(conv)
    ways = [mma.implementation(gemm, config, device) for config in mma.GATE_CONFIGS]
    fitting = [config for config in hopper.CONFIGS if hopper.fits(gemm, config, device)]
    fitting.sort(key=lambda config: hopper.cycles(gemm, config, device))
    ways += [hopper.implementation(gemm, config, device) for config in fitting[:MAX_WGMMA]]
    return {
        "first": conv_host.candidates(node, specs(shapes), device)[0],
        "two": conv_gate.in_two_steps(node, specs(shapes), device, conv_host.candidates)[0],
        "plain": conv_host.candidates(without, specs(plain), device)[0],
        **{way.name: Plan((y,), way.steps, way.scratch) for way in ways},
    }


def gate_plans(block: Block) -> dict[str, Plan]:
    """Return the plan that comes first of a gate, and those of one launch and of three."""
    shapes, device = block.gate_shapes(), gpu(0)
    attributes: dict[str, Any] = {"layout": "nhwc", "activation": "silu", "activation_2": "sigmoid"}
    node = FusedNode("squeeze_excite", block.name, tuple(shapes), attributes, ("float16",))
    found = squeeze_host.candidates(node, specs(shapes), device)
    names = {1: "one", 3: "three"}
    return {"first": found[0], **{names.get(len(plan.steps), "more"): plan for plan in found}}


def calls_of(plan: Plan, sets: list[list[torch.Tensor]], out: torch.Tensor) -> Calls:
    ready = ready_plan(plan, [TensorSpec(tuple(each.shape), "float16") for each in sets[0]])
    scratch = torch.empty(max(1, ready.scratch_bytes), dtype=torch.uint8, device="cuda")

    def call(inputs: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        ready.run([each.data_ptr() for each in inputs], [out.data_ptr()], scratch.data_ptr(), stream)

    return [functools.partial(call, each) for each in sets]


def product(given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    y = F.linear((given["x"] * given["gate"]).float(), given["w"].float().flatten(1), given["bias"].float())
    return y + given["residual"].float() if "residual" in given else y


def gate(given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    wide = {name: tensor.float() for name, tensor in given.items()}
    squeezed = F.silu(F.linear(wide["x"].mean((1, 2)), wide["w"].flatten(1), wide["bias"]))
    return torch.sigmoid(F.linear(squeezed, wide["w_2"].flatten(1), wide["bias_2"]))


def measured(plans: Mapping[str, Plan], shapes: Mapping[str, tuple[int, ...]], is_product: bool) -> dict[str, Any]:
    """Return the microseconds and the errors of plans."""
    tensors = {name: torch.randn(shape, device="cuda") for name, shape in shapes.items()}
    for name in ("w", "w_2"):
        if name in tensors:
            tensors[name] /= math.sqrt(tensors[name].shape[-1])
    given = {name: tensor.half() for name, tensor in tensors.items()}
    expected = (product if is_product else gate)(given)
    out, graphs, errors = torch.empty(expected.shape, dtype=torch.float16, device="cuda"), {}, {}
    for name, plan in plans.items():
        operands = [each for each in given if name != "plain" or each != "gate"]
        sets = [[given[each] if each in SHARED else given[each].clone() for each in operands] for _ in range(SETS)]
        out.fill_(math.nan)
        torch.cuda.synchronize()
        calls = calls_of(plan, sets, out)
        calls[0]()
        torch.cuda.synchronize()
        if name != "plain":
            errors[name] = float((out.float() - expected).abs().max() / expected.abs().max())
        graphs[name] = captured(calls)
    return {"us": in_turns(graphs, REPLAYS), "errors": errors}


def line(name: str, found: Mapping[str, Any]) -> str:
    times = sorted((us, way) for way, us in found["us"].items())
    return f"{name:44}{'; '.join(f'{way} {us:.2f}' for us, way in times)}  error {max(found['errors'].values()):.1e}"


def main() -> None:
    plans = {block: (product_plans(block), gate_plans(block)) for block in BLOCKS}
    every = (plan for pair in plans.values() for each in pair for plan in each.values())
    compile_all(step.kernel for plan in every for step in plan.steps if isinstance(step, Launch))
    rows = Rows(GIVEN.out / "gates.json", ("block", "what"))
    for block, (products, gates) in plans.items():
        for what, found in (
            ("product", measured(products, block.product_shapes(), is_product=True)),
            ("gate", measured(gates, block.gate_shapes(), is_product=False)),
        ):
            rows.put({"block": block.name, "what": what, **found})
            print(line(f"{block.name} {what}", found), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
