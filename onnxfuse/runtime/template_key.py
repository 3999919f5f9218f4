"""The key of a template: a fused node, its GPU, and the settings of its session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from onnxfuse.runtime.plan import Device, FusedNode, TensorSpec


@dataclass(frozen=True)
class Situation:
    """A node, its GPU, and the settings of its session."""

    node: FusedNode
    device: Device
    provider: str
    verdicts: bool  # whether earlier measurements are used

    def key(self, inputs: Sequence[TensorSpec]) -> tuple[str, str, int, bool]:
        """Return a key that is equal for nodes and inputs that can share a template."""
        return signature(self.node, tuple(inputs), self.device), self.provider, self.device.ordinal, self.verdicts


def signature(node: FusedNode, inputs: tuple[TensorSpec, ...], device: Device) -> str:
    """Return a text that is equal for nodes, inputs and settings that can share a plan on GPUs of one kind."""
    tensors = [(spec.dtype, spec.shape, spec.aligned, spec.constant) for spec in inputs]
    settings = [device.tf32, *(["shared"] if device.shared else [])]
    return json.dumps(
        [node.fusion, node.operands, dict(node.attributes), node.output_dtypes, tensors, *settings], sort_keys=True
    )
