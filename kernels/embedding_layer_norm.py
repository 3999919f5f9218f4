"""LayerNorm of embeddings on the GPU: embedding_layer_norm.cu."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.kernels._embedding import embedding_candidates, refuse
from onnxfuse.provider.plan import Device, FusedNode, Plan, TensorSpec


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    return refuse(node, input_dtypes)


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes.  Raises ValueError where shapes do not fit together."""
    return embedding_candidates(node, inputs, device)[0]


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The ways to run it, what is expected to be fastest first.  Raises ValueError where shapes do not fit together."""
    return embedding_candidates(node, inputs, device)
