"""Every config of the Hopper GEMM against float64: sizes, layouts, dtypes, epilogues, and in a CUDA graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from kernel_runs import NUMPY, RELATIVE, compile_all, compile_native, cupy, launch, result, upload
from test_gemm_gpu import Case, expect, run

from onnxfuse.activations import ACTIVATIONS, PRELU
from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.problem import group
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import Launch, Plan, Pointer, TensorSpec

pytestmark = pytest.mark.gpu

# One element of everything; k below and inside a stage; odd m; n that ends inside a subtile and a tile; more
# tiles than multiprocessors, so that rings and slots go around; k of many rounds.
SIZES = [(1, 8, 8), (1, 4096, 64), (129, 264, 40), (300, 1032, 328), (1000, 200, 1000), (2100, 2104, 136),
         (4096, 768, 768), (77, 96, 8192)]  # fmt: skip
SMALL = (333, 328, 200)
# Rows that do not begin at multiples of 16 bytes: of y alone if w is n x k, of x and w alone, of everything; of an even
# number of elements; of one; more tiles than multiprocessors; many rows, rows of more than one segment of a copy.
ODD = [(64, 5257, 768), (130, 264, 41), (1001, 1003, 1005), (300, 1002, 330), (5, 1, 7), (130, 3, 1), (1, 1, 1),
       (2100, 2103, 135), (1000, 1001, 1003), (77, 97, 8191)]  # fmt: skip
ALL = ("bias", "column_scale", "residual")
CONFIGS = (*hopper.CONFIGS, *hopper.HALF_CONFIGS)
# One config of each kind: pingpong consumers, consumers that share a tile, blocks that share one, and one consumer.
KINDS = tuple(next(t for t in CONFIGS if kind(t)) for kind in (
    lambda t: t.pingpong, lambda t: not t.pingpong and t.split_k == 1, lambda t: t.split_k > 1,
    lambda t: t.half))  # fmt: skip


def candidates(
    case: Case, configs: Sequence[hopper.HopperConfig]
) -> tuple[list[Implementation], TensorSpec, dict[str, np.ndarray]]:
    arrays, device = case.arrays(), gpu(0)
    if device.arch != 90:
        pytest.skip("needs a Hopper GPU")
    gemm, y = case.product(device, arrays)
    fitting = [config for config in configs if hopper.fits(gemm, config, device)]
    return [hopper.implementation(gemm, config, device) for config in fitting], y, arrays


def in_tf32() -> Iterator[Case]:
    for m, n, k in SIZES:
        yield Case(m, n, k, "float32", "kn", ALL, "gelu", tf32=True)
    for extra in ((), ("bias",), ("residual",)):
        yield Case(*SMALL, "float32", "kn", extra, "relu", tf32=True)


def sizes() -> Iterator[Case]:
    for (m, n, k), (dtype, layout) in itertools.product(SIZES, [("float16", "kn"), ("bfloat16", "nk")]):
        yield Case(m, n, k, dtype, layout, ALL, "gelu")
        yield Case(m, n, k, dtype, layout, ("bias", "up_bias"), "silu", gated=True)


def epilogues() -> Iterator[Case]:
    for count in range(4):
        for extra in itertools.combinations(ALL, count):
            yield Case(*SMALL, "float16", "kn", extra, "relu")
            yield Case(*SMALL, "bfloat16", "nk", extra)
    for extra in ((), ("bias",), ("up_bias",)):
        yield Case(*SMALL, "float16", "nk", extra, "gelu_tanh", gated=True)
        yield Case(*SMALL, "bfloat16", "kn", extra, "sigmoid", gated=True)
    for activation in ACTIVATIONS:
        yield Case(*SMALL, "float16", "kn", ("bias",), activation)
    yield Case(*SMALL, "float16", "nk", ("bias", "slope", "residual"), PRELU)
    yield Case(*SMALL, "bfloat16", "kn", ("slope", "column_scale"), PRELU)


def anywhere() -> Iterator[Case]:
    """Yield products whose rows and pointers TMA does not take."""
    for (m, n, k), (dtype, layout) in itertools.product(ODD, [("float16", "nk"), ("bfloat16", "kn")]):
        yield Case(m, n, k, dtype, layout, ALL, "gelu")
        yield Case(m, n, k, dtype, layout, ("bias", "up_bias"), "silu", gated=True)
    for size, (dtype, layout) in itertools.product([SMALL, (333, 327, 201)], [("float16", "nk"), ("bfloat16", "kn")]):
        yield Case(*size, dtype, layout, ALL, "gelu", aligned=False)
        yield Case(*size, dtype, layout, ("bias", "up_bias"), "silu", gated=True, aligned=False)


def epilogues_anywhere() -> Iterator[Case]:
    for case in dict.fromkeys(epilogues()):
        if case.activation in ("relu", "none", "gelu_tanh", "sigmoid"):
            yield replace(case, n=327, k=201)


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile what the tests launch, by several compilers at once: one at a time, these kernels take minutes."""
    compile_native()
    wanted = [(item, item.callspec.params.get("case")) for item in request.session.items if hasattr(item, "callspec")]
    for item, case in wanted:
        if isinstance(case, Case) and item.path == request.path:
            configs = KINDS if "epilogues" in item.originalname else hopper.TF32_CONFIGS if case.tf32 else CONFIGS
            steps = (step for way in candidates(case, configs)[0] for step in way.steps)
            compile_all((step.kernel for step in steps if isinstance(step, Launch)), gpu(0))


def check(name: str, values: np.ndarray, expected: np.ndarray, slack: np.ndarray) -> None:
    dtype = values.dtype.name
    tiny = 1e-7 if dtype == "float16" else 1e-30  # fp16 has no smaller number
    error = np.abs(values.astype(np.float64) - expected)
    wrong = ~(error <= slack + RELATIVE[dtype] * np.abs(expected) + tiny)
    assert not wrong.any(), f"{name}: {wrong.sum()} wrong, the first at {np.argwhere(wrong)[0]}"


def check_all(case: Case, configs: Sequence[hopper.HopperConfig]) -> None:
    found, y, arrays = candidates(case, configs)
    expected, slack = expect(case, arrays)
    assert found
    for way in found:
        check(way.name, run(way, y, arrays, case.aligned), expected, slack)


@pytest.mark.parametrize("case", list(sizes()), ids=str)
def test_sizes(case: Case) -> None:
    check_all(case, CONFIGS)


@pytest.mark.parametrize("case", list(in_tf32()), ids=str)
def test_sizes_in_tf32(case: Case) -> None:
    check_all(case, hopper.TF32_CONFIGS)


@pytest.mark.parametrize("case", list(anywhere()), ids=str)
def test_rows_that_begin_anywhere(case: Case) -> None:
    check_all(case, CONFIGS)


@pytest.mark.parametrize("case", list(epilogues_anywhere()), ids=str)
def test_epilogues_of_rows_that_begin_anywhere(case: Case) -> None:
    check_all(case, KINDS)


@pytest.mark.parametrize("case", list(epilogues()), ids=str)
def test_epilogues(case: Case) -> None:
    check_all(case, KINDS)


@pytest.mark.parametrize(
    ("dtype", "layout", "odd"),
    [("float16", "kn", 0), ("float16", "kn", 1), ("bfloat16", "nk", 0), ("bfloat16", "nk", 1), ("float32", "kn", 0)],
)
def test_products_of_one_launch(dtype: str, layout: str, odd: int) -> None:
    """The n of all three weights end inside tiles of their own; the second product has no bias."""
    sizes = ((1032 + odd, ("bias",)), (72, ()), (520 + odd, ("bias",)))
    cases = [Case(1000, n, 328 + odd, dtype, layout, bias, tf32=dtype == "float32") for n, bias in sizes]
    every, gemms, outputs = [], [], []
    for i, case in enumerate(cases):
        arrays = case.arrays()
        gemm, y = case.product(gpu(0), arrays)
        bias = Pointer("input", len(every) + 2) if case.extra else None
        gemms.append(replace(gemm, w=Pointer("input", len(every) + 1), bias=bias, y=Pointer("output", i)))
        every += list(arrays.values())  # x is the same in each
        outputs.append(y)
    gemm = group(gemms)
    assert gemm is not None
    every_config = hopper.TF32_CONFIGS if dtype == "float32" else CONFIGS
    configs = [config for config in every_config if hopper.fits(gemm, config, gpu(0))]
    for way in (hopper.implementation(gemm, config, gpu(0)) for config in configs):
        written = [upload(np.full(y.shape, np.nan, NUMPY[dtype])) for y in outputs]
        launch(Plan(tuple(outputs), way.steps, way.scratch), [upload(value) for value in every], written)
        for case, buffer, y in zip(cases, written, outputs, strict=True):
            check(way.name, result(buffer, y, True), *expect(case, case.arrays()))


@pytest.mark.parametrize("size", [(2100, 2104, 136), (2100, 2103, 135)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_replayed_in_a_cuda_graph(gated: bool, size: tuple[int, int, int]) -> None:
    case = Case(*size, "float16", "kn", ("bias",) if gated else ALL, "silu", gated=gated)
    found, y, arrays = candidates(case, KINDS)
    for way in found:
        read = [upload(value) for value in arrays.values()]
        written = upload(np.full(y.shape, np.nan, NUMPY[y.dtype]))
        plan = Plan((y,), way.steps, way.scratch)
        ready = ready_plan(plan, [TensorSpec((each.nbytes,), "uint8") for each in read])
        scratch = cupy.full(max(1, ready.scratch_bytes), 0xFF, dtype=cupy.uint8)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            ready.run([each.data.ptr for each in read], [written.data.ptr], scratch.data.ptr, stream.ptr)
            graph = stream.end_capture()
        for seed in (1, 2):  # new values in the same places
            arrays["x"] = np.roll(arrays["x"], seed, axis=0)
            read[list(arrays).index("x")].set(arrays["x"].reshape(-1).view(np.uint8))
            written.fill(0xFF)
            cupy.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
            stream.synchronize()
            expected, slack = expect(case, arrays)
            check(way.name, result(written, y, True), expected, slack)
