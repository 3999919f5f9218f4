"""Plans of one node timed on a GPU: random inputs, constants that are not in the L2 cache, CUDA graphs, turns."""

from __future__ import annotations

import ctypes
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np

from onnxfuse.provider.compile import cupy_module, despite_disk
from onnxfuse.provider.direct import ReadyPlan
from onnxfuse.provider.native import libcuda
from onnxfuse.provider.plan import Device, Plan, TensorSpec

MOST_BYTES: Final = 4 * 2**30  # of scratch memory; less where half of what is free is less
MOST_SETS: Final = 256  # of constants
LAUNCHES: Final = 8  # at least, in a CUDA graph: starting one takes about 10 us
WARM_UP: Final = 2  # replays
ROUNDS: Final = (5, 20)
SECONDS: Final = 0.05  # of a candidate's runs
NOISE: Final = 1_000_003  # random values
NARROW: Final[dict[str, Any]] = {"bfloat16": ml_dtypes.bfloat16}  # what NumPy and CuPy have no name for
RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

# Of a value plus the root mean square of all: some roundings of intermediate values in the narrow formats, sums in
# another order in the wide ones. TF32 rounds operands to the eleven bits that float16 has.
TOLERANCE: Final = {"float64": 1e-9, "float32": 1e-4, "float16": 8e-3, "bfloat16": 6e-2}
TF32_TOLERANCE: Final = 8e-3
Pair = tuple[list[Any], list[Any]]  # memory of inputs and outputs


class GpuTrial:
    """The Trial of choose.py, through CuPy."""

    def __init__(
        self, inputs: Sequence[TensorSpec], plans: Sequence[Plan], device: Device, ready: Callable[[Plan], ReadyPlan]
    ) -> None:
        """`ready` compiles a plan for the device."""
        self._cupy: Any = cupy_module()
        self._inputs, self._outputs, self._device, self._compile = tuple(inputs), plans[0].outputs, device, ready
        constants = [spec for spec in self._inputs if spec.constant]
        computed = [*(spec for spec in self._inputs if not spec.constant), *self._outputs]
        self._constant_bytes, self._computed_bytes = (
            sum(size_of(spec) + 256 for spec in specs) for specs in (constants, computed)
        )
        self._scratch_bytes = 256 + max(sum(size + 256 for size in plan.scratch) for plan in plans)
        self._plans: dict[str, ReadyPlan] = {}
        self._passed_on = tuple(_passed_on(self._inputs, self._outputs))
        self._sets: list[Pair] = []
        self._scratch: Any = None
        self._noises: dict[tuple[str, int], Any] = {}
        with self._on_device():
            self._pool = self._cupy.cuda.MemoryPool()
            self._stream = self._cupy.cuda.Stream(non_blocking=True)

    def refuse(self) -> str | None:
        """Why nothing can be measured here."""
        needed, limit = self._computed_bytes + 2 * self._constant_bytes + self._scratch_bytes, self._limit()
        return f"they need {needed} bytes of scratch memory, at most {limit} are taken" if needed > limit else None

    def outputs(self, plan: Plan) -> list[Any]:
        """What a plan computes from the first set of inputs."""
        with self._on_device():
            inputs, outputs = self._memory(1)[0]
            for place, spec in zip(outputs, self._outputs, strict=True):
                place.memset_async(0xFF, size_of(spec), self._stream)  # what a plan leaves out must not look right
            self._start(plan, (inputs, outputs))
            pairs = zip(outputs, self._outputs, strict=True)
            copies = [despite_disk(partial(self._values, place, spec)) for place, spec in pairs]
            self._stream.synchronize()
            return copies

    def differ(self, expected: Sequence[Any], outputs: Sequence[Any]) -> str | None:
        """How the first output that differs does."""
        with self._on_device():
            for number, (right, found, spec) in enumerate(zip(expected, outputs, self._outputs, strict=True)):
                tolerance = TOLERANCE.get(spec.dtype, 0.0)
                if spec.dtype == "float32" and self._device.tf32:
                    tolerance = TF32_TOLERANCE
                if why := despite_disk(partial(difference, self._cupy, right, found, tolerance)):
                    return f"output {number} {why}"
        return None

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Of one run of each: medians over replays of CUDA graphs, in turns."""
        with self._on_device():
            sets = self._memory(self._count())
            for plan in plans:
                self._ready(plan)  # scratch memory stays where it is from here on
            graphs = [self._captured(plan, sets) for plan in plans]
            runs = _runs(sets)
            longest = [max(map(self._replay, graphs)) for _ in range(WARM_UP)][-1]
            rounds = max(ROUNDS[0], min(ROUNDS[1], int(SECONDS / longest)))
            times: list[list[float]] = [[] for _ in plans]
            for turn in range(rounds):
                for step in range(len(plans)):
                    which = (turn + step) % len(plans)
                    times[which].append(self._replay(graphs[which]) / runs)
            graphs.clear()  # here, where other threads' captures do not forbid it
            self._sets = []  # whose inputs were written
            return [statistics.median(each) for each in times]

    def close(self) -> None:
        """Give the memory back to the GPU."""
        with self._on_device():
            self._stream.synchronize()
            self._sets, self._scratch = [], None
            self._plans.clear()
            self._noises.clear()
            self._pool.free_all_blocks()
        with relaxed():
            del self._stream

    # --- running ---------------------------------------------------------------------------------------------------

    def _start(self, plan: Plan, memory: Pair) -> None:
        ready = self._ready(plan)
        inputs, outputs = ([place.ptr for place in places] for places in memory)
        ready.run(inputs, outputs, self._scratch.ptr, self._stream.ptr)

    def _ready(self, plan: Plan) -> ReadyPlan:
        key = repr(plan)
        if key not in self._plans:
            self._plans[key] = made = self._compile(plan)
            if self._scratch is None or self._scratch.mem.size < made.scratch_bytes:
                self._scratch = self._pool.malloc(max(made.scratch_bytes, 1))
        return self._plans[key]

    def _captured(self, plan: Plan, sets: Sequence[Pair]) -> Any:
        """A CUDA graph of LAUNCHES runs or more, each with the next constants, on what the one before it wrote."""
        self._start(plan, sets[0])  # what a first run allocates or loads
        self._stream.synchronize()
        self._stream.begin_capture(RELAXED)
        try:
            for number in range(_runs(sets)):
                self._start(plan, self._turned(sets[number % len(sets)]) if number % 2 else sets[number % len(sets)])
        finally:
            graph = self._stream.end_capture()
        return graph

    def _replay(self, graph: Any) -> float:
        """Seconds of a graph."""
        before, after = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        before.record(self._stream)
        graph.launch(self._stream)
        after.record(self._stream)
        after.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(before, after)) / 1e3

    # --- memory ----------------------------------------------------------------------------------------------------

    def _limit(self) -> int:
        with self._on_device():
            return min(MOST_BYTES, int(self._cupy.cuda.runtime.memGetInfo()[0]) // 2)

    def _count(self) -> int:
        """Sets of constants that together are twice the L2 cache; one where constants are too small to matter."""
        if not self._constant_bytes:
            return 1
        with self._on_device():
            cache = int(self._cupy.cuda.Device().attributes["L2CacheSize"])
        wanted = 1 + -(-2 * cache // self._constant_bytes)
        room = (self._limit() - self._computed_bytes - self._scratch_bytes) // self._constant_bytes
        return max(1, min(wanted, room)) if wanted <= MOST_SETS else 1

    def _memory(self, count: int) -> list[Pair]:
        """Sets that differ in the constants: each run finds its own in memory, as each layer of a model does.

        All runs read and write the same other memory: what fits into the L2 cache is found there.
        """
        if not self._sets:
            inputs = [self._filled(spec, number) for number, spec in enumerate(self._inputs)]
            self._sets.append((inputs, [self._place(spec) for spec in self._outputs]))
        first, outputs = self._sets[0]
        while len(self._sets) < count:
            number = len(self._sets) * len(self._inputs)
            inputs = [
                self._filled(spec, number + i) if spec.constant else first[i] for i, spec in enumerate(self._inputs)
            ]
            self._sets.append((inputs, outputs))
        self._stream.synchronize()  # kernels may read constants before what is in front of them ends
        return self._sets[:count]

    def _turned(self, memory: Pair) -> Pair:
        """The same, with inputs where the run before wrote its outputs."""
        inputs, outputs = map(list, memory)
        for output, source in self._passed_on:
            inputs[source], outputs[output] = outputs[output], inputs[source]
        return inputs, outputs

    def _place(self, spec: TensorSpec) -> Any:
        """Memory for a tensor; where it is not aligned it begins one element later."""
        return self._pool.malloc(size_of(spec) + 16) + (0 if spec.aligned else itemsize(spec))

    def _filled(self, spec: TensorSpec, number: int) -> Any:
        """Normal values, others for each number; true and false by chance; zeros for integers, which may be indices.

        Those of constant matrices are so small that products keep the size of what is multiplied.
        """
        place, size = self._place(spec), size_of(spec)
        if spec.dtype not in TOLERANCE and spec.dtype != "bool":
            place.memset_async(0, size, self._stream)
            return place
        noise = self._noise(spec.dtype, max(spec.shape) if spec.constant and len(spec.shape) == 2 else 1)
        at, start = 0, number * 7919 * noise.itemsize
        while at < size:
            start %= noise.nbytes
            count = min(size - at, noise.nbytes - start)
            (place + at).copy_from_device_async(noise.data + start, count, self._stream)
            at, start = at + count, start + count
        return place

    def _noise(self, dtype: str, terms: int) -> Any:
        """NOISE values on the GPU, to be repeated: a prime number, so that no two rows of a matrix are equal.

        Products of so many `terms` have a variance of one.
        """
        if (dtype, terms) not in self._noises:
            values = np.random.default_rng(0).standard_normal(NOISE) / math.sqrt(terms)
            host = values > 0 if dtype == "bool" else values.astype(NARROW.get(dtype, dtype))
            self._noises[dtype, terms] = self._cupy.asarray(host.view(np.uint16) if dtype in NARROW else host)
        return self._noises[dtype, terms]

    def _values(self, place: Any, spec: TensorSpec) -> Any:
        """A copy of the memory as an array; bfloat16 as float32."""
        if spec.dtype not in NARROW:
            return self._cupy.ndarray(spec.shape, spec.dtype, place).copy()
        bits = self._cupy.ndarray(spec.shape, np.uint16, place)
        return (bits.astype(np.uint32) << 16).view(np.float32)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """On the GPU, its stream and its memory, whatever other threads capture."""
        with self._cupy.cuda.Device(self._device.ordinal), relaxed():
            if not hasattr(self, "_stream"):
                yield
                return
            with self._stream, self._cupy.cuda.using_allocator(self._pool.malloc):
                yield


def _passed_on(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Iterator[tuple[int, int]]:
    """Outputs that can be inputs of the next run: (output, input) places."""
    free = [place for place, spec in enumerate(inputs) if not spec.constant]
    for number, output in enumerate(outputs):
        alike = ((inputs[at].shape, inputs[at].dtype, inputs[at].aligned) for at in free)
        same = [(output.shape, output.dtype, output.aligned) == each for each in alike]
        if any(same):
            yield number, free.pop(same.index(True))


def _runs(sets: Sequence[Pair]) -> int:
    """Of a plan in a CUDA graph; an even number, so that the next graph goes on where one has ended."""
    return max(LAUNCHES, len(sets) + len(sets) % 2)


def itemsize(spec: TensorSpec) -> int:
    """Bytes of an element."""
    return int(np.dtype(NARROW.get(spec.dtype, spec.dtype)).itemsize)


def size_of(spec: TensorSpec) -> int:
    """Bytes of a tensor."""
    return math.prod(spec.shape) * itemsize(spec)


def difference(xp: Any, right: Any, found: Any, tolerance: float) -> str | None:
    """How an array differs from the right one; `xp` is NumPy or CuPy.  None where it does not, beyond rounding.

    An element may be off by `tolerance` times (its value + the root mean square of all).
    """
    if not right.size:
        return None
    wrong = right != found
    if tolerance:
        wide = xp.float64 if right.dtype == xp.float64 else xp.float32
        finite = xp.isfinite(right) & xp.isfinite(found)
        a, b = (xp.where(finite, each, 0).astype(wide) for each in (right, found))
        near = xp.abs(a - b) <= tolerance * (xp.abs(a) + xp.sqrt(xp.mean(a**2)))
        wrong &= ~((finite & near) | (xp.isnan(right) & xp.isnan(found)))
    if not (count := int(wrong.sum())):
        return None
    place = int(wrong.reshape(-1).argmax())
    pair = f"{found.reshape(-1)[place]} where {right.reshape(-1)[place]} is right"
    return f"differs in {count} of {right.size} elements, at {place} it is {pair}"


@contextmanager
def relaxed() -> Iterator[None]:
    """Lets this thread allocate and synchronize while another one captures a CUDA graph, which goes on."""
    mode = ctypes.c_int(RELAXED)
    exchange = ctypes.CDLL(libcuda()).cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
