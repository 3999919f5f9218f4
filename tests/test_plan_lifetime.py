"""How long plans and code are held, and when code is loaded: the native operator is real, the GPU is a stand-in."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "native"))

from stand_in import CPU, SHIFT, Stage, feed, model, session, stage

from onnxfuse.provider import native, planner
from onnxfuse.provider.compile import Function
from onnxfuse.provider.plan import Kernel

GLOBAL, RELAXED = 0, 2  # CUstreamCaptureMode


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    result = stage(monkeypatch)
    yield result
    result.cuda.fake_other_captures(0)
    result.library.onnxfuse_keep_plans(native.MANY_PLANS)


def test_memory_is_bounded_where_shapes_never_end(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node, so many plans as are kept; those in use stay, and one that is gone is made again."""
    monkeypatch.setattr(planner, "MOST_PLANS", 8)
    gpu.library.onnxfuse_keep_plans(4)
    run, calls = session(model(SHIFT)), gpu.kernels("shift").calls

    def works(sizes: Sequence[int]) -> list[int]:
        calls.clear()
        for n in sizes:
            given = feed(n, 3)
            np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
        return [inputs[0].shape[0] for _, inputs, _ in calls]

    assert works([1, 2, 3, 4] * 3) == [1, 2, 3, 4]
    assert works([n for i in range(5, 40) for n in (1, i)]) == list(range(5, 40)), "the first is in use"
    assert len(planner.living()) == 8
    assert works([39, 1, 2, 3, 4]) == [2, 3, 4]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: works([(seed * i) % 23 + 1 for i in range(200)]), range(8)))


def test_functions_stay_loaded_as_long_as_the_node(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph of the session may launch what a plan that is gone has launched."""
    made: list[weakref.ref[Function]] = []

    def load(kernel: Kernel, ordinal: int) -> Function:
        function = Function(*reversed(native.load_function(gpu.library, ordinal, b"fake:cubin", kernel.entry)))
        made.append(weakref.ref(function))
        return function

    monkeypatch.setitem(planner.backends, CPU, dataclasses.replace(planner.backends[CPU], compile=load))
    monkeypatch.setattr(planner, "MOST_PLANS", 2)
    run = session(model(SHIFT))
    for n in range(1, 6):
        run.run(None, feed(n, 3))
    gc.collect()
    assert len(made) == 5 and all(each() for each in made)
    assert len(planner.living()) == 2
    del run
    gc.collect()
    assert not any(each() for each in made)


def test_code_is_loaded_and_unloaded_while_another_thread_captures_a_graph(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver refuses that otherwise, and ends the other thread's capture."""

    def load(kernel: Kernel, ordinal: int) -> Function:
        module, function = native.load_function(gpu.library, ordinal, b"fake:cubin", kernel.entry)
        return Function(function, Module(module))

    class Module:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __del__(self) -> None:
            refusals.append(cuda.cuModuleUnload(self.handle))  # as CuPy does, which knows no other threads

    refusals: list[int] = []
    cuda = ctypes.CDLL(gpu.cuda._name)
    cuda.cuModuleUnload.argtypes = (ctypes.c_void_p,)
    monkeypatch.setitem(planner.backends, CPU, dataclasses.replace(planner.backends[CPU], compile=load))
    gpu.cuda.fake_other_captures(1)
    run = session(model(SHIFT))
    run.run(None, feed(2, 3))
    assert gpu.cuda.fake_last_mode() == RELAXED, "of a first launch, which may load code"
    run.run(None, feed(2, 3))
    assert gpu.cuda.fake_last_mode() == GLOBAL
    del run
    gc.collect()
    assert refusals == [0]
    module, _ = native.load_function(gpu.library, 0, b"fake:cubin", "noop")
    native.check(gpu.library.onnxfuse_unload(0, module))
    assert cuda.cuModuleUnload(module) == 900
