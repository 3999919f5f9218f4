"""Products with elementwise operators in their epilogue, on a CPU: kernels by row, and kernels of Hopper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import hopper_emulation
import numpy as np
import pytest
from architectures import H200, T4
from attention_cases import Case
from conv_cases import ConvCase
from conv_emulation import launch_emulated, placed
from conv_mma_emulation import launch
from conv_transpose_cases import SAME, ConvTransposeCase, depthwise, shuffled
from joined_cases import KINDS, Build, JoinedCase, MadeCase, attention_case, case, conv_case
from region_drafts import NUMPY, RegionProgram
from sampling import sampled

from onnxfuse.kernels import epilogue_node
from onnxfuse.kernels.attention import host as attention_host
from onnxfuse.kernels.conv import host as conv_host
from onnxfuse.kernels.conv import mma as conv_mma
from onnxfuse.kernels.conv.mma import ConvConfig
from onnxfuse.kernels.conv.operands import conv_of
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.conv_transpose import depthwise as transposed_depthwise
from onnxfuse.kernels.conv_transpose import mma as transposed_mma
from onnxfuse.kernels.conv_transpose.operands import conv_transpose_of
from onnxfuse.kernels.epilogue_program import epilogue_program, in_epilogue
from onnxfuse.kernels.gemm import cublaslt, hopper, host
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.kernels.gemm.mma import MmaConfig
from onnxfuse.kernels.gemm.operands import gemm_of
from onnxfuse.kernels.gemm.pad import Copy, padded, padded_columns
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Plan, Pointer, TensorSpec
from onnxfuse.testing import emulated_launches
from onnxfuse.testing.emulated_launches import emulate

SMALL = [case(kind, lead=lead, n=n, k=19) for kind in KINDS for lead, n in (((2, 3), 21), ((1,), 8))]
SMALL += [case(kind, lead=(2, 3), n=24, k=19) for kind in ("modulated", "reshaped")]
SMALL += [case("several", lead=(5,), n=16, k=24, dtype="float32", operands=("x", "w", "up"))]
SMALL += [case("chain", lead=(2, 2), n=7, k=9, operands=("x", "w", "bias", "residual"), layout="nk")]
# A plain run takes each of them aligned or not, and both of each kind.
ALIGNED_OR_NOT = [(each, aligned) for i, each in enumerate(SMALL) for aligned in (i % 2 == 0, i % 2 == 1)]


@pytest.fixture(autouse=True)
def no_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_is_available", lambda: False)


@pytest.mark.parametrize(("each", "aligned"), sampled(ALIGNED_OR_NOT, 2), ids=str)
def test_few_rows(each: JoinedCase, aligned: bool, tmp_path: Path) -> None:
    """One kernel computes all, or one computes the product and another the program, in every plan."""
    made = each.made()
    node, specs = made.node(), made.specs(aligned)
    assert host.supports(node, [spec.dtype for spec in specs], T4) is None
    plans = host.candidates(node, specs, T4)
    sources = [[step.kernel.source for step in plan.steps if isinstance(step, Launch)] for plan in plans]
    assert sources == [["gemm_small"], ["gemm_small", "region"]]
    for plan in plans:
        made.check(emulate(plan, made.arrays, tmp_path, aligned), in_two_steps=len(plan.steps) > 1)


def counted(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
    wide = p.op("Cast", y, dtype="float32", to="float32")
    return [p.op("Neg", y), p.op("Cast", wide, dtype="int32", to="int32")]


def quantized(p: RegionProgram, y: str, operand: Callable[..., str]) -> list[str]:
    scale, zero = p.operand(np.linspace(17, 30, 16).astype(np.float16)), p.operand(np.arange(-16, 0, dtype=np.int8))
    return [p.op("QuantizeLinear", y, scale, zero, dtype="int8", precision="float32")]


@pytest.mark.parametrize("build", [counted, quantized])
def test_results_that_are_not_continuous_are_of_a_rounded_product(build: Build, tmp_path: Path) -> None:
    """Integers from 2048 on, of which float16 holds one in two."""
    made = JoinedCase(build.__name__, build, lead=(4,), n=16, k=16, operands=("x", "w")).made()
    random = np.random.default_rng(0)
    made.own = {name: random.integers(8, 20, each.shape).astype(each.dtype) for name, each in made.own.items()}
    first, second = host.candidates(made.node(), made.specs(), T4)
    assert len(first.steps) == 1 and len(second.steps) == 2
    product = (made.own["x"].astype(np.float32) @ made.own["w"].astype(np.float32)).astype(np.float16)
    made.program.operands["x0"] = product
    for plan in (first, second):
        for own, expected in zip(emulate(plan, made.arrays, tmp_path), made.program.expected(), strict=True):
            assert len(np.unique(own)) > 4
            np.testing.assert_array_equal(own, expected)


HOPPER = [
    (HopperConfig(128, 128, pingpong=True), case("several", lead=(2, 101), n=264, k=136), 3),
    (HopperConfig(64, 64, pingpong=True), case("broadcasts", lead=(3, 44), n=72, k=72, dtype="bfloat16"), 2),
    (HopperConfig(128, 256), case("mixed", lead=(150,), n=264, k=72), 1),
    (HopperConfig(192, 192), case("broadcasts", lead=(5, 41), n=200, k=72), 2),
    (HopperConfig(64, 128, pingpong=True), case("several", lead=(67,), n=131, k=40), 2),
    (HopperConfig(128, 128, pingpong=True), case("modulated", lead=(3, 44), n=136, k=72), 3),
    (HopperConfig(128, 128), case("only float32", lead=(150,), n=136, k=72,
                                  operands=("x", "w", "bias", "residual")), 1),
    (HopperConfig(128, 128, split_k=2), case("broadcasts", lead=(4, 25), n=136, k=136), None),
    (HopperConfig(128, 64, split_k=2), case("several", lead=(101,), n=135, k=200, dtype="bfloat16"), None),
    (HopperConfig(128, 64, split_k=2), case("only float32", lead=(2, 30), n=72, k=136, operands=("x", "w")), None),
    (HopperConfig(128, 64, split_k=2), case("mixed", lead=(2, 30), n=72, k=136,
                                            operands=("x", "w", "bias", "residual")), None),
]  # fmt: skip


def run(made: MadeCase, config: HopperConfig, blocks: int | None, folder: Path) -> list[np.ndarray]:
    """Run the kernel of a config; return the outputs."""
    node, specs = made.node(), made.specs()
    both = epilogue_node.joined(node)
    gemm, y = gemm_of(both.product, specs[: both.own], H200)
    found = epilogue_program(both, y, specs, gemm.residual is None)
    assert found is not None
    program, outputs = found
    gemm = in_epilogue(gemm, program)
    step = hopper.implementation(gemm, config, H200).steps[-1]
    assert isinstance(step, Launch)
    _, copies = padded(gemm, residual=config.split_k == 1)
    arrays = {Pointer("input", i): array for i, array in enumerate(made.arrays)}
    arrays |= {copy.target: copied(copy, arrays[copy.source]) for copy in copies}
    written = [np.zeros((gemm.m + 1, gemm.n), NUMPY[spec.dtype]) for spec in outputs]
    arrays |= {Pointer("output", i): each for i, each in enumerate(written)}
    addresses = {pointer: array.ctypes.data for pointer, array in arrays.items()}
    hopper_emulation.run(replace(step, grid=(blocks or step.grid[0], 1, 1)), addresses, folder)
    for each in written:
        assert not each[gemm.m].any(), "written beyond the end"
    return [each[: gemm.m].reshape(spec.shape) for each, spec in zip(written, outputs, strict=True)]


def copied(copy: Copy, source: np.ndarray) -> np.ndarray:
    """Return what gemm_pad.cu writes."""
    target = np.zeros((copy.rows, padded_columns(copy.columns, copy.dtype)), source.dtype)
    target[:, : copy.columns] = source.reshape(copy.rows, copy.columns)
    return target


@pytest.mark.parametrize(("config", "each", "blocks"), HOPPER, ids=str)
def test_wgmma(config: HopperConfig, each: JoinedCase, blocks: int | None, tmp_path: Path) -> None:
    made = each.made()
    made.check(run(made, config, blocks, tmp_path))


@pytest.mark.parametrize(("kind", "dtype"), [
    ("quantized", "float16"), ("only float32", "float16"), ("modulated", "float16"),
    ("quantized", "float32"), ("several", "float32"),
])  # fmt: skip
def test_attention_by_wgmma(kind: str, dtype: str, tmp_path: Path) -> None:
    """A program without an output of q's dtype stores all outputs, and gets eight neighbouring columns."""
    of = Case(
        batch=2, heads=2, kv_heads=1, queries=70, keys=50, size=40, value_size=40, dtype=dtype, scale=0.125
    )  # fmt: skip
    made = attention_case(kind, of).made()
    specs = made.specs()
    found = attention_host.candidates(made.node(), specs, H200)
    plan = next(each for each in found if sources(each)[-1] == "attention_hopper")
    arrays = {Pointer("input", i): array for i, array in enumerate(made.arrays)}
    written = [np.zeros(spec.shape, NUMPY[spec.dtype]) for spec in plan.outputs]
    arrays |= {Pointer("output", i): each for i, each in enumerate(written)}
    arrays |= {Pointer("scratch", i): np.full(size, 0xFF, np.uint8) for i, size in enumerate(plan.scratch)}
    addresses = {pointer: array.ctypes.data for pointer, array in arrays.items()}
    *before, last = plan.steps
    for step in before:  # in TF32, values are transposed first
        assert isinstance(step, Launch)
        emulated_launches.launch(step, emulated_launches.library(step.kernel, tmp_path), addresses.__getitem__)
    assert isinstance(last, Launch)
    hopper_emulation.run(last, addresses, tmp_path)
    made.check(written, tf32=dtype == "float32")


def sources(plan: Plan) -> list[str]:
    return [step.kernel.source for step in plan.steps if isinstance(step, Launch)]


CONVS = [
    conv_case("broadcasts", ConvCase(2, 16, 40, (7, 9), (3, 3), (), (1, 1, 1, 1))),
    conv_case("several", ConvCase(2, 24, 34, (6, 5), (3, 2), (2, 1), (0, 1, 2, 1), dtype="bfloat16", extra=())),
    conv_case("mixed", ConvCase(1, 20, 48, (9,), (3,), extra=("bias", "residual"))),
    conv_case("chain", ConvCase(2, 12, 24, (4, 5), (3, 3), group=2, aligned=False)),
    conv_case("modulated", ConvCase(2, 16, 40, (5, 4), (3, 3), (), (1, 1, 1, 1))),
]


STEMS = [
    conv_case("mixed", ConvCase(2, 3, 32, (13, 15), (3, 3), (2, 2), (1,) * 4, x_nchw=True)),
    conv_case("only float32", ConvCase(1, 3, 40, (9, 30), (7, 7), (2, 2), (3,) * 4, x_nchw=True)),
    conv_case("broadcasts", ConvCase(2, 3, 33, (9, 11), (5, 3), (2, 1), (2, 1, 2, 1), dtype="bfloat16", x_nchw=True)),
]


@pytest.mark.parametrize("each", STEMS, ids=str)
def test_stems(each: JoinedCase, tmp_path: Path) -> None:
    made, conv = each.made(), each.conv
    assert conv is not None
    plan = conv_host.candidates(made.node(), made.specs(), H200)[0]
    (step,) = plan.steps
    assert isinstance(step, Launch) and step.kernel.source == "conv_stem"
    arrays = [placed(array, aligned=True) for array in made.arrays]
    written = [placed(np.zeros(spec.shape, NUMPY[spec.dtype]), aligned=True) for spec in plan.outputs]
    launch_emulated(step, arrays, written, tmp_path)
    made.check(written)


TRANSPOSED = [
    conv_case("broadcasts", ConvTransposeCase(2, 16, 40, (5, 4), (3, 3), (2, 2), SAME)),
    conv_case("several", shuffled(1, 24, 3, (5, 4), (4, 2))),
    conv_case("mixed", shuffled(2, 16, 24, (4, 3), (2, 2), dtype="bfloat16", extra=("bias", "residual"))),
    conv_case("broadcasts", depthwise(2, 24, (5, 7), (4, 4), (2, 2), SAME)),
]


@pytest.mark.parametrize("each", CONVS, ids=str)
def test_convolutions_by_mma(each: JoinedCase, tmp_path: Path) -> None:
    def way(problem: Conv) -> Implementation:
        return conv_mma.implementation(problem, ConvConfig(MmaConfig(64, 32, 64, 3, 2, 1), 1), H200)

    check_convolution(each, conv_of, way, tmp_path)


@pytest.mark.parametrize("each", TRANSPOSED, ids=str)
def test_transposed_convolutions(each: JoinedCase, tmp_path: Path) -> None:
    """The program reads what belongs to a pixel of y, also where the columns of a product are several pixels."""

    def way(problem: Conv) -> Implementation:
        if problem.w_hwio:
            return transposed_depthwise.implementations(problem, H200)[0]
        return transposed_mma.implementation(problem, ConvConfig(MmaConfig(64, 32, 64, 3, 2, 1), 1), H200)

    check_convolution(each, conv_transpose_of, way, tmp_path)


def check_convolution(
    each: JoinedCase,
    problem_of: Callable[[FusedNode, Sequence[TensorSpec], Device], tuple[Conv, TensorSpec]],
    way: Callable[[Conv], Implementation],
    folder: Path,
) -> None:
    made, conv = each.made(), each.conv
    assert conv is not None
    specs = made.specs(conv.aligned)
    both = epilogue_node.joined(made.node())
    problem, y = problem_of(both.product, specs[: both.own], H200)
    found = epilogue_program(both, y, specs, problem.residual is None)
    assert found is not None
    program, outputs = found
    (step,) = way(in_epilogue(problem, program)).steps
    assert isinstance(step, Launch)
    arrays = {Pointer("input", i): placed(array, conv.aligned) for i, array in enumerate(made.arrays)}
    written = [placed(np.zeros(spec.shape, NUMPY[spec.dtype]), conv.aligned) for spec in outputs]
    launch(step, arrays | {Pointer("output", i): each for i, each in enumerate(written)}, H200, True, folder)
    made.check(written)
