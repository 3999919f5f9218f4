"""Where a session looks for the weights that lie outside its model's file."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import onnx
import onnxruntime as ort
from onnx.external_data_helper import uses_external_data

from onnxfuse.model.protos import tensors

FOLDER: Final = "session.model_external_initializers_file_folder_path"
_locks: Final[weakref.WeakKeyDictionary[Any, threading.Lock]] = weakref.WeakKeyDictionary()  # of session options
_lock: Final = threading.Lock()


def locations(model: onnx.ModelProto) -> set[str]:
    """The files of weights that lie outside the model file, be it those of a branch, a loop or a function."""
    external = filter(uses_external_data, tensors(model.graph, *model.functions))
    return {each.value for tensor in external for each in tensor.external_data if each.key == "location"}


def beyond(folder: Path, files: Iterable[str]) -> str | None:
    """One of these files that is not below the folder once links are followed; None where all are.

    onnxruntime follows links out of the folder where it loads a model by its path, not where it loads bytes.
    """
    root = folder.resolve()
    return next((file for file in sorted(files) if not (folder / file).resolve().is_relative_to(root)), None)


def stated_folder(options: ort.SessionOptions) -> Path | None:
    """The folder that session options name, which onnxruntime prefers to that of the model."""
    try:
        text = options.get_session_config_entry(FOLDER)
    except RuntimeError:  # there is no such entry
        return None
    return Path(text) if text else None


@contextmanager
def found_in(folder: Path | None, options: ort.SessionOptions, *, shared: bool) -> Iterator[None]:
    """A session made of bytes finds its weights in this folder, unless the options name one or it is None.

    `shared` options may serve another model next: they come back without the folder, of which onnxruntime warns. Until
    then other threads wait here, whatever their model: it would find this one's weights.
    """
    with _lock:
        mine = _locks.setdefault(options, threading.Lock())
    with mine:
        if folder is None or stated_folder(options):
            yield
            return
        options.add_session_config_entry(FOLDER, str(folder.resolve()))
        try:
            yield
        finally:
            if shared:
                options.add_session_config_entry(FOLDER, "")  # which is none
