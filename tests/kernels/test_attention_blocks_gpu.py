"""Masks whose rows are read in whole vectors, under every tiling of attention on Hopper."""

from __future__ import annotations

import pytest
from test_attention_hopper_gpu import LOWEST_HALF, Case, Sizes, device, run

from onnxfuse.runtime.plan import Device

__all__ = ["device"]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("keys", [400, 512])
@pytest.mark.parametrize(
    "case",
    [
        *(Case(size, mask_kind=kind) for size in (64, 128, 192, 256) for kind in ("boolean", "inverted")),
        Case(256, mask_kind="additive", mask_dtype="float16", masked_score=LOWEST_HALF),
        Case(256, mask_kind="additive", mask_dtype="float32"),
    ],
    ids=str,
)
def test_every_tiling_of_whole_vectors(case: Case, keys: int, device: Device) -> None:
    for variant in (0, 8, 16):  # random masks, with their own rows for each batch, head or both
        assert run(case, Sizes(2, 4, 2, 333, keys), variant, device, slice(None)) >= 1
