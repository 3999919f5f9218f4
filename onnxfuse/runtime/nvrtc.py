"""Compile kernels to machine code with NVRTC, through cuda-bindings or CuPy; no GPU is needed."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxfuse.errors import KernelError, described
from onnxfuse.runtime.cupy_backend import cupy_module
from onnxfuse.runtime.kernel_folders import OWN, KernelFolder, kernel_folders
from onnxfuse.runtime.plan import Kernel

CUPY_NVRTC: Final = "cupy_backends.cuda.libs.nvrtc"
BINDINGS: Final = "cuda.bindings.nvrtc"
COMMON_FLAGS: Final = ("--device-as-default-execution-space",)  # functions without __host__ are device functions
PTXAS_REPORT: Final = re.compile(
    r"Compiling entry function '(?P<entry>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)
INSTALL_NVRTC: Final = "pip install cuda-bindings nvidia-cuda-nvrtc"
INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
PRAGMA_ONCE: Final = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.MULTILINE)
Key = tuple[str, str, tuple[Path, ...]]  # Kernel.source and Kernel.text, and the folders of kernels
_identities: Final[dict[Key, tuple[Identity, dict[Path, int]]]] = {}  # with the times when the files changed
_paths: Final[dict[tuple[str, tuple[Path, ...]], Path]] = {}  # by name, and the folders that are searched


# --- the source of a kernel ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """A digest and the length of a kernel's whole source text; texts of one digest are equal."""

    digest: str  # SHA-256
    length: int  # characters


def identity(kernel: Kernel) -> Identity:
    """Return the identity of `kernel_text(kernel)`, which is read once as long as its files do not change.

    Raises KernelError if a file is missing.
    """
    key = kernel.source, kernel.text, tuple(each.folder for each in kernel_folders())
    known = _identities.get(key)
    if not known or any(_changed_at(path) != changed for path, changed in known[1].items()):
        seen: set[Path] = set()
        text = _whole(kernel.source, kernel.text, seen)
        known = (
            Identity(hashlib.sha256(text.encode()).hexdigest(), len(text)),
            {path: _changed_at(path) for path in seen},
        )
        _identities[key] = known
    return known[0]


def kernel_text(kernel: Kernel) -> str:
    """Return a kernel's source text, generated or from its .cu file, with each header once in place of its include.

    Raises KernelError if a file is missing.
    """
    return _whole(kernel.source, kernel.text, set())


def _whole(stem: str, text: str, seen: set[Path]) -> str:
    return (
        _expanded(_pieces(text), f"{stem}.cu", None, seen) if text else _with_headers(_find_source(f"{stem}.cu"), seen)
    )


def _changed_at(path: Path) -> int:
    """Return the time of a file's last change, in nanoseconds; 0 if the file is missing."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def compile_flags(kernel: Kernel) -> tuple[str, ...]:
    """Return the compiler's flags except the one for the architecture."""
    return ("-std=c++17", *(f"-D{name}={_literal(value)}" for name, value in sorted(kernel.defines.items())))


def arch_name(kernel: Kernel, arch: int) -> str:
    """Return "sm_90", or "sm_90a" if the kernel needs instructions that only that architecture has."""
    return f"sm_{arch}{'a' if kernel.arch_specific else ''}"


def _literal(value: int | float | str) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value!r}f" if isinstance(value, float) else str(value)


def _find_source(name: str) -> Path:
    """Return the kernel source file of this name, which is unique among all folders of kernels."""
    return _first(name, kernel_folders())


def _find_header(name: str, included_by: Path | None) -> Path:
    """Return the header of this name from the kernel folder of the including file, or else from onnxfuse's own."""
    folders = kernel_folders()
    beside = [each for each in folders if included_by and included_by.is_relative_to(each.folder)]
    return _first(name, [*beside, *(each for each in folders if each.origin is OWN)])


def _first(name: str, folders: Sequence[KernelFolder]) -> Path:
    """Return the first file of this name; listing the folders takes milliseconds, so they are searched once a name."""
    key = name, tuple(each.folder for each in folders)
    if key in _paths and _paths[key].is_file():
        return _paths[key]
    for folder in folders:
        for path in folder.sources(name):
            _paths[key] = path
            return path
    where = ", ".join(dict.fromkeys(str(each.folder) for each in folders))
    raise KernelError(f"kernel source {name} was not found in {where} or a family's folder there")


def _with_headers(path: Path, seen: set[Path]) -> str:
    """Return the file's text with its headers, and add the file to `seen`."""
    seen.add(path)
    return _expanded(_pieces_of_file(path, _changed_at(path)), path.name, path, seen)


@dataclass(frozen=True)
class _Piece:
    """A part of a text, up to a line that includes a header."""

    text: str
    header: str  # empty after the last such line
    line: int  # the number of the line after it


def _pieces(text: str) -> tuple[_Piece, ...]:
    pieces, end, line = [], 0, 2
    for include in INCLUDE.finditer(text):
        line += text.count("\n", end, include.end())
        pieces.append(_Piece(text[end : include.start()], include[1], line))
        end = include.end()
    return (*pieces, _Piece(text[end:], "", 0))


@functools.lru_cache(maxsize=512)  # many generated kernels include the same headers
def _pieces_of_file(path: Path, changed: int) -> tuple[_Piece, ...]:
    """Return a file's pieces.  `changed`, the time of its last change, makes a changed file be read again."""
    return _pieces(PRAGMA_ONCE.sub("", path.read_text(encoding="utf-8")))


def _expanded(pieces: Sequence[_Piece], name: str, path: Path | None, seen: set[Path]) -> str:
    """Return a text with the headers in place of its include lines; headers in `seen` are not repeated.

    name  the name of the text in the compiler's messages
    path  the file that has the text; None if the text was generated
    seen  the files that the result holds already; the headers that are inserted are added to it
    """
    parts = [f'#line 1 "{name}"\n']
    for piece in pieces:
        parts.append(piece.text)
        header = _find_header(piece.header, path) if piece.header else None
        if header and header not in seen:
            parts.append(f'{_with_headers(header, seen)}\n#line {piece.line} "{name}"')
    return "".join(parts)


# --- NVRTC -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture, and ptxas's figures for the kernel's entry; -1 if ptxas reports no figure."""

    code: bytes
    registers: int  # per thread
    stack: int  # bytes of local memory per thread
    spill_stores: int  # bytes
    spill_loads: int  # bytes
    shared: int  # bytes of static shared memory
    log: str  # the compiler's warnings


def compile_cubin(kernel: Kernel, arch: int) -> Cubin:
    """Compile a kernel for compute capability `arch` (75, 90, ...).

    Raises KernelError with the compiler's messages if the source does not compile or has no such entry, and if
    neither cuda-bindings nor CuPy is installed.
    """
    flags = [
        f"-arch={arch_name(kernel, arch)}",
        *compile_flags(kernel),
        *COMMON_FLAGS,
        "-Xptxas=-v",
        *_cuda_include_flags(),
    ]
    code, log = _compile(kernel_text(kernel), f"{kernel.source}.cu", flags)
    for found in PTXAS_REPORT.finditer(log):
        if found["entry"] == kernel.entry:
            registers, stack, stores, loads, shared = (
                int(found[name] or 0) for name in ("registers", "stack", "stores", "loads", "shared")
            )
            return Cubin(code, registers, stack, stores, loads, shared, log)
    if f".text.{kernel.entry}".encode() in code:
        return Cubin(code, -1, -1, -1, -1, -1, log)
    raise KernelError(f"{kernel.source}.cu has no entry {kernel.entry}; the compiler says: {log.strip()}")


def _cuda_include_flags() -> Iterator[str]:
    """Yield the flag for the folder of <cuda_fp16.h>, in a CUDA toolkit or in NVIDIA's wheels."""
    homes = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [Path(home, "include") for home in homes if home]
    try:
        packages = list(importlib.import_module("nvidia").__path__)
    except ImportError:
        packages = []
    folders += [folder for package in packages for folder in sorted(Path(package).glob("cu*/include"), reverse=True)]
    found = next((folder for folder in folders if (folder / "cuda_fp16.h").is_file()), None)
    if found:
        yield f"-I{found}"


def unavailable() -> str | None:
    """Return why kernels cannot be compiled here; None if they can."""
    try:
        compiler_version()
    except KernelError as error:
        return str(error)
    return None


def compiler_version() -> tuple[int, ...]:
    """Return NVRTC's version.  Raises KernelError if the library, or a package that calls it, is missing."""
    return _version(*_nvrtc())


def _version(nvrtc: Any, is_cupy: bool) -> tuple[int, ...]:
    return tuple(nvrtc.getVersion()) if is_cupy else tuple(nvrtc.nvrtcVersion()[1:])


def _compile(source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
    """Return the machine code and the compiler's log."""
    nvrtc, is_cupy = _nvrtc()
    return (_compile_with_cupy if is_cupy else _compile_with_bindings)(nvrtc, source, name, flags)


@functools.cache
def _nvrtc() -> tuple[Any, bool]:
    """Return a module that calls NVRTC, and whether it is CuPy's module, which takes far longer to import."""
    failures = []
    for module, is_cupy in ((BINDINGS, False), (CUPY_NVRTC, True)):
        try:
            if is_cupy:
                cupy_module()
            nvrtc = importlib.import_module(module)
            _version(nvrtc, is_cupy)  # this loads the library
            return nvrtc, is_cupy
        except ImportError:
            continue
        except Exception as error:  # the library is missing; cuda-bindings and CuPy have no common error class
            failures.append(described(error))
    if failures:
        raise KernelError(f"NVRTC, which compiles kernels, does not load: {failures[0]}; {INSTALL_NVRTC}")
    raise KernelError(f"compiling kernels needs cuda-bindings or CuPy; {INSTALL_NVRTC}")


def _compile_with_bindings(nvrtc: Any, source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
    def call(function: Any, *arguments: Any) -> Any:
        code, *results = function(*arguments)
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"{name} does not compile: {log().strip() or code}")
        return results[0] if results else None

    def text(size: Any, get: Any) -> bytes:
        buffer = bytes(size(program)[1])
        get(program, buffer)  # writes into the buffer
        return buffer

    def log() -> str:
        return text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).rstrip(b"\0").decode(errors="replace")

    program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])[1]
    try:
        call(nvrtc.nvrtcCompileProgram, program, len(flags), [flag.encode() for flag in flags])
        return text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _compile_with_cupy(nvrtc: Any, source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
    program = nvrtc.createProgram(source, name, (), ())
    try:
        nvrtc.compileProgram(program, tuple(flags))
        return bytes(nvrtc.getCUBIN(program)), str(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        raise KernelError(f"{name} does not compile: {nvrtc.getProgramLog(program).strip() or error}") from error
    finally:
        nvrtc.destroyProgram(program)
