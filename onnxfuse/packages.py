"""Find the modules that other installed packages add to onnxfuse by entry points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Final

from onnxfuse.errors import OnnxfuseError

PATTERNS: Final = "onnxfuse.patterns"  # the group of entry points that name modules with fusions
KERNELS: Final = "onnxfuse.kernels"  # the group of entry points that name families of kernels


@dataclass(frozen=True)
class Extension:
    """An entry point by which a package adds fusions (group PATTERNS) or kernels (group KERNELS)."""

    entry: EntryPoint

    @property
    def package(self) -> str:
        """The name of the package for pip; the module's name if the package's metadata is damaged."""
        return (self.entry.dist.name if self.entry.dist else "") or self.entry.module.partition(".")[0]

    @property
    def version(self) -> str:
        """The version of the package; "" if its metadata has none."""
        return (self.entry.dist.version if self.entry.dist else "") or ""

    @property
    def origin(self) -> str:
        """The package's name and version, as a part of a sentence."""
        return f"package {self.package} {self.version}".rstrip()

    @property
    def remedy(self) -> str:
        """Advice to a user who cannot change the package, as the end of a sentence."""
        return f"remove it with `pip uninstall {self.package}`"

    def load(self, error: type[OnnxfuseError]) -> ModuleType:
        """Import the module.  Raises `error`, which names the package, if the module is missing or does not load."""
        entry = self.entry
        subject = f"{self.origin}: {entry.value}, its entry point '{entry.name}' of {entry.group},"
        try:
            module = entry.load()
        except (Exception, SystemExit) as failure:
            why = f"does not load: {type(failure).__name__}: {failure}"
            raise error(f"{subject} {why}; repair the package, or {self.remedy}") from failure
        if not isinstance(module, ModuleType):
            raise error(f"{subject} is not a module; repair the package, or {self.remedy}")
        return module


def extensions(group: str) -> Iterator[Extension]:
    """Yield the entry points of a group in a fixed order; none is loaded yet."""
    found = (Extension(entry) for entry in entry_points(group=group))
    yield from sorted(found, key=lambda each: (each.package, each.entry.name))


def extending_packages() -> dict[str, str]:
    """Return the versions of the packages that add fusions or kernels, by package name."""
    found = (each for group in (PATTERNS, KERNELS) for each in extensions(group))
    return {each.package: each.version for each in found}
