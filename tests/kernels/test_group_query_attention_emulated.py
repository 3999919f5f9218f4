"""GroupQueryAttention on a CPU: the launches of its plans against float64."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import hopper_emulation
import numpy as np
import pytest
from architectures import A100, H200, T4
from attention_cases import HALF_ULP, NUMPY
from group_query_cases import NUMPY as GROUP_QUERY_NUMPY
from group_query_cases import PASTS, Case, expected, near, unwritten
from sampling import by_parts, in_turn, sampled

from onnxfuse.kernels.attention import host
from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Kernel, Launch, Plan, Pointer, Scalar
from onnxfuse.testing.emulated_build import load
from onnxfuse.testing.emulated_launches import as_c_plus_plus, launch, launcher

EXACT = dataclasses.replace(A100, tf32=False)
# The functions in whose place attention_mma_emulated.h stands: their definitions end at the first brace of a line.
REPLACED = (
    "shared_base", "load_shared", "store_shared", "shared_float", "shared_float2", "shared_float4", "load_matrices",
    "load_byte", "mma", "transposed",
)  # fmt: skip
DEFINITION = re.compile(
    rf"(?m)^(template <(int BYTES|bool TRANSPOSED)>\n)?__device__ __forceinline__ \w+ ({'|'.join(REPLACED)})"
    r"\(.*\) {\n(.*\n)*?}\n"
)

CASES = {
    "one_token": Case((9, 1, 40), past=50, size=16),
    "one_token_that_fills_the_buffer": Case((50, 49), past=50, size=16, column=True),
    "longer_than_the_past": Case((33, 33), past=32, size=16),
    "first_prompt": Case((7, 3, 1), new=7, size=16),
    "prompt_into_a_buffer": Case((70, 5), new=70, past=80, size=16),
    "prompt_longer_than_all_sequences": Case((5, 2), new=6, past=12, size=16),
    "second_prompt": Case((30,), new=12, past=40, size=16),
    "separate_operands": Case((20, 6), past=24, size=16, packed=False),
    "without_rotation": Case((20, 6), past=24, size=16, rotated=0),
    "half_rotated": Case((20, 6), past=24, size=16, rotated=8, interleaved=True),
    "positions": Case((20, 6), past=24, size=16, positions=True),
    "norms": Case((20, 6), past=24, size=24, norms=True),
    "norms_alone": Case((9, 6), new=9, past=24, size=24, norms=True, rotated=0),
    "sinks": Case((20, 1), past=24, size=16, sink=True, softcap=2.0),
    "smooth": Case((40, 20), new=40, past=64, size=16, smooth=True, scale=0.3),
    "window": Case((20, 200), past=256, size=16, window=37),
    "window_of_prompt": Case((100, 40), new=100, past=128, size=16, window=9, sink=True),
    "bias": Case((20, 60), past=64, size=16, bias="bh", total=60),
    "bias_of_heads": Case((70, 11), new=70, past=90, size=16, bias="h", softcap=2.0, window=12),
    "bias_of_the_batch": Case((33, 9), past=32, size=16, bias="b", sink=True),
    "one_bias_of_odd_rows": Case((31, 6), new=12, past=40, size=16, bias="1", heads=7, kv_heads=1),
    "one_key_head": Case((70, 3), past=100, size=16, heads=7, kv_heads=1),
    "narrow_accesses": Case((9, 30), past=31, size=10, aligned=False),
}

QUANTIZED = {
    "one_token": Case((9, 1, 40), past=50, size=16, cache="int8"),
    "full_buffer": Case((64, 49), past=64, size=80, cache="int8", per_channel=True, softcap=3.0),
    "growing": Case((33, 33), past=32, size=16, cache="float8_e4m3fn"),
    "empty_past": Case((1, 1), past=8, size=24, cache="float8_e4m3fn", per_channel=True, sink=True),
    "several_tokens": Case((70,), new=7, past=80, size=32, cache="int8", per_channel=True, interleaved=True),
    "prompt": Case((70, 5), new=70, past=80, size=16, cache="int8", norms=True),
    "prompt_of_no_past": Case((7, 3), new=7, past=0, size=16, cache="float8_e4m3fn", window=4),
    "second_prompt": Case((30,), new=12, past=40, size=40, cache="float8_e4m3fn", packed=False, rotated=0),
    "turns": Case((20, 6), past=24, size=48, cache="float8_e4m3fn", norms=True, rotated=24, positions=True),
    "window": Case((20, 200), past=256, size=16, window=37, cache="int8", per_channel=True, smooth=True),
    "bias": Case((20, 60), past=64, size=16, bias="bh", total=60, cache="int8", heads=7, kv_heads=1),
    "misaligned": Case((9, 30), past=31, size=24, aligned=False, cache="int8", per_channel=True),
}

HOPPER = [
    {},
    {"window": 90, "sink": True},
    {"smooth": True, "softcap": 50.0, "norms": True},
    {"bias": "h"},
    {"cache": "float8_e4m3fn", "per_channel": True},
]


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("name", CASES)
def test_matches_float64(name: str, shared: bool, tmp_path: Path) -> None:
    case = dataclasses.replace(CASES[name], dtype="float32")
    if shared and case.past < case.rows:
        pytest.skip("a past that is shorter than its present has memory of its own")
    for device in (T4, EXACT) if case.new <= 16 else (T4,):
        for plan in host.candidates(case.node(), case.specs(), device):
            if all(isinstance(step, Launch) and step.cluster == 1 for step in plan.steps):
                check(case, plan, shared, tmp_path)


@by_parts(3)
@pytest.mark.parametrize(("turn", "form"), sampled([*enumerate(itertools.product(QUANTIZED, NUMPY))], 2), ids=str)
def test_quantized_caches(turn: int, form: tuple[str, str], part: int, tmp_path: Path) -> None:
    """A third of the plans of the same kernels, in turn; products of fp16 and bf16 are emulated, too."""
    case = dataclasses.replace(QUANTIZED[form[0]], dtype=form[1])
    devices = (A100, T4) if case.new <= 16 else (T4,)
    plans = [plan for device in devices for plan in host.candidates(case.node(), case.specs(), device)]
    for _, same in itertools.groupby(sorted(plans, key=sources), sources):
        for plan in in_turn([*same], turn // 2, part, 3):
            for shared in (False, True) if case.past == case.rows else (False,):
                check(case, plan, shared, tmp_path)


ONE_QUERY = {
    "steps_of_all_warps": Case((1041, 1), past=1152, size=64, heads=4, kv_heads=1),
    "few_keys": Case((17, 15, 33), past=40, size=128, heads=6, kv_heads=2),
    "growing": Case((33, 33), past=32, size=64, heads=7, kv_heads=1, packed=False),
    "full_buffer": Case((1152,), past=1152, size=128, heads=2, kv_heads=2, scale=-0.2),
    "turns": Case((40, 20), past=64, size=64, heads=16, kv_heads=2, norms=True, interleaved=True, positions=True),
    "norms_alone": Case((40, 130), past=160, size=128, norms=True, rotated=0),
    "without_turns": Case((40, 130), past=160, size=64, rotated=0),
}


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ONE_QUERY)
def test_one_query(name: str, dtype: str, shared: bool, tmp_path: Path) -> None:
    case = dataclasses.replace(ONE_QUERY[name], dtype=dtype)
    if shared and case.past < case.rows:
        pytest.skip("a past that is shorter than its present has memory of its own")
    plan = host.candidates(case.node(), case.specs(), H200)[0]
    assert sources(plan) == ["attention_one_query"]
    check(case, plan, shared, tmp_path)


@pytest.mark.parametrize("length", [33, 34, 48, 50])
def test_an_infinite_value_stays_infinite(length: int, tmp_path: Path) -> None:
    """Also in the last row of the past, which stands for the rows that a step of 16 keys lacks."""
    case = Case((length,), past=64, heads=4, kv_heads=1, rotated=0)
    plan = host.candidates(case.node(), case.specs(), H200)[0]
    (step,) = plan.steps
    assert isinstance(step, Launch) and step.kernel.source == "attention_one_query"
    arrays = {Pointer("input", i): each for i, each in enumerate(case.inputs().values())}
    arrays[Pointer("input", list(case.inputs()).index("past_value"))][0, 0, length - 2, 3] = np.inf
    for i, spec in enumerate(plan.outputs):
        arrays[Pointer("output", i)] = unwritten(spec.shape, spec.dtype)
    run(step, arrays, tmp_path)
    found = arrays[Pointer("output", 0)].reshape(case.heads, case.size).astype(np.float32)
    assert (found[:, 3] == np.inf).all() and np.isfinite(np.delete(found, 3, 1)).all()


@pytest.mark.parametrize("before", [-5, 20, 1000])
def test_a_length_that_the_previous_kernel_writes(before: int, tmp_path: Path) -> None:
    """The kernel then has read the old length, and keys of the sequence of that length."""
    case = Case((40, 1), past=64, heads=4, kv_heads=1)
    plan = host.candidates(case.node(), case.specs(), H200)[0]
    (step,) = plan.steps
    assert isinstance(step, Launch)
    text, count = re.subn(r"(int last = )static_cast.*;", rf"\g<1>{before};", kernel_text(step.kernel))
    assert count == 1
    kernel = dataclasses.replace(step.kernel, text=text)
    check(case, dataclasses.replace(plan, steps=(dataclasses.replace(step, kernel=kernel),)), True, tmp_path)


NUMBERS = """#include "quantized_cache.cuh"
extern "C" __global__ void numbers(const float* x, int count, u8* bytes, float* values, u32* halves, u32* wide) {
    for (int i = 0; i < count; ++i) bytes[i] = u8(quantized(x[i], 1.0f));
    for (u32 i = 0; i < 256; ++i) {
        values[i] = number(i);
        halves[i] = pair<0, 3>(f16(), i | i << 24), wide[i] = pair<2, 1>(bf16(), i << 16 | i << 8);
    }
}"""


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_numbers_of_a_cache(dtype: str, tmp_path: Path) -> None:
    """All numbers, the middles between them, their neighbours in float32, and what lies outside of their range."""
    kind = GROUP_QUERY_NUMPY[dtype]
    every = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    ordered = np.unique(every[np.isfinite(every)])
    x = np.concatenate([ordered, (ordered[1:] + ordered[:-1]) / 2, [-1e30, 1e30, ordered[-1] + 0.5, -600.0]])
    x = np.concatenate([x, np.nextafter(x, np.inf), np.nextafter(x, -np.inf)]).astype(np.float32)
    bytes_, values = np.empty(x.size, np.uint8), np.empty(256, np.float32)
    halves, wide = np.empty((256, 2), np.float16), np.empty((256, 2), NUMPY["bfloat16"])
    arrays = dict(enumerate((x, bytes_, values, halves, wide)))
    arguments = [Pointer("input", 0), Scalar(x.size, "int32"), *(Pointer("input", i) for i in range(1, 5))]
    kernel = Kernel("numbers", "numbers", {"QUANTIZED": 1 if dtype == "int8" else 2, "PER_CHANNEL": 0}, text=NUMBERS)
    step = Launch(kernel, (1, 1, 1), (1, 1, 1), tuple(arguments))
    launch(step, library(kernel, tmp_path), lambda pointer: arrays[pointer.index].ctypes.data)
    low, high = (-128, 127) if dtype == "int8" else (-448, 448)
    right = x.clip(low, high)
    right = (right.round() if dtype == "int8" else right).astype(kind).astype(np.float32)
    np.testing.assert_array_equal(bytes_.view(kind).astype(np.float32), right)
    known = np.where(np.isfinite(every), every, np.copysign(480, every))
    np.testing.assert_array_equal(values, known)
    for pairs, unit in (halves, 1 if dtype == "int8" else 256), (wide, 1):
        np.testing.assert_array_equal(pairs.astype(np.float32) * unit, np.stack([known, known], axis=1))


@pytest.mark.parametrize("cache", ["", "int8"])
@pytest.mark.parametrize("new", [1, 3])
def test_lengths_that_no_cache_has(new: int, cache: str, tmp_path: Path) -> None:
    """Whatever the lengths are, nothing is written outside of the caches; too long ones count as the whole cache."""
    case = Case((10,) * 4, new=new, past=10, size=16, dtype="float32", cache=cache)
    inputs = case.inputs()
    right = expected(case, inputs)
    inputs["seqlens_k"][:] = -(2**31), 2**31 - 1, -1 - new, 10
    arrays: dict[Pointer, np.ndarray] = {Pointer("input", i): value for i, value in enumerate(inputs.values())}
    for plan in [plan for device in (T4, EXACT) for plan in host.candidates(case.node(), case.specs(), device)]:
        wholes = [unwritten((3, *spec.shape), spec.dtype) for spec in plan.outputs]
        arrays |= {Pointer("output", i): whole[1] for i, whole in enumerate(wholes)}
        arrays |= {Pointer("scratch", i): np.zeros(size, np.uint8) for i, size in enumerate(plan.scratch)}
        for step in plan.steps:
            assert isinstance(step, Launch)
            run(step, arrays, tmp_path)
        y = wholes[0][1]
        np.testing.assert_allclose(y[1::2], right.y[1::2], rtol=1e-4, atol=1e-5)
        assert (y[::2] == 0).all(), "a sequence without keys has no results"
        for whole, spec in zip(wholes, plan.outputs, strict=True):
            np.testing.assert_array_equal(whole[::2], unwritten((2, *spec.shape), spec.dtype))


@pytest.mark.parametrize("cache", ["", "int8"])
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
def test_few_splits_are_combined(shared: bool, cache: str, tmp_path: Path) -> None:
    case = Case((600, 3, 129), past=1024, size=16, dtype="float32", sink=True, window=400, cache=cache)
    plans = {tuple(sources(plan)): plan for plan in host.candidates(case.node(), case.specs(), EXACT)}
    check(case, plans["attention_with_cache", "attention_combine"], shared, tmp_path)
    check(case, plans["group_query_append", "attention_decode", "attention_combine"], shared, tmp_path)


def sources(plan: Plan) -> list[str]:
    return [step.kernel.source for step in plan.steps if isinstance(step, Launch)]


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("form", HOPPER, ids=str)
def test_prompts_on_hopper(form: dict[str, Any], shared: bool, tmp_path: Path) -> None:
    """Rows of a buffer from the length on may be NaN, and are cleared where a tile has them."""
    case = Case((200, 3, 70), new=200, past=330, heads=2, kv_heads=1, **form)
    plans = host.candidates(case.node(), case.specs(), H200)
    plan = next(each for each in plans if each.steps[-1].kernel.source == "attention_hopper")
    check(case, plan, shared, tmp_path)


def check(case: Case, plan: Plan, shared: bool, folder: Path) -> None:
    inputs = case.inputs()
    arrays: dict[Pointer, np.ndarray] = {Pointer("input", i): value for i, value in enumerate(inputs.values())}
    for i, spec in enumerate(plan.outputs):
        arrays[Pointer("output", i)] = unwritten(spec.shape, spec.dtype)
    if shared:
        for i, past in enumerate(PASTS, 1):
            arrays[Pointer("output", i)] = inputs[past]
    for i, size in enumerate(plan.scratch):
        arrays[Pointer("scratch", i)] = np.full(size, 0xFF, np.uint8)
    right = expected(case, {name: value.copy() for name, value in inputs.items()})
    for step in plan.steps:
        assert isinstance(step, Launch)
        run(step, arrays, folder)
    found = [arrays[Pointer("output", i)] for i in range(3)]
    if case.cache:
        assert all(near(case, present, rows) for present, rows in zip(found[1:], right.presents, strict=True))
        right = expected(case, case.inputs(), found[1:])
    assert np.isfinite(found[0].astype(np.float32)).all()
    error = HALF_ULP[case.dtype]
    allowed = 5 * error * right.sizes + (2e-5 if case.dtype == "float32" else 1e-4)
    assert np.all(np.abs(found[0] - right.y)[right.counts] <= allowed[right.counts])
    for present, rows in zip(found[1:], right.presents, strict=True):
        known = np.isfinite(rows)
        np.testing.assert_allclose(present[known], rows[known], rtol=2 * error, atol=2 * error)
        if not shared and sources(plan)[0] == "group_query_append":
            assert np.isfinite(present.astype(np.float32)).all(), "rows beyond the length are cleared"


def run(step: Launch, arrays: dict[Pointer, np.ndarray], folder: Path) -> None:
    if step.kernel.source == "attention_hopper":
        addresses = {each: arrays[each].ctypes.data for each in step.values if isinstance(each, Pointer)}
        hopper_emulation.run(step, addresses, folder)
        return

    def address(pointer: Pointer) -> int:
        return arrays[dataclasses.replace(pointer, offset=0)].ctypes.data + pointer.offset

    launch(step, library(step.kernel, folder), address)


def library(kernel: Kernel, folder: Path) -> Any:
    text = DEFINITION.sub("", as_c_plus_plus(kernel_text(kernel)))
    text = f'#include "blocks_emulated.h"\n#include "attention_mma_emulated.h"\n{text}\n'
    text += launcher(kernel.entry, "launch")
    return load(text, kernel.defines, [], folder / f"{kernel.source}_{abs(hash(repr(kernel)))}.cc").launch
