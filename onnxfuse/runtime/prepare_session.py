"""Make the plan templates of a session's nodes, and compile their kernels, while onnxruntime makes the session.

A template has the plans of a node for all sizes of its dynamic dims.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import body_runs, late_work
from onnxfuse.runtime.background_compile import compile_in_background, likely_keys
from onnxfuse.runtime.call_inputs import inputs_of
from onnxfuse.runtime.fused_calls import Call
from onnxfuse.runtime.loaded_templates import GivenTemplate, PreparedTemplate, load_all
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.target import NoTarget, PlanChoice, Target
from onnxfuse.runtime.template_key import Situation

log: Final = logging.getLogger("onnxfuse")
PATIENCE: Final = 0.02  # seconds that a session waits for its plans if their kernels are compiled; more with `wait`


@dataclass
class Preparation:
    """The nodes of a session that run as kernels, with their templates: the plans of a node for all sizes."""

    made: list[tuple[Situation, PreparedTemplate | GivenTemplate]] = field(default_factory=list)
    suffices: threading.Event = field(default_factory=threading.Event)  # the session need not wait for more templates
    ends: threading.Event = field(default_factory=threading.Event)  # all templates are made
    is_left: threading.Event = field(default_factory=threading.Event)  # the session is made, or cannot be made
    equipped: threading.Event = field(default_factory=threading.Event)  # the nodes have all templates
    bodies: body_runs.EarlySessions | None = None  # if the first run needs bodies
    _lock: threading.Lock = field(default_factory=threading.Lock)  # held while bodies begin to be opened

    @property
    def templates(self) -> list[PreparedTemplate]:
        """The templates that no plan file holds, each of them once."""
        return list({id(each): each for _, each in self.made if isinstance(each, PreparedTemplate)}.values())

    def equip(self) -> None:
        """Give the nodes the templates that are made by now; if others follow, only those that can run somewhere."""
        has_all = self.ends.is_set()
        try:
            made = list(self.made)
            planner.equip(made if has_all else [each for each in made if each[1].has_kernels])
        finally:
            if has_all:
                self.end()

    def end(self) -> None:
        """Let requests of nodes wait for this preparation no more."""
        self.equipped.set()
        planner.end_preparation(self.equipped)

    def compile_others(self, session: object | None = None) -> None:
        """Compile the other kernels in the background, until they are compiled or the session is gone."""
        if self.equipped.is_set():
            compile_in_background(self.templates, session, self.close_bodies if self.bodies else None)
            return
        owner = weakref.ref(session) if session is not None else None

        def go_on() -> None:
            self.equipped.wait()
            if owner is None or owner() is not None:
                compile_in_background(self.templates, owner and owner(), self.close_bodies)
            else:
                self.close_bodies()

        late_work.start(go_on, "onnxfuse later plans")

    def open_bodies(self, calls: Sequence[Call], target: Target) -> None:
        """Open the sessions of the nodes' bodies in a thread, because the first run needs them."""
        inputs = ((call.node, inputs_of(call)) for call in calls if call.has_body)
        known = ((node, specs) for node, specs in inputs if specs is not None)
        bodies = body_runs.EarlySessions(known, target.provider, target.device)
        with self._lock, suppress(RuntimeError):  # the process has too many threads
            if not self.is_left.is_set():
                late_work.start(bodies.open, "onnxfuse bodies")
                self.bodies = bodies

    def abandon(self) -> None:
        """End without a session."""
        self.end()
        with self._lock:
            self.is_left.set()
        self.close_bodies()

    def close_bodies(self) -> None:
        """Close the sessions of bodies, also those that runs have needed, because kernels run now."""
        if self.bodies:
            self.bodies.close()
            planner.drop_bodies(self.templates)


@contextmanager
def preparation(
    calls: Sequence[Call], target: Target | NoTarget, choice: PlanChoice, wait: bool
) -> Iterator[Preparation]:
    """Prepare the nodes that run as kernels, in a thread, while the `with` block runs; then wait for the thread.

    The thread loads the kernels that first runs probably need; without `wait`, it leaves out those that it would have
    to compile.  If there is one, or if making the templates takes longer than PATIENCE, the session waits for none of
    them: nodes run as their bodies until they get theirs.

    A node that cannot be prepared, because its shapes are unknown, is planned in its first run.  Kernels that do not
    compile are left out, and a warning names the node.
    """
    prepared = Preparation()
    if isinstance(target, NoTarget) or not calls:
        prepared.equipped.set()
        yield prepared
        return
    planner.begin_preparation(prepared.equipped)
    given = (calls, target, choice, wait, prepared)
    thread = threading.Thread(target=_prepare, args=given, name="onnxfuse preparation")
    try:
        thread.start()
        yield prepared
        prepared.suffices.wait()
        prepared.equip()
    except BaseException:
        prepared.abandon()
        raise
    finally:
        prepared.is_left.set()


def _prepare(calls: Sequence[Call], target: Target, choice: PlanChoice, wait: bool, prepared: Preparation) -> None:
    """Make the templates, add them with their nodes to `prepared`, and load kernels for likely sizes.

    If the session does not wait for all templates, the nodes get the others here, after the session is made.
    """

    def hurry() -> None:
        if not wait and not prepared.suffices.is_set():
            prepared.open_bodies(calls, target)
            prepared.suffices.set()

    def templates() -> Iterator[PreparedTemplate]:
        known: set[int] = set()
        patient_until = time.monotonic() + PATIENCE
        for situation, template in _templates(calls, target, choice):
            prepared.made.append((situation, template))
            if isinstance(template, PreparedTemplate) and id(template) not in known:
                known.add(id(template))
                template.is_loaded_later = True
                if time.monotonic() > patient_until and len(prepared.made) < len(calls):
                    hurry()
                yield template

    def wanted(of: PreparedTemplate) -> set[str]:
        likely = likely_keys(of)
        if wait:
            return likely
        compiled = of.compiled(likely)
        if compiled < likely:
            hurry()
        return compiled

    try:
        load_all(templates(), wanted)
        for template in prepared.templates:
            planner.mend(template)
            if template.has_more_to_send:
                planner.send(template)
    except Exception as error:  # CuPy and the driver have no common error class
        log.info("nodes ask for their plans when they first run: %s: %s", type(error).__name__, error)
    finally:
        prepared.ends.set()
        prepared.suffices.set()
        prepared.is_left.wait()
        if not prepared.equipped.is_set():  # the session did not wait for all templates
            prepared.equip()


def _templates(
    calls: Sequence[Call], target: Target, choice: PlanChoice
) -> Iterator[tuple[Situation, PreparedTemplate | GivenTemplate]]:
    """Yield nodes with their templates (plans for all sizes), loaded from plan files if possible, else made now."""
    for call in calls:
        inputs = inputs_of(call)
        if inputs is None:
            continue
        situation = Situation(call.node, target.device, target.provider, choice != "first")
        planner.expect(call.node, tuple(spec.shape for spec in inputs), target.device)
        try:
            given = given_for(call, target, choice)
            template = given if given and given.loads() else planner.prepare(situation, inputs)
        except (OnnxfuseError, ValueError) as error:
            log.info("node '%s' is planned when it first runs: %s", call.node.name, error)
            continue
        yield situation, template


def given_for(call: Call, target: Target, choice: PlanChoice) -> GivenTemplate | None:
    """Return the template of a plan file for a node; None if no file has one, or if the session measures its plans."""
    inputs = inputs_of(call) if choice != "measured" and planner.plan_files else None
    if inputs is None:
        return None
    return planner.given_template(Situation(call.node, target.device, target.provider, choice != "first"), inputs)
