"""Plan files of the stand-in kernels: what tests of them share."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import stand_in
from stand_in import CPU, SHIFT, Stage, model, stage

from onnxfuse.runtime.plan_file import SavedTemplate, read_plan_file, write_plan_file
from onnxfuse.runtime.saved_plans import save_plans
from onnxfuse.session import InferenceSession

X = {"x": np.ones((2, 3), np.float32), "b": np.arange(3, dtype=np.float32)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    gc.collect()  # because tracebacks of other tests may hold sessions, whose plans would be saved too
    result = stage(monkeypatch)
    result.kernels("shift").calls.clear()
    yield result


@pytest.fixture
def saved(gpu: Stage, tmp_path: Path) -> Path:
    """Return a file with the template of one node."""
    run = new()
    run.run(None, X)
    assert save_plans(tmp_path / "plans", CPU) == 1
    return tmp_path / "plans"


def new(graph: str = SHIFT, **arguments: Any) -> ort.InferenceSession:
    return InferenceSession(model(graph), providers=[CPU], **arguments)


def edited(path: Path, **versions: Any) -> Path:
    """Return the file with other versions."""
    file = read_plan_file(path)
    write_plan_file(path, dataclasses.replace(file, versions={**file.versions, **versions}))
    return path


def changed(path: Path, change: Callable[[SavedTemplate], SavedTemplate]) -> Path:
    """Return the file with other templates."""
    file = read_plan_file(path)
    write_plan_file(path, dataclasses.replace(file, templates=[change(each) for each in file.templates]))
    return path


def other_gpu(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Let the machine have a GPU that differs in these facts."""
    monkeypatch.setattr(stand_in, "DEVICE", dataclasses.replace(stand_in.DEVICE, **facts))
