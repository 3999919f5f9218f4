"""Plan files for models of the stand-in kernels, and sessions that run by them without Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime as ort
from stand_in import CPU

from onnxfuse.runtime import native_library as native
from onnxfuse.runtime import planner
from onnxfuse.runtime.call_inputs import inputs_of
from onnxfuse.runtime.fused_calls import attribute_kinds, read_calls, read_model
from onnxfuse.runtime.plan_file import write_plan_file
from onnxfuse.runtime.saved_plans import compile_kernels, plan_file_of, saved_template
from onnxfuse.runtime.situation import Situation


def store(path: Path, *sources: bytes, tf32: bool = True) -> Path:
    """Write the plan file of some models for the stand-in's GPU."""
    calls = [call for source in sources for call in read_calls(read_model(source))]
    device, templates = planner.device_of(CPU, 0, tf32), []
    for call in calls:
        inputs = inputs_of(call)
        assert inputs is not None
        templates.append(planner.prepare(Situation(call.node, device, CPU, True), inputs))
    by_op = {call.op: [each for each in calls if each.op == call.op] for call in calls}
    operators = [f"{op} {attribute_kinds(same)}" for op, same in by_op.items()]
    codes = compile_kernels(templates, planner.backends[CPU])
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
