"""Where a session looks for the weights that lie outside its model's file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import onnx
import onnxruntime as ort
from onnx.external_data_helper import uses_external_data

from onnxfuse.model.protos import tensors

FOLDER: Final = "session.model_external_initializers_file_folder_path"


def has_external_data(model: onnx.ModelProto) -> bool:
    """Whether weights lie outside the model file, be it those of a branch, a loop or a function."""
    return any(map(uses_external_data, tensors(model.graph, *model.functions)))


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

    `shared` options may serve another model next: they come back without the folder, of which onnxruntime warns.
    """
    if folder is None or stated_folder(options):
        yield
        return
    options.add_session_config_entry(FOLDER, str(folder.resolve()))
    try:
        yield
    finally:
        if shared:
            options.add_session_config_entry(FOLDER, "")  # which is none
