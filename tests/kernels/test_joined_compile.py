"""Products with elementwise operators in their epilogue, without a GPU: plans, templates, and what compiles."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from architectures import DEVICES, H200, T4, check_compiles, to_compile
from conv_cases import ConvCase
from conv_transpose_cases import SAME, ConvTransposeCase, depthwise, shuffled
from described import ones
from joined_cases import KINDS_OF_PRODUCTS, JoinedCase, case, conv_case
from kernel_hosts import host_of
from sampling import by_parts
from template_checks import template_of, with_dynamic_dims

from onnxfuse.kernels.conv import cudnn
from onnxfuse.kernels.epilogue_node import joined
from onnxfuse.kernels.gemm import cublaslt, host
from onnxfuse.kernels.gemm.mma import MMA_ARCH
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorSpec

PARTS = 48  # of the kernels, of which one is compiled in a plain run


@pytest.fixture(autouse=True)
def no_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_is_available", lambda: False)
    monkeypatch.setattr(cudnn, "_is_available", lambda: False)


@pytest.fixture(autouse=True)
def no_numbers() -> Iterator[None]:
    with ones():
        yield


def cases(device: Device) -> Iterator[JoinedCase]:
    yield from products(device)
    yield conv_case("broadcasts", ConvTransposeCase(2, 64, 128, (14, 14), (4, 4), (2, 2), SAME))
    yield conv_case("several", shuffled(1, 24, 7, (7, 9), (2, 2), extra=("bias", "residual")))
    yield conv_case("mixed", depthwise(2, 40, (14, 14), (4, 4), (2, 2), SAME))


def products(device: Device) -> Iterator[JoinedCase]:
    for kind in KINDS_OF_PRODUCTS:
        yield case(kind, lead=(3,), n=72, k=200)
        if device.arch < MMA_ARCH:  # more rows are multiplied by cuBLASLt alone there
            continue
        yield case(kind, lead=(32, 128), n=768 if kind != "rows" else 3072, k=768)
        yield case(kind, lead=(16,), n=1024, k=512)
    for c, m, kernel in ((64, 128, 3), (320, 320, 1), (24, 40, 3)):
        pads = (kernel // 2,) * 4
        yield conv_case("modulated", ConvCase(2, c, m, (14, 14), (kernel, kernel), (), pads))
        yield conv_case("broadcasts", ConvCase(2, c, m, (14, 14), (kernel, kernel), (), pads))
        yield conv_case("several", ConvCase(1, c, m, (7, 9), (kernel, kernel), (), pads, extra=("bias", "residual")))
    if device.arch < MMA_ARCH:
        return
    yield case("several", lead=(7, 43), n=257, k=129)
    yield case("broadcasts", lead=(4, 32), n=512, k=2048, operands=("x", "w", "up"), layout="nk")
    yield case("mixed", lead=(300,), n=512, k=512, dtype="float32", operands=("x", "w", "bias", "residual"))


@functools.cache
def plans(each: JoinedCase, device: Device) -> list[Plan]:
    made = each.made()
    node = made.node()
    assert host_of(node.fusion).supports(node, [spec.dtype for spec in made.specs()], device) is None
    return host_of(node.fusion).candidates(node, made.specs(), device)


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    """Return the kernels with programs in their epilogue, each once."""
    steps = [step for each in cases(device) for plan in plans(each, device) for step in plan.steps]
    found = [step.kernel for step in steps if isinstance(step, Launch) and step.kernel.text]
    return list({repr(kernel): kernel for kernel in found if kernel.source != "region"}.values())


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device)


def test_the_program_is_in_the_epilogue_first() -> None:
    """The plan of two launches, or more, comes last."""
    for each in cases(H200):
        found = plans(each, H200)
        first = [step.kernel for step in found[0].steps if isinstance(step, Launch)]
        assert first[-1].source != "region" and "struct Program" in first[-1].text
        last = [step.kernel.source for step in found[-1].steps if isinstance(step, Launch)]
        assert last[-1] == "region" and len(found) <= 8


def test_what_reads_numbers_of_rows_takes_the_tiles_of_a_fixed_epilogue() -> None:
    """A program with more operands needs registers, so that the largest tiles are not candidates."""
    tiles = {}
    for kind in ("rows", "chain", "fixed"):
        made = case("rows" if kind == "fixed" else kind, lead=(32, 128), n=3072, k=768).made()
        node, specs = made.node(), made.specs()
        if kind == "fixed":
            node, specs = joined(node).product, specs[:3]
        (step,) = host.candidates(node, specs, H200)[0].steps
        assert isinstance(step, Launch)
        tiles[kind] = [step.kernel.defines[name] for name in ("TILE_M", "TILE_N", "PINGPONG")]
    assert tiles == {"rows": [128, 192, 1], "chain": [128, 128, 1], "fixed": [128, 192, 1]}


def test_activations_are_as_accurate_as_the_outputs_show() -> None:
    for kind, is_precise in (("chain", 0), ("several", 1), ("only float32", 1)):
        (step,) = plans(case(kind, lead=(32, 128), n=768, k=768), H200)[0].steps
        assert isinstance(step, Launch) and step.kernel.defines["PRECISE"] == is_precise


@pytest.mark.parametrize("each", [
    case("chain", lead=(3,), n=72, k=200), case("chain", lead=(300,), n=768, k=768),
    conv_case("chain", ConvCase(2, 64, 128, (14, 14), (3, 3), (), (1,) * 4)),
    conv_case("chain", ConvTransposeCase(2, 64, 128, (14, 14), (4, 4), (2, 2), SAME)),
], ids=str)  # fmt: skip
def test_one_misaligned_operand_is_like_all(each: JoinedCase) -> None:
    """The kernel reads operands of the program by accesses as wide as those to the result."""
    made = each.made()
    *others, last = made.specs()
    one, every = (
        host_of(made.node().fusion).candidates(made.node(), specs, H200)[0]
        for specs in ([*others, replace(last, aligned=False)], made.specs(aligned=False))
    )
    assert one == every


@pytest.mark.parametrize("kind", KINDS_OF_PRODUCTS[:-1])
def test_dynamic_rows(kind: str) -> None:
    """One template has plans for all sizes, and its kernels take the sizes that a program reads as arguments."""
    made = case(kind, lead=(5, 13), n=24, k=40).made()
    inputs = with_dynamic_dims(made.specs(), 5, 13)
    template = template_of(made.node(), inputs, H200)
    assert not sorted({where for variant in template.variants for where, _ in variant.fixed})
    assert len(template.kernels) <= 14
    for sizes in ((1, 1), (5, 13), (3, 1), (64, 128), (7, 1001)):
        assert template.chosen(sizes) is not None, sizes
    assert any(kernel.text and kernel.source != "region" for kernel in template.kernels)
    for kernel in template.kernels:
        if kernel.text and kernel.source != "region":
            check_compiles(kernel, H200)


@pytest.mark.parametrize("conv", [
    ConvCase(2, 32, 32, (14, 14), (3, 3), (), (1,) * 4, group=32),
    ConvCase(2, 64, 64, (14, 14), (3, 3), (), (1,) * 4, group=4),
], ids=str)  # fmt: skip
def test_kernels_of_special_convolutions_have_no_program(conv: ConvCase) -> None:
    (source,) = {step.kernel.source for plan in plans(conv_case("chain", conv), H200) for step in plan.steps[-1:]
                 if isinstance(step, Launch)}  # fmt: skip
    assert source == "region"


def test_an_empty_batch_is_no_launch() -> None:
    made = case("several", lead=(5,), n=8, k=8).made()
    specs = [TensorSpec(tuple(0 if dim == 5 else dim for dim in spec.shape), spec.dtype) for spec in made.specs()]
    (plan,) = host.candidates(made.node(), specs, H200)
    assert plan.steps == () and [spec.shape for spec in plan.outputs] == [(0, 8)] * 4


def test_a_program_that_cannot_be_read_is_refused() -> None:
    made = case("chain").made()
    node, dtypes = made.node(), {"x0": "float16", "v0": "float16"}
    unknown = json.dumps({"ops": [["Mad", ["x0"], ["v0"], {}]], "outputs": ["v0"], "dtypes": dtypes})
    for text in ("{", '{"ops": [], "outputs": []}', unknown):
        wrong = FusedNode(node.fusion, "y", ("x", "w", "bias"), {**node.attributes, "program": text}, ("float16",))
        assert host.supports(wrong, ["float16"] * 3, T4) is not None
