"""Writing model files: an output appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx.numpy_helper
from google.protobuf.message import EncodeError  # type: ignore[import-untyped, unused-ignore]
from onnx.external_data_helper import uses_external_data

from onnxfuse.errors import ModelError
from onnxfuse.model.files import LARGE, PROTOBUF_LIMIT, external_range, size_of
from onnxfuse.model.protos import swapped, tensors

PAGE = 4096  # runtimes map a tensor straight from the file when it starts on a page
CHUNK = 8 * 2**20


def save(model: onnx.ModelProto, path: str | os.PathLike[str], *, folder: Path | None = None) -> None:
    """Write the model whole or not at all; `path` may be the file that it was read from.

    Where tensors are external (relative to `folder`), or the model would exceed 2 GiB, their bytes and every
    initializer of at least 1 KiB go to one file `<path>.data` beside it.  `model` itself is not changed.
    Raises ModelError; then an output that existed before is as it was.
    """
    target = Path(path)
    _check_target(target)
    try:
        _write(model, target, folder)
    except OSError as error:
        raise ModelError(f"cannot write '{target}': {_reason(error, target)}") from error


def serialize(model: onnx.ModelProto) -> bytes | None:
    """The file's content; None where it would exceed what protobuf can write."""
    try:
        content = model.SerializeToString()
    except EncodeError:
        return None
    return content if len(content) <= PROTOBUF_LIMIT else None


def _check_target(target: Path) -> None:
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
    blob = target.with_name(f"{target.name}.data")
    new_blob, new_model = _temporary(blob), _temporary(target)
    try:
        outside = any(uses_external_data(t) for t in tensors(model.graph, *model.functions))
        content = None if outside else serialize(model)
        if content is None:
            with _create(new_blob, blob) as file:
                content = serialize(swapped(model, _mover(file, blob, target, folder)))
        if content is None:
            raise ModelError(f"cannot write '{target}': it exceeds 2 GiB even with its initializers in '{blob.name}'")
        with _create(new_model, target) as file:
            file.write(content)
        _publish(new_blob, blob, new_model, target)
    finally:
        new_blob.unlink(missing_ok=True)
        new_model.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def _create(new: Path, final: Path) -> Iterator[BinaryIO]:
    """A new file that is on the disk when the block ends, with the permissions of the one it will replace."""
    with new.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    if final.exists():
        shutil.copymode(final, new)


def _mover(
    file: BinaryIO, blob: Path, target: Path, folder: Path | None
) -> Callable[[onnx.TensorProto], onnx.TensorProto]:
    """A swap for `swapped` that appends values to the file; a range that several tensors share is copied once."""
    moved: dict[tuple[Path, int, int], int] = {}

    def move(tensor: onnx.TensorProto) -> onnx.TensorProto:
        if uses_external_data(tensor):
            place = external_range(tensor, folder)
            if not target.exists() and blob.exists() and place[0].samefile(blob):
                raise ModelError(f"cannot write '{target}': its weights would overwrite '{blob}', which another model "
                                 "reads; choose another name")  # fmt: skip
            if place not in moved:
                moved[place] = _page(file)
                _copy_range(place, file)
            return _external(tensor, blob.name, moved[place], place[2])
        if tensor.data_type == onnx.TensorProto.STRING or size_of(tensor) < LARGE:
            return tensor
        raw = tensor.raw_data or onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor)).raw_data
        start = _page(file)
        file.write(raw)
        return _external(tensor, blob.name, start, len(raw))

    return move


def _page(file: BinaryIO) -> int:
    """Fill the file up to the next page; the offset of what is written next."""
    file.write(b"\0" * (-file.tell() % PAGE))
    return file.tell()


def _copy_range(place: tuple[Path, int, int], file: BinaryIO) -> None:
    path, offset, left = place
    with path.open("rb") as source:
        source.seek(offset)
        while left:
            piece = source.read(min(left, CHUNK))
            if not piece:
                raise ModelError(f"'{path}' became shorter while it was copied; leave it alone and try again")
            file.write(piece)
            left -= len(piece)


def _external(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> onnx.TensorProto:
    result = onnx.TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, doc_string=tensor.doc_string,
        data_location=onnx.TensorProto.EXTERNAL,
    )  # fmt: skip
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        result.external_data.add(key=key, value=str(value))
    return result


def _publish(new_blob: Path, blob: Path, new_model: Path, target: Path) -> None:
    """Rename the data file, then the model; if that fails, the data file from before comes back."""
    kept, renaming = _temporary(blob), new_blob.exists()
    try:
        if renaming and blob.exists():
            blob.replace(kept)
        if renaming:
            new_blob.replace(blob)
        new_model.replace(target)
    except BaseException:
        if kept.exists():
            kept.replace(blob)
        elif renaming and not new_blob.exists():
            blob.unlink()
        raise
    kept.unlink(missing_ok=True)
