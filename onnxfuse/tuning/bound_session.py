"""Sessions of onnxruntime whose inputs and outputs stay on the device between runs."""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

import ml_dtypes
import numpy as np
import onnx

from onnxfuse.errors import NO_ONNXRUNTIME, MissingPackageError, OnnxfuseError, UsageError, VerificationError
from onnxfuse.steps import Progress

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingPackageError(f"{NO_ONNXRUNTIME} ({error})") from error

from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.save import save, serialize
from onnxfuse.runtime.plain_session import plain_session
from onnxfuse.runtime.start_provider import ProviderOptions
from onnxfuse.tuning.dispatch import SessionSettings
from onnxfuse.verify.ort_session import from_ort_value, to_ort_value

Value: TypeAlias = Array | ort.OrtValue
Provider: TypeAlias = Literal["cpu", "cuda"]
PROVIDERS: Final[Mapping[Provider, str]] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
NO_NUMPY_DTYPE: Final = ("float8", "float4", "int4", "int2")  # element types that OrtValue.numpy does not convert
WARM_UP_RUNS: Final = 3  # with CUDA graphs, the first of them runs the model twice and captures it
ProvidersWithOptions = Sequence[tuple[str, Mapping[str, str]]]
Open = Callable[[str | bytes, ort.SessionOptions, ProvidersWithOptions], ort.InferenceSession]


class OpenFused(Protocol):
    """The type of `onnxfuse.session.open_session`; its `settings` say which fused nodes run as kernels."""

    def __call__(
        self, path_or_bytes: str | bytes, sess_options: ort.SessionOptions, providers: ProvidersWithOptions, /,
        *, settings: SessionSettings,
    ) -> ort.InferenceSession:  # fmt: skip
        """Open the session."""
        ...


@dataclass(frozen=True)
class TimedModel:
    """A model that is measured, with its inputs and its provider."""

    model: onnx.ModelProto
    folder: Path | None  # the folder of its external data
    feeds: Mapping[str, Value]
    provider: Provider
    open_fused: OpenFused  # opens sessions that run kernels: onnxfuse.session.open_session
    options: ProviderOptions = field(default_factory=dict)  # provider options: device_id, use_tf32, …
    progress: Progress = lambda stage, done, of: None

    @property
    def ordinal(self) -> int:
        """The number of the GPU."""
        return ordinal_of(self.options)

    def start(self, settings: SessionSettings | None = None, *, cuda_graph: bool = False) -> ort.InferenceSession:
        """Start a session; without `settings`, all fused nodes run as ONNX functions in plain onnxruntime."""
        options = {**self.options, **({"enable_cuda_graph": 1} if cuda_graph else {})}
        open_session = partial(self.open_fused, settings=settings) if settings else None
        return start_session(self.model, self.folder, self.provider, open_session, options=options)

    def bind(
        self,
        session: ort.InferenceSession,
        shapes: Mapping[str, Sequence[int]] | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> BoundSession:
        """Bind a session of the model to the inputs of this object, as the function `bind` does."""
        return bind(session, self.feeds, self.provider, shapes, self.ordinal, buffers)


def ordinal_of(options: ProviderOptions) -> int:
    """Return the number of the GPU that these options name, 0 if they name none."""
    return int(str(options.get("device_id", 0)))


def default_provider() -> Provider:
    """Return "cuda" where this onnxruntime has CUDA, else "cpu"."""
    return "cuda" if PROVIDERS["cuda"] in ort.get_available_providers() else "cpu"


def start_session(
    model: onnx.ModelProto,
    folder: Path | None,
    provider: Provider,
    open_session: Open | None = None,
    *,
    options: ProviderOptions | None = None,
) -> ort.InferenceSession:
    """Start a session on one provider; the CPU runs operators for which CUDA has no kernel.

    folder        the folder with the model's external data
    open_session  makes the session; by default onnxruntime.InferenceSession
    options       options of the provider

    External data is read from its files; only a model of more than 2 GiB is written to a temporary file.
    Raises UsageError if onnxruntime lacks the provider, OnnxfuseError if the provider does not start, and passes on
    onnxruntime's errors.
    """
    check_available(provider)
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    providers = [(PROVIDERS[provider], {name: str(value) for name, value in (options or {}).items()})]
    session = _start(model, folder, settings, providers, open_session or plain_session)
    if session.get_providers()[0] != PROVIDERS[provider]:
        raise OnnxfuseError(
            f"{PROVIDERS[provider]} does not start; check the NVIDIA driver, and that onnxruntime finds CUDA and cuDNN"
        )
    return session


def _start(
    model: onnx.ModelProto,
    folder: Path | None,
    settings: ort.SessionOptions,
    providers: ProvidersWithOptions,
    make: Open,
) -> ort.InferenceSession:
    with _without_output_shapes(model):
        content = serialize(model)
        if content is None:
            with tempfile.TemporaryDirectory() as scratch:
                save(model, path := Path(scratch, "model.onnx"), folder=folder)
                return make(str(path), settings, providers)
    if folder is not None:
        weights = str(folder.resolve())
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", weights)
    return make(content, settings, providers)


@contextlib.contextmanager
def _without_output_shapes(model: onnx.ModelProto) -> Iterator[None]:
    """Leave out the shapes that the model records for its outputs.

    If one of them is wrong, onnxruntime runs the model, but refuses to write the output to memory of its real shape.
    """
    tensors = [each.type.tensor_type for each in model.graph.output if each.type.HasField("tensor_type")]
    shapes = [onnx.TensorShapeProto.FromString(each.shape.SerializeToString()) for each in tensors]
    had = [each.HasField("shape") for each in tensors]
    for each in tensors:
        each.ClearField("shape")
    try:
        yield
    finally:
        for each, shape, was_there in zip(tensors, shapes, had, strict=True):
            if was_there:
                each.shape.CopyFrom(shape)


def check_available(provider: Provider) -> None:
    """Raise UsageError unless this onnxruntime has the provider."""
    available = ort.get_available_providers()
    if PROVIDERS[provider] not in available:
        raise UsageError(
            f"this onnxruntime has no {PROVIDERS[provider]}, only {', '.join(available)}; "
            "pip install 'onnxruntime-gpu[cuda,cudnn]', or give --provider cpu"
        )
    if provider == "cuda":
        _preload()


@functools.cache
def _preload() -> None:
    """Make onnxruntime load the CUDA libraries that are installed as Python packages."""
    with contextlib.redirect_stdout(None):  # onnxruntime prints the libraries that it does not find
        ort.preload_dlls()


@dataclass(frozen=True)
class BoundSession:
    """A session with the memory of its inputs and outputs."""

    session: ort.InferenceSession
    binding: ort.IOBinding
    provider: Provider

    def run(self) -> None:
        """Run the model and wait until its outputs are written."""
        self.session.run_with_iobinding(self.binding)
        if self.provider == "cuda":
            self.binding.synchronize_outputs()

    def warm_up(self) -> BoundSession:
        """Run the model a few times, because first runs are slower, and return the session."""
        for _ in range(WARM_UP_RUNS):
            self.run()
        return self

    def values(self) -> dict[str, ort.OrtValue]:
        """Return the outputs of the last run, on the device."""
        names = dict.fromkeys(o.name for o in self.session.get_outputs())  # a graph may list an output twice
        return dict(zip(names, self.binding.get_outputs(), strict=True))

    def outputs(self) -> dict[str, Array]:
        """Return the outputs of the last run as NumPy arrays."""
        return {name: to_numpy(value) for name, value in self.values().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the outputs that are tensors."""
        return {name: tuple(value.shape()) for name, value in self.values().items() if value.is_tensor()}


def bind(
    session: ort.InferenceSession,
    feeds: Mapping[str, Value],
    provider: Provider,
    shapes: Mapping[str, Sequence[int]] | None = None,
    ordinal: int = 0,
    buffers: Mapping[str, str] | None = None,
) -> BoundSession:
    """Bind a session to memory for its inputs and outputs; each input is copied once to the device that reads it.

    Outputs with a shape in `shapes` are allocated here, the others by the first run; later runs write to the same
    memory. Outputs with the same name in `buffers` share memory, which holds the output that was written last.
    Raises OnnxfuseError for an input that `feeds` lacks.
    """
    shared: dict[str, ort.OrtValue] = {}
    binding = session.io_binding()
    for each in session.get_inputs():
        if each.name not in feeds:
            raise OnnxfuseError(f"it has an input '{each.name}', which the model does not have")
        value = feeds[each.name]
        binding.bind_ortvalue_input(each.name, to_ort_value(value) if isinstance(value, np.ndarray) else value)
    for each in session.get_outputs():
        if shapes and each.name in shapes and each.type.startswith("tensor("):
            buffer = (buffers or {}).get(each.name, each.name)
            if buffer not in shared:
                shared[buffer] = _empty(shapes[each.name], each.type, provider, ordinal)
            binding.bind_ortvalue_output(each.name, shared[buffer])
        else:
            binding.bind_output(each.name, provider, ordinal)
    return BoundSession(session, binding, provider)


def _empty(shape: Sequence[int], kind: str, provider: Provider, ordinal: int) -> ort.OrtValue:
    """Allocate a tensor of a type that onnxruntime calls `kind`, such as tensor(float16)."""
    dtype = onnx.TensorProto.DataType.Value(kind[len("tensor(") : -1].upper())
    return ort.OrtValue.ortvalue_from_shape_and_type(list(shape), dtype, provider, ordinal)


def check_outputs(session: ort.InferenceSession) -> None:
    """Raise VerificationError if the dtype of an output cannot be converted to NumPy, and so cannot be compared."""
    for each in session.get_outputs():
        if not each.type.startswith("tensor(") or any(kind in each.type for kind in NO_NUMPY_DTYPE):
            raise VerificationError(f"output '{each.name}' is a {each.type}, of which numpy makes no array to compare")


def to_numpy(value: ort.OrtValue) -> Array:
    """Copy a value on any device to a NumPy array, also bfloat16, which onnxruntime itself does not convert."""
    if value.data_type() != "tensor(bfloat16)" or value.device_name() == "cpu":
        return from_ort_value(value)
    import cupy

    result = np.empty(value.shape(), ml_dtypes.bfloat16)
    cupy.cuda.runtime.memcpy(result.ctypes.data, value.data_ptr(), result.nbytes, 2)  # cudaMemcpyDeviceToHost
    return result


def size_of_value(value: ort.OrtValue) -> int:
    """Return the bytes of an OrtValue that is a tensor."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.element_type())
    return int(math.prod(value.shape()) * dtype.itemsize)
