"""The plans of quantized products and convolutions: kernels multiply values of 8 bits, or dequantized numbers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from onnxfuse.algebra.filter_edges import row_count
from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.kernels.conv import depthwise_sliding, stem
from onnxfuse.kernels.conv import host as conv_host
from onnxfuse.kernels.conv.matrix import as_gemm
from onnxfuse.kernels.conv.operands import AUTO_PADS, conv_of
from onnxfuse.kernels.conv.problem import Conv, of_fewer_axes
from onnxfuse.kernels.epilogue_node import REGION, also_joined, is_joined, moved
from onnxfuse.kernels.epilogue_program import joined_plans
from onnxfuse.kernels.gemm.implementations import implementations_if_any
from onnxfuse.kernels.gemm.operands import gemm_of
from onnxfuse.kernels.gemm.problem import EightBits, Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.quantized import batched, columns, hopper
from onnxfuse.kernels.region import host as region
from onnxfuse.kernels.tensors import (
    DEQUANTIZED,
    EIGHT_BITS,
    INTEGERS,
    ITEM_BYTES,
    STORAGE,
    element_count,
    operand_spec,
    required_spec,
    unsupported_bfloat16,
    unsupported_choice,
)
from onnxfuse.runtime.plan import Device, FusedNode, Plan, Pointer, Step, TensorSpec
from onnxfuse.runtime.symint import first_plan_suffices, for_later_plans

CONV: Final = "quantized_conv"
MATMUL: Final = "quantized_matmul"
MAX_IMPLEMENTATIONS: Final = 6


@dataclass(frozen=True)
class Numbers:
    """The launches that dequantize an operand to scratch memory, and the bytes of the result."""

    steps: tuple[Step, ...]
    bytes: int


@also_joined
def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    if node.fusion == MATMUL:
        return batched.unsupported(node, input_dtypes, device)
    given, dtype = dict(zip(node.operands, input_dtypes, strict=True)), node.output_dtypes[0]
    if dtype not in STORAGE:
        return f"{node.fusion}: the output is {dtype}; the kernel takes {', '.join(STORAGE)}"
    if refused := unsupported_bfloat16(node, "the output", dtype, device):
        return refused
    for name, found in given.items():
        of = next((each for each in ("x", "w") if name in (each, f"{each}_zero_point")), None)
        required = "int32" if name == "w_sums" else dtype
        if of is None and found != required:
            return f"{node.fusion}: {name} is {found}; required {required}{', as the output' * (required == dtype)}"
        taken = (*EIGHT_BITS, *DEQUANTIZED) if name == of else (*INTEGERS, *DEQUANTIZED)
        if of is not None and (found not in taken or found != given[of]):
            listed = ", ".join(taken)
            return f"{node.fusion}: {name} is {found}; required {listed}, and zero points as what they belong to"
    kinds = {given[name] if given[name].startswith("float8") else "integers" for name in "xw"}
    if len(kinds) > 1:
        return f"{node.fusion}: x is {given['x']} and w is {given['w']}; required integers, or one dtype of float8"
    if node.fusion == CONV:
        return (
            unsupported_choice(node, "layout", ("nhwc",), "nchw")
            or unsupported_choice(node, "x_layout", ("nhwc", "nchw"), "nhwc")
            or unsupported_choice(node, "auto_pad", AUTO_PADS, "NOTSET")
        )
    return unsupported_choice(node, "weight_layout", ("kn", "nk"), "kn")


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if node.fusion == MATMUL:
        return batched.candidates(node, inputs, device)

    @functools.cache
    def numbers() -> list[Numbers]:
        return [_numbers(node, inputs, name, device) for name in ("x", "w")]

    def ways(problem: Gemm | Conv, device: Device) -> list[Implementation]:
        return implementations(problem, numbers, device)

    def of_product(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        problem, y = problem_of(node, inputs, device)
        if not element_count(y):
            return [Plan((y,), ())]
        return [Plan((y,), each.steps, each.scratch) for each in ways(problem, device)]

    if is_joined(node):
        return joined_plans(node, inputs, device, problem_of, ways, of_product)
    return of_product(node, inputs, device)


def problem_of(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> tuple[Gemm | Conv, TensorSpec]:
    """Return the product or the convolution of a node, and its output.  Raises ValueError if shapes do not fit."""
    typed = [replace(spec, dtype=node.output_dtypes[0]) for spec in inputs]  # the inputs as if dequantized
    problem, y = conv_of(node, typed, device) if node.fusion == CONV else gemm_of(node, typed, device)
    x, w = required_spec(node, inputs, "x"), required_spec(node, inputs, "w")
    count, scales = y.shape[-1], element_count(required_spec(node, inputs, "w_scale"))
    rows = row_count(hopper.taps_beyond(problem)) if isinstance(problem, Conv) else 1
    counts = {
        "x_scale": (1,), "x_zero_point": (1,), "w_scale": (1, count), "w_zero_point": (scales,),
        "w_sums": (rows * count,),
    }  # fmt: skip
    for name, allowed in counts.items():
        spec = operand_spec(node, inputs, name)
        if spec is not None and element_count(spec) not in allowed:
            raise ValueError(
                f"{node.label}: {name} has shape {list(spec.shape)}; "
                f"required {' or '.join(map(str, dict.fromkeys(allowed)))} elements"
            )
    pointers = {name: Pointer("input", i) for i, name in enumerate(node.operands)}
    x_zero, w_sums = pointers.get("x_zero_point"), pointers.get("w_sums")
    is_symmetric = w.dtype in ("int8", FLOAT8) and "w_zero_point" not in pointers and x.dtype in EIGHT_BITS
    x_scale, w_scale = pointers["x_scale"], pointers["w_scale"]
    values = EightBits(x.dtype, x_scale, w_scale, scales, x_zero, w_sums, is_symmetric)
    return replace(problem, eight_bits=values), y


def _numbers(node: FusedNode, inputs: Sequence[TensorSpec], name: str, device: Device) -> Numbers:
    """Return the launches that dequantize an operand, x or w, to scratch memory."""
    indices = [
        index for each in (name, f"{name}_scale", f"{name}_zero_point") if (index := node.input_index(each)) is not None
    ]
    value, scale, *zero = (inputs[i] for i in indices)
    is_first = node.fusion == CONV or node.text("weight_layout", "kn") == "nk"  # y's columns are axis 0 of w
    count = element_count(scale)
    of_scale = () if count == 1 else (count, *[1] * (len(value.shape) - 1)) if is_first else (count,)
    specs = [value, *(replace(each, shape=of_scale) for each in (scale, *zero))]
    operands = [f"x{i}" for i in range(len(specs))]
    ops: list[list[Any]] = [] if zero else [["Constant", [], ["v1"], {"value": 0}]]
    ops.append(["DequantizeLinear", [*operands, "v1"][:3], ["v0"], {}])
    dtypes = {**dict(zip(operands, (each.dtype for each in specs), strict=True)), "v0": scale.dtype, "v1": value.dtype}
    program = json.dumps({"ops": ops, "outputs": ["v0"], "dtypes": dtypes}, separators=(",", ":"))
    numbers = FusedNode(REGION, node.name, tuple(operands), {"program": program}, (scale.dtype,))
    (plan,) = region.candidates(numbers, specs, device)
    assert not plan.scratch  # a region of elementwise operators needs none

    def of_node(pointer: Pointer) -> Pointer:
        if pointer.kind == "input":
            return replace(pointer, index=indices[pointer.index])
        return replace(pointer, kind="scratch", index=int(name == "w"))

    steps = tuple(moved(step, of_node) for step in plan.steps)
    return Numbers(steps, element_count(value) * ITEM_BYTES[scale.dtype])


def implementations(
    problem: Gemm | Conv, numbers: Callable[[], Sequence[Numbers]], device: Device
) -> list[Implementation]:
    """Return the implementations for a y that is not empty: on 8-bit values first, then on dequantized x and w."""
    values = _of_values(problem, device)
    if values and first_plan_suffices():
        return values
    with for_later_plans(problem.rows if values else 0):
        others = _of_numbers(problem, numbers(), device)
    if not values and not others and problem.program is None:
        raise ValueError(f"no kernel takes {problem} on {device.name}")
    return [*values, *others][:MAX_IMPLEMENTATIONS]


def _of_values(problem: Gemm | Conv, device: Device) -> list[Implementation]:
    if isinstance(problem, Gemm):
        return hopper.products(problem, device)
    if problem.pointwise:
        return hopper.products(as_gemm(problem), device)
    kinds = (
        hopper.convolutions, stem.implementations, depthwise_sliding.implementations, columns.implementations,
    )  # fmt: skip
    return next((found for kind in kinds if (found := kind(problem, device))), [])


def _of_numbers(problem: Gemm | Conv, numbers: Sequence[Numbers], device: Device) -> list[Implementation]:
    """Return the implementations that first dequantize x and w to scratch memory."""
    plain = replace(problem, eight_bits=None, weights_constant=False)
    written = {plain.x: Pointer("scratch", 0), plain.w: Pointer("scratch", 1)}
    if isinstance(plain, Gemm):
        found = implementations_if_any(plain, device)
    else:
        of_plain = conv_host.of_programs if plain.program else conv_host.implementations
        found = of_plain(of_fewer_axes(plain), device)

    def after_numbers(pointer: Pointer) -> Pointer:
        if pointer.kind == "scratch":
            return replace(pointer, index=pointer.index + len(written))
        number = written.get(replace(pointer, offset=0))
        return replace(number, offset=pointer.offset) if number else pointer

    before = tuple(step for each in numbers for step in each.steps)
    return [
        Implementation(
            f"of numbers, {each.name}",
            (*before, *(moved(step, after_numbers) for step in each.steps)),
            (*(each.bytes for each in numbers), *each.scratch),
        )
        for each in found
    ]
