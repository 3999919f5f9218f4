"""Time the plans of one node on a GPU, on random inputs; each run reads constants that are not in the L2 cache.

A plan says which kernels compute the node, and how they are launched.
"""

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

from onnxfuse.runtime.cupy_backend import cupy_module, retry_without_disk_cache
from onnxfuse.runtime.native_library import libcuda
from onnxfuse.runtime.plan import Device, Plan, TensorSpec
from onnxfuse.runtime.run_plan import ReadyPlan
from onnxfuse.tuning.runs_in_flight import Alone, MeasuringStopped, at_once

MAX_SCRATCH_BYTES: Final = 4 * 2**30  # a trial allocates at most this, and at most half of the free memory
MAX_CONSTANT_SETS: Final = 256
MIN_LAUNCHES_PER_GRAPH: Final = 8  # several, so that the start of a graph, about 10 us, adds little to each
WARM_UP_REPLAYS: Final = 2
MIN_ROUNDS, MAX_ROUNDS = 5, 20  # a round replays the graph of each plan once
SECONDS_PER_PLAN: Final = 0.05
RANDOM_VALUES: Final = 1_000_003  # a prime number, so that no two rows of a matrix are equal
NUMPY_DTYPES: Final[dict[str, Any]] = {"bfloat16": ml_dtypes.bfloat16}  # dtypes whose names NumPy does not know
CAPTURE_MODE_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

# By dtype, the maximum error of an element, relative to its value plus the root mean square of all elements. The narrow
# formats allow for some roundings of intermediate values, the wide ones for sums in another order. TF32 rounds operands
# to the eleven significant bits that float16 has.
TOLERANCE: Final = {"float64": 1e-9, "float32": 1e-4, "float16": 8e-3, "bfloat16": 6e-2}
TF32_TOLERANCE: Final = 8e-3
Buffers = tuple[list[Any], list[Any]]  # memory of the inputs and of the outputs


class GpuTrial:
    """Runs and times plans of one node on a GPU through CuPy; implements `Trial` in autotune.py."""

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        plans: Sequence[Plan],
        device: Device,
        ready: Callable[[Plan], ReadyPlan],
        alone: Alone = at_once,
    ) -> None:
        """Open a stream and a memory pool; `ready` compiles a plan, and all work on the device runs through `alone`."""
        self._cupy: Any = cupy_module()
        self._inputs, self._outputs, self._device, self._compile = tuple(inputs), plans[0].outputs, device, ready
        self._alone = alone
        constants = [spec for spec in self._inputs if spec.constant]
        computed = [*(spec for spec in self._inputs if not spec.constant), *self._outputs]
        self._constant_bytes, self._computed_bytes = (
            sum(size_of(spec) + 256 for spec in specs) for specs in (constants, computed)
        )
        self._scratch_bytes = 256 + max(sum(size + 256 for size in plan.scratch) for plan in plans)
        self._plans: dict[str, ReadyPlan] = {}
        self._chained = tuple(_chained(self._inputs, self._outputs))
        self._sets: list[Buffers] = []
        self._scratch: Any = None
        self._random: dict[tuple[str, int], Any] = {}
        with self._on_device():
            self._pool = self._cupy.cuda.MemoryPool()
            self._stream = self._cupy.cuda.Stream(non_blocking=True)

    def refusal(self) -> str | None:
        """Return why nothing can be measured here; None if it can."""
        needed, limit = self._computed_bytes + 2 * self._constant_bytes + self._scratch_bytes, self._limit()
        return f"they need {needed} bytes of scratch memory, at most {limit} are taken" if needed > limit else None

    def outputs(self, plan: Plan) -> list[Any]:
        """Return copies of a plan's outputs for the first set of inputs."""
        return self._alone(partial(self._outputs_of, plan))

    def difference(self, expected: Sequence[Any], outputs: Sequence[Any]) -> str | None:
        """Return how the first differing output differs; None if all agree up to rounding."""
        with self._on_device():
            for number, (right, found, spec) in enumerate(zip(expected, outputs, self._outputs, strict=True)):
                tolerance = TOLERANCE.get(spec.dtype, 0.0)
                if spec.dtype == "float32" and self._device.tf32:
                    tolerance = TF32_TOLERANCE
                if why := retry_without_disk_cache(partial(array_difference, self._cupy, right, found, tolerance)):
                    return f"output {number} {why}"
        return None

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the median seconds of one run of each plan; the plans' CUDA graphs are replayed in turns."""
        with self._on_device():
            sets = self._memory(self._count())
            for plan in plans:
                self._ready(plan)  # allocates scratch memory for all plans now, so that its address does not change
            runs, graphs = _runs(sets), list[Any]()
            try:
                for plan in plans:
                    graphs.append(self._alone(partial(self._captured, plan, sets)))
                longest = [max(map(self._time, graphs)) for _ in range(WARM_UP_REPLAYS)][-1]
                rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(SECONDS_PER_PLAN / longest)))
                times: list[list[float]] = [[] for _ in plans]
                for turn in range(rounds):
                    for step in range(len(plans)):
                        which = (turn + step) % len(plans)
                        times[which].append(self._time(graphs[which]) / runs)
            except MeasuringStopped as stopped:
                raise stopped.with_traceback(None) from None  # frames in the traceback would keep a graph alive
            finally:
                graphs.clear()  # inside of `relaxed`, because another thread's capture can forbid it elsewhere
            self._sets = []  # dropped, because runs have overwritten their inputs
            return [statistics.median(each) for each in times]

    def close(self) -> None:
        """Give the memory back to the GPU."""
        with self._on_device():
            self._stream.synchronize()
            self._sets, self._scratch = [], None
            self._plans.clear()
            self._random.clear()
            self._pool.free_all_blocks()
        with relaxed():
            del self._stream

    # --- running ---------------------------------------------------------------------------------------------------

    def _outputs_of(self, plan: Plan) -> list[Any]:
        with self._on_device():
            inputs, outputs = self._memory(1)[0]
            for buffer, spec in zip(outputs, self._outputs, strict=True):
                buffer.memset_async(0xFF, size_of(spec), self._stream)  # NaN or -1: unwritten elements are noticed
            self._start(plan, (inputs, outputs))
            pairs = zip(outputs, self._outputs, strict=True)
            copies = [retry_without_disk_cache(partial(self._array, buffer, spec)) for buffer, spec in pairs]
            self._stream.synchronize()
            return copies

    def _start(self, plan: Plan, memory: Buffers) -> None:
        ready = self._ready(plan)
        inputs, outputs = ([buffer.ptr for buffer in buffers] for buffers in memory)
        ready.run(inputs, outputs, self._scratch.ptr, self._stream.ptr)

    def _ready(self, plan: Plan) -> ReadyPlan:
        key = repr(plan)
        if key not in self._plans:
            self._plans[key] = made = self._compile(plan)
            if self._scratch is None or self._scratch.mem.size < made.scratch_bytes:
                self._scratch = self._pool.malloc(max(made.scratch_bytes, 1))
        return self._plans[key]

    def _captured(self, plan: Plan, sets: Sequence[Buffers]) -> Any:
        """Capture a CUDA graph of several runs; each reads the next set of constants, and outputs of the run before."""
        self._start(plan, sets[0])  # before the capture, because a first run can allocate memory or load code
        self._stream.synchronize()
        self._stream.begin_capture(CAPTURE_MODE_RELAXED)
        try:
            for number in range(_runs(sets)):
                self._start(plan, self._swapped(sets[number % len(sets)]) if number % 2 else sets[number % len(sets)])
        finally:
            graph = self._stream.end_capture()
        return graph

    def _time(self, graph: Any) -> float:
        """Return the seconds that a graph takes while nothing else runs on the GPU."""
        return self._alone(partial(self._replay, graph))

    def _replay(self, graph: Any) -> float:
        before, after = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        before.record(self._stream)
        graph.launch(self._stream)
        after.record(self._stream)
        after.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(before, after)) / 1e3

    # --- memory ----------------------------------------------------------------------------------------------------

    def _limit(self) -> int:
        """Return the maximum bytes that a trial is allowed to allocate."""
        with self._on_device():
            return min(MAX_SCRATCH_BYTES, int(self._cupy.cuda.runtime.memGetInfo()[0]) // 2)

    def _count(self) -> int:
        """Return how many sets of constants fill twice the L2 cache; 1 if these are more than MAX_CONSTANT_SETS.

        The result is lower if memory cannot hold that many sets.
        """
        if not self._constant_bytes:
            return 1
        with self._on_device():
            cache = int(self._cupy.cuda.Device().attributes["L2CacheSize"])
        wanted = 1 + -(-2 * cache // self._constant_bytes)
        room = (self._limit() - self._computed_bytes - self._scratch_bytes) // self._constant_bytes
        return max(1, min(wanted, room)) if wanted <= MAX_CONSTANT_SETS else 1

    def _memory(self, count: int) -> list[Buffers]:
        """Return `count` sets of buffers that have different constants, but share all other buffers.

        Each run uses the next set, so that it reads its constants from memory, as each layer of a model does. The other
        buffers stay in the L2 cache if they fit.
        """
        if not self._sets:
            inputs = [self._filled(spec, number) for number, spec in enumerate(self._inputs)]
            self._sets.append((inputs, [self._allocate(spec) for spec in self._outputs]))
        first, outputs = self._sets[0]
        while len(self._sets) < count:
            number = len(self._sets) * len(self._inputs)
            inputs = [
                self._filled(spec, number + i) if spec.constant else first[i] for i, spec in enumerate(self._inputs)
            ]
            self._sets.append((inputs, outputs))
        self._stream.synchronize()  # kernels that start early could read constants before they are filled
        return self._sets[:count]

    def _swapped(self, memory: Buffers) -> Buffers:
        """Return the buffers for every second run: inputs and outputs of the same type and shape are swapped."""
        inputs, outputs = map(list, memory)
        for output, source in self._chained:
            inputs[source], outputs[output] = outputs[output], inputs[source]
        return inputs, outputs

    def _allocate(self, spec: TensorSpec) -> Any:
        """Allocate a tensor; if `spec` is not aligned, the tensor begins one element after an aligned address."""
        return self._pool.malloc(size_of(spec) + 16) + (0 if spec.aligned else itemsize(spec))

    def _filled(self, spec: TensorSpec, number: int) -> Any:
        """Allocate a tensor of normally distributed values, random booleans or equal integers.

        Tensors with different `number`s get different values.  All integers equal `spec.drawn`, a number that is valid
        if they are indices or lengths.  The values of constant matrices and filters are so small that products and
        convolutions keep the magnitude of their inputs.  Larger ones would make values infinite, because each run reads
        outputs of the run before, and kernels take other branches for infinite values.
        """
        buffer, size = self._allocate(spec), size_of(spec)
        if spec.dtype not in TOLERANCE and spec.dtype != "bool":
            buffer.memset_async(0, size, self._stream)
            if spec.drawn:
                equal = self._cupy.asarray(np.full(spec.shape, spec.drawn, spec.dtype))
                buffer.copy_from_device_async(equal.data, size, self._stream)
            return buffer
        values = self._random_values(spec.dtype, _terms(spec) if spec.constant else 1)
        offset, start = 0, number * 7919 * values.itemsize
        while offset < size:
            start %= values.nbytes
            count = min(size - offset, values.nbytes - start)
            (buffer + offset).copy_from_device_async(values.data + start, count, self._stream)
            offset, start = offset + count, start + count
        return buffer

    def _random_values(self, dtype: str, terms: int) -> Any:
        """Return RANDOM_VALUES normally distributed values on the GPU, divided by the square root of `terms`.

        A sum of `terms` products of these values with standard normal values then has variance one.
        """
        if (dtype, terms) not in self._random:
            values = np.random.default_rng(0).standard_normal(RANDOM_VALUES) / math.sqrt(terms)
            host = values > 0 if dtype == "bool" else values.astype(NUMPY_DTYPES.get(dtype, dtype))
            self._random[dtype, terms] = self._cupy.asarray(host.view(np.uint16) if dtype in NUMPY_DTYPES else host)
        return self._random[dtype, terms]

    def _array(self, buffer: Any, spec: TensorSpec) -> Any:
        """Copy a buffer to an array; bfloat16 becomes float32, and float8, which CuPy lacks, its bytes."""
        if spec.dtype not in NUMPY_DTYPES:
            dtype = "uint8" if spec.dtype.startswith("float8") else spec.dtype
            return self._cupy.ndarray(spec.shape, dtype, buffer).copy()
        bits = self._cupy.ndarray(spec.shape, np.uint16, buffer)
        return (bits.astype(np.uint32) << 16).view(np.float32)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Make the GPU, the stream and the memory pool current; see `relaxed` for captures of other threads."""
        with self._cupy.cuda.Device(self._device.ordinal), relaxed():
            if not hasattr(self, "_stream"):
                yield
                return
            with self._stream, self._cupy.cuda.using_allocator(self._pool.malloc):
                yield


def _chained(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Iterator[tuple[int, int]]:
    """Yield index pairs (output, input): the next run can read this output as this input."""
    free = [i for i, spec in enumerate(inputs) if not spec.constant]
    for number, output in enumerate(outputs):
        candidates = ((inputs[i].shape, inputs[i].dtype, inputs[i].aligned) for i in free)
        same = [(output.shape, output.dtype, output.aligned) == each for each in candidates]
        if any(same):
            yield number, free.pop(same.index(True))


def _terms(constant: TensorSpec) -> int:
    """Return how many products a sum over a constant matrix or filter has; 1 for vectors.

    The largest axis of a filter is assumed to be its output channels.  This is right where it matters: if a run reads
    the output of the run before, both have the same shape, so there are as many output channels as input channels, or
    one filter for each channel.
    """
    if len(constant.shape) < 2:
        return 1
    largest = max(1, *constant.shape)
    return largest if len(constant.shape) == 2 else max(1, math.prod(constant.shape) // largest)


def _runs(sets: Sequence[Buffers]) -> int:
    """Return how many runs of a plan a CUDA graph has: an even number, because every second run has swapped buffers."""
    return max(MIN_LAUNCHES_PER_GRAPH, len(sets) + len(sets) % 2)


def itemsize(spec: TensorSpec) -> int:
    """Return the bytes of an element; 1 for dtypes of fewer than 8 bits."""
    return int(np.dtype(getattr(ml_dtypes, spec.dtype, spec.dtype)).itemsize)


def size_of(spec: TensorSpec) -> int:
    """Return the bytes of a tensor."""
    return math.prod(spec.shape) * itemsize(spec)


def array_difference(xp: Any, right: Any, found: Any, tolerance: float) -> str | None:
    """Return how an array differs from the expected one by more than rounding; None if it does not.

    xp         the arrays' module, NumPy or CuPy
    tolerance  how far an element may be off, relative to its value plus the root mean square of all elements
    """
    if not right.size:
        return None
    wrong = right != found
    if tolerance:
        dtype = xp.float64 if right.dtype == xp.float64 else xp.float32
        finite = xp.isfinite(right) & xp.isfinite(found)
        a, b = (xp.where(finite, each, 0).astype(dtype) for each in (right, found))
        near = xp.abs(a - b) <= tolerance * (xp.abs(a) + xp.sqrt(xp.mean(a**2)))
        wrong &= ~((finite & near) | (xp.isnan(right) & xp.isnan(found)))
    if not (count := int(wrong.sum())):
        return None
    first = int(wrong.reshape(-1).argmax())
    pair = f"{found.reshape(-1)[first]} where {right.reshape(-1)[first]} is right"
    return f"differs in {count} of {right.size} elements, at {first} it is {pair}"


@contextmanager
def relaxed() -> Iterator[None]:
    """Allow this thread to allocate and synchronize while another thread captures a CUDA graph."""
    mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
    exchange = ctypes.CDLL(libcuda()).cuThreadExchangeStreamCaptureMode
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
