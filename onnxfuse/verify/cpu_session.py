"""Run a model in plain onnxruntime on the CPU, in a worker process if within a block of `own_process`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import onnx

from onnxfuse.errors import NO_ONNXRUNTIME_TO_COMPARE, NothingRunsError, VerificationError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.protos import has_external_data
from onnxfuse.ir.save import save, serialize
from onnxfuse.verify import ort_session
from onnxfuse.verify.own_process import BYTES_SENT, OnnxruntimeFailure, Stored, Worker, WorkerSession, current_worker

if TYPE_CHECKING:
    import onnxruntime as ort

    Session: TypeAlias = ort.InferenceSession | WorkerSession


@dataclass(frozen=True)
class Prepared:
    """A model that is serialized once, so that several sessions can be opened from it."""

    model: onnx.ModelProto
    folder: Path | None
    stored: Stored | None  # the model for a worker; None where models run in this process


def prepare(model: onnx.ModelProto, folder: Path | None) -> Prepared:
    """Serialize a model, so that sessions can be opened from it; external weights are read from `folder`."""
    worker = current_worker()
    return Prepared(model, folder, None if worker is None else _stored(worker, model, folder))


def open_session(model: onnx.ModelProto | Prepared, folder: Path | None = None, *, optimize: bool = True) -> Session:
    """Open a CPU session; external weights are read from `folder`.

    `optimize` lets onnxruntime optimize the graph, as it does by default.

    Raises VerificationError if onnxruntime is not installed or takes too long, and OnnxruntimeFailure for any error
    that onnxruntime raises for the model.
    """
    with _failures():
        prepared = model if isinstance(model, Prepared) else prepare(model, folder)
        worker = current_worker()
        if worker is not None and prepared.stored is not None:
            return WorkerSession(worker, prepared.stored, optimize)
        try:
            import onnxruntime  # noqa: F401
        except ImportError as error:
            raise NothingRunsError(f"{NO_ONNXRUNTIME_TO_COMPARE} ({first_line(error)})") from error
        content = serialize(prepared.model)
        if content is None:
            with tempfile.TemporaryDirectory() as scratch:
                save(prepared.model, path := Path(scratch, "model.onnx"), folder=prepared.folder)
                return ort_session.start(str(path), None, optimize)
        return ort_session.start(content, _text(prepared.folder), optimize)


@contextmanager
def _failures() -> Iterator[None]:
    """Convert any error of the `with` block, except VerificationError, to OnnxruntimeFailure."""
    try:
        yield
    except (OnnxruntimeFailure, VerificationError):
        raise
    except Exception as error:
        raise OnnxruntimeFailure(str(error) or type(error).__name__) from error


def input_of(name: str, value: Array, *, has_shape: bool = False) -> onnx.ValueInfoProto:
    """Return a graph input of the array's dtype and rank; its dims have any size or, if `has_shape`, the array's."""
    is_text = value.dtype.kind in "OUS"
    dtype = onnx.TensorProto.STRING if is_text else onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    return onnx.helper.make_tensor_value_info(name, dtype, value.shape if has_shape else [None] * value.ndim)


def _stored(worker: Worker, model: onnx.ModelProto, folder: Path | None) -> Stored:
    content = serialize(model)
    external = has_external_data(model)
    if content is not None and (external or len(content) <= BYTES_SENT):
        return Stored(content, _text(folder))
    path = worker.file_for(f"{worker.new_number()}.onnx")
    if content is None:
        save(model, path, folder=folder)
    else:
        path.write_bytes(content)
    return Stored(str(path), None)


def _text(folder: Path | None) -> str | None:
    return None if folder is None else str(folder.resolve())


def run(session: Session, feeds: Mapping[str, Array]) -> dict[str, object]:
    """Return the outputs by name.  Raises VerificationError and OnnxruntimeFailure as `open_session` does."""
    with _failures():
        if isinstance(session, WorkerSession):
            return session.run(feeds)
        # The arrays are copied, because a BatchNormalization in training mode writes its statistics into its inputs.
        return ort_session.run(session, {name: value.copy() for name, value in feeds.items()})
