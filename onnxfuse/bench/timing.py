"""Sessions whose inputs and outputs stay on the device, and how long one run of them takes."""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.errors import OnnxfuseError, UsageError, VerificationError
from onnxfuse.model.save import save, serialize
from onnxfuse.provider.preferences import Tune
from onnxfuse.verify.session import _from_ort, _to_ort, first_line

Array: TypeAlias = NDArray[Any]
Provider: TypeAlias = Literal["cpu", "cuda"]
PROVIDERS: Mapping[str, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
UNKNOWN_TO_NUMPY = "float8", "float4", "int4", "int2"  # in OrtValue.numpy
WARM_UP = 3  # runs; with CUDA graphs the first one also runs twice and captures
SMALLEST_COPY, LARGEST_COPY = 64 * 2**20, 2**30  # bytes moved: less measures launches, more changes nothing


@dataclass(frozen=True)
class Spread:
    """Seconds of a run: median and quartiles."""

    median: float
    q1: float
    q3: float
    least: float
    runs: int

    def to_json(self) -> dict[str, float | int]:
        """In milliseconds."""
        names = {"median_ms": self.median, "q1_ms": self.q1, "q3_ms": self.q3, "min_ms": self.least}
        return {**{name: round(1e3 * value, 5) for name, value in names.items()}, "runs": self.runs}


def spread(seconds: Sequence[float]) -> Spread:
    """The middle of these times, and how far they lie apart."""
    if len(seconds) < 2:
        return Spread(seconds[0], seconds[0], seconds[0], seconds[0], 1)
    q1, median, q3 = statistics.quantiles(seconds, n=4, method="inclusive")
    return Spread(median, q1, q3, min(seconds), len(seconds))


def interleaved(
    runs: Sequence[Callable[[], None]], count: int, before: Callable[[], None] = lambda: None
) -> list[Spread]:
    """Time each of them `count` times in turns, so that clocks that change and noise meet all of them alike.

    `before` precedes every run, untimed.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(count):
        for step in range(len(runs)):
            which = (turn + step) % len(runs)
            before()
            start = time.perf_counter()
            runs[which]()
            seconds[which].append(time.perf_counter() - start)
    return [spread(each) for each in seconds]


def runs_within(seconds: float, run: Callable[[], None], least: int = 10, most: int = 200) -> int:
    """How many runs take about so many seconds."""
    start = time.perf_counter()
    run()
    return max(least, min(most, int(seconds / max(time.perf_counter() - start, 1e-6))))


# --- sessions --------------------------------------------------------------------------------------------------------


def default_provider() -> Provider:
    """CUDA where this onnxruntime has it."""
    import onnxruntime

    return "cuda" if PROVIDERS["cuda"] in onnxruntime.get_available_providers() else "cpu"


def start(
    model: onnx.ModelProto,
    folder: Path | None,
    provider: Provider,
    *,
    kernels: bool = False,
    tune: Tune = "cached",
    prefer: Callable[..., Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A session on this provider only (CUDA falls back on the CPU for what it lacks), with these provider options.

    kernels  let fused nodes run as kernels, as `tune` says (see onnxfuse.InferenceSession)
    prefer   let them run as kernels where this says so; of `tune` it counts only whether candidates may be timed

    Raises OnnxfuseError where the provider does not start, and whatever onnxruntime raises.
    """
    import onnxruntime

    check_available(provider)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    providers = [(PROVIDERS[provider], {name: str(value) for name, value in (options or {}).items()})]
    session = _started(model, folder, settings, providers, _maker(tune, kernels, prefer))
    if session.get_providers()[0] != PROVIDERS[provider]:
        raise OnnxfuseError(f"{PROVIDERS[provider]} does not start; check the driver, and where CUDA and cuDNN are")
    return session


def _maker(tune: Tune, kernels: bool, prefer: Callable[..., Any] | None) -> Callable[..., Any]:
    """What makes the session."""
    import onnxruntime

    from onnxfuse.provider.session import InferenceSession, open_session

    if prefer:
        return functools.partial(open_session, prefer=prefer, measure=tune != "never")
    made: Callable[..., Any] = onnxruntime.InferenceSession
    return functools.partial(InferenceSession, tune=tune) if kernels else made


def _started(
    model: onnx.ModelProto, folder: Path | None, settings: Any, providers: list[Any], make: Callable[..., Any]
) -> Any:
    """Weights in files are read in place; only a model over 2 GiB is written to a file."""
    content = serialize(model)
    if content is None:
        with tempfile.TemporaryDirectory() as scratch:
            save(model, path := Path(scratch, "model.onnx"), folder=folder)
            return make(str(path), settings, providers)
    if folder is not None:
        place = str(folder.resolve())
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", place)
    return make(content, settings, providers)


def check_available(provider: Provider) -> None:
    """Raise UsageError where this onnxruntime lacks the provider."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if PROVIDERS[provider] not in available:
        raise UsageError(
            f"this onnxruntime has no {PROVIDERS[provider]}, only {', '.join(available)}; "
            "pip install 'onnxfuse[cuda]', or give --provider cpu"
        )
    if provider == "cuda":
        _preload()


@functools.cache
def _preload() -> None:
    """Let onnxruntime find the CUDA libraries of the Python packages."""
    import onnxruntime

    with contextlib.redirect_stdout(None):  # it prints what it does not find
        onnxruntime.preload_dlls()


@dataclass(frozen=True)
class Bound:
    """A session, and the places of its inputs and outputs."""

    session: Any
    binding: Any
    provider: Provider

    def run(self) -> None:
        """One run, to its end."""
        self.session.run_with_iobinding(self.binding)
        if self.provider == "cuda":
            self.binding.synchronize_outputs()

    def values(self) -> dict[str, Any]:
        """The outputs of the last run, where they are."""
        names = dict.fromkeys(o.name for o in self.session.get_outputs())  # a graph may list an output twice
        return dict(zip(names, self.binding.get_outputs(), strict=True))

    def outputs(self) -> dict[str, Any]:
        """The outputs of the last run, copied to numpy."""
        return {name: to_numpy(value) for name, value in self.values().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs that are tensors."""
        return {name: tuple(value.shape()) for name, value in self.values().items() if value.is_tensor()}


def bind(
    session: Any,
    feeds: Mapping[str, Any],
    provider: Provider,
    shapes: Mapping[str, Sequence[int]] | None = None,
    ordinal: int = 0,
    places: Mapping[str, str] | None = None,
) -> Bound:
    """Give a session its inputs, arrays or OrtValues, each copied once to where its readers are.

    Outputs of known shape are allocated here, the others by the first run; later runs write to the same place.
    Outputs for which `places` has the same name share their memory; so each of them holds what was written last.
    """
    shared: dict[str, Any] = {}
    binding = session.io_binding()
    for each in session.get_inputs():
        if each.name not in feeds:
            raise OnnxfuseError(f"it has an input '{each.name}', which the model does not have")
        value = feeds[each.name]
        binding.bind_ortvalue_input(each.name, _to_ort(value) if isinstance(value, np.ndarray) else value)
    for each in session.get_outputs():
        if shapes and each.name in shapes and each.type.startswith("tensor("):
            name = (places or {}).get(each.name, each.name)
            if name not in shared:
                shared[name] = _empty(shapes[each.name], each.type, provider, ordinal)
            binding.bind_ortvalue_output(each.name, shared[name])
        else:
            binding.bind_output(each.name, provider, ordinal)
    return Bound(session, binding, provider)


def _empty(shape: Sequence[int], kind: str, provider: Provider, ordinal: int) -> Any:
    from onnxruntime import OrtValue

    dtype = onnx.TensorProto.DataType.Value(kind[len("tensor(") : -1].upper())
    return OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, provider, ordinal)


def check_outputs(session: Any) -> None:
    """Raise VerificationError for an output that no array can hold, so that it could not be compared."""
    for each in session.get_outputs():
        if not each.type.startswith("tensor(") or any(kind in each.type for kind in UNKNOWN_TO_NUMPY):
            raise VerificationError(f"output '{each.name}' is a {each.type}, of which numpy makes no array to compare")


def to_numpy(value: Any) -> Any:
    """A value on any device as an array; onnxruntime itself has no bfloat16 arrays."""
    if value.data_type() != "tensor(bfloat16)" or value.device_name() == "cpu":
        return _from_ort(value)
    import cupy

    result = np.empty(value.shape(), ml_dtypes.bfloat16)
    cupy.cuda.runtime.memcpy(result.ctypes.data, value.data_ptr(), result.nbytes, 2)  # cudaMemcpyDeviceToHost
    return result


def bytes_of(value: Any) -> int:
    """The size of an OrtValue that is a tensor."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.element_type())
    return int(math.prod(value.shape()) * dtype.itemsize)


# --- the device ------------------------------------------------------------------------------------------------------


def cache_eviction(provider: Provider, ordinal: int = 0) -> Callable[[], None]:
    """What fills a GPU's L2 cache with other memory, and waits for it; nothing on the CPU or without CuPy."""
    with contextlib.suppress(ImportError):
        if provider == "cuda":
            return _cuda_eviction(ordinal)
    return lambda: None


def _cuda_eviction(ordinal: int) -> Callable[[], None]:
    import cupy

    from onnxfuse.provider.compile import despite_disk

    with cupy.cuda.Device(ordinal) as device:
        size = 2 * device.attributes["L2CacheSize"]
        words = cupy.ndarray((size // 4,), cupy.uint32, cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0))

    def read() -> None:
        with cupy.cuda.Device(ordinal) as device:
            despite_disk(words.max)  # read, since what was written would have to go to memory while others are timed
            device.synchronize()

    return read


def copy_rate(provider: Provider, moved: int) -> float | None:
    """Bytes per second, read and written, of a copy that moves so many; None without CuPy on CUDA."""
    try:
        return _rate(provider, max(SMALLEST_COPY, min(LARGEST_COPY, moved)) // 2)
    except ImportError:
        return None


@functools.cache
def _rate(provider: Provider, count: int) -> float:
    seconds = _cuda_copy(count) if provider == "cuda" else _cpu_copy(count)
    return 2 * count / seconds


def _cpu_copy(count: int, repeats: int = 9) -> float:
    source, target = np.ones(count, np.uint8), np.zeros(count, np.uint8)
    return interleaved([lambda: np.copyto(target, source)], repeats)[0].median


def _cuda_copy(count: int, repeats: int = 25) -> float:
    import cupy

    source, target = cupy.ones(count, cupy.uint8), cupy.zeros(count, cupy.uint8)
    times: list[float] = []
    for _ in range(repeats):
        before, after = cupy.cuda.Event(), cupy.cuda.Event()
        before.record()
        target.data.copy_from_device_async(source.data, count, cupy.cuda.get_current_stream())
        after.record()
        after.synchronize()
        times.append(cupy.cuda.get_elapsed_time(before, after) / 1e3)
    del source, target
    cupy.get_default_memory_pool().free_all_blocks()
    return statistics.median(times)


def device(provider: Provider) -> dict[str, str]:
    """What the times were measured on."""
    if provider == "cpu":
        return {"name": _processor(), "driver": ""}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        name, _, driver = answer.strip().partition(", ")
    except (OSError, subprocess.SubprocessError) as error:
        name, driver = f"unknown ({first_line(error)})", ""
    return {"name": name, "driver": driver}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
