"""Trials of plans without a GPU: NumPy stands in for CuPy, Python functions for kernels, a counter for the clock."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxfuse.runtime.plan import Device, Kernel, Launch, Plan, TensorSpec
from onnxfuse.tuning import trial
from onnxfuse.tuning.trial import MAX_CONSTANT_SETS, MIN_LAUNCHES_PER_GRAPH, GpuTrial

DEVICE = Device("none", 90, 1, 1, tf32=False)
CACHE = 10_000  # bytes
Run = Callable[[Sequence[int], Sequence[int]], None]  # on addresses of inputs and outputs


@dataclasses.dataclass(frozen=True)
class Memory:
    """Stands in for cupy.cuda.MemoryPointer, on host memory."""

    data: Any
    at: int = 0

    @property
    def ptr(self) -> int:
        return int(self.data.ctypes.data) + self.at

    @property
    def mem(self) -> Any:
        return SimpleNamespace(size=self.data.nbytes)

    def __add__(self, count: int) -> Memory:
        return Memory(self.data, self.at + count)

    def memset_async(self, value: int, count: int, stream: Any) -> None:
        self.data[self.at : self.at + count] = value

    def copy_from_device_async(self, source: Memory, count: int, stream: Any) -> None:
        self.data[self.at : self.at + count] = source.data[source.at : source.at + count]


class Pretended:
    """Stands in for the parts of CuPy that GpuTrial uses; a run takes the seconds that its plan states."""

    def __init__(self, free: int = 1 << 30) -> None:
        self.now, self.free, self.allocated = 0.0, free, 0
        self.captured: list[float] | None = None
        self.replays: list[float] = []
        runtime = SimpleNamespace(memGetInfo=lambda: (self.free, self.free))
        self.cuda = SimpleNamespace(
            MemoryPool=lambda: SimpleNamespace(malloc=self.malloc, free_all_blocks=lambda: None),
            Stream=lambda non_blocking: self, Event=self.event, runtime=runtime,
            Device=lambda ordinal=0: self, using_allocator=lambda malloc: contextlib.nullcontext(),
            get_elapsed_time=lambda before, after: 1e3 * (after.at - before.at),
        )  # fmt: skip
        self.attributes, self.ptr = {"L2CacheSize": CACHE}, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def malloc(self, count: int) -> Memory:
        self.allocated += count
        return Memory(np.zeros(count + 16, np.uint8))

    def asarray(self, host: Any) -> Any:
        return SimpleNamespace(data=Memory(host.view(np.uint8)), nbytes=host.nbytes, itemsize=host.itemsize)

    def ndarray(self, shape: Sequence[int], dtype: Any, place: Memory) -> Any:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return place.data[place.at : place.at + count].view(dtype).reshape(shape)

    def event(self) -> Any:
        event = SimpleNamespace(synchronize=lambda: None)
        event.record = lambda stream: setattr(event, "at", self.now)
        return event

    def synchronize(self) -> None:
        pass

    def begin_capture(self, mode: int) -> None:
        self.captured = []

    def end_capture(self) -> Any:
        taken, self.captured = self.captured or [], None

        def launch(stream: Any) -> None:
            self.now += sum(taken)
            self.replays.append(sum(taken))

        return SimpleNamespace(launch=launch)

    def ready(self, run: Run, seconds: float = 1e-6) -> Any:
        def start(inputs: Sequence[int], outputs: Sequence[int], scratch: int, stream: int) -> None:
            if self.captured is None:
                run(inputs, outputs)
            else:
                self.captured.append(seconds)

        return SimpleNamespace(run=start, scratch_bytes=64)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    pretended = Pretended()
    monkeypatch.setitem(sys.modules, "cupy", pretended)  # type: ignore[arg-type]
    monkeypatch.setattr(trial, "relaxed", contextlib.nullcontext)
    return pretended


def spec(
    dtype: str = "float32", shape: tuple[int, ...] = (8, 8), aligned: bool = True, constant: bool = False
) -> TensorSpec:
    return TensorSpec(shape, dtype, aligned, constant)


def plan(output: TensorSpec, number: int = 0) -> Plan:
    return Plan((output,), (Launch(Kernel("none", "none"), (number, 1, 1), (1, 1, 1), ()),))


def copies(count: int) -> Run:
    return lambda inputs, outputs: ctypes.memmove(outputs[0], inputs[0], count) and None


def test_each_run_reads_what_the_one_before_it_wrote(cupy: Pretended) -> None:
    """An output replaces an input of the same shape that is not constant: here the first, not the second or third."""
    x, other, weight = spec(), spec(shape=(8,)), spec(constant=True)
    seen: list[tuple[list[int], list[int]]] = []

    def start(inputs: Sequence[int], outputs: Sequence[int], scratch: int, stream: int) -> None:
        seen.append((list(inputs), list(outputs)))

    made = GpuTrial([x, other, weight], [plan(x)], DEVICE, lambda _: SimpleNamespace(run=start, scratch_bytes=0))
    made._captured(plan(x), made._memory(3))
    runs = seen[1:]  # the first one warms up
    assert len(runs) == MIN_LAUNCHES_PER_GRAPH and MIN_LAUNCHES_PER_GRAPH % 2 == 0
    for before, after in zip(runs, [*runs[1:], runs[0]], strict=True):
        assert after[0][0] == before[1][0] and after[0][1] == before[0][1]
    assert len({inputs[2] for inputs, _ in runs}) == 3


@pytest.mark.parametrize(
    ("shape", "terms"),
    [((64, 256), 256), ((256, 5, 5, 16), 25 * 16), ((3, 3, 1, 96), 9), ((64, 3, 3, 64), 9 * 64), ((512,), 1)],
    ids=str,
)
def test_constants_keep_the_size_of_what_they_are_multiplied_with(
    cupy: Pretended, shape: tuple[int, ...], terms: int
) -> None:
    """Matrices, filters of several channels and of one, and vectors, which are added."""
    w = spec("float16", shape, constant=True)
    made = GpuTrial([w], [plan(w)], DEVICE, lambda _: cupy.ready(copies(trial.size_of(w))))
    assert made.outputs(plan(w))[0].astype(np.float64).std() == pytest.approx(terms**-0.5, rel=0.1)


def test_constants_may_be_empty(cupy: Pretended) -> None:
    w = spec("float16", (0, 3, 3, 0), constant=True)
    made = GpuTrial([w], [plan(w)], DEVICE, lambda _: cupy.ready(copies(0)))
    assert made.outputs(plan(w))[0].shape == w.shape


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("aligned", [True, False])
def test_inputs_are_normal_values(cupy: Pretended, dtype: str, aligned: bool) -> None:
    x = spec(dtype, (1100, 1000), aligned)  # more than RANDOM_VALUES has
    places: list[int] = []

    def note(inputs: Sequence[int], outputs: Sequence[int]) -> None:
        places.extend((*inputs, *outputs))
        copies(trial.size_of(x))(inputs, outputs)

    made = GpuTrial([x], [plan(x)], DEVICE, lambda _: cupy.ready(note))
    y = made.outputs(plan(x))[0].astype(np.float64)
    assert (y.std(), y.mean()) == (pytest.approx(1, abs=0.02), pytest.approx(0, abs=0.02))
    assert (y[0] == y[1]).mean() < 0.1
    offset = 0 if aligned else trial.itemsize(x)
    assert {place % 16 for place in places} == {offset}


def test_outputs_of_float8_are_compared_as_bytes(cupy: Pretended) -> None:
    x = spec("float8_e4m3fn")
    made = GpuTrial([x], [plan(x)], DEVICE, lambda _: cupy.ready(copies(trial.size_of(x))))
    assert made.outputs(plan(x))[0].dtype == np.uint8


def test_every_input_has_values_of_its_own(cupy: Pretended) -> None:
    seen: list[bytes] = []

    def note(inputs: Sequence[int], outputs: Sequence[int]) -> None:
        seen.extend(ctypes.string_at(each, 256) for each in inputs)

    made = GpuTrial([spec(constant=True)] * 2, [plan(spec())], DEVICE, lambda _: cupy.ready(note))
    made.outputs(plan(spec()))
    for inputs, outputs in made._memory(3)[1:]:
        note([each.ptr for each in inputs], [each.ptr for each in outputs])
    assert len(seen) == len(set(seen)) == 6


def test_runs_have_constants_of_their_own_and_share_what_is_computed(cupy: Pretended) -> None:
    """So do the nodes of a chain: activations reuse memory, and each layer has weights of its own."""
    made = GpuTrial([spec(), spec(constant=True)], [plan(spec())], DEVICE, lambda _: cupy.ready(print))
    sets = [([each.ptr for each in inputs], [each.ptr for each in outputs]) for inputs, outputs in made._memory(3)]
    assert len({inputs[0] for inputs, _ in sets}) == len({outputs[0] for _, outputs in sets}) == 1
    assert len({inputs[1] for inputs, _ in sets}) == 3


def test_integers_are_equal_and_masks_are_mixed(cupy: Pretended) -> None:
    lengths = dataclasses.replace(spec("int32", (3,)), drawn=1023)
    inputs = [spec("int64", (100,)), lengths, spec("bool", (100,)), spec("int4", (100,))]
    made = GpuTrial(inputs, [plan(spec())], DEVICE, lambda _: cupy.ready(print))
    ((numbers, drawn, mask, _), _) = made._memory(1)[0]
    assert not numbers.data[:800].any()
    assert drawn.data[:12].view(np.int32).tolist() == [1023] * 3
    assert set(mask.data[:100]) == {0, 1}


def test_what_a_plan_leaves_out_does_not_look_right(cupy: Pretended) -> None:
    by_plan = {0: copies(256), 1: copies(128)}
    made = GpuTrial([spec()], [plan(spec(), i) for i in by_plan], DEVICE,
                    lambda p: cupy.ready(by_plan[p.steps[0].grid[0]]))  # fmt: skip
    expected = made.outputs(plan(spec(), 0))
    assert made.difference(expected, made.outputs(plan(spec(), 0))) is None
    why = made.difference(expected, made.outputs(plan(spec(), 1)))
    assert why is not None and why.startswith("output 0 differs in 32 of 64 elements, at 32 it is nan where")


@pytest.mark.parametrize(("tf32", "differs"), [(False, True), (True, False)])
def test_tf32_may_be_off_by_more(cupy: Pretended, tf32: bool, differs: bool) -> None:
    device = dataclasses.replace(DEVICE, tf32=tf32)
    made = GpuTrial([spec()], [plan(spec())], device, lambda _: cupy.ready(copies(256)))
    (y,) = made.outputs(plan(spec()))
    assert (made.difference([y], [y * np.float32(1 + 1e-3)]) is not None) == differs


def test_runs_are_timed_in_turns(cupy: Pretended) -> None:
    times = {0: 3e-6, 1: 2e-6, 2: 5e-6}
    made = GpuTrial([spec()], [plan(spec(), i) for i in times], DEVICE,
                    lambda p: cupy.ready(copies(256), times[p.steps[0].grid[0]]))  # fmt: skip
    found = made.seconds([plan(spec(), i) for i in times])
    assert found == [pytest.approx(each) for each in times.values()]
    timed = cupy.replays[3 * trial.WARM_UP_REPLAYS :]
    turns = [timed[at : at + 3] for at in range(0, len(timed), 3)]
    assert len(turns) >= trial.MIN_ROUNDS
    assert all(sorted(turn) == sorted(cupy.replays[:3]) for turn in turns)
    made.close()


def test_sets_exceed_the_cache_twice_within_the_limits(cupy: Pretended) -> None:
    def count(rows: int, constant: bool = True) -> int:
        x, w = spec(), spec(shape=(rows, 8), constant=constant)
        return GpuTrial([x, w], [plan(spec())], DEVICE, lambda _: None)._count()

    assert count(1) == -(-2 * CACHE // (32 + 256)) + 1
    assert count(1000) == 2 and MIN_LAUNCHES_PER_GRAPH > 2
    assert count(1000, constant=False) == 1
    cupy.attributes["L2CacheSize"] = MAX_CONSTANT_SETS * (32 + 256)
    assert count(1) == 1  # more than MAX_CONSTANT_SETS would be needed to fill the cache
    cupy.attributes["L2CacheSize"] = CACHE
    cupy.free = 2 * (2 * 512 + 256 + 10 * (32 + 256))
    assert count(1) == 10  # half of what is free, less what is computed and the scratch memory


def test_what_needs_too_much_memory_is_refused(cupy: Pretended) -> None:
    cupy.free = 1 << 20
    made = GpuTrial([spec(shape=(1 << 18,), constant=True)], [plan(spec())], DEVICE, lambda _: cupy.ready(print))
    needed = 2 * ((1 << 20) + 256) + 512 + 256
    assert made.refusal() == f"they need {needed} bytes of scratch memory, at most 524288 are taken"
    assert cupy.allocated == 0


def test_a_disk_that_fails_costs_the_cache_only(
    cupy: Pretended, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CuPy compiles the kernels that compare outputs; if its disk cache fails, it keeps them in memory."""
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "0")

    def isfinite(values: Any) -> Any:
        if os.environ["CUPY_CACHE_IN_MEMORY"] == "0":
            raise OSError(28, "No space left on device")
        return np.isfinite(values)

    monkeypatch.setattr(cupy, "isfinite", isfinite, raising=False)
    made = GpuTrial([spec()], [plan(spec())], DEVICE, lambda _: cupy.ready(copies(256)))
    (y,) = made.outputs(plan(spec()))
    assert made.difference([y], [y.copy()]) is None
    assert "kernels are not cached on disk from now on: [Errno 28] No space left on device" in caplog.text
