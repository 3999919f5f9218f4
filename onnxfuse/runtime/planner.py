"""Make the plan templates of sessions' nodes, when a session is made or when a node gets inputs of new shapes.

A template has the plans of a node for all sizes of its dynamic dims: one variant for each range of sizes.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from onnxfuse.errors import KernelError, OnnxfuseError
from onnxfuse.runtime import body_runs, kernel_failures, late_work
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS, device_of
from onnxfuse.runtime.expressions import Expressions
from onnxfuse.runtime.hosts import Host, find_host
from onnxfuse.runtime.loaded_templates import GivenTemplate, PreparedTemplate
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.template import Template, Variant, concrete, make_template, sizes_of, with_sizes
from onnxfuse.runtime.template_key import Situation, signature

log: Final = logging.getLogger("onnxfuse")
MAX_UNUSED_TEMPLATES: Final = 512  # templates that are kept for nodes that have not run yet, or whose sessions ended
MAX_PATTERNS: Final = 64  # maximum number of lists of input dims that `expect` keeps per group of equal nodes
Dims = tuple[tuple[int, ...], ...]  # dims of each input of a node; dynamic size number k is written as -1 - k


class Verdicts(Protocol):
    """The results of measuring the plans of nodes."""

    def inputs_measured(
        self, situation: Situation, inputs: Sequence[TensorSpec], /
    ) -> Iterable[tuple[TensorSpec, ...]]:
        """Return the inputs at which a node's plans were measured; callers must check whether they fit `inputs`."""

    def choose(
        self, plans: Sequence[Plan], situation: Situation, inputs: Sequence[TensorSpec], measure: bool, /
    ) -> int | None:
        """Return the index of the plan that was measured to be the fastest; None if no plan was measured.

        measure  whether the plans may be measured now
        """


class TemplateSource(Protocol):
    """A plan file for GPUs of one kind."""

    def find(self, situation: Situation, inputs: Sequence[TensorSpec], /) -> GivenTemplate | None:
        """Return the file's template for these inputs, or None; dynamic dim number k may be written as -1 - k."""


PlanFileKey = tuple[Path, str, Device]  # path, provider, and kind of GPU


@dataclass
class _SessionNode:
    """A node of a session."""

    counts_runs: bool  # whether the node's runs are counted, so that its plans are measured between runs
    may_change: bool  # whether later runs may use other plans, because no CUDA graph holds the present ones
    templates: list[PreparedTemplate | GivenTemplate] = field(default_factory=list)
    is_equipped: bool = False  # whether it got a template that it had not requested


class Planner:
    """The templates of all sessions' nodes, the plan files that they can come from, and the measurements to use."""

    def __init__(self) -> None:
        """Start without nodes, plan files and measurements."""
        self.verdicts: Verdicts | None = None  # measurements that decide between plans, in sessions that use them
        self.plan_files: Final[dict[PlanFileKey, TemplateSource]] = {}  # searched from the last loaded to the first
        # For sessions whose nodes lack templates so far: the least number that their nodes can have.
        self.preparations: Final[dict[threading.Event, int]] = {}
        self._nodes: Final[dict[int, _SessionNode]] = {}  # by the number that the native library gave the node
        self._prepared: Final = weakref.WeakValueDictionary[tuple[str, str, int, bool], PreparedTemplate]()
        self._recent: Final = deque[PreparedTemplate](maxlen=MAX_UNUSED_TEMPLATES)
        self._patterns: Final = defaultdict[str, deque[Dims]](lambda: deque(maxlen=MAX_PATTERNS))
        # Held while plans are made, but not while kernels are compiled, so that equal nodes make their plans once.
        # `forget_node` never takes it, because the garbage collector may call that function at any time.
        self._lock: Final = threading.RLock()
        # Held while the bytes of a template are made and sent, so that older bytes never replace newer ones.
        self._sending: Final = threading.RLock()

    def begin_preparation(self, ends: threading.Event) -> None:
        """Note that templates are made for a new session, whose nodes request none meanwhile.

        Nodes that are older do: sessions may be made so often that some preparation is always under way.
        """
        with self._sending:
            self.preparations[ends] = native.load().onnxfuse_next_number()
            self._expect()

    def end_preparation(self, ends: threading.Event) -> None:
        """Note, once or more often, that the nodes of a new session have their templates."""
        with self._sending:
            if self.preparations.pop(ends, None) is not None:
                self._expect()

    def _expect(self) -> None:
        native.load().onnxfuse_expect_templates(min(self.preparations.values(), default=2**64 - 1))

    def wait_for_preparations(self, kernel: int | None = None) -> None:
        """Wait until a node, or else the nodes of all sessions that are made by now, have their templates."""
        for ends, first in list(self.preparations.items()):
            if kernel is None or kernel >= first:
                ends.wait()

    def answer_request(self, request: native.Request) -> bytes | None:
        """Return the bytes of the template that the native library asks for; None if the node's body must run.

        The body (the ONNX function that the node calls) runs where planning or compiling fails, and a warning says why.
        It also runs as long as the plans are being made and compiled, unless the session waits for them.  Without a
        body, an exception becomes an onnxruntime error of the node.
        """
        situation = _situation(request)
        node = self._node(request)  # here, because its session may be gone when a thread makes the template
        if request.measure or not body_runs.has_body(situation.node, situation.device):
            return self._template_bytes(request, situation)
        if request.wait:
            return self._template_or_body(request, situation)
        was_equipped = node.is_equipped

        def answer() -> bytes | None:
            self.wait_for_preparations(request.kernel)
            if node.is_equipped and not was_equipped:
                return None  # the next run finds that template, or requests another one
            return self._template_or_body(request, situation)

        return late_work.soon(answer, partial(self._give, request.kernel))

    def _template_or_body(self, request: native.Request, situation: Situation) -> bytes | None:
        try:
            return self._template_bytes(request, situation)
        except Exception as error:  # modules that plan may come from other packages and raise anything
            kernel_failures.note(situation.node, situation.device, error, "body")
            return None

    def open_body(self, request: native.Request) -> int:
        """Open a session for the body of a node (its ONNX function), and return the session's address."""
        situation = _situation(request)
        return body_runs.open_body(situation.node, request.inputs, situation.provider, situation.device)

    def _template_bytes(self, request: native.Request, situation: Situation) -> bytes:
        with self._lock:
            node = self._nodes.get(request.kernel)
            of_node = node.templates if node else []
            given = None if request.measure else self._template_of_files(situation, request.inputs)
            # If the node already has the template of a file, that template has no plan for these sizes.
            if given is not None and given not in of_node and given.loads():
                of_node.append(given)
                return given.data()
            prepared = self._template_for(situation, request.inputs)
            sizes = sizes_of(prepared.template.inputs, request.inputs)
            assert sizes is not None, "a template fits the inputs that it is made for"
            if request.measure:
                prepared = self._measured(prepared, sizes)
        if request.measure:
            data = prepared.data()
            for error in prepared.refused.values():
                raise type(error)(*error.args)
        else:
            _add(of_node, prepared)  # before its kernels are loaded, because another thread may load and send them
            all_kernels = request.all_kernels or not request.wait  # a thread that would load the others may be gone
            prepared, data = self._loaded(prepared, sizes, all_kernels, partial(self._has_node, request.kernel))
        _add(of_node, prepared)
        return data

    def _has_node(self, kernel: int) -> bool:
        """Return whether the session of a node still exists, and Python does not exit."""
        return kernel in self._nodes and not late_work.exits()

    def _loaded(
        self,
        prepared: PreparedTemplate,
        sizes: tuple[int, ...],
        all_kernels: bool = False,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> tuple[PreparedTemplate, bytes]:
        """Return a template that has a plan for these sizes, and its bytes, with the kernels of that plan loaded.

        The template is `prepared`, which gets one more variant (a plan for a range of sizes) if needed.  If the host
        (the module that makes the plans) has plans only for known sizes, as a host that calls a library has, the result
        is a template for these sizes alone.  If the kernels of a plan cannot be loaded, the next correct plan is used.
        If `goes_on` returns False, no more kernels are loaded.

        Raises KernelError or NativeError if the kernels of no plan can be loaded, and any error of the host.
        """
        while True:
            with self._lock:
                variant = prepared.template.chosen(sizes)
                if variant is None:
                    try:
                        _add_variant(prepared, sizes)
                    except (ArithmeticError, ValueError):
                        if not sizes:
                            raise
                        inputs = with_sizes(prepared.template.inputs, sizes)
                        prepared, sizes = self.prepare(prepared.situation, inputs), ()
            data = prepared.data(None if all_kernels else variant, goes_on)
            if prepared.template.chosen(sizes) is not None:
                return prepared, data

    def mend(self, prepared: PreparedTemplate) -> None:
        """Give a template the next candidate plans if none of its kernels could be loaded.

        The next plans are made for the sizes of the dropped variants (plans for a range of sizes, whose kernels could
        not be loaded).  If these plans fail too, the node runs as its body (the ONNX function that it calls) at all
        sizes, from the next session on.  If all kernels compiled and only the GPU refused to load them, nothing is
        done: the GPU may lack memory for a while.
        """
        errors = prepared.refused.values()
        if prepared.kernels or not any(isinstance(each, KernelError) for each in errors):
            return
        situation, template = prepared.situation, prepared.template
        for variant in list(prepared.dropped):  # without the lock, as kernels are compiled here
            with suppress(ArithmeticError, ValueError, OnnxfuseError):
                self._loaded(prepared, variant.hints)
        with self._lock:
            if not prepared.kernels:
                template.variants[:] = [each for each in template.variants if not each.plan.steps]
                error = next(each for each in errors if isinstance(each, KernelError))
                kernel_failures.note(situation.node, situation.device, error, "body always")

    def add_plan_file(self, key: PlanFileKey, source: TemplateSource) -> None:
        """Search this plan file before all others from now on; forget earlier content of the same path."""
        with self._lock:
            self.drop_plan_file(key)
            self.plan_files[key] = source

    def drop_plan_file(self, key: PlanFileKey) -> None:
        """Stop searching a plan file; nodes keep the templates that they have."""
        with self._lock:
            self.plan_files.pop(key, None)

    def expect(self, node: FusedNode, dims: Dims, device: Device) -> None:
        """Share one template, for all dynamic sizes, among nodes equal to this one whose inputs have these dims."""
        with self._lock:
            of_node = self._patterns[signature(node, (), device)]
            if dims not in of_node:
                of_node.append(dims)

    def given_template(self, situation: Situation, inputs: Sequence[TensorSpec]) -> GivenTemplate | None:
        """Return a plan file's template for these inputs, or None; dynamic dim number k may be written as -1 - k."""
        with self._lock:
            return self._template_of_files(situation, inputs)

    def prepare(self, situation: Situation, inputs: Sequence[TensorSpec]) -> PreparedTemplate:
        """Return the template (the plans for all sizes) of inputs whose dynamic dim number k is written as -1 - k.

        The template is made by the first call, which loads none of its kernels.  Raises the error of the host, the
        module that makes the plans, if the host has no plan for any sizes.
        """
        with self._lock:
            key = situation.key(inputs)
            prepared = self._prepared.get(key)
            if prepared is None:
                prepared = self._prepared[key] = self.new_template(situation, inputs)
                self._recent.append(prepared)
            return prepared

    def equip(self, known: Iterable[tuple[Situation, PreparedTemplate | GivenTemplate]]) -> None:
        """Give the nodes of new sessions their templates, so that they need not request them in their first runs.

        known  nodes of models and their templates, with the kernels loaded that first runs probably need

        A node is identified by its name and by everything that a template depends on except inputs.  If its template is
        for other inputs or cannot be read, the node requests one as if it had none.
        """
        by_node = {_place(each): template for each, template in known}
        found = list[tuple[native.Request, PreparedTemplate | GivenTemplate, _SessionNode]]()
        for request in native.new_nodes() if by_node else ():
            template = by_node.get(_place(_situation(request)))
            is_empty = isinstance(template, PreparedTemplate) and not template.template.variants
            if template is not None and not is_empty and not request.measure:
                found.append((request, template, self._node(request)))
        for request, template, node in found:
            try:
                with self._sending:
                    if not native.has_node(request.kernel):  # it was forgotten, maybe before it was added
                        self._nodes.pop(request.kernel, None)
                        continue
                    data = template.data() if isinstance(template, GivenTemplate) else template.data_so_far()
                    node.is_equipped = True  # first, so that a request after the template came does not expect another
                    native.give_template(request.kernel, data)
                    node.templates.append(template)
            except Exception as error:  # a plan cannot be written or read
                node.is_equipped = False
                log.info("node '%s' asks for its plans when it first runs: %s", request.node, error)

    def _node(self, request: native.Request) -> _SessionNode:
        """Return the node that made a request; a node without earlier requests is added to the known nodes."""
        counts = request.count_runs
        return self._nodes.setdefault(request.kernel, _SessionNode(counts, counts and not request.cuda_graph))

    def forget_node(self, kernel: int) -> None:
        """Forget the templates of a node whose session is gone."""
        self._nodes.pop(kernel, None)

    def templates_in_use(self) -> list[PreparedTemplate | GivenTemplate]:
        """Return the templates of all sessions' nodes, each of them once."""
        found = {id(each): each for node in list(self._nodes.values()) for each in list(node.templates)}
        return list(found.values())

    def compiles(self, place: kernel_failures.Place) -> bool:
        """Return whether kernels of the nodes with this key (`place_of`) are still to be compiled or loaded."""
        return any(
            isinstance(each, PreparedTemplate)
            and kernel_failures.place_of(each.situation.node, each.situation.device) == place
            and each.missing()
            for each in self.templates_in_use()
        )

    def take_runs(self) -> Iterator[tuple[PreparedTemplate, tuple[int, ...], int]]:
        """Yield how often nodes ran since the last call: a template, sizes, and the number of runs at these sizes.

        Nodes that have only templates of plan files are left out.  The sizes are () for a template of known sizes.
        """
        for kernel, node in list(self._nodes.items()):
            templates = [each for each in node.templates if isinstance(each, PreparedTemplate)]
            for inputs, runs in native.take_runs(kernel) if node.counts_runs else ():
                fitting = ((each, sizes_of(each.template.inputs, inputs)) for each in templates)
                if found := next(((each, sizes) for each, sizes in fitting if sizes is not None), None):
                    yield (*found, runs)

    def send(self, prepared: PreparedTemplate, only_observed: bool = False) -> None:
        """Send the bytes of a template to the nodes that use it.

        only_observed  leave out nodes whose runs are not counted, and those of sessions that capture CUDA graphs

        Raises NativeError.
        """
        with self._sending:
            data = prepared.data_so_far()
            for kernel, node in list(self._nodes.items()) if prepared.template.variants else ():
                has_it = any(each is prepared for each in list(node.templates))
                if has_it and (node.may_change or not only_observed):
                    native.give_template(kernel, data)

    def drop_bodies(self, templates: Iterable[PreparedTemplate]) -> None:
        """Close the sessions that ran bodies of nodes with these templates, except where no kernel can run, or not yet.

        A run that needs one opens it again.
        """
        can_run = (each for each in templates if any(of.plan.steps for of in each.template.variants))
        of_nodes = {id(each) for each in can_run if not each.missing()}
        for kernel, node in list(self._nodes.items()):
            if any(id(each) in of_nodes for each in list(node.templates)):
                native.load().onnxfuse_drop_bodies(kernel)

    def _give(self, kernel: int, data: bytes | None) -> None:
        """Send its templates, with the kernels that are loaded by now, to a node, unless the node's body must run."""
        try:
            with self._sending:
                node = self._nodes.get(kernel)
                for each in list(node.templates) if node and data is not None else ():
                    native.give_template(kernel, each.data() if isinstance(each, GivenTemplate) else each.data_so_far())
        except native.NativeError as error:
            log.warning("a node goes on with its body: %s", error)

    def _template_of_files(self, situation: Situation, inputs: Sequence[TensorSpec]) -> GivenTemplate | None:
        for source in reversed(self.plan_files.values()):
            given = source.find(situation, inputs)
            if given and not self._is_measured_at_other_sizes(situation, given):
                return given
        return None

    def _is_measured_at_other_sizes(self, situation: Situation, given: GivenTemplate) -> bool:
        """Return whether this machine has measured plans at sizes for which the plan file was not tuned."""
        if not (situation.verdicts and self.verdicts):
            return False
        measured = self.verdicts.inputs_measured(situation, given.inputs)
        sizes = {sizes_of(given.inputs, each) for each in measured} - {None}
        return not sizes <= given.words.tuned_sizes

    def _template_for(self, situation: Situation, inputs: Sequence[TensorSpec]) -> PreparedTemplate:
        """Return the template for a run's inputs, with the model's dynamic dims if these are known.

        If they are not known, or if the host (the module that makes the plans) has plans only for known sizes, the
        template is for these inputs alone.
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
        """Make a template of inputs whose dynamic dim number k is written as -1 - k.

        Near sizes at which plans were measured, the template uses the plan that was the fastest.

        samples  combinations of sizes that the template is made for; if there are none, the usual spread of sizes

        Raises the error of the host (the module that makes the plans) if the host has no plan for any sample.
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
        """Return a template for these sizes alone, so that the node requests another one at other sizes.

        The returned template has the fastest of the candidate plans, which are measured now unless they were measured
        before.  The fastest plan is also added to `prepared`, the template for all sizes.
        """
        template, situation = prepared.template, prepared.situation
        is_known = any(each.tuned and each.hints == sizes for each in template.variants)
        if self.verdicts and not is_known:
            self.add_fastest(prepared, sizes, self.verdicts, measure=True)
        chosen = template.chosen(sizes)
        if chosen is None or chosen.hints != sizes:
            chosen = prepared.candidates(_host_of(situation), sizes)[0]
        alone = Template(situation.node, with_sizes(template.inputs, sizes), situation.device, Expressions())
        alone.variants.append(Variant(concrete(chosen.plan), (), (), (), ()))
        return PreparedTemplate(alone, BACKENDS[situation.provider], situation)

    def add_fastest(
        self, prepared: PreparedTemplate, sizes: tuple[int, ...], verdicts: Verdicts, measure: bool
    ) -> bool:
        """Add the plan that was measured to be the fastest at these sizes; return False if none is known.

        measure  whether the plans may be measured now; other threads can plan nodes while this thread measures

        Raises any error of the host, which is the module that makes the plans.
        """
        template, situation = prepared.template, prepared.situation
        with self._lock:
            variants = prepared.candidates(_host_of(situation), sizes)
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
    """Add, for these sizes, the first plan whose kernels are not known to fail.

    If the kernels of all plans have failed, raises one of their errors.  Also raises any error of making plans.
    """
    variants = prepared.candidates(_host_of(prepared.situation), sizes)
    errors = [prepared.error_of(each) for each in variants]
    if all(errors):
        error = next(filter(None, errors))
        raise type(error)(*error.args)
    prepared.add(variants[errors.index(None)])


def _add(templates: list[PreparedTemplate | GivenTemplate], one: PreparedTemplate) -> None:
    if one not in templates:
        templates.append(one)


def _situation(request: native.Request) -> Situation:
    node = FusedNode.read(request.node, request.attributes)
    device = device_of(request.provider, request.device, request.tf32, request.shared)
    return Situation(node, device, request.provider, request.verdicts)


def _place(situation: Situation) -> tuple[object, ...]:
    """Return a key that is equal for a node of a model and for the same node in a session."""
    return (situation.node.name, *situation.key(()))


def _host_of(situation: Situation) -> Host:
    host = find_host(situation.node.fusion)
    if host is None:
        raise KernelError(f"fusion {situation.node.fusion} has no kernel")
    return host


planner: Final = Planner()
