"""Give a session the folder of the weights that are stored outside its model's file."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import onnxruntime as ort

FOLDER_ENTRY: Final = "session.model_external_initializers_file_folder_path"
_lock_of_options: Final[weakref.WeakKeyDictionary[ort.SessionOptions, threading.Lock]] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


def file_outside(folder: Path, files: Iterable[str]) -> str | None:
    """Return a file that is not below the folder once links are followed; None if all files are below it.

    onnxruntime follows links out of the folder if it loads a model by its path, but not if it loads bytes.
    """
    root = folder.resolve()
    return next((file for file in sorted(files) if not (folder / file).resolve().is_relative_to(root)), None)


def configured_folder(options: ort.SessionOptions) -> Path | None:
    """Return the folder that session options name, if any; onnxruntime prefers it to the model's folder."""
    try:
        text = options.get_session_config_entry(FOLDER_ENTRY)
    except RuntimeError:  # the entry was never set
        return None
    return Path(text) if text else None


@contextmanager
def external_data_folder(folder: Path | None, options: ort.SessionOptions, *, shared: bool) -> Iterator[None]:
    """Set the folder in which a session that is made from bytes finds its weights.

    If `folder` is None or the options name a folder, the options are not changed. `shared` options may serve another
    model next, so the folder is removed from them at the end; onnxruntime logs a warning about that. Threads with the
    same options enter this context in turn, because a session might otherwise find the weights of another model.
    """
    with _lock:
        own_lock = _lock_of_options.setdefault(options, threading.Lock())
    with own_lock:
        if folder is None or configured_folder(options):
            yield
            return
        options.add_session_config_entry(FOLDER_ENTRY, str(folder.resolve()))
        try:
            yield
        finally:
            if shared:
                options.add_session_config_entry(FOLDER_ENTRY, "")  # an empty entry counts as none
