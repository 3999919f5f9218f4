"""Find kernels in onnxfuse's own folder, in installed packages, and in folders that a user adds.

The kernels of related fusions are a family: a Python package whose `__init__.py` names its fusions in `FUSIONS` and
their operands that are numbers in `NUMBERS`, whose `host.py` plans them (see hosts.py), and whose .cu files are the
sources.  Hosts take long to import, and a session that finds all its plans in a file imports none.  An installed
package names a family by an entry point of the group `onnxfuse.kernels`.  A folder that a user adds holds families, as
onnxfuse's own folder does.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Final

import onnxfuse.kernels
from onnxfuse.errors import KernelError, UsageError
from onnxfuse.packages import KERNELS, extensions

FAMILY: Final = "a Python package with __init__.py, host.py and .cu files in one folder"
_added: Final[list[Path]] = []  # the folders that `add_kernels` was given


@dataclass(frozen=True)
class Origin:
    """The origin of kernels, as text for messages."""

    name: str  # the subject of a message, such as "folder 'x'"
    remedy: str = ""  # the end of a message: advice for a user who cannot change the kernels
    package: str = ""  # name and version of the installed package that the kernels come with

    def error(self, what: str, repair: str) -> KernelError:
        """Return the error that says what is wrong with these kernels, and what to do about it."""
        return KernelError(f"{self.name} {what}; {repair}" + (f", or {self.remedy}" if self.remedy else ""))


OWN: Final = Origin("onnxfuse")


@dataclass(frozen=True)
class Family:
    """A family: the kernels of related fusions, and the Python package that plans them."""

    module: str  # the name of the family's Python package
    fusions: tuple[str, ...]
    origin: Origin
    # By fusion: the operands that are numbers, each one int32 in host memory on which plans depend.
    numbers: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class KernelFolder:
    """A folder of families (the kernels of related fusions); sources lie directly in it or in its subfolders."""

    folder: Path
    families: tuple[Family, ...]
    origin: Origin

    def sources(self, pattern: str) -> Iterator[Path]:
        """Yield the files that match a name or pattern, those directly in the folder first."""
        yield from sorted(self.folder.glob(pattern))
        yield from sorted(self.folder.glob(f"*/{pattern}"))


def add_kernels(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Make later sessions of this process run the kernels of the families in a folder.

    Returns the fusions that the folder has kernels for.

    Raises UsageError if `folder` is not a folder or has no family; KernelError if a family does not load, or if another
    family has kernels for the same fusion or a source of the same name.
    """
    path = Path(folder).resolve()
    if not path.is_dir():
        raise UsageError(f"'{folder}' is not a folder; kernels are added from a folder of families")
    added = tuple(dict.fromkeys((*_added, path)))
    found = _kernel_folders(_own_folders(), added)
    _added[:] = added
    return tuple(f for each in found if each.folder == path for family in each.families for f in family.fusions)


def kernel_folders() -> tuple[KernelFolder, ...]:
    """Return all folders of kernels, onnxfuse's own first.

    Raises KernelError if a family (a Python package of kernels) does not load, or if two families have kernels for the
    same fusion or sources of the same name.
    """
    return _kernel_folders(_own_folders(), tuple(_added))


def _own_folders() -> tuple[str, ...]:
    return tuple(onnxfuse.kernels.__path__)


@functools.cache  # listing the folders takes some ms, and each new plan looks up a module in them
def _kernel_folders(own: tuple[str, ...], added: tuple[Path, ...]) -> tuple[KernelFolder, ...]:
    name = onnxfuse.kernels.__name__
    inside = [KernelFolder(path, _families(name, path, OWN), OWN) for path in map(Path, own)]
    # A user can add the folder in which an installed package lies.  Its families of kernels must not count twice.
    packages = [each for each in _of_packages() if each.folder.parent not in added]
    outside = [*packages, *map(_of_user, added)]
    if outside:
        _check_apart([*inside, *outside])
    return (*inside, *outside)


def _of_packages() -> Iterator[KernelFolder]:
    """Yield the families (kernels of related fusions) of installed packages, each with its folder."""
    for extension in extensions(KERNELS):
        origin = Origin(extension.origin, extension.remedy, f"{extension.package} {extension.version}")
        module = extension.load(KernelError)
        paths = [Path(path).resolve() for path in getattr(module, "__path__", ())]
        if len(paths) != 1 or not paths[0].is_dir():
            raise origin.error(f"offers {module.__name__} as a family, which is {FAMILY}", "repair the package")
        yield KernelFolder(paths[0], (_family(module, origin),), origin)


def _of_user(folder: Path) -> KernelFolder:
    """Return the families of kernels in a user's folder, as subpackages of a namespace package made for the folder."""
    name = f"onnxfuse_kernels_{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[name] = module_from_spec(spec)
    origin = Origin(f"folder '{folder}'", "leave the folder out")
    families = _families(name, folder, origin)
    if not families:
        hint = f"; it is a family itself: give '{folder.parent}'" if (folder / "host.py").is_file() else ""
        raise UsageError(f"'{folder}' holds no family, which is {FAMILY}{hint}")
    return KernelFolder(folder, families, origin)


def _families(package: str, folder: Path, origin: Origin) -> tuple[Family, ...]:
    """Return the families of kernels in a folder: the subpackages of `package` whose names do not begin with "_"."""
    found = []
    for module in pkgutil.iter_modules([str(folder)]):
        if module.ispkg and not module.name.startswith("_"):
            try:
                family = importlib.import_module(f"{package}.{module.name}")
            except (Exception, SystemExit) as error:
                what = f"has a family '{module.name}' that does not load: {type(error).__name__}: {error}"
                raise origin.error(what, "repair it") from error
            found.append(_family(family, origin))
    return tuple(found)


def _family(module: ModuleType, origin: Origin) -> Family:
    """Return the family of kernels that a module describes.  Raises KernelError if it does not name its fusions."""
    fusions = getattr(module, "FUSIONS", None)
    if not isinstance(fusions, tuple | list) or not fusions or not all(isinstance(each, str) for each in fusions):
        name = module.__name__.rpartition(".")[2]
        what = f"has a family '{name}' without FUSIONS, a tuple of the names of the fusions that it has kernels of"
        raise origin.error(what, "add it to __init__.py, or begin the name of a folder that is not a family with _")
    return Family(module.__name__, tuple(fusions), origin, getattr(module, "NUMBERS", {}))


def _check_apart(folders: Iterable[KernelFolder]) -> None:
    """Raise KernelError if two families of kernels serve the same fusion, or have sources of the same name.

    Two families may have headers of one name, because the folder of the including file is searched first.
    """
    seen: dict[str, Origin] = {}
    for each in folders:
        fusions = [f"kernels of the fusion '{fusion}'" for family in each.families for fusion in family.fusions]
        for what in (*fusions, *(f"a kernel source {path.name}" for path in each.sources("*.cu"))):
            if what in seen:
                again = "twice" if seen[what] is each.origin else f"and so has {seen[what].name}"
                raise each.origin.error(f"has {what}, {again}", "rename it")
            seen[what] = each.origin
