"""concat and split on a CPU, emulated: every element arrives, bit by bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from concat_cases import SMALL, Case, bits, whole
from kernel_hosts import host_of

from onnxfuse.testing.emulated_launches import emulate

DEVICE = dataclasses.replace(H200, multiprocessors=1)  # so that small tensors have threads with several vectors


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_channels_side_by_side(case: Case, tmp_path: Path) -> None:
    dtype, aligned = ("float32", "float16", "bfloat16")[len(case.channels) % 3], case.channels[0] != 12
    parts = case.parts(dtype)
    for fusion, read, expected in (("concat", parts, [whole(parts)]), ("split", [whole(parts)], parts)):
        node, specs = case.node(fusion, dtype), case.specs(fusion, dtype, aligned)
        (plan,) = host_of(fusion).candidates(node, specs, DEVICE)
        assert [each.shape for each in plan.outputs] == [each.shape for each in expected]
        for found, value in zip(emulate(plan, read, tmp_path, aligned), expected, strict=True):
            np.testing.assert_array_equal(bits(found), bits(value))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_norm_of_parts(case: Case, tmp_path: Path) -> None:
    """A BatchNormalization of the parts gives, bit by bit, what it gives of the channels side by side."""
    dtype, aligned = ("float16", "float32")[len(case.channels) % 2], case.channels[0] != 12
    results = []
    for node, specs, inputs in zip(*case.norms(dtype, aligned), case.norm_inputs(dtype), strict=True):
        (plan,) = host_of(node.fusion).candidates(node, specs, DEVICE)
        results += emulate(plan, inputs, tmp_path, aligned)
    parts, image = results
    assert image.any() or not image.size
    np.testing.assert_array_equal(bits(parts), bits(image))


def test_the_cases_take_every_way() -> None:
    ways = set()
    for case in SMALL:
        for dtype in ("float32", "float16"):
            (plan,) = host_of("concat").candidates(case.node("concat", dtype), case.specs("concat", dtype), DEVICE)
            ways |= {tuple(step.kernel.defines[name] for name in ("WIDTH", "CHUNKS")) for step in plan.steps}
    assert {width for width, _ in ways} == {1, 2, 4, 8}
    assert {chunks for _, chunks in ways} == {1, 2, 4}
