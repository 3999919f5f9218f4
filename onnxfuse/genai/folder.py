"""Read a folder that onnxruntime-genai's builder or Olive wrote, and copy the files in it that are not its models.

genai_config.json names the models, and can come from an untrusted source.  Names and links that lead outside the folder
are refused, because a copy would disclose files outside.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxfuse.errors import ModelError
from onnxfuse.ir.plain_files import read_plain, require_plain
from onnxfuse.ir.read import external_files, some_model

CONFIG: Final = "genai_config.json"
MAX_CONFIG_BYTES: Final = 2**24
LIBRARY: Final = "custom_ops_library"  # the session option that names a library of custom operators
# Names of the native library and its plan file in a folder that was optimized.
OWN_FILE: Final = re.compile(r"libonnxfuse(\.\d+)?\.so(\.plans)?")


@dataclass(frozen=True)
class NamedModel:
    """A model of a folder: the path of its file in the folder, and the parts of the configuration that name it."""

    name: str
    parts: tuple[dict[str, Any], ...]
    default_options: dict[str, Any]  # the decoder's session options, which genai uses for parts that have none

    @property
    def cuda(self) -> dict[str, Any] | None:
        """The options of the CUDA provider; None if the model does not use that provider."""
        return next((cuda for each in self.parts if (cuda := _cuda(self.options_of(each))) is not None), None)

    @property
    def library(self) -> str:
        """The library of custom operators that the configuration names; "" for none, or if onnxfuse wrote it."""
        named = (self.options_of(each).get(LIBRARY, "") for each in self.parts)
        return next((str(name) for name in named if name and not _is_own(name)), "")

    def options_of(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return the session options that genai uses for a part."""
        options: dict[str, Any] = part.get("session_options", self.default_options)
        return options


def _is_own(library: Any) -> bool:
    return OWN_FILE.fullmatch(str(library)) is not None


def _cuda(options: dict[str, Any]) -> dict[str, Any] | None:
    named = options.get("provider_options")
    providers = [one for one in named if isinstance(one, dict)] if isinstance(named, list) else []
    return next((one["cuda"] for one in providers if isinstance(one.get("cuda"), dict)), None)


@dataclass(frozen=True)
class Folder:
    """A folder of genai: its configuration, and the models that the configuration names, each once."""

    path: Path
    config: dict[str, Any]
    models: tuple[NamedModel, ...]

    def file(self, model: NamedModel) -> Path:
        """Return the file of a model."""
        return self.path / model.name

    def name_libraries(self, libraries: Mapping[str, str]) -> None:
        """Name onnxfuse's libraries in the session options of parts that run on CUDA; remove those of an earlier run.

        libraries  maps the name of each model that has a library to the library's name

        If any model has a library, each part gets its own session options, because genai would use the options of the
        decoder, with the decoder's library, for parts without options.
        """
        for model in self.models:
            for part in model.parts:
                given = model.options_of(part)
                options = {key: value for key, value in given.items() if key != LIBRARY or not _is_own(value)}
                if model.name in libraries and _cuda(options) is not None:
                    options[LIBRARY] = libraries[model.name]
                if options != given or (libraries and options):
                    part["session_options"] = options


def read_folder(path: Path) -> Folder:
    """Read the configuration of a folder, and check the names of its models.

    Raises ModelError if the folder has no configuration, if the configuration cannot be read, or if it names no ONNX
    model.  Also raises ModelError for a named model that is missing, is not a plain file or lies outside the folder.
    """
    if os.access(path, os.X_OK) and not (path / CONFIG).exists():
        example = f"such as '{some_model(path)}', or a folder of onnxruntime-genai"
        more = "onnxfuse.optimum.optimize_folder is for a folder that Optimum exported"
        raise ModelError(f"'{path}' is a directory without {CONFIG}; expected an ONNX file, {example}; {more}")
    _check_inside(path, CONFIG)
    try:
        config = json.loads(read_plain(path / CONFIG, MAX_CONFIG_BYTES))
        json.dumps(config, allow_nan=False)  # raises for NaN and infinity, which cannot be written
        parts = list(_parts(config.get("model") if isinstance(config, dict) else None))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"'{path / CONFIG}' cannot be read: {error}; build the folder again") from error
    if not parts:
        raise ModelError(f"'{path / CONFIG}' names no ONNX model; expected a decoder with a filename")
    decoder = config["model"].get("decoder") if isinstance(config["model"], dict) else None
    options = decoder.get("session_options") if isinstance(decoder, dict) else None
    found: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        _check_inside(path, part["filename"])
        found.setdefault(os.path.normpath(part["filename"]), []).append(part)
    default = options if isinstance(options, dict) else {}
    return Folder(path, config, tuple(NamedModel(name, tuple(each), default) for name, each in found.items()))


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a configuration that name an ONNX model, such as the decoder or a step of its pipeline."""
    if isinstance(value, dict):
        name, options = value.get("filename"), value.get("session_options", {})
        if isinstance(name, str) and name.lower().endswith(".onnx") and isinstance(options, dict):
            yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(each)


def _check_inside(folder: Path, name: str) -> None:
    """Raise ModelError unless `name`, after following symbolic links, is a plain file in the folder."""
    path = folder / name
    try:
        inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if not (inside and path.resolve().is_relative_to(folder.resolve())):
            what = f"'{name}', which '{folder / CONFIG}' names," if name != CONFIG else f"'{path}'"
            raise ModelError(f"{what} is outside the folder; copy the folder without links (cp -rL), or move the file")
        require_plain(path)
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"'{path}', a file of '{folder}', cannot be read: {reason}") from error


def copy_others(folder: Folder, target: Path) -> None:
    """Copy the files of a folder, except its configuration, the models that it names, and their external data.

    Models that the configuration does not name are copied with their data.  Files that an earlier run of onnxfuse added
    to the folder are not copied.  Raises ModelError for links that lead outside the folder, for devices and pipes, and
    for files that cannot be read; OSError if copying fails.
    """
    try:
        names = [name for name in _files(folder.path) if name != CONFIG and not OWN_FILE.fullmatch(name)]
    except OSError as error:
        raise ModelError(f"'{error.filename}' cannot be read: {error.strerror}; give it read permission") from error
    for name in names:
        _check_inside(folder.path, name)
    models = {folder.file(each).resolve() for each in folder.models}
    kept = {name for name in names if name.lower().endswith(".onnx") and (folder.path / name).resolve() not in models}
    replaced = models | _data(models)
    replaced -= _data(folder.path / name for name in kept)
    for name in names:
        source = folder.path / name
        if source.resolve() not in replaced:
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
