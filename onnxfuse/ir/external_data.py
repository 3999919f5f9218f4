"""Find and read the values that a tensor keeps in another file; only plain files in the model's folder are read."""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from onnxfuse.errors import ModelError, shortened
from onnxfuse.ir.validate import size_of


def external_range(tensor: onnx.TensorProto, folder: Path | None) -> tuple[Path, int, int]:
    """Return (file, offset, length) of an external tensor.  Raises ModelError unless the file contains that range."""
    what = f"the external data of tensor '{tensor.name}'"
    if folder is None:
        raise ModelError(f"{what} lies in a file; give the model as a path, so that the file can be found")
    fields = _fields(tensor)
    location = fields.get("location", "")
    try:
        path, status = _external_file(what, folder, location)
    # The errors mean that the name is too long or has a zero byte, or that links form a cycle.
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{what} is at {shortened(location)!r}, which cannot be a file: {reason}; export the model "
                         "again") from error  # fmt: skip
    size = size_of(tensor)
    try:
        offset, length = int(fields.get("offset", 0)), int(fields.get("length", size))
    except ValueError as error:
        raise ModelError(f"{what} has an offset or a length that is not a number; export the model again") from error
    if offset < 0 or length != size:
        raise ModelError(f"{what} has offset {offset} and {length} bytes; its dtype and shape require {size} bytes")
    if status.st_size < offset + size:
        raise ModelError(
            f"{what} is too short: '{path}' has {status.st_size:,} bytes, {offset + size:,} are needed; "
            "copy or export it again"
        )
    return path, offset, size


def state_range(tensor: onnx.TensorProto, offset: int, length: int) -> None:
    """Write offset and length of external data into the tensor, and drop all other fields but the location.

    Without a length, onnx reads to the end of the file; onnxruntime refuses checksums and fields that appear twice.
    """
    location = _fields(tensor).get("location", "")
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def with_values(tensor: onnx.TensorProto, folder: Path | None) -> onnx.TensorProto:
    """Return a copy of an external tensor that holds its values.  Raises ModelError as `external_range` does.

    onnx's own reader is not used: it refuses some valid file names, such as names with a backslash.
    """
    path, offset, length = external_range(tensor, folder)
    with path.open("rb") as file:
        file.seek(offset)
        raw = file.read(length)
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=raw)


def _fields(tensor: onnx.TensorProto) -> dict[str, str]:
    return {each.key: each.value for each in tensor.external_data}


def _external_file(what: str, folder: Path, location: str) -> tuple[Path, os.stat_result]:
    """Return an external file and its status.  Raises ModelError unless it is a plain file in the model's folder."""
    path = folder / location
    inside = not Path(location).is_absolute() and ".." not in Path(location).parts
    if not (inside and path.parent.resolve().is_relative_to(folder.resolve())):
        raise ModelError(f"{what} is at '{location}', outside the model's folder; move it beside the model")
    if not path.exists():
        raise ModelError(f"{what} is missing: '{path}' does not exist; copy it there, or export the model again")
    status = path.lstat()
    if path.is_symlink() or not path.is_file() or status.st_nlink > 1:  # onnx refuses to read such files
        raise ModelError(f"{what}, '{path}', is a link or no plain file; replace it by a copy (cp --dereference)")
    return path, status
