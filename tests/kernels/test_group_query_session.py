"""Sessions of a fused GroupQueryAttention that generate tokens: as bodies on a CPU, as kernels on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from attention_cases import NUMPY
from group_query_cases import PASTS, SCALES, Case, expected, near
from onnx import helper, numpy_helper

from onnxfuse import optimize
from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.runtime import cupy_backend
from onnxfuse.session import InferenceSession, explain_session

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
OPERANDS = ("query", "", "", *PASTS, "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache")
NEW = ("query", "seqlens_k", "total_sequence_length")
CONSTANTS = ("cos_cache", "sin_cache", *SCALES)
OUTPUTS = ("y", "present_key", "present_value")
TOLERANCE = {"float32": 2e-5, "float16": 4e-3}
CASE = Case((20, 7), past=64, heads=8, dtype="float16")


def original(case: Case) -> onnx.ModelProto:
    """Return a model of the operator; tables and scales are constants, and all other sizes are dynamic."""
    dtype, inputs = DTYPE_NUMBERS[case.dtype], case.inputs()
    shapes = {"query": ["b", "s", inputs["query"].shape[-1]], "seqlens_k": ["b"], "total_sequence_length": []}
    shapes |= {name: ["b", case.kv_heads, "p", case.size] for name in PASTS}
    kinds = {name: dtype if name not in NEW[1:] else DTYPE_NUMBERS["int32"] for name in shapes}
    cache = DTYPE_NUMBERS[case.cache or case.dtype]
    kinds |= dict.fromkeys(PASTS, cache)
    given = [helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in shapes.items()]
    made = [["b", "s", case.heads * case.size], *[["b", case.kv_heads, "r", case.size]] * 2]
    results = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in zip(OUTPUTS, (dtype, cache, cache), made, strict=True)
    ]
    tables = [numpy_helper.from_array(inputs[name], name) for name in CONSTANTS if name in inputs]
    operands = (*OPERANDS, "", "", "", *SCALES) if case.cache else OPERANDS
    call = helper.make_node("GroupQueryAttention", operands, OUTPUTS, domain="com.microsoft", **case.attributes())
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([call], "g", given, results, tables)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def session(case: Case, provider: str, **options: str) -> Any:
    """Return a session of the fused model."""
    model, report = optimize(original(case), verify=False)
    assert [one.fusion for one in report.fused] == ["group_query_attention"]
    run = InferenceSession(model.SerializeToString(), providers=[(provider, options)])
    assert {each.how for each in explain_session(run)} == {"kernel" if provider == CUDA else "body"}
    return run


def placed(value: np.ndarray, provider: str, name: str = "") -> Any:
    """Return the value in memory of the provider; the total length stays on the CPU."""
    if provider == CPU or name == "total_sequence_length":
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value))
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value), "cuda", 0)


def in_place(run: Any, case: Case, inputs: dict[str, np.ndarray], buffers: dict[str, Any], provider: str) -> list[Any]:
    """Return the results of a run whose present caches are the buffers of its past caches."""
    binding, y = run.io_binding(), placed(np.empty((2, case.new, 512), NUMPY[case.dtype]), provider)
    for name in NEW:
        binding.bind_ortvalue_input(name, placed(inputs[name], provider, name))
    for past, present in zip(PASTS, OUTPUTS[1:], strict=True):
        binding.bind_ortvalue_input(past, buffers[past])
        binding.bind_ortvalue_output(present, buffers[past])
    binding.bind_ortvalue_output("y", y)
    run.run_with_iobinding(binding)
    return [y.numpy().copy(), *(buffers[name].numpy() for name in PASTS)]


def close(case: Case, found: list[np.ndarray], inputs: dict[str, np.ndarray]) -> None:
    right, allowed = expected(case, inputs), TOLERANCE[case.dtype]
    if case.cache:
        assert all(near(case, present, rows) for present, rows in zip(found[1:], right.presents, strict=True))
        right = expected(case, inputs, found[1:])
    np.testing.assert_allclose(found[0][right.counts], right.y[right.counts], rtol=allowed, atol=allowed)
    for present, rows in zip(found[1:], right.presents, strict=True):
        known = np.isfinite(rows)
        np.testing.assert_allclose(present[known], rows[known], rtol=allowed, atol=allowed)


def steps(case: Case, prompt: int) -> list[Case]:
    """Return the cases of a prompt that is padded on the right, and of the tokens after it."""
    first = dataclasses.replace(case, new=prompt, lengths=(prompt, prompt - 5))
    later = [tuple(length + i for length in first.lengths) for i in range(1, 6)]
    return [first, *(dataclasses.replace(case, lengths=lengths, seed=i) for i, lengths in enumerate(later, 1))]


@pytest.mark.parametrize("provider", [CPU, pytest.param(CUDA, marks=ON_GPU)])
@pytest.mark.parametrize("prompt", [9, 40])
@pytest.mark.parametrize("cache", ["", "int8"])
def test_tokens_after_a_prompt_in_one_buffer(provider: str, cache: str, prompt: int) -> None:
    case = dataclasses.replace(CASE, dtype="float32" if provider == CPU else "float16", cache=cache, per_channel=True)
    run, given = session(case, provider), case.inputs()
    caches = {name: np.zeros_like(given[name]) for name in PASTS}
    buffers = {name: placed(value, provider) for name, value in caches.items()}
    for step in steps(case, prompt):
        inputs = {**step.inputs(), **caches, **{name: given[name] for name in CONSTANTS if name in given}}
        found = in_place(run, step, inputs, buffers, provider)
        close(step, found, inputs)
        caches = dict(zip(PASTS, (each.copy() for each in found[1:]), strict=True))


@pytest.mark.parametrize("provider", [CPU, pytest.param(CUDA, marks=ON_GPU)])
@pytest.mark.parametrize("cache", ["", "int8"])
def test_caches_that_grow(provider: str, cache: str) -> None:
    case = Case((12, 12), past=11, heads=8, dtype="float32" if provider == CPU else "float16", cache=cache)
    run, given = session(case, provider), case.inputs()
    caches = {name: given[name] for name in PASTS}
    for length in range(12, 16):
        step = dataclasses.replace(case, lengths=(length, length), past=length - 1, seed=length)
        inputs = {**step.inputs(), **caches, **{name: given[name] for name in CONSTANTS if name in given}}
        found = run.run(None, {name: np.asarray(inputs[name]) for name in (*NEW, *PASTS)})
        close(step, found, inputs)
        caches = dict(zip(PASTS, found[1:], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu")
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_token_as_onnxruntime_computes_it_from_a_quantized_cache(per_channel: bool) -> None:
    case = dataclasses.replace(CASE, cache="int8", per_channel=per_channel)
    inputs = case.inputs()
    runs = session(case, CUDA), ort.InferenceSession(original(case).SerializeToString(), providers=[CUDA])
    found = [in_place(run, case, inputs, {name: placed(inputs[name], CUDA) for name in PASTS}, CUDA) for run in runs]
    for each in found:
        close(case, each, inputs)


@pytest.mark.gpu
@pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu")
def test_a_session_captures_a_cuda_graph_in_which_sequences_grow() -> None:
    run, given = session(CASE, CUDA, enable_cuda_graph="1"), CASE.inputs()
    caches = {name: np.zeros_like(given[name]) for name in PASTS}
    total = np.array(CASE.past, np.int32)  # a bound that holds for all steps, as in onnxruntime-genai
    memory = {name: placed(value, CUDA) for name, value in caches.items()}
    memory |= {name: placed(given[name], CUDA) for name in ("query", "seqlens_k")}
    memory["total_sequence_length"] = placed(total, CUDA, "total_sequence_length")
    y, binding = placed(np.empty((2, 1, 512), np.float16), CUDA), run.io_binding()
    for name, value in memory.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in zip(OUTPUTS, (y, *(memory[past] for past in PASTS)), strict=True):
        binding.bind_ortvalue_output(name, value)
    for i in range(8):  # runs, the capture, and replays
        step = dataclasses.replace(CASE, lengths=(1 + i, 1 + i), seed=i, total=CASE.past)
        inputs = {**step.inputs(), **caches, **{name: given[name] for name in ("cos_cache", "sin_cache")}}
        for name in ("query", "seqlens_k"):
            memory[name].update_inplace(inputs[name])
        run.run_with_iobinding(binding)
        found = [y.numpy(), *(memory[name].numpy() for name in PASTS)]
        close(step, found, inputs)
        caches = dict(zip(PASTS, (each.copy() for each in found[1:]), strict=True))
