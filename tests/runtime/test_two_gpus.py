"""Sessions on two GPUs of one machine have kernels, plans, trials and memory of their own."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from exported_models import load_exported
from test_models_gpu import INDEX, feeds
from test_runtime_gpu import CUDA, close, feed, kernels, model, session  # noqa: F401

import onnxfuse
from onnxfuse.runtime import cupy_backend
from onnxfuse.runtime.backends import device_of
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.loaded_templates import PreparedTemplate
from onnxfuse.runtime.plan import FusedNode, Plan, TensorSpec
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.template_words import words_of
from onnxfuse.session import InferenceSession, explain_session, open_session
from onnxfuse.tuning.autotune import gpu_trial
from onnxfuse.tuning.bound_session import TimedModel
from onnxfuse.tuning.tune import tune


def gpus() -> int:
    if cupy_backend.unavailable():
        return 0
    return int(importlib.import_module("cupy").cuda.runtime.getDeviceCount())


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(gpus() < 2, reason="needs two GPUs"),
]
BOTH = (0, 1)


def on(ordinal: int, source: bytes, **options: Any) -> ort.InferenceSession:
    return session(source, device_id=str(ordinal), **options)


def free(ordinal: int) -> int:
    import cupy

    with cupy.cuda.Device(ordinal):
        return int(cupy.cuda.runtime.memGetInfo()[0])


@pytest.mark.parametrize("steps", [1, 2])
def test_sessions_take_turns(steps: int) -> None:
    runs = [on(ordinal, model(steps=steps, nodes=1)) for ordinal in BOTH]
    for rows in (3, 5, 64):
        for run in (*runs, *reversed(runs)):
            close(run.run(None, feed(rows))[0], feed(rows))


def test_each_gpu_has_its_own_plans_and_kernels() -> None:
    runs = [on(ordinal, model()) for ordinal in BOTH]
    for run in runs:
        run.run(None, feed(64))
    used = [each for each in planner.templates_in_use() if isinstance(each, PreparedTemplate)]
    first, second = sorted(used, key=lambda each: each.situation.device.ordinal)
    assert (first.situation.device.ordinal, second.situation.device.ordinal) == BOTH
    numbers = {key: i for i, key in enumerate(sorted(first.kernels))}
    assert words_of(first.template, numbers) == words_of(second.template, numbers)
    assert all(first.kernels[key].handle != second.kernels[key].handle for key in numbers)


@pytest.mark.parametrize("steps", [1, 2])
def test_threads_run_on_both_at_once(steps: int) -> None:
    runs = [on(ordinal, model(steps=steps, nodes=1)) for ordinal in BOTH]

    def work(seed: int) -> None:
        for i in range(100):
            given = feed(1 + (seed + i) % 5, seed=seed)
            close(runs[(seed + i) % 2].run(None, given)[0], given)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_sessions_are_made_at_the_same_time() -> None:
    """New shapes on both GPUs make several threads compile and load kernels."""

    def work(seed: int) -> None:
        given = feed(8, 256 + 8 * seed)
        close(on(seed % 2, model(d=256 + 8 * seed)).run(None, given)[0], given)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


@pytest.mark.parametrize("steps", [1, 2])
def test_cuda_graphs_are_replayed_on_both(steps: int) -> None:
    made = []
    for ordinal in BOTH:
        run = on(ordinal, model(steps=steps), enable_cuda_graph="1")
        binding = run.io_binding()
        inputs = {k: ort.OrtValue.ortvalue_from_numpy(v, "cuda", ordinal) for k, v in feed(64).items()}
        output = ort.OrtValue.ortvalue_from_shape_and_type((64, 768), np.float32, "cuda", ordinal)
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("y", output)
        made.append((run, binding, inputs, output))
    for seed in range(6):
        given = feed(64, seed=seed)
        for run, binding, inputs, output in made:
            for name, value in given.items():
                inputs[name].update_inplace(value)
            run.run_with_iobinding(binding)
            close(output.numpy(), given)


def test_candidates_are_timed_where_they_will_run() -> None:
    inputs = (TensorSpec((1 << 14, 4096), "float32"), TensorSpec((4096,), "float32", constant=True))
    node = FusedNode.read("n", {"fusion": "rms_norm", "operands": "x scale", "output_types": [1], "epsilon": 1e-5})
    device = device_of(CUDA, 1, True)
    own: Plan = find_host("rms_norm").candidates(node, inputs, device)[0]
    made = gpu_trial(inputs, [own], device)
    before = free(0)
    outputs = made.outputs(own)
    assert outputs[0].device.id == 1
    assert abs(before - free(0)) < 64 << 20, "the 512 MB of the trial are not on the other GPU"
    assert 0 < made.seconds([own])[0] < 1
    assert made.difference(outputs, made.outputs(own)) is None
    del outputs
    made.close()


def test_a_model_is_tuned_on_the_second_gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of one kind share measurements, so that they hold for the first GPU too."""
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path))
    found = tune(TimedModel(onnx.load_from_string(model()), None, feed(512), "cuda", open_session, {"device_id": 1}))
    assert [(each.mode, each.reason, "kernels" in each.seconds) for each in found.models] == [
        ("plain", "", True), ("cuda graph", "", True)]  # fmt: skip
    names = {device_of(CUDA, ordinal, True).name for ordinal in BOTH}
    for ordinal in BOTH if len(names) == 1 else (1,):
        run = InferenceSession(model(), providers=[(CUDA, {"device_id": ordinal})])
        assert "the whole model with" in explain_session(run)[0].why


@pytest.mark.parametrize("name", ["bert_sdpa_dynamo_fp16.onnx", "llama_sdpa_dynamo_fp16.onnx"])
def test_a_whole_model_computes_the_same_on_both(name: str) -> None:
    """Two sessions on each GPU run matrix products, attention and norms in threads."""
    fused, _ = onnxfuse.optimize(load_exported(name), verify=False)
    source, entry = fused.SerializeToString(), INDEX[name]
    runs = [InferenceSession(source, providers=[(CUDA, {"device_id": i % 2})], tune="never") for i in range(4)]
    assert {each.how for run in runs for each in explain_session(run)} == {"kernel"}
    values = feeds(entry, entry["verified_sizes"][0], 0)
    expected = runs[0].run(None, values)

    def work(run: ort.InferenceSession) -> None:
        for _ in range(10):
            for found, right in zip(run.run(None, values), expected, strict=True):
                np.testing.assert_array_equal(found, right)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, runs))
