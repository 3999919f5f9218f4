"""Save templates in plan files, with the machine code of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from onnxfuse.errors import KernelError, UsageError
from onnxfuse.runtime import late_work
from onnxfuse.runtime.backends import BACKENDS, Backend
from onnxfuse.runtime.gpu_kinds import gpu_kind
from onnxfuse.runtime.loaded_templates import GivenTemplate, PreparedTemplate, source_length
from onnxfuse.runtime.plan import Kernel
from onnxfuse.runtime.plan_file import KernelCode, PlanFile, SavedTemplate, node_identity, versions, write_plan_file
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.priority_pool import processors
from onnxfuse.runtime.provider_names import CUDA
from onnxfuse.runtime.run_plan import LIBRARIES, libraries_of
from onnxfuse.runtime.template_key import Situation
from onnxfuse.runtime.template_words import words_of

Progress = Callable[[int, int], None]  # called with the numbers of compiled kernels and of all kernels
Codes = dict[tuple[int, str], bytes]  # cubins by compute capability and Kernel.key


def save_plans(path: str | Path, provider: str = CUDA, device_id: int = 0) -> int:
    """Write the templates of this process's sessions on GPUs of the same kind as GPU number `device_id`.

    Waits for templates that are still being made.  Returns the number of templates, which include those that came from
    plan files.  Raises PlanFileError if the file cannot be written, UsageError for a provider that has no kernels.
    """
    backend = backend_of(provider)
    kind = gpu_kind(backend.device(device_id))
    planner.wait_for_preparations()
    late_work.wait_for_answers()  # to nodes whose templates are made in their first runs
    used = [each for each in planner.templates_in_use() if gpu_kind(each.situation.device) == kind]
    prepared = [each for each in used if isinstance(each, PreparedTemplate)]
    given = [each.saved for each in used if isinstance(each, GivenTemplate)]
    codes = compile_kernels(prepared, backend)
    file = plan_file_of([*given, *(saved_template(each, codes) for each in prepared)])
    write_plan_file(Path(path), file)
    return len(file.templates)


def backend_of(provider: str) -> Backend:
    """Return the backend of a provider.  Raises UsageError if kernels do not run on it."""
    if provider not in BACKENDS:
        raise UsageError(f"kernels run on {', '.join(BACKENDS)}, not on {provider}; there are no plans")
    return BACKENDS[provider]


def compile_kernels(
    templates: Sequence[PreparedTemplate], backend: Backend, progress: Progress = lambda done, of: None
) -> Codes:
    """Return the machine code of some templates' kernels for their GPUs, compiled in several threads, longest first.

    A kernel that does not compile is left out, and its template drops the variants (plans) that need the kernel.
    """
    wanted: dict[tuple[int, str], tuple[Kernel, Situation]] = {}
    for each in templates:
        for step in each.launches():
            wanted[each.situation.device.arch, step.kernel.key] = step.kernel, each.situation
    codes: Codes = {}
    errors: dict[tuple[int, str], KernelError] = {}
    longest = sorted(wanted.items(), key=lambda each: -source_length(each[1][0]))  # one that starts last ends alone
    progress(0, len(wanted))
    with ThreadPoolExecutor(processors()) as pool:
        tasks = {
            pool.submit(backend.machine_code, kernel, situation.device): key for key, (kernel, situation) in longest
        }
        try:
            for done, task in enumerate(as_completed(tasks), 1):
                try:
                    codes[tasks[task]] = task.result()
                except KernelError as error:
                    errors[tasks[task]] = error
                progress(done, len(wanted))
        except BaseException:  # also Ctrl-C; tasks that have not begun are dropped
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for each in templates:
        for key in set.intersection(each.keys(), {own for _, own in errors}):
            if why := errors.get((each.situation.device.arch, key)):
                each.refuse(key, why)
    return codes


def saved_template(prepared: PreparedTemplate, codes: Codes) -> SavedTemplate:
    """Return a template as plan files store it; its kernels must be in `codes`."""
    situation = prepared.situation
    kernels: dict[str, KernelCode] = {}
    for step in prepared.launches():
        key = step.kernel.key
        code = codes[situation.device.arch, key]
        known = kernels.get(key, KernelCode(code, step.kernel.entry, 0, 1))
        most = max(known.shared, step.shared), max(known.cluster, step.cluster)
        kernels[key] = KernelCode(code, step.kernel.entry, *most)
    words = words_of(prepared.template, {key: i for i, key in enumerate(kernels)})
    libraries = libraries_of(step for variant in prepared.template.variants for step in variant.plan.steps)
    node, device = node_identity(situation.node), situation.device
    return SavedTemplate(gpu_kind(device), device.tf32, device.shared, node, words, tuple(kernels.values()), libraries)


def plan_file_of(
    templates: Sequence[SavedTemplate], model: str | None = None, operators: Sequence[str] = ()
) -> PlanFile:
    """Return a plan file; of several templates for one node and equal inputs, it has the one with the most plans.

    There are several templates if equal nodes run on several GPUs, or in sessions with and without measurements.
    """
    found: dict[tuple[object, ...], SavedTemplate] = {}
    for each in templates:
        key = each.device, each.tf32, each.shared, each.node, each.words.inputs
        known = found.get(key)
        if known is None or len(each.words.variants) > len(known.words.variants):
            found[key] = each
    chosen = {name for each in found.values() for name, algorithm in each.libraries.items() if algorithm}
    named = {name: library.version() if name in chosen else None for name, library in LIBRARIES.items()}
    return PlanFile(versions(model, **named), operators, list(found.values()))
