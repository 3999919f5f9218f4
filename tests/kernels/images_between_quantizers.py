"""Pools and Resizes of integers between quantizers: their nodes, and what the quantizers make of a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from architectures import H200
from kernel_hosts import host_of

from onnxfuse.kernels.image_quantizers import OPERANDS
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec

TIE = 1e-4  # of a step: a number as near as this to the middle of two integers may become either


def check_between_quantizers(
    fusion: str,
    x: np.ndarray,
    attributes: Mapping[str, Any],
    operator: Callable[[np.ndarray], np.ndarray],
    run: Callable[[Plan, Sequence[np.ndarray]], np.ndarray],
    aligned: bool = True,
    device: Device = H200,
) -> None:
    """Run all plans for integers x; compare with `operator` on the dequantized numbers, and an exact quantizer."""
    dtype, limits = x.dtype.name, np.iinfo(x.dtype)
    zeros = (121, 7) if dtype == "uint8" else (-5, 9)
    scales = np.float32(0.043), np.float32(0.031)
    given = [scales[0], np.array(zeros[0], dtype), scales[1], np.array(zeros[1], dtype)]
    node = FusedNode(fusion, "n", ("x", *OPERANDS), {"layout": "nhwc", **attributes}, (dtype,))
    host, dtypes = host_of(fusion), [dtype, *(each.dtype.name for each in given)]
    assert host.supports(node, dtypes, device) is None
    numbers = operator((x.astype(np.float32) - zeros[0]) * scales[0]).astype(np.float64) / scales[1]
    least, most = (np.clip(np.rint(numbers + by) + zeros[1], limits.min, limits.max) for by in (-TIE, TIE))
    specs = [TensorSpec(x.shape, dtype, aligned), *(TensorSpec((), each, constant=True) for each in dtypes[1:])]
    for plan in host.candidates(node, specs, device):
        y = run(plan, [x, *map(np.asarray, given)])
        assert y.dtype == x.dtype and ((least <= y) & (y <= most)).all()
    assert (least == most).mean() > 0.9 and (len(np.unique(least)) > 2 or least.size < 9)
