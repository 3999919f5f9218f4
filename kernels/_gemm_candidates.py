"""Every way to run a Gemm on a GPU, what is expected to be fastest first."""

from __future__ import annotations

from typing import Final

from onnxfuse.kernels import _gemm_hopper, _gemm_library, _gemm_mma, _gemm_small
from onnxfuse.kernels._gemm import Candidate, Gemm
from onnxfuse.provider.plan import Device, Plan, TensorSpec

MOST: Final = 8  # candidates: each is compiled and timed when a new shape comes


def all_candidates(gemm: Gemm, device: Device) -> list[Candidate]:
    """Ways to run a Gemm that has something to compute, as many as are worth timing.  Raises ValueError for none."""
    small, hopper = _gemm_small.plans(gemm, device), _gemm_hopper.plans(gemm, device)
    library, mma = _gemm_library.plans(gemm, device), _gemm_mma.plans(gemm, device)
    fast = hopper or _gemm_mma.plans_of_copies(gemm, device)
    if small and hopper and len(hopper[0].steps) > 1:  # the others load elements: 16x4095x4095 takes 109 us so, not 34
        found = [*hopper[:2], *library[:2], *small[:4]]
    elif small:
        found = [*small[:4], *library[:2], *fast[:2]]
    else:
        found = [*fast[: 4 if hopper else 2], *library[:3], *mma[: 1 if fast else 3]]
    if not (found or mma):
        raise ValueError(f"no kernel multiplies {gemm.m}x{gemm.k} with {gemm.k}x{gemm.n} {gemm.dtype} on {device.name}")
    return (found or mma)[:MOST]


def plans(gemm: Gemm, y: TensorSpec, device: Device) -> list[Plan]:
    """The candidates as plans of a node with that output.  Raises ValueError where there is no way."""
    if not gemm.m * gemm.n:
        return [Plan((y,), ())]
    return [Plan((y,), candidate.steps, candidate.scratch) for candidate in all_candidates(gemm, device)]
