"""Sessions that other packages open in a block of `onnxfuse.all_sessions` run kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, SHIFT, Stage, feed, model, stage

import onnxfuse
from onnxfuse.errors import UsageError
from onnxfuse.runtime.plain_session import initialize
from onnxfuse.tuning.counted_session import CountedSession


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return stage(monkeypatch)


def launches(gpu: Stage, run: ort.InferenceSession) -> int:
    """Run a session of SHIFT, and return how many kernels it launched."""
    before, given = gpu.launches(), feed(2, 3)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
    return gpu.launches() - before


def test_sessions_of_a_block_run_kernels(gpu: Stage) -> None:
    with onnxfuse.all_sessions(wait=True):
        run = ort.InferenceSession(model(SHIFT), providers=[CPU])
    assert type(run) is ort.InferenceSession
    assert launches(gpu, run) == 1
    assert [each.how for each in onnxfuse.explain_session(run)] == ["kernel"]
    after = ort.InferenceSession(model(SHIFT), providers=[CPU])
    assert launches(gpu, after) == 0
    with pytest.raises(UsageError, match="made without onnxfuse"):
        onnxfuse.explain_session(after)


def test_the_arguments_of_onnxruntime_are_passed_on(gpu: Stage, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(model(SHIFT))
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    with onnxfuse.all_sessions():
        run = ort.InferenceSession(str(tmp_path / "model.onnx"), options, [CPU], provider_options=[{}])
    assert launches(gpu, run) == 1
    assert (tmp_path / "optimized.onnx").exists()


def test_subclasses_keep_their_methods(gpu: Stage) -> None:
    class Named(ort.InferenceSession):
        def __init__(self, name: str, source: bytes) -> None:
            super().__init__(source, providers=[CPU])
            self.name = name

    with onnxfuse.all_sessions():
        run = Named("shift", model(SHIFT))
    assert (run.name, launches(gpu, run)) == ("shift", 1)
    with (
        onnxfuse.all_sessions(tune="background"),
        pytest.raises(UsageError, match=r"not of its subclass Named"),
    ):
        Named("shift", model(SHIFT))


def test_runs_are_counted_for_tuning_in_the_background(gpu: Stage) -> None:
    with onnxfuse.all_sessions(tune="background"):
        run = ort.InferenceSession(model(SHIFT), providers=[CPU])
    assert isinstance(run, CountedSession)
    assert launches(gpu, run) == 1


def test_of_nested_blocks_the_last_one_applies(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    opened = lambda *_, **arguments: made.append(arguments["aim"])  # noqa: E731
    monkeypatch.setattr("onnxfuse.sessions_of_packages.InferenceSession", opened)
    outer, inner = onnxfuse.all_sessions(aim="latency"), onnxfuse.all_sessions(aim="throughput")
    with outer:
        with inner:
            ort.InferenceSession(b"", providers=[CPU])
        ort.InferenceSession(b"", providers=[CPU])
    assert made == ["throughput", "latency"]
    assert ort.InferenceSession.__init__ is initialize


def test_a_block_ends_with_an_error(gpu: Stage) -> None:
    with pytest.raises(UsageError, match="tune='fast' is none of"), onnxfuse.all_sessions(tune="fast"):
        ort.InferenceSession(model(SHIFT), providers=[CPU])
    assert ort.InferenceSession.__init__ is initialize
