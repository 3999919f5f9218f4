"""Templates whose kernels are loaded on a GPU, so that nodes of sessions can run them.

A template has the plans of a node for all sizes: one variant for each range of sizes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from onnxfuse.errors import KernelError, OnnxfuseError
from onnxfuse.runtime import kernel_failures, run_plan
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS, Backend
from onnxfuse.runtime.hosts import Host
from onnxfuse.runtime.kernel_loader import LoadedKernel
from onnxfuse.runtime.nvrtc import identity
from onnxfuse.runtime.plan import Kernel, Launch, Plan, TensorSpec
from onnxfuse.runtime.plan_file import KernelCode, SavedTemplate
from onnxfuse.runtime.priority_pool import PriorityThreadPool
from onnxfuse.runtime.provider_names import CUDA
from onnxfuse.runtime.template import Template, Variant, candidates_at
from onnxfuse.runtime.template_key import Situation
from onnxfuse.runtime.template_words import TemplateWords, words_of

log: Final = logging.getLogger("onnxfuse")


class GivenTemplate:
    """A template of a plan file for nodes on one GPU; its kernels are loaded when they are first needed.

    The kernels stay loaded as long as this object lives.
    """

    def __init__(
        self,
        path: Path,
        saved: SavedTemplate,
        words: TemplateWords,
        situation: Situation,
        load: Callable[[KernelCode], LoadedKernel],
    ) -> None:
        """Store a template of the plan file `path`; `words` encode it for the inputs of the nodes that will use it.

        situation  the nodes' attributes and GPU, and the settings of their session
        load       loads a kernel on that GPU
        """
        self.path: Final = path
        self.saved: Final = saved
        self.words: Final = words
        self.situation: Final = situation
        self._load, self._lock = load, threading.Lock()
        self._kernels: list[LoadedKernel] = []
        self._data = b""
        self.has_kernels: Final = True  # `data` loads all of them

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs that the template is for; dynamic dim number k is written as -1 - k."""
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

    def loads(self) -> bool:
        """Load the kernels, and return whether that succeeds; log a warning if not."""
        try:
            self.data()
            return True
        except native.NativeError as error:
            log.warning("%s is not used for %s: %s", self.path, self.situation.node.fusion, error)
            return False


class PreparedTemplate:
    """A template, and the kernels that the plans of its variants launch; kernels are loaded when they are needed.

    Kernels stay loaded as long as this object lives, because the CUDA graphs of a session may launch the kernels of
    any plan that the session's nodes have had.
    """

    def __init__(self, template: Template, backend: Backend, situation: Situation) -> None:
        """Store the template; none of its kernels is loaded yet."""
        self.template: Final = template
        self.situation: Final = situation
        self.kernels: dict[str, LoadedKernel] = {}  # the loaded kernels, by their `Kernel.key`
        self._backend, self._lock = backend, threading.RLock()
        self.is_loaded_later = False  # whether background threads load the kernels that first runs do not need
        self._data = b""
        self._absent: set[str] = set()  # keys of the kernels whose handle is 0 in `_data`: they were not loaded yet
        self.refused: dict[str, OnnxfuseError] = {}  # why kernels cannot be loaded, by their `Kernel.key`
        self.dropped: list[Variant] = []  # variants (plans for a range of sizes) that need a refused kernel

    def candidates(self, host: Host, sizes: Sequence[int]) -> list[Variant]:
        """Return the plans of the host for these sizes.  Raises any error of the host."""
        with self._lock:  # planning adds expressions to the template, which must not be encoded meanwhile
            return candidates_at(host, self.template, sizes)

    def add(self, variant: Variant) -> None:
        """Add a variant: a plan for a range of sizes."""
        with self._lock:
            self.template.variants.append(variant)
            self._data = b""

    def launches(self) -> Iterator[Launch]:
        """Yield the kernel launches of all variants, which are plans for ranges of sizes."""
        for variant in self.template.variants:
            yield from (step for step in variant.plan.steps if isinstance(step, Launch))

    def missing(self) -> dict[str, list[Launch]]:
        """Return the launches that cannot start yet, listed under the `Kernel.key` of their kernel.

        The kernel of such a launch is not loaded, or is not yet allowed its shared memory and cluster size.
        """
        found: dict[str, list[Launch]] = {}
        for step in self.launches():
            key = step.kernel.key
            if key not in self.kernels or not _is_allowed(self.kernels[key], step):
                found.setdefault(key, []).append(step)
        return found

    def load(self, steps: Iterable[Launch], goes_on: Callable[[], bool]) -> None:
        """Load the kernels of some launches, and allow them the shared memory and the cluster sizes of these launches.

        `goes_on` returns False if the kernels are no longer wanted; then nothing is done.  Variants (plans) that need a
        kernel which cannot be loaded are dropped, after a warning.
        """
        ordinal = self.situation.device.ordinal
        for step in steps if goes_on() else ():
            key = step.kernel.key
            try:
                kernel = self.kernels.get(key) or self._backend.load(step.kernel, ordinal)
                with self._lock:
                    self.kernels[key] = allow_launch(kernel, step, ordinal)
            except (KernelError, native.NativeError) as error:
                self.refuse(key, error)
                kernel_failures.note(self.situation.node, self.situation.device, error, "kernel")

    def refuse(self, key: str, error: OnnxfuseError) -> None:
        """Drop the variants (plans) that launch a kernel which cannot be compiled or loaded."""
        with self._lock:
            self.refused[key] = type(error)(*error.args)  # without the traceback, whose frames keep objects alive
            variants = self.template.variants
            self.dropped += [each for each in variants if self.error_of(each)]
            self.template.variants[:] = [each for each in variants if not self.error_of(each)]
            self._data = b""

    def error_of(self, variant: Variant) -> OnnxfuseError | None:
        """Return why one of the kernels of a variant (a plan) cannot be loaded; None if none has failed so far."""
        keys = (kernel.key for kernel in variant.kernels)
        return next((self.refused[key] for key in keys if key in self.refused), None)

    def keys(self) -> set[str]:
        """Return the keys (`Kernel.key`) of the kernels that all variants (plans) launch."""
        return {step.kernel.key for step in self.launches()}

    def keys_at(self, points: Iterable[Sequence[int]]) -> set[str]:
        """Return the keys (`Kernel.key`) of the kernels of the plans that are chosen at some combinations of sizes."""
        chosen = (self.template.chosen(sizes) for sizes in points)
        return {kernel.key for each in chosen if each for kernel in each.kernels}

    def compiled(self, keys: Collection[str]) -> set[str]:
        """Return which kernels of these keys (`Kernel.key`) are loaded, or can be loaded from the cache on disk."""
        kernels = {step.kernel.key: step.kernel for step in self.launches()}
        return {key for key in keys if self._backend.is_compiled(kernels[key], self.situation.device.ordinal)}

    def data(self, variant: Variant | None = None, goes_on: Callable[[], bool] = lambda: True) -> bytes:
        """Return the template's bytes for the native library, with its kernels loaded.

        If a variant (a plan) is given, and background threads load other kernels later, only the variant's kernels are
        loaded now.  Kernels that are not loaded have the handle 0 in the bytes.  A node that needs one of them requests
        the template again if its session waits for the compiler; if not, it runs otherwise until the template is sent.
        Variants whose kernels cannot be loaded are dropped.  `goes_on` is as in `load`.
        """
        with self._lock:
            if self._data and not self._absent:
                return self._data
        part = variant.kernels if variant and self.is_loaded_later else None
        wanted = self.keys() if part is None else {kernel.key for kernel in part}
        load_all([self], lambda _: wanted, goes_on=goes_on)  # without the lock, which the loading threads take
        return self._bytes(wanted)

    @property
    def has_kernels(self) -> bool:
        """Whether some kernels are loaded, or none are needed, so that nodes can run by some of the plans."""
        return bool(self.kernels) or not any(self.launches())

    @property
    def has_more_to_send(self) -> bool:
        """Whether kernels were loaded since the template's bytes were last written."""
        return bool(self._absent & self.kernels.keys())

    def data_so_far(self) -> bytes:
        """Return the template's bytes with the kernels that are loaded by now."""
        return self._bytes(set(self.kernels))

    def _bytes(self, wanted: set[str]) -> bytes:
        """Return the template's bytes; encode them again if they lack a `wanted` kernel that was loaded since."""
        with self._lock:
            if not self._data or self._absent & wanted:
                for variant in self.template.variants:
                    run_plan.open_libraries(variant.plan)
                missing = self.missing().keys()
                handles = {key: kernel.handle for key, kernel in self.kernels.items()} | dict.fromkeys(missing, 0)
                self._data = words_of(self.template, dict(sorted(handles.items()))).data()
                self._absent = set(missing)
            return self._data


def load_all(
    templates: Iterable[PreparedTemplate],
    wanted: Callable[[PreparedTemplate], Collection[str]] = PreparedTemplate.keys,
    threads: int | None = None,
    goes_on: Callable[[], bool] = lambda: True,
    loaded: Callable[[PreparedTemplate], object] = lambda _: None,
) -> None:
    """Load the kernels of templates; threads compile them while the iterator `templates` makes further templates.

    wanted   returns the keys (`Kernel.key`) of those kernels of a template that must be loaded
    threads  the maximum number of threads; None for the number of processors
    goes_on  called when a kernel's turn comes; returns whether kernels are still wanted
    loaded   called with the template after each of its kernels
    """

    def load(template: PreparedTemplate, steps: Sequence[Launch]) -> None:
        template.load(steps, goes_on)
        loaded(template)

    compiled: set[tuple[int, str]] = set()
    with PriorityThreadPool(threads) as pool:
        for template in templates:
            of_template = wanted(template)
            for key, steps in template.missing().items():
                if key not in of_template:
                    continue
                code = template.situation.device.ordinal, key
                length = 0 if code in compiled else source_length(steps[0].kernel)  # 0: an earlier template compiles it
                compiled.add(code)
                pool.add(length, partial(load, template, steps))


def source_length(kernel: Kernel) -> int:
    """Return the length of a kernel's source, to which its compile time is roughly proportional."""
    try:
        return 0 if kernel.code else identity(kernel).length
    except KernelError:  # compiling the kernel later raises the same error
        return 0


def ready_plan(plan: Plan, inputs: Sequence[TensorSpec], ordinal: int = 0, provider: str = CUDA) -> run_plan.ReadyPlan:
    """Load a plan's kernels, so that it can run without onnxruntime.  Raises KernelError, NativeError."""
    launches = (step for step in plan.steps if isinstance(step, Launch))
    load = BACKENDS[provider].load
    kernels = tuple(allow_launch(load(step.kernel, ordinal), step, ordinal) for step in launches)
    return run_plan.ReadyPlan(plan, kernels, inputs, ordinal)


def allow_launch(kernel: LoadedKernel, step: Launch, ordinal: int) -> LoadedKernel:
    """Allow a kernel the shared memory and the cluster size of a launch, and return it.  Raises NativeError."""
    if not _is_allowed(kernel, step):
        shared, cluster = max(step.shared, kernel.max_shared), max(step.cluster, kernel.max_cluster)
        native.check(native.driver().onnxfuse_configure(ordinal, kernel.handle, shared, int(cluster > 8)))
        kernel.max_shared, kernel.max_cluster = shared, cluster
    return kernel


def _is_allowed(kernel: LoadedKernel, step: Launch) -> bool:
    return step.shared <= kernel.max_shared and step.cluster <= kernel.max_cluster
