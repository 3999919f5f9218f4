"""Write model files atomically: an output appears complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx.numpy_helper
from google.protobuf.message import EncodeError
from onnx.external_data_helper import uses_external_data

from onnxfuse.errors import ModelError
from onnxfuse.ir.external_data import external_range
from onnxfuse.ir.load import EXTERNAL_THRESHOLD
from onnxfuse.ir.plain_files import create, temporary
from onnxfuse.ir.protos import external_locations, external_tensors, has_external_data, replace_tensors
from onnxfuse.ir.read import PROTOBUF_LIMIT, read
from onnxfuse.ir.validate import size_of

PAGE_BYTES = 4096  # bytes; runtimes memory-map a tensor from the file if it starts at a page boundary
COPIED_BYTES = 8 * 2**20  # bytes that are copied at a time
TEMPORARY = re.compile(r"\.onnxfuse-[0-9a-f]{16}\.tmp")  # names of files that are being written


def save(model: onnx.ModelProto, path: str | os.PathLike[str], *, folder: Path | None = None) -> None:
    """Write the model completely or not at all; `path` can be the file it was read from.

    If tensors are external (relative to `folder`), or the model would exceed 2 GiB, a data file is written next to the
    model: `<path>.<digest of its content>.data`.  The data file holds the external tensors and every initializer of at
    least 1 KiB.

    The write takes effect by one rename, of the model file: if the program is killed at any time, either the old model
    and its data are there, or the new ones.  The old model's data file is removed last if it has a name of this form.
    It stays if another file in the folder, such as a copy of the old model, contains the data file's name.

    A symbolic link is followed.  `model` is not changed.  Raises ModelError if writing fails; an existing output is
    then unchanged.
    """
    target = Path(path)
    check_target(target)
    try:
        _write(model, Path(os.path.realpath(target)), folder)
    except OSError as error:
        raise ModelError(f"cannot write '{target}': {_reason(error, target)}") from error


def check_target(target: Path) -> None:
    """Raise ModelError if no model can be written to this path."""
    try:
        os.path.realpath(target)
        _check_target(target)
    # The errors mean that the name is too long or has a zero byte, or that links form a cycle.
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"cannot write '{target}': {reason}; choose another name") from error


def serialize(model: onnx.ModelProto) -> bytes | None:
    """Return the serialized model; None if it would exceed protobuf's limit."""
    try:
        content = model.SerializeToString()
    except EncodeError:
        return None
    return content if len(content) <= PROTOBUF_LIMIT else None


def _check_target(target: Path) -> None:
    if target.is_symlink() and not target.exists():
        target = target.resolve()  # a dangling link is followed to the path that it names
    if target.is_dir():
        raise ModelError(f"cannot write '{target}': it is a directory; give the name of a file")
    if not target.parent.is_dir():
        raise ModelError(f"cannot write '{target}': the folder '{target.parent}' does not exist; create it first")
    if target.exists() and not target.is_file():
        raise ModelError(f"cannot write '{target}': it is a device or a pipe; give the name of a file")
    if target.exists() and not os.access(target, os.W_OK):
        raise ModelError(f"cannot write '{target}': it is write-protected; choose another name or chmod +w it")


def _reason(error: OSError, target: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left in '{target.parent}'; free some, or write elsewhere"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to write in '{target.parent}'; choose another folder"
    return error.strerror or str(error)


def _write(model: onnx.ModelProto, target: Path, folder: Path | None) -> None:
    new_data, new_model = temporary(target), temporary(target)
    data: Path | None = None
    try:
        has_external = has_external_data(model)
        content = None if has_external else serialize(model)
        if content is None:
            with create(new_data, target) as file:
                stored = replace_tensors(model, _writer_of_tensors(file, folder))
            data = target.with_name(f"{target.name}.{_digest(new_data)}.data")
            _set_location(stored, data.name)
            content = serialize(stored)
        if content is None:
            raise ModelError(f"cannot write '{target}': it exceeds 2 GiB even without its initializers")
        with create(new_model, target) as file:
            file.write(content)
        with _locked(target.parent):
            _publish(new_data, data, new_model, target)
    finally:
        new_data.unlink(missing_ok=True)
        new_model.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    """Return a digest of the file's content, for its name."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=6)).hexdigest()


def _writer_of_tensors(file: BinaryIO, folder: Path | None) -> Callable[[onnx.TensorProto], onnx.TensorProto]:
    """Return a function that appends a tensor's values to the file, and returns a tensor that refers to the file.

    If several tensors share a range of a file, the range is copied once.
    """
    written: dict[tuple[Path, int, int], int] = {}  # (file, offset, length) in the old data -> offset in the new file

    def write(tensor: onnx.TensorProto) -> onnx.TensorProto:
        if uses_external_data(tensor):
            source = external_range(tensor, folder)
            if source not in written:
                written[source] = _pad_to_page(file)
                _copy_range(source, file)
            return _external(tensor, written[source], source[2])
        if tensor.data_type == onnx.TensorProto.STRING or size_of(tensor) < EXTERNAL_THRESHOLD:
            return tensor
        raw = tensor.raw_data or onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor)).raw_data
        start = _pad_to_page(file)
        file.write(raw)
        return _external(tensor, start, len(raw))

    return write


def _pad_to_page(file: BinaryIO) -> int:
    """Pad the file with zeros to the next page boundary, and return that offset."""
    file.write(b"\0" * (-file.tell() % PAGE_BYTES))
    return file.tell()


def _copy_range(source: tuple[Path, int, int], file: BinaryIO) -> None:
    path, offset, left = source
    with path.open("rb") as stream:
        stream.seek(offset)
        while left:
            piece = stream.read(min(left, COPIED_BYTES))
            if not piece:
                raise ModelError(f"'{path}' became shorter while it was copied; try again when no program changes it")
            file.write(piece)
            left -= len(piece)


def _external(tensor: onnx.TensorProto, offset: int, length: int) -> onnx.TensorProto:
    """Return a copy of a tensor whose values are external; `_set_location` sets the file's name later."""
    result = onnx.TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, doc_string=tensor.doc_string,
        data_location=onnx.TensorProto.EXTERNAL,
    )  # fmt: skip
    for key, value in (("location", ""), ("offset", offset), ("length", length)):
        result.external_data.add(key=key, value=str(value))
    return result


def _set_location(model: onnx.ModelProto, location: str) -> None:
    for tensor in external_tensors(model):
        tensor.external_data[0].value = location


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, so that one process at a time replaces models in it.

    Otherwise, one process could remove the old model's data just after another has written a model that uses the same
    data file.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such module, and cannot lock folders
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _publish(new_data: Path, data: Path | None, new_model: Path, target: Path) -> None:
    """Rename the new data file, then the new model, then remove data files that only the replaced model read.

    If renaming the model fails, the new data file is removed, unless it existed before.
    """
    unused = _data_files(target)
    unused = {path for path in unused if path != data and not _is_named(path, {target, new_data, new_model, *unused})}
    was_there = data is not None and data.exists()
    try:
        if data is not None:
            new_data.replace(data)
        new_model.replace(target)
    except BaseException:
        # After the model's rename, an interrupt must not remove its data.
        if data is not None and not was_there and new_model.exists():
            data.unlink(missing_ok=True)
        raise
    for old in unused:
        with contextlib.suppress(OSError):  # the new model is complete even if this fails
            old.unlink()


def _data_files(target: Path) -> set[Path]:
    """Return the data files that the model at the target reads, and that `save` named after the target.

    Files of other names are not returned: other tools wrote them, and other models can read them.
    """
    own = re.compile(re.escape(target.name) + r"\.[0-9a-f]{12}\.data")
    named = {path.name for path in target.parent.iterdir() if own.fullmatch(path.name)}
    if not named or not target.exists():
        return set()
    try:
        model = read(target)
    except ModelError:  # the replaced file is not a model, so it has no data files
        return set()
    return {target.with_name(name) for name in named & external_locations(model)}


def _is_named(data: Path, others: Collection[Path]) -> bool:
    """Return whether another file in the folder is possibly a model that reads this data file; skip the files `others`.

    A file counts if its bytes contain the data file's name, or if it cannot be read.  Temporary files of other
    processes do not count, because these write their own data.
    """
    for path in data.parent.iterdir():
        if path in others or TEMPORARY.fullmatch(path.name) or not path.is_file():
            continue
        try:
            if path.stat().st_size <= PROTOBUF_LIMIT and _contains(path, os.fsencode(data.name)):
                return True
        except FileNotFoundError:  # another process has removed the file meanwhile
            continue
        except OSError:
            return True
    return False


def _contains(path: Path, text: bytes) -> bool:
    with path.open("rb") as file:
        end = b""
        while piece := file.read(COPIED_BYTES):
            end += piece
            if text in end:
                return True
            end = end[-len(text) :]
    return False
