"""The plan of group_norm for channels-first tensors: group_norm.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from onnxfuse.kernels.epilogue_node import Joined
from onnxfuse.kernels.epilogue_program import WORD, epilogue_program
from onnxfuse.kernels.norms.any_length import long_rows
from onnxfuse.kernels.norms.rows import row_launch, row_tiling, streamed_rows, with_registers_to_spare
from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STORAGE,
    Defines,
    all_constant,
    check_element_count,
    divisor,
    macro,
    operand_pointer,
    required_spec,
    vector_width,
)
from onnxfuse.runtime.plan import Device, FusedNode, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.runtime.symint import is_symbolic


def group_norm_plan(
    node: FusedNode, inputs: Sequence[TensorSpec], device: Device, both: Joined | None = None
) -> Plan | None:
    """Return the plan for these shapes.  Raises ValueError if shapes do not fit together.

    `both` has the node and the elementwise operators that were fused into it. Return None if no kernel can run these
    operators in its epilogue.
    """
    x, scale, bias = (required_spec(node, inputs, name) for name in ("x", "scale", "bias"))
    batch, channels = x.shape[:2]
    groups, spatial = node.integer("groups"), math.prod(x.shape[2:])
    if channels % groups:
        raise ValueError(f"group_norm: {channels} channels do not make {groups} groups")
    check_element_count(node, "scale", scale, channels)
    check_element_count(node, "bias", bias, channels)
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    outputs: tuple[TensorSpec, ...] = (y,)
    program, target = None, Pointer("output", 0)
    if both is not None:
        made = epilogue_program(both, y, inputs, False, tuple(STORAGE), axes=len(x.shape) - 2)
        if made is None or batch * channels >= WORD:
            return None
        program, outputs = made
        y, target = replace(y, dtype=program.dtype), program.y
    rows, length = batch * groups, channels // groups * spatial
    if rows * length == 0:
        return Plan(outputs, ())
    item_bytes, width = [ITEM_BYTES[x.dtype]], vector_width([x, y], spatial, weights=inputs)
    if is_symbolic(length):
        tiling = long_rows(length, width, device, item_bytes)
    else:
        tiling = row_tiling(rows, length, width, device, item_bytes)
    tiling = (with_registers_to_spare(tiling) or tiling) if program else tiling
    packs = spatial // tiling.width  # vectors of `tiling.width` elements per channel
    defines: Defines = {
        "X_T": STORAGE[x.dtype], "SCALE_T": STORAGE[scale.dtype], "BIAS_T": STORAGE[bias.dtype],
        "Y_T": STORAGE[y.dtype], "ROW": length, "STREAMED": streamed_rows([x, y], length, width), "GROUPS": groups,
        "CHANNEL_PACKS": macro(lambda: packs, "packs", packs), "CHANNELS": channels // groups,
        "WEIGHTS_CONSTANT": all_constant([scale, bias]),
        "ACTIVATION": node.text("activation", "none"), "PRECISE": 1,
    }  # fmt: skip
    epsilon = Scalar(node.number("epsilon", 1e-5), "float32")
    pointers = [*(operand_pointer(node, name) for name in ("x", "scale", "bias")), target]
    arguments = [*pointers, epsilon, *divisor(packs), Scalar(length, "int32"), Scalar(rows, "int64")]
    launch = row_launch("group_norm", tiling, rows, defines, arguments, item_bytes, device)
    return Plan(outputs, (program.launch(launch) if program else launch,))
