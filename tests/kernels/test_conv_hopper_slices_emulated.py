"""The Hopper convolution in slices of k on a CPU: its own source and plans, with emulated instructions.

It shows wrong addresses, stages, phases and stores.  epilogue.cu, which adds up the slices, has tests of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from conv_cases import BOTH, ConvCase
from hopper_emulation import run
from sampling import sampled

from onnxfuse.kernels.conv import hopper, hopper_slices
from onnxfuse.kernels.conv.hopper_slices import SlicedConfig
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.runtime.plan import Launch, Pointer

SAME = (1, 1, 1, 1)

# Pixels and filters that end inside tiles, and slices of unequal length.
CASES = [
    (ConvCase(1, 64, 72, (9, 11), (3, 3), (), SAME, extra=BOTH), HopperConfig(128, 64), 2),
    (ConvCase(1, 32, 74, (9, 9), (3, 3), (), SAME, dtype="float32", tf32=True), HopperConfig(128, 128), 2),
]


@pytest.mark.parametrize(("case", "tile", "slices"), sampled(CASES, 2), ids=str)
def test_slices_add_up_to_the_sums_of_products(case: ConvCase, tile: HopperConfig, slices: int, tmp_path: Path) -> None:
    conv, config = case.problem(), SlicedConfig(tile, slices)
    assert config in hopper_slices.fitting(conv, hopper.gemm_of_blocks(conv), H200)
    way = hopper.implementation(conv, config, H200)
    step = way.steps[0]
    assert isinstance(step, Launch) and step.grid[2] == slices
    draw = np.random.default_rng(0)  # small integers, whose sums are exact
    arrays = {name: draw.integers(-4, 5, each.shape).astype(each.dtype) for name, each in case.arrays().items()}
    sums = np.full((slices + 1, conv.pixels, conv.m), np.nan, np.float32)  # one slice more than there are
    assert way.scratch == (sums[:slices].nbytes,)
    addresses = {Pointer("input", i): each.ctypes.data for i, each in enumerate(arrays.values())}
    addresses[Pointer("scratch", 0)] = sums.ctypes.data
    run(step, addresses, tmp_path)
    alone = replace(case, extra=(), activation="none")
    expected, _ = alone.expect({name: arrays[name] for name in ("x", "w")})
    np.testing.assert_array_equal(sums[:slices].sum(axis=0), expected.reshape(conv.pixels, conv.m))
    assert np.isnan(sums[slices]).all(), "written beyond the end"


def test_every_slice_has_stages_and_every_block_a_multiprocessor() -> None:
    for c, size in ((1280, 16), (1280, 8), (256, 14), (40, 9)):
        conv = ConvCase(2, c, c, (size, size), (3, 3), (), SAME, extra=BOTH).problem()
        gemm = hopper.gemm_of_blocks(conv)
        for config in hopper_slices.fitting(conv, gemm, H200):
            step = hopper.implementation(conv, config, H200).steps[0]
            assert isinstance(step, Launch)
            assert step.grid[0] * step.grid[2] <= H200.multiprocessors and step.shared <= H200.shared_per_block
            assert gemm.k // 64 >= hopper_slices.MIN_STEPS * config.slices
