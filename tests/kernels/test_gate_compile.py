"""Products of gated images without a GPU: that kernels compile without spills, and what their host refuses."""

from __future__ import annotations

import pytest
from architectures import A100, H200, check_compiles
from conv_cases import ConvCase
from sampling import sampled

from onnxfuse.kernels.conv import host, matrix
from onnxfuse.kernels.gemm import hopper, mma
from onnxfuse.runtime.plan import Device, Launch, TensorSpec

# Whole vectors, k that ends inside a stage, and rows that begin anywhere.
CASES = [
    ConvCase(2, 144, 40, (9, 7), (1, 1), extra=("bias", "residual", "gate")),
    ConvCase(2, 46, 112, (9, 7), (1, 1), dtype="bfloat16", extra=("gate",)),
    ConvCase(2, 33, 24, (9, 7), (1, 1), dtype="float32", tf32=True, extra=("bias", "gate")),
    ConvCase(2, 45, 24, (9, 7), (1, 1), extra=("bias", "gate"), aligned=False),
]
WAYS = [(case, config) for case in CASES for config in mma.GATE_CONFIGS]


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize(("case", "config"), sampled(WAYS, 12), ids=str)
def test_tiles_compile(case: ConvCase, config: mma.MmaConfig, device: Device) -> None:
    (step,) = mma.implementation(matrix.as_gemm(case.problem()), config, device).steps
    assert isinstance(step, Launch)
    check_compiles(step.kernel, device)


HOPPER_CASE = ConvCase(2, 480, 256, (28, 28), (1, 1), extra=("bias", "residual", "gate"))


@pytest.mark.parametrize("config", sampled(hopper.CONFIGS, 6), ids=lambda config: config.name)
def test_wgmmas_compile(config: hopper.HopperConfig) -> None:
    """Registers hold fragments of x beside the accumulators, and the assembler serializes no wgmma."""
    gemm = matrix.as_gemm(HOPPER_CASE.problem())
    if not hopper.fits(gemm, config, H200):
        pytest.skip("it is not offered")
    (step,) = hopper.implementation(gemm, config, H200).steps
    assert isinstance(step, Launch)
    assert "wgmma" not in check_compiles(step.kernel, H200).log


@pytest.mark.parametrize(
    ("c", "m", "side", "launches"),
    [(32, 16, 112, 1), (144, 24, 56, 1), (672, 112, 14, 1), (1152, 192, 7, 1), (896, 896, 14, 1), (896, 8192, 14, 2)],
)
def test_how_many_launches_come_first(c: int, m: int, side: int, launches: int) -> None:
    """Two where the product has many operations for each byte of x."""
    case = ConvCase(32, c, m, (side, side), (1, 1), extra=("bias", "gate"))
    specs = [TensorSpec(array.shape, case.dtype) for array in case.arrays().values()]
    plans = host.candidates(case.node(), specs, H200)
    assert len(plans[0].steps) == launches and {len(plan.steps) for plan in plans} == {1, 2}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (ConvCase(2, 8, 8, (9, 7), (3, 3), extra=("gate",)), "x has a gate; required a filter of one tap"),
        (ConvCase(2, 8, 8, (9, 7), (1, 1), (2, 2), extra=("gate",)), "x has a gate; required a filter of one tap"),
        (ConvCase(2, 8, 8, (9, 7), (1, 1), group=2, extra=("gate",)), "x has a gate; required a filter of one tap"),
    ],
    ids=str,
)
def test_what_no_kernel_takes(case: ConvCase, message: str) -> None:
    specs = [TensorSpec(array.shape, case.dtype) for array in case.arrays().values()]
    with pytest.raises(ValueError, match=message):
        host.candidates(case.node(), specs, H200)


def test_a_gate_of_another_shape() -> None:
    case = ConvCase(2, 8, 8, (9, 7), (1, 1), extra=("gate",))
    x, w, _ = (TensorSpec(array.shape, case.dtype) for array in case.arrays().values())
    with pytest.raises(ValueError, match=r"gate has shape \[2, 8\]; required \[2, 1, 1, 8\]"):
        host.candidates(case.node(), [x, w, TensorSpec((2, 8), case.dtype)], H200)


@pytest.mark.parametrize("n", [0, 1])
def test_empty_outputs(n: int) -> None:
    case = ConvCase(n, 8, 8, (9, 7) if n == 0 else (0, 7), (1, 1), extra=("gate",))
    specs = [TensorSpec(array.shape, case.dtype) for array in case.arrays().values()]
    (plan,) = host.candidates(case.node(), specs, H200)
    assert not plan.steps and plan.outputs[0].shape == (n, *case.sizes, 8)
