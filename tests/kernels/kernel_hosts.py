"""The hosts of kernels, for the tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from onnxfuse.kernels.tensors import BF16_ARCH
from onnxfuse.runtime.hosts import Host, find_host
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec


def host_of(fusion: str) -> Host:
    """Return the host of a fusion, which must have kernels."""
    host = find_host(fusion)
    assert host is not None, f"{fusion} has no kernels"
    return host


def require_support(host: Host, node: FusedNode, dtypes: Sequence[str], device: Device) -> None:
    """Fail unless a host takes a node; a GPU without bfloat16 products skips the test of them."""
    why = host.supports(node, dtypes, device)
    if why and device.arch < BF16_ARCH and "bfloat16" in (*dtypes, *node.output_dtypes):
        pytest.skip(why)
    assert why is None, why


def first_plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """Return the plan that runs a node where nothing was measured."""
    return host_of(node.fusion).candidates(node, inputs, device)[0]
