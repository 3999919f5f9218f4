"""Read 64-bit words and strings in order, each checked against the values that are allowed for it."""

from __future__ import annotations

import struct
from typing import Final

WORD: Final = 8  # bytes


class WordReader:
    """Reads words of some data; every method raises ValueError if its words are missing or not allowed."""

    def __init__(self, data: bytes) -> None:
        """Begin at the first word."""
        self._data, self._at = memoryview(data), 0

    @property
    def position(self) -> int:
        """How many bytes have been read."""
        return self._at

    @property
    def at_end(self) -> bool:
        """Whether all data has been read."""
        return self._at == len(self._data)

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        return bytes(self._view(size))

    def words(self, count: int) -> tuple[int, ...]:
        """Return the next `count` words."""
        return struct.unpack(f"<{count}q", self._view(count * WORD))

    def skip(self, count: int) -> None:
        """Skip the next `count` words."""
        self._view(count * WORD)

    def word(self) -> int:
        """Return the next word."""
        return self.words(1)[0]

    def count(self, what: str) -> int:
        """Return the number of items that follow; each takes at least one byte."""
        count = self.word()
        if not 0 <= count <= len(self._data) - self._at:
            raise ValueError(f"the number of {what} is {count}")
        return count

    def index(self, what: str, of: int) -> int:
        """Return a word from 0 to `of` - 1."""
        index = self.word()
        if not 0 <= index < of:
            raise ValueError(f"{what} is {index}, required 0 to {of - 1}")
        return index

    def string(self, what: str) -> bytes:
        """Return the next string of bytes, which is preceded by its length and padded to whole words."""
        size = self.count(f"bytes of {what}")
        found = self.take(size)
        self._view(-size % WORD)
        return found

    def text(self, what: str) -> str:
        """Return the next string as text."""
        return self.string(what).decode()

    def _view(self, size: int) -> memoryview:
        if self._at + size > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, {size} bytes from {self._at} on are missing")
        self._at += size
        return self._data[self._at - size : self._at]
