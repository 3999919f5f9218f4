"""Sessions that run by plan files: the native library finds them, checks them, and never asks Python."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

import stand_in
from stand_in import CPU, SHIFT, Stage, feed, model, node
from stored_plans import gpu, native_options, native_session, plans, refusal, shifts, store

from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.plan import Plan
from onnxfuse.session import InferenceSession

PAIR = "g (float[n] x, float[n] r) => (float[n] d, float[n] t) {{ {} {} }}".format(
    node("pair", "x, r", "s, d", operands="x r", types="1, 1"),
    node("scale", "s", "t", operands="x", more=', factor = 0.1, sizes = [3, 4], mode = "fast", half = [0.5, 2.0]'),
)


__all__ = ["gpu", "plans"]

# --- running ----------------------------------------------------------------------------------------------------------


def test_all_shapes_run_and_python_is_never_asked(gpu: Stage, plans: Path) -> None:
    run = native_session(model(SHIFT), plans)
    before = gpu.launches()
    for n, d in [(2, 3), (5, 3), (2, 3), (1, 8), (1000, 1)]:
        shifts(run, n, d)
    assert gpu.launches() == before + 5
    assert not gpu.kernels("shift").calls


def test_nodes_are_known_by_all_kinds_of_attributes(gpu: Stage, tmp_path: Path) -> None:
    run = native_session(model(PAIR), store(tmp_path / "plans", model(PAIR)))
    x, r = np.float32([1, 2, 3]), np.float32([4, 5, 7])
    before = gpu.launches()
    difference, scaled = run.run(None, {"x": x, "r": r})
    np.testing.assert_array_equal(difference, x - r)
    np.testing.assert_array_equal(scaled, (x + r) * np.float32(0.1))
    assert gpu.launches() == before + 2


def test_any_number_of_dims_may_be_dynamic(gpu: Stage, tmp_path: Path) -> None:
    dims = [", ".join(f"{name}{i}" for i in range(40)) for name in "xr"]
    graph = f"g (float[{dims[0]}] x, float[{dims[1]}] r) => (float[{dims[0]}] s, float[{dims[0]}] d) {{ "
    source = model(graph + node("pair", "x, r", "s, d", operands="x r", types="1, 1") + " }")
    x = np.arange(6, dtype=np.float32).reshape(*[1] * 38, 2, 3)
    for run in native_session(source, store(tmp_path / "plans", source)), stand_in.session(source):
        before = gpu.launches()
        np.testing.assert_array_equal(run.run(None, {"x": x, "r": x})[0], x + x)
        assert gpu.launches() == before + 1


PRODUCT = "g (float[m, k] x, float[k, n] w, float[n] b) => (float[m, n] y) { " + node(
    "product", "x, w, b", "y", operands="x w bias"
) + " }"  # fmt: skip
CONVOLVE = "g (float[1, 2, 3, 3] x, float[3, 2, 2, 2] w, float[3] b) => (float[1, 3, 2, 2] y) { " + node(
    "convolve", "x, w, b", "y", operands="x w bias"
) + " }"  # fmt: skip


def test_products_and_convolutions_call_libraries(gpu: Stage, tmp_path: Path) -> None:
    plans = store(tmp_path / "plans", model(PRODUCT), model(CONVOLVE))
    product, convolve = native_session(model(PRODUCT), plans), native_session(model(CONVOLVE), plans)
    before = gpu.products(), gpu.cudnn.fake_runs()
    ones = {"x": np.ones((2, 3), np.float32), "w": np.ones((3, 4), np.float32), "b": np.ones(4, np.float32)}
    np.testing.assert_array_equal(product.run(None, ones)[0], np.full((2, 4), 4, np.float32))
    image = {"x": np.ones((1, 2, 3, 3)), "w": np.ones((3, 2, 2, 2)), "b": np.ones(3)}
    result = convolve.run(None, {name: value.astype(np.float32) for name, value in image.items()})[0]
    np.testing.assert_array_equal(result, np.full((1, 3, 2, 2), 9, np.float32))
    assert (gpu.products(), gpu.cudnn.fake_runs()) == (before[0] + 1, before[1] + 1)


def test_several_models_files_and_sessions_in_one_process(gpu: Stage, plans: Path, tmp_path: Path) -> None:
    pair = store(tmp_path / "pair.plans", model(PAIR))
    both = f"{plans}:{pair}"
    runs = [native_session(model(SHIFT), Path(both)), native_session(model(PAIR), Path(both))]
    options = native_options(Path(both))
    runs += [ort.InferenceSession(model(graph), options, [CPU]) for graph in (SHIFT, PAIR)]
    x = np.float32([1, 2])
    for run in runs[::2]:
        shifts(run, 4)
    for run in runs[1::2]:
        np.testing.assert_array_equal(run.run(None, {"x": x, "r": x})[0], x - x)


def test_kernels_are_loaded_with_the_session_shared_and_unloaded(gpu: Stage, plans: Path) -> None:
    two = "g (float[n, d] x, float[d] b) => (float[n, d] y) {{ {} {} }}".format(
        *(node("shift", f"{x}, b", y, operands="x bias") for x, y in (("x", "z"), ("z", "y")))
    )
    before = gpu.cuda.fake_modules()
    runs = [native_session(model(two), plans), native_session(model(SHIFT), plans)]
    assert gpu.cuda.fake_modules() == before + 1, "of four nodes on one GPU"
    library = native.load(native.library_path())  # the one that sessions register, whatever Python loaded before
    made = library.onnxfuse_plans_made()
    shifts(runs[1], 4)
    shifts(runs[1], 4)
    assert gpu.cuda.fake_modules() == before + 1
    assert library.onnxfuse_plans_made() == made + 1
    gpu.cuda.fake_other_captures(1)  # the driver refuses to unload in threads that are not in relaxed mode
    del runs
    gc.collect()
    gpu.cuda.fake_other_captures(0)
    assert gpu.cuda.fake_modules() == before


def test_eight_threads_share_a_session(gpu: Stage, plans: Path) -> None:
    run = native_session(model(SHIFT), plans)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: [shifts(run, (seed * i) % 23 + 1) for i in range(50)], range(8)))


def constant_bias(source: bytes) -> bytes:
    """Return SHIFT with a bias that the model holds."""
    proto = onnx.load_model_from_string(source)
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(feed(4, 3)["b"], "b"))
    return bytes(proto.SerializeToString())


def test_a_plan_for_constants_starts_no_kernel_early_where_there_are_none(
    gpu: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that starts early reads its constant operands while the kernel before it still runs."""
    host = gpu.kernels("shift")
    good = host.candidates

    def early(*arguments: Any) -> list[Plan]:
        return [replace(plan, steps=tuple(replace(s, pdl=True) for s in plan.steps)) for plan in good(*arguments)]

    monkeypatch.setattr(host, "candidates", early)
    constant = constant_bias(model(SHIFT))
    for_constants = store(tmp_path / "constants.plans", constant)
    native_session(constant, for_constants).run(None, {"x": feed(4, 3)["x"]})
    assert gpu.cuda.fake_last_pdl() == 1
    shifts(native_session(model(SHIFT), for_constants), 4)
    assert gpu.cuda.fake_last_pdl() == 0
    for_any = store(tmp_path / "any.plans", model(SHIFT))
    x, b = feed(4, 3).values()
    np.testing.assert_array_equal(native_session(constant, for_any).run(None, {"x": x})[0], x + b)
    assert gpu.cuda.fake_last_pdl() == 1, "constants are more than this plan relies on"


def test_unaligned_memory_needs_plans_of_its_own(gpu: Stage, plans: Path) -> None:
    memory = np.zeros(4 * 3 + 1, np.float32)
    offset = 1 if memory.ctypes.data % 16 == 0 else 0
    x = memory[offset : offset + 12].reshape(4, 3)
    assert x.ctypes.data % 16
    binding = (run := native_session(model(SHIFT), plans)).io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_cpu_input("b", np.ones(3, np.float32))
    binding.bind_output("y")
    message = refusal(lambda: run.run_with_iobinding(binding))
    assert "shift 'node_0' (float32[4,3], float32[3]): plan files have no plan for these inputs" in message


def test_a_python_session_may_take_plans_first(gpu: Stage, plans: Path, tmp_path: Path) -> None:
    """Python is asked for what the files do not have, and for nothing else."""

    def run(path: Path) -> int:
        options = ort.SessionOptions()
        options.add_session_config_entry("onnxfuse.plans", str(path))
        made = InferenceSession(model(SHIFT), options, [CPU], tune="never")
        shifts(made, 4)
        return len(stand_in.planner.templates_in_use())

    relying = store(tmp_path / "constant.plans", constant_bias(model(SHIFT)))
    assert (run(plans), run(relying)) == (0, 1)


# --- where files are found --------------------------------------------------------------------------------------------

ALONE = """
import sys
import numpy as np
import onnxruntime as ort

library, source = sys.argv[1:3]
options = ort.SessionOptions()
for name, value in (entry.split("=") for entry in sys.argv[3:]):
    options.add_session_config_entry(name, value)
try:
    options.register_custom_ops_library(library)
    run = ort.InferenceSession(source, options, ["CPUExecutionProvider"])
    x, b = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([10, 20, 30])
    print("result", (run.run(None, {"x": x, "b": b})[0] - x - b).max())
except Exception as error:
    print("error", error)
assert "onnxfuse" not in sys.modules
import ctypes, os
if os.path.exists(os.environ["ONNXFUSE_LIBCUDA"]):
    print("launches", ctypes.CDLL(os.environ["ONNXFUSE_LIBCUDA"]).fake_launches())
"""


@pytest.fixture
def alone(gpu: Stage, plans: Path, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs SHIFT in a process which does not import onnxfuse, with a copy of the library."""
    folder = tmp_path / "served"
    folder.mkdir()
    library = shutil.copy(native.library_path() or "", folder / "libonnxfuse.so")
    source = folder / "model.onnx"
    source.write_bytes(model(SHIFT))

    def run(*entries: str, **variables: str) -> str:
        environment = {**os.environ, "ONNXFUSE_PROVIDER": CPU, **variables}
        command = [sys.executable, "-c", ALONE, str(library), str(source), *entries]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    return run


RAN = "result 0.0\nlaunches 1\n"


@pytest.mark.parametrize("place", ["entry", "variable", "library.plans", "folder"])
def test_files_are_found(alone: Callable[..., str], plans: Path, tmp_path: Path, place: str) -> None:
    if place == "entry":
        assert alone(f"onnxfuse.plans={plans}", ONNXFUSE_PLANS="/nothing") == RAN
    elif place == "variable":
        assert alone(ONNXFUSE_PLANS=f"{plans}:") == RAN
    else:
        name = "libonnxfuse.so.plans" if place == "library.plans" else "any.plans"
        shutil.copy(plans, tmp_path / "served" / name)
        if place == "library.plans":
            (tmp_path / "served" / "other.plans").write_text("no plan file")
        assert alone() == RAN


def test_a_process_without_plans_or_driver_refuses_or_runs_bodies(alone: Callable[..., str], plans: Path) -> None:
    message = alone()
    assert "error" in message and "no plan file: name one in the session config entry onnxfuse.plans" in message
    assert "served/libonnxfuse.so.plans" in message
    bodies = alone(ONNXFUSE_MISSING="body")
    assert bodies.startswith("result 0.0\nlaunches 0\nonnxfuse: all fused nodes run as their bodies: no plan file")
    message = alone(f"onnxfuse.plans={plans}", ONNXFUSE_LIBCUDA="/no/libcuda.so")
    assert "error" in message and "cannot open the CUDA driver: /no/libcuda.so" in message
    message = alone(f"onnxfuse.plans={plans}", "onnxfuse.missing=body", ONNXFUSE_LIBCUDA="/no/libcuda.so")
    assert message.startswith("result 0.0\nonnxfuse: all fused nodes run as their bodies: cannot open the CUDA driver")


# --- profilers --------------------------------------------------------------------------------------------------------

RUN = """
import numpy as np, onnxruntime as ort
options = ort.SessionOptions()
for name, value in {entries!r}.items():
    options.add_session_config_entry(name, value)
options.register_custom_ops_library({library!r})
session = ort.InferenceSession({model!r}, options, ["CPUExecutionProvider"])
session.run(None, {{"x": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}})
"""


@pytest.mark.parametrize("profiler", ["", "/profiler.so"])
@pytest.mark.parametrize("library", ["fake_nvtx", "absent.so"])
def test_a_profiler_sees_the_range_of_a_node(
    gpu: Stage, plans: Path, tmp_path: Path, profiler: str, library: str
) -> None:
    named, path, nvtx = onnx.load_from_string(model(SHIFT)), tmp_path / "model.onnx", library
    named.graph.node[0].name = "block/shift"
    onnx.save(named, path)
    if library == "fake_nvtx":
        nvtx = str(stand_in.built(library, lambda to: stand_in.compiled(stand_in.HERE / f"{library}.cc", to)))
    entries = {"onnxfuse.provider": CPU, "onnxfuse.plans": str(plans)}
    script = RUN.format(entries=entries, library=gpu.library._name, model=str(path))
    environment = {**os.environ, "NVTX_INJECTION64_PATH": profiler, "ONNXFUSE_LIBNVTX": nvtx}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    ranges = [line for line in ended.stderr.splitlines() if line.startswith(("begin", "end"))]
    is_named = bool(profiler) and library == "fake_nvtx"
    assert ranges == (["begin shift block/shift", "end"] if is_named else [])
    assert ("NVTX cannot be opened: absent.so" in ended.stderr) == (bool(profiler) and library == "absent.so")
