"""Read plain files of limited size, refusing other kinds such as pipes, and write files and folders atomically."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def read_plain(path: Path, limit: int) -> bytes:
    """Return the content of a file.

    Raises OSError if it cannot be read, is not a plain file, or has more than `limit` bytes: reading a pipe blocks
    until data comes, and reading a device can go on forever.
    """
    require_plain(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(limit + 1) if size <= limit else b""
    if max(size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than the {limit:,} that are read")
    return data


def require_plain(path: Path) -> None:
    """Raise OSError unless the path names a plain file, or a link to one."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a device or a pipe")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: write a temporary file in the same folder, then rename it.

    The new file gets the permissions of the file that it replaces; a symbolic link is followed.  Raises OSError if
    writing fails, if the path is not a plain file, or if the file is write-protected.
    """
    check_replaceable(path)
    target = Path(os.path.realpath(path))
    new = temporary(target)
    try:
        with create(new, target) as file:
            file.write(data)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


def check_replaceable(path: Path) -> None:
    """Raise OSError if this path exists and is not a writable plain file."""
    if path.exists():
        require_plain(path)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "it is write-protected")


def temporary(target: Path) -> Path:
    """Return a new name in the target's folder: a short one, because the target's name can have the maximum length."""
    return target.with_name(f".onnxfuse-{secrets.token_hex(8)}.tmp")


@contextlib.contextmanager
def create(new: Path, replaced: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, and sync it to disk at the end; it gets the permissions of the file `replaced`."""
    with new.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    if replaced.exists():
        shutil.copymode(replaced, new)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Make a new folder under a temporary name, and give it the name `folder` at the end of the `with` block.

    An old folder of that name is removed; a symbolic link is followed.  If the block raises an error, the old folder is
    unchanged.  Raises OSError if the working directory would be removed.
    """
    folder = Path(os.path.realpath(folder))
    if folder.exists() and Path.cwd().is_relative_to(folder):
        raise OSError(errno.EBUSY, "it is, or contains, the working directory, and would be removed")
    part, old = temporary(folder), temporary(folder)
    try:
        part.mkdir(parents=True)
        yield part
        _swap(part, folder, old)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _swap(part: Path, folder: Path, old: Path) -> None:
    """Rename `part` to `folder`; if `folder` exists, rename it to `old` first."""
    if not folder.exists():
        part.rename(folder)
        return
    folder.rename(old)
    try:
        part.rename(folder)
    except BaseException:
        old.rename(folder)
        raise


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return a stamp of a file that changes when the file is written; () if there is no such file."""
    try:
        found = path.stat()
    except OSError:  # the caller then reads the file, and that raises an error with the reason
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
