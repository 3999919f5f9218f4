"""Linear attention and causal convolutions: all plans compile and fit, and hosts say what they do not take."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from architectures import DEVICES, H200, T4, check_compiles, covering, to_compile
from linear_attention_cases import CHUNKS, CONVS, NUMPY, PARTS, STEPS, TOKENS, Case, Conv
from sampling import by_parts
from template_checks import check_template, with_dynamic_dims

from onnxfuse.kernels.linear_attention import host
from onnxfuse.runtime.plan import Device, Kernel, Launch, Plan, TensorSpec

COMPILED = 4  # parts of the kernels; a plain run compiles one
LARGE = Case(1000, heads=16, state_heads=16, size=128, value_size=128, state_dtype="float32")


def plans(case: Case | Conv, device: Device) -> list[Plan]:
    node, specs = case.node(), case.specs()
    assert host.supports(node, [spec.dtype for spec in specs], device) is None
    found = host.candidates(node, specs, device)
    for step in (step for plan in found for step in plan.steps):
        assert isinstance(step, Launch) and step.shared <= device.shared_per_block
    return found


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    cases: list[Case | Conv] = [
        *TOKENS.values(),
        *CHUNKS.values(),
        *PARTS.values(),
        *STEPS.values(),
        *CONVS.values(),
        LARGE,
        replace(LARGE, length=1, batch=8),
    ]
    every = [replace(each, dtype=dtype) for each in cases for dtype in NUMPY]
    found = [plan for each in every for one in (device, replace(device, tf32=False)) for plan in plans(each, one)]
    return [step.kernel for plan in found for step in plan.steps if isinstance(step, Launch)]


@by_parts(COMPILED)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles(device: Device, part: int) -> None:
    for kernel in covering(to_compile(device, kernels), part, COMPILED):
        check_compiles(kernel, device, spills=32)  # addresses, which are used once


def test_sequences_take_chunks_where_products_are_on_tensor_cores() -> None:
    for device in DEVICES:
        for case, chunked in (
            (replace(LARGE, dtype="float16"), device.arch >= 80 and device.shared_per_block > 130000),
            (replace(LARGE, dtype="bfloat16", size=64), device.arch >= 80),
            (LARGE, False),
            (replace(LARGE, dtype="float16", size=256), False),
            (replace(LARGE, dtype="float16", row_decays=True), False),
            (replace(LARGE, dtype="float16", length=8), False),
        ):
            sources = [step.kernel.source for step in plans(case, device)[0].steps if isinstance(step, Launch)]
            by_chunks = ["linear_attention_chunks", "linear_attention_sequence"]
            assert sources == (by_chunks if chunked else ["linear_attention_tokens"]), (device, case)


def test_few_sequences_are_split_without_the_delta_rule() -> None:
    gated = replace(LARGE, rule="gated", row_decays=True)
    for case, split in (gated, True), (replace(gated, batch=8), False), (replace(gated, length=191), False):
        assert (len(plans(case, H200)[0].steps) == 3) == split
    assert len(plans(replace(gated, batch=8), H200)) == 2 and len(plans(LARGE, H200)) == 1


def test_parts_of_float32_are_products_where_tensor_cores_are() -> None:
    gated = replace(LARGE, rule="gated", batch=8)
    for device in (replace(each, tf32=False) for each in DEVICES):
        for case, taken in (
            (gated, device.arch >= 80 and device.shared_per_block > 110000),
            (replace(gated, size=64, length=128), device.arch >= 80),
            (replace(gated, length=127), False),
            (replace(gated, value_size=120), False),
        ):
            sources = [step.kernel.source for step in plans(case, device)[0].steps if isinstance(step, Launch)]
            assert ("linear_attention_products" in sources) == taken, (device, case)


def test_blocks_go_along_sequences_where_products_may_be_tf32() -> None:
    """They do so first where they are many, and where a sequence has few parts."""
    mamba = Case(512, rule="gated", heads=24, state_heads=24, k_heads=1, size=128, value_size=64, present=False)
    for case, stages in (
        (replace(mamba, batch=8), 1),
        (replace(mamba, length=191), 2),
        (replace(mamba, length=16, value_size=48), 2),
        (mamba, None),
        (replace(mamba, length=15), None),
        (replace(mamba, batch=8, rule="gated_delta"), None),
        (replace(mamba, batch=8, state_dtype="float16"), None),
        (replace(mamba, batch=8, row_decays=True), None),
    ):
        for device in H200, replace(H200, tf32=False), T4:
            (first, *_) = plans(case, device)[0].steps
            assert isinstance(first, Launch)
            taken = stages is not None and device == H200
            assert (first.kernel.source == "linear_attention_tf32") == taken, (device, case)
            assert not taken or first.kernel.defines["STAGES"] == stages


TEMPLATES = {
    "": Case(137, batch=3, dtype="float16", heads=8), "parts": Case(137, batch=3, rule="gated"),
    "steps": Case(137, batch=3, rule="gated", heads=16, state_heads=16, value_size=32),
    "net": Case(137, batch=3, dtype="float16", heads=8, state_heads=8, net="batch"), "conv": Conv(137, batch=3),
}  # fmt: skip


@pytest.mark.parametrize("device", [H200, T4], ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("case", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_says_what_its_host_says(case: Case | Conv, device: Device) -> None:
    check_template(case.node(), with_dynamic_dims(case.specs(), 3, 137), device, max_kernels=12)


def test_a_state_may_be_written_where_it_was_read() -> None:
    """Several heads of results that read one state in chunks do not wait for each other."""
    sequence = replace(LARGE, dtype="float16")
    for case, same in (replace(sequence, length=1), True), (sequence, True), (replace(sequence, heads=32), False):
        (alias,) = plans(case, H200)[0].no_alias
        assert (alias.input, alias.output, bool(alias.same_start)) == (3, 1, same)
    (alias,) = plans(Conv(40), H200)[0].no_alias
    assert (alias.input, alias.output, alias.same_start) == (3, 1, True)


def test_refusals_say_what_is_required_and_found() -> None:
    case = replace(LARGE, heads=4, state_heads=4)
    node, dtypes = case.node(), [spec.dtype for spec in case.specs()]
    told = "linear_attention: decay is float16; required one dtype of float32, float16, bfloat16"
    assert host.supports(node, [*dtypes[:4], "float16", *dtypes[5:]], H200) == told
    dynamic = replace(node, attributes={k: v for k, v in node.attributes.items() if k != "key_width"})
    assert host.supports(dynamic, dtypes, H200) == "linear_attention: the key_width is dynamic; required a number"
    odd = replace(node, attributes={**node.attributes, "key_width": 384})
    told = "rows of 512, 384 and 512 elements are not whole heads, 4 of queries and 4 of values"
    assert host.supports(odd, dtypes, H200) == f"linear_attention: {told}"
    wide = replace(case, size=2049).node()
    told = "linear_attention: states have 2049 rows; the kernels take up to 2048"
    assert host.supports(wide, dtypes, H200) == told
    net = Case(7, batch=2, net="tokens")
    told = "gated_delta_net: several sequences have no axis of their own"
    assert host.supports(net.node(), [spec.dtype for spec in net.specs()], H200) == told
    specs = [TensorSpec((1, 1000, 5), "float32") if i == 4 else spec for i, spec in enumerate(case.specs())]
    with pytest.raises(ValueError, match=r"decay has shape \[1, 1000, 5\]; required \[1, 1000, 4\]"):
        host.candidates(node, specs, H200)
    for net in Case(5, batch=2, net="batch"), Case(5, net="tokens"):
        specs = [TensorSpec((3, *x.shape[1:]), x.dtype) if len(x.shape) == 4 and i == 3 else x
                 for i, x in enumerate(net.specs())]  # fmt: skip
        with pytest.raises(ValueError, match=r"past_state has shape \[3, 2, 16, 16\]; required"):
            host.candidates(net.node(), specs, H200)
    groups = replace(case, heads=64, state_heads=1, size=512)
    with pytest.raises(ValueError, match="a token takes 133160 bytes of shared memory; T4 has 65536"):
        host.candidates(groups.node(), groups.specs(), T4)
    long = Conv(9, size=40)
    told = "causal_conv_with_state: filters have 40 elements; the kernel takes 1 to 32"
    assert host.supports(long.node(), ["float32"] * 4, H200) == told
