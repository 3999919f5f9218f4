"""GroupQueryAttention without a GPU: kernels compile, plans fit, and the formula of the GPU tests is the operator's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import onnxruntime
import pytest
from architectures import A100, DEVICES, H200, T4, check_attention_compiles, check_compiles, to_compile
from attention_cases import NUMPY
from group_query_cases import PASTS, SCALES, Case, expected, near
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from sampling import by_parts, sampled
from test_attention_compile import ARGUMENTS

from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.kernels.attention import host
from onnxfuse.runtime.plan import Device, Kernel, Launch, TensorSpec

OWN = (  # sources with forms of their own
    "group_query_append", "attention_mma", "attention_decode", "attention_hopper", "attention_with_cache",
    "attention_one_query",
)  # fmt: skip
PARTS = 12  # of the kernels, of which one is compiled in a plain run


def cases(dtype: str) -> Iterator[Case]:
    """Yield steps and prompts for every kernel, with all head sizes and all forms."""
    for size in 64, 80, 96, 128, 256:
        yield Case((1025,), past=2048, heads=8, size=size, dtype=dtype)
        yield Case((512,), new=512, past=1024, heads=8, size=size, dtype=dtype)
    yield Case((30, 4, 9, 1, 50), past=50, heads=32, kv_heads=8, dtype=dtype)
    yield Case((70, 5), new=70, dtype=dtype, packed=False, rotated=32, interleaved=True, positions=True)
    yield Case((3000, 5), past=4096, heads=8, dtype=dtype, norms=True, sink=True, window=1024)
    yield Case((300, 200), new=300, past=400, heads=8, dtype=dtype, norms=True, smooth=True, window=64, softcap=20.0)
    yield Case((1025,), past=2048, heads=8, dtype=dtype, bias="h")
    yield Case((300, 200), new=300, past=400, heads=8, dtype=dtype, bias="bh", total=350)
    yield Case((20, 6), past=20, size=40, dtype=dtype, rotated=0, aligned=False)
    for size, cache in (80, "float8_e4m3fn"), (256, "int8"):
        yield Case((1025,), past=2048, heads=8, size=size, dtype=dtype, cache=cache)
    yield Case((3000, 5), past=4096, heads=8, dtype=dtype, norms=True, sink=True, window=1024, cache="int8")
    yield Case((9,) * 8, past=4096, heads=32, kv_heads=8, size=128, dtype=dtype, cache="int8", per_channel=True)
    yield Case((300, 200), new=300, past=400, heads=8, dtype=dtype, cache="float8_e4m3fn", per_channel=True)


def launches(each: Case, device: Device) -> list[Launch]:
    plans = host.candidates(each.node(), each.specs(), device)
    return [step for plan in plans for step in plan.steps if isinstance(step, Launch)]


@functools.cache
def kernels(dtype: str, device: Device) -> list[Kernel]:
    exact = dataclasses.replace(device, tf32=False)
    found = [step.kernel for each in cases(dtype) for step in launches(each, exact)]
    return [kernel for kernel in found if kernel.source in OWN]


@by_parts(PARTS)
@pytest.mark.parametrize("dtype", sampled(["float16", "float32", "bfloat16"], 2))
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles(device: Device, dtype: str, part: int) -> None:
    for kernel in to_compile(device, functools.partial(kernels, dtype), part, PARTS):
        if kernel.source == "group_query_append":
            check_compiles(kernel, device)
        else:
            check_attention_compiles(kernel, device)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_plans_fit_the_device(device: Device) -> None:
    for each in (case for dtype in NUMPY for case in cases(dtype)):
        node, inputs = each.node(), each.specs()
        assert host.supports(node, [tensor.dtype for tensor in inputs], device) is None
        for plan in host.candidates(node, inputs, device):
            shape = each.batch, each.kv_heads, each.rows, each.size
            cache = TensorSpec(shape, each.cache or each.dtype, each.aligned)
            assert plan.outputs[1:] == (cache, cache)
            for step in plan.steps:
                assert isinstance(step, Launch)
                assert step.shared <= device.shared_per_block
                assert len(step.arguments) <= ARGUMENTS
                assert step.cluster <= (8 if device.arch >= 90 else 1)


def test_launches_depend_on_shapes_alone() -> None:
    """A CUDA graph replays the launches of one length at all lengths of the same buffer."""
    steps = [launches(Case((length,), past=2048, heads=8), H200) for length in (1, 700, 2048)]
    assert steps[0] == steps[1] == steps[2]


def test_steps_of_one_token_are_one_launch() -> None:
    for past, batch, source in (100, 1, "attention_one_query"), (4096, 8, "attention_with_cache"):
        each = Case((50,) * batch, past=past, heads=32, kv_heads=8, size=128)
        (step,) = host.candidates(each.node(), each.specs(), H200)[0].steps
        assert isinstance(step, Launch) and step.kernel.source == source


def test_what_the_kernel_for_one_query_leaves_to_others() -> None:
    usual = Case((50,), past=1152, heads=32, kv_heads=8)
    taken = {}, {"size": 128}, {"norms": True}, {"rotated": 0}, {"heads": 7, "kv_heads": 1}, {"window": 1152}
    left = (
        {"size": 96}, {"dtype": "float32"}, {"new": 2}, {"rotated": 32}, {"past": 2048}, {"window": 9}, {"sink": True},
        {"softcap": 3.0}, {"bias": "h"}, {"cache": "int8"}, {"aligned": False}, {"lengths": (50,) * 9},
        {"heads": 9, "kv_heads": 1},
    )  # fmt: skip
    for forms, is_taken in (taken, True), (left, False):
        for form in forms:
            steps = launches(dataclasses.replace(usual, **form), H200)
            assert any(step.kernel.source == "attention_one_query" for step in steps) == is_taken, form
    assert launches(usual, A100)[0].kernel.source == "attention_with_cache"


def test_a_past_may_be_its_present_if_it_is_as_long() -> None:
    for past, same in (50, True), (49, False):
        each = Case((50,), past=past)
        for plan in host.candidates(each.node(), each.specs(), H200):
            found = {(alias.input, alias.output): bool(alias.same_start) for alias in plan.no_alias}
            assert found == {(3, 1): same, (3, 2): False, (4, 1): False, (4, 2): same}


def test_refusals_of_quantized_caches() -> None:
    node, inputs = (each := Case((20,), past=20, cache="int8")).node(), each.specs()
    dtypes = {name: tensor.dtype for name, tensor in zip(node.operands, inputs, strict=True)}
    assert host.supports(node, list(dtypes.values()), H200) is None
    for name, dtype, wanted in (
        ("past_key", "uint8", "one dtype of int8, float8_e4m3fn, as it has scales"),
        ("past_value", "float8_e4m3fn", "one dtype of int8, float8_e4m3fn, as it has scales"),
        ("k_scale", "float16", "float32"),
    ):
        told = f"group_query_attention: {name} is {dtype}; required {wanted}"
        assert host.supports(node, list((dtypes | {name: dtype}).values()), H200) == told
    odd = dataclasses.replace(each, size=20)
    told = "group_query_attention: size is 20; required a multiple of 8, as of onnxruntime's operator"
    assert host.supports(odd.node(), list(dtypes.values()), H200) == told
    scales = [
        TensorSpec((2,), "float32") if name == "k_scale" else spec
        for name, spec in zip(node.operands, inputs, strict=True)
    ]
    with pytest.raises(ValueError, match=r"k_scale has shape \[2\]; required 1 elements"):
        host.candidates(node, scales, T4)


def test_refusals_say_what_is_required_and_found() -> None:
    node, inputs = (each := Case((20,), past=20)).node(), each.specs()
    dtypes = [tensor.dtype for tensor in inputs]
    assert host.supports(node, dtypes, H200) is None
    dtypes[3] = "int8"
    told = "group_query_attention: past_key is int8; required one dtype of float32, float16, bfloat16"
    assert host.supports(node, dtypes, H200) == told
    dtypes[3], dtypes[1] = "float16", "int64"
    assert host.supports(node, dtypes, H200) == "group_query_attention: seqlens_k is int64; required int32"
    wrong = [inputs[0], TensorSpec((3,), "int32"), *inputs[2:]]
    with pytest.raises(ValueError, match=r"seqlens_k has shape \[3\]; required \[1\]"):
        host.candidates(node, wrong, T4)


# ---- the formula of the GPU tests ----------------------------------------------------------------------------------

OPERANDS = (
    "query", "key", "value", *PASTS, "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache", "position_ids",
    "attention_bias", "head_sink", *SCALES,
)  # fmt: skip
FORMS = {
    "lengths": Case((9, 1, 40), past=50),
    "lengths_of_two_axes": Case((9, 1, 40), past=50, column=True),
    "full_buffer": Case((50, 49), past=50),
    "longer_than_the_past": Case((33, 33), past=32),
    "first_prompt": Case((7, 3, 1), new=7),
    "prompt_into_a_buffer": Case((30, 5), new=30, past=80),
    "prompt_longer_than_all_sequences": Case((5, 2), new=6, past=12),
    "second_prompt": Case((30,), new=12, past=40),
    "separate_operands": Case((20, 6), past=24, packed=False),
    "without_rotation": Case((20, 6), past=24, rotated=0),
    "half_rotated": Case((20, 6), past=24, rotated=32, interleaved=True),
    "positions": Case((20, 6), past=24, positions=True),
    "sinks": Case((20, 1), past=24, sink=True, softcap=2.0),
    "smooth": Case((40, 20), new=40, past=64, smooth=True, scale=0.3),
    "window": Case((20, 60), past=64, window=7),
    "bias": Case((20, 60), past=64, bias="bh", total=60),
    "bias_of_heads": Case((30, 11), new=30, past=40, bias="h", softcap=2.0, window=12),
    "bias_of_the_batch": Case((33, 9), past=32, bias="b", sink=True),
    "one_bias": Case((30,), new=12, past=18, bias="1"),
    "window_of_prompt": Case((50, 20), new=50, past=64, window=9, sink=True),
    "quantized": Case((9, 1, 40), past=50, cache="int8"),
    "quantized_by_channel": Case((33, 33), past=32, cache="int8", per_channel=True, sink=True, softcap=2.0),
    "quantized_prompt": Case((7, 3, 1), new=7, past=20, cache="int8", rotated=32, window=3),
    "quantized_first_prompt": Case((30, 5), new=30, cache="int8", per_channel=True, packed=False),
    "quantized_second_prompt": Case((30,), new=12, past=40, cache="int8", bias="h"),
}


def operands(case: Case) -> dict[str, np.ndarray]:
    """Return the inputs; rows of the past beyond the lengths have no NaN."""
    return {name: np.asarray(np.nan_to_num(value, nan=3.0)) for name, value in case.inputs().items()}


def by_the_operator(case: Case, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Return what onnxruntime computes on the CPU."""
    infos = [
        helper.make_tensor_value_info(name, DTYPE_NUMBERS[value.dtype.name], value.shape)
        for name, value in inputs.items()
    ]
    names = [name if name in inputs else "" for name in OPERANDS]
    outputs = ["y", "keys", "values"]
    call = helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft", **case.attributes())
    dtypes = [DTYPE_NUMBERS[dtype] for dtype in case.node().output_dtypes]
    results = [helper.make_tensor_value_info(name, dtype, None) for name, dtype in zip(outputs, dtypes, strict=True)]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([call], "g", infos, results), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, inputs)
    return found


@pytest.mark.parametrize("name", FORMS)
def test_the_formula_is_what_the_operator_computes(name: str) -> None:
    case = dataclasses.replace(FORMS[name], dtype="float32")
    inputs = operands(case)
    right = expected(case, inputs)
    y, *presents = by_the_operator(case, inputs)
    if case.cache:
        assert all(near(case, present, rows) for present, rows in zip(presents, right.presents, strict=True))
        right = expected(case, inputs, presents)
    np.testing.assert_allclose(y[right.counts], right.y[right.counts], rtol=1e-4, atol=1e-5)
    for present, rows in zip(presents, right.presents, strict=True):
        known = np.isfinite(rows)
        np.testing.assert_allclose(present[known], rows[known], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("past", "new"), [(0, 3), (1, 1), (4, 1), (4, 3)])
def test_what_has_no_plan_has_no_result_of_the_operator(past: int, new: int) -> None:
    """If the past is shorter than what precedes the new rows, the rows between them are of no tensor."""
    for total in range(new, past + new + 4):
        case = Case((total,), new=new, past=past, dtype="float32", rotated=0)
        if total <= past + new:
            assert host.candidates(case.node(), case.specs(), T4)
            continue
        with pytest.raises(ValueError, match=f"total_sequence_length is {total}; required at most {past} rows"):
            host.candidates(case.node(), case.specs(), T4)
        with pytest.raises(InvalidArgument, match="total_sequence_length"):
            by_the_operator(case, operands(case))
