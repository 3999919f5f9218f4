"""The plans of rotary_embedding and rotary_table; each fusion has a .cu file of its name."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.kernels.rotary.rotary_embedding import rotary_embedding_plan, unsupported_rotary_embedding
from onnxfuse.kernels.rotary.rotary_table import rotary_table_plan, unsupported_rotary_table
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    unsupported = unsupported_rotary_table if node.fusion == "rotary_table" else unsupported_rotary_embedding
    return unsupported(node, input_dtypes)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the one plan for these shapes.  Raises ValueError if shapes do not fit together."""
    plan = rotary_table_plan if node.fusion == "rotary_table" else rotary_embedding_plan
    return [plan(node, inputs, device)]
