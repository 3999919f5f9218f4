"""Load plan files, so that sessions use their templates on GPUs that can run them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from onnxfuse.ir.plain_files import stamp_of
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.environment import kernels_digest
from onnxfuse.runtime.gpu_kinds import (
    PORTABLE_CLUSTER,
    describe,
    gpu_kind,
    nearest_kinds,
    plans_alike,
    why_too_large,
)
from onnxfuse.runtime.kernel_loader import LoadedKernel, load_cubin
from onnxfuse.runtime.loaded_templates import GivenTemplate
from onnxfuse.runtime.plan import Device, TensorSpec
from onnxfuse.runtime.plan_file import KernelCode, PlanFile, PlanFileError, SavedTemplate, node_identity, read_plan_file
from onnxfuse.runtime.planner import PlanFileKey, planner
from onnxfuse.runtime.provider_names import CUDA
from onnxfuse.runtime.run_plan import LIBRARIES
from onnxfuse.runtime.saved_plans import backend_of
from onnxfuse.runtime.template_key import Situation
from onnxfuse.runtime.template_words import TemplateWords

log: Final = logging.getLogger("onnxfuse")
_lock: Final = threading.Lock()


def load_plans(path: str | Path, provider: str = CUDA, device_id: int = 0) -> int:
    """Make all sessions of this process use a file's templates from now on, rather than those of earlier files.

    Returns the number of templates.  Raises PlanFileError if one of them is malformed, or if the file is for other GPUs
    or another version; then no template of the file is used, not even those that were loaded from it earlier.  Raises
    UsageError for a provider that has no kernels.
    """
    return len(_load(Path(path), provider, backend_of(provider).device(device_id)).templates)


def use_plans(path: Path, provider: str, device: Device) -> PlanFile | None:
    """Load a file's templates for sessions with this device's settings: see `load_plans`.

    Returns the file's content.  If the file is not used, returns None and logs why.
    """
    try:
        source = _load(path, provider, device)
        source.check_settings(path, device)
    except (PlanFileError, native.NativeError) as error:
        log.warning("plans are not used: %s", error)
        return None
    log.info("%s: %d templates are used", path, len(source.templates))
    return source.file


def _load(path: Path, provider: str, device: Device) -> _Source:
    key = path.resolve(), provider, gpu_kind(device)
    with _lock:
        known = planner.plan_files.get(key)
        if not (isinstance(known, _Source) and known.is_current(path)):
            planner.drop_plan_file(key)
            known = _open(path, key)
        planner.add_plan_file(key, known)
        return known


def _open(path: Path, key: PlanFileKey) -> _Source:
    stamp, file = stamp_of(path), read_plan_file(path)
    for name, library in LIBRARIES.items():
        version = file.versions.get(name)
        if version is not None and version != (found := library.version()):
            what = f"{library.name} {version}, this is {found}"
            raise PlanFileError(f"{path}: its plans were chosen for {what}; make it again")
    return _Source(key, stamp, file, _for_gpu(path, file, key[2]))


def _for_gpu(path: Path, file: PlanFile, here: Device) -> list[SavedTemplate]:
    """Return the templates of a file that the GPU `here` can run.

    Raises PlanFileError if this GPU cannot run the machine code of any kind of GPU that the file was made for.
    """
    made_for = f"{path}: made for {', '.join(map(describe, file.devices)) or 'no GPU'}, this GPU is {describe(here)}"
    why = None
    for kind in nearest_kinds(file.devices, here):
        found = [each for each in file.templates if each.device == kind]
        why = why_too_large([kernel for each in found for kernel in each.kernels], kind, here)
        if why:
            continue
        if kind == here:
            return found
        level = logging.INFO if plans_alike(kind, here) else logging.WARNING
        log.log(level, "%s, for which its plans are right, but may not be the fastest", made_for)
        # Leave out templates that name an algorithm of cuBLASLt or an engine of cuDNN: these are for one kind of GPU.
        return [each for each in found if not any(each.libraries.values())]
    raise PlanFileError(made_for + (f"; {why}" if why else ""))


def _settings(tf32: bool, shared: bool) -> str:
    return f"aim='{'throughput' if shared else 'latency'}' and use_tf32={int(tf32)}"


class _Source:
    """The templates of a file for one kind of GPU."""

    def __init__(
        self, key: PlanFileKey, stamp: tuple[int, ...], file: PlanFile, templates: Sequence[SavedTemplate]
    ) -> None:
        """Store a file's content, its `stamp` (which tells whether it has changed), and its `templates`.

        templates  the file's templates that GPUs of the kind in `key` can run
        """
        self.stamp, self.file, self.templates = stamp, file, templates
        self._path, *self._where = key
        self._lock = threading.Lock()
        self._by_node: dict[tuple[bytes, bool, bool], list[SavedTemplate]] = {}
        for each in templates:
            self._by_node.setdefault((each.node, each.tf32, each.shared), []).append(each)
        self._loaded: dict[tuple[KernelCode, int], LoadedKernel] = {}
        self._given: dict[tuple[SavedTemplate, tuple[TensorSpec, ...], int, bool], GivenTemplate] = {}

    def is_current(self, path: Path) -> bool:
        """Return whether the file is unchanged since it was read, and was made from the current kernels."""
        return self.stamp == stamp_of(path) and self.file.versions.get("kernels") == kernels_digest()

    def check_settings(self, path: Path, device: Device) -> None:
        """Raise PlanFileError if the file has no template for sessions with a device's settings."""
        known = {(each.tf32, each.shared) for each in self.templates}
        if self.templates and (device.tf32, device.shared) not in known:
            made_for = " or ".join(_settings(*each) for each in sorted(known))
            what = f"made for sessions with {made_for}, this one has {_settings(device.tf32, device.shared)}"
            raise PlanFileError(f"{path}: {what}; make it again, with --aim or --option use_tf32=")

    def find(self, situation: Situation, inputs: Sequence[TensorSpec]) -> GivenTemplate | None:
        """Return the file's template for these inputs, or None; dynamic dim number k may be written as -1 - k."""
        if [situation.provider, gpu_kind(situation.device)] != self._where:
            return None
        found: list[tuple[SavedTemplate, TemplateWords]] = []
        device = situation.device
        for each in self._by_node.get((node_identity(situation.node), device.tf32, device.shared), ()):
            words = each.words.for_inputs(inputs)
            if words and situation.verdicts:
                found.append((each, words))
            elif words and (untuned := words.untuned()).variants:
                found.append((each, untuned))
        # Prefer a template that was made for exactly these inputs to one that fits other inputs too.
        best = min(found, key=lambda pair: pair[0].words.inputs != pair[1].inputs, default=None)
        return self._given_for(*best, situation) if best else None

    def _given_for(self, saved: SavedTemplate, words: TemplateWords, situation: Situation) -> GivenTemplate:
        ordinal = situation.device.ordinal
        with self._lock:
            key = saved, words.inputs, ordinal, situation.verdicts
            if key not in self._given:
                load = partial(self._kernel, ordinal=ordinal)
                self._given[key] = GivenTemplate(self._path, saved, words, situation, load)
            return self._given[key]

    def _kernel(self, code: KernelCode, ordinal: int) -> LoadedKernel:
        """Return a kernel on a GPU; the first call loads it there.  Raises NativeError."""
        with self._lock:
            key = code, ordinal
            if key not in self._loaded:
                kernel = load_cubin(code.cubin, code.entry, ordinal)
                kernel.max_shared, kernel.max_cluster = code.shared, code.cluster
                large = int(code.cluster > PORTABLE_CLUSTER)
                native.check(native.driver().onnxfuse_configure(ordinal, kernel.handle, code.shared, large))
                self._loaded[key] = kernel
            return self._loaded[key]
