"""Make the plan templates that nodes of sessions run by: when a session is made, or when a node meets other inputs."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from onnxfuse.errors import KernelError, OnnxfuseError
from onnxfuse.runtime import body_runs, kernel_failures
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS, device_of
from onnxfuse.runtime.expressions import Expressions
from onnxfuse.runtime.hosts import Host, find_host
from onnxfuse.runtime.loaded_templates import GivenTemplate, PreparedTemplate
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.template import Template, Variant, candidates_at, concrete, make_template, sizes_of, with_sizes
from onnxfuse.runtime.template_key import Situation, signature

log: Final = logging.getLogger("onnxfuse")
MAX_UNUSED_TEMPLATES: Final = 512  # that are kept for nodes that have not run yet, or whose sessions are gone
MAX_PATTERNS: Final = 64  # of the dims of equal nodes
Dims = tuple[tuple[int, ...], ...]  # of each input of a node; a dynamic one is -1 - k, where k is the number of a size


class Verdicts(Protocol):
    """What measurements say of the plans of nodes."""

    def inputs_measured(
        self, situation: Situation, inputs: Sequence[TensorSpec], /
    ) -> Iterable[tuple[TensorSpec, ...]]:
        """Return the inputs of a node of these dims at which its plans were measured."""

    def choose(
        self, plans: Sequence[Plan], situation: Situation, inputs: Sequence[TensorSpec], measure: bool, /
    ) -> int | None:
        """Return the index of the plan that was measured to be the fastest; None if that is not known.

        measure  whether the plans may be measured now
        """


class TemplateSource(Protocol):
    """A plan file for GPUs of one kind."""

    def find(self, situation: Situation, inputs: Sequence[TensorSpec], /) -> GivenTemplate | None:
        """Return its template for inputs of a node, whose dynamic dims may be -1 - k; None if it has none."""


PlanFileKey = tuple[Path, str, Device]  # path, provider, and kind of GPU


@dataclass
class _SessionNode:
    """A node of a session."""

    counts_runs: bool  # so that its plans are measured between them
    may_change: bool  # whether later runs may take other plans, as no CUDA graph has those that it has
    templates: list[PreparedTemplate | GivenTemplate] = field(default_factory=list)


class Planner:
    """The templates of the nodes of all sessions, the plan files that they may come from, and what measurements say."""

    def __init__(self) -> None:
        """Know of no node, no file and no measurement."""
        self.verdicts: Verdicts | None = None  # decide between plans, in sessions that allow it
        self.plan_files: Final[dict[PlanFileKey, TemplateSource]] = {}  # the one that was loaded last is asked first
        self._nodes: Final[dict[int, _SessionNode]] = {}  # by the native library's number of a node
        self._prepared: Final = weakref.WeakValueDictionary[tuple[str, str, int, bool], PreparedTemplate]()
        self._recent: Final = deque[PreparedTemplate](maxlen=MAX_UNUSED_TEMPLATES)
        self._patterns: Final = defaultdict[str, deque[Dims]](lambda: deque(maxlen=MAX_PATTERNS))
        # Held while a template is made, so that equal nodes make it once. `forget_node` never takes it, because the
        # garbage collector may call that function at any time.
        self._lock: Final = threading.RLock()

    def answer_request(self, request: native.Request) -> bytes | None:
        """Return the bytes of the template that the native library asks for; None if the node's body must run.

        It does where planning or compiling fails, and a warning says why.  Without a body, what this raises becomes an
        onnxruntime error of the node.
        """
        situation = _situation(request)
        try:
            return self._template_bytes(request, situation)
        except Exception as error:  # of hosts, of other packages too
            if request.measure or not body_runs.has_body(situation.node, situation.device):
                raise
            kernel_failures.note(situation.node, situation.device, error, "body")
            return None

    def run_body(self, request: native.BodyRequest) -> None:
        """Run the body of a node.  What this raises becomes an onnxruntime error of the node."""
        situation = _situation(request.node)
        body_runs.run_body(request, situation.node, situation.device)

    def _template_bytes(self, request: native.Request, situation: Situation) -> bytes:
        with self._lock:
            of_node = self._node(request).templates
            given = None if request.measure else self._template_of_files(situation, request.inputs)
            if given is not None and given not in of_node and given.loads():  # else it has no plan for these sizes
                of_node.append(given)
                return given.data()
            prepared = self._template_for(situation, request.inputs)
            sizes = sizes_of(prepared.template.inputs, request.inputs)
            assert sizes is not None, "a template fits the inputs that it is made for"
            if request.measure:
                prepared = self._measured(prepared, sizes)
                data = prepared.data()
                for error in prepared.refused.values():
                    raise type(error)(*error.args)
            else:
                prepared, data = self._loaded(prepared, sizes, request.all_kernels)
            if prepared not in of_node:
                of_node.append(prepared)
            return data

    def _loaded(
        self, prepared: PreparedTemplate, sizes: tuple[int, ...], all_kernels: bool = False
    ) -> tuple[PreparedTemplate, bytes]:
        """Return a template that has a plan for these sizes, and its bytes, with the kernels of that plan loaded.

        It is this one, with one more variant if need be, or one for these sizes alone where only a library runs the
        node that plans for single shapes.  A plan whose kernels cannot be loaded gives way to the next that is right.

        Raises KernelError, NativeError if there is none, and what the host raises.
        """
        while True:
            variant = prepared.template.chosen(sizes)
            if variant is None:
                try:
                    _add_variant(prepared, sizes)
                except (ArithmeticError, ValueError):
                    if not sizes:
                        raise
                    inputs = with_sizes(prepared.template.inputs, sizes)
                    prepared, sizes = self.prepare(prepared.situation, inputs), ()
            data = prepared.data(None if all_kernels else variant)
            if prepared.template.chosen(sizes) is not None:
                return prepared, data

    def mend(self, prepared: PreparedTemplate) -> None:
        """Give a template of which no kernel could be loaded the next plans of its host, for the sizes that were tried.

        If these fail too, the node runs as its body for all sizes from the next session on; not if the GPU refused to
        load what was compiled, because it may lack memory for a while.
        """
        errors = prepared.refused.values()
        if prepared.kernels or not any(isinstance(each, KernelError) for each in errors):
            return
        situation, template = prepared.situation, prepared.template
        with self._lock:
            for variant in list(prepared.dropped):
                with suppress(ArithmeticError, ValueError, OnnxfuseError):
                    self._loaded(prepared, variant.hints)
            if not prepared.kernels:
                template.variants[:] = [each for each in template.variants if not each.plan.steps]
                error = next(each for each in errors if isinstance(each, KernelError))
                kernel_failures.note(situation.node, situation.device, error, "body always")

    def add_plan_file(self, key: PlanFileKey, source: TemplateSource) -> None:
        """Ask a plan file before all others from now on; what the same path held earlier is forgotten."""
        with self._lock:
            self.drop_plan_file(key)
            self.plan_files[key] = source

    def drop_plan_file(self, key: PlanFileKey) -> None:
        """Ask a plan file no longer; nodes keep the templates that they have."""
        with self._lock:
            self.plan_files.pop(key, None)

    def expect(self, node: FusedNode, dims: Dims, device: Device) -> None:
        """Let nodes equal to this one, of inputs with these dims, share one template for all dynamic sizes."""
        with self._lock:
            of_node = self._patterns[signature(node, (), device)]
            if dims not in of_node:
                of_node.append(dims)

    def given_template(self, situation: Situation, inputs: Sequence[TensorSpec]) -> GivenTemplate | None:
        """Return the template of a plan file for inputs whose dynamic dims may be -1 - k; None if none has one."""
        with self._lock:
            return self._template_of_files(situation, inputs)

    def prepare(self, situation: Situation, inputs: Sequence[TensorSpec]) -> PreparedTemplate:
        """Make the template of inputs whose dynamic dims are -1 - k, but load none of its kernels yet.

        Raises what the host raises where it has no plan for any sizes.
        """
        with self._lock:
            key = situation.key(inputs)
            prepared = self._prepared.get(key)
            if prepared is None:
                prepared = self._prepared[key] = self.new_template(situation, inputs)
                self._recent.append(prepared)
            return prepared

    def equip(self, known: Iterable[tuple[Situation, PreparedTemplate | GivenTemplate]]) -> None:
        """Give the nodes of new sessions their templates, so that they need not ask when they first run.

        known  nodes of models with their templates, whose kernels that first runs need are loaded

        A node is known by its name and by all that a template depends on but inputs.  One that gets a template for
        other inputs, or cannot read it, asks as if it had none.
        """
        by_node = {_place(each): template for each, template in known}
        for request in native.new_nodes() if by_node else ():
            with self._lock:
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
            with self._lock:
                self._node(request).templates.append(template)

    def _node(self, request: native.Request) -> _SessionNode:
        """Return the node of a request, which is known from now on."""
        counts = request.count_runs
        return self._nodes.setdefault(request.kernel, _SessionNode(counts, counts and not request.cuda_graph))

    def forget_node(self, kernel: int) -> None:
        """Forget the templates and the body of a node whose session is gone."""
        self._nodes.pop(kernel, None)
        body_runs.forget_node(kernel)

    def templates_in_use(self) -> list[PreparedTemplate | GivenTemplate]:
        """Return the templates of the nodes of sessions, each of them once."""
        found = {id(each): each for node in list(self._nodes.values()) for each in list(node.templates)}
        return list(found.values())

    def take_runs(self) -> Iterator[tuple[PreparedTemplate, tuple[int, ...], int]]:
        """Yield the sizes at which nodes whose runs are counted ran since the last call, by template, and how often.

        Nodes that run by templates of plan files are left out, and so are sizes that have a template for themselves.
        """
        for kernel, node in list(self._nodes.items()):
            templates = [each for each in node.templates if isinstance(each, PreparedTemplate)]
            for inputs, runs in native.take_runs(kernel) if node.counts_runs else ():
                fitting = ((each, sizes_of(each.template.inputs, inputs)) for each in templates)
                if found := next(((each, sizes) for each, sizes in fitting if sizes is not None), None):
                    yield (*found, runs)

    def complete(self, prepared: PreparedTemplate, only_observed: bool = False) -> None:
        """Give a template as it is now, with all its kernels, to the nodes that run by it.

        only_observed  leave out nodes whose runs are not counted, and those of sessions that capture CUDA graphs

        Raises KernelError, NativeError.
        """
        with self._lock:
            data = prepared.data()
        for kernel, node in list(self._nodes.items()) if prepared.template.variants else ():
            has_it = any(each is prepared for each in list(node.templates))
            if has_it and (node.may_change or not only_observed):
                native.give_template(kernel, data)

    def _template_of_files(self, situation: Situation, inputs: Sequence[TensorSpec]) -> GivenTemplate | None:
        for source in reversed(self.plan_files.values()):
            given = source.find(situation, inputs)
            if given and not self._is_measured_since(situation, given):
                return given
        return None

    def _is_measured_since(self, situation: Situation, given: GivenTemplate) -> bool:
        """Return whether measurements on this machine know of sizes of which a plan file does not."""
        if not (situation.verdicts and self.verdicts):
            return False
        measured = self.verdicts.inputs_measured(situation, given.inputs)
        sizes = {sizes_of(given.inputs, each) for each in measured} - {None}
        return not sizes <= given.words.tuned_sizes

    def _template_for(self, situation: Situation, inputs: Sequence[TensorSpec]) -> PreparedTemplate:
        """Return the template of inputs that a node has met: with the dynamic dims that its model says, or with none.

        It is one without dynamic dims, too, where a host has no plan for those of the model.
        """
        for dims in self._patterns.get(signature(situation.node, (), situation.device), ()):
            if len(dims) == len(inputs):
                pattern = [replace(spec, shape=shape) for spec, shape in zip(inputs, dims, strict=True)]
                if sizes_of(pattern, inputs) is not None:
                    with suppress(ArithmeticError, ValueError):
                        return self.prepare(situation, pattern)
        return self.prepare(situation, inputs)

    def new_template(
        self, situation: Situation, inputs: Sequence[TensorSpec], samples: Sequence[Sequence[int]] = ()
    ) -> PreparedTemplate:
        """Make a template of inputs whose dynamic dims are -1 - k, with what measurements say of it.

        samples  combinations of sizes that it is made for; those of the usual spread if there are none

        Raises what the host raises where it has a plan for no sample.
        """
        host, node, device = _host_of(situation), situation.node, situation.device
        if why := host.supports(node, tuple(spec.dtype for spec in inputs), device):
            raise KernelError(f"{why}; register the model that runs with its session options")
        prepared = PreparedTemplate(
            make_template(host, node, inputs, device, samples), BACKENDS[situation.provider], situation
        )
        if situation.verdicts and self.verdicts:
            for measured in self.verdicts.inputs_measured(situation, inputs):
                sizes = sizes_of(inputs, measured)
                if sizes is not None:
                    self.add_fastest(prepared, sizes, self.verdicts, measure=False)
        return prepared

    def _measured(self, prepared: PreparedTemplate, sizes: tuple[int, ...]) -> PreparedTemplate:
        """Return a template for these sizes alone, so that the node asks again at others.

        It has the fastest of the plans that the host offers, which is measured unless it was before; `prepared`, the
        template for all sizes, then has it too.
        """
        template, situation = prepared.template, prepared.situation
        is_known = any(each.tuned and each.hints == sizes for each in template.variants)
        if self.verdicts and not is_known:
            self.add_fastest(prepared, sizes, self.verdicts, measure=True)
        chosen = template.chosen(sizes)
        if chosen is None or chosen.hints != sizes:
            chosen = candidates_at(_host_of(situation), template, sizes)[0]
        alone = Template(situation.node, with_sizes(template.inputs, sizes), situation.device, Expressions())
        alone.variants.append(Variant(concrete(chosen.plan), (), (), (), ()))
        return PreparedTemplate(alone, BACKENDS[situation.provider], situation)

    def add_fastest(
        self, prepared: PreparedTemplate, sizes: tuple[int, ...], verdicts: Verdicts, measure: bool
    ) -> bool:
        """Add the plan that measurements say is the fastest at these sizes, if they say it, and return whether they do.

        measure  whether the plans may be measured now; nodes can be planned meanwhile

        Raises what the host raises.
        """
        template, situation = prepared.template, prepared.situation
        with self._lock:
            variants = candidates_at(_host_of(situation), template, sizes)
        plans = [concrete(each.plan) for each in variants]
        if len(plans) < 2 or not plans[0].steps:
            return False
        index = verdicts.choose(plans, situation, with_sizes(template.inputs, sizes), measure)
        if index is None:
            return False
        with self._lock:
            prepared.add(replace(variants[index], soft=(), tuned=True))
        return True


def _add_variant(prepared: PreparedTemplate, sizes: tuple[int, ...]) -> None:
    """Add the first plan for these sizes whose kernels are not known to fail.

    Raises what the host raises, and what loading the kernels of all its plans has raised.
    """
    variants = candidates_at(_host_of(prepared.situation), prepared.template, sizes)
    errors = [prepared.error_of(each) for each in variants]
    if all(errors):
        error = next(filter(None, errors))
        raise type(error)(*error.args)
    prepared.add(variants[errors.index(None)])


def _situation(request: native.Request) -> Situation:
    node = FusedNode.read(request.node, request.attributes)
    device = device_of(request.provider, request.device, request.tf32, request.shared)
    return Situation(node, device, request.provider, request.verdicts)


def _place(situation: Situation) -> tuple[object, ...]:
    """Return what is equal for a node of a model and for that of its session."""
    return (situation.node.name, *situation.key(()))


def _host_of(situation: Situation) -> Host:
    host = find_host(situation.node.fusion)
    if host is None:
        raise KernelError(f"fusion {situation.node.fusion} has no kernel")
    return host


planner: Final = Planner()
