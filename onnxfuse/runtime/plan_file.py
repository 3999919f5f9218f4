"""Plan files: templates with the machine code of their kernels, for GPUs of some kinds.

A template has the plans of a fused node for all sizes.  GPUs are of one kind if all properties that plans depend on are
equal.

The native library reads the same files (native/plan_file.h), so they are made of 64-bit words and of strings.  A string
is preceded by its length and padded to whole words:

    "onnxplan", format, digest of what follows (SHA-256: four words)
    text      versions of onnxfuse and its kernels, and a digest of the model or null, as JSON
    libraries the versions of cuBLASLt and cuDNN whose algorithms and engines the templates name, 0 if they name none
    devices   count; each name, compute capability, multiprocessors, shared memory of a block
    codes     count; each the cubin
    kernels   count; each device, code, entry, shared memory, cluster
    operators count; each the operator's name and its attributes' kinds, as onnxfuse_prepare takes them
    templates count; each device, TF32, aim, libraries, node (see `node_identity`), template; its functions
              are the numbers of kernels

A template is for sessions that allow TF32 if its TF32 word is 1, and for sessions with aim="throughput" if its aim word
is 1.

A template's libraries are a sum: 1 if its plans call cuBLASLt, 2 if they name an algorithm of it, 4 if they call cuDNN,
8 if they name an engine of it. An algorithm or engine is for one version of its library and one kind of GPU.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn, cast

from onnxfuse.errors import OnnxfuseError
from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.ir.plain_files import read_plain, write_whole
from onnxfuse.runtime.environment import kernels_digest
from onnxfuse.runtime.plan import Attribute, Device, FusedNode
from onnxfuse.runtime.plan_bytes import attribute_bytes
from onnxfuse.runtime.template_words import TemplateWords, read_template
from onnxfuse.runtime.word_reader import WORD, WordReader
from onnxfuse.version import __version__

PLANS_SUFFIX: Final = ".plans"  # appended to a model's file name to name the plan file beside it
MAGIC: Final = b"onnxplan"
FORMAT: Final = 9  # kPlanFileFormat in native/plan_file.h
LIBRARIES: Final = ("cublaslt", "cudnn")  # libraries whose versions are words of the file
DIGEST_BYTES: Final = 32
MAX_BYTES: Final = 2**31  # the size of the largest file that is read
MAX_SHARED_BYTES: Final = 1 << 20  # per block: more than any GPU has
MAX_CLUSTER: Final = 64  # blocks: more than any GPU allows


class PlanFileError(OnnxfuseError):
    """A plan file cannot be read, or is not for this GPU or version."""


@dataclass(frozen=True)
class KernelCode:
    """An entry of a cubin, and the shared memory and cluster size that its launches need."""

    cubin: bytes
    entry: str
    shared: int  # bytes of dynamic shared memory
    cluster: int  # blocks


@dataclass(frozen=True, eq=False)
class SavedTemplate:
    """A template for nodes with equal attributes, with the machine code of its kernels for one kind of GPU."""

    device: Device  # the kind of GPU: see gpu_kinds.py
    tf32: bool  # whether the template is for sessions that allow TF32
    shared: bool  # whether the template is for sessions with aim="throughput"
    node: bytes  # the result of node_identity
    words: TemplateWords  # these have indices into `kernels` in place of the handles of functions
    kernels: tuple[KernelCode, ...]
    # Libraries that the template's plans call; True if a plan names an algorithm or an engine of the library.
    libraries: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanFile:
    """The content of a plan file."""

    versions: Mapping[str, object]
    operators: Sequence[str]
    templates: Sequence[SavedTemplate]

    @property
    def devices(self) -> list[Device]:
        """The kinds of GPUs for which the file has templates."""
        return list(dict.fromkeys(each.device for each in self.templates))


def versions(model: str | None = None, **libraries: int | None) -> dict[str, object]:
    """Return the versions that plans of this onnxfuse depend on.

    model      a digest of the model that the plans are for; None if they are for any model with equal nodes
    libraries  the versions of libraries whose algorithms the plans name
    """
    return {"onnxfuse": __version__, "kernels": kernels_digest(), "model": model, **libraries}


def node_identity(node: FusedNode) -> bytes:
    """Return bytes that are equal for nodes with equal attributes; native/attributes.cc writes the same bytes.

    Each attribute except `attributes`, in order of name, is: u32 size of its name, name, u8 kind, u32 count, and that
    many int64, float32 or bytes.
    """
    values: dict[str, Attribute] = {
        **node.attributes,
        "fusion": node.fusion,
        "operands": " ".join(node.operands),
        "output_types": [DTYPE_NUMBERS[dtype] for dtype in node.output_dtypes],
    }
    return b"".join(attribute_bytes(name, value) for name, value in sorted(values.items()))


# --- writing ----------------------------------------------------------------------------------------------------------


def check_plan_target(target: Path, model: Path | None = None) -> None:
    """Raise PlanFileError if writing a plan file would replace a file of another kind, or the model file `model`."""
    if not target.is_file():
        return
    if model and model.exists() and target.samefile(model):
        raise PlanFileError(f"'{target}' is the model to read; give another name for the plan file")
    try:
        with target.open("rb") as stream:
            start = stream.read(len(MAGIC))
    except OSError as error:
        raise PlanFileError(f"{target}: cannot be written: {error}") from error
    if start != MAGIC:
        raise PlanFileError(f"'{target}' is there and is not a plan file; give another name, or remove it first")


def write_plan_file(path: Path, file: PlanFile) -> None:
    """Write a plan file under a temporary name and rename it.

    Raises PlanFileError if that fails, or if it would replace a file that is not a plan file.
    """
    check_plan_target(path)
    body = b"".join(_parts(file))
    data = MAGIC + _word(FORMAT) + hashlib.sha256(body).digest() + body
    try:
        write_whole(path, data)
    except OSError as error:
        raise PlanFileError(f"{path}: cannot be written: {error}") from error


def _parts(file: PlanFile) -> Iterator[bytes]:
    texts = {name: version for name, version in file.versions.items() if name not in LIBRARIES}
    yield _string(json.dumps(texts, sort_keys=True).encode())
    yield from (_word(cast(int, file.versions.get(name) or 0)) for name in LIBRARIES)
    devices = {device: i for i, device in enumerate(file.devices)}
    yield _word(len(devices))
    for device in devices:
        yield _string(device.name.encode())
        yield b"".join(map(_word, (device.arch, device.multiprocessors, device.shared_per_block)))
    codes = {code: i for i, code in enumerate(dict.fromkeys(k.cubin for each in file.templates for k in each.kernels))}
    yield _word(len(codes))
    yield from map(_string, codes)
    needs: dict[tuple[int, int, str], tuple[int, int]] = {}  # shared memory and cluster by device, cubin and entry
    own: list[list[tuple[int, int, str]]] = []  # the kernels of each template
    for each in file.templates:
        own.append([(devices[each.device], codes[kernel.cubin], kernel.entry) for kernel in each.kernels])
        for key, kernel in zip(own[-1], each.kernels, strict=True):
            shared, cluster = needs.get(key, (0, 1))
            needs[key] = max(shared, kernel.shared), max(cluster, kernel.cluster)
    yield _word(len(needs))
    for (at, code, entry), most in needs.items():
        yield b"".join((_word(at), _word(code), _string(entry.encode()), *map(_word, most)))
    yield _word(len(file.operators))
    yield from (_string(line.encode()) for line in file.operators)
    yield _word(len(file.templates))
    numbers = {key: i for i, key in enumerate(needs)}
    for each, keys in zip(file.templates, own, strict=True):
        words = each.words.with_functions([numbers[keys[i]] for i in each.words.functions])
        yield b"".join(map(_word, (devices[each.device], each.tf32, each.shared, _library_flags(each.libraries))))
        yield _string(each.node) + _string(words.data())


def _library_flags(libraries: Mapping[str, bool]) -> int:
    return sum((1 | 2 * libraries[name]) << 2 * i for i, name in enumerate(LIBRARIES) if name in libraries)


def _word(value: int) -> bytes:
    return struct.pack("<q", value)


def _string(data: bytes) -> bytes:
    return _word(len(data)) + data + bytes(-len(data) % WORD)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_plan_file(path: Path) -> PlanFile:
    """Return the content of a plan file.  Raises PlanFileError if it is not one, is corrupted or of another version."""
    try:
        data = read_plain(path, MAX_BYTES)
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
        file = _read(WordReader(body))
    except (ValueError, RecursionError) as error:  # RecursionError: JSON that is nested too deeply
        raise PlanFileError(f"{path}: it is malformed: {error}") from error
    if file.versions.get("onnxfuse") != __version__:
        _refuse(path, f"written by onnxfuse {file.versions.get('onnxfuse')}, this is {__version__}; make it again")
    if file.versions.get("kernels") != kernels_digest():
        where = "add the folders (--kernels, onnxfuse.add_kernels) and packages that it was made with, or make it again"
        _refuse(path, f"made from other kernels than there are here; {where}")
    return file


def _refuse(path: Path, why: str) -> NoReturn:
    raise PlanFileError(f"{path}: {why}")


def _read(reader: WordReader) -> PlanFile:
    found = json.loads(reader.text("versions"))
    if not isinstance(found, dict):
        raise ValueError("its versions are not a table")
    found |= {name: reader.word() or None for name in LIBRARIES}
    devices = [_device(reader) for _ in range(reader.count("devices"))]
    codes = [reader.string("a cubin") for _ in range(reader.count("cubins"))]
    kernels = []
    for _ in range(reader.count("kernels")):
        device, code = reader.index("a kernel's device", len(devices)), reader.index("a kernel's cubin", len(codes))
        entry, shared = reader.text("an entry"), reader.index("a kernel's shared memory", MAX_SHARED_BYTES)
        kernel = KernelCode(codes[code], entry, shared, reader.index("a kernel's cluster", MAX_CLUSTER))
        kernels.append((device, kernel))
    operators = [reader.text("an operator") for _ in range(reader.count("operators"))]
    templates = []
    for _ in range(reader.count("templates")):
        at = reader.index("a template's device", len(devices))
        tf32, shared = (bool(reader.index(f"a template's {setting}", 2)) for setting in ("TF32", "aim"))
        libraries = _libraries(reader.index("the libraries of a template", 1 << 2 * len(LIBRARIES)))
        node, words = reader.string("a node"), _template(reader.string("a template"), kernels, at)
        own = tuple(kernels[number][1] for number in words.functions)
        words = words.with_functions(range(len(own)))
        templates.append(SavedTemplate(devices[at], tf32, shared, node, words, own, libraries))
    if not reader.at_end:
        raise ValueError("bytes follow its end")
    return PlanFile(found, operators, templates)


def _device(reader: WordReader) -> Device:
    name, (arch, multiprocessors, shared) = reader.text("a device's name"), reader.words(3)
    return Device(name, arch, multiprocessors, shared)


def _template(data: bytes, kernels: Sequence[tuple[int, KernelCode]], device: int) -> TemplateWords:
    """Return a template of a file.  Raises ValueError if its words or functions are malformed."""
    try:
        words = read_template(data)
    except ValueError as error:
        raise ValueError(f"a template: {error}") from error
    for number in words.functions:
        if not (0 <= number < len(kernels) and kernels[number][0] == device):
            raise ValueError(f"a template has kernel {number}, which is none for its GPU")
    return words


def _libraries(flags: int) -> dict[str, bool]:
    """Return the libraries that `flags` name; True for a library if plans name an algorithm or an engine of it."""
    parts = {name: flags >> 2 * i for i, name in enumerate(LIBRARIES)}
    return {name: bool(part & 2) for name, part in parts.items() if part & 3}
