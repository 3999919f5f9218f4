"""Every way to run a Gemm on a GPU, the expected fastest first."""

from __future__ import annotations

from typing import Final

from onnxfuse.kernels.gemm import cublaslt, hopper, mma, small
from onnxfuse.kernels.gemm.pad import padded
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device
from onnxfuse.runtime.symint import for_later_plans

MAX_IMPLEMENTATIONS: Final = 8  # each is compiled and timed when a new shape comes


def implementations(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the implementations of a Gemm with at least one element that are worth timing.

    Raises ValueError if there is none.
    """
    found = implementations_if_any(gemm, device)
    if not found:
        raise ValueError(f"no kernel multiplies {gemm.m}x{gemm.k} with {gemm.k}x{gemm.n} {gemm.dtype} on {device.name}")
    return found


def implementations_if_any(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the same, or none if there is none."""
    for_few_rows = small.implementations(gemm, device)
    with for_later_plans(gemm.m if for_few_rows and not padded(gemm, residual=True)[1] else 0):
        wgmma = hopper.implementations(gemm, device)
        fast = wgmma or mma.implementations_of_copies(gemm, device)
    with for_later_plans(gemm.m if for_few_rows or fast else 0):
        library = cublaslt.implementations(gemm, device)
    with for_later_plans(gemm.m if for_few_rows or fast or library else 0):
        general = mma.implementations(gemm, device)
    if for_few_rows and wgmma and len(wgmma[0].steps) > 1:
        # The other kernels would load element by element: 16x4095x4095 takes 109 us so, and 34 us after a copy.
        found = [*wgmma[:2], *library[:2], *for_few_rows[:4]]
    elif for_few_rows:
        found = [*for_few_rows[:4], *library[:2], *fast[:2]]
    else:
        found = [*fast[: 4 if wgmma else 2], *library[:3], *general[: 1 if fast else 3]]
    return (found or general)[:MAX_IMPLEMENTATIONS]
