"""The operands of quantizers around an operator on images: the host side of image_quantizers.cuh."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from onnxfuse.kernels.tensors import INTEGERS, operand_pointer, unsupported_dtype
from onnxfuse.runtime.plan import Argument, FusedNode

SCALES: Final = ("x_scale", "y_scale")
OPERANDS: Final = ("x_scale", "x_zero_point", "y_scale", "y_zero_point")  # in the order of the kernels' arguments
MAX_WIDTH: Final = 8  # elements per vector; each takes a register as a float


def is_quantized(node: FusedNode) -> bool:
    """Return whether the node has quantizers before and after its operator."""
    return OPERANDS[0] in node.operands


def unsupported_dtypes(node: FusedNode, input_dtypes: Sequence[str], supported: Collection[str]) -> str | None:
    """Return why a kernel does not take the dtypes of a node; None if it does.

    Without quantizers, it takes one of the dtypes `supported`.
    """
    if not is_quantized(node):
        refusal = unsupported_dtype(node, input_dtypes, supported)
        if refusal is None and len({*input_dtypes, *node.output_dtypes}) > 1:
            return f"{node.fusion}: x is {input_dtypes[0]} and y is {node.output_dtypes[0]}; the kernel takes one dtype"
        return refusal
    of, dtype = dict(zip(node.operands, input_dtypes, strict=True)), node.output_dtypes[0]
    are_floats = all(of[name] == "float32" for name in SCALES)
    if are_floats and dtype in INTEGERS and {of[name] for name in of.keys() - {*SCALES, "like"}} == {dtype}:
        return None
    required = f"one dtype, {' or '.join(INTEGERS)}, and scales of float32"
    return f"{node.fusion}: x is {of['x']}, and y is {dtype}; required {required}"


def quantizer_pointers(node: FusedNode) -> tuple[Argument, ...]:
    """Return the kernel's arguments for the quantizers; none without quantizers."""
    return tuple(operand_pointer(node, name) for name in OPERANDS) if is_quantized(node) else ()
