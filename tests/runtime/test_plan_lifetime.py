"""How long plans and loaded kernels are held, and when kernels are loaded; the GPU is a stand-in."""

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

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, SHIFT, Stage, feed, model, session, stage

from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.kernel_loader import LoadedKernel
from onnxfuse.runtime.plan import Kernel
from onnxfuse.runtime.planner import planner

GLOBAL, RELAXED = 0, 2  # CUstreamCaptureMode


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    result = stage(monkeypatch)
    count = result.library.onnxfuse_keep_plans(4096)
    yield result
    result.cuda.fake_other_captures(0)
    result.library.onnxfuse_keep_plans(count)


def test_memory_is_bounded_where_shapes_never_end(gpu: Stage) -> None:
    """A template keeps as many plans as allowed; those in use stay, and a dropped one is made again."""
    gpu.library.onnxfuse_keep_plans(4)
    run = session(model(SHIFT))
    gpu.kernels("shift").calls.clear()

    def works(sizes: Sequence[int]) -> int:
        before = gpu.library.onnxfuse_plans_made()
        for n in sizes:
            given = feed(n, 4)
            np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])
        return int(gpu.library.onnxfuse_plans_made()) - before

    assert works([1, 2, 3, 4] * 3) == 4
    assert works([n for i in range(5, 40) for n in (1, i)]) == 35, "the first is in use"
    assert works([39, 1, 2, 3, 4]) == 3
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: works([(seed * i) % 23 + 1 for i in range(200)]), range(8)))
    assert not any(inputs[0].aligned for _, inputs, _ in gpu.kernels("shift").calls), "Python was not asked"


def test_no_run_frees_many_plans(gpu: Stage) -> None:
    """Else one of some thousand runs would take milliseconds longer."""
    gpu.library.onnxfuse_keep_plans(10)
    gc.collect()
    run = session(model(SHIFT))
    before = alive = gpu.library.onnxfuse_plans_alive()
    for n in range(1, 100):
        run.run(None, feed(n, 4))
        now = gpu.library.onnxfuse_plans_alive()
        assert alive - 1 <= now <= alive + 1, f"{n}: one is made, and two are freed at most"
        alive = now
        assert alive - before <= 30
    del run
    gc.collect()
    assert gpu.library.onnxfuse_plans_alive() == before


def test_kernels_stay_loaded_as_long_as_the_node(gpu: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph of the session may launch kernels of a plan that was dropped."""
    made: list[weakref.ref[LoadedKernel]] = []

    def load(kernel: Kernel, ordinal: int) -> LoadedKernel:
        function = LoadedKernel(*reversed(native.load_function(gpu.library, ordinal, b"fake:cubin", kernel.entry)))
        made.append(weakref.ref(function))
        return function

    monkeypatch.setitem(BACKENDS, CPU, dataclasses.replace(BACKENDS[CPU], load=load))
    run = session(model(SHIFT))
    for n in range(1, 6):
        run.run(None, feed(n, 4))
    planner._recent.clear()
    gc.collect()
    count = len(made)
    assert count and all(each() for each in made)
    for n in range(1, 6):
        run.run(None, feed(n, 4))
    assert len(made) == count, "each is loaded once"
    del run
    gc.collect()
    assert not any(each() for each in made)


def test_code_is_loaded_and_unloaded_while_another_thread_captures_a_graph(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this were not handled, the driver would refuse the call, and the other thread's capture would fail."""

    def load(kernel: Kernel, ordinal: int) -> LoadedKernel:
        module, function = native.load_function(gpu.library, ordinal, b"fake:cubin", kernel.entry)
        return LoadedKernel(function, Module(module))

    class Module:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def __del__(self) -> None:
            refusals.append(cuda.cuModuleUnload(self.handle))  # as CuPy, whatever other threads capture

    refusals: list[int] = []
    cuda = ctypes.CDLL(gpu.cuda._name)
    cuda.cuModuleUnload.argtypes = (ctypes.c_void_p,)
    monkeypatch.setitem(BACKENDS, CPU, dataclasses.replace(BACKENDS[CPU], load=load))
    gpu.cuda.fake_other_captures(1)
    run = session(model(SHIFT))
    run.run(None, feed(2, 3))
    planner._recent.clear()
    assert gpu.cuda.fake_last_mode() == RELAXED, "of a first launch, which may load code"
    run.run(None, feed(2, 3))
    assert gpu.cuda.fake_last_mode() == GLOBAL
    del run
    gc.collect()
    assert refusals and not any(refusals)
    module, _ = native.load_function(gpu.library, 0, b"fake:cubin", "noop")
    native.check(gpu.library.onnxfuse_unload(0, module))
    assert cuda.cuModuleUnload(module) == 900
