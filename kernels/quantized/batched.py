"""The host side of quantized_matmul.cu: products of two computed tensors of 8 bits, for each head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.kernels.epilogue_node import in_two_steps, is_joined, joined
from onnxfuse.kernels.epilogue_program import EpilogueProgram, epilogue_program, with_program
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.tensors import (
    EIGHT_BITS,
    INTEGERS,
    STORAGE,
    Defines,
    int32,
    operand_pointer,
    required_pointer,
    required_spec,
    unsupported_choice,
)
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Struct, TensorSpec
from onnxfuse.runtime.symint import estimate, expect_equal, first_plan_suffices, for_later_plans

MIN_ARCH: Final = 80  # the first compute capability with mma m16n8k32 and cp.async
TILE_M: Final = 128
THREADS: Final = 256
STAGES: Final = {128: 2, 64: 3}  # stages of the ring by columns of a tile: they fill 48 KiB of shared memory
MAX_GRID_Y: Final = 65535  # largest batch times heads
MAX_LENGTH: Final = 2**31 // 255**2  # maximum number of products of integers whose sum always fits int32
LAYOUTS: Final = ("bshd", "bhsd")
INTEGERS_FIRST: Final = "integers_"  # before layouts of results that are quantized before their axes are rearranged
ALONE: Final = "alone"  # the layout of a result without heads
OUT_LAYOUTS: Final = ("packed", *LAYOUTS, ALONE, f"{INTEGERS_FIRST}packed", f"{INTEGERS_FIRST}bshd")
QUANTIZER: Final = ("y_scale", "y_zero_point")


@dataclass(frozen=True)
class Product:
    """The sizes and operands of a product: y is (batch, heads, m, n), and w has a head for `repeats` heads of x."""

    batch: int
    heads: int
    repeats: int
    m: int
    n: int
    k: int
    x: HeadTensor
    w: HeadTensor
    y: HeadTensor


def unsupported(node: FusedNode, dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this product on this device; None if one does."""
    if device.arch < MIN_ARCH:
        return (
            f"{node.fusion}: {device.name} has compute capability {device.arch / 10}; the kernel needs {MIN_ARCH / 10}"
        )
    given, scale = dict(zip(node.operands, dtypes, strict=True)), dtypes[node.operands.index("x_scale")]
    wanted: dict[str, tuple[str, ...]] = {"x_scale": tuple(STORAGE), "w_scale": (scale,), "y_scale": ("float32",)}
    wanted |= {name: (given[name[0]],) for name in ("x_zero_point", "w_zero_point")}
    wanted |= dict.fromkeys(("x", "w"), tuple(INTEGERS) if given["x"] != FLOAT8 else (FLOAT8,))
    wanted["y_zero_point"] = tuple(EIGHT_BITS)
    for name, dtype in given.items():
        if dtype not in wanted[name]:
            return f"{node.fusion}: {name} is {dtype}; required {' or '.join(wanted[name])}"
    if given["x"] == FLOAT8 and {"x_zero_point", "w_zero_point"} & given.keys():
        return f"{node.fusion}: {FLOAT8} has zero points; the kernel takes none"
    choices = (("x_layout", LAYOUTS, "bshd"), ("w_layout", LAYOUTS, "bshd"), ("out_layout", OUT_LAYOUTS, "packed"),
               ("w_order", ("nk", "kn"), "nk"))  # fmt: skip
    return next((why for choice in choices if (why := unsupported_choice(node, *choice))), None)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if is_joined(node):
        both = joined(node)
        product = both.product
        if _is_quantized(product):
            return in_two_steps(both, inputs, device, candidates)
    else:
        if _is_quantized(node):
            return candidates(_with_quantizer(node, inputs), inputs, device)
        product = node
    problem, y = problem_of(product, inputs)
    if not is_joined(node):
        return [Plan((y,), _steps(problem, product, inputs, device))]
    made = epilogue_program(both, y, inputs, False, strides=problem.y.strides)
    if made is None:
        return in_two_steps(both, inputs, device, candidates)
    program, outputs = made
    first = Plan(outputs, _steps(problem, product, inputs, device, program))
    if first_plan_suffices():
        return [first]
    with for_later_plans(problem.m):
        return [first, *in_two_steps(both, inputs, device, candidates)]


def _is_quantized(node: FusedNode) -> bool:
    return node.text("out_layout", "packed").startswith(INTEGERS_FIRST)


def _with_quantizer(node: FusedNode, inputs: Sequence[TensorSpec]) -> FusedNode:
    """Return the node with the quantizer of its result as a program."""
    stored, scale = node.output_dtypes[0], required_spec(node, inputs, "y_scale").dtype
    others = {name: f"x{i}" for i, name in enumerate(node.operands[-2:], 1) if name in QUANTIZER}
    has_zero = "y_zero_point" in others and stored != FLOAT8
    zero = others["y_zero_point"] if has_zero else "v0"
    ops: list[list[Any]] = [] if has_zero else [["Constant", [], ["v0"], {"value": 0}]]
    ops.append(["QuantizeLinear", ["x0", others["y_scale"], zero], ["v1"], {"precision": "float32"}])
    dtypes = {"x0": scale, **dict.fromkeys(others.values(), stored), others["y_scale"]: scale, zero: stored}
    dtypes["v1"] = stored
    text = json.dumps({"ops": ops, "outputs": ["v1"], "dtypes": dtypes}, separators=(",", ":"))
    layout = node.text("out_layout").removeprefix(INTEGERS_FIRST)
    return replace(node, attributes={**node.attributes, "out_layout": layout, "program": text})


def problem_of(node: FusedNode, inputs: Sequence[TensorSpec]) -> tuple[Product, TensorSpec]:
    """Return the product of a node, and its output.  Raises ValueError if shapes do not fit."""
    x, w = required_spec(node, inputs, "x"), required_spec(node, inputs, "w")
    (batch, heads, m, k), x_strides = _by_heads(node, x, "x")
    (w_batch, w_heads, *sides), w_strides = _by_heads(node, w, "w")
    n, w_k = sides if node.text("w_order", "nk") == "nk" else sides[::-1]
    repeats = heads // max(1, w_heads)
    fits = expect_equal(w_batch, batch) and expect_equal(w_k, k) and w_heads * repeats == heads
    if not fits or k > MAX_LENGTH or batch * heads > MAX_GRID_Y:
        raise ValueError(f"{node.label}: x has shape {list(x.shape)} and w {list(w.shape)}, in this order and layout")
    layout = node.text("out_layout", "packed")
    shapes = {"packed": (batch, m, heads * n), "bshd": (batch, m, heads, n), ALONE: (batch, m, n)}
    shape = shapes.get(layout, (batch, heads, m, n))
    strides = (heads * m * n, m * n, n) if layout == "bhsd" else (m * heads * n, n, heads * n)
    problem = Product(
        batch, heads, repeats, m, n, k, HeadTensor(required_pointer(node, "x"), *x_strides),
        HeadTensor(required_pointer(node, "w"), *w_strides), HeadTensor(Pointer("output", 0), *strides),
    )  # fmt: skip
    return problem, TensorSpec(shape, required_spec(node, inputs, "x_scale").dtype, x.aligned and w.aligned)


def _by_heads(node: FusedNode, spec: TensorSpec, name: str) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
    """Return the shape (batch, heads, rows, columns) of x or w, and the strides of batch, head and row."""
    is_alone = node.text("out_layout", "packed") == ALONE
    if len(spec.shape) != (3 if is_alone else 4):
        raise ValueError(f"{node.label}: {name} has shape {list(spec.shape)}; required {3 if is_alone else 4} axes")
    if is_alone:
        batch, rows, columns = spec.shape
        return (batch, 1, rows, columns), (rows * columns, 0, columns)
    if node.text(f"{name}_layout", "bshd") == "bhsd":
        batch, heads, rows, columns = spec.shape
        return (batch, heads, rows, columns), (heads * rows * columns, rows * columns, columns)
    batch, rows, heads, columns = spec.shape
    return (batch, heads, rows, columns), (rows * heads * columns, columns, heads * columns)


def _steps(
    problem: Product,
    node: FusedNode,
    inputs: Sequence[TensorSpec],
    device: Device,
    program: EpilogueProgram | None = None,
) -> tuple[Launch, ...]:
    """Return the launch that computes a product, and applies the program; none if y is empty."""
    if not problem.batch * problem.heads * problem.m * problem.n:
        return ()
    x, w = required_spec(node, inputs, "x"), required_spec(node, inputs, "w")
    tile_n = 64 if estimate(problem.n) <= 64 else 128
    zeros = {name: operand_pointer(node, name) for name in ("x_zero_point", "w_zero_point")}
    dtype = required_spec(node, inputs, "x_scale").dtype
    defines: Defines = {
        "T": STORAGE[dtype], "PRECISE": int(dtype == "float32"), "X_T": EIGHT_BITS[x.dtype], "W_T": EIGHT_BITS[w.dtype],
        "FLOAT8": int(x.dtype == FLOAT8),
        "TILE_N": tile_n, "STAGES": STAGES[tile_n], "ORDER_NK": int(node.text("w_order", "nk") == "nk"),
        "X_ZERO": int("x_zero_point" in node.operands), "W_ZERO": int("w_zero_point" in node.operands),
        "ALL_ALIGNED": int(all(each.aligned for each in inputs)),
    }  # fmt: skip
    tiles_m, tiles_n = -(-problem.m // TILE_M), -(-problem.n // tile_n)
    y = replace(problem.y, pointer=program.y) if program else problem.y
    scales = Struct((required_pointer(node, "x_scale"), required_pointer(node, "w_scale"), *zeros.values()))
    sizes = int32(problem.m, problem.n, problem.k, problem.heads, problem.repeats, tiles_n)
    given = (problem.x.argument, problem.w.argument, y.argument, scales, Struct(sizes))
    kernel, arguments = with_program(Kernel("quantized_matmul", "quantized_matmul", defines), given, program)
    shared = STAGES[tile_n] * sum(rows * 80 + rows // 8 * 32 for rows in (TILE_M, tile_n))
    grid = (tiles_m * tiles_n, problem.batch * problem.heads, 1)
    return (Launch(kernel, grid, (THREADS, 1, 1), arguments, shared, pdl=device.has_pdl),)
