"""The fusions that exist: in onnxfuse.patterns, in installed packages, and in the user's own folders."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.errors import PatternError, UsageError
from onnxfuse.packages import PATTERNS, extensions


@functools.cache
def builtin() -> tuple[Fusion, ...]:
    """Return the fusions of onnxfuse itself, in alphabetical order."""
    package = importlib.import_module(PATTERNS)
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))
    modules = [importlib.import_module(f"{PATTERNS}.{name}") for name in names]
    return by_name(f for module in modules for f in declared(module))


@functools.cache
def installed() -> tuple[Fusion, ...]:
    """Return the fusions of onnxfuse and of installed packages with fusions, in alphabetical order.

    Raises PatternError for a package that does not load or declares no fusion, and if two packages declare the same
    name.
    """
    found = {fusion.name: fusion for fusion in builtin()}
    origins = dict.fromkeys(found, "onnxfuse")
    for extension in extensions(PATTERNS):
        fusions = declared(extension.load(PatternError))
        if not fusions:
            raise PatternError(
                f"{extension.origin}: its module {extension.entry.value} declares no fusion; decorate a function with "
                f"@onnxfuse.fusion(out=...), or {extension.remedy}"
            )
        for fusion in fusions:
            if found.setdefault(fusion.name, fusion) is not fusion:
                raise PatternError(
                    f"{extension.origin} declares a fusion '{fusion.name}', and so does {origins[fusion.name]}; rename "
                    f"it, or {extension.remedy}"
                )
            origins.setdefault(fusion.name, extension.origin)
    return by_name(found.values())


def declared(module: ModuleType) -> list[Fusion]:
    """Return the fusions that a module declares."""
    return [value for value in vars(module).values() if isinstance(value, Fusion)]


def from_folder(folder: Path) -> list[Fusion]:
    """Return the fusions declared in a folder's Python files, except files whose names begin with "_".

    Raises UsageError if the folder does not exist or declares no fusion, PatternError if a file fails to run.
    """
    if not folder.is_dir():
        raise UsageError(f"'{folder}' is not a folder; --patterns takes a folder of Python files with fusions")
    found = []
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith("_"):
            continue
        spec = importlib.util.spec_from_file_location(f"onnxfuse_user_patterns.{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise PatternError(f"{path}: {type(error).__name__}: {error}") from error
        found.extend(declared(module))
    if not found:
        raise UsageError(f"'{folder}' declares no fusion; decorate a function with @onnxfuse.fusion(out=...)")
    return found


def with_folders(folders: Iterable[str | os.PathLike[str]]) -> tuple[Fusion, ...]:
    """Return the installed fusions and the user's; a user's fusion replaces an installed one of the same name."""
    return by_name([*installed(), *(f for folder in folders for f in from_folder(Path(folder)))])


def select(
    fusions: Sequence[Fusion], only: Iterable[str] = (), skip: Iterable[str] = (), also: Iterable[str] = ()
) -> list[Fusion]:
    """Return the fusions named by `only` (all, if none is named) without those named by `skip`.

    Raises UsageError for a name that is neither the name of a fusion nor in `also`.
    """
    only, skip = list(only), list(skip)
    names = [*(f.name for f in fusions), *also]
    for name in (*only, *skip):
        require_known(name, names)
    return [f for f in fusions if (not only or f.name in only) and f.name not in skip]


def require_known(name: str, names: Sequence[str]) -> None:
    """Raise UsageError, with the nearest name, unless `name` is among `names`."""
    if name not in names:
        near = get_close_matches(name, names, 1)
        hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(names)}."
        raise UsageError(f"there is no fusion '{name}'. {hint}")


def by_name(fusions: Iterable[Fusion]) -> tuple[Fusion, ...]:
    """Return the fusions in alphabetical order.

    If several fusions have the same name, only the last of them is returned, so that users can replace fusions.
    """
    return tuple(f for _, f in sorted({f.name: f for f in fusions}.items()))
