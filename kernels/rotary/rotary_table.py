"""The plan of rotary_table, which computes cosines and sines of positions: rotary_table.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels.tensors import (
    STORAGE,
    Defines,
    element_count,
    is_released,
    operand_pointer,
    required_spec,
)
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec

POSITIONS: Final = {"int64": "long long", "int32": "int"}  # C++ type of positions, by dtype
THREADS: Final = 128  # threads per block


def unsupported_rotary_table(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel runs a rotary_table node of these dtypes; None if one does."""
    found, *others = input_dtypes  # the positions come first
    if found not in POSITIONS:
        return f"{node.fusion}: positions are {found}; the kernel takes {', '.join(POSITIONS)}"
    for dtype in (*others, *node.output_dtypes):
        if dtype not in STORAGE:
            return f"{node.fusion}: an operand or output is {dtype}; the kernel takes {', '.join(STORAGE)}"
    return None


def rotary_table_plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """Return the plan for these shapes.  Raises ValueError unless positions are (batch, seq) or (seq)."""
    name = "frequencies" if node.input_index("column") is None else "column"
    positions, frequencies = required_spec(node, inputs, "positions"), required_spec(node, inputs, name)
    if not 1 <= len(positions.shape) <= 2:
        raise ValueError(f"{node.fusion}: positions have shape {list(positions.shape)}; required (batch, seq) or (seq)")
    half, repeats = element_count(frequencies), 2 if node.text("angles", "twice") == "twice" else 1
    shape = (*(1, *positions.shape)[-2:], half * repeats)
    outputs = tuple(TensorSpec(shape, dtype) for dtype in node.output_dtypes)
    count = element_count(positions) * half
    if not count:
        return Plan(outputs, ())
    blocks = -(-count // THREADS)
    defines: Defines = {
        "POSITION_T": POSITIONS[positions.dtype], "FREQUENCY_T": STORAGE[frequencies.dtype],
        "COS_T": STORAGE[outputs[0].dtype], "SIN_T": STORAGE[outputs[1].dtype], "HALF": half, "REPEATS": repeats,
        "THREADS": THREADS, "RELEASE": is_released(blocks, device),
        "INDEX": "u32" if count * repeats < 2**31 else "u64",
    }  # fmt: skip
    arguments = (
        operand_pointer(node, "positions"), operand_pointer(node, name), Pointer("output", 0), Pointer("output", 1),
        Scalar(node.number("factor", 1.0), "float32"), Scalar(count, "int64"),
    )  # fmt: skip
    kernel = Kernel("rotary_table", "rotary_table", defines)
    return Plan(outputs, (Launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), arguments, pdl=device.has_pdl),))
