"""The text of a kernel as the compiler gets it: one string, because caches see no other files."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Final

import onnxfuse.kernels
from onnxfuse.errors import OnnxfuseError
from onnxfuse.provider.plan import Kernel

INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
ONCE: Final = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.MULTILINE)


class KernelError(OnnxfuseError):
    """A kernel is missing or cannot be compiled."""


def kernel_module(fusion: str) -> ModuleType | None:
    """kernels/<fusion>.py; None where the fusion has no kernel."""
    names = {m.name for m in pkgutil.iter_modules(onnxfuse.kernels.__path__) if not m.name.startswith("_")}
    return importlib.import_module(f"{onnxfuse.kernels.__name__}.{fusion}") if fusion in names else None


def source_text(stem: str) -> str:
    """kernels/<stem>.cu with the headers of the same folder in place of their #include lines, each once."""
    return _inlined(_find(f"{stem}.cu"), set())


def options(kernel: Kernel) -> tuple[str, ...]:
    """What the compiler is told besides the architecture."""
    return ("-std=c++17", *(f"-D{name}={_literal(value)}" for name, value in sorted(kernel.defines.items())))


def architecture(kernel: Kernel, arch: int) -> str:
    """ "sm_90", or "sm_90a" where the kernel needs that architecture's own instructions."""
    return f"sm_{arch}{'a' if kernel.arch_specific else ''}"


def _literal(value: int | float | str) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value!r}f" if isinstance(value, float) else str(value)


def _find(name: str) -> Path:
    for folder in onnxfuse.kernels.__path__:
        path = Path(folder, name)
        if path.is_file():
            return path
    raise KernelError(f"kernel source {name} is in none of {', '.join(onnxfuse.kernels.__path__)}")


def _inlined(path: Path, seen: set[Path]) -> str:
    seen.add(path)
    text = ONCE.sub("", _read(path))
    parts, at = [f'#line 1 "{path.name}"\n'], 0
    for include in INCLUDE.finditer(text):
        header = _find(include[1])
        parts.append(text[at : include.start()])
        if header not in seen:
            line = text.count("\n", 0, include.end()) + 1
            parts.append(f'{_inlined(header, seen)}\n#line {line} "{path.name}"')
        at = include.end()
    return "".join([*parts, text[at:]])


@functools.cache
def _text(path: Path, changed: int) -> str:
    return path.read_text(encoding="utf-8")


def _read(path: Path) -> str:
    return _text(path, path.stat().st_mtime_ns)
