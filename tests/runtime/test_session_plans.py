"""Sessions that find a plan file, beside their model or by plans=; the GPU is a stand-in."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, SHIFT, Stage, feed, model, node, stage

from onnxfuse.compile.compile_file import CompileSettings, compile_file
from onnxfuse.errors import UsageError
from onnxfuse.runtime import nvrtc, support
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.plan import Aim, Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.plan_file import read_plan_file, write_plan_file
from onnxfuse.runtime.planner import planner
from onnxfuse.session import InferenceSession, explain_session, register

TWO = (
    "g (float[n, d] x, float[d] b) => (float[n, d] y, float[n, d] z) { "
    + node("shift", "x, b", "y", operands="x bias")
    + node("copy", "y", "z", operands="x")
    + " }"
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stage]:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    result = stage(monkeypatch)
    result.kernels("shift").calls.clear()
    yield result


@pytest.fixture
def path(gpu: Stage, tmp_path: Path) -> Path:
    """Return a model with a plan file beside it, which was made as by another process."""
    found = tmp_path / "m.onnx"
    found.write_bytes(model(SHIFT))
    compile_file(found, tmp_path / "m.onnx.plans", CompileSettings(provider=CPU))
    planner._prepared.clear()
    gpu.kernels("shift").calls.clear()
    return found


def open_(source: Path | bytes, **arguments: Any) -> ort.InferenceSession:
    return InferenceSession(source, providers=[CPU], **arguments)


def check(run: ort.InferenceSession, n: int = 2) -> None:
    given = feed(n, 4)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_file_beside_the_model_is_used(gpu: Stage, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onnxfuse"):
        run = open_(path)
    check(run)
    assert not gpu.kernels("shift").calls, "nothing is planned"
    assert [each.why for each in explain_session(run)] == [f"{CPU}, device 0; plans of m.onnx.plans"]
    assert f"{path}.plans: 2 templates are used" in caplog.text
    assert not warnings(caplog)


def test_a_file_is_named_by_an_argument(gpu: Stage, path: Path) -> None:
    """Then any model may have it, as one that is given as bytes."""
    other = Path(f"{path}.plans").rename(path.with_name("other.plans"))
    check(open_(path))
    assert gpu.kernels("shift").calls, "there is none beside the model"
    planner._prepared.clear()
    gpu.kernels("shift").calls.clear()
    run = open_(path.read_bytes(), plans=other)
    check(run)
    assert not gpu.kernels("shift").calls
    assert explain_session(run)[0].why.endswith("; plans of other.plans")


def test_a_file_that_is_named_must_exist(path: Path) -> None:
    with pytest.raises(UsageError, match=r"plans='.*none': there is no such file; `onnxfuse compile` writes it"):
        open_(path, plans=path.with_name("none"))


def test_options_can_be_registered_with_a_file(gpu: Stage, path: Path) -> None:
    for source, arguments in ((path, {}), (path.read_bytes(), {"plans": f"{path}.plans"})):
        options = ort.SessionOptions()
        (dispatch,) = register(options, source, [CPU], **arguments)  # type: ignore[arg-type]
        assert dispatch.why == f"{CPU}, device 0; plans of m.onnx.plans"
        check(ort.InferenceSession(str(path), options, [CPU]))
    assert not gpu.kernels("shift").calls


def test_nodes_of_a_model_that_has_changed_are_planned(
    gpu: Stage, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unchanged nodes use the file's plans; the session warns why it starts slowly."""
    path.write_bytes(model(TWO))
    run = open_(path)
    check(run)
    assert not gpu.kernels("shift").calls
    assert [each.why.endswith("; plans of m.onnx.plans") for each in explain_session(run)] == [True, False]
    why = "made for another model, or the model has changed: 1 of 2 fused nodes have no plans in it; make it again"
    assert warnings(caplog) == [f"{path}.plans: {why}"]


def test_a_file_that_was_overwritten_is_no_longer_used(
    gpu: Stage, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its earlier content is not used either; only earlier sessions keep the plans that they have."""
    first, plans = open_(path), Path(f"{path}.plans")
    plans.write_bytes(b"none")
    for source, arguments in ((path, {}), (path.read_bytes(), {})):
        planner._prepared.clear()
        gpu.kernels("shift").calls.clear()
        run = open_(source, **arguments)
        check(run)
        assert gpu.kernels("shift").calls
        assert explain_session(run)[0].why == f"{CPU}, device 0"
    assert warnings(caplog) == [f"plans are not used: {plans}: no plan file"]
    check(first)


@pytest.mark.parametrize("made_for, other", [("latency", "throughput"), ("throughput", "latency")])
def test_a_session_of_another_aim_does_not_use_a_file(
    gpu: Stage, path: Path, caplog: pytest.LogCaptureFixture, made_for: Aim, other: Aim
) -> None:
    """Such a session ignores the file whether it names it, or another session has loaded it before."""
    plans = path.with_name("other.plans")
    Path(f"{path}.plans").unlink()
    compile_file(path, plans, CompileSettings(provider=CPU, aim=made_for))
    assert explain_session(open_(path, plans=plans, aim=made_for))[0].why == f"{CPU}, device 0; plans of other.plans"
    assert not warnings(caplog)
    for arguments in {"plans": plans}, {}:
        run = open_(path, aim=other, **arguments)
        assert explain_session(run)[0].why == f"{CPU}, device 0"
        check(run)
    found = f"made for sessions with aim='{made_for}' and use_tf32=1, this one has aim='{other}' and use_tf32=1"
    assert warnings(caplog) == [
        f"plans are not used: {plans}: {found}; make it again, with --aim or --option use_tf32="
    ]


def test_a_library_of_config_entries_takes_plans_of_the_session_s_aim(gpu: Stage, path: Path) -> None:
    """The library reads the file of the entry itself, and asks Python for what it does not have."""
    Path(f"{path}.plans").rename(path.with_name("other.plans"))
    for aim, is_asked in ("latency", False), ("throughput", True):
        options = ort.SessionOptions()
        options.add_session_config_entry("onnxfuse.plans", str(path.with_name("other.plans")))
        run = open_(path, sess_options=options, aim=aim)
        check(run)
        assert bool(planner.templates_in_use()) == is_asked


@pytest.mark.parametrize(
    "source, why",
    [
        (SHIFT, "the session does not use CUDAExecutionProvider"),
        ("g (float[n] x) => (float[n] y) { y = Relu (x) }", "the model has no fused"),
    ],
)
def test_plans_that_are_named_for_nothing_are_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, source: str, why: str
) -> None:
    if source == SHIFT:
        monkeypatch.delitem(BACKENDS, CPU)
    open_(model(source))
    assert not warnings(caplog)
    open_(model(source), plans=f"{path}.plans")
    (found,) = warnings(caplog)
    assert found.startswith(f"plans are not used: {path}.plans: {why}")


def test_a_folder_is_no_plan_file(path: Path) -> None:
    with pytest.raises(UsageError, match=r"plans='.*' is a directory; name the file in it that `onnxfuse compile` "):
        open_(path, plans=path.parent)


@pytest.mark.parametrize("data, why", [(b"none", "no plan file"), (None, "written by onnxfuse 0.0.1, this is ")])
def test_a_file_that_does_not_fit_is_not_used(
    gpu: Stage, path: Path, caplog: pytest.LogCaptureFixture, data: bytes | None, why: str
) -> None:
    """A warning says why, whether the file lies beside the model or is named."""
    plans = Path(f"{path}.plans")
    if data:
        plans.write_bytes(data)
    else:
        file = read_plan_file(plans)
        write_plan_file(plans, dataclasses.replace(file, versions={**file.versions, "onnxfuse": "0.0.1"}))
    check(open_(path))
    check(open_(path.read_bytes(), plans=plans))
    assert gpu.kernels("shift").calls
    found = warnings(caplog)
    assert len(found) == 2 and all(each.startswith(f"plans are not used: {plans}: {why}") for each in found)


def refused(*_: object) -> NoReturn:
    raise AssertionError("this is not needed where all templates are in a file")


def test_nothing_is_imported_to_compile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session imports neither CuPy nor NVRTC nor hosts of kernels if all templates are in a file."""
    for name in "cupy", "cuda.bindings.nvrtc", "cupy_backends.cuda.libs.nvrtc":
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    nvrtc._nvrtc.cache_clear()
    monkeypatch.setattr(support, "find_host", refused)
    monkeypatch.setattr("onnxfuse.runtime.planner.find_host", refused)
    monkeypatch.setitem(
        BACKENDS,
        CPU,
        dataclasses.replace(BACKENDS[CPU], unavailable=refused, load=refused, machine_code=refused),
    )
    for n in 1, 2, 64:
        check(open_(path), n)


def test_memory_that_is_not_aligned_needs_no_planning_either(
    gpu: Stage, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, CPU, dataclasses.replace(BACKENDS[CPU], load=refused))
    run, memory = open_(path), np.arange(32, dtype=np.float32)
    for start, of_bias in (1, 0), (0, 1), (1, 1), (3, 2):
        x, b = memory[start : start + 8].reshape(2, 4), memory[16 + of_bias : 20 + of_bias]
        np.testing.assert_array_equal(run.run(None, {"x": x, "b": b})[0], x + b)
    assert not gpu.kernels("shift").calls


def cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = dataclasses.replace(BACKENDS[CPU], unavailable=lambda: "CuPy is not here", load=refused)
    monkeypatch.setitem(BACKENDS, CPU, backend)


def test_kernels_of_a_file_run_where_none_can_be_compiled(
    gpu: Stage, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cannot_compile(monkeypatch)
    before = gpu.launches()
    run = open_(path)
    check(run)
    assert gpu.launches() == before + 1
    path.with_name("two.onnx").write_bytes(model(TWO))
    run = open_(path.with_name("two.onnx"), tune="never")
    assert [(each.fusion, each.how) for each in explain_session(run)] == [("shift", "kernel"), ("copy", "body")]
    assert explain_session(run)[1].why == "CuPy is not here"
    assert warnings(caplog) == ["1 fused nodes are not in plan files, and run as their bodies: CuPy is not here"]
    check(run)
    planner.plan_files.clear()
    run = open_(path.read_bytes())
    assert [each.how for each in explain_session(run)] == ["body"]
    check(run)


def test_a_session_that_ignores_measurements_may_have_a_file(gpu: Stage, path: Path) -> None:
    run = open_(path, tune="never")
    check(run)
    assert not gpu.kernels("shift").calls
    assert explain_session(run)[0].why.endswith("plans of m.onnx.plans")


def test_a_file_is_for_other_nodes_too_if_they_are_equal(gpu: Stage, path: Path) -> None:
    """What one session has loaded, all later sessions of the process may use."""
    open_(path)
    run = open_(model(TWO))
    assert [each.why for each in explain_session(run)] == [
        f"{CPU}, device 0; plans of m.onnx.plans",
        f"{CPU}, device 0",
    ]
    check(run)
    assert not gpu.kernels("shift").calls


def test_a_host_without_plans_for_dynamic_sizes_plans_the_sizes_that_it_meets(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other nodes of the session are planned when it is made."""
    own = gpu.kernels("shift").candidates

    def of_numbers(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
        assert float(inputs[0].shape[0] * 1.0) >= 0
        return list(own(node, inputs, device))

    monkeypatch.setattr(gpu.kernels("shift"), "candidates", of_numbers)
    run = open_(model(TWO))
    before = gpu.launches()
    for n in (2, 3):
        check(run, n)
    assert gpu.launches() - before == 6, "three in each run"


START = """
import sys, pytest, google.protobuf.message, onnx
sys.path.insert(0, {folder!r})
import stand_in
stand_in.stage(pytest.MonkeyPatch())
from onnxfuse.ir import without_weights
from onnxfuse.session import InferenceSession, explain_session
reads, own = [], without_weights.read_without_weights
import onnxfuse.runtime.fused_calls as fused_calls, onnxfuse.session as session
fused_calls.read_without_weights = lambda source: reads.append(source) or own(source)
session.read = lambda source: reads.append("the whole")
run = InferenceSession({path!r}, providers=[stand_in.CPU])
run.run(None, stand_in.feed(2, 4))
assert explain_session(run)[0].how == "kernel"
print(len(reads), *sorted(sys.modules))
"""


def test_a_start_with_a_file_reads_the_model_once_and_imports_no_host(path: Path) -> None:
    """Hosts take several times as long to import as all else of a session, and graphs are for the optimizer."""
    script = START.format(folder=str(Path(__file__).parents[1] / "native"), path=str(path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    reads, *modules = done.stdout.split()
    assert reads == "1", "Python reads the model once, without its weights"
    allowed = {"onnxfuse.kernels", "onnxfuse.runtime", "onnxfuse.tuning", "onnxfuse.ir", "onnxfuse.algebra"}
    folders = {each.rpartition(".")[0] for each in modules if each.startswith("onnxfuse.")} - {"onnxfuse"}
    assert folders <= allowed, "kernels are families without their hosts, and nothing that finds fusions is imported"
    unwanted = ("onnxfuse.ir.graph", "onnx_graphsurgeon", "cupy", "cuda.bindings", "rich", "onnxfuse.optimizer")
    assert not [each for each in unwanted if each in modules]
