"""Plan files for models of the stand-in kernels, and sessions that run by them without Python."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from stand_in import CPU, SHIFT, Stage, feed, model, stage

from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS, device_of
from onnxfuse.runtime.call_inputs import inputs_of
from onnxfuse.runtime.fused_calls import attribute_kinds, read_calls, read_model
from onnxfuse.runtime.plan_file import write_plan_file
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.saved_plans import compile_kernels, plan_file_of, saved_template
from onnxfuse.runtime.template_key import Situation


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    gc.collect()  # because tracebacks of other tests may hold sessions
    result = stage(monkeypatch)
    for name in "PLANS", "MISSING", "PROVIDER":
        monkeypatch.delenv(f"ONNXFUSE_{name}", raising=False)
    yield result
    result.cuda.fake_second_multiprocessors(132)
    result.cuda.fake_fail_next(0)


@pytest.fixture
def plans(gpu: Stage, tmp_path: Path) -> Path:
    """Return a plan file of SHIFT; the hosts have forgotten that they were asked."""
    path = store(tmp_path / "shift.plans", model(SHIFT))
    gpu.kernels("shift").calls.clear()
    return path


def shifts(run: ort.InferenceSession, n: int, d: int = 3) -> None:
    """Check what a session of SHIFT computes."""
    given = feed(n, d)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])


def refusal(make: Callable[[], object]) -> str:
    """Return the message of what must fail; its log goes to stderr."""
    with pytest.raises(Exception) as caught:  # onnxruntime's errors have no common class
        make()
    return str(caught.value)


def store(path: Path, *sources: bytes, tf32: bool = True) -> Path:
    """Write the plan file of some models for the stand-in's GPU."""
    calls = [call for source in sources for call in read_calls(read_model(source))]
    device, templates = device_of(CPU, 0, tf32), []
    for call in calls:
        inputs = inputs_of(call)
        assert inputs is not None
        templates.append(planner.prepare(Situation(call.node, device, CPU, True), inputs))
    by_op = {call.op: [each for each in calls if each.op == call.op] for call in calls}
    operators = [f"{op} {attribute_kinds(same)}" for op, same in by_op.items()]
    codes = compile_kernels(templates, BACKENDS[CPU])
    write_plan_file(path, plan_file_of([saved_template(each, codes) for each in templates], None, operators))
    return path


def native_session(source: bytes, plans: Path | None = None, **entries: str) -> ort.InferenceSession:
    """Return a session as a program makes it that does not know onnxfuse: it registers the library."""
    return ort.InferenceSession(source, native_options(plans, **entries), [CPU])


def native_options(plans: Path | None = None, **entries: str) -> ort.SessionOptions:
    """Return session options with the library, after config entries onnxfuse.<name>."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    known: Mapping[str, Any] = {"provider": CPU, **({"plans": plans} if plans else {}), **entries}
    for name, value in known.items():
        options.add_session_config_entry(f"onnxfuse.{name}", str(value))
    options.register_custom_ops_library(str(native.library_path()))
    return options
