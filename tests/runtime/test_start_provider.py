"""The CUDA provider starts in a thread while the modules of a session are imported."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxfuse.runtime import start_provider
from onnxfuse.runtime.provider_names import CPU, CUDA

SCRIPT = """
import sys
import onnxfuse
make = onnxfuse.InferenceSession
from onnxfuse.runtime import start_provider
seen = []
start_provider.start_early = onnxfuse.inference_session.start_early = lambda *_: seen.append("onnx" in sys.modules)
try:
    make(b"no model")
except onnxfuse.ModelError:
    print(*seen, "onnx" in sys.modules)
"""
FORK = """
import os, signal
from onnxfuse.runtime import start_provider
start_provider._lock.acquire()  # as a thread that starts the provider
child = os.fork()
if not child:
    signal.alarm(60)
    start_provider.starts(0)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


def test_the_probe_is_a_model_of_one_operator() -> None:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert model.SerializeToString() == start_provider.PROBE


def test_the_provider_starts_before_onnx_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.parametrize(
    "providers, options, expected",
    [
        (None, None, 0),
        ([CUDA], [{"device_id": "1"}], 1),
        ([(CUDA, {"device_id": 2}), CPU], None, 2),
        ([CPU], None, None),
        ([CUDA], [{"device_id": "none"}], None),
    ],
)
def test_only_sessions_on_a_gpu_start_the_provider(
    monkeypatch: pytest.MonkeyPatch, providers: list[str] | None, options: list[dict[str, str]] | None, expected: int
) -> None:
    started, is_done = list[int](), threading.Event()
    monkeypatch.setattr(start_provider, "starts", lambda ordinal: (started.append(ordinal), is_done.set()))
    start_provider.start_early(None, providers, options)
    assert not started, "this onnxruntime has no CUDA"
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, CPU])
    start_provider.start_early(None, providers, options)
    assert is_done.wait(5 if expected is not None else 0) == (expected is not None)
    assert started == ([] if expected is None else [expected])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
