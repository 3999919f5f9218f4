"""The tiles of the convolutions by mma.sync and fma against float64: shapes, layouts, dtypes, alignment, epilogues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from conv_cases import NUMPY, WITH_VECTORS_OF_ANY, ConvCase, with_vectors
from kernel_runs import RELATIVE, compile_all, compile_native, in_turns, launch, result, upload

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.kernels.conv import matrix, mma
from onnxfuse.kernels.conv.mma import ConvConfig
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Device, Launch, Plan, TensorSpec

pytestmark = pytest.mark.gpu

SAME = (1, 1, 1, 1)  # padding of a filter of 3 x 3
BOTH = ("bias", "residual")
# The error of sums in fp32, relative to the sum of their terms' magnitudes; with TF32, two operands are rounded.
SUMS = {"fp32": 1e-6, "tf32": 2.0**-10}
ACTIVATION_16 = 2.5e-5  # relative, of an activation for 16-bit results, which a residual may cancel
KINDS = (("float16", False), ("bfloat16", False), ("float32", True), ("float32", False))


def shapes() -> Iterator[ConvCase]:
    """Yield copies of every width, then strides, dilations and pads that differ by axis and by side."""
    for dtype, tf32 in KINDS:
        given = {"dtype": dtype, "tf32": tf32, "extra": BOTH}
        for c in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 40):
            yield ConvCase(2, c, 72, (13, 11), (3, 3), (), SAME, **given)
        for m in (1, 2, 33, 132):
            yield ConvCase(2, 64, m, (13, 11), (3, 3), (), SAME, **given)
        yield ConvCase(3, 64, 64, (33, 35), (3, 3), (), SAME, **given)  # more tiles than multiprocessors
        yield ConvCase(1, 256, 256, (14, 14), (3, 3), (), SAME, **given)  # much k, in slices
        yield ConvCase(1, 511, 130, (7, 7), (3, 3), (), SAME, **given)
        yield ConvCase(2, 40, 40, (12, 13), (1, 1), (2, 2), **given)
    for strides in ((1, 1), (1, 2), (2, 1), (2, 3), (3, 3)):
        for dilations in ((1, 1), (2, 1), (1, 2), (2, 2)):
            yield ConvCase(2, 16, 40, (17, 19), (3, 2), strides, (0, 1, 2, 3), dilations)
    yield ConvCase(3, 16, 32, (1, 1), (3, 3), (), SAME)  # taps outside alone
    yield ConvCase(2, 16, 32, (3, 3), (2, 2), (), (4, 5, 3, 4))  # pixels of padding alone
    yield ConvCase(1, 32, 32, (40, 40), (11, 7), (2, 1), (5, 3, 5, 3))


def kinds() -> Iterator[ConvCase]:
    """Yield other numbers of axes, groups, layouts, alignments and magnitudes."""
    for dtype, tf32 in KINDS:
        given = {"dtype": dtype, "tf32": tf32, "extra": BOTH}
        yield ConvCase(3, 24, 40, (61,), (5,), (2,), (2, 1), **given)
        yield ConvCase(2, 12, 36, (5, 9, 8), (3, 2, 3), (1, 2, 1), (1, 0, 1, 1, 1, 0), (1, 1, 2), **given)
        yield ConvCase(1, 96, 96, (161,), (128,), (), (64, 64), group=2, **given)
        yield ConvCase(2, 32, 64, (5, 9, 8), (3, 3, 3), (), (1,) * 6, group=4, **given)
        yield ConvCase(2, 3, 64, (45, 47), (7, 7), (2, 2), (3, 3, 3, 3), x_nchw=True, **given)
        yield ConvCase(2, 5, 20, (5, 9, 8), (3, 3, 3), (), (1,) * 6, x_nchw=True, **given)
        yield ConvCase(2, 64, 128, (13, 11), (3, 3), (), SAME, group=2, **given)
        yield ConvCase(2, 64, 64, (13, 11), (3, 3), (), SAME, group=8, **given)
        yield ConvCase(2, 9, 15, (13, 11), (3, 3), (), SAME, group=3, **given)
        yield ConvCase(2, 6, 12, (13, 11), (3, 3), (), SAME, group=3, x_nchw=True, **given)
        yield ConvCase(2, 24, 48, (13, 11), (3, 3), (), SAME, group=24, w_hwio=True, **given)
        yield ConvCase(2, 40, 72, (13, 11), (3, 3), (), SAME, w_hwio=True, **given)
        yield ConvCase(2, 7, 33, (13, 11), (3, 3), (), SAME, w_hwio=True, **given)
        yield ConvCase(2, 40, 72, (13, 11), (3, 3), (), SAME, aligned=False, **given)
        yield ConvCase(2, 5, 33, (13, 11), (3, 3), (), SAME, aligned=False, **given)
        yield ConvCase(2, 40, 72, (13, 11), (3, 3), (), SAME, scale=300.0, **given)


def epilogues() -> Iterator[ConvCase]:
    for extra in ((), ("bias",), ("residual",), BOTH):
        for residual_first in (True, False)[: 1 + ("residual" in extra)]:
            yield ConvCase(2, 32, 64, (9, 9), (3, 3), (), SAME, extra=extra, residual_first=residual_first)
            yield ConvCase(1, 128, 40, (7, 7), (3, 3), (), SAME, extra=extra, residual_first=residual_first,
                           activation="silu")  # fmt: skip
    for activation in sorted(set(ACTIVATIONS) - {"relu"}):
        yield ConvCase(2, 32, 64, (9, 9), (3, 3), (), SAME, activation=activation)
    yield from WITH_VECTORS_OF_ANY
    yield from with_vectors(ConvCase(1, 128, 40, (7, 7), (3, 3), (), SAME), ConvCase(3, 64, 64, (9, 9), (1, 1)))


@pytest.fixture(scope="module")
def device() -> Device:
    return gpu(0)


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile what the tests launch, by several compilers at once: one at a time, these kernels take minutes."""
    compile_native()
    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, ConvCase) and item.path == request.path:
            steps = (step for way in ways_of(case, gpu(0)) for step in way.steps)
            compile_all((step.kernel for step in steps if isinstance(step, Launch)), gpu(0))


def ways_of(case: ConvCase, device: Device) -> list[Implementation]:
    """Return a third of the tiles, in turns from case to case, and one with slices of k that are not equal."""
    conv = case.problem()
    every = mma.configs(conv, device)
    found = in_turns(every, case, 3)
    if mma.k_tiles(conv, found[0].tile) > 3:
        found.append(ConvConfig(found[0].tile, 3))
    return [mma.implementation(conv, config, device) for config in dict.fromkeys(found)]


def check(case: ConvCase, ways: list[Implementation], exact: bool) -> None:
    arrays = case.arrays()
    expected, magnitude = case.expect(arrays)
    tf32 = case.dtype == "float32" and not exact
    slack = SUMS["tf32" if tf32 else "fp32"] * (magnitude + np.abs(expected))
    if case.dtype != "float32":
        slack = slack + ACTIVATION_16 * np.abs(expected)
        if "residual" in case.extra and not case.residual_first:
            slack = slack + ACTIVATION_16 * np.abs(expected - arrays["residual"].astype(np.float64))
    tiny = 1e-7 if case.dtype == "float16" else 1e-30  # fp16 has no smaller number
    spec = TensorSpec((case.n, *case.y_sizes, case.m), case.dtype, case.aligned)
    read = [upload(value, case.aligned) for value in arrays.values()]
    assert ways
    for way in ways:
        written = upload(np.full(spec.shape, np.nan, NUMPY[case.dtype]), case.aligned)
        launch(Plan((spec,), way.steps, way.scratch), read, [written])
        y = result(written, spec, case.aligned).astype(np.float64)
        excess = np.abs(y - expected) - (slack + RELATIVE[case.dtype] * np.abs(expected) + tiny)
        place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
        told = f"{way.name} at {place}: {y[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"
        assert (excess <= 0).all(), told


def check_all(case: ConvCase, device: Device) -> None:
    if case.dtype == "bfloat16" and device.arch < mma.MMA_ARCH:
        pytest.skip(f"bfloat16 needs compute capability {mma.MMA_ARCH}")
    check(case, ways_of(case, device), mma.is_exact(case.problem(), device))


@pytest.mark.parametrize("case", list(shapes()), ids=str)
def test_shapes(device: Device, case: ConvCase) -> None:
    check_all(case, device)


@pytest.mark.parametrize("case", list(kinds()), ids=str)
def test_kinds(device: Device, case: ConvCase) -> None:
    check_all(case, device)


@pytest.mark.parametrize(
    "case",
    with_vectors(*(ConvCase(3, 64, m, (9, 9), (1, 1), dtype=dtype) for m in (72, 33) for dtype in NUMPY)),
    ids=str,
)
def test_pointwise_ones_by_the_kernels_of_products(device: Device, case: ConvCase) -> None:
    ways = matrix.implementations(case.problem(), device)
    check(case, ways, mma.is_exact(case.problem(), device))


@pytest.mark.parametrize("case", list(epilogues()), ids=str)
def test_epilogues(device: Device, case: ConvCase) -> None:
    check_all(case, device)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_plans_of_older_gpus(device: Device, dtype: str) -> None:
    """The plans of a GPU with less shared memory run here too."""
    older = replace(device, arch=80, shared_per_block=101376)
    for case in (
        ConvCase(2, 64, 64, (13, 11), (3, 3), (), SAME, dtype=dtype, extra=BOTH),
        ConvCase(1, 256, 256, (14, 14), (3, 3), (), SAME, dtype=dtype, tf32=True),
    ):
        conv = case.problem()
        check(case, mma.implementations(conv, older), mma.is_exact(conv, older))


@pytest.mark.parametrize(("n", "m"), [(0, 8), (2, 0)])
def test_an_empty_output_is_no_implementation(device: Device, n: int, m: int) -> None:
    conv = ConvCase(2, 8, 8, (9, 9), (3, 3)).problem()
    assert mma.implementations(replace(conv, n=n, m=m), device) == []
