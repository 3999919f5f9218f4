"""Plan templates of convolutions: any batch, height and width, by few kernels, which all compile."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from architectures import A100, DEVICES, H200, T4, check_compiles, to_compile
from conv_cases import ConvCase, depthwise, image, large_shapes
from conv_emulation import run_emulated
from conv_transpose_cases import ConvTransposeCase
from dynamic_convs import DynamicConv, convolutions, gated, own_tilings, transposed
from sampling import by_parts, sampled
from template_checks import check_template, concrete_plan, template_of

from onnxfuse.kernels.conv import depthwise as depthwise_host
from onnxfuse.kernels.conv import depthwise_mma, depthwise_sliding, grouped, hopper, mma, stem
from onnxfuse.kernels.conv.problem import Conv, of_fewer_axes
from onnxfuse.kernels.conv.ranking import few_configs
from onnxfuse.kernels.conv.representative_sizes import BATCHES
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, Kernel, Launch

GPUS = [H200, A100, T4]
MAX_KERNELS, MAX_KERNELS_OF_GATED = 10, 13
PARTS = 90  # of the kernels, of which one is compiled in a plain run
NO_BF16_ARCH = 75
CONVOLUTIONS = [*convolutions(), *transposed(), *gated()]


def is_run(conv: DynamicConv, device: Device) -> bool:
    return conv.case.dtype != "bfloat16" or device.arch > NO_BF16_ARCH


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
@pytest.mark.parametrize("conv", sampled(CONVOLUTIONS, 12), ids=str)
def test_templates_say_what_their_host_says(conv: DynamicConv, device: Device) -> None:
    if not is_run(conv, device):
        pytest.skip(f"{device.name} has no bfloat16")
    own = own_tilings(conv, device)
    most = MAX_KERNELS_OF_GATED if "gate" in conv.case.extra else MAX_KERNELS
    check_template(conv.case.node(), conv.inputs(), device, max_kernels=most, sizes=conv.random_sizes, own_tilings=own)


@pytest.mark.parametrize(
    ("case", "source"),
    [
        (ConvCase(1, 256, 256, (14, 14), (3, 3), (), (1, 1, 1, 1)), "conv_hopper_split"),  # 5.5 us; conv_hopper 6.5
        (ConvCase(1, 512, 2048, (7, 7), (1, 1), (), extra=("bias", "residual")), "gemm_hopper"),  # 2.4; gemm_stream 3.9
    ],
    ids=str,
)
def test_one_image_of_a_dynamic_batch_has_the_kernel_that_it_has_alone(case: ConvCase, source: str) -> None:
    """On an H200, a ResNet-50 of dynamic batch took 1.07 of the time of one for one image without these."""
    template = template_of(case.node(), DynamicConv(case, "n").inputs(), H200)
    variant = template.chosen([1])
    assert variant
    (step,) = concrete_plan(template, variant, [1]).steps
    assert isinstance(step, Launch) and step.kernel.source == source


@pytest.mark.parametrize(
    "case",
    [
        ConvCase(1, 48, 64, (56, 56), (3, 3)),
        ConvCase(1, 48, 64, (56, 56), (3, 3), dtype="float32"),
        ConvCase(1, 48, 64, (56, 56), (1, 1)),
        ConvCase(1, 48, 96, (56, 56), (3, 3), group=4),
        image(1, 3, 32, (224, 224), (3, 3), (2, 2)),
        depthwise(1, 48, (56, 56), (3, 3)),
        ConvTransposeCase(1, 48, 64, (56, 56), (2, 2), (2, 2)),
    ],
    ids=str,
)
def test_a_dynamic_number_of_channels_is_that_of_the_weights(case: ConvCase | ConvTransposeCase) -> None:
    """No template is made for other numbers, which no run has: the variants are those of a static number."""
    x, *others = DynamicConv(case, "nhw").inputs()
    channels = 1 if case.x_nchw else 3
    dynamic = replace(x, shape=tuple(-4 if axis == channels else size for axis, size in enumerate(x.shape)))
    template = template_of(case.node(), [dynamic, *others], H200)
    static = template_of(case.node(), [x, *others], H200)
    assert [[repr(kernel) for kernel in each.kernels] for each in template.variants] == [
        [repr(kernel) for kernel in each.kernels] for each in static.variants
    ]


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
@pytest.mark.parametrize(
    ("case", "source"),
    [
        (ConvCase(1, 64, 64, (56, 56), (3, 3), (2, 2)), "conv_"),
        (image(1, 3, 32, (224, 224), (3, 3), (2, 2)), "conv_"),
        (depthwise(1, 64, (56, 56), (3, 3), (2, 2)), "conv_depthwise"),
    ],
    ids=str,
)
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_padding_that_depends_on_sizes(case: ConvCase, source: str, auto_pad: str, device: Device) -> None:
    """Kernels that hold padding as a constant have few configs for each of its values."""
    node = case.node()
    attributes = {**{name: value for name, value in node.attributes.items() if name != "pads"}, "auto_pad": auto_pad}
    conv = DynamicConv(case, "nhw")
    template = check_template(
        replace(node, attributes=attributes), conv.inputs(), device, max_kernels=MAX_KERNELS, sizes=conv.random_sizes,
        own_tilings=own_tilings(conv, device),
    )  # fmt: skip
    assert all(kernel.source.startswith((source, "epilogue")) for kernel in template.kernels)


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
@pytest.mark.parametrize("conv", sampled(convolutions(), 7), ids=str)
def test_plans_are_those_of_their_configs_at_any_size(
    conv: DynamicConv, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever config a variant has, its launch at some sizes is the one that the host makes of it for these alone."""
    if not is_run(conv, device):
        pytest.skip(f"{device.name} has no bfloat16")
    made: dict[str, list[Callable[[Conv], Implementation]]] = {}

    def recorded(make: Callable[..., Implementation]) -> Callable[..., Implementation]:
        def implementation(problem: Conv, config: object, device: Device) -> Implementation:
            found = make(problem, config, device)
            made.setdefault(repr(found.steps[0].kernel), []).append(lambda at: make(at, config, device))
            return found

        return implementation

    for host in (*KINDS.values(), hopper, mma):
        monkeypatch.setattr(host, "implementation", recorded(host.implementation))
    template = template_of(conv.case.node(), conv.inputs(), device)
    for seed in range(20):
        case = conv.sized(seed)
        variant = template.chosen(conv.sizes_at(case))
        assert variant
        (step, *_) = concrete_plan(template, variant, conv.sizes_at(case)).steps
        problem = replace(of_fewer_axes(case.problem()), tf32=device.tf32)
        makers = made[repr(variant.kernels[0])]
        assert step in [_as_dynamic(make(problem).steps[0], step) for make in makers]


def _as_dynamic(made: Launch, dynamic: Launch) -> Launch:
    """Return a launch for known sizes with what dynamic sizes have another choice of."""
    copy = {name: value for name, value in dynamic.kernel.defines.items() if name == "COPY"}  # of conv_stem.cu
    return replace(made, shared=dynamic.shared, kernel=replace(made.kernel, defines={**made.kernel.defines, **copy}))


# ---- the few configs --------------------------------------------------------------------------------------------


def _least(configs: Sequence[object], cost: Callable[[object], float]) -> float:
    return min(map(cost, configs), default=math.inf)


KINDS = {
    "depthwise": depthwise_host,
    "depthwise_mma": depthwise_mma,
    "depthwise_sliding": depthwise_sliding,
    "grouped": grouped,
    "stem": stem,
}
KNOWN = large_shapes()
SHAPES = {
    **KNOWN,
    "depthwise_mma": KNOWN["depthwise"],
    "depthwise_sliding": [case for case in KNOWN["depthwise"] if case.strides == (1, 1)],
}


@pytest.mark.parametrize(
    ("kind", "case"), sampled([(kind, case) for kind in KINDS for case in SHAPES[kind]], 3), ids=str
)
def test_one_of_few_configs_is_good_for_any_batch(kind: str, case: ConvCase) -> None:
    """For batches between the usual ones, the best of the few costs little more, by the host's own estimate."""
    host = KINDS[kind]
    usual = tuple(replace(case, n=n).problem() for n in BATCHES)
    is_sliding = host is depthwise_sliding  # it has its own way to choose a few, and uses no shared memory
    few = depthwise_sliding._few(usual, H200) if is_sliding else few_configs(host.RANKING, usual, H200)
    excess = []
    for n in (1, 3, 6, 11, 23, 50, 90, 200):
        conv = replace(case, n=n).problem()

        def cost(config: object, conv: Conv = conv) -> float:
            return float(host.cost(conv, config, H200))

        every = depthwise_sliding.configs(conv) if is_sliding else host.configs(conv, H200)
        excess.append(_least(few, cost) / _least(every, cost))
    assert len(few) <= 12 and max(excess) <= 1.2 and np.mean(excess) <= 1.08, excess


# ---- the kernels ------------------------------------------------------------------------------------------------


def all_kernels(device: Device) -> Iterator[Kernel]:
    """Yield the kernels of all these templates."""
    for conv in CONVOLUTIONS:
        if is_run(conv, device):
            yield from template_of(conv.case.node(), conv.inputs(), device).kernels


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    return list({repr(kernel): kernel for kernel in all_kernels(device)}.values())


@by_parts(PARTS)
@pytest.mark.parametrize("device", sampled(DEVICES, 9), ids=lambda device: f"sm_{device.arch}")
def test_kernels_compile_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device, stack=0)


EMULATED = [
    (DynamicConv(depthwise(1, 24, (9, 30), (3, 3), (1, 1), (1, 1, 1, 1)), "nhw"), ((2, 17, 19), (1, 5, 8), (3, 33, 4))),
    (DynamicConv(depthwise(1, 16, (9, 30), (5, 5), (2, 2), (2, 2, 2, 2)), "nhw"), ((2, 17, 19), (1, 1, 1))),
    (DynamicConv(image(1, 3, 32, (9, 30), (3, 3), (2, 2), (1, 1, 1, 1)), "nw"), ((2, 9, 19), (1, 9, 16), (1, 9, 14))),
    (DynamicConv(ConvCase(1, 64, 64, (9, 9), (3, 3), (), (1,) * 4, group=8), "nhw"), ((2, 15, 9), (1, 1, 2))),
]


@pytest.mark.parametrize(("conv", "sizes"), EMULATED, ids=str)
def test_a_template_computes_any_size(conv: DynamicConv, sizes: Sequence[Sequence[int]], tmp_path: Path) -> None:
    """A plan of the template, with the kernel's own source, run on the CPU."""
    template = template_of(conv.case.node(), conv.inputs(), H200)
    for n, *sides in sizes:
        case = replace(conv.case, n=n, sizes=tuple(sides))
        at = conv.sizes_at(case)
        variant = template.chosen(at)
        assert variant
        plan = concrete_plan(template, variant, at)
        folder = tmp_path / "x".join(map(str, (n, *sides)))
        folder.mkdir()
        arrays = case.arrays()
        y = run_emulated(case, Implementation("template", plan.steps), arrays, folder)
        expected, magnitude = case.expect(arrays)
        error = np.abs(y.astype(np.float64) - expected)
        assert (error <= 2e-6 * magnitude + 5.2e-4 * np.abs(expected) + 1e-7).all()
