"""Find the folder in which onnxfuse keeps machine code and measurements for later processes.

Cached machine code is executed.  So no file is read from a folder that another user could have written to.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path
from typing import Final

log: Final = logging.getLogger("onnxfuse")
PRIVATE: Final = 0o700  # the mode of a new cache folder
READABLE: Final = 0o755  # folders inside the cache folder have these permissions at most
_warned: Final[set[str]] = set()


def cache_folder() -> Path | None:
    """Return $ONNXFUSE_CACHE_DIR, or the folder onnxfuse in $XDG_CACHE_HOME or in ~/.cache.

    Returns None, after a warning, if the user has no home directory, or if others can write to the folder.
    """
    folder = _named_folder()
    return folder if folder and is_trusted(folder) else None


def is_trusted(path: Path) -> bool:
    """Return whether only this user and root can write to a file or folder of the cache; if others can, warn."""
    if why := why_untrusted(path):
        remedy = f"empty it and run `chmod go-w '{path}'`, or set ONNXFUSE_CACHE_DIR to a folder of your own"
        warn_once(f"the cache '{path}' is not used, as it holds machine code that would be run: {why}; {remedy}")
        return False
    return True


def why_untrusted(path: Path) -> str | None:
    """Return why a file or folder cannot be trusted, as a sentence; None if only this user and root can write to it.

    Also returns None if the path does not exist, and on Windows, which has other permissions.
    """
    if not hasattr(os, "geteuid"):
        return None
    try:
        found = path.stat()
    except OSError:  # the caller then reads or makes the path, which raises a clearer error
        return None
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it (its mode is {stat.S_IMODE(found.st_mode):o})"
    return None


def make_folder(folder: Path) -> None:
    """Make a folder of the cache, and its parents.  Raises OSError if that fails.

    Only this user can read the new folders, unless the cache folder existed before and lets others read.
    """
    root = cache_folder()
    if root is None or not folder.is_relative_to(root):
        raise OSError(errno.ENOENT, f"the cache folder has changed to {root}")
    root.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    mode = root.stat().st_mode & READABLE
    for each in (*reversed(folder.parents), folder):
        if each.is_relative_to(root) and each != root:
            each.mkdir(mode=mode, exist_ok=True)


def _named_folder() -> Path | None:
    if chosen := os.environ.get("ONNXFUSE_CACHE_DIR"):
        return Path(chosen)
    standard = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if standard.is_absolute():  # the XDG specification says to ignore relative paths
        return standard / "onnxfuse"
    try:
        return Path.home() / ".cache" / "onnxfuse"
    except RuntimeError as error:
        warn_once(f"nothing is kept for later processes: {error}; set ONNXFUSE_CACHE_DIR to a folder")
        return None


def warn_once(message: str) -> None:
    """Log a warning unless it was logged before, because each of a model's hundreds of nodes can cause it."""
    if message not in _warned:
        _warned.add(message)
        log.warning(message)
