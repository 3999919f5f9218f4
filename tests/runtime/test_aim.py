"""Sessions and plan files whose aim is throughput: their plans are for a GPU that other runs use at the same time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, SHIFT, Stage, model, session, stage

from onnxfuse.compile.compile_file import CompileSettings, compile_file
from onnxfuse.errors import UsageError
from onnxfuse.runtime.plan import Aim, Device

FEED = {"x": np.ones((2, 3), np.float32), "b": np.arange(3, dtype=np.float32)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    yield stage(monkeypatch)


@pytest.fixture
def asked(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """Return the GPUs for which plans were made, as they are made."""
    host, devices = gpu.kernels("shift"), list[Device]()
    own = host.candidates

    def candidates(node: Any, inputs: Any, device: Device) -> Any:
        devices.append(device)
        return own(node, inputs, device)

    monkeypatch.setattr(host, "candidates", candidates)
    return devices


def test_sessions_of_either_aim_have_plans_of_their_own(asked: list[Device]) -> None:
    for aim in get_args(Aim):
        asked.clear()
        run = session(model(SHIFT), aim=aim)
        np.testing.assert_array_equal(run.run(None, FEED)[0], FEED["x"] + FEED["b"])
        assert {each.shared for each in asked} == {aim == "throughput"}


def test_a_plan_file_has_an_aim(asked: list[Device], tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model(SHIFT))
    for aim in get_args(Aim):
        asked.clear()
        compile_file(tmp_path / "m.onnx", tmp_path / "m.plans", CompileSettings(provider=CPU, aim=aim))
        assert {each.shared for each in asked} == {aim == "throughput"}


def test_words_that_do_not_go_together_are_refused(gpu: Stage) -> None:
    with pytest.raises(UsageError, match="aim='speed' is none of 'latency', 'throughput'"):
        session(model(SHIFT), aim="speed")
    with pytest.raises(UsageError, match="tune='background' measures kernels alone"):
        session(model(SHIFT), tune="background", aim="throughput")
    options = ort.SessionOptions()
    session(model(SHIFT), sess_options=options)
    with pytest.raises(UsageError, match="aim='throughput' = 0, here it is 1"):
        session(model(SHIFT), sess_options=options, aim="throughput")
