"""Read a model without the values of its weights, because a session's runtime reads the weights itself.

A protobuf field is a tag, which holds its number and wire type, followed by its content; a nested message is content
after a length prefix (https://protobuf.dev/programming-guides/encoding).  So a reader can skip the values of
initializers without understanding the other fields.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import onnx
from google.protobuf.message import DecodeError

from onnxfuse.ir.read import PROTOBUF_LIMIT, read

LARGE: Final = 1024  # bytes; smaller tensors keep their values, because these can be shapes
GRAPH, INITIALIZER = 7, 5  # field numbers: `graph` in ModelProto, `initializer` in GraphProto
# Field numbers of TensorProto's values: float_data to uint64_data, and raw_data.
VALUES: Final = frozenset({4, 5, 6, 7, 9, 10, 11})
IS_EXTERNAL: Final = b"\x70\x01"  # the encoded field data_location = EXTERNAL
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # protobuf wire types


def read_without_weights(source: str | os.PathLike[str] | bytes) -> onnx.ModelProto:
    """Return a model whose large initializers have no values: they are marked external, without a file name.

    Raises ModelError if the source does not hold a model.
    """
    model = onnx.ModelProto()
    with suppress(OSError, ValueError, DecodeError):
        if isinstance(source, bytes):
            model.ParseFromString(_light(io.BytesIO(source)))
        elif Path(source).is_file():
            with Path(source).open("rb") as stream:
                model.ParseFromString(_light(stream))
    return model if model.HasField("graph") else read(source)  # `read` raises an error that names the fault


def _light(stream: BinaryIO) -> bytes:
    """Return a model's bytes without the values of its large initializers.  Raises ValueError if it is malformed."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    return _Message(stream).copy(size, (GRAPH, INITIALIZER)) if size <= PROTOBUF_LIMIT else b""


class _Message:
    """A reader that copies a protobuf message from a stream, field by field."""

    def __init__(self, stream: BinaryIO) -> None:
        """Start at the beginning of a stream."""
        self._stream, self._at = stream, 0

    def copy(self, end: int, path: tuple[int, ...]) -> bytes:
        """Return the message that ends at `end`; large tensors at the field path `path` lose their values.

        Raises ValueError if it is malformed.
        """
        found = []
        while self._at < end:
            tag = self._varint()
            number, kind = tag >> 3, tag & 7
            if kind == LENGTH:
                size = self._varint()
                if path and number == path[0]:
                    content = self._tensor(size) if len(path) == 1 else self.copy(self._at + size, path[1:])
                else:
                    content = self._bytes(size)
                found += [_varint(tag), _varint(len(content)), content]
            else:
                found += [_varint(tag), self._scalar(kind)]
        self._require_end(end)
        return b"".join(found)

    def _tensor(self, size: int) -> bytes:
        end = self._at + size
        if size <= LARGE:
            return self._bytes(size)
        found = []
        while self._at < end:
            tag = self._varint()
            number, kind = tag >> 3, tag & 7
            length = self._varint() if kind == LENGTH else 0
            if number in VALUES and kind == LENGTH:
                self._at = self._stream.seek(length, io.SEEK_CUR)
                continue
            content = _varint(length) + self._bytes(length) if kind == LENGTH else self._scalar(kind)
            if number not in VALUES:
                found += [_varint(tag), content]
        self._require_end(end)
        return b"".join([*found, IS_EXTERNAL])

    def _require_end(self, end: int) -> None:
        if self._at != end:
            raise ValueError("a field ends after its message")

    def _scalar(self, kind: int) -> bytes:
        if kind == VARINT:
            return _varint(self._varint())
        if kind not in (FIXED64, FIXED32):
            raise ValueError(f"wire type {kind}")
        return self._bytes(8 if kind == FIXED64 else 4)

    def _bytes(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise ValueError("the message is cut off")
        self._at += size
        return data

    def _varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self._bytes(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value


def _varint(value: int) -> bytes:
    """Return the varint encoding of a nonnegative number: seven bits per byte, lowest bits first."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
