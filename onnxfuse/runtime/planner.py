"""Make the plan templates that nodes of sessions run by: when a session is made, or when a node meets other inputs."""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from onnxfuse.errors import KernelError, ModelError, OnnxfuseError
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.runtime import body_runs, cuda_driver, cupy_backend, kernel_failures, kernel_loader, nvrtc
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import CUDA, Backend
from onnxfuse.runtime.expressions import Expressions
from onnxfuse.runtime.hosts import Host, find_host
from onnxfuse.runtime.loaded_templates import GivenTemplate, PreparedTemplate, load_kernels
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.run_plan import ReadyPlan
from onnxfuse.runtime.template import Template, Variant, candidates_at, concrete, make_template, sizes_of, with_sizes
from onnxfuse.runtime.template_key import Situation, signature

log: Final = logging.getLogger("onnxfuse")
RESERVED_ATTRIBUTES: Final = ("fusion", "operands", "output_types", "attributes")  # a host finds them in FusedNode
MAX_UNUSED_TEMPLATES: Final = 512  # that are kept for nodes that have not run yet, or whose sessions are gone
MAX_PATTERNS: Final = 64  # of the dims of equal nodes
Dims = tuple[tuple[int, ...], ...]  # of each input of a node; a dynamic one is -1 - k, where k is the number of a size


class Verdicts(Protocol):
    """What measurements say of the plans of nodes."""

    def inputs_measured(
        self, node: FusedNode, inputs: Sequence[TensorSpec], device: Device, provider: str, /
    ) -> Iterable[tuple[TensorSpec, ...]]:
        """Return the inputs of a node of these dims at which its plans were measured."""

    def choose(
        self,
        plans: Sequence[Plan],
        node: FusedNode,
        inputs: Sequence[TensorSpec],
        device: Device,
        provider: str,
        measure: bool,
        /,
    ) -> int | None:
        """Return the index of the plan that was measured to be the fastest; None if that is not known.

        measure  whether the plans may be measured now
        """


backends: Final[dict[str, Backend]] = {
    CUDA: Backend(
        cuda_driver.unavailable,
        nvrtc.unavailable,
        cuda_driver.gpu_count,
        cuda_driver.gpu,
        kernel_loader.load_kernel,
        kernel_loader.machine_code,
        cupy_backend.unavailable,
    )
}


class TemplateSource(Protocol):
    """A plan file for GPUs of one kind."""

    def find(self, situation: Situation, inputs: Sequence[TensorSpec], /) -> GivenTemplate | None:
        """Return its template for inputs of a node, whose dynamic dims may be -1 - k; None if it has none."""


PlanFileKey = tuple[Path, str, Device]  # path, provider, and kind of GPU

plan_files: Final[dict[PlanFileKey, TemplateSource]] = {}  # the one that was loaded last is asked first
_templates_of_nodes: Final[
    dict[int, list[PreparedTemplate | GivenTemplate]]
] = {}  # by the native library's number of a node
_observed: Final[dict[int, bool]] = {}  # by number of a node whose runs are counted: whether its plans may change
_prepared: weakref.WeakValueDictionary[tuple[str, str, int, bool], PreparedTemplate] = weakref.WeakValueDictionary()
_recent: deque[PreparedTemplate] = deque(maxlen=MAX_UNUSED_TEMPLATES)
_patterns: Final[defaultdict[str, deque[Dims]]] = defaultdict(lambda: deque(maxlen=MAX_PATTERNS))
# Held while a template is made, so that equal nodes make it once. `forget_node` never takes it, because the garbage
# collector may call that function at any time.
_lock: Final = threading.RLock()
_verdicts: list[Verdicts] = []


def choose_plans_with(verdicts: Verdicts) -> None:
    """Let measurements decide between plans from now on, in sessions that allow it."""
    _verdicts[:] = [verdicts]


def fused_node(name: str, attributes: Mapping[str, Any]) -> FusedNode:
    """Return a node as its host sees it.  Raises ModelError if an attribute is missing or of the wrong type."""
    required = (("fusion", str, "a string"), ("operands", str, "a string"), ("output_types", list, "ints"))
    for attribute, kind, what in required:
        if not isinstance(attributes.get(attribute), kind):
            found = repr(attributes[attribute]) if attribute in attributes else "nothing"
            raise ModelError(f"fused node '{name}': attribute {attribute} must be {what}, found {found}")
    named = str(attributes.get("attributes", "")).split()  # files of older versions do not have this attribute
    if missing := [attribute for attribute in named if attribute not in attributes]:
        raise ModelError(
            f"fused node '{name}': attribute {missing[0]} is missing; register the model that runs with its session "
            "options, or optimize it again if the file was changed"
        )
    return FusedNode(
        attributes["fusion"],
        name,
        tuple(attributes["operands"].split()),
        {key: value for key, value in sorted(attributes.items()) if key not in RESERVED_ATTRIBUTES},
        tuple(dtype_name(number) for number in attributes["output_types"]),
    )


def answer_request(request: native.Request) -> bytes | None:
    """Return the bytes of the template that the native library asks for; None if the node's body must run.

    It does where planning or compiling fails, and a warning says why.  Without a body, what this raises becomes an
    onnxruntime error of the node.
    """
    situation = _situation(request)
    try:
        return _template_bytes(request, situation)
    except Exception as error:  # of hosts, of other packages too
        if request.measure or not body_runs.has_body(situation.node, situation.device):
            raise
        kernel_failures.note(situation.node, situation.device, error, "body")
        return None


def run_body(request: native.BodyRequest) -> None:
    """Run the body of a node.  What this raises becomes an onnxruntime error of the node."""
    situation = _situation(request.node)
    body_runs.run_body(request, situation.node, situation.device)


def _template_bytes(request: native.Request, situation: Situation) -> bytes:
    with _lock:
        of_node = _note(request)
        given = None if request.measure else _template_of_files(situation, request.inputs)
        if given is not None and given not in of_node and loads(given):  # else it has no plan for these sizes
            of_node.append(given)
            return given.data()
        prepared = _template_for(situation, request.inputs)
        sizes = sizes_of(prepared.template.inputs, request.inputs)
        assert sizes is not None, "a template fits the inputs that it is made for"
        if request.measure:
            prepared = _measured(situation, prepared, sizes)
            data = prepared.data()
            for error in prepared.refused.values():
                raise type(error)(*error.args)
        else:
            prepared, data = _loaded(situation, prepared, sizes, request.inputs, request.all_kernels)
        if prepared not in of_node:
            of_node.append(prepared)
        return data


def _loaded(
    situation: Situation,
    prepared: PreparedTemplate,
    sizes: tuple[int, ...],
    inputs: Sequence[TensorSpec],
    all_kernels: bool = False,
) -> tuple[PreparedTemplate, bytes]:
    """Return a template that has a plan for these sizes, and its bytes, with the kernels of that plan loaded.

    A plan whose kernels cannot be loaded gives way to the next that is right.  Raises KernelError, NativeError if there
    is none, and what the host raises.
    """
    while True:
        variant = prepared.template.chosen(sizes)
        if variant is None:
            prepared = _with_sizes(situation, prepared, sizes, inputs)
            own = sizes_of(prepared.template.inputs, inputs)
            assert own is not None, "a template fits the inputs that it is made for"
            sizes = own
        data = prepared.data(None if all_kernels else variant)
        if prepared.template.chosen(sizes) is not None:
            return prepared, data


def mend(prepared: PreparedTemplate) -> None:
    """Give a template of which no kernel could be loaded the next plans of its host, for the sizes that were tried.

    If these fail too, the node runs as its body for all sizes from the next session on; not if the GPU refused to load
    what was compiled, because it may lack memory for a while.
    """
    errors = prepared.refused.values()
    if prepared.kernels or not any(isinstance(each, KernelError) for each in errors):
        return
    situation, template = prepared.situation, prepared.template
    with _lock:
        for variant in list(prepared.dropped):
            with suppress(ArithmeticError, ValueError, OnnxfuseError):
                _loaded(situation, prepared, variant.hints, with_sizes(template.inputs, variant.hints))
        if not prepared.kernels:
            template.variants[:] = [each for each in template.variants if not each.plan.steps]
            error = next(each for each in errors if isinstance(each, KernelError))
            kernel_failures.note(situation.node, situation.device, error, "body always")


def add_plan_file(key: PlanFileKey, source: TemplateSource) -> None:
    """Ask a plan file before all others from now on; what the same path held earlier is forgotten."""
    with _lock:
        drop_plan_file(key)
        plan_files[key] = source


def drop_plan_file(key: PlanFileKey) -> None:
    """Ask a plan file no longer; nodes keep the templates that they have."""
    with _lock:
        plan_files.pop(key, None)


def expect(node: FusedNode, dims: Dims, device: Device) -> None:
    """Let nodes equal to this one, of inputs with these dims, have one template for all sizes of the dynamic dims."""
    with _lock:
        of_node = _patterns[signature(node, (), device)]
        if dims not in of_node:
            of_node.append(dims)


def given_template(situation: Situation, inputs: Sequence[TensorSpec]) -> GivenTemplate | None:
    """Return the template that a plan file has for inputs whose dynamic dims may be -1 - k; None if none has one."""
    with _lock:
        return _template_of_files(situation, inputs)


def loads(given: GivenTemplate) -> bool:
    """Load the kernels of a plan file's template, and return whether that works; if not, a warning says why."""
    try:
        given.data()
        return True
    except native.NativeError as error:
        log.warning("%s is not used for %s: %s", given.path, given.situation.node.fusion, error)
        return False


def prepare(situation: Situation, inputs: Sequence[TensorSpec]) -> PreparedTemplate:
    """Make the template of inputs whose dynamic dims are -1 - k, but load none of its kernels yet.

    Raises what the host raises where it has no plan for any sizes.
    """
    with _lock:
        key = situation.key(inputs)
        prepared = _prepared.get(key)
        if prepared is None:
            prepared = _prepared[key] = new_template(situation, inputs)
            _recent.append(prepared)
        return prepared


def equip(known: Iterable[tuple[Situation, PreparedTemplate | GivenTemplate]]) -> None:
    """Give the nodes of sessions that were just made their templates, so that they need not ask when they first run.

    known  nodes of models with their templates, whose kernels that first runs need are loaded

    A node is known by its name and by all that a template depends on but inputs.  One that gets a template for other
    inputs, or cannot read it, asks as if it had none.
    """
    by_node = {_place(each): template for each, template in known}
    for request in native.new_nodes() if by_node else ():
        with _lock:
            template = by_node.get(_place(_situation(request)))
        is_empty = isinstance(template, PreparedTemplate) and not template.template.variants
        if template is None or is_empty or request.measure:
            continue
        try:
            data = template.data() if isinstance(template, GivenTemplate) else template.data_so_far()
            native.give_template(request.kernel, data)
        except Exception as error:  # of a plan that cannot be written or read; the first run raises it, too
            log.info("node '%s' asks for its plans when it first runs: %s", request.node, error)
            continue
        with _lock:
            _note(request).append(template)


def _place(situation: Situation) -> tuple[object, ...]:
    """Return what is equal for a node of a model and for that of its session."""
    return (situation.node.name, *situation.key(()))


def _situation(request: native.Request) -> Situation:
    node = fused_node(request.node, request.attributes)
    device = device_of(request.provider, request.device, request.tf32, request.shared)
    return Situation(node, device, request.provider, request.verdicts)


def _note(request: native.Request) -> list[PreparedTemplate | GivenTemplate]:
    """Note a node, and return the templates that it has."""
    if request.count_runs:
        _observed[request.kernel] = not request.cuda_graph
    return _templates_of_nodes.setdefault(request.kernel, [])


def forget_node(kernel: int) -> None:
    """Forget the templates and the body of a node whose session is gone."""
    _templates_of_nodes.pop(kernel, None)
    body_runs.forget_node(kernel)
    _observed.pop(kernel, None)


def templates_in_use() -> list[PreparedTemplate | GivenTemplate]:
    """Return the templates of the nodes of sessions, each of them once."""
    found = {id(each): each for of_node in list(_templates_of_nodes.values()) for each in list(of_node)}
    return list(found.values())


def take_runs() -> Iterator[tuple[PreparedTemplate, tuple[int, ...], int]]:
    """Yield the sizes at which nodes whose runs are counted ran since the last call, by template, and how often.

    Nodes that run by templates of plan files are left out, and so are sizes that have a template for themselves.
    """
    for kernel in list(_observed):
        templates = [each for each in _templates_of_nodes.get(kernel, ()) if isinstance(each, PreparedTemplate)]
        for inputs, runs in native.take_runs(kernel):
            fitting = ((each, sizes_of(each.template.inputs, inputs)) for each in templates)
            if found := next(((each, sizes) for each, sizes in fitting if sizes is not None), None):
                yield (*found, runs)


def measure(prepared: PreparedTemplate, sizes: tuple[int, ...], verdicts: Verdicts) -> bool:
    """Measure the plans of a template at these sizes, and return whether the fastest one is added.

    Nodes can be planned meanwhile.  Raises what the host raises.
    """
    return _add_fastest(prepared.situation, prepared, sizes, measure=True, verdicts=verdicts)


def complete(prepared: PreparedTemplate) -> None:
    """Let nodes have all kernels of a template that lacked some.  Raises KernelError, NativeError."""
    _give(prepared, list(_templates_of_nodes))


def renew(prepared: PreparedTemplate) -> None:
    """Let later runs of nodes whose runs are counted take the variants that their template has now.

    Nodes of sessions that capture CUDA graphs keep the plans that they have.  Raises KernelError, NativeError.
    """
    _give(prepared, [kernel for kernel, may_change in list(_observed.items()) if may_change])


def _give(prepared: PreparedTemplate, nodes: Iterable[int]) -> None:
    """Give a template as it is now, with all its kernels, to those of the nodes that run by it."""
    with _lock:
        data = prepared.data()
    for kernel in nodes if prepared.template.variants else ():
        if any(each is prepared for each in list(_templates_of_nodes.get(kernel, ()))):
            native.give_template(kernel, data)


def device_of(provider: str, ordinal: int, tf32: bool, shared: bool = False) -> Device:
    """Return a GPU with a session's settings."""
    return dataclasses.replace(backends[provider].device(ordinal), tf32=tf32, shared=shared, ordinal=ordinal)


def ready_plan(plan: Plan, inputs: Sequence[TensorSpec], ordinal: int = 0, provider: str = CUDA) -> ReadyPlan:
    """Load a plan's kernels, so that it can run without onnxruntime.  Raises KernelError, NativeError."""
    return ReadyPlan(plan, load_kernels(plan, backends[provider], ordinal), inputs, ordinal)


def _host_of(situation: Situation) -> Host:
    host = find_host(situation.node.fusion)
    if host is None:
        raise KernelError(f"fusion {situation.node.fusion} has no kernel")
    return host


def _template_of_files(situation: Situation, inputs: Sequence[TensorSpec]) -> GivenTemplate | None:
    for source in reversed(plan_files.values()):
        given = source.find(situation, inputs)
        if given and not _is_measured_since(situation, given):
            return given
    return None


def _is_measured_since(situation: Situation, given: GivenTemplate) -> bool:
    """Return whether measurements on this machine know of sizes of which a plan file does not."""
    if not (situation.verdicts and _verdicts):
        return False
    measured = _verdicts[0].inputs_measured(situation.node, given.inputs, situation.device, situation.provider)
    sizes = {sizes_of(given.inputs, each) for each in measured} - {None}
    return not sizes <= given.words.tuned_sizes


def _template_for(situation: Situation, inputs: Sequence[TensorSpec]) -> PreparedTemplate:
    """Return the template of inputs that a node has met: with the dynamic dims that its model says, or with none.

    It is one without dynamic dims, too, where a host has no plan for those of the model.
    """
    for dims in _patterns.get(signature(situation.node, (), situation.device), ()):
        if len(dims) == len(inputs):
            pattern = [dataclasses.replace(spec, shape=shape) for spec, shape in zip(inputs, dims, strict=True)]
            if sizes_of(pattern, inputs) is not None:
                with suppress(ArithmeticError, ValueError):
                    return prepare(situation, pattern)
    return prepare(situation, inputs)


def new_template(
    situation: Situation, inputs: Sequence[TensorSpec], samples: Sequence[Sequence[int]] = ()
) -> PreparedTemplate:
    """Make a template of inputs whose dynamic dims are -1 - k, with what measurements say of it.

    samples  combinations of sizes that it is made for; those of the usual spread if there are none

    Raises what the host raises where it has a plan for no sample.
    """
    host, node, device = _host_of(situation), situation.node, situation.device
    if why := host.supports(node, tuple(spec.dtype for spec in inputs), device):
        raise KernelError(f"{why}; register the model that runs with its session options")
    prepared = PreparedTemplate(
        make_template(host, node, inputs, device, samples), backends[situation.provider], situation
    )
    if situation.verdicts and _verdicts:
        for measured in _verdicts[0].inputs_measured(node, inputs, device, situation.provider):
            sizes = sizes_of(inputs, measured)
            if sizes is not None:
                _add_fastest(situation, prepared, sizes, measure=False)
    return prepared


def _with_sizes(
    situation: Situation, prepared: PreparedTemplate, sizes: tuple[int, ...], inputs: Sequence[TensorSpec]
) -> PreparedTemplate:
    """Return a template that has a plan for these sizes: this one with one more, or one for these sizes alone.

    The latter is for what only a library runs that plans for single shapes.  Raises what the host raises, and what
    loading the kernels of all its plans has raised.
    """
    try:
        variants = candidates_at(_host_of(situation), prepared.template, sizes)
    except (ArithmeticError, ValueError):
        alone = prepare(situation, inputs)
        if alone is prepared:
            raise
        return alone
    errors = [prepared.error_of(each) for each in variants]
    if all(errors):
        error = next(filter(None, errors))
        raise type(error)(*error.args)
    prepared.add(variants[errors.index(None)])
    return prepared


def _measured(situation: Situation, prepared: PreparedTemplate, sizes: tuple[int, ...]) -> PreparedTemplate:
    """Return a template for these sizes alone, so that the node asks again at others.

    It has the fastest of the plans that the host offers, which is measured unless it was before; `prepared`, the
    template for all sizes, then has it too.
    """
    template = prepared.template
    if not any(each.tuned and each.hints == sizes for each in template.variants):
        _add_fastest(situation, prepared, sizes, measure=True)
    chosen = template.chosen(sizes)
    if chosen is None or chosen.hints != sizes:
        chosen = candidates_at(_host_of(situation), template, sizes)[0]
    alone = Template(situation.node, with_sizes(template.inputs, sizes), situation.device, Expressions())
    alone.variants.append(Variant(concrete(chosen.plan), (), (), (), ()))
    return PreparedTemplate(alone, backends[situation.provider], situation)


def _add_fastest(
    situation: Situation,
    prepared: PreparedTemplate,
    sizes: tuple[int, ...],
    measure: bool,
    verdicts: Verdicts | None = None,
) -> bool:
    """Add the plan that measurements say is the fastest at these sizes, if they say it, and return whether they do."""
    template, asked = prepared.template, [verdicts] if verdicts else _verdicts
    with _lock:
        variants = candidates_at(_host_of(situation), template, sizes)
    plans = [concrete(each.plan) for each in variants]
    if not asked or len(plans) < 2 or not plans[0].steps:
        return False
    inputs = with_sizes(template.inputs, sizes)
    index = asked[0].choose(plans, situation.node, inputs, situation.device, situation.provider, measure)
    if index is None:
        return False
    with _lock:
        prepared.add(dataclasses.replace(variants[index], soft=(), tuned=True))
    return True
