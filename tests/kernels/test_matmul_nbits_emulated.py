"""Products with quantized weights on a CPU, by the kernels' own sources."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from architectures import H200, T4
from conv_emulation import placed
from conv_mma_emulation import launch as launch_mma
from conv_mma_emulation import text_of
from hopper_emulation import run as run_on_hopper
from nbits_cases import CASES, NORMALIZED, NUMPY, Case, check_within, stored_arrays
from sampling import by_parts, in_turn, sampled

from onnxfuse.kernels.matmul_nbits import hopper
from onnxfuse.kernels.matmul_nbits.hopper import HopperConfig
from onnxfuse.kernels.matmul_nbits.host import candidates
from onnxfuse.kernels.matmul_nbits.problem import products_of
from onnxfuse.runtime.plan import Kernel, Launch, Plan, Pointer, TensorSpec
from onnxfuse.testing.emulated_launches import emulate

EVERY = 25  # of the cases, in a plain run of the tests
# The functions in whose place nbits_mma_emulated.h stands, and an instruction that only tells the compiler something.
STOOD_IN = "store_shared|load_shared"
DEFINITION = re.compile(
    rf"(?m)^(template <int BYTES>\n)?__device__ __forceinline__ \w+ ({STOOD_IN})\([^)]*\) {{.*\n"
    r"(    .*\n)*}\n"
)
SETTLED = re.compile(r'asm volatile\("" : [^;]*;')
# Tiles without their last rows, blocks that are longer than a stage or than k, rows of odd bytes of zero
# points, tiles that end after the last column, several tiles for a block, several products, and blocks of 16 warps.
WITH_MMA = [
    *(Case(m, 40, 136, bits=bits, zeros=zeros) for m in (1, 2, 3, 7) for bits in (4, 8)
      for zeros in ("none", "packed", "typed")),
    *(Case(m, 24, k, bits=bits, block_size=block, zeros="packed") for m in (1, 2, 12) for bits, block, k in (
        (4, 512, 256), (8, 256, 128), (8, 256, 384), (4, 256, 128), (4, 1024, 264), (4, 32, 1056), (8, 64, 1160),
    )),
    Case(2, 200, 256), Case(40, 40, 264, zeros="packed", bias=True),
    Case(33, 16, 160, "bfloat16", 8, zeros="typed"), Case(4, 96, 2080, "bfloat16", zeros="packed", bias=True),
    Case(2, 64, 512, layout="nk", stored="int4"), Case(3, 48, 512, layout="nk", stored="int8", bits=8, zeros="packed"),
    Case(2, 72, 544, gate="silu", bias=True), Case(9, 24, 256, "bfloat16", 8, gate="gelu", zeros="packed"),
    Case(3, 40, 320, others=(8, 56), zeros="packed"), Case(20, 40, 520, zeros="typed", gate="silu"),
    Case(7, 200, 520, zeros="packed"), Case(8, 200, 264, bits=8), Case(1, 24, 4128, zeros="packed"),
    Case(1, 40, 320, layout="nk", stored="int4"), Case(1, 72, 544, "bfloat16", zeros="typed", gate="silu"),
    Case(1, 40, 520, others=(8, 56), zeros="typed", bias=True), Case(1, 40, 544, bits=8, block_size=128, gate="gelu"),
    *(each for each in NORMALIZED if 0 < each.m <= 8 and each.k < 2080 and (each.dtype, each.layout) in (
        ("float16", "nbits"), ("float16", "nk"), ("bfloat16", "nbits"))),
]  # fmt: skip
# Tiles without their last rows and columns, k that ends within a part and within a stage, one stage for each block of a
# cluster, scales of blocks shorter and longer than a stage, and zero points that begin within a byte or a word.
WITH_WGMMA = [
    (HopperConfig(64, 64, 1, 1, 1), Case(70, 72, 520, zeros="packed", bias=True)),
    (HopperConfig(16, 64, 1, 1, 2), Case(13, 72, 1160, bits=8, zeros="packed")),
    (HopperConfig(32, 128, 2, 1, 2), Case(20, 136, 2080, zeros="packed")),
    (HopperConfig(64, 256, 2, 1, 2), Case(70, 264, 1056, "bfloat16", block_size=128, zeros="packed", bias=True)),
    (HopperConfig(128, 128, 2, 1, 1), Case(130, 200, 648, "bfloat16", 8, block_size=64)),
    (HopperConfig(64, 64, 1, 1, 1), Case(40, 40, 2088, block_size=512, zeros="packed")),
    (HopperConfig(32, 64, 1, 1, 2), Case(33, 40, 576, block_size=64, zeros="packed", gate="silu", bias=True)),
    (HopperConfig(32, 256, 2, 1, 1), Case(33, 136, 264, bits=8, gate="gelu", zeros="packed")),
    (HopperConfig(32, 128, 2, 1, 1), Case(20, 40, 512, others=(8, 56), zeros="packed", bias=True)),
    (HopperConfig(16, 64, 1, 1, 1), Case(16, 48, 512, layout="nk", stored="int4", zeros="packed")),
    (HopperConfig(16, 128, 2, 1, 1), Case(9, 50, 256, layout="nk", stored="int8", bits=8, scaled="columns")),
    (HopperConfig(16, 64, 1, 1, 1), Case(9, 50, 256, layout="nk", stored="int4", scaled="all")),
    (HopperConfig(16, 64, 2, 2, 2), Case(9, 72, 2312, zeros="packed")),
    (HopperConfig(32, 64, 2, 2, 1), Case(20, 40, 520, bits=8, zeros="packed", gate="silu")),
    (HopperConfig(128, 64, 2, 2, 2), Case(50, 72, 1600, "bfloat16", bias=True)),
]  # fmt: skip
SMALL = [replace(case, k=min(case.k, 1000), n=min(case.n, 160)) for case in CASES if case.m]


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", sampled([case for case in SMALL if case.m <= 8], EVERY), ids=str)
def test_few_rows(case: Case, aligned: bool, tmp_path: Path) -> None:
    """On a GPU without mma of 16 elements of k, the first plan of few rows reads the weights as they are."""
    device = replace(H200, arch=T4.arch) if case.dtype == "float16" else H200
    plans = candidates(case.node(), case.specs(aligned), device)
    ways = [plan for plan in plans if _sources(plan) <= {"nbits_dot", "nbits_columns"}]
    for plan in ways[:1]:
        stored = stored_arrays(case)
        found = emulate(plan, list(stored.values()), tmp_path, aligned)
        check_within(case, stored, found)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", sampled([case for case in SMALL if not case.norm], EVERY), ids=str)
def test_weights_as_numbers(case: Case, aligned: bool, tmp_path: Path) -> None:
    """The launches before the float product write each weight in the order in which it is stored."""
    steps = candidates(case.node(), case.specs(aligned), H200)[-1].steps
    stored = stored_arrays(case)
    launches = [s for s in steps if isinstance(s, Launch) and s.kernel.source == "nbits_dequantize"]
    for launch, name in zip(launches, case.weights, strict=True):
        (written,) = (each for each in launch.arguments if isinstance(each, Pointer) and each.kind == "scratch")
        numbers = case.numbers(stored, name)
        expected = numbers.T if case.layout == "kn" else numbers
        to = Pointer("output", 0)
        moved = replace(launch, arguments=tuple(to if each == written else each for each in launch.arguments))
        plan = Plan((TensorSpec(expected.shape, case.dtype, aligned),), (moved,))
        (found,) = emulate(plan, list(stored.values()), tmp_path, aligned)
        unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-22}[case.dtype]
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=unit, atol=0)


@by_parts(2)
@pytest.mark.parametrize(("index", "case"), sampled([*enumerate(WITH_MMA)], 8), ids=str)
def test_matrix_instructions(index: int, case: Case, part: int, tmp_path: Path) -> None:
    """No access is outside of the operands or of shared memory, whether copies happen as early or as late as they may.

    On a GPU of one multiprocessor a block has several tiles, and with little shared memory few warps.
    """
    turn, stored = index // 8, stored_arrays(case)
    given = {Pointer("input", i): placed(each, True) for i, each in enumerate(stored.values())}
    for device in (H200, replace(H200, multiprocessors=1, shared_per_block=101376)):
        plans = [plan for plan in candidates(case.node(), case.specs(), device) if _sources(plan) == {"nbits_mma"}]
        assert plans
        for i, plan in in_turn([*enumerate(plans)], turn, part, 2):
            results = [placed(np.full(y.shape, np.nan, NUMPY[y.dtype]), True) for y in plan.outputs]
            (step,) = (each for each in plan.steps if isinstance(each, Launch))
            arrays = given | {Pointer("output", j): y for j, y in enumerate(results)}
            launch_mma(step, arrays, device, (turn // 2 + i // 2) % 2 == 1, tmp_path, _with_mma)
            check_within(case, stored, results)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_infinite_element_of_one_row(dtype: str, tmp_path: Path) -> None:
    """Without zero points, results are infinite as in float64, or NaN where the element's weight is 0."""
    case = Case(1, 48, 512, dtype, layout="nk", stored="uint4")
    stored = stored_arrays(case)
    stored["x"][0, 300] = -np.inf
    (step,) = candidates(case.node(), case.specs(), H200)[0].steps
    y = placed(np.full((1, case.n), 7, NUMPY[dtype]), True)
    arrays = {Pointer("input", i): placed(each, True) for i, each in enumerate(stored.values())}
    launch_mma(step, arrays | {Pointer("output", 0): y}, H200, False, tmp_path, _with_mma)
    with np.errstate(invalid="ignore"):
        expected = stored["x"].astype(np.float64) @ case.numbers(stored, "w").T
    np.testing.assert_array_equal(y.astype(np.float64), expected)


@pytest.mark.parametrize(("config", "case"), WITH_WGMMA, ids=str)
def test_warpgroup_instructions(config: HopperConfig, case: Case, tmp_path: Path) -> None:
    """What a block reuses or reads too early, in its rings or in those of its cluster, changes the result."""
    stored = stored_arrays(case)
    product, outputs = products_of(case.node(), case.specs())
    (step,) = hopper.implementation(product, config, H200).steps
    assert isinstance(step, Launch)
    given = {Pointer("input", i): placed(each, True) for i, each in enumerate(stored.values())}
    results = [placed(np.full(y.shape, np.nan, NUMPY[y.dtype]), True) for y in outputs]
    arrays = given | {Pointer("output", j): y for j, y in enumerate(results)}
    run_on_hopper(step, {pointer: array.ctypes.data for pointer, array in arrays.items()}, tmp_path)
    check_within(case, stored, results)


def _with_mma(kernel: Kernel) -> str:
    """Return the source of nbits_mma.cu without what nbits_mma_emulated.h stands for."""
    text, count = DEFINITION.subn("", text_of(kernel))
    assert count == STOOD_IN.count("|") + 1
    return f'#include "nbits_mma_emulated.h"\n{SETTLED.sub("", text)}'


def _sources(plan: Plan) -> set[str]:
    return {step.kernel.source if isinstance(step, Launch) else "" for step in plan.steps}
