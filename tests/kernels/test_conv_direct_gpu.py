"""Depthwise, grouped and stem convolutions on a GPU, against float64: every implementation that a problem has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from conv_cases import (
    BOTH,
    DEPTHWISE,
    DEPTHWISE_MMA,
    DEPTHWISE_SLIDING,
    GROUPED,
    NOT_FINITE,
    STEMS,
    WITH_VECTORS,
    ConvCase,
    depthwise,
    image,
    large_shapes,
    not_finite,
)
from kernel_runs import NUMPY, RELATIVE, compile_all, in_turns, launch, result, upload

from onnxfuse.kernels.conv import depthwise as depthwise_host
from onnxfuse.kernels.conv import depthwise_mma, depthwise_sliding, grouped, stem
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, Launch, Plan, TensorSpec

pytestmark = pytest.mark.gpu

HOSTS: dict[str, Callable[[Conv, Device], list[Implementation]]] = {
    "depthwise": depthwise_host.implementations,
    "depthwise_mma": depthwise_mma.implementations,
    "depthwise_sliding": depthwise_sliding.implementations,
    "grouped": grouped.implementations,
    "stem": stem.implementations,
}
MATRIX_ARCH = 80  # the first compute capability that kinds other than depthwise run on
MOST_SHARED = 200000  # bytes of a block: with as many, every case fits
SUMS = {"float32": 2e-6, "float16": 2e-6, "bfloat16": 2e-6, "tf32": 2.0**-10}  # of the terms' magnitudes
ACTIVATION_16 = 2.5e-5  # relative, of an activation for 16-bit results
LARGE = 2000.0  # times x: sums near the largest fp16 numbers


@pytest.fixture(scope="module")
def gpu() -> Device:
    return cuda_driver.gpu(0)


def variants(case: ConvCase) -> list[ConvCase]:
    """Return a small case in every dtype, misaligned, with large values, and with weights in the other layout."""
    dtypes = [dataclasses.replace(case, dtype=dtype, tf32=dtype == "float32") for dtype in NUMPY]
    others = [dataclasses.replace(case, aligned=False), dataclasses.replace(case, w_hwio=not case.w_hwio)]
    return [*dtypes, *others, dataclasses.replace(case, scale=LARGE, activation="none")]


# Larger than a block in every direction, with sizes that no tile divides.
ODD = {
    "depthwise": [
        depthwise(3, 72, (37, 45), (k, k), (s, s), (k // 2,) * 4, extra=BOTH) for k in (3, 5, 7) for s in (1, 2)
    ],
    "grouped": [
        ConvCase(3, 96, 96, (37, 45), (3, 3), (s, s), (1, 1, 1, 1), group=g, extra=BOTH)
        for g in (3, 6, 12, 24)
        for s in (1, 2)
    ],
    "stem": [image(3, 3, 72, (75, 93), (k, k), (s, s), (k // 2,) * 4, extra=BOTH) for k in (3, 7) for s in (1, 2)],
}
ODD["depthwise_mma"] = [*ODD["depthwise"], dataclasses.replace(ODD["depthwise"][2], dtype="bfloat16", w_hwio=False)]
ODD["depthwise_sliding"] = [case for case in ODD["depthwise"] if case.strides == (1, 1)]
SMALL = {
    "depthwise": DEPTHWISE,
    "depthwise_mma": DEPTHWISE_MMA,
    "depthwise_sliding": DEPTHWISE_SLIDING,
    "grouped": GROUPED,
    "stem": STEMS,
}
LARGE_SHAPES = {
    **large_shapes(),
    "depthwise_mma": large_shapes()["depthwise"],
    "depthwise_sliding": [case for case in large_shapes()["depthwise"] if case.strides == (1, 1)],
}
CASES = [
    (kind, case)
    for kind in HOSTS
    for case in dict.fromkeys(
        [
            *(each for small in SMALL[kind] for each in variants(small)),
            *WITH_VECTORS[kind],
            *ODD[kind],
            *LARGE_SHAPES[kind],
        ]
    )
]


def implementations(kind: str, case: ConvCase, gpu: Device) -> list[Implementation]:
    """Return all implementations, two of a small case, or one of these in turns of its variants, which are many."""
    found = HOSTS[kind](case.problem(), gpu)
    if case in ODD[kind] or case in LARGE_SHAPES[kind]:
        return found
    return found[:2] if case in SMALL[kind] or case in NOT_FINITE else in_turns(found[:2], case, 2)


def ways_of(kind: str, case: ConvCase, gpu: Device) -> Sequence[Implementation]:
    """Return the implementations; a skip where the kind does not run the case on this GPU."""
    found = implementations(kind, case, gpu)
    if not found:
        needs_matrix_units = kind != "depthwise" and gpu.arch < MATRIX_ARCH
        misaligned = kind in ("depthwise_mma", "grouped") and not case.aligned
        fp32 = kind == "depthwise_mma" and case.dtype == "float32"
        too_large = kind != "depthwise" and gpu.shared_per_block < MOST_SHARED  # weights lie in shared memory
        assert needs_matrix_units or misaligned or fp32 or too_large, f"no {kind} kernel runs {case}"
        pytest.skip(f"{kind} kernels do not run {case} on {gpu.name}")
    return found


def run(case: ConvCase, way: Implementation, arrays: dict[str, np.ndarray]) -> np.ndarray:
    y = TensorSpec((case.n, *case.y_sizes, case.m), case.dtype, case.aligned)
    read = [upload(value, case.aligned) for value in arrays.values()]
    written = upload(np.full(y.shape, np.nan, NUMPY[y.dtype]), case.aligned)
    launch(Plan((y,), way.steps, way.scratch), read, [written])
    return result(written, y, case.aligned)


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest, gpu: Device) -> None:
    """Compile what the tests launch, by several compilers at once."""
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if isinstance(parameters.get("case"), ConvCase) and item.path == request.path:
            ways = implementations(parameters["kind"], parameters["case"], gpu)
            compile_all((step.kernel for way in ways for step in way.steps if isinstance(step, Launch)), gpu)


@pytest.mark.parametrize(("kind", "case"), CASES, ids=str)
def test_matches_float64(kind: str, case: ConvCase, gpu: Device) -> None:
    ways = ways_of(kind, case, gpu)
    arrays = case.arrays()
    with np.errstate(over="ignore"):
        expected, magnitude = case.expect(arrays)
        finite = np.abs(expected) < (65000 if case.dtype == "float16" else np.inf)
    slack = SUMS["tf32" if case.tf32 and case.dtype == "float32" else case.dtype] * 1.7 * magnitude
    slack = slack + (RELATIVE["float32"] if case.dtype == "float32" else ACTIVATION_16) * np.abs(expected)
    allowed = slack + RELATIVE[case.dtype] * np.abs(expected) + 1e-7
    for way in ways:
        values = run(case, way, arrays).astype(np.float64)
        error = np.where(finite, np.abs(np.where(finite, values, 0) - np.where(finite, expected, 0)), 0)
        excess = error - allowed
        place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
        told = f"{way.name} at {place}: {values[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"
        assert (excess <= 0).all(), told


@pytest.mark.parametrize("kind", ("depthwise", "depthwise_mma"))
@pytest.mark.parametrize("case", NOT_FINITE, ids=str)
def test_channels_stay_apart(kind: str, case: ConvCase, gpu: Device) -> None:
    """An infinity or NaN of one channel leaves the channels beside it as they are."""
    arrays = not_finite(case)
    expected, _ = case.expect(arrays)
    finite = np.isfinite(expected)
    for way in ways_of(kind, case, gpu):
        values = run(case, way, arrays).astype(np.float64)
        np.testing.assert_array_equal(values[~finite], expected[~finite], way.name)
        np.testing.assert_allclose(values[finite], expected[finite], 1.1 * RELATIVE[case.dtype], 1e-5, err_msg=way.name)


@pytest.mark.parametrize("kind", HOSTS)
def test_no_images_are_no_launch(kind: str, gpu: Device) -> None:
    for case in SMALL[kind]:
        assert HOSTS[kind](dataclasses.replace(case, n=0).problem(), gpu) == []
