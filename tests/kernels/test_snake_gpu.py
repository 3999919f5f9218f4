"""The package of examples/package on a GPU: its kernel against float64, and sessions against the bodies of nodes."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from kernel_runs import run, small_gpu
from onnx import TensorProto, helper, numpy_helper
from outside import EXAMPLE, KERNELS, PATTERNS, example_model, install_example, site
from snake_cases import NUMPY, SHAPES, Snake, check, expected

import onnxfuse
from onnxfuse.runtime.loaded_plans import load_plans
from onnxfuse.runtime.plan import Device
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.saved_plans import save_plans

__all__ = ["site"]

CUDA = "CUDAExecutionProvider"
ROOT = Path(__file__).parents[2]
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
needs_session = pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("example")]


@pytest.fixture
def example(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the package; onnxfuse is given no option that names it."""
    install_example(site)
    monkeypatch.setattr(planner, "plan_files", {})


@pytest.fixture(scope="module")
def device() -> Device:
    return small_gpu()


# --- the kernel alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("form", ["product", "quotient"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", NUMPY)
def test_any_size(device: Device, dtype: str, layout: str, form: str, aligned: bool) -> None:
    for shape in (*SHAPES, (5, 96, 2049), (3, 33, 4100)):
        case = Snake(shape, dtype, form, layout)
        arrays = case.arrays()
        (y,) = run("snake", arrays, [dtype], device, aligned, form=form, layout=layout)
        check(case, arrays, y)


@pytest.mark.parametrize("dtype", NUMPY)
def test_angles_of_thousands_of_periods(device: Device, dtype: str) -> None:
    case = Snake((2, 8, 500), dtype)
    arrays = case.arrays(factor=4096.0)
    (y,) = run("snake", arrays, [dtype], device)
    check(case, arrays, y)


@pytest.mark.parametrize("dtype", NUMPY)
def test_extremes(device: Device, dtype: str) -> None:
    """The largest finite numbers stay finite, where alpha * x does; NaN and infinity give NaN, as sin of them is."""
    largest = float(ml_dtypes.finfo(NUMPY[dtype]).max)
    x = np.array([0.0, -0.0, largest, -largest, 1e-8, np.nan, np.inf, -np.inf], NUMPY[dtype]).reshape(1, 1, 8)
    ones = np.ones((1, 1, 1), NUMPY[dtype])
    (y,) = run("snake", {"x": x, "alpha": ones / NUMPY[dtype].type(2), "gain": ones}, [dtype], device)
    found, given = y.astype(np.float64).ravel(), x.astype(np.float64).ravel()
    np.testing.assert_array_equal(np.isnan(found), [False] * 5 + [True] * 3)
    np.testing.assert_allclose(found[:5], given[:5], rtol=2e-5, atol=1e-8)


# --- sessions ------------------------------------------------------------------------------------------------------


def model(case: Snake, arrays: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return an unfused model of a node: it takes and gives float32, and computes in the dtype of the case."""

    def cast(source: str, target: str, dtype: int) -> onnx.NodeProto:
        return helper.make_node("Cast", [source], [target], to=dtype)

    make = helper.make_node
    nodes = [
        cast("given", "x", TYPES[case.dtype]), make("Mul", ["alpha", "x"], ["z"]), make("Sin", ["z"], ["sine"]),
        make("Mul", ["sine", "sine"], ["wave"]),
        make("Mul" if case.form == "product" else "Div", ["wave", "gain"], ["scaled"]),
        make("Add", ["x", "scaled"], ["sum"]), cast("sum", "y", TensorProto.FLOAT),
    ]  # fmt: skip
    weights = [numpy_helper.from_array(arrays[name], name) for name in ("alpha", "gain")]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", case.shape[1], "t"]) for name in ("given", "y")
    )
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def session(source: onnx.ModelProto, **options: Any) -> ort.InferenceSession:
    ort.preload_dlls()
    made = onnxfuse.InferenceSession(source.SerializeToString(), providers=[(CUDA, {"use_tf32": 0})], **options)
    assert {each.how for each in onnxfuse.explain_session(made) if each.fusion == "snake"} == {"kernel"}
    return made


@needs_session
@pytest.mark.parametrize("form", ["product", "quotient"])
@pytest.mark.parametrize("dtype", NUMPY)
def test_a_session_computes_what_the_body_does(dtype: str, form: str) -> None:
    """At sizes that change from run to run; the body is that of the same operand values in float32.

    onnxruntime has no Sin in bfloat16, and in half precision rounds each operator's result.
    """
    case = Snake((2, 24, 40), dtype, form)
    fused, report = onnxfuse.optimize(model(case, case.arrays()), verify=dtype != "bfloat16")
    assert report.counts == {"snake": 1}
    wide = dataclasses.replace(case, dtype="float32")
    widened = {name: value.astype(np.float32) for name, value in case.arrays().items()}
    body, _ = onnxfuse.optimize(model(wide, widened))
    bodies = ort.InferenceSession(body.SerializeToString(), providers=[(CUDA, {"use_tf32": 0})])
    kernels = session(fused)
    for batch, length in (2, 40), (1, 1), (3, 33), (7, 1023), (0, 40), (2, 0), (2, 40):
        shaped = dataclasses.replace(case, shape=(batch, 24, length))
        arrays = {**case.arrays(), "x": shaped.arrays()["x"]}
        given = {"given": arrays["x"].astype(np.float32)}
        (y,), (of_body,) = kernels.run(None, given), bodies.run(None, given)
        assert y.shape == of_body.shape == (batch, 24, length)
        check(shaped, arrays, y.astype(NUMPY[dtype]))
        _, size = expected(shaped, arrays)
        limit = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 5e-3}[dtype]
        assert (np.abs(y - of_body) / size).max(initial=0.0) <= limit


@needs_session
def test_the_model_of_the_example_runs_its_kernels_in_every_layout(tmp_path: Path) -> None:
    """Also from a plan file, without planning."""
    feeds = {"mel": np.random.default_rng(1).standard_normal((2, 20, 33), dtype=np.float32)}
    for layout in "nchw", "nhwc":
        fused, _ = onnxfuse.optimize(example_model(), layout=layout)
        bodies = ort.InferenceSession(fused.SerializeToString(), providers=["CPUExecutionProvider"])
        expected_audio = bodies.run(None, feeds)[0]
        kernels = session(fused, tune="never")
        np.testing.assert_allclose(kernels.run(None, feeds)[0], expected_audio, atol=1e-5)
        save_plans(tmp_path / "plans.zip")
        del kernels
        assert load_plans(tmp_path / "plans.zip") >= 2
        np.testing.assert_allclose(session(fused, tune="never").run(None, feeds)[0], expected_audio, atol=1e-5)


@needs_session
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_the_folders_are_enough_for_the_commands(command: str, tmp_path: Path) -> None:
    """In a process where the package is not installed."""
    onnx.save(example_model(), tmp_path / "vocoder.onnx")
    folders = ["--patterns", PATTERNS, "--kernels", KERNELS]
    program = [sys.executable, "-m", "onnxfuse", command, tmp_path / "vocoder.onnx", "--shape", "mel:1x20x200"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*program, *folders, "--provider", "cuda"], env={**environment, "COLUMNS": "200"},
        cwd=EXAMPLE, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^snake .*\d", done.stdout, re.MULTILINE), done.stdout
