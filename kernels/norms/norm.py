"""The plans of layer_norm, rms_norm, add_layer_norm and add_rms_norm: the host side of norm.cuh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels.epilogue_node import Joined
from onnxfuse.kernels.epilogue_program import WORD, epilogue_program
from onnxfuse.kernels.norms.rows import (
    USUAL_THREADS,
    USUAL_VALUES,
    RowTiling,
    persistent_is_faster,
    persistent_tiling,
    row_launch,
    row_tiling,
    streamed_rows,
    with_registers_to_spare,
)
from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STORAGE,
    Defines,
    all_constant,
    check_element_count,
    element_count,
    operand_pointer,
    operand_spec,
    required_spec,
    vector_width,
)
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Plan, Pointer, Scalar, TensorSpec

# Largest number of threads per block for mean and variance, which take more work between barriers than a sum of
# squares: on an H200, layer_norm of 8192x8192 fp16 takes 67 us with 256 threads, and 81 us with 512. If a residual is
# added first, its loads hide that work: add_layer_norm takes 131 us with either number.
MOMENTS_THREADS: Final = 256


def norm_candidates(
    node: FusedNode, inputs: Sequence[TensorSpec], device: Device, both: Joined | None = None
) -> list[Plan]:
    """Return the plans of a norm, the expected fastest first.  Raises ValueError if shapes do not fit together.

    Kernel arguments are the operands of the fusion, y, the sum if the fusion adds, epsilon and the number of rows, and
    then the operands of the operators that were fused after the norm. `both` has the norm and these operators; the list
    is empty if no kernel can run them in its epilogue.
    """
    x = required_spec(node, inputs, "x")
    length = int(element_count(required_spec(node, inputs, "scale")))  # int() restricts the plan to this length
    rows = math.prod(x.shape[:-1])
    _check(node, inputs, x, x.shape[-1])
    results = outputs = tuple(TensorSpec(x.shape, dtype, x.aligned) for dtype in node.output_dtypes)
    program, pointers = None, [Pointer("output", i) for i in range(len(results))]
    if both is not None:
        made = epilogue_program(both, results[0], inputs, False, tuple(STORAGE))
        if made is None or rows >= WORD:
            return []
        program, outputs = made[0], (*made[1], *results[1:])
        results = (TensorSpec(x.shape, program.dtype, x.aligned), *results[1:])
        pointers = [program.y, *(both.other_result(i) for i in range(1, len(results)))]
    if rows * length == 0:
        return [Plan(outputs, ())]
    read = present(node, inputs, "x", "residual")
    moved, item_bytes = [*read, *results], [ITEM_BYTES[tensor.dtype] for tensor in read]
    width = vector_width(moved, length, weights=inputs)
    weight_bytes = weight_item_bytes(node, inputs) + (program.element_bytes if program else 0)
    defines = {
        **_types(node, inputs, results), "ROW": length, "STREAMED": streamed_rows(moved, length, width),
        "WEIGHTS_CONSTANT": all_constant(present(node, inputs, "scale", "bias")),
    }  # fmt: skip
    arguments = _arguments(node, pointers, len(read) > 1, rows)
    max_threads = MOMENTS_THREADS if node.fusion == "layer_norm" else USUAL_THREADS
    tilings = norm_tilings(rows, length, width, item_bytes, weight_bytes, max_threads, device)
    if program:
        tilings = [tiling for each in tilings if (tiling := with_registers_to_spare(each)) is not None]
    launches = (row_launch(node.fusion, each, rows, defines, arguments, item_bytes, device) for each in tilings)
    return [Plan(outputs, (program.launch(each) if program else each,)) for each in launches]


def norm_tilings(
    rows: int,
    length: int,
    width: int,
    item_bytes: Sequence[int],
    weight_bytes: int,
    max_threads: int,
    device: Device,
) -> list[RowTiling]:
    """Return two tilings, one block per row and a persistent grid, the expected faster one first.

    Times in a chain of launches on an H200 in fp16, with one block per row and with a persistent grid: layer_norm of
    6304x768 takes 4.7 and 3.8 us, add_rms_norm of 2048x2048 takes 6.2 and 5.0 us. add_layer_norm of 4096x768 takes 4.3
    and 4.2 us, and 7.5 and 8.3 us if its inputs are not in L2.
    """
    usual = row_tiling(rows, length, width, device, item_bytes, weight_bytes, max_threads)
    persistent = persistent_tiling(usual, rows, length, device, item_bytes, weight_bytes)
    if persistent is None or usual.width * usual.chunks < USUAL_VALUES:
        return [usual]
    return [persistent, usual] if persistent_is_faster(usual, persistent, rows, device) else [usual, persistent]


def weight_item_bytes(node: FusedNode, inputs: Sequence[TensorSpec]) -> int:
    """Return the bytes of scale and bias per element of a row."""
    return sum(ITEM_BYTES[tensor.dtype] for tensor in present(node, inputs, "scale", "bias"))


def present(node: FusedNode, inputs: Sequence[TensorSpec], *names: str) -> list[TensorSpec]:
    """Return the specs of the operands in `names` that the node has."""
    return [found for name in names if (found := operand_spec(node, inputs, name)) is not None]


def _check(node: FusedNode, inputs: Sequence[TensorSpec], x: TensorSpec, length: int) -> None:
    """Raise ValueError unless residual, scale and bias fit x."""
    residual = operand_spec(node, inputs, "residual")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{node.fusion}: residual has shape {list(residual.shape)}; required {list(x.shape)}, as x")
    for name in ("scale", "bias"):
        weight = operand_spec(node, inputs, name)
        if weight is not None:
            check_element_count(node, name, weight, length)


def _types(node: FusedNode, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Defines:
    """Return the macros for storage types and presence of operands; the type of an absent operand does not matter."""
    x, scale = required_spec(node, inputs, "x"), required_spec(node, inputs, "scale")
    residual, bias = operand_spec(node, inputs, "residual"), operand_spec(node, inputs, "bias")
    return {
        "X_T": STORAGE[x.dtype],
        "RESIDUAL_T": STORAGE[(residual or x).dtype],
        "SCALE_T": STORAGE[scale.dtype],
        "BIAS_T": STORAGE[(bias or scale).dtype],
        "Y_T": STORAGE[outputs[0].dtype],
        "SUM_T": STORAGE[outputs[-1].dtype],
        "RESIDUAL": int(residual is not None),
        "BIAS": int(bias is not None),
        "SUM": int(len(outputs) > 1),
    }


def _arguments(node: FusedNode, results: Sequence[Argument], adds: bool, rows: int) -> list[Argument]:
    """Return the arguments of the kernel, as `norm_candidates` lists them."""
    names = ["x", *(["residual"] if adds else []), "scale", *([] if node.fusion == "rms_norm" else ["bias"])]
    written = [*results]
    if adds and len(results) == 1:
        written.append(Scalar(0, "int64"))
    epsilon = node.number("epsilon", 1e-5)
    read = (operand_pointer(node, name) for name in names)
    return [*read, *written, Scalar(epsilon, "float32"), Scalar(rows, "int64")]
