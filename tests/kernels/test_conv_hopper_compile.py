"""The Hopper convolutions without a GPU: what the host plans, and that kernels compile without spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
from architectures import A100, H200, check_compiles
from conv_cases import BOTH, NUMPY, ConvCase, with_vectors
from sampling import by_parts

from onnxfuse.kernels.conv import hopper
from onnxfuse.runtime.plan import Launch, TensorMap

SAME = (1, 1, 1, 1)
CASES = (
    ConvCase(32, 64, 64, (56, 56), (3, 3), (), SAME, extra=BOTH),
    ConvCase(8, 24, 160, (80, 80), (3, 3), (2, 2), SAME, dtype="bfloat16", activation="silu"),
    ConvCase(1, 256, 256, (14, 14), (3, 3), (), SAME, extra=BOTH, residual_first=False),
    ConvCase(2, 1280, 1280, (16, 16), (3, 3), (), SAME, extra=BOTH),  # in slices
    *with_vectors(ConvCase(8, 128, 128, (28, 28), (3, 3), (), SAME)),
    ConvCase(1, 512, 512, (1599,), (3,), (2,), (), activation="gelu", extra=()),
    ConvCase(2, 64, 128, (8, 28, 28), (3, 3, 3), (1, 2, 2), (1,) * 6, extra=BOTH),
    ConvCase(32, 64, 64, (56, 56), (3, 3), (), SAME, extra=BOTH, dtype="float32", tf32=True),
    ConvCase(1, 100, 35, (28, 28), (3, 3), (2, 2), SAME, extra=(), dtype="float32", tf32=True, activation="gelu"),
    *with_vectors(ConvCase(1, 256, 256, (14, 14), (3, 3), (), SAME, dtype="float32", tf32=True))[2:],
)


@by_parts(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_without_spills(case: ConvCase, part: int) -> None:
    for way in hopper.implementations(case.problem(), H200)[part::4]:
        for step in way.steps:
            assert isinstance(step, Launch)
            check_compiles(step.kernel, H200, spills=128)  # splits of many blocks spill a few addresses


@pytest.mark.parametrize("case", CASES, ids=str)
def test_launches_and_maps_fit(case: ConvCase) -> None:
    conv = case.problem()
    for config in hopper.fitting(conv, H200):
        (step,) = hopper.implementation(conv, config, H200).steps
        assert isinstance(step, Launch)
        assert step.shared <= H200.shared_per_block and step.grid[0] <= H200.multiprocessors
        assert step.grid[0] % step.cluster == 0
        x, w = (argument for argument in step.arguments[:2] if isinstance(argument, TensorMap))
        assert x.im2col is not None and x.sizes == (case.c, *reversed(case.sizes), case.n)
        assert x.box == (hopper.k_block(conv), config.tile_m) and w.box == (hopper.k_block(conv), 1, config.tile_n)
        assert w.sizes == (case.c, conv.taps, case.m)
        assert case.dtype != "float32" or {x.dtype, w.dtype} == {"tfloat32"}  # which loads round
        pitch = NUMPY[case.dtype].itemsize * case.c
        for size, stride in zip((*reversed(case.sizes), 1), x.strides, strict=True):
            assert stride == pitch
            pitch *= size


def test_blocks_of_k_leave_few_zeros() -> None:
    found = {c: hopper.k_block(ConvCase(1, c, 64, (9, 9), (3, 3)).problem()) for c in (8, 16, 24, 32, 40, 64, 96, 320)}
    assert found == {8: 16, 16: 16, 24: 32, 32: 32, 40: 16, 64: 64, 96: 32, 320: 64}
    in_tf32 = ConvCase(1, 64, 64, (9, 9), (3, 3), dtype="float32", tf32=True)
    assert {c: hopper.k_block(replace(in_tf32, c=c).problem()) for c in (4, 20, 48, 64)} == {
        4: 8,
        20: 8,
        48: 16,
        64: 32,
    }


def test_only_hopper_gpus_have_it() -> None:
    assert hopper.implementations(CASES[0].problem(), A100) == []


@pytest.mark.parametrize(
    "case",
    [
        ConvCase(1, 12, 64, (9, 9), (3, 3)),
        ConvCase(1, 64, 60, (9, 9), (3, 3)),
        ConvCase(1, 64, 64, (300, 300), (3, 3), (), (), (128, 128)),
        ConvCase(1, 64, 64, (99, 99), (3, 3), (9, 9)),
        ConvCase(1, 64, 64, (9, 9), (3, 3), group=2),
        ConvCase(1, 64, 64, (9, 9), (3, 3), dtype="float32"),  # a session that forbids TF32
        ConvCase(1, 62, 64, (9, 9), (3, 3), dtype="float32", tf32=True),
        ConvCase(1, 64, 64, (9, 9), (3, 3), dtype="float32", tf32=True, aligned=False),
        ConvCase(1, 64, 64, (9, 9), (3, 3), aligned=False),
        ConvCase(1, 64, 64, (9, 9), (3, 3), (), (200, 200, 0, 0)),
        ConvCase(1, 64, 64, (40, 9, 9), (3, 3, 3), (), (), (16, 1, 1)),
        ConvCase(1, 64, 64, (9, 9, 9), (3, 3, 3), (), (16,) * 6),
    ],
    ids=str,
)
def test_what_tma_cannot_walk_over_is_refused(case: ConvCase) -> None:
    assert not hopper.is_supported(case.problem(), H200)
    assert hopper.implementations(case.problem(), H200) == []
