"""Cosines and sines of positions on the GPU: rotary_table.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels._types import EARLY_ARCH, STORAGE, operand, required, size
from onnxfuse.provider.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Scalar, TensorSpec

POSITIONS: Final = {"int64": "long long", "int32": "int"}
THREADS: Final = 128


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    found, *others = input_dtypes  # the positions come first
    if found not in POSITIONS:
        return f"{node.fusion}: positions are {found}; the kernel takes {', '.join(POSITIONS)}"
    for dtype in (*others, *node.output_dtypes):
        if dtype not in STORAGE:
            return f"{node.fusion}: an operand or output is {dtype}; the kernel takes {', '.join(STORAGE)}"
    return None


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes.  Raises ValueError where the positions are not (batch, seq) or (seq)."""
    name = "frequencies" if node.place("column") is None else "column"
    positions, frequencies = required(node, inputs, "positions"), required(node, inputs, name)
    if not 1 <= len(positions.shape) <= 2:
        raise ValueError(f"{node.fusion}: positions have shape {list(positions.shape)}; required (batch, seq) or (seq)")
    half, repeats = size(frequencies), 2 if node.attributes.get("angles", "twice") == "twice" else 1
    shape = (*(1, *positions.shape)[-2:], half * repeats)
    outputs = tuple(TensorSpec(shape, dtype) for dtype in node.output_dtypes)
    count = size(positions) * half
    if not count:
        return Plan(outputs, ())
    blocks = -(-count // THREADS)
    defines = {
        "POSITION_T": POSITIONS[positions.dtype], "FREQUENCY_T": STORAGE[frequencies.dtype],
        "COS_T": STORAGE[outputs[0].dtype], "SIN_T": STORAGE[outputs[1].dtype], "HALF": half, "REPEATS": repeats,
        "THREADS": THREADS, "RELEASE": int(blocks <= 2 * device.multiprocessors),
        "INDEX": "u32" if count * repeats < 2**31 else "u64",
    }  # fmt: skip
    arguments = (
        operand(node, "positions"), operand(node, name), Pointer("output", 0), Pointer("output", 1),
        Scalar(float(node.attributes.get("factor", 1.0)), "float32"), Scalar(count, "int64"),
    )  # fmt: skip
    kernel = Kernel("rotary_table", "rotary_table", defines)
    return Plan(outputs, (Launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), arguments, early=device.arch >= EARLY_ARCH),))
