"""The bytes that the process has allocated and not freed, as glibc counts them: no arena, no page that was freed."""

from __future__ import annotations

import ctypes
import gc
import sys

import pytest


class _Mallinfo2(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def bytes_in_use() -> int:
    """Return the bytes that are allocated now; skips the test without glibc 2.33 or newer."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if mallinfo2 is None:
        pytest.skip("needs glibc 2.33")
    mallinfo2.restype = _Mallinfo2
    gc.collect()
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)
