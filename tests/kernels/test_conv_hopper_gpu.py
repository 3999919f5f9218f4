"""The configs of the Hopper convolutions against float64: taps, strides, padding, channels, dtypes, epilogues."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from conv_cases import BOTH, NUMPY, ConvCase, with_vectors
from kernel_runs import RELATIVE, compile_all, in_turns, launch, result, upload
from test_gemm_gpu import ACTIVATION_16

from onnxfuse.kernels.conv import hopper
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Device, Launch, Plan, TensorSpec

pytestmark = pytest.mark.gpu

LARGEST = float(np.finfo(np.float16).max)


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


def configs(case: ConvCase, device: Device) -> list[hopper.HopperConfig]:
    """Return every config for the first case of each dtype; for others a third of those that fit, in turns."""
    fitting = hopper.fitting(case.problem(), device)
    return fitting if case.sizes == (9, 11) and case.extra == BOTH else in_turns(fitting, case, 3)


@pytest.mark.parametrize("case", list(cases()), ids=str)
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
    allowed = 1.02 * RELATIVE[case.dtype] * np.abs(reference) + 1e-6 * (magnitude + 1)
    if case.activation not in ("relu", "prelu"):
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
