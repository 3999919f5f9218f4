"""The configs of the Hopper convolutions against float64: taps, strides, padding, channels, dtypes, epilogues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from conv_cases import BOTH, NUMPY, ConvCase, with_vectors
from kernel_runs import RELATIVE, compile_all, in_turns, launch, result, upload
from test_gemm_gpu import ACTIVATION_16

from onnxfuse.kernels.conv import hopper, hopper_slices
from onnxfuse.kernels.conv.hopper_slices import SlicedConfig
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Device, Launch, Plan, TensorSpec

pytestmark = pytest.mark.gpu

MAX_SLICED = 6  # configs whose blocks have slices of k, about
LARGEST = float(np.finfo(np.float16).max)
# The error of sums in fp32, relative to the sum of their terms' magnitudes; in TF32, both operands are rounded.
SUMS, SUMS_TF32 = 1e-6, 2.0**-10


def cases() -> Iterator[ConvCase]:
    """Yield asymmetric padding, strides, dilations, tiles that cross images, few channels, and every epilogue."""
    same = (1, 1, 1, 1)
    for dtype in ("float16", "bfloat16"):
        yield ConvCase(2, 64, 64, (9, 11), (3, 3), (), same, dtype=dtype, extra=BOTH)
        yield ConvCase(3, 128, 72, (7, 7), (3, 3), (), same, dtype=dtype, extra=BOTH, residual_first=False)
    yield ConvCase(2, 64, 136, (10, 13), (3, 5), (), (0, 1, 2, 3))
    yield ConvCase(2, 64, 64, (15, 14), (3, 3), (2, 2), same)
    yield ConvCase(2, 64, 64, (15, 14), (3, 3), (2, 1), (0, 0, 1, 1), dtype="bfloat16", constant=False)
    yield ConvCase(2, 64, 64, (16, 17), (3, 3), (), (2, 3, 2, 3), (2, 3))
    yield ConvCase(2, 72, 64, (16, 17), (1, 1), (2, 2))
    yield ConvCase(1, 64, 64, (20, 20), (7, 7), (), (3,) * 4, activation="silu", extra=BOTH, residual_first=False)
    for channels in (8, 16, 24, 32, 40, 48, 96, 200):
        yield ConvCase(2, channels, 64, (12, 9), (3, 3), (), same, extra=BOTH)
    for filters in (8, 32, 40, 96, 160, 264):
        yield ConvCase(2, 64, filters, (12, 9), (3, 3), (), same, extra=BOTH)
    yield ConvCase(1, 256, 64, (1, 1), (1, 3), (), (0, 1, 0, 1))
    yield ConvCase(5, 64, 64, (40,), (5,), (2,), (2, 1))
    yield ConvCase(3, 48, 72, (301,), (3,), (), (512, 512), (512,), dtype="bfloat16")  # far taps of a long row
    yield ConvCase(2, 512, 64, (799,), (10,), (5,), (3, 0), activation="silu", extra=BOTH, residual_first=False)
    yield ConvCase(2, 64, 72, (5, 7, 9), (3, 3, 3), (), (1,) * 6, extra=BOTH)
    yield ConvCase(3, 40, 64, (7, 8, 6), (2, 3, 1), (2, 1, 3), (0, 1, 2, 1, 2, 0), (1, 2, 1), dtype="bfloat16")
    yield ConvCase(2, 16, 64, (17, 9, 10), (5, 1, 3), (1, 2, 1), (4, 0, 1, 4, 0, 1), (2, 1, 1), extra=())
    yield ConvCase(9, 64, 128, (33, 35), (3, 3), (), same, extra=BOTH)  # more tiles than multiprocessors
    yield ConvCase(2, 64, 64, (9, 11), (3, 3), (), same, scale=300.0)
    yield ConvCase(2, 64, 64, (9, 11), (3, 3), (), same, extra=())
    yield ConvCase(2, 64, 64, (6, 5), (3, 3), (), (4, 5, 3, 4))  # pixels that read padding alone
    yield from with_vectors(ConvCase(2, 64, 72, (12, 9), (3, 3), (), same))
    yield from with_vectors(ConvCase(2, 512, 64, (7, 7), (3, 3), (), same, dtype="bfloat16"))


def tf32_cases() -> Iterator[ConvCase]:
    """Yield the same in TF32, with channels that are multiples of 4, odd filters, small and large magnitudes."""
    of_halves = [case for case in cases() if case.dtype == "float16"]
    yield from (replace(case, dtype="float32", tf32=True) for case in of_halves)
    given = {"dtype": "float32", "tf32": True, "extra": BOTH}
    for channels in (4, 12, 20, 36, 100):
        yield ConvCase(2, channels, 64, (12, 9), (3, 3), (), (1, 1, 1, 1), **given)
    for filters in (1, 2, 33, 35, 130):
        yield ConvCase(2, 64, filters, (12, 9), (3, 3), (), (1, 1, 1, 1), **given)
    for scale in (1e-30, 1e30):
        yield ConvCase(2, 64, 64, (9, 10), (3, 3), (), (1, 1, 1, 1), scale=scale, activation="none", **given)
    yield ConvCase(2, 64, 64, (9, 10), (3, 3), (), (1, 1, 1, 1), constant=False, **given)
    yield ConvCase(1, 256, 256, (14, 14), (3, 3), (), (1, 1, 1, 1), **given)  # much k, in slices
    yield from with_vectors(ConvCase(2, 64, 35, (12, 9), (3, 3), (), (1, 1, 1, 1), dtype="float32", tf32=True))


def configs(case: ConvCase, device: Device) -> list[hopper.HopperConfig | SlicedConfig]:
    """Return every config for the first case of each dtype; for others a third of those that fit, in turns."""
    conv = case.problem()
    sliced = hopper_slices.fitting(conv, hopper.gemm_of_blocks(conv), device)
    step = max(1, len(sliced) // MAX_SLICED)
    fitting = [*hopper.fitting(conv, device), *sliced[::step]]
    return fitting if case.sizes == (9, 11) and case.extra == BOTH else in_turns(fitting, case, 3)


@pytest.mark.parametrize("case", [*cases(), *tf32_cases()], ids=str)
def test_configs_match_float64(case: ConvCase) -> None:
    device = gpu(0)
    if device.arch != 90:
        pytest.skip("needs a Hopper GPU")
    arrays, conv = case.arrays(), case.problem()
    assert hopper.is_supported(conv, device)
    y = TensorSpec((case.n, *case.y_sizes, case.m), case.dtype)
    ways = {config.name: hopper.implementation(conv, config, device) for config in configs(case, device)}
    plans = {name: Plan((y,), way.steps, way.scratch) for name, way in ways.items()}
    compile_all((step.kernel for plan in plans.values() for step in plan.steps if isinstance(step, Launch)), device)
    expected, magnitude = case.expect(arrays)
    reference = np.clip(expected, -LARGEST, LARGEST) if case.dtype == "float16" else expected
    sums = SUMS_TF32 * magnitude if case.tf32 else SUMS * (magnitude + 1)
    allowed = 1.02 * RELATIVE[case.dtype] * np.abs(reference) + sums
    if case.activation not in ("none", "relu", "prelu") and "residual" in arrays:
        allowed += ACTIVATION_16 * np.abs(expected - arrays["residual"].astype(np.float64))
    read = [upload(value) for value in arrays.values()]
    wrong = {}
    for name, plan in plans.items():
        written = upload(np.full(y.shape, np.nan, NUMPY[case.dtype]))
        launch(plan, read, [written])
        found = result(written, y, True).astype(np.float64)
        error = np.abs(np.where(np.isinf(found), np.sign(found) * LARGEST, found) - reference)
        if not (error <= allowed).all():
            at = np.argwhere(~(error <= allowed))
            wrong[name] = (
                f"{len(at)} of {error.size}, first at {at[0]}: {found[tuple(at[0])]}, {reference[tuple(at[0])]}"
            )
    assert not wrong


def outputs_in_tf32(case: ConvCase, arrays: dict[str, np.ndarray], device: Device) -> Iterator[np.ndarray]:
    """Yield y of a config of each kind, without activation and operands of the epilogue."""
    if device.arch != 90:
        pytest.skip("needs a Hopper GPU")
    y = TensorSpec((case.n, *case.y_sizes, case.m), "float32")
    for split in (1, 2):
        config = next(each for each in hopper.fitting(case.problem(), device) if each.split_k == split)
        way = hopper.implementation(case.problem(), config, device)
        written = upload(np.full(y.shape, np.nan, np.float32))
        launch(Plan((y,), way.steps, way.scratch), [upload(value) for value in arrays.values()], [written])
        yield result(written, y, True)


PLAIN_TF32 = ConvCase(
    2, 256, 64, (14, 14), (3, 3), (), (1, 1, 1, 1), dtype="float32", tf32=True, extra=(), activation="none"
)


def test_tf32_is_the_nearest_number() -> None:
    """Products of positive numbers have the mean that they have in float64; cut off, they are 7e-4 smaller."""
    arrays = {name: np.abs(value) for name, value in PLAIN_TF32.arrays().items()}
    expected, _ = PLAIN_TF32.expect(arrays)
    for y in outputs_in_tf32(PLAIN_TF32, arrays, gpu(0)):
        assert abs(np.mean(y / expected) - 1) < 5e-5


def test_numbers_of_tf32_are_exact() -> None:
    """Small integers have products and sums without rounding."""
    draw = np.random.default_rng(0)
    arrays = {name: draw.integers(-8, 9, value.shape).astype(np.float32) for name, value in PLAIN_TF32.arrays().items()}
    expected, _ = PLAIN_TF32.expect(arrays)
    for y in outputs_in_tf32(PLAIN_TF32, arrays, gpu(0)):
        np.testing.assert_array_equal(y, expected)


def test_numbers_that_are_not_finite_stay_so_in_tf32() -> None:
    """An infinite or NaN element of x makes those sums infinite or NaN that read it, and no others."""
    arrays = PLAIN_TF32.arrays()
    arrays["x"][0, 3, 3, 5] = np.inf
    arrays["x"][1, 9, 9, 200] = np.nan
    arrays["x"][1, 2, 12, 7] = np.uint32(0x7FFFFFFF).view(np.float32)  # the NaN of a GPU's arithmetic
    with np.errstate(invalid="ignore"):
        expected, _ = PLAIN_TF32.expect(arrays)
    for y in outputs_in_tf32(PLAIN_TF32, arrays, gpu(0)):
        np.testing.assert_array_equal(np.isfinite(y), np.isfinite(expected))
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
