"""Read a folder that onnxruntime-genai's builder or Olive wrote, and copy what is not a model of it.

genai_config.json names the models, and may come from a stranger: a name that leads outside the folder is refused, and
so are links that do, because a copy would disclose what they lead to.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxfuse.errors import ModelError
from onnxfuse.ir.load import external_files
from onnxfuse.ir.plain_files import read_plain, require_plain

CONFIG: Final = "genai_config.json"
MAX_CONFIG_BYTES: Final = 2**24
LIBRARY: Final = "custom_ops_library"  # the session option that names a library of operators
# Names of the native library and its plan file in a folder that was optimized.
OWN_FILE: Final = re.compile(r"libonnxfuse(\.\d+)?\.so(\.plans)?")


@dataclass(frozen=True)
class NamedModel:
    """A model of a folder: its name there, and its part of the configuration, which is changed in place."""

    name: str
    part: dict[str, Any]
    default_options: dict[str, Any]  # the session options that genai uses where the part has none: the decoder's

    @property
    def options(self) -> dict[str, Any]:
        """The session options of the model; a copy of the decoder's becomes its own where it has none."""
        options: dict[str, Any] = self.part.setdefault("session_options", copy.deepcopy(self.default_options))
        return options

    @property
    def _effective(self) -> dict[str, Any]:
        options: dict[str, Any] = self.part.get("session_options", self.default_options)
        return options

    @property
    def cuda(self) -> dict[str, Any] | None:
        """The options of the CUDA provider; None if the model does not use that provider."""
        named = self._effective.get("provider_options")
        providers = [one for one in named if isinstance(one, dict)] if isinstance(named, list) else []
        return next((one["cuda"] for one in providers if isinstance(one.get("cuda"), dict)), None)

    @property
    def library(self) -> str:
        """The library of operators that the configuration names, unless onnxfuse wrote it; "" for none."""
        return "" if self.has_own_library else str(self._effective.get(LIBRARY, ""))

    @property
    def has_own_library(self) -> bool:
        """Whether the configuration names a library that onnxfuse wrote."""
        return OWN_FILE.fullmatch(str(self._effective.get(LIBRARY, ""))) is not None


@dataclass(frozen=True)
class Folder:
    """A folder of genai: its configuration, and the models that are named there, each once."""

    path: Path
    config: dict[str, Any]
    models: tuple[NamedModel, ...]

    def file(self, model: NamedModel) -> Path:
        """Return the file of a model."""
        return self.path / model.name


def read_folder(path: Path) -> Folder:
    """Read the configuration of a folder, and check the names of its models.

    Raises ModelError if the folder has no configuration, if that cannot be read, or names no ONNX model, or one that is
    missing, is not a plain file or is outside the folder.
    """
    if not (path / CONFIG).exists():
        example = f"such as '{path / 'model.onnx'}', or a folder of onnxruntime-genai"
        raise ModelError(f"'{path}' is a directory without {CONFIG}; expected an ONNX file, {example}")
    _check_inside(path, CONFIG)
    try:
        config = json.loads(read_plain(path / CONFIG, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"'{path / CONFIG}' cannot be read: {error}; build the folder again") from error
    model = config.get("model") if isinstance(config, dict) else None
    decoder = model.get("decoder") if isinstance(model, dict) else None
    options = decoder.get("session_options") if isinstance(decoder, dict) else None
    default = options if isinstance(options, dict) else {}
    found = {each["filename"]: NamedModel(each["filename"], each, default) for each in _parts(model)}
    if not found:
        raise ModelError(f"'{path / CONFIG}' names no ONNX model; expected a decoder with a filename")
    for name in found:
        _check_inside(path, name)
    return Folder(path, config, tuple(found.values()))


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a configuration that name an ONNX model, such as the decoder or a step of its pipeline."""
    if isinstance(value, dict):
        name, options = value.get("filename"), value.get("session_options", {})
        if isinstance(name, str) and name.lower().endswith(".onnx") and isinstance(options, dict):
            yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(each)


def _check_inside(folder: Path, name: str) -> None:
    """Raise ModelError unless a name is that of a plain file in the folder, after links."""
    path = folder / name
    try:
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not (inside and path.resolve().is_relative_to(folder.resolve())):
            what = f"'{name}', which '{folder / CONFIG}' names," if name != CONFIG else f"'{path}'"
            raise ModelError(f"{what} is outside the folder; copy the folder without links (cp -rL), or move the file")
        require_plain(path)
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"'{path}', a file of '{folder}', cannot be read: {reason}") from error


def copy_others(folder: Folder, target: Path) -> None:
    """Copy the files of a folder, but not its configuration, the models of the configuration, and their data.

    Data that a model reads which is copied is copied too, and files that onnxfuse added to a folder are not.  Raises
    ModelError for links that lead outside the folder, and for devices and pipes; OSError if copying fails.
    """
    models = {folder.file(each).resolve() for each in folder.models}
    names = list(_files(folder.path))
    kept = {name for name in names if name.lower().endswith(".onnx") and (folder.path / name).resolve() not in models}
    replaced = models | _data(models)
    replaced -= _data(folder.path / name for name in kept)
    for name in names:
        source = folder.path / name
        if name == CONFIG or source.resolve() in replaced or OWN_FILE.fullmatch(name):
            continue
        _check_inside(folder.path, name)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / name)


def _data(models: Iterable[Path]) -> set[Path]:
    return {data.resolve() for path in models for data in external_files(path)}


def _files(folder: Path) -> Iterator[str]:
    """Yield the names of all files below a folder; a link to a folder counts as a file."""
    below = [""]
    while below:
        start = below.pop()
        with os.scandir(folder / start) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below.append(f"{start}{entry.name}/")
                else:
                    yield f"{start}{entry.name}"
