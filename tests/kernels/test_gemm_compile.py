"""Matrix products without a GPU: what the host plans and refuses, and that kernels compile without spills."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from architectures import DEVICES, OF_ARCH, check_compiles, to_compile
from kernel_hosts import first_plan
from sampling import by_parts

from onnxfuse.kernels.gemm import cublaslt, host, mma, small
from onnxfuse.kernels.gemm.implementations import implementations
from onnxfuse.kernels.gemm.operands import gemm_of
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, TensorSpec

PARTS = 42  # of the kernels, of which one is compiled in a plain run


@pytest.fixture(autouse=True)
def no_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave cuBLASLt out of plans, also where an earlier test of this process opened a stand-in of it."""
    monkeypatch.setattr(cublaslt, "_is_available", lambda: False)


def node(fusion: str, operands: str, dtype: str = "float16", **attributes: object) -> FusedNode:
    return FusedNode(fusion, "y", tuple(operands.split()), attributes, (dtype,))


def tensors(*shapes: tuple[int, ...], dtype: str = "float16", aligned: bool = True) -> list[TensorSpec]:
    return [TensorSpec(shape, dtype, aligned) for shape in shapes]


def linear(m: int, n: int, k: int, dtype: str, layout: str, device: Device, aligned: bool = True) -> Gemm:
    given = tensors((m, k), (k, n) if layout == "kn" else (n, k), (n,), (n,), (m, n), dtype=dtype, aligned=aligned)
    fused = node(
        "gemm_bias_activation", "x w bias column_scale residual", dtype, weight_layout=layout, activation="gelu"
    )
    return gemm_of(fused, given, device)[0]


def gated(m: int, n: int, k: int, dtype: str, layout: str, device: Device) -> Gemm:
    weight = (k, n) if layout == "kn" else (n, k)
    fused = node("gated_gemm", "x w up bias up_bias", dtype, weight_layout=layout, activation="silu")
    return gemm_of(fused, tensors((m, k), weight, weight, (n,), (n,), dtype=dtype), device)[0]


# Rows for every config; row lengths that are whole vectors, even ones, and odd ones.
ROWS = (1, 8, 16, 64, 4096)
SIZES = ((768, 3072), (1002, 1002), (1001, 1003))
IN_FULL = (80, 90)  # the others differ in shared memory and instructions, and are tested with fewer products


def products(device: Device) -> Iterator[Gemm]:
    full = device.arch in IN_FULL
    for m, (n, k), layout in itertools.product(ROWS, SIZES if full else SIZES[:1], ("kn", "nk")):
        yield linear(m, n, k, "float16", layout, device)
    for m, dtype in itertools.product(ROWS[::2], ("float16", "float32")):
        yield gated(m, 3072, 768, dtype, "kn", device)
    if not full:
        return
    for m, dtype in itertools.product(ROWS, ("float16", "float32")):
        yield gated(m, 3072, 768, dtype, "nk", device)
    for m, layout in itertools.product(ROWS, ("kn", "nk")):
        yield linear(m, 768, 768, "float32", layout, device)
    yield linear(4096, 768, 768, "bfloat16", "kn", device)
    yield linear(16, 768, 768, "bfloat16", "nk", device, aligned=False)


def implementations_of(gemm: Gemm, device: Device) -> list[Implementation]:
    plain = [*small.implementations(gemm, device), *mma.implementations(gemm, device)]
    return [*plain, *mma.implementations_of_copies(gemm, device)]


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    """Return the kernels of all implementations of these products, each once."""
    steps = [step for gemm in products(device) for way in implementations_of(gemm, device) for step in way.steps]
    found = [step.kernel for step in steps if isinstance(step, Launch)]
    return list({(kernel.source, tuple(sorted(kernel.defines.items()))): kernel for kernel in found}.values())


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_launches_fit_the_device(device: Device) -> None:
    for gemm in products(device):
        for step in (step for way in implementations_of(gemm, device) for step in way.steps):
            assert isinstance(step, Launch)
            assert step.shared <= device.shared_per_block
            assert step.block[0] <= 1024
            assert step.cluster <= (8 if device.arch >= 90 else 1)
            assert step.grid[0] % step.cluster == 0
            assert gemm.n % int(step.kernel.defines.get("WIDTH", 1)) == 0


@pytest.mark.parametrize("arch", [80, 89, 90, 120])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("n", "k", "layout", "copied"),
    [(768, 768, "kn", ""), (769, 768, "kn", "w"), (769, 768, "nk", ""), (768, 767, "kn", "x"), (768, 767, "nk", "xw")],
)
def test_unaligned_rows_are_copied(n: int, k: int, layout: str, copied: str, dtype: str, arch: int) -> None:
    """For many rows the expected fastest implementation copies operands first, to rows that are whole vectors."""
    gemm = replace(linear(1000, n, k, dtype, layout, OF_ARCH[arch]), residual=None, weights_constant=True)
    found = implementations(gemm, OF_ARCH[arch])
    assert len(found) <= 8 and len({way.name for way in found}) == len(found)
    assert (len(found[0].steps) == 2) == bool(copied)
    if not copied:
        return
    first = found[0].steps[0]
    assert isinstance(first, Launch) and first.pdl == (arch >= 90)
    shapes = {"x": (1000, k), "w": (k, n) if layout == "kn" else (n, k)}
    item = {"float16": 2, "float32": 4}[dtype]
    padded = [shapes[name][0] * -(-shapes[name][1] * item // 16) * 16 for name in copied]
    assert list(found[0].scratch) == padded
    assert first.kernel.defines["WEIGHTS_CONSTANT"] == sum(1 << i for i, name in enumerate(copied) if name == "w")


@pytest.mark.parametrize("n", [4096, 4095])
@pytest.mark.parametrize("m", [1, 16, 64])
def test_a_few_rows_prefer_copies_to_loads_of_elements(m: int, n: int) -> None:
    found = implementations(linear(m, n, 4096, "float16", "kn", OF_ARCH[90]), OF_ARCH[90])
    assert len(found) <= 8
    assert ("copies" in found[0].name) == (n == 4095)


@pytest.mark.parametrize("tf32", [False, True])
def test_float32_is_rounded_to_tf32_only_where_the_session_allows_it(tf32: bool) -> None:
    device = Device("H200", 90, 132, 232448, tf32)
    gemm = linear(4096, 768, 768, "float32", "kn", device)
    assert gemm.tf32 == tf32
    assert bool(mma.implementations(gemm, device)) == tf32


def test_leading_dimensions_are_rows() -> None:
    fused = node("gemm_bias_activation", "x w bias")
    gemm, y = gemm_of(fused, tensors((8, 512, 768), (768, 3072), (3072,)), OF_ARCH[90])
    assert (gemm.m, gemm.n, gemm.k, y.shape) == (4096, 3072, 768, (8, 512, 3072))


@pytest.mark.parametrize("shape", [(0, 768), (8, 0, 768)])
def test_an_empty_batch_is_no_launch(shape: tuple[int, ...]) -> None:
    fused = node("gemm_bias_activation", "x w")
    assert first_plan(fused, tensors(shape, (768, 64)), OF_ARCH[90]).steps == ()
    pair = node("gated_gemm", "x w up")
    assert first_plan(pair, tensors(shape, (768, 64), (768, 64)), OF_ARCH[90]).steps == ()


@pytest.mark.parametrize(
    ("operands", "shapes", "message"),
    [
        ("x w", [(4, 8), (7, 6)], r"'y': x of shape \[4, 8\] does not multiply with w of shape \[7, 6\].* required 7"),
        ("x w", [(), (7, 6)], r"'y': x of shape \[\] does not multiply with w of shape \[7, 6\]"),
        ("x w", [(4, 8), (2, 8, 6)], r"'y': w has shape \[2, 8, 6\]; required two dimensions, \(k, n\)"),
        ("x w", [(4, 0), (0, 6)], r"'y': x has shape \[4, 0\]; required a last dimension of at least 1"),
        ("x w bias", [(4, 8), (8, 6), (8,)], r"'y': bias has shape \[8\]; required \[6\]"),
        ("x w residual", [(2, 4, 8), (8, 6), (4, 6)], r"'y': residual has shape \[4, 6\]; required \[2, 4, 6\]"),
        ("x w column_scale", [(4, 8), (8, 6), (1,)], r"'y': column_scale has shape \[1\]; required \[6\]"),
        ("x w slope", [(4, 8), (8, 6), (6,)], "'y': activation is none; required a slope for prelu alone"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_named(operands: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=f"gemm_bias_activation {message}"):
        first_plan(node("gemm_bias_activation", operands), tensors(*shapes), OF_ARCH[90])


def test_gate_and_up_have_as_many_columns() -> None:
    with pytest.raises(ValueError, match=r"gated_gemm 'y': up has 7 columns; required 6, as w"):
        first_plan(node("gated_gemm", "x w up"), tensors((4, 8), (8, 6), (8, 7)), OF_ARCH[90])


def test_a_gated_product_without_its_second_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="gated_gemm: operand up is missing; present are x, w"):
        first_plan(node("gated_gemm", "x w"), tensors((4, 8), (8, 6)), OF_ARCH[90])


def test_parallel_products_are_each_to_its_own_output_by_its_own_layout() -> None:
    fused = FusedNode("parallel_gemm", "y", ("x", "w", "bias", "w_2", "w_3", "bias_3"), {"weight_layout_2": "nk"},
                      ("float16",) * 3)  # fmt: skip
    given = tensors((2, 64, 512), (512, 256), (256,), (128, 512), (512, 96), (96,))
    plans = host.candidates(fused, given, OF_ARCH[90])
    assert len(plans) > 1
    for one in plans:
        assert [y.shape for y in one.outputs] == [(2, 64, 256), (2, 64, 128), (2, 64, 96)]
        assert outputs_of(one) == {0, 1, 2}
    found = [gemm_of(one, given, OF_ARCH[90], suffix, i)[0] for i, (one, suffix) in enumerate(
        zip(host.product_nodes(fused), host.SUFFIXES, strict=True))]  # fmt: skip
    assert [(g.n, g.k, g.transposed, g.bias is not None) for g in found] == [
        (256, 512, False, True), (128, 512, True, False), (96, 512, False, True),
    ]  # fmt: skip


@pytest.mark.parametrize(("m", "arch", "steps"), [(1, 90, 1), (100, 90, 1), (1, 80, 3)])
def test_products_of_few_rows_are_one_launch(m: int, arch: int, steps: int) -> None:
    fused = FusedNode("parallel_gemm", "y", ("x", "w", "bias", "w_2", "w_3"), {}, ("float16",) * 3)
    given = tensors((m, 512), (512, 256), (256,), (512, 64), (512, 72))
    plan = first_plan(fused, given, OF_ARCH[arch])
    assert len(plan.steps) == steps
    assert outputs_of(plan) == {0, 1, 2}


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("n", [512, 513])
def test_constant_weights_are_read_before_the_predecessor_ends(n: int, m: int, constant: bool) -> None:
    given = [TensorSpec((m, 256), "float32"), TensorSpec((256, n), "float32", constant=constant)]
    for dtype in ("float16", "float32"):
        typed = [replace(tensor, dtype=dtype) for tensor in given]
        gemm = gemm_of(node("gemm_bias_activation", "x w", dtype), typed, OF_ARCH[90])[0]
        for step in (step for way in small.implementations(gemm, OF_ARCH[90]) for step in way.steps):
            assert isinstance(step, Launch)
            assert step.kernel.source == "gemm_mma" or step.kernel.defines["WEIGHTS_CONSTANT"] == int(constant)
            assert step.pdl


def test_parallel_products_of_an_empty_batch_are_no_launch() -> None:
    fused = FusedNode("parallel_gemm", "y", ("x", "w", "w_2"), {}, ("float16",) * 2)
    plan = first_plan(fused, tensors((0, 64), (64, 8), (64, 16)), OF_ARCH[90])
    assert (plan.steps, [y.shape for y in plan.outputs]) == ((), [(0, 8), (0, 16)])


def test_parallel_products_that_do_not_multiply_are_named() -> None:
    fused = FusedNode("parallel_gemm", "y", ("x", "w", "w_2"), {}, ("float16",) * 2)
    with pytest.raises(ValueError, match=r"parallel_gemm 'y': x of shape \[4, 8\] .* with w_2 of shape \[7, 6\]"):
        first_plan(fused, tensors((4, 8), (8, 6), (7, 6)), OF_ARCH[90])


def outputs_of(plan: Plan) -> set[int]:
    """Return the indices of the outputs that the steps of a plan point to."""
    found = set()
    for step in plan.steps:
        assert isinstance(step, Launch)
        found |= {p.index for p in step.values if isinstance(p, Pointer) and p.kind == "output"}
    return found


def test_a_weight_of_another_dtype_is_refused() -> None:
    fused = node("gemm_bias_activation", "x w")
    refusal = host.supports(fused, ["float16", "float32"], OF_ARCH[90])
    assert refusal == "gemm_bias_activation: w is float32; required float16, as x"
    mixed = [TensorSpec((4, 8), "float16"), TensorSpec((8, 6), "float32")]
    with pytest.raises(ValueError, match=r"'y': w of shape \[8, 6\] is float32; required float16, as x"):
        first_plan(fused, mixed, OF_ARCH[90])


def test_bf16_needs_its_matrix_units() -> None:
    fused = node("gemm_bias_activation", "x w", "bfloat16")
    assert host.supports(fused, ["bfloat16"] * 2, OF_ARCH[80]) is None
    refusal = host.supports(fused, ["bfloat16"] * 2, OF_ARCH[75])
    assert refusal == "gemm_bias_activation: x is bfloat16, which needs compute capability 80; found 75"
