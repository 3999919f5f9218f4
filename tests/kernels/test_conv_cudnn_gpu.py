"""Convolutions by cuDNN's engines on a GPU, against sums in float64."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_runs import DTYPES, NUMPY, RELATIVE, compile_native, cupy, launch, normal, result, upload

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from convolution_cases import convolution, reference, shapes, sums

from onnxfuse.kernels.conv import cudnn
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.runtime import cuda_driver, run_plan
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.native_library import NativeError
from onnxfuse.runtime.plan import Convolution, Device, Plan, Pointer, TensorSpec

pytestmark = pytest.mark.gpu

Array = np.ndarray[Any, Any]

SUMS = 2.0**-20  # error of float32 sums in any order, relative to the sum of the terms' magnitudes
SUMS_TF32 = 2.0**-10
# In float32 sums of 16-bit products, tensor cores drop bits that are low relative to the largest of a few products.
SUMS_OF = {"float32": SUMS, "float16": 2.0**-18, "bfloat16": 2.0**-18}
BIAS, RESIDUAL = Pointer("input", 2), Pointer("input", 3)


@pytest.fixture(scope="module")
def device() -> Device:
    compile_native()
    return cuda_driver.gpu(0)


def replaced(what: Any, **changes: Any) -> Any:
    return dataclasses.replace(what, **changes)


def operands(step: Convolution, seed: int = 1) -> dict[str, Array]:
    of = shapes(step)
    terms = math.prod(step.kernel) * step.c // step.group
    scales = {"w": 1 / math.sqrt(terms)}
    names = ("x", "w", "bias", "residual")
    return {name: normal(of[name], step.dtype, seed + i, scales.get(name, 1.0)) for i, name in enumerate(names)}


def run(step: Convolution, given: Mapping[str, Array], scratch: tuple[int, ...] = ()) -> Array:
    """Return y, after a check that the memory around it is untouched."""
    spec = TensorSpec(shapes(step)["y"], step.dtype, step.aligned)
    read = [upload(value, step.aligned) for value in given.values()]
    written = upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), step.aligned)
    scratch = scratch or ((step.workspace_bytes,) if step.workspace else ())
    launch(Plan((spec,), (step,), scratch), read, [written])
    return result(written, spec, step.aligned)


def check(step: Convolution, given: Mapping[str, Array], found: Array) -> None:
    expected = reference(step, given)
    magnitude = sums(step, np.abs(given["x"].astype(np.float32)), np.abs(given["w"].astype(np.float32))) + 2
    error = SUMS_TF32 if step.tf32 else SUMS_OF[step.dtype]
    allowed = RELATIVE[step.dtype] * np.abs(expected) + error * magnitude
    worst = np.abs(found.astype(np.float64) - expected) / allowed
    assert worst.max() <= 1, f"{worst.max()} times the tolerance; {(worst > 1).sum()} of {worst.size} wrong; {step}"


def with_engines(step: Convolution, max_count: int) -> list[Convolution]:
    """Return the step by each of cuDNN's engines that this test may compile."""
    step = replaced(step, workspace_bytes=64 << 20)
    found = []
    for engine in run_plan.convolution_engines(step, 0, max_count):
        size = engine.workspace_bytes
        pointer = Pointer("scratch", 0) if size else None
        found.append(replaced(step, engine=engine.words, workspace=pointer, workspace_bytes=size))
    return found


PLAIN = {"strides": (1, 1), "dilations": (1, 1), "pads_begin": (1, 1), "pads_end": (1, 1)}
SHAPES = {
    "3x3": convolution(2, 64, 64, (28, 28), (3, 3), **PLAIN),
    "3x3 of 7x7": convolution(3, 64, 128, (7, 7), (3, 3), **PLAIN),
    "pointwise": convolution(2, 128, 64, (14, 14), (1, 1), **{**PLAIN, "pads_begin": (0, 0), "pads_end": (0, 0)}),
    "asymmetric, strides 2 and 1, dilations 1 and 2": convolution(2, 32, 48, (15, 20), (3, 3)),
    "stem": convolution(2, 3, 64, (56, 56), (7, 7), **{**PLAIN, "strides": (2, 2), "pads_begin": (3, 3),
                        "pads_end": (3, 3)}),
    "groups": convolution(2, 64, 64, (14, 14), (3, 3), group=4, **PLAIN),
    "depthwise": convolution(2, 96, 96, (14, 14), (3, 3), group=96, **PLAIN),
    "odd channels": convolution(1, 7, 13, (9, 10), (3, 3), **PLAIN),
    "1-D": convolution(2, 64, 64, (100,), (5,)),
    "3-D": convolution(1, 32, 32, (6, 10, 12), (3, 3, 3), strides=(1, 1, 1), dilations=(1, 1, 1),
                       pads_begin=(1, 1, 1), pads_end=(1, 1, 1)),
    "transposed": convolution(2, 64, 32, (28, 28), (2, 2), transposed=True, strides=(2, 2), dilations=(1, 1),
                              pads_begin=(0, 0), pads_end=(0, 0)),
    "transposed, padded": convolution(2, 32, 64, (27, 28), (4, 4), transposed=True, strides=(2, 2), dilations=(1, 1),
                                      pads_begin=(1, 1), pads_end=(1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(device: Device, shape: str, dtype: str) -> None:
    """The first engines for the convolution alone and with a bias, a residual and ReLU."""
    for more in ({}, {"bias": BIAS, "residual": RESIDUAL, "activation": "relu"}):
        for tf32 in (True, False) if dtype == "float32" else (False,):
            step = replaced(SHAPES[shape], dtype=dtype, aligned=True, tf32=tf32, **more)
            given = operands(step)
            found = with_engines(step, 2)
            if shape.startswith("transposed") and more:
                found = found[:1]  # it is compiled
            assert found or dtype == "float32" or shape.startswith("transposed"), "cuDNN has no engine"
            for each in found:
                check(each, given, run(each, given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_engine_of_one_convolution(device: Device, dtype: str) -> None:
    more = {"bias": BIAS, "residual": RESIDUAL, "activation": "relu"}
    step = replaced(SHAPES["3x3"], dtype=dtype, aligned=True, tf32=dtype == "float32", **more)
    given = operands(step)
    found = with_engines(step, 16)
    assert len({each.engine for each in found}) == len(found) > 1
    for each in found:
        check(each, given, run(each, given))


EPILOGUES: list[dict[str, Any]] = [
    {"bias": BIAS},
    {"residual": RESIDUAL},
    {"activation": "relu"},
    {"bias": BIAS, "activation": "relu", "residual": RESIDUAL, "residual_first": False},
    {"bias": BIAS, "activation": "silu", "residual": RESIDUAL, "residual_first": False},
    {"bias": BIAS, "activation": "gelu"},
    {"bias": BIAS, "activation": "gelu_tanh"},
    {"bias": BIAS, "activation": "sigmoid"},
    {"bias": BIAS, "activation": "tanh"},
    {"bias": BIAS, "activation": "clip", "alpha": 0.0, "beta": 0.5},
    {"bias": BIAS, "activation": "clip", "alpha": -math.inf, "beta": 0.5},
    {"bias": BIAS, "activation": "leaky_relu", "alpha": 0.1},
    {"bias": BIAS, "activation": "elu", "alpha": 0.7},
    {"bias": BIAS, "activation": "softplus"},
    {"bias": BIAS, "activation": "quick_gelu"},
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("more", EPILOGUES, ids=lambda more: " ".join(map(str, more)))
def test_every_epilogue(device: Device, more: dict[str, Any], dtype: str) -> None:
    step = replaced(SHAPES["3x3 of 7x7"], dtype=dtype, aligned=True, **more)
    given = operands(step)
    for each in with_engines(step, 1):
        check(each, given, run(each, given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_that_are_channels_first(device: Device, dtype: str) -> None:
    layout = {"aligned": True, "channels_last": False, "w_channels_last": False}
    step = replaced(SHAPES["3x3"], bias=BIAS, activation="relu", dtype=dtype, **layout)
    given = operands(step)
    for each in with_engines(step, 1):
        check(each, given, run(each, given))


def test_tf32_is_used_only_where_it_is_allowed(device: Device) -> None:
    off = {}
    for tf32 in (False, True):
        step = replaced(SHAPES["3x3"], aligned=True, tf32=tf32)
        given = operands(step)
        off[tf32] = np.abs(run(with_engines(step, 1)[0], given) - reference(step, given)).max()
    assert off[True] > 20 * off[False]


def test_an_engine_without_its_workspace_is_refused(device: Device) -> None:
    step = replaced(SHAPES["stem"], dtype="float16", aligned=True, bias=BIAS, activation="relu")
    hungry = [each for each in with_engines(step, 16) if each.workspace_bytes]
    if not hungry:
        pytest.skip("no engine of this cuDNN needs workspace here")
    with pytest.raises(NativeError, match=r"needs \d+ bytes of workspace, the plan has 0"):
        run(replaced(hungry[0], workspace=None, workspace_bytes=0), operands(step))


def test_eight_threads_run_one_plan_with_biases_of_their_own(device: Device) -> None:
    step = replaced(SHAPES["3x3"], dtype="float16", aligned=True, bias=BIAS, activation="relu")
    step = next(each for each in with_engines(step, 8) if each.workspace_bytes < 1 << 20)
    given = operands(step)
    spec = TensorSpec(shapes(step)["y"], "float16")
    specs = [TensorSpec(value.shape, "float16") for value in given.values()]
    ready = ready_plan(Plan((spec,), (step,), (step.workspace_bytes,)), specs)
    shared = [upload(value) for value in given.values()]

    def work(seed: int) -> None:
        own = {**given, "bias": normal((step.m,), "float16", seed)}
        uploaded, stream = upload(own["bias"]), cupy.cuda.Stream(non_blocking=True)
        outputs = [upload(np.full(spec.shape, np.nan, np.float16)) for _ in range(20)]
        scratch = cupy.zeros(ready.scratch_bytes, dtype=cupy.uint8)
        inputs = [each.data.ptr for each in (shared[0], shared[1], uploaded, shared[3])]
        cupy.cuda.runtime.deviceSynchronize()
        for output in outputs:
            ready.run(inputs, [output.data.ptr], scratch.data.ptr, stream.ptr)
        stream.synchronize()
        for output in outputs:
            check(step, own, result(output, spec, True))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_a_cuda_graph_replays_a_convolution(device: Device) -> None:
    """The first run loads the kernel, and a run in a capture allocates nothing; replays read new values."""
    step = replaced(SHAPES["3x3"], dtype="float16", aligned=True, bias=BIAS, activation="relu")
    step = with_engines(step, 1)[0]
    given = operands(step)
    spec = TensorSpec(shapes(step)["y"], "float16")
    specs = [TensorSpec(value.shape, "float16") for value in given.values()]
    ready = ready_plan(Plan((spec,), (step,), (step.workspace_bytes,)), specs)
    read, y = [upload(value) for value in given.values()], upload(np.full(spec.shape, np.nan, np.float16))
    scratch, stream = cupy.zeros(ready.scratch_bytes, dtype=cupy.uint8), cupy.cuda.Stream(non_blocking=True)
    addresses = [each.data.ptr for each in read]
    cupy.cuda.runtime.deviceSynchronize()
    ready.run(addresses, [y.data.ptr], scratch.data.ptr, stream.ptr)
    stream.synchronize()
    with stream:
        stream.begin_capture()
        ready.run(addresses, [y.data.ptr], scratch.data.ptr, stream.ptr)
        graph = stream.end_capture()
    other = operands(step, seed=9)
    read[0].set(other["x"].reshape(-1).view(np.uint8))
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    check(step, {**given, "x": other["x"]}, result(y, spec, True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_implementations_compute_the_convolution(device: Device, dtype: str) -> None:
    pointers = {"x": Pointer("input", 0), "w": Pointer("input", 1), "bias": BIAS, "residual": RESIDUAL}
    conv = Conv(
        n=2, c=64, m=96, sizes=(14, 13), y_sizes=(7, 7), kernel=(3, 3), strides=(2, 2), dilations=(1, 1),
        pads_begin=(1, 1), pads_end=(0, 1), group=1, dtype=dtype, aligned=True, y=Pointer("output", 0),
        activation="relu", **pointers,
    )  # fmt: skip
    found = cudnn.implementations(conv, device)
    assert found
    for each in found:
        (step,) = each.steps
        assert isinstance(step, Convolution)
        given = operands(step)
        check(step, given, run(step, given, each.scratch))
