"""group_norm of channels-last tensors on a CPU: every plan, emulated, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from architectures import A100, H200
from emulated_launches import NUMPY, emulate
from kernel_hosts import host_of
from kernel_references import group_norm_nhwc
from sampling import sampled

from onnxfuse.runtime.plan import Device, FusedNode, TensorSpec

# Vectors of one group, of two, and of several; clusters and chunks of unequal parts; one group; one channel a group.
SHAPES: list[tuple[tuple[int, ...], int, str]] = [
    ((2, 31, 33, 80), 8, "float16"),
    ((1, 9, 7, 96), 4, "bfloat16"),
    ((1, 40, 40, 48), 24, "float32"),
    ((1, 5, 3, 40), 1, "float16"),
    ((3, 1, 1, 64), 64, "float16"),
    ((2, 65, 24), 8, "float32"),
]


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize(("shape", "groups", "dtype"), sampled(SHAPES, 2))
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


def test_ways_to_run() -> None:
    """Of small images, one launch of clusters or of single blocks comes first; of 64x64 pixels and more, two."""
    firsts = {}
    for shape in ((2, 32, 32, 320), (2, 16, 16, 1280), (2, 64, 64, 640), (1, 512, 512, 128)):
        node = FusedNode("group_norm", "n", ("x", "scale", "bias"), {"layout": "nhwc", "groups": 32}, ("float16",))
        specs = [TensorSpec(each, "float16") for each in (shape, shape[-1:], shape[-1:])]
        steps = host_of("group_norm").candidates(node, specs, H200)[0].steps
        firsts[shape[-1]] = [step.kernel.source for step in steps], steps[0].cluster
    assert firsts[320] == (["group_norm_nhwc"], 8)
    assert firsts[1280] == (["group_norm_nhwc"], 1)
    assert firsts[640][0] == firsts[128][0] == ["group_norm_nhwc_statistics", "group_norm_nhwc_apply"]
