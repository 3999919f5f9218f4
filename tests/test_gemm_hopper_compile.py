"""The Hopper GEMM without a GPU: its tilings compile for sm_90a without spills; what TMA cannot read is refused."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from onnxfuse.kernels import _gemm_hopper
from onnxfuse.kernels._gemm import Candidate, Gemm, together
from onnxfuse.provider.plan import Device, Launch, Pointer, TensorMap

H200 = Device("H200", 90, 132, 232448)
X, W, BIAS, UP, UP_BIAS, SCALE, RESIDUAL = (Pointer("input", i) for i in range(7))
LINEAR = Gemm(
    4096, 3072, 768, "float16", False, True, X, W, Pointer("output", 0),
    bias=BIAS, column_scale=SCALE, residual=RESIDUAL, activation="gelu",
)  # fmt: skip
GATED = dataclasses.replace(
    LINEAR, dtype="bfloat16", transposed=True, up=UP, up_bias=UP_BIAS, residual=None, activation="silu"
)
PARALLEL = dataclasses.replace(LINEAR, activation="none", column_scale=None, residual=None)
PARALLEL = dataclasses.replace(PARALLEL, beside=(dataclasses.replace(PARALLEL, bias=None, n=520), PARALLEL))


def launch(way: Candidate) -> Launch:
    (step,) = way.steps
    assert isinstance(step, Launch)
    return step


@pytest.mark.parametrize("gemm", [LINEAR, GATED, PARALLEL], ids=["linear", "gated", "parallel"])
@pytest.mark.parametrize("tiling", _gemm_hopper.TILINGS, ids=lambda tiling: tiling.name)
def test_compiles_without_spills(tiling: _gemm_hopper.Tiling, gemm: Gemm) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")
    if tiling.split > 1:
        gemm = dataclasses.replace(gemm, m=128, n=768, k=3072)
    if not _gemm_hopper.fits(gemm, tiling, H200):
        pytest.skip("not for this product")
    kernel = launch(_gemm_hopper.candidate(gemm, tiling, H200)).kernel
    compiled = importlib.import_module("onnxfuse.provider.cubin").compile_cubin(kernel, 90)
    assert compiled.spill_stores + compiled.spill_loads + compiled.stack == 0
    assert "warning" not in compiled.log.lower(), compiled.log
    assert "C75" not in compiled.log, "the assembler serialises wgmma, or ignores setmaxnreg"


@pytest.mark.parametrize("m", [1, 17, 128, 1000, 4096, 8192])
@pytest.mark.parametrize("gemm", [LINEAR, GATED, PARALLEL], ids=["linear", "gated", "parallel"])
def test_launches_fit_the_device(gemm: Gemm, m: int) -> None:
    found = _gemm_hopper.plans(dataclasses.replace(gemm, m=m), H200)
    assert found
    assert len({way.name for way in found}) == len(found)
    for step in map(launch, found):
        assert step.shared <= H200.shared_per_block
        assert step.grid[0] <= H200.multiprocessors
        assert step.grid[0] % step.cluster == 0
        for argument in step.arguments:
            if isinstance(argument, TensorMap):
                assert max(argument.box) <= 256
                assert argument.box[0] * 2 == argument.swizzle
                assert all(stride % 16 == 0 for stride in argument.strides)


def test_products_of_one_launch_have_a_map_of_each_weight_and_result() -> None:
    for step in map(launch, _gemm_hopper.plans(PARALLEL, H200)):
        maps = [argument for argument in step.arguments if isinstance(argument, TensorMap)]
        assert [each.sizes for each in maps[1:4]] == [(3072, 768), (520, 768), (3072, 768)]
        assert [each.sizes for each in maps[4:]] == [(3072, 4096), (520, 4096), (3072, 4096)]


def test_products_of_one_launch_have_weights_of_one_layout() -> None:
    other = dataclasses.replace(LINEAR, transposed=True)
    assert together([LINEAR, other]) is None
    assert together([LINEAR, LINEAR]) == dataclasses.replace(LINEAR, beside=(LINEAR,))


@pytest.mark.parametrize(
    "change",
    [
        {"n": 3076}, {"k": 764}, {"dtype": "float32"}, {"aligned": False}, {"m": 0}, {"n": 0}, {"k": 0},
    ],
    ids=str,
)  # fmt: skip
def test_what_tma_or_wgmma_cannot_take_has_no_candidate(change: dict[str, object]) -> None:
    assert not _gemm_hopper.plans(dataclasses.replace(LINEAR, **change), H200)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_only_hopper_has_candidates(arch: int) -> None:
    assert not _gemm_hopper.plans(LINEAR, dataclasses.replace(H200, arch=arch))
