"""group_norm of channels-last tensors on a CPU: every plan, emulated, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from architectures import A100, H200
from kernel_hosts import host_of
from kernel_references import group_norm_nhwc
from sampling import sampled

from onnxfuse.runtime.plan import Device, FusedNode, TensorSpec
from onnxfuse.testing.emulated_launches import NUMPY, emulate

# Vectors of one group, of two, and of several; clusters and chunks of unequal parts; one group; one channel a group, in
# one row of threads, in several, and in as many as there are elements of a vector.
SHAPES: list[tuple[tuple[int, ...], int, str]] = [
    ((2, 31, 33, 80), 8, "float16"),
    ((1, 9, 7, 96), 4, "bfloat16"),
    ((1, 5, 7, 5, 24), 24, "float32"),
    ((1, 40, 40, 48), 24, "float32"),
    ((1, 5, 3, 40), 1, "float16"),
    ((3, 1, 1, 64), 64, "float16"),
    ((2, 61, 16), 16, "float16"),
    ((2, 65, 24), 8, "float32"),
]


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize(("shape", "groups", "dtype"), sampled(SHAPES, 3))
def test_matches_float64(shape: tuple[int, ...], groups: int, dtype: str, device: Device, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    x = (random.standard_normal(shape) * 2 + 5 + np.arange(shape[-1]) / 8).astype(NUMPY[dtype])
    scale, bias = (random.standard_normal(shape[-1]).astype(NUMPY[dtype]) for _ in range(2))
    attributes = {"layout": "nhwc", "groups": groups, "epsilon": 1e-5, "activation": "silu"}
    node = FusedNode("group_norm", "n", ("x", "scale", "bias"), attributes, (dtype,))
    specs = [TensorSpec(each.shape, dtype) for each in (x, scale, bias)]
    plans = host_of("group_norm").candidates(node, specs, device)
    wide = [each.astype(np.float64) for each in (x, scale, bias)]
    normal = group_norm_nhwc(*wide, groups, 1e-5)
    expected = normal / (1 + np.exp(-normal))
    for plan in plans:
        (y,) = emulate(plan, [x, scale, bias], tmp_path)
        rtol = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
        np.testing.assert_allclose(y.astype(np.float64), expected, rtol=rtol, atol=2e-5)


@pytest.mark.parametrize(
    ("shape", "launches", "cluster", "blocks"),
    [
        ((2, 32, 32, 320), 1, 4, 64),  # 5.2 us on an H200; 128 blocks in eights 7.9, two launches 6.3
        ((2, 32, 32, 1280), 1, 2, 128),  # 7.5; 256 in fours 13.9, two launches 8.5
        ((16, 32, 32, 256), 1, 1, 128),  # 6.8; 256 blocks 10.5, two launches 8.2
        ((1, 40, 40, 960), 1, 8, 64),  # 7.0; 32 blocks 8.6, two launches 9.4
        ((2, 32, 32, 1920), 2, 1, 256),  # 10.0; 128 in fours 14.3
        ((2, 64, 64, 640), 2, 1, 228),  # 11.8; 128 in fours 18.1
        ((1, 512, 512, 128), 2, 1, 256),
    ],
)
def test_ways_to_run(shape: tuple[int, ...], launches: int, cluster: int, blocks: int) -> None:
    """The first plan is the one that was the fastest on an H200."""
    node = FusedNode("group_norm", "n", ("x", "scale", "bias"), {"layout": "nhwc", "groups": 32}, ("float16",))
    specs = [TensorSpec(each, "float16") for each in (shape, shape[-1:], shape[-1:])]
    steps = host_of("group_norm").candidates(node, specs, H200)[0].steps
    assert len(steps) == launches
    assert (steps[0].cluster, steps[0].grid[0]) == (cluster, blocks)


@pytest.mark.parametrize(
    ("channels", "dtype", "subset"),
    [(256, "float16", 64), (256, "float32", 32), (32, "float16", 32), (96, "float16", 96)],
)
def test_a_block_of_an_instance_norm_has_a_line_of_each_pixel(channels: int, dtype: str, subset: int) -> None:
    """Its blocks merge the partials of as many chunks as fill the GPU, which are fewer with more blocks an image."""
    attributes = {"layout": "nhwc", "groups": channels}
    node = FusedNode("group_norm", "n", ("x", "scale", "bias"), attributes, (dtype,))
    specs = [TensorSpec(each, dtype) for each in ((1, 256, 256, channels), (channels,), (channels,))]
    first, last = host_of("group_norm").candidates(node, specs, H200)[0].steps
    assert first.kernel.defines["SUBSET"] == last.kernel.defines["SUBSET"] == subset
