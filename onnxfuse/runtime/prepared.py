"""Templates whose kernels are loaded on a GPU, as nodes of sessions run by them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from onnxfuse.errors import KernelError
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime import run_plan
from onnxfuse.runtime.backends import Backend
from onnxfuse.runtime.kernel_loader import LoadedKernel
from onnxfuse.runtime.longest_first import LongestFirst
from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Kernel, Launch, Plan, TensorSpec
from onnxfuse.runtime.plan_file import KernelCode, SavedTemplate
from onnxfuse.runtime.situation import Situation
from onnxfuse.runtime.template import Template, Variant
from onnxfuse.runtime.template_bytes import kernel_key, template_bytes
from onnxfuse.runtime.template_words import TemplateWords


class GivenTemplate:
    """A template of a plan file for nodes on one GPU, whose kernels are loaded when they are first wanted.

    They stay loaded as long as this object lives.
    """

    def __init__(
        self,
        path: Path,
        saved: SavedTemplate,
        words: TemplateWords,
        situation: Situation,
        load: Callable[[KernelCode], LoadedKernel],
    ) -> None:
        """Take the file, those words of its template that nodes run by, and what loads a kernel on the GPU."""
        self.path: Final = path
        self.saved: Final = saved
        self.words: Final = words
        self.situation: Final = situation
        self._load, self._lock = load, threading.Lock()
        self._kernels: list[LoadedKernel] = []
        self._data = b""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs that it is for, whose dynamic dims are -1 - k."""
        return self.words.inputs

    def data(self) -> bytes:
        """Return the template's bytes for the native library, with all its kernels loaded.  Raises NativeError."""
        with self._lock:
            if not self._data:
                for name in self.saved.libraries:
                    run_plan.LIBRARIES[name].open()
                self._kernels = [self._load(kernel) for kernel in self.saved.kernels]
                self._data = self.words.with_functions([kernel.handle for kernel in self._kernels]).data()
            return self._data


class PreparedTemplate:
    """A template, and the kernels of its variants, which stay loaded as long as this object lives.

    CUDA graphs of a session may launch the kernels of any plan that its nodes have had.
    """

    def __init__(self, template: Template, backend: Backend, situation: Situation) -> None:
        """Load nothing yet."""
        self.template: Final = template
        self.situation: Final = situation
        self.kernels: dict[str, LoadedKernel] = {}  # by kernel_key
        self._backend, self._lock = backend, threading.RLock()
        self._data = b""

    def add(self, variant: Variant) -> None:
        """Add a variant."""
        with self._lock:
            self.template.variants.append(variant)
            self._data = b""

    def launches(self) -> Iterator[Launch]:
        """Yield the launches of all variants."""
        for variant in self.template.variants:
            yield from (step for step in variant.plan.steps if isinstance(step, Launch))

    def missing(self) -> dict[str, list[Launch]]:
        """Return the launches whose kernels are not loaded, or not allowed what they take, by kernel_key."""
        found: dict[str, list[Launch]] = {}
        for step in self.launches():
            key = kernel_key(step.kernel)
            if key not in self.kernels or not _is_allowed(self.kernels[key], step):
                found.setdefault(key, []).append(step)
        return found

    def load(self, steps: Iterable[Launch]) -> None:
        """Load the kernels of some launches, unless they are loaded, and allow these what they take.

        Raises KernelError, NativeError.
        """
        ordinal = self.situation.device.ordinal
        for step in steps:
            key = kernel_key(step.kernel)
            kernel = self.kernels.get(key) or self._backend.load(step.kernel, ordinal)
            with self._lock:
                self.kernels[key] = allow_launch(kernel, step, ordinal)

    def data(self) -> bytes:
        """Return the template's bytes for the native library, with all its kernels loaded."""
        load_all([self])  # without the lock, which the threads that load take
        with self._lock:
            if not self._data:
                for variant in self.template.variants:
                    run_plan.open_libraries(variant.plan)
                handles = {key: kernel.handle for key, kernel in sorted(self.kernels.items())}
                self._data = template_bytes(self.template, handles)
            return self._data


def load_all(templates: Iterable[PreparedTemplate]) -> None:
    """Load the kernels of some templates, which are compiled in several threads while more templates come.

    Raises KernelError, NativeError.
    """
    compiled: set[tuple[int, str]] = set()
    with LongestFirst() as pool:
        for template in templates:
            for key, steps in template.missing().items():
                code = template.situation.device.ordinal, key
                length = 0 if code in compiled else _length(steps[0].kernel)  # 0: it waits for another template's
                compiled.add(code)
                pool.add(length, partial(template.load, steps))


def _length(kernel: Kernel) -> int:
    """Return what the time to compile a kernel goes with: the length of its source."""
    try:
        return len(kernel_text(kernel))
    except KernelError:  # which compiling it raises as well
        return 0


def load_kernels(plan: Plan, backend: Backend, ordinal: int) -> tuple[LoadedKernel, ...]:
    """Load the kernels of a plan's launches, in order.  Raises KernelError, NativeError."""
    launches = (step for step in plan.steps if isinstance(step, Launch))
    return tuple(allow_launch(backend.load(step.kernel, ordinal), step, ordinal) for step in launches)


def allow_launch(kernel: LoadedKernel, step: Launch, ordinal: int) -> LoadedKernel:
    """Allow a kernel the shared memory and the cluster size of a launch, and return it.  Raises NativeError."""
    if not _is_allowed(kernel, step):
        shared, cluster = max(step.shared, kernel.max_shared), max(step.cluster, kernel.max_cluster)
        native.check(native.driver().onnxfuse_configure(ordinal, kernel.handle, shared, int(cluster > 8)))
        kernel.max_shared, kernel.max_cluster = shared, cluster
    return kernel


def _is_allowed(kernel: LoadedKernel, step: Launch) -> bool:
    return step.shared <= kernel.max_shared and step.cluster <= kernel.max_cluster
