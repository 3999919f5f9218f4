"""Plans with convolutions by cuDNN, on a stand-in that refuses what cuDNN refuses and computes the rest on the host."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from convolution_cases import convolution, reference, shapes
from stand_in import CPU, HERE, Stage, built, compiled, fails, model, node, session, stage

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.runtime import run_plan
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.native_library import NativeError
from onnxfuse.runtime.plan import Convolution, ConvolutionActivation, Plan, Pointer, TensorSpec
from onnxfuse.runtime.plan_bytes import convolution_bytes

Array = np.ndarray[Any, Any]

WORKSPACE = 1 << 14


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return stage(monkeypatch)


def replaced(what: Any, **changes: Any) -> Any:
    return dataclasses.replace(what, **changes)


def operands(step: Convolution, dtype: Any = np.float32) -> dict[str, Array]:
    """Return small integers, whose sums are exact in every dtype."""
    random = np.random.default_rng(step.n * 1000 + step.c)
    found = {name: random.integers(-2, 3, shape).astype(dtype) for name, shape in shapes(step).items()}
    return {name: found[name] for name in ("x", "w", "bias", "residual")}


def run(step: Convolution, given: dict[str, Array], stream: int = 0, times: int = 1) -> Array:
    """Return y of a plan with this step alone, whose first scratch buffer is the step's workspace."""
    dtype = given["x"].dtype
    y = np.full(shapes(step)["y"], np.nan, dtype)
    scratch = (step.workspace_bytes,) if step.workspace else ()
    plan = Plan((TensorSpec(y.shape, step.dtype),), (step,), scratch)
    specs = [TensorSpec(each.shape, step.dtype, False) for each in given.values()]
    ready = ready_plan(plan, specs, provider=CPU)
    storage = np.zeros(ready.scratch_bytes + 256, np.uint8)
    address = storage.ctypes.data + -storage.ctypes.data % 256 if ready.scratch_bytes else 0
    ready.run([each.ctypes.data for each in given.values()], [y.ctypes.data], address, stream, times)
    return y


# --- results ---------------------------------------------------------------------------------------------------------

SHAPES = {
    "2-D": convolution(2, 3, 5, (7, 6), (3, 2)),
    "1-D": convolution(2, 4, 3, (9,), (3,)),
    "3-D": convolution(1, 2, 3, (4, 5, 6), (2, 2, 3)),
    "pointwise": convolution(2, 5, 4, (3, 3), (1, 1), strides=(1, 1), pads_begin=(0, 0), pads_end=(0, 0)),
    "groups": convolution(2, 6, 4, (6, 5), (3, 2), group=2),
    "depthwise": convolution(1, 4, 8, (6, 5), (3, 2), group=4),
    "transposed": convolution(2, 4, 3, (8, 7), (3, 2), transposed=True),
    "transposed 1-D": convolution(1, 3, 2, (9,), (3,), transposed=True),
    "transposed groups": convolution(1, 4, 6, (8, 7), (3, 2), group=2, transposed=True),
}
BIAS, RESIDUAL = Pointer("input", 2), Pointer("input", 3)


@pytest.mark.parametrize("w_channels_last", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_convolution_of_every_shape_and_layout(
    gpu: Stage, shape: str, channels_last: bool, w_channels_last: bool
) -> None:
    step = replaced(SHAPES[shape], channels_last=channels_last, w_channels_last=w_channels_last)
    for more in ({}, {"bias": BIAS, "residual": RESIDUAL, "activation": "relu"}):
        each = replaced(step, **more)
        given = operands(each)
        np.testing.assert_array_equal(run(each, given), reference(each, given))
    first = "backward_data" if step.transposed else "forward"
    assert gpu.last_convolution() == f"{first}, add 5, add 4, pointwise 100"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_dtypes(gpu: Stage, dtype: Any) -> None:
    step = replaced(SHAPES["2-D"], dtype=np.dtype(dtype).name, bias=BIAS)
    given = operands(step, dtype)
    np.testing.assert_array_equal(run(step, given), reference(step, given).astype(dtype))


EPILOGUES = [
    ({}, "forward"),
    ({"bias": BIAS}, "forward, add 4"),
    ({"residual": RESIDUAL}, "forward, add 5"),
    ({"activation": "relu"}, "forward, pointwise 100"),
    ({"bias": BIAS, "residual": RESIDUAL, "activation": "silu"}, "forward, add 5, add 4, pointwise 106"),
    (
        {"bias": BIAS, "residual": RESIDUAL, "activation": "relu", "residual_first": False},
        "forward, add 4, pointwise 100, add 5",
    ),
    ({"residual": RESIDUAL, "activation": "tanh", "residual_first": False}, "forward, pointwise 101, add 5"),
]


@pytest.mark.parametrize("more, operations", EPILOGUES)
def test_epilogues(gpu: Stage, more: dict[str, Any], operations: str) -> None:
    step = replaced(SHAPES["2-D"], **more)
    given = operands(step)
    np.testing.assert_allclose(run(step, given), reference(step, given), rtol=1e-6, atol=1e-6)
    assert gpu.last_convolution() == operations


NUMBERS = {"clip": [(-1.0, 2.0), (-np.inf, np.inf), (0.0, np.inf)], "leaky_relu": [(0.1, 0.0)], "elu": [(0.5, 0.0)]}


@pytest.mark.parametrize("activation", get_args(ConvolutionActivation))
def test_activations(gpu: Stage, activation: Any) -> None:
    for alpha, beta in NUMBERS.get(activation, [(0.0, 0.0)]):
        step = replaced(SHAPES["2-D"], bias=BIAS, activation=activation, alpha=alpha, beta=beta)
        given = operands(step)
        np.testing.assert_allclose(run(step, given), reference(step, given), rtol=1e-5, atol=1e-6)


def test_activations_are_those_of_patterns() -> None:
    assert set(get_args(ConvolutionActivation)) <= set(ACTIVATIONS)


# --- engines ---------------------------------------------------------------------------------------------------------


def engines(step: Convolution, max_count: int = 9) -> list[tuple[int, int, bool]]:
    """Return engine, workspace and whether it compiles of the stand-in's proposals; each has one knob, number 2."""
    found = run_plan.convolution_engines(step, 0, max_count)
    assert all(each.words[1] == 2 and len(each.words) == 3 for each in found)
    return [(each.words[0], each.workspace_bytes, each.compiles) for each in found]


def test_engines_come_in_cudnns_order_and_once(gpu: Stage) -> None:
    """The stand-in's modes B, A and fallback have 41, 42 | 40, 41 | 43, 44; 42 is not deterministic, 43 has no plan."""
    step = replaced(SHAPES["2-D"], dtype="float16", workspace_bytes=WORKSPACE)
    assert engines(step) == [(41, 1024, False), (40, 0, False), (44, 0, True)]
    assert engines(step, 2) == [(41, 1024, False), (40, 0, False)]
    assert engines(replaced(step, workspace_bytes=1023)) == [(40, 0, False), (44, 0, True)]


def test_exact_float32_has_no_tensor_cores(gpu: Stage) -> None:
    step = replaced(SHAPES["2-D"], workspace_bytes=WORKSPACE)
    assert engines(step) == [(41, 1024, False), (44, 0, True)]
    assert engines(replaced(step, tf32=True)) == [(41, 1024, False), (40, 0, False), (44, 0, True)]
    with pytest.raises(NativeError, match="engine 40 of cuDNN for a convolution of float32 2x3x7x6 and 5x3x3x2 rounds"):
        run(replaced(step, workspace_bytes=0, engine=(40, 2, 1)), operands(step))


def test_asking_for_engines_compiles_nothing(gpu: Stage) -> None:
    step = replaced(SHAPES["2-D"], dtype="float16", workspace_bytes=WORKSPACE)
    before = gpu.cudnn.fake_plans()
    engines(step)
    assert gpu.cudnn.fake_plans() - before == 3, "of 41, 40 and 43, which has none; not of 44"


def test_every_engine_runs(gpu: Stage) -> None:
    step = replaced(SHAPES["2-D"], dtype="float16", workspace_bytes=WORKSPACE, bias=BIAS)
    given = operands(step, np.float16)
    for engine in run_plan.convolution_engines(step, 0, 9):
        workspace = Pointer("scratch", 0) if engine.workspace_bytes else None
        each = replaced(step, engine=engine.words, workspace=workspace, workspace_bytes=engine.workspace_bytes)
        np.testing.assert_array_equal(run(each, given), reference(each, given).astype(np.float16))


def test_a_convolution_that_cudnn_cannot_do_is_an_error_with_its_sizes(gpu: Stage) -> None:
    step = SHAPES["2-D"]
    gpu.cudnn.fake_unsupported(1)
    try:
        assert engines(step) == []
        with pytest.raises(NativeError, match=r"cuDNN does not support a convolution of float32 2x3x7x6 and 5x3x3x2$"):
            run(step, operands(step))
    finally:
        gpu.cudnn.fake_unsupported(0)
    with pytest.raises(NativeError, match=r"engine 43 of cuDNN for .*: cudnnBackendFinalize failed: .*COMPILATION_FAILE"
                       r"D \(the stand-in's engine 43 has no plan\)"):  # fmt: skip
        run(replaced(step, engine=(43, 2, 4)), operands(step))


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_uses_its_stream_and_keeps_descriptors_for_the_same_addresses(gpu: Stage) -> None:
    step = replaced(SHAPES["2-D"], engine=(44, 2, 5))
    given = operands(step)
    packs, runs = gpu.cudnn.fake_packs(), gpu.cudnn.fake_runs()
    run(step, given, stream=77, times=5)
    assert (gpu.cudnn.fake_packs() - packs, gpu.cudnn.fake_runs() - runs) == (1, 5)
    assert gpu.cudnn.fake_last_stream() == 77


def test_descriptors_are_freed_with_their_plan(gpu: Stage) -> None:
    step = replaced(SHAPES["2-D"], workspace_bytes=WORKSPACE, bias=BIAS, residual=RESIDUAL, activation="gelu")
    run_plan.convolution_engines(step, 0, 9)
    before = gpu.cudnn.fake_descriptors()
    for engine in run_plan.convolution_engines(step, 0, 9):
        size = engine.workspace_bytes
        pointer = Pointer("scratch", 0) if size else None
        run(replaced(step, engine=engine.words, workspace=pointer, workspace_bytes=size), operands(step))
    with pytest.raises(NativeError):
        run(replaced(step, engine=(43, 2, 4), workspace_bytes=0), operands(step))
    assert gpu.cudnn.fake_descriptors() == before


def test_eight_threads_share_a_plan_and_no_handle(gpu: Stage) -> None:
    """The stand-in refuses calls with a handle that another thread uses."""
    step = replaced(SHAPES["2-D"], engine=(44, 2, 5), bias=BIAS)
    given = operands(step)
    spec = TensorSpec(shapes(step)["y"], "float32")
    plans = [Plan((spec,), (step,)), Plan((spec,), (replaced(step, activation="relu"),))]
    specs = [TensorSpec(each.shape, "float32", False) for each in given.values()]
    ready = [ready_plan(plan, specs, provider=CPU) for plan in plans]
    exact = reference(step, given)
    failures = []

    def work(seed: int) -> None:
        bias = np.full(step.m, seed, np.float32)
        inputs = [each.ctypes.data for each in ({**given, "bias": bias}).values()]
        for i in range(30):
            y = np.zeros(spec.shape, np.float32)
            ready[(seed + i) % 2].run(inputs, [y.ctypes.data])
            expected = exact - given["bias"] + bias
            if not np.array_equal(y, np.maximum(expected, 0) if (seed + i) % 2 else expected):
                failures.append(f"thread {seed}, run {i}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not failures
    assert gpu.cudnn.fake_handles() <= 9, "as many as threads at one time"


def test_a_run_that_fails_says_so_and_the_next_one_works(gpu: Stage) -> None:
    step = replaced(SHAPES["2-D"], engine=(44, 2, 5))
    given = operands(step)
    gpu.cudnn.fake_fail_next_run()
    with pytest.raises(NativeError, match=r"cudnnBackendExecute of a convolution of float32 2x3x7x6 and 5x3x3x2 "
                       r"failed: CUDNN_STATUS_EXECUTION_FAILED \(the stand-in was told so\)"):  # fmt: skip
        run(step, given)
    np.testing.assert_array_equal(run(step, given), reference(step, given))


CONVOLVE = "g (float[n, 2, h, l] x, float[3, 2, 2, 2] w, float[3] b) => (float[n, 3, p, q] y) { " + node(
    "convolve", "x, w, b", "y", operands="x w bias"
) + " }"  # fmt: skip


def test_a_session_runs_a_convolution(gpu: Stage) -> None:
    made = session(model(CONVOLVE))
    random = np.random.default_rng(0)
    before = gpu.cudnn.fake_runs()
    for n, size in ((1, 4), (2, 5), (1, 4)):
        shape = {"x": (n, 2, size, size), "w": (3, 2, 2, 2), "b": (3,)}
        given = {name: random.integers(-2, 3, each).astype(np.float32) for name, each in shape.items()}
        step = convolution(n, 2, 3, (size, size), (2, 2), strides=(1, 1), dilations=(1, 1), pads_begin=(0, 0),
                           pads_end=(0, 0), bias=BIAS, channels_last=False, w_channels_last=False)  # fmt: skip
        exact = reference(step, {"x": given["x"], "w": given["w"], "bias": given["b"]})
        np.testing.assert_array_equal(made.run(None, given)[0], exact)
    assert gpu.cudnn.fake_runs() - before == 3


def test_a_missing_cudnn_is_an_error_that_says_so(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise NativeError("convolutions by cuDNN need cuDNN 9")

    monkeypatch.setattr(run_plan, "cudnn", missing)
    given = {
        "x": np.ones((1, 2, 4, 4), np.float32),
        "w": np.ones((3, 2, 2, 2), np.float32),
        "b": np.ones(3, np.float32),
    }
    message = fails(session(model(CONVOLVE)), given)
    assert "convolve 'node_0'" in message and "NativeError: convolutions by cuDNN need cuDNN 9" in message


ALONE = """
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime import run_plan
native.library_path = lambda: {library!r}
try:
    run_plan.cudnn()
except native.NativeError as error:
    print(error)
"""


def alone(gpu: Stage, libcudnn: str) -> str:
    """Return the message of a process that opens this cuDNN."""
    environment = {**os.environ, "ONNXFUSE_LIBCUDNN": libcudnn}
    script = ALONE.format(library=gpu.library._name)
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True).stdout


def test_a_cudnn_that_is_missing_or_of_another_major_version_is_named(gpu: Stage) -> None:
    for version in (8907, 100000):
        other = built(f"cudnn_{version}", lambda at, v=version: compiled(HERE / "fake_cudnn.cc", at, f"-DVERSION={v}"))
        assert f"cuDNN 9 is required, found version {version} ({other})" in alone(gpu, str(other))
    message = alone(gpu, "/none/libcudnn.so")
    assert "or name it in ONNXFUSE_LIBCUDNN: cannot open cuDNN:" in message


# --- malformed -------------------------------------------------------------------------------------------------------

MALFORMED = {
    "a convolution is of int32, required float32, float16 or bfloat16": {"dtype": "int32"},
    "a convolution's batch is 0, required 1 to": {"n": 0},
    "a convolution's size of axis 1 is 3, required 6": {"y_sizes": (3, 3)},
    "a convolution's stride is 0, required 1 to": {"strides": (0, 1)},
    "a convolution of 2 spatial axes has 1 of a convolution's stride": {"strides": (1,)},
    "a convolution's padding is -1, required 0 to": {"pads_begin": (-1, 0)},
    "a convolution of 3 and 5 channels cannot have 2 groups": {"group": 2},
    "the convolution's x ends beyond its tensor's 1008 bytes": {"x": Pointer("input", 0, 4)},
    "the convolution's w starts at byte 2, required a multiple of 4": {"w": Pointer("input", 1, 2)},
    "the convolution's y is an input": {"y": Pointer("input", 0), "m": 1, "c": 1, "n": 1},
    "the convolution's y ends beyond its tensor's": {"y": Pointer("output", 0, 4)},
    "the convolution's x is said to be aligned, but its tensor is not": {"aligned": True},
    "the bias ends beyond its tensor's 20 bytes": {"bias": Pointer("input", 2, 4)},
    "the residual ends beyond its tensor's": {"residual": Pointer("input", 3, 4)},
    "a pointer's index is 7, required 0 to 3": {"residual": Pointer("input", 7)},
    "a workspace must be scratch memory from a multiple of 256 bytes on": {"workspace": Pointer("input", 0)},
    "a workspace has a size, but no pointer": {"workspace_bytes": 1},
    "a knob of an engine has no value": {"engine": (41, 2)},
    "an engine's index or a knob's type is -1, required 0 to": {"engine": (-1,)},
    "the number of an engine's words is 131, required 0 to 129": {"engine": (41, *(2, 2) * 65)},
    "engine 99 of cuDNN for a convolution of float32 2x3x7x6 and 5x3x3x2: cudnnBackendFinalize failed: "
    "CUDNN_STATUS_NOT_SUPPORTED (no such engine)": {"engine": (99,)},
    "(a knob that the engine does not have)": {"engine": (41, 2, 9), "workspace": Pointer("scratch", 0)},
    "needs 1024 bytes of workspace, the plan has 0": {"engine": (41, 2, 2)},
}  # fmt: skip


@pytest.mark.parametrize("message", MALFORMED)
def test_a_malformed_convolution_is_refused(gpu: Stage, message: str) -> None:
    good = SHAPES["2-D"]
    step = replaced(good, **MALFORMED[message])
    specs = [TensorSpec(each.shape, "float32", False) for each in operands(good).values()]
    before = gpu.cudnn.fake_runs()
    with pytest.raises(NativeError) as caught:
        ready_plan(Plan((TensorSpec(shapes(good)["y"], "float32"),), (step,), (0,)), specs, provider=CPU)
    assert message in str(caught.value)
    assert gpu.cudnn.fake_runs() == before


def test_every_word_of_a_convolution_is_required(gpu: Stage) -> None:
    """A request that ends early, or has an odd size, is refused without a crash."""
    data = convolution_bytes(replaced(SHAPES["2-D"], bias=BIAS, residual=RESIDUAL, engine=(41, 2, 2)))
    library = run_plan.cudnn()
    for size in range(0, len(data), 8):
        message = library.onnxfuse_engines(0, data[:size], size, 1, 132, None, None)
        assert message is not None and b"the plan is malformed: it ends before" in message
