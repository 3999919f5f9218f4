"""Save the templates of sessions in plan files, and let sessions on GPUs of the same kind use them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from onnxfuse.errors import UsageError
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime import planner, run_plan
from onnxfuse.runtime.backends import Backend
from onnxfuse.runtime.cupy_backend import LoadedKernel
from onnxfuse.runtime.plan import Convolution, Device, Matmul, Step, TensorSpec
from onnxfuse.runtime.plan_bytes import read_inputs
from onnxfuse.runtime.plan_file import (
    PlanFile,
    PlanFileError,
    StoredKernel,
    StoredTemplate,
    node_identity,
    read_plan_file,
    versions,
    write_plan_file,
)
from onnxfuse.runtime.planner import backends
from onnxfuse.runtime.prepared import GivenTemplate, PreparedTemplate
from onnxfuse.runtime.situation import Situation
from onnxfuse.runtime.template import sizes_of
from onnxfuse.runtime.template_bytes import function_words, kernel_key, pattern_words, template_bytes, with_functions

CUDA_PROVIDER: Final = "CUDAExecutionProvider"


def save_plans(path: str | Path, provider: str = CUDA_PROVIDER, device_id: int = 0) -> int:
    """Write the templates of the nodes that have run in this process on GPUs like `device_id`; return how many.

    Raises PlanFileError if the file cannot be written, UsageError for a provider that has no kernels.
    """
    backend = _backend(provider)
    kind = gpu_kind(backend.device(device_id))
    templates = [
        each
        for each in planner.templates_in_use()
        if isinstance(each, PreparedTemplate) and gpu_kind(each.situation.device) == kind
    ]
    write_plan_file(Path(path), plan_file_of(templates, backend))
    return len(templates)


def plan_file_of(templates: Sequence[PreparedTemplate], backend: Backend, operators: Sequence[str] = ()) -> PlanFile:
    """Return the plan file of some templates, whose kernels `backend` compiles for their GPUs.

    Templates that differ in the GPU's ordinal only are one.  Raises KernelError if a kernel does not compile.
    """
    devices: list[Device] = []
    kernels: dict[tuple[int, str], StoredKernel] = {}
    codes: dict[bytes, int] = {}
    stored: dict[tuple[int, bool, bytes, bytes], StoredTemplate] = {}
    for each in templates:
        kind, device = gpu_kind(each.situation.device), each.situation.device
        if kind not in devices:
            devices.append(kind)
        at = devices.index(kind)
        functions: dict[str, int] = {}
        for step in each.launches():
            key = (at, kernel_key(step.kernel))
            if key not in kernels:
                code = codes.setdefault(backend.machine_code(step.kernel, device), len(codes))
                kernels[key] = StoredKernel(at, code, step.kernel.entry, 0, 1)
            known = kernels[key]
            shared, cluster = max(known.shared, step.shared), max(known.cluster, step.cluster)
            kernels[key] = dataclasses.replace(known, shared=shared, cluster=cluster)
            functions[key[1]] = list(kernels).index(key)
        words = template_bytes(each.template, functions)
        libraries = _libraries_of(step for variant in each.template.variants for step in variant.plan.steps)
        record = StoredTemplate(at, device.tf32, libraries, node_identity(each.situation.node), words)
        stored[at, device.tf32, record.node, record.words] = record
    steps = [step for each in templates for variant in each.template.variants for step in variant.plan.steps]
    named = versions(cublaslt=_cublaslt_of(steps), cudnn=_cudnn_of(steps))
    return PlanFile(named, devices, list(codes), list(kernels.values()), operators, list(stored.values()))


def load_plans(path: str | Path, provider: str = CUDA_PROVIDER, device_id: int = 0) -> int:
    """Use a file's templates from now on, before those of files that were loaded earlier; return how many.

    Raises PlanFileError, and uses none, if one of them is malformed or the file is for other GPUs or another version;
    UsageError for a provider that has no kernels.
    """
    here = gpu_kind(_backend(provider).device(device_id))
    file = read_plan_file(Path(path))
    if here not in file.devices:
        made_for = ", ".join(map(_describe, file.devices)) or "no GPU"
        raise PlanFileError(f"{path}: made for {made_for}, this GPU is {_describe(here)}")
    _check_library(path, "cuBLASLt", file.versions.get("cublaslt"), run_plan.cublaslt_version)
    _check_library(path, "cuDNN", file.versions.get("cudnn"), run_plan.cudnn_version)
    try:
        entries = [
            _Entry(each, read_inputs(pattern_words(each.words)))
            for each in file.templates
            if file.devices[each.device] == here
        ]
    except (ValueError, IndexError) as error:
        raise PlanFileError(f"{path}: a template is malformed: {error}") from error
    if bad := {n for entry in entries for n in function_words(entry.stored.words) if not 0 <= n < len(file.kernels)}:
        raise PlanFileError(f"{path}: a template is malformed: it has kernel {min(bad)} of {len(file.kernels)}")
    source = _Source(file, entries)
    planner.add_plan_file(str(Path(path).resolve()), source.find)
    return len(entries)


@dataclasses.dataclass(frozen=True)
class _Entry:
    stored: StoredTemplate
    inputs: tuple[TensorSpec, ...]


class _Source:
    """The templates of a file for one kind of GPU, whose kernels are loaded when they are first wanted."""

    def __init__(self, file: PlanFile, entries: Iterable[_Entry]) -> None:
        self._file, self._lock = file, threading.Lock()
        self._entries: dict[tuple[bytes, bool], list[_Entry]] = {}
        for entry in entries:
            self._entries.setdefault((entry.stored.node, entry.stored.tf32), []).append(entry)
        self._loaded: dict[tuple[int, int], LoadedKernel] = {}
        self._given: dict[tuple[int, int], GivenTemplate] = {}

    def find(self, situation: Situation, inputs: Sequence[TensorSpec]) -> GivenTemplate | None:
        """Return the template for such inputs, whose dynamic dims may be -1 - k; None if there is none."""
        if gpu_kind(situation.device) not in self._file.devices:
            return None
        for entry in self._entries.get((node_identity(situation.node), situation.device.tf32), ()):
            if entry.inputs == tuple(inputs) or sizes_of(entry.inputs, inputs) is not None:
                return self._given_at(entry, situation.device.ordinal)
        return None

    def _given_at(self, entry: _Entry, ordinal: int) -> GivenTemplate:
        with self._lock:
            key = (id(entry), ordinal)
            if key not in self._given:
                numbers = function_words(entry.stored.words)
                kernels = [self._kernel(number, ordinal) for number in numbers]
                data = with_functions(entry.stored.words, [kernel.handle for kernel in kernels])
                self._given[key] = GivenTemplate(entry.inputs, data, kernels)
            return self._given[key]

    def _kernel(self, number: int, ordinal: int) -> LoadedKernel:
        if (number, ordinal) not in self._loaded:
            stored = self._file.kernels[number]
            cubin = self._file.codes[stored.code]
            module, function = native.load_function(native.load(), ordinal, cubin, stored.entry)
            kernel = LoadedKernel(function, _Module(ordinal, module))
            native.check(native.driver().onnxfuse_configure(ordinal, function, stored.shared, int(stored.cluster > 8)))
            self._loaded[number, ordinal] = kernel
        return self._loaded[number, ordinal]


@dataclasses.dataclass(eq=False)
class _Module:
    """A loaded cubin, which is unloaded with the last kernel that needs it."""

    ordinal: int
    handle: int  # CUmodule

    def __del__(self) -> None:
        native.load().onnxfuse_unload(self.ordinal, self.handle)


def _backend(provider: str) -> Backend:
    if provider not in backends:
        raise UsageError(f"kernels run on {', '.join(backends)}, not on {provider}; there are no plans")
    return backends[provider]


def gpu_kind(device: Device) -> Device:
    """Return what two GPUs must share to run the same machine code."""
    return Device(device.name, device.arch, device.multiprocessors, device.shared_per_block)


def _describe(device: Device) -> str:
    return f"{device.name} (sm_{device.arch}, {device.multiprocessors} multiprocessors)"


def _libraries_of(steps: Iterable[Step]) -> int:
    """Return the libraries that steps call, as plan files say it."""
    flags = 0
    for step in steps:
        if isinstance(step, Matmul):
            flags |= 1 | 2 * bool(step.algorithm)
        elif isinstance(step, Convolution):
            flags |= 4 | 8 * bool(step.engine)
    return flags


def _cublaslt_of(steps: Sequence[Step]) -> int | None:
    """Return cuBLASLt's version if a step has an algorithm of it: only that version can read it."""
    return run_plan.cublaslt_version() if any(isinstance(s, Matmul) and s.algorithm for s in steps) else None


def _cudnn_of(steps: Sequence[Step]) -> int | None:
    """Return cuDNN's version if a step has an engine of it: engines and knobs have other numbers elsewhere."""
    return run_plan.cudnn_version() if any(isinstance(s, Convolution) and s.engine for s in steps) else None


def _check_library(path: str | Path, name: str, version: object, found: object) -> None:
    """Raise PlanFileError unless this process has the version of a library that the file's plans were chosen for."""
    if version is not None and callable(found) and version != (here := found()):
        raise PlanFileError(f"{path}: its plans were chosen for {name} {version}, this is {here}; make it again")
