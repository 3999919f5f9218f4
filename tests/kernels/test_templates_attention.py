"""Templates of attention: few kernels for all lengths, which compile without spills, and the host's own numbers."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from architectures import A100, H200, T4, check_attention_compiles
from attention_templates import CACHES, CASES, ROTATED, Case, with_cache
from counted_calls import counted_calls
from kernel_hosts import host_of
from sampling import by_parts, sampled
from template_checks import check_template, concrete_plan, summary, template_of

from onnxfuse.runtime.plan import Device, Kernel, Launch, Plan
from onnxfuse.runtime.template import Template, candidates_at, size_count, with_sizes

GPUS = pytest.mark.parametrize("device", [H200, A100, T4], ids=lambda device: f"sm_{device.arch}")
MAX_KERNELS = 11
MAX_CALLS = 550_000  # of functions, to make a template
GENERIC = ("CLUSTER", "MASK_PAIRS", "BIAS_PAIRS", "WIDTH")  # macros of which a kernel for any size has a general value
PARTS = 75  # of the kernels, of which one is compiled in a plain run


@GPUS
@pytest.mark.parametrize("case", sampled([*CASES, *CACHES, *ROTATED], 6), ids=lambda case: case.name)
def test_templates(case: Case, device: Device) -> None:
    check_template(case.node, case.inputs, device, max_kernels=MAX_KERNELS, sizes=case.sizes, generic=GENERIC)


@pytest.mark.parametrize("case", [*CASES, *CACHES, *ROTATED], ids=lambda case: case.name)
def test_no_batch_has_a_plan_wherever_it_has_one_for_that_size_alone(case: Case) -> None:
    """Sizes that a template has no variant for are planned with symbolic numbers, in a run."""
    template, host = template_of(case.node, case.inputs, H200), host_of(case.node.fusion)
    sizes = (0, *(case.sizes(1) if case.sizes else [4] * size_count(case.inputs))[1:])
    alone = host.candidates(case.node, with_sizes(case.inputs, sizes), H200)[0]
    found = concrete_plan(template, candidates_at(host, template, sizes)[0], sizes)
    assert [each.shape for each in found.outputs] == [each.shape for each in alone.outputs]


@GPUS
def test_usual_nodes_have_few_kernels(device: Device) -> None:
    most = {"padding": 6, "causal": 6, "step": 3, "steps": 4}  # one more for short caches
    for case in [*CASES, *CACHES]:
        if case.name in most:
            template = template_of(case.node, case.inputs, device)
            assert len(template.kernels) <= most[case.name], summary(template)


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    templates = [template_of(case.node, case.inputs, device) for case in (*CASES, *CACHES)]
    return list({repr(kernel): kernel for template in templates for kernel in template.kernels}.values())


@by_parts(PARTS)
@GPUS
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in kernels(device)[part::PARTS]:
        check_attention_compiles(kernel, device)


# ---- a cache that grows --------------------------------------------------------------------------------------------


def step_template(device: Device) -> Template:
    case = with_cache("step", (1, 1, -1))
    return template_of(case.node, case.inputs, device)


@functools.cache
def plans_at_every_length(device: Device) -> list[Plan]:
    template = step_template(device)
    assert len(template.variants) <= 6
    chosen = [template.chosen([past]) for past in range(4097)]
    assert all(chosen)
    return [concrete_plan(template, variant, [past]) for past, variant in enumerate(chosen) if variant]


@pytest.mark.parametrize("device", sampled([H200, A100, T4], 3), ids=lambda device: f"sm_{device.arch}")
def test_a_growing_cache_has_a_plan_at_every_length(device: Device) -> None:
    """The first step has no past; no length has kernels of its own."""
    for past, plan in enumerate(plans_at_every_length(device)):
        for step in plan.steps:
            assert isinstance(step, Launch)
            assert step.grid[0] > 0 and step.grid[0] % step.cluster == 0, f"at {past}"
            assert step.shared <= device.shared_per_block


def test_blocks_of_a_growing_cache_have_even_work() -> None:
    """From one step to the next, the longest block reads at most one tile of 64 keys more than before."""
    before = 0
    for past, plan in enumerate(plans_at_every_length(H200)):
        launch = plan.steps[0]
        assert isinstance(launch, Launch)
        splits = launch.grid[0] // 8
        tiles = -(-(past + 1) // int(launch.kernel.defines["BLOCK_N"]))
        longest = -(-tiles // splits)
        assert longest <= before + 1, f"at {past}"
        before = longest


def test_masks_shorter_or_longer_than_the_keys_have_plans_of_their_own() -> None:
    """A mask's length is a size of its own; samples have it equal to past and new rows, as runs do."""
    case = next(case for case in CACHES if case.name == "steps")
    template = template_of(case.node, case.inputs, H200)
    assert template.chosen([4, 700, 701])
    assert template.chosen([4, 0, 1])
    assert template.chosen([4, 700, 700]) is None


def test_templates_take_few_calls() -> None:
    """Up to 526,000 were counted; benchmarks/host_seconds.py times them."""
    for case in [*CASES, *CACHES]:
        template_of(case.node, case.inputs, H200)  # which fills caches
        assert counted_calls(lambda case=case: template_of(case.node, case.inputs, H200)) < MAX_CALLS, case.name


def test_tf32_is_no_more_kernels() -> None:
    for case in CASES:
        if case.inputs[0].dtype == "float32":
            for tf32 in True, False:
                device = dataclasses.replace(A100, tf32=tf32)
                check_template(case.node, case.inputs, device, max_kernels=5, sizes=case.sizes, generic=GENERIC)
