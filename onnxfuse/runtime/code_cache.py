"""Cache machine code on disk, for all processes: one file per kernel, named by a digest of its source and flags."""

from __future__ import annotations

import hashlib
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

from onnxfuse.ir.plain_files import read_plain
from onnxfuse.runtime.cache_folder import cache_folder, is_trusted, make_folder, warn_once
from onnxfuse.runtime.nvrtc import arch_name, compile_cubin, compile_flags, compiler_version, identity
from onnxfuse.runtime.plan import Kernel

MAX_BYTES: Final = 2**28  # the size of the largest file that is read
DIGEST_BYTES: Final = 32  # size of the SHA-256 that precedes the code in a file, so that damage is noticed


def cached_cubin(kernel: Kernel, arch: int) -> bytes:
    """Return a kernel's machine code for compute capability `arch`; compile it unless the kernel or the cache has it.

    If the cache folder cannot be written to, nothing is cached.  Raises KernelError if the kernel does not compile.
    """
    if kernel.code:
        return kernel.code
    path = _path(kernel, arch)
    if path and (code := _read(path)):
        return code
    code = compile_cubin(kernel, arch).code
    if path:
        _write(path, code)
    return code


def is_cached(kernel: Kernel, arch: int) -> bool:
    """Return whether a kernel has machine code, or the cache has it; whether the file is undamaged is not checked."""
    path = None if kernel.code else _path(kernel, arch)
    return bool(kernel.code) or (path is not None and path.is_file())


def _path(kernel: Kernel, arch: int) -> Path | None:
    folder = cache_folder()
    if folder is None or not is_trusted(folder / "code"):
        return None
    content = (compiler_version(), arch_name(kernel, arch), compile_flags(kernel), identity(kernel).digest)
    return folder / "code" / f"{hashlib.sha256(repr(content).encode()).hexdigest()}.cubin"


def _read(path: Path) -> bytes:
    """Return the code of a file; empty if the file is missing or damaged, or if others can write to it."""
    if not is_trusted(path):
        return b""
    with suppress(OSError):
        data = read_plain(path, MAX_BYTES)
        if hashlib.sha256(data[DIGEST_BYTES:]).digest() == data[:DIGEST_BYTES]:
            return data[DIGEST_BYTES:]
    return b""


def _write(path: Path, code: bytes) -> None:
    part = path.with_name(f"{uuid.uuid4().hex}.part")  # a unique name: other processes can write this file too
    try:
        make_folder(path.parent)
        part.write_bytes(hashlib.sha256(code).digest() + code)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        warn_once(f"compiled kernels cannot be kept in {path.parent}: {error.strerror}; set ONNXFUSE_CACHE_DIR")
