"""`onnxfuse compile`: make the templates of a fused model, compile their kernels, and write both to a plan file.

A plan says which kernels compute a node, and how they are launched.  A template has the plans of a node for all sizes:
one variant for each range of sizes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import onnx

from onnxfuse.compile.samples import samples_within
from onnxfuse.errors import KernelError, OnnxfuseError, UsageError, first_line
from onnxfuse.runtime.call_inputs import dim_names, inputs_of
from onnxfuse.runtime.environment import allows_tf32, check_options, session_environment
from onnxfuse.runtime.fused_calls import Call, attribute_kinds, read_calls, read_model
from onnxfuse.runtime.gpu_kinds import gpu_kind, named_gpus
from onnxfuse.runtime.loaded_templates import PreparedTemplate
from onnxfuse.runtime.plan import Aim, Device, TensorSpec
from onnxfuse.runtime.plan_file import PlanFile, check_plan_target, write_plan_file
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.provider_names import CUDA
from onnxfuse.runtime.sample_sizes import usual_samples
from onnxfuse.runtime.saved_plans import backend_of, compile_kernels, plan_file_of, saved_template
from onnxfuse.runtime.support import require_bodies, why_no_kernel
from onnxfuse.runtime.template import size_count
from onnxfuse.runtime.template_key import Situation
from onnxfuse.steps import Progress
from onnxfuse.tuning import cache
from onnxfuse.tuning.autotune import MeasuredVerdicts
from onnxfuse.tuning.dispatch import PLAIN, cached_preferences, model_subject
from onnxfuse.verify.inputs import model_inputs
from onnxfuse.verify.requested_shapes import with_known_ranks
from onnxfuse.verify.shape_ranges import Range, parse_ranges, ranges_of_dims

planner.verdicts = MeasuredVerdicts()  # makes the planner choose between plans by earlier measurements
UNKNOWN_RANKS: Final = "the rank of an operand is not known, so that it is planned when it first runs"


@dataclass(frozen=True)
class CompiledGpu:
    """The content of a plan file for one kind of GPU."""

    device: Device
    templates: int
    variants: int
    tuned: int  # number of plans that were chosen by measuring
    kernels: int


@dataclass(frozen=True)
class LeftOut:
    """A fused node without a template for one kind of GPU."""

    device: Device
    fusion: str
    node: str
    why: str


@dataclass(frozen=True)
class Compiled:
    """The result of `compile_file`."""

    path: Path
    size: int  # bytes of the file
    seconds: float
    gpus: tuple[CompiledGpu, ...]
    left_out: tuple[LeftOut, ...]
    bodies: Mapping[str, str]  # ONNX functions that onnxruntime itself runs in a process without Python, and why


@dataclass(frozen=True)
class CompileSettings:
    """The GPUs, sizes and session settings that a model is compiled for; the default GPUs are those of this machine.

    The aim is "latency" or "throughput".  For throughput, kernels are planned for several runs at once, and
    measurements are ignored, because they timed each kernel alone.
    """

    archs: Sequence[str] = ()  # compute capabilities, such as "sm_90"
    gpus: Sequence[str] = ()  # names of GPUs; their number of multiprocessors affects the choice between plans
    shapes: Sequence[str] = ()  # sizes to choose plans for, as "input:1..8x1..512"; other sizes run, too
    provider: str = CUDA
    # The provider's options in later sessions.  use_tf32 always matters.  Other options matter only for earlier
    # measurements on this machine, which are used only if they were made with the same options.
    options: Mapping[str, object] = field(default_factory=dict)
    aim: Aim = "latency"


@dataclass(frozen=True)
class _Task:
    """A model to compile, with its fused nodes, the settings and the sizes of its dims."""

    model: onnx.ModelProto
    calls: Sequence[Call]
    settings: CompileSettings
    ranges: Mapping[str, Range]
    progress: Progress


def compile_file(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    settings: CompileSettings = CompileSettings(),
    progress: Progress = lambda stage, done, of: None,
) -> Compiled:
    """Compile a fused model into a plan file.

    Raises UsageError if the model has no fused nodes, if sizes are given for inputs or dims that it does not have, and
    for unknown GPUs and options; KernelError if there is no compiler; OnnxfuseError if no node has a kernel;
    PlanFileError if the plan file cannot be written, or would replace a file that is not a plan file.
    """
    start = time.perf_counter()
    check_options(settings.options)
    check_plan_target(Path(target), Path(path))
    progress("load", 0, 0)
    model = read_model(Path(path))
    calls = read_calls(model)
    if not calls:
        raise UsageError(f"'{path}' has no fused nodes; run `onnxfuse optimize` first")
    wanted = model_inputs(with_known_ranks(model, settings.shapes)) if settings.shapes else []
    ranges = ranges_of_dims(parse_ranges(settings.shapes, wanted), wanted)
    task = _Task(model, calls, settings, ranges, progress)
    found = [_plan(task, device) for device in _devices(settings)]
    backend, planned = backend_of(settings.provider), [template for each in found for template in each.templates]
    if planned and (why := backend.unavailable()):
        raise KernelError(why)
    codes = compile_kernels(planned, backend, partial(progress, "compile"))
    found = [each.that_compiles() for each in found]
    templates = [template for each in found for template in each.templates]
    left_out = tuple(each for one in found for each in one.left_out)
    if not templates:
        raise OnnxfuseError(f"no fused node of '{path}' has a kernel: {left_out[0].why}")
    bodies = _bodies(task, found)
    lines = _operators(calls, bodies)
    saved = [saved_template(each, codes) for each in templates]
    file = plan_file_of(saved, str(model_subject(model)["model"]), lines)
    write_plan_file(Path(target), file)
    size, seconds = Path(target).stat().st_size, time.perf_counter() - start
    return Compiled(Path(target), size, seconds, tuple(map(_summary(file), file.devices)), left_out, bodies)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _devices(settings: CompileSettings) -> list[Device]:
    """Return the GPUs to compile for, with flags for TF32 and the aim.  Raises UsageError if there are none."""
    backend = backend_of(settings.provider)
    why = backend.no_gpu()
    present = [] if why else list(dict.fromkeys(map(backend.device, range(backend.gpu_count()))))
    is_named = settings.archs or settings.gpus
    devices = named_gpus(settings.archs, settings.gpus, present) if is_named else present
    if not devices:
        raise UsageError(f"there is no GPU to compile for: {why}; name its compute capability, as in --arch sm_90")
    tf32, shared = allows_tf32(settings.options), settings.aim == "throughput"
    return [replace(device, tf32=tf32, shared=shared) for device in devices]


def _summary(file: PlanFile) -> Callable[[Device], CompiledGpu]:
    def of(device: Device) -> CompiledGpu:
        templates = [each for each in file.templates if each.device == device]
        variants = [variant for each in templates for variant in each.words.variants]
        kernels = {(kernel.cubin, kernel.entry) for each in templates for kernel in each.kernels}
        return CompiledGpu(device, len(templates), len(variants), sum(v.tuned for v in variants), len(kernels))

    return of


# --- nodes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Planned:
    """The templates of a model's nodes for one GPU, and why some nodes have none."""

    device: Device
    of_nodes: Sequence[Sequence[PreparedTemplate]]  # per node: none, or one for aligned (and one for unaligned) memory
    reasons: Sequence[str | None]  # per node: why it has no template; None if it has one
    calls: Sequence[Call]

    @property
    def templates(self) -> list[PreparedTemplate]:
        """The templates of all nodes; a template that several nodes share is listed once."""
        return list({id(each): each for of_node in self.of_nodes for each in of_node}.values())

    def that_compiles(self) -> _Planned:
        """Return self without templates of nodes whose kernels fail to compile; these nodes run as ONNX functions."""
        failed = [next((error for t in own for error in t.refused.values()), None) for own in self.of_nodes]
        reasons = [
            why or (f"a kernel of it fails: {error.args[0].splitlines()[0]}" if error else None)
            for why, error in zip(self.reasons, failed, strict=True)
        ]
        kept = [[] if error else own for own, error in zip(self.of_nodes, failed, strict=True)]
        return replace(self, of_nodes=kept, reasons=reasons)

    @property
    def left_out(self) -> Iterator[LeftOut]:
        for call, why in zip(self.calls, self.reasons, strict=True):
            if why:
                yield LeftOut(gpu_kind(self.device), call.node.fusion, call.node.name, why)


def _plan(task: _Task, device: Device) -> _Planned:
    """Make the templates of a model's nodes for a GPU; equal nodes share a template.

    A node that reads an input of the model or writes an output of it has a second template for unaligned memory,
    because the memory that a program binds need not begin at a multiple of 16 bytes.  That is rare, and kernels take
    long to compile, so that its plans are chosen for the most common sizes alone; at others they may take twice as
    long as the best ones.
    """
    reasons = require_bodies(task.calls, [why_no_kernel(call, device) for call in task.calls])
    outside = {each.name for each in (*task.model.graph.input, *task.model.graph.output)}
    templates: dict[object, PreparedTemplate | str] = {}
    of_nodes: list[list[PreparedTemplate]] = [[] for _ in task.calls]
    for i, call in enumerate(task.calls):
        task.progress(f"plan for {device.name}", i, len(task.calls))
        inputs = inputs_of(call)
        if reasons[i] or inputs is None:
            reasons[i] = reasons[i] or UNKNOWN_RANKS
            continue
        situation = Situation(call.node, device, task.settings.provider, verdicts=device.is_here)
        samples = samples_within(dim_names(call.shapes), task.ranges)
        made = [_template(templates, situation, inputs, samples)]
        reasons[i] = made[0] if isinstance(made[0], str) else None
        if outside.intersection((*call.proto.input, *call.proto.output)):
            dims = size_count(inputs)
            common = samples[:1] or ([next(usual_samples(dims))] if dims else [])
            made.append(_template(templates, situation, [replace(spec, aligned=False) for spec in inputs], common))
        of_nodes[i] = [each for each in made if not isinstance(each, str)]
    return _Planned(device, of_nodes, reasons, task.calls)


def _template(
    templates: dict[object, PreparedTemplate | str],
    situation: Situation,
    inputs: Sequence[TensorSpec],
    samples: Sequence[Sequence[int]],
) -> PreparedTemplate | str:
    """Return the template of a node, or why it has none; make the template unless `templates` has it."""
    key = situation.key(inputs)
    if key not in templates:
        try:
            templates[key] = planner.new_template(situation, inputs, samples)
        except (OnnxfuseError, ValueError) as error:
            templates[key] = f"no kernel takes its shapes: {first_line(error)}"
    return templates[key]


def _bodies(task: _Task, found: Sequence[_Planned]) -> dict[str, str]:
    """Return the functions whose nodes run as bodies in a process without Python, each with the reason.

    A body is the ONNX function that a node calls.  Without Python, all nodes that call one function run in the same
    way.  They run as bodies if any of them has no kernel on one of the GPUs, or is faster as its body.
    """
    bodies: dict[str, str] = {}
    for each in found:
        for call, why in zip(task.calls, each.reasons, strict=True):
            if why:
                bodies.setdefault(call.op, why)
        if each.device.is_here and not cache.is_empty():
            environment = session_environment(task.settings.provider, each.device, task.settings.options)
            preferred = cached_preferences(task.model, task.calls, environment, PLAIN, per_node=False)
            for call, preference in zip(task.calls, preferred, strict=True):
                if preference and not preference.kernel:
                    bodies.setdefault(call.op, preference.why)
    return bodies


def _operators(calls: Sequence[Call], bodies: Mapping[str, str]) -> list[str]:
    """Return a line for each function whose nodes run as kernels: its name and attributes, for the native library."""
    ops = sorted({call.op for call in calls} - bodies.keys())
    return [f"{op} {attribute_kinds([call for call in calls if call.op == op])}" for op in ops]
