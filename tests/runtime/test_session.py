"""Which fused nodes run as kernels and which as their bodies, with the reasons; and what is refused."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from exported_models import load_exported
from onnxruntime.capi import onnxruntime_inference_collection as inference

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, SHIFT, Stage, feed, load, model, node, session, stage

import onnxfuse
from onnxfuse import session as session_module
from onnxfuse.errors import ModelError, UsageError
from onnxfuse.runtime import custom_ops as operators
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.fused_calls import Call
from onnxfuse.runtime.plan import Kernel
from onnxfuse.runtime.provider_names import CUDA
from onnxfuse.runtime.start_provider import default_providers
from onnxfuse.runtime.target import NoTarget, find_target
from onnxfuse.session import InferenceSession, NodeDispatch, explain_session, open_session, register
from onnxfuse.tuning.dispatch import Preference, SessionSettings

KERNEL = f"{CPU}, device 0"
AZURE = "AzureExecutionProvider"  # a provider that a CPU build of onnxruntime has
NOTHING = Kernel("none", "noop")
FP16 = (
    "g (float16[n, d] x, float16[d] b) => (float16[n, d] y) { "
    + node("shift", "x, b", "y", operands="x bias", types="10")
    + " }"
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield stage(monkeypatch)


def test_the_body_runs_where_the_dtype_has_no_kernel(gpu: Stage) -> None:
    before = gpu.launches()
    run = session(model(FP16))
    given = feed(2, 3, np.float16)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    assert gpu.launches() == before
    why = "shift is there for float32, the node has float16, float16"
    assert explain_session(run) == (NodeDispatch("node_0", "shift", "body", why),)


def test_the_body_runs_where_the_provider_has_no_kernels() -> None:
    run = InferenceSession(model(SHIFT), providers=["CPUExecutionProvider"])
    given = feed(2, 3)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    assert explain_session(run)[0].why == "the session does not use CUDAExecutionProvider"


def test_sessions_use_cuda_where_no_providers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since version 1.10, onnxruntime uses the CPU alone where no providers are named."""
    assert default_providers(None) is None
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["TensorrtExecutionProvider", CUDA, CPU])
    options = ort.SessionOptions()
    assert default_providers(None) == default_providers(options) == [CUDA, CPU]
    found = find_target(options, None, None)
    assert isinstance(found, NoTarget)
    assert "name CUDAExecutionProvider in `providers`" in found.why
    monkeypatch.setattr(ort.SessionOptions, "has_providers", lambda _: True)
    assert default_providers(options) is None


def mixed() -> bytes:
    return model(
        "g (float[n] x) => (float[n] y, float[n] z) { "
        + node("scale", "x", "y", operands="x", more=", factor = 2.0")
        + node("scale", "x", "z", operands="x", more=", factor = -2.0")
        + " }"
    )


def test_an_op_is_split_where_only_some_of_its_nodes_have_a_kernel(gpu: Stage) -> None:
    before, x = gpu.launches(), np.float32([1, 2])
    run = session(mixed())
    y, z = run.run(None, {"x": x})
    assert (y.tolist(), z.tolist()) == ([2, 4], [-2, -4])
    assert gpu.launches() - before == 1
    assert [(r.how, r.why) for r in explain_session(run)] == [
        ("kernel", KERNEL),
        ("body", "the factor must be positive"),
    ]


def test_register_leaves_the_model_alone(gpu: Stage) -> None:
    options = ort.SessionOptions()
    runs = register(options, mixed(), [CPU])
    assert [(r.how, r.why) for r in runs] == [
        ("body", "node 'node_1', which calls the same function, runs as its body"),
        ("body", "the factor must be positive"),
    ]
    register(options, model(SHIFT), [CPU])
    run = ort.InferenceSession(model(SHIFT), options, [CPU])
    before = gpu.launches()
    run.run(None, feed(2, 3))
    assert gpu.launches() - before == 1
    assert [r.how for r in explain_session(run)] == ["kernel"]


def test_session_options_serve_one_choice_per_op(gpu: Stage) -> None:
    options = ort.SessionOptions()
    InferenceSession(model(SHIFT), options, [CPU])
    more = SHIFT.replace("[1]>", "[1], size = 3>")
    assert InferenceSession(model(more), options, [CPU]).run(None, feed(2, 3))
    assert gpu.kernels("shift").nodes[-1].attributes == {"size": 3}
    with pytest.raises(UsageError, match="they run shift as a kernel, but here its body must run; make new"):
        InferenceSession(model(FP16), options, [CPU])
    with pytest.raises(UsageError, match="they run scale not as a kernel"):
        InferenceSession(mixed(), options, [CPU])


def test_the_body_runs_where_onnxruntime_cannot_know_the_rank(gpu: Stage) -> None:
    text = "g (float[n, d] x, float[d] b, int64[k] s) => (float[n, d] y) { t = Reshape(x, s) " + node(
        "shift", "t, b", "y", operands="x bias"
    )
    why = "it has no attribute output_ranks, and its outputs are not known to have x's rank"
    assert explain_session(session(model(text + " }"))) == (NodeDispatch("node_1", "shift", "body", why),)
    run = session(model(text.replace("[1]>", "[1], output_ranks = [2]>") + " }"))
    assert [r.how for r in explain_session(run)] == ["kernel"]
    given = feed(2, 3)
    shape = np.array([2, 3], np.int64)
    np.testing.assert_array_equal(run.run(None, given | {"s": shape})[0], given["x"] + given["b"])


def test_a_session_that_was_meant_for_the_gpu_warns(gpu: Stage, caplog: pytest.LogCaptureFixture) -> None:
    InferenceSession(model(SHIFT), providers=["CPUExecutionProvider"])
    BACKENDS[CPU] = dataclasses.replace(BACKENDS[CPU], unavailable=lambda: "CuPy is not here")
    run = session(model(SHIFT))
    assert [(r.levelname, r.getMessage()) for r in caplog.records if "not here" in r.getMessage()] == [
        ("WARNING", "shift: bodies run 1 node (CuPy is not here)")
    ]
    assert explain_session(run)[0].why == "CuPy is not here"


@pytest.mark.parametrize("planned", [True, False])
def test_a_session_may_outlive_everything_at_exit(gpu: Stage, planned: bool) -> None:
    """Sessions that are deleted while Python shuts down must not call Python."""
    script = f"""
import sys, pytest
sys.path.insert(0, {str(Path(__file__).parents[1] / "native")!r})
import stand_in, numpy as np
from onnxfuse.runtime.plan import Kernel
from onnxfuse.session import InferenceSession
stand_in.stage(pytest.MonkeyPatch())
run = InferenceSession(stand_in.model(stand_in.SHIFT), providers=[stand_in.CPU])
if {planned}:
    run.run(None, {{"x": np.ones((2, 3), "f"), "b": np.ones(3, "f")}})
sys.keep = run
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_measurement_may_prefer_the_body(gpu: Stage) -> None:
    def slow(_: object, calls: Sequence[Call], *__: object) -> list[Preference]:
        return [Preference(False, "the body was faster: 3 against 4 us") for _ in calls]

    run = open_session(model(SHIFT), providers=[CPU], settings=SessionSettings(slow, "first"))
    assert [(r.how, r.why) for r in explain_session(run)] == [("body", "the body was faster: 3 against 4 us")]


def test_explain_refuses_other_sessions() -> None:
    with pytest.raises(UsageError, match="made without onnxfuse"):
        explain_session(ort.InferenceSession(model(SHIFT), providers=["CPUExecutionProvider"]))


REFUSED = {
    "which the model has no function for, and no kernel runs it": ("onnxfuse.shift", "onnxfuse.shift_9"),
    "attribute operands names 1, the node has 2": ('"x bias"', '"x"'),
    "attribute output_types names 2, the node has 1": ("[1]", "[1, 1]"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_model_that_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        session(model(SHIFT.replace(*REFUSED[message])))


def test_a_newer_domain_version_is_refused() -> None:
    proto = onnx.load_from_string(model(SHIFT))
    proto.opset_import[1].version = 2
    with pytest.raises(ModelError, match=r"version 2 .* this onnxfuse supports version 1: install a newer onnxfuse"):
        session(proto.SerializeToString())


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.onnx"
    path.write_text("not a model")
    with pytest.raises(ModelError, match=r"text\.onnx' is not an ONNX file"):
        InferenceSession(path, providers=[CPU])
    with pytest.raises(ModelError, match=r"the model is empty \(0 bytes\); expected an ONNX file"):
        InferenceSession(b"", providers=[CPU])


@pytest.mark.parametrize("name", ["qwen3_sdpa_dynamo_fp32", "gpt2_eager_ts_fp32", "llama_sdpa_dynamo_fp32"])
def test_every_kernel_of_an_exported_model_is_planned(gpu: Stage, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The plans of the real kernels pass the native library's checks; the kernels of the stand-in do nothing."""
    nothing = dataclasses.replace(BACKENDS[CPU], load=lambda kernel, ordinal: load(NOTHING, ordinal))
    monkeypatch.setitem(BACKENDS, CPU, nothing)
    source, _ = onnxfuse.optimize(load_exported(f"{name}.onnx"), verify=False)
    run = session(source.SerializeToString())
    kernels = [r for r in explain_session(run) if r.how == "kernel"]
    before = gpu.launches()
    for length in (16, 5):
        given = {}
        for value in run.get_inputs():
            shape = [size if isinstance(size, int) else 1 if "batch" in size else length for size in value.shape]
            given[value.name] = np.ones(shape, np.int64 if "int64" in value.type else np.float32)
        run.run(None, given)
    assert kernels
    assert gpu.launches() - before >= 2 * len(kernels)


def test_an_empty_list_of_providers_means_all(gpu: Stage) -> None:
    run = InferenceSession(model(SHIFT), providers=[])
    assert (run.get_providers(), [r.how for r in explain_session(run)]) == ([CPU], ["kernel"])


class Broken:
    """Return an onnxruntime whose provider does not start."""

    def __init__(self, *_: object) -> None:
        pass

    def initialize_session(self, providers: object, *_: object) -> None:
        raise RuntimeError("CUDA failure 2: out of memory")


@pytest.mark.parametrize(("given", "said"), [({}, "CUDA failure 2"), ({"enable_fallback": 1}, "NOT_IMPLEMENTED")])
def test_onnxruntime_does_not_fall_back_where_kernels_are_registered(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, given: dict[str, int], said: str
) -> None:
    """The user must see the provider's error, not that no other provider has the kernels."""
    monkeypatch.setitem(BACKENDS, AZURE, BACKENDS.pop(CPU))
    made = inference.C.InferenceSession

    def first_broken(*arguments: object) -> object:
        monkeypatch.setattr(inference.C, "InferenceSession", made)
        return Broken()

    monkeypatch.setattr(inference.C, "InferenceSession", first_broken)
    with pytest.raises(Exception, match=said):
        InferenceSession(model(SHIFT), providers=[AZURE, CPU], **given)


def test_threads_register_once_with_shared_options(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    both, own = threading.Barrier(2), operators.attribute_kinds

    def slowly(calls: Sequence[Call]) -> str:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return own(calls)

    monkeypatch.setattr(operators, "attribute_kinds", slowly)
    options = ort.SessionOptions()
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: InferenceSession(model(SHIFT), options, [CPU]), range(2)))
    assert [[each.how for each in explain_session(run)] for run in runs] == [["kernel"]] * 2


def test_a_file_that_is_replaced_meanwhile_is_not_half_loaded(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first version of the file decides which nodes run as kernels."""
    path, new = tmp_path / "model.onnx", tmp_path / "new.onnx"
    path.write_bytes(model(SHIFT))
    new.write_bytes(model(FP16))
    own = session_module.read_calls

    def replaced(proto: onnx.ModelProto) -> list[Call]:
        new.replace(path)
        return own(proto)

    monkeypatch.setattr(session_module, "read_calls", replaced)
    with pytest.raises(ModelError, match=r"model\.onnx' was written to while it was loaded; make the session again"):
        InferenceSession(path, providers=[CPU])
