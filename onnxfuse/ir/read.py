"""Read model files without checking them; an error says what is wrong with a file, and how to correct it.

Sessions read models this way, so that this file imports nothing of onnxfuse's graphs.
"""

from __future__ import annotations

import os
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from onnxfuse.errors import ModelError, shortened
from onnxfuse.ir.protos import external_locations

PROTOBUF_LIMIT = 2**31 - 1
SIGNATURES = (  # (offset, bytes at that offset, kind of file)
    (0, b"\x89PNG", "a PNG image"),
    (4, b"ORTM", "a model in onnxruntime's own format (.ort), which is not read; give the ONNX file it was made from"),
    (0, b"PK\x03\x04", "a zip archive; a PyTorch checkpoint has to be exported with torch.onnx.export"),
    (0, b"\x89HDF", "an HDF5 file; a Keras model has to be converted with tf2onnx"),
    (0, b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with `git lfs pull`"),
    (0, b"<", "an HTML or XML page; the download went wrong"),
)


def read(source: str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    """Read a model without its external data and without checking it.  Raises ModelError if the file holds no model."""
    if isinstance(source, bytes):
        return _parse(source, "the model")
    path = Path(source)
    return _parse(_read(path), f"'{path}'")


def external_files(path: Path) -> list[Path]:
    """Return the existing files that hold external data of the model at `path`; none if no model can be read."""
    try:
        model = read(path)
    except ModelError:
        return []
    files = (path.resolve().parent / location for location in external_locations(model))
    return [file for file in files if _exists(file)]


def _exists(file: Path) -> bool:
    """Return whether a file exists; false for a name that no file can have, for example because it is too long."""
    try:
        return file.exists()
    except (OSError, ValueError):
        return False


def some_model(folder: Path) -> Path:
    """Return an ONNX file of a folder, or one that could be there."""
    return next(iter(sorted(folder.glob("*.onnx"))), folder / "model.onnx")


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise ModelError(f"'{path}' is a directory; expected an ONNX file, such as '{some_model(path)}'")
        if path.exists() and not path.is_file():  # for example a pipe, which can be read only once
            raise ModelError(f"'{path}' is a device or a pipe; expected an ONNX file: write the model to one first")
        if path.stat().st_size > PROTOBUF_LIMIT:
            raise ModelError(f"'{path}' is larger than 2 GiB, which no ONNX file can be; export with external data")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"'{path}' does not exist; give the path of an ONNX file") from error
    except PermissionError as error:
        raise ModelError(f"'{path}' cannot be read: no permission; change it with chmod +r") from error
    except (OSError, ValueError) as error:  # the name is too long, or has a zero byte
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"'{shortened(str(path))}' cannot be read: {reason}; expected an ONNX file") from error


def _parse(data: bytes, name: str) -> onnx.ModelProto:
    """Parse a model; it must contain a graph, because protobuf also accepts many bytes that are not a model."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
        if model.HasField("graph"):
            return model
    except DecodeError:
        pass
    if not data:
        raise ModelError(f"{name} is empty (0 bytes); expected an ONNX file")
    if data[0] == 0x08:  # tag of the field ir_version, with which every model begins
        raise ModelError(f"{name} is damaged or cut short at {len(data):,} bytes; export or download it again")
    kind = next((f": it looks like {kind}" for offset, text, kind in SIGNATURES if data.startswith(text, offset)), "")
    raise ModelError(f"{name} is not an ONNX file{kind}")
