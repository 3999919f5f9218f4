"""Plan files: templates with the machine code of their kernels, for GPUs of some kinds.

The native library reads the same files (native/plan_file.h), so they are made of 64-bit words and of strings, each with
its length in front and padded to whole words:

    "onnxplan", format, digest of what follows (SHA-256: four words)
    text      versions of onnxfuse and its kernels, as JSON
    libraries the versions of cuBLASLt and cuDNN whose algorithms and engines the templates name, 0 if they name none
    devices   count; each name, compute capability, multiprocessors, shared memory of a block
    codes     count; each the cubin
    kernels   count; each device, code, entry, shared memory, cluster
    operators count; each the operator's name and its attributes' kinds, as onnxfuse_prepare takes them
    templates count; each device, TF32, libraries, node (see `node_identity`), template, whose functions are kernels by
              number

A template's libraries are a sum: 1 if its plans call cuBLASLt, 2 if they name an algorithm of it, 4 if they call cuDNN,
8 if they name an engine of it. An algorithm or engine is for one version of its library and one kind of GPU.
"""

from __future__ import annotations

import hashlib
import json
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, cast

from onnxfuse.errors import OnnxfuseError
from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.runtime.environment import kernels_digest
from onnxfuse.runtime.plan import Attribute, Device, FusedNode
from onnxfuse.version import __version__

MAGIC: Final = b"onnxplan"
FORMAT: Final = 7  # kPlanFileFormat in native/plan_file.h
LIBRARIES: Final = ("cublaslt", "cudnn")  # whose versions are words
WORD: Final = 8
DIGEST_BYTES: Final = 32


class PlanFileError(OnnxfuseError):
    """A plan file cannot be read, or is not for this GPU or version."""


@dataclass(frozen=True)
class StoredKernel:
    """An entry of a cubin for one kind of GPU, and what its launches take."""

    device: int
    code: int
    entry: str
    shared: int  # bytes of dynamic shared memory
    cluster: int


@dataclass(frozen=True)
class StoredTemplate:
    """A template for nodes of one identity on one kind of GPU."""

    device: int
    tf32: bool
    libraries: int  # that its plans call: the sum above
    node: bytes
    words: bytes


@dataclass(frozen=True)
class PlanFile:
    """What a plan file holds."""

    versions: Mapping[str, object]
    devices: Sequence[Device]
    codes: Sequence[bytes]
    kernels: Sequence[StoredKernel]
    operators: Sequence[str]
    templates: Sequence[StoredTemplate]


def versions(**libraries: int | None) -> dict[str, object]:
    """Return what plans of this onnxfuse depend on, with the versions of the libraries that they call."""
    return {"onnxfuse": __version__, "kernels": kernels_digest(), **libraries}


def node_identity(node: FusedNode) -> bytes:
    """Return bytes that are equal for nodes of equal attributes; native/attributes.cc writes the same for a node.

    Each attribute but `attributes`, in the order of the names, is u32 size of its name, name, u8 kind, u32 count, and
    then as many int64, float32 or bytes.
    """
    values: dict[str, Attribute] = {
        **node.attributes,
        "fusion": node.fusion,
        "operands": " ".join(node.operands),
        "output_types": [DTYPE_NUMBERS[dtype] for dtype in node.output_dtypes],
    }
    return b"".join(_attribute(name, value) for name, value in sorted(values.items()))


def _attribute(name: str, value: Attribute) -> bytes:
    head = struct.pack("<I", len(name.encode())) + name.encode()
    if isinstance(value, str):
        data = value.encode()
        return head + b"s" + struct.pack("<I", len(data)) + data
    several = value if isinstance(value, list) else [value]
    real = any(isinstance(each, float) for each in several)
    kind = ("F" if real else "I") if isinstance(value, list) else ("f" if real else "i")
    return head + kind.encode() + struct.pack(f"<I{len(several)}{'f' if real else 'q'}", len(several), *several)


# --- writing ----------------------------------------------------------------------------------------------------------


def write_plan_file(path: Path, file: PlanFile) -> None:
    """Write a plan file under another name and rename it.  Raises PlanFileError if that fails."""
    body = b"".join(_parts(file))
    data = MAGIC + _word(FORMAT) + hashlib.sha256(body).digest() + body
    part = path.with_name(f"{uuid.uuid4().hex}.part")  # other processes may write the same file now
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise PlanFileError(f"{path}: cannot be written: {error}") from error


def _parts(file: PlanFile) -> Iterator[bytes]:
    texts = {name: version for name, version in file.versions.items() if name not in LIBRARIES}
    yield _string(json.dumps(texts, sort_keys=True).encode())
    yield from (_word(cast(int, file.versions.get(name) or 0)) for name in LIBRARIES)
    yield _word(len(file.devices))
    for device in file.devices:
        yield _string(device.name.encode())
        yield b"".join(map(_word, (device.arch, device.multiprocessors, device.shared_per_block)))
    yield _word(len(file.codes))
    yield from map(_string, file.codes)
    yield _word(len(file.kernels))
    for kernel in file.kernels:
        yield _word(kernel.device) + _word(kernel.code) + _string(kernel.entry.encode())
        yield _word(kernel.shared) + _word(kernel.cluster)
    yield _word(len(file.operators))
    yield from (_string(line.encode()) for line in file.operators)
    yield _word(len(file.templates))
    for template in file.templates:
        yield b"".join(map(_word, (template.device, template.tf32, template.libraries)))
        yield _string(template.node) + _string(template.words)


def _word(value: int) -> bytes:
    return struct.pack("<q", value)


def _string(data: bytes) -> bytes:
    return _word(len(data)) + data + bytes(-len(data) % WORD)


# --- reading ----------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads words and strings in order; every method raises ValueError at the end of the data."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = memoryview(data), 0

    def _take(self, size: int) -> memoryview:
        if size < 0 or self._at + size > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, {size} bytes from {self._at} on are missing")
        self._at += size
        return self._data[self._at - size : self._at]

    def word(self) -> int:
        return int(struct.unpack("<q", self._take(WORD))[0])

    def count(self) -> int:
        count = self.word()
        if not 0 <= count <= len(self._data):
            raise ValueError(f"a count is {count}")
        return count

    def index(self, of: int) -> int:
        index = self.word()
        if not 0 <= index < of:
            raise ValueError(f"an index is {index}, required 0 to {of - 1}")
        return index

    def string(self) -> bytes:
        size = self.count()
        found = bytes(self._take(size))
        self._take(-size % WORD)
        return found

    def text(self) -> str:
        return self.string().decode()


def read_plan_file(path: Path) -> PlanFile:
    """Return what a plan file holds.  Raises PlanFileError if it is none, is corrupted or of another version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanFileError(f"{path}: cannot be read: {error}") from error
    if data[: len(MAGIC)] != MAGIC or len(data) < len(MAGIC) + WORD + DIGEST_BYTES:
        _refuse(path, "no plan file")
    found = struct.unpack_from("<q", data, len(MAGIC))[0]
    if found != FORMAT:
        _refuse(path, f"written in format {found}, this onnxfuse reads {FORMAT}; make it again")
    body = data[len(MAGIC) + WORD + DIGEST_BYTES :]
    if hashlib.sha256(body).digest() != data[len(MAGIC) + WORD : len(MAGIC) + WORD + DIGEST_BYTES]:
        _refuse(path, "it is corrupted; make it again")
    try:
        file = _read(_Reader(body))
    except (ValueError, UnicodeDecodeError) as error:
        raise PlanFileError(f"{path}: it is malformed: {error}") from error
    if file.versions.get("onnxfuse") != __version__:
        _refuse(path, f"written by onnxfuse {file.versions.get('onnxfuse')}, this is {__version__}; make it again")
    if file.versions.get("kernels") != kernels_digest():
        _refuse(path, "made from other kernels than this onnxfuse has; make it again")
    return file


def _refuse(path: Path, why: str) -> NoReturn:
    raise PlanFileError(f"{path}: {why}")


def _read(reader: _Reader) -> PlanFile:
    found_versions = json.loads(reader.text())
    if not isinstance(found_versions, dict):
        raise ValueError("its versions are no table")
    found_versions |= {name: reader.word() or None for name in LIBRARIES}
    devices = []
    for _ in range(reader.count()):
        name = reader.text()
        devices.append(Device(name, reader.word(), reader.word(), reader.word()))
    codes = [reader.string() for _ in range(reader.count())]
    kernels = []
    for _ in range(reader.count()):
        device, code = reader.index(len(devices)), reader.index(len(codes))
        kernels.append(StoredKernel(device, code, reader.text(), reader.word(), reader.word()))
    operators = [reader.text() for _ in range(reader.count())]
    templates = []
    for _ in range(reader.count()):
        device, tf32, libraries = reader.index(len(devices)), bool(reader.index(2)), reader.index(16)
        templates.append(StoredTemplate(device, tf32, libraries, reader.string(), reader.string()))
    return PlanFile(found_versions, devices, codes, kernels, operators, templates)
