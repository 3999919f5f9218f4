"""Attention with caches on a GPU: every implementation against float64, the caches bit by bit."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import onnx.parser
import pytest
from attention_cases import DTYPES, FLOATS, NUMPY, formula
from cache_cases import CachedCase, cached
from kernel_hosts import require_support
from kernel_runs import launch, result, upload

from onnxfuse.kernels.attention import host
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.plan import Device, Launch, Plan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    return cuda_driver.gpu(0)


def plans(each: CachedCase, device: Device) -> list[Plan]:
    """Return all plans of one launch, or of two with the combination, and one of those that copy first."""
    node, specs = each.node(), each.specs()
    here = dataclasses.replace(device, tf32=each.case.tf32)
    require_support(host, node, [spec.dtype for spec in specs], here)
    found = host.candidates(node, specs, here)
    copying = [plan for plan in found if any(source(step) == "attention_append" for step in plan.steps)]
    return [plan for plan in found if plan not in copying[1:]]


def source(step: object) -> str:
    return step.kernel.source if isinstance(step, Launch) else ""


def check(each: CachedCase, device: Device, in_place: bool = False) -> None:
    """Check every plan; `in_place`: each past begins where its present begins."""
    case, inputs, presents = each.case, each.inputs(), each.presents()
    expected, tolerance = formula(case, dict(zip("qkv", (inputs["q"], *presents), strict=True)) | masks(inputs))
    for plan in plans(each, device):
        name = str([source(step) for step in plan.steps])
        read = {operand: upload(value, case.aligned) for operand, value in inputs.items()}
        filled = [np.full(spec.shape, 123.0, NUMPY[spec.dtype]) for spec in plan.outputs]
        written = [upload(value, case.aligned) for value in filled]
        if in_place:
            for operand, cache in zip(("past_key", "past_value"), written[1:], strict=True):
                place = cache[: inputs[operand].nbytes]
                place.set(np.ascontiguousarray(inputs[operand]).reshape(-1).view(np.uint8))
                read[operand] = place
        launch(plan, list(read.values()), written)
        found = result(written[0], plan.outputs[0], case.aligned).astype(FLOATS)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), err_msg=name)
        excess = np.nan_to_num(np.abs(found - expected) - tolerance, nan=-1.0)
        assert not excess.size or excess.max() <= 0, f"{name}: {int((excess > 0).sum())} of {excess.size} are wrong"
        for cache, spec, right in zip(written[1:], plan.outputs[1:], presents[: each.outputs - 1], strict=True):
            bits = result(cache, spec, case.aligned)
            np.testing.assert_array_equal(bits.view(np.uint8), right.view(np.uint8), err_msg=name)


def masks(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in inputs.items() if name in ("mask", "bias", "slopes", "positions", "sinks")}


# Lengths around the tiles of 64 keys, the fewest tiles that are split, and clusters of eight; an empty past.
LENGTHS = [(0, 1), (1, 1), (0, 7), (62, 1), (63, 1), (64, 1), (65, 1), (127, 2), (255, 1), (511, 1), (1000, 3),
           (1023, 1), (4095, 1), (4096, 1), (5000, 16), (300, 70), (64, 200)]  # fmt: skip


@pytest.mark.parametrize("outputs", [1, 2])
def test_caches_that_are_no_outputs(device: Device, outputs: int) -> None:
    for past, new, batch in ((0, 3, 1), (600, 1, 1), (4095, 2, 2), (100, 80, 2)):
        each = cached(past, new, heads=4, kv_heads=2, batch=batch)
        check(dataclasses.replace(each, outputs=outputs), device)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("past", "new"), LENGTHS)
def test_lengths(device: Device, past: int, new: int, layout: str) -> None:
    for batch, kv_heads in (1, 2), (3, 1):
        check(cached(past, new, layout, heads=4, kv_heads=kv_heads, batch=batch), device)


@pytest.mark.parametrize("layouts", [("packed", "bshd"), ("bshd", "bhsd"), ("seq_first", "packed")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_layouts(device: Device, dtype: str, layouts: tuple[str, str]) -> None:
    for past, tf32 in (40, False), (700, False), (700, True):
        given = {"heads": 6, "kv_heads": 3, "batch": 2, "dtype": dtype, "mask_dtype": dtype, "mask": "additive"}
        check(cached(past, 2, "bhsd", layouts, "packed", tf32=tf32, **given), device)


@pytest.mark.parametrize(("size", "value_size"), [(1, 1), (7, 9), (8, 16), (40, 40), (72, 80), (128, 128), (160, 96),
                                                  (256, 256), (255, 33)])  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(device: Device, dtype: str, size: int, value_size: int) -> None:
    for past, new in (30, 1), (600, 1), (200, 80):
        check(cached(past, new, heads=4, kv_heads=2, size=size, value_size=value_size, dtype=dtype), device)


@pytest.mark.parametrize("group", [1, 2, 5, 8, 32, 64])
def test_groups_of_query_heads(device: Device, group: int) -> None:
    for past, new in (50, 1), (900, 1), (900, 3):
        given = {"heads": 2 * group, "kv_heads": 2, "mask": "boolean", "mask_axes": (1, 0, 0, 1), "batch": 2}
        check(cached(past, new, size=128, value_size=128, **given), device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned(device: Device, dtype: str) -> None:
    for past, new in (0, 3), (31, 1), (800, 1), (100, 100):
        check(cached(past, new, heads=4, kv_heads=2, dtype=dtype, aligned=False), device)


@pytest.mark.parametrize(("past", "new"), [(0, 4), (1, 1), (63, 1), (64, 1), (700, 2), (4096, 1), (200, 100)])
@pytest.mark.parametrize(("layout", "kv_heads"), [("bhsd", 1), ("bshd", 4)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_in_place(device: Device, dtype: str, layout: str, kv_heads: int, past: int, new: int) -> None:
    given = {"heads": 4, "kv_heads": kv_heads, "dtype": dtype}
    for aligned in True, False:
        check(cached(past, new, layout, aligned=aligned, **given), device, in_place=True)


def test_causal_and_masks_of_every_kind(device: Device) -> None:
    for past in 40, 1500:
        check(cached(past, 5, heads=4, kv_heads=2, operator=True, causal=True), device)
        for kind in "boolean", "inverted", "additive":
            check(cached(past, 5, heads=4, kv_heads=2, mask=kind), device)
        check(cached(past, 5, heads=4, kv_heads=2, mask="boolean", bias_axes=(0, 1, 1, 1)), device)
        check(cached(past, 5, heads=4, kv_heads=2, bias_axes=(1, 0, 0, 1), sloped=True), device)
        check(cached(past, 5, heads=4, kv_heads=2, mask="additive", sinks=True), device)


@pytest.mark.parametrize("masked", [-np.inf, -65504.0])
def test_causal_masks(device: Device, masked: float) -> None:
    for past, new in (40, 5), (1500, 5), (1500, 1), (100, 200), (0, 70):
        for axes in (1, 0, 0, 1), ():
            check(cached(past, new, batch=2, heads=4, kv_heads=2, mask="causal", mask_axes=axes, masked=masked), device)
        given = {"operator": True, "mask": "causal", "mask_axes": (1, 0, 0, 1)}
        check(cached(past, new, batch=2, heads=4, kv_heads=2, **given), device)


@pytest.mark.parametrize(("batch", "past", "new"), [(0, 5, 2), (2, 5, 0), (2, 0, 0)])
def test_empty(device: Device, batch: int, past: int, new: int) -> None:
    each = cached(past, new, batch=batch, queries=new or 3)
    for queries in {0, each.case.queries}:
        check(dataclasses.replace(each, case=dataclasses.replace(each.case, queries=queries)), device)


# ---- in a session --------------------------------------------------------------------------------------------------

MODELS = ["llama_kvcache_sdpa_dynamo_fp16", "llama_kvcache_sdpa_dynamo23_fp32", "llama_kvcache_sdpa_ts_fp32"]


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_in_one_buffer_grows_step_by_step(name: str) -> None:
    """With one batch and one key head rows keep their offsets: binding both caches to one buffer moves no old row."""
    ort = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    models = importlib.import_module("test_models_gpu")
    ort.preload_dlls()
    entry, original = models.INDEX[f"{name}.onnx"], models.load_exported(f"{name}.onnx")
    fused, _ = models.onnxfuse.optimize(original, verify=False)
    chosen = [(models.CUDA, {"use_tf32": "0"})]
    session = models.InferenceSession(fused.SerializeToString(), providers=chosen, tune="never")
    found = [run for run in models.explain_session(session) if run.fusion == "attention_with_cache"]
    assert found and all(run.how == "kernel" for run in found), found
    exactly = models.session(models.model_to_float32(original).SerializeToString(), ["CPUExecutionProvider"])
    dtype = {"tensor(float16)": np.float16, "tensor(float)": np.float32}[session.get_outputs()[1].type]
    kv_heads, size = entry["config"]["kv_heads"], entry["config"]["head_dim"]
    capacity = {each.name: ort.OrtValue.ortvalue_from_shape_and_type((1, kv_heads, 64, size), dtype, "cuda", 0)
                for each in session.get_outputs()[1:]}  # fmt: skip
    exact: dict[str, np.ndarray] = {}
    past = 0
    for step, tokens in enumerate((9, 1, 1, 2)):
        ids = np.random.default_rng(step).integers(0, 40, (1, tokens))
        feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones((1, past + tokens), np.int64)}
        binding = session.io_binding()
        for each, value in feeds.items():
            binding.bind_cpu_input(each, value)
        for place, (output, buffer) in zip(session.get_inputs()[2:], capacity.items(), strict=True):
            shapes = (1, kv_heads, past, size), (1, kv_heads, past + tokens, size)
            binding.bind_input(place.name, "cuda", 0, dtype, shapes[0], buffer.data_ptr())
            binding.bind_output(output, "cuda", 0, dtype, shapes[1], buffer.data_ptr())
            feeds[place.name] = exact.get(output, np.zeros(shapes[0], np.float32))
        binding.bind_output("logits", "cuda", 0)
        session.run_with_iobinding(binding)
        wanted = dict(zip([each.name for each in exactly.get_outputs()], exactly.run(None, feeds), strict=True))
        exact, past = {name: wanted[name] for name in capacity}, past + tokens
        logits = binding.get_outputs()[-1].numpy()
        assert models.error(logits, wanted["logits"]) <= 4 * models.TOLERANCES[str(logits.dtype)]
        for output, buffer in capacity.items():
            rows = buffer.numpy().reshape(-1)[: wanted[output].size].reshape(wanted[output].shape)
            assert models.error(rows, wanted[output]) <= 4 * models.TOLERANCES[str(rows.dtype)]


STEP = """<ir_version: 8, opset_import: ["" : 17]>
step (float[2,4,1,8] q, float[2,2,1,8] k, float[2,1,16] v, float[2,2,600,8] past_key, float[2,2,600,8] past_value)
  => (float[2,4,1,8] y, float[2,2,601,8] present_key, float[2,2,601,8] present_value)
<int64[1] two = {2}, int64[5] repeat = {1, 1, 2, 1, 1}, int64[4] heads = {0, 4, -1, 8}, int64[4] split = {0, 0, 2, 8}>
{
  vs = Reshape (v, split)
  vt = Transpose <perm = [0, 2, 1, 3]> (vs)
  present_key = Concat <axis = 2> (past_key, k)
  present_value = Concat <axis = 2> (past_value, vt)
  k5 = Unsqueeze (present_key, two)
  kr = Expand (k5, repeat)
  k4 = Reshape (kr, heads)
  v5 = Unsqueeze (present_value, two)
  vr = Expand (v5, repeat)
  v4 = Reshape (vr, heads)
  kt = Transpose <perm = [0, 1, 3, 2]> (k4)
  scores = MatMul (q, kt)
  p = Softmax <axis = -1> (scores)
  y = MatMul (p, v4)
}"""


def test_a_cuda_graph_reads_what_its_inputs_hold_then() -> None:
    ort = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    models, attention = map(importlib.import_module, ("test_models_gpu", "test_attention_gpu"))
    ort.preload_dlls()
    original = onnx.parser.parse_model(STEP)
    fused, report = models.onnxfuse.optimize(original, verify=False)
    assert report.counts == {"attention_with_cache": 1}
    chosen = [(models.CUDA, {"use_tf32": "0", "enable_cuda_graph": "1"})]
    session = models.InferenceSession(fused.SerializeToString(), providers=chosen, tune="never")
    (found,) = models.explain_session(session)
    assert found.how == "kernel", found
    exactly = models.session(original.SerializeToString(), ["CPUExecutionProvider"])
    shapes = {each.name: each.shape for each in exactly.get_inputs()}
    values = [
        {name: np.random.default_rng(seed).standard_normal(shape, np.float32) for name, shape in shapes.items()}
        for seed in range(5)  # captured in the third run
    ]
    exact = [exactly.run(None, each) for each in values]
    for results, wanted in zip(attention.in_place(ort, session, values, exact), exact, strict=True):
        np.testing.assert_allclose(results[0], wanted[0], atol=1e-5)
        for cache, right in zip(results[1:], wanted[1:], strict=True):
            np.testing.assert_array_equal(cache, right)
