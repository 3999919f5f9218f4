"""Send objects through a pipe: first the pickled object, then the bytes of large arrays, without copying these."""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO, Final

BEGINNING: Final = b"onnxfuse"


def send(stream: BinaryIO, content: object) -> None:
    """Write one object.  Raises OSError if nobody reads."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
    stream.write(BEGINNING + struct.pack(f"<{1 + len(parts)}Q", len(parts), *(part.nbytes for part in parts)))
    for part in parts:
        if part.nbytes:
            stream.write(part)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read one object.  Raises EOFError at the end of the stream, and if the bytes are not a message of `send`."""
    if _read(stream, len(BEGINNING)) != BEGINNING:
        raise EOFError
    (count,) = struct.unpack("<Q", _read(stream, 8))
    sizes = struct.unpack(f"<{count}Q", _read(stream, 8 * count))
    pickled, *buffers = [_read(stream, size) for size in sizes]
    return pickle.loads(pickled, buffers=buffers)


def _read(stream: BinaryIO, size: int) -> bytearray:
    result = bytearray(size)
    view, done = memoryview(result), 0
    while done < size:
        count = stream.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError
        done += count
    return result
