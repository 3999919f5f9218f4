"""Plan templates: plans of a fused node for all sizes of its dynamic dims.

A template consists of variants, which are plans with guards: conditions on the sizes.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import symint
from onnxfuse.runtime.expressions import Expressions, Values
from onnxfuse.runtime.hosts import Host
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorMap, TensorSpec
from onnxfuse.runtime.sample_sizes import samples_with_zeros, usual_samples
from onnxfuse.runtime.symint import SymInt, SymReal, Trace, only_first_plans

log: Final = logging.getLogger("onnxfuse")
T = TypeVar("T")
MAX_VARIANTS: Final = 48  # plans made for speed; more are made only for sizes at which none of these is correct
MAX_ALL_VARIANTS: Final = 96
# A kernel may be left out if that slows no sample (combination of sizes) down by more than MAX_LOSS of its time, and
# the mean slowdown of all samples is at most MAX_MEAN_LOSS, both by estimate.
MAX_LOSS: Final = 0.03
MAX_MEAN_LOSS: Final = 0.001
MAX_LOSS_ELSEWHERE: Final = 1.0  # replaces MAX_LOSS at samples that do not count in the choice between plans
MAX_TUNED_DISTANCE: Final = 1.0  # a measured plan is preferred within this distance of its sizes: a factor of two


@dataclass(frozen=True)
class Variant:
    """A plan for all sizes that satisfy its guards (conditions); its numbers can be symbolic integers."""

    plan: Plan
    # Guards (conditions), each as the number of a comparison in `Template.expressions` and its required answer.  Where
    # `hard` holds, the plan is correct; where `soft` holds too, the host, which makes the plans, would choose this one.
    hard: tuple[tuple[int, bool], ...]
    soft: tuple[tuple[int, bool], ...]
    hints: tuple[int, ...]  # sizes at which the plan was chosen
    fixed: tuple[tuple[str, int], ...]  # where planning used a size as a plain integer, and its value
    tuned: bool = False  # the plan was chosen by measuring, and is preferred at sizes near its hints

    @property
    def guards(self) -> tuple[tuple[int, bool], ...]:
        """The conditions on sizes: first the hard guards, then the soft ones.

        Where the hard guards hold, the plan is correct; where the soft ones hold too, it is expected to be the fastest.
        """
        return (*self.hard, *self.soft)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the plan's launches, in order."""
        return tuple(step.kernel for step in self.plan.steps if isinstance(step, Launch))


@dataclass(frozen=True, eq=False)
class Template:
    """The variants (plans for ranges of sizes) of a node, and its inputs; dynamic dim number k is written as -1 - k.

    Equal dims have one number.
    """

    node: FusedNode
    inputs: tuple[TensorSpec, ...]
    device: Device
    expressions: Expressions
    variants: list[Variant] = field(default_factory=list)

    @property
    def kernels(self) -> list[Kernel]:
        """The different kernels of all variants (plans for ranges of sizes), in a fixed order."""
        return list({kernel.key: kernel for each in self.variants for kernel in each.kernels}.values())

    def chosen(self, sizes: Sequence[int]) -> Variant | None:
        """Return the variant (plan) that the native library uses for these sizes; None if none is correct for them.

        Another thread may add variants meanwhile, so they are listed before the expressions that they use.
        """
        variants = list(self.variants)
        values = self.expressions.evaluate([np.array([size]) for size in sizes])
        right = [each for each in variants if holds(values, each.hard).all()]

        def away(variant: Variant) -> float:
            return distance(sizes, variant.hints)

        def cost(variant: Variant) -> tuple[float, float]:
            loss = float(self.loss(variant, values).max())
            return loss, away(variant) if loss else 0.0

        tuned = min((each for each in right if each.tuned), key=away, default=None)
        if tuned and away(tuned) <= MAX_TUNED_DISTANCE:
            return tuned
        return min((each for each in right if not each.tuned), key=cost, default=tuned)

    def loss(self, variant: Variant, values: Sequence[Values]) -> Values:
        """Return how much slower a variant is than the best plan, by estimate.

        The loss is 0 where the soft guards of the variant, its conditions on estimates, hold.  The loss is infinite for
        sizes at which the plan is not correct.  `values` are the values of all expressions.
        """
        missed = [self.expressions.miss(number, answer, values) for number, answer in variant.soft]
        return np.where(holds(values, variant.hard), np.maximum.reduce(missed) if missed else 0.0, np.inf)


def distance(sizes: Sequence[int], hints: Sequence[int]) -> float:
    """Return how far sizes are from a variant's hints, its sizes when it was planned: sum of |log2(size / hint)|."""
    return float(sum(abs(np.log2(max(1, a)) - np.log2(max(1, b))) for a, b in zip(sizes, hints, strict=True)))


def size_count(inputs: Sequence[TensorSpec]) -> int:
    """Return how many different dynamic sizes the inputs of a template have."""
    return max((-dim for spec in inputs for dim in spec.shape if dim < 0), default=0)


def with_sizes(inputs: Sequence[TensorSpec], sizes: Sequence[int]) -> tuple[TensorSpec, ...]:
    """Return the inputs with `sizes` in place of the dynamic dims; the sizes can be symbolic."""
    return tuple(replace(i, shape=tuple(sizes[-1 - dim] if dim < 0 else dim for dim in i.shape)) for i in inputs)


def sizes_of(inputs: Sequence[TensorSpec], found: Sequence[TensorSpec]) -> tuple[int, ...] | None:
    """Return the sizes of a template's dynamic dims in the inputs `found`; None if `found` does not fit `inputs`."""
    if len(inputs) != len(found):
        return None
    sizes: dict[int, int] = {}
    for spec, other in zip(inputs, found, strict=True):
        if replace(spec, shape=()) != replace(other, shape=()) or len(spec.shape) != len(other.shape):
            return None
        for dim, size in zip(spec.shape, other.shape, strict=True):
            if (dim if dim >= 0 else sizes.setdefault(-1 - dim, size)) != size:
                return None
    return tuple(size for _, size in sorted(sizes.items()))


def make_template(
    host: Host,
    node: FusedNode,
    inputs: Sequence[TensorSpec],
    device: Device,
    given: Sequence[Sequence[int]] = (),
) -> Template:
    """Return the template of a node for inputs in which dynamic dim number k is written as -1 - k.

    Without dynamic dims, the template has one variant (a plan with the guards under which it holds).  The host (the
    module that makes plans) plans at samples, which are combinations of sizes: the `given` samples, the usual samples,
    and samples with zeros.  Only the given samples count in the choice between plans; if none are given, only the usual
    samples count.  At a sample that counts, the host plans unless the guards of an earlier variant hold.  At any other
    sample, it plans only if no earlier variant is correct and fast enough.

    Raises the host's error if the host has plans only for sizes at which outputs have no elements.
    """
    template = Template(node, tuple(inputs), device, Expressions())
    ties, error = template.expressions.ties, None
    samples = _Samples(template, given)
    while len(template.variants) < MAX_ALL_VARIANTS and (sizes := samples.take()) is not None:
        known_ties, variant, record = len(ties), None, Trace(template.expressions)
        try:
            with only_first_plans():
                variant = candidates_at(host, template, sizes, record)[0]
        except (ArithmeticError, ValueError, OnnxfuseError) as found:  # no kernel or library takes these shapes
            error = error or found
        if len(ties) > known_ties:
            samples = _Samples(template, given)
            samples.cover(template.variants)
            continue
        if variant:
            template.variants.append(variant)
            samples.cover([variant])
        else:  # no plan can be made here, nor at other sizes at which all comparisons give the same answers
            samples.leave_out((*record.hard.items(), *record.soft.items()))
        if len(template.variants) >= MAX_VARIANTS:
            for each in template.variants:
                samples.leave_out(each.hard)
    if samples.left.any():
        log.info("%s: %d combinations of sizes take a plan of others", node.name, samples.left.sum())
    if len(template.variants) > 1:
        template.variants[:] = samples.needed()
    if error and not any(each.plan.steps for each in template.variants):
        raise error
    return template


def candidates_at(host: Host, template: Template, sizes: Sequence[int], record: Trace | None = None) -> list[Variant]:
    """Return the plans that a host (the module that makes plans) offers at these sizes, the expected fastest first.

    `record`, an empty trace, receives the guards of these plans.  Raises any error of the host, and
    ValueError if a number depends on dynamic sizes, but the host uses it where Python requires a plain number.
    """
    record = record or Trace(template.expressions)
    symbolic = [record.size(i, size) for i, size in enumerate(sizes)]
    try:
        plans = host.candidates(template.node, with_sizes(template.inputs, symbolic), template.device)
    except TypeError as error:
        if not symbolic:
            raise
        raise ValueError(_no_plan_of_dynamic_sizes(template, error)) from error
    first, *others = (_finished(plan) for plan in plans)
    chosen = record.soft if first.steps else {}  # plans without steps are equally fast
    soft, fixed, hard = tuple(sorted(chosen.items())), tuple(record.fixed.items()), record.hard
    found = [Variant(first, tuple(sorted(hard.items())), soft, tuple(sizes), fixed)]
    later = tuple(sorted((hard | record.later).items()))
    return [*found, *(Variant(plan, later, soft, tuple(sizes), fixed) for plan in others)]


def _no_plan_of_dynamic_sizes(template: Template, error: TypeError) -> str:
    """Return why the host (the module that makes plans) has no plan: using a symbolic number as a plain one failed.

    The text names the line of the host, not the line in symint.py, which the host calls and which raised `error`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    at = next((f for f in reversed(frames) if Path(f.filename).name != Path(symint.__file__).name), frames[-1])
    where = f"{Path(at.filename).parent.name}/{Path(at.filename).name}:{at.lineno}"
    shapes = [list(spec.shape) for spec in template.inputs]
    return (
        f"{template.node.fusion}: its host has no plan for shapes {shapes}, where negative numbers are dynamic sizes; "
        f"a known size is required at {where} ({error})"
    )


def holds(values: Sequence[Values], guards: Sequence[tuple[int, bool]]) -> Any:
    """Return for which combinations of sizes guards (conditions) hold; `values` are the values of all expressions."""
    return np.logical_and.reduce([values[number].astype(bool) == answer for number, answer in guards] or [True])


def concrete(plan: T) -> T:
    """Return a plan, or a part of one, with each symbolic number replaced by its hint: its value in this planning."""
    if isinstance(plan, SymInt | SymReal):
        return cast(T, plan.hint)
    if isinstance(plan, tuple):
        return cast(T, tuple(concrete(each) for each in plan))
    if is_dataclass(plan) and not isinstance(plan, type):
        return cast(T, replace(plan, **{each.name: concrete(getattr(plan, each.name)) for each in fields(plan)}))
    return plan


def _finished(plan: Plan) -> Plan:
    """Return a plan as templates hold it: without symbolic integers where a launch needs plain ones (see `_plain`).

    The plan has no steps if all of its outputs are empty.
    """
    if all(0 in output.shape for output in plan.outputs):
        return replace(plan, steps=())
    return replace(plan, steps=tuple(_plain(step) if isinstance(step, Launch) else step for step in plan.steps))


def _plain(step: Launch) -> Launch:
    """Return a launch in which `_integer` has replaced those symbolic integers that must be plain ones.

    They are the compile-time constants and the sizes of TMA boxes, block, shared memory and cluster.
    """
    kernel = step.kernel
    defines = {name: _integer(value, f"{kernel.source} {name}") for name, value in kernel.defines.items()}
    arguments = tuple(
        replace(each, box=tuple(_integer(size, f"{kernel.source} box") for size in each.box))
        if isinstance(each, TensorMap)
        else each
        for each in step.arguments
    )
    x, y, z = (_integer(size, f"{kernel.source} block") for size in step.block)
    shared, cluster = (_integer(getattr(step, name), f"{kernel.source} {name}") for name in ("shared", "cluster"))
    kernel = replace(kernel, defines=defines)
    return replace(step, kernel=kernel, arguments=arguments, block=(x, y, z), shared=shared, cluster=cluster)


def _integer(value: T, where: str) -> T:
    """Return the hint of a symbolic integer, which is its value in this planning; return a plain value as it is.

    For a symbolic integer, a guard is added to the plan: the integer must equal its hint (see Trace.fix).  `where` is
    the text under which `Variant.fixed` lists this guard, such as the name of the constant that takes the hint.
    """
    return cast(T, value.trace.fix(value, where)) if isinstance(value, SymInt) else value


# --- samples ----------------------------------------------------------------------------------------------------------


class _Samples:
    """Combinations of sizes: those that count in the choice between a template's plans, and others.

    `left` marks the combinations that still need a variant.
    """

    def __init__(self, template: Template, given: Sequence[Sequence[int]]) -> None:
        """Collect samples (combinations of sizes): `given` or usual ones, and others.

        The given samples count in the choice between plans; if there are none, the usual samples count.  Samples with
        sizes of 0, which are added, never count.
        """
        rows = template.expressions
        count = size_count(template.inputs)
        free = [i for i in range(count) if i not in rows.ties]
        points = [_columns(given, range(count), count)] if given else []
        for more in usual_samples, samples_with_zeros:
            columns = _columns([*more(len(free))], free, count)
            # A tie is a size that usually equals an expression of other sizes.  Ties are applied in reverse order: the
            # expression of an earlier tie may contain the size of a later tie, but not the other way round.
            for i, number in reversed(rows.ties.items()):
                columns[i] = rows.evaluate(list(columns))[number]
            points.append(columns)
        self.template, self.columns = template, np.concatenate(points, axis=1)
        self.counts = np.arange(self.columns.shape[1]) < points[0].shape[1]
        self.meant: NDArray[np.bool_] = np.logical_and.reduce(self.columns >= 0, axis=0)
        self.left = self.meant.copy()
        self.values: list[Values] = []

    def take(self) -> tuple[int, ...] | None:
        """Return the next combination that `left` marks, and remove the mark; None if none is marked."""
        if not self.left.any():
            return None
        at = int(np.argmax(self.left))
        self.left[at] = False
        return tuple(map(int, self.columns[:, at]))

    def cover(self, variants: Iterable[Variant]) -> None:
        """Leave out the combinations of sizes for which these variants (plans) suffice.

        A variant suffices where its guards hold.  For combinations that do not count in the choice between plans, a
        variant also suffices if it is correct and its loss is at most MAX_LOSS_ELSEWHERE.
        """
        for each in variants if len(self.columns) else ():
            loss = self._loss(each)
            self.leave_out(each.guards)
            self.left &= self.counts | (loss > MAX_LOSS_ELSEWHERE)

    def leave_out(self, guards: Sequence[tuple[int, bool]]) -> None:
        """Unmark, in `left`, the combinations of sizes for which these guards (conditions on sizes) hold."""
        if len(self.columns):
            self.left &= ~holds(self._evaluated(), guards)

    def needed(self) -> list[Variant]:
        """Return the template's variants (plans), without those that are not needed or whose kernels gain little.

        A variant is not needed if others are as good at all combinations of sizes.  A kernel gains little if it is only
        slightly faster than others, and at few combinations.
        """
        variants = self.template.variants
        losses = [self._loss(each)[self.meant] for each in variants]
        least, counts = np.minimum.reduce(losses), self.counts[self.meant]
        covered, kept = np.isfinite(least), list(range(len(variants)))
        for i in sorted(kept, key=lambda i: np.count_nonzero(counts & (losses[i] == 0))):
            rest = [other for other in kept if other != i]
            known = [kernel for other in rest for kernel in variants[other].kernels]
            if not rest or not covered.any():
                break
            left = np.minimum.reduce([losses[other] for other in rest])
            if (left > np.maximum(least, MAX_LOSS_ELSEWHERE))[covered & ~counts].any():
                continue
            lost = left[covered & counts] - least[covered & counts]
            little = lost.max() <= MAX_LOSS and lost.mean() <= MAX_MEAN_LOSS
            if not lost.any() or (little and any(kernel not in known for kernel in variants[i].kernels)):
                kept = rest
        return [variants[i] for i in kept]

    def _loss(self, variant: Variant) -> Values:
        """Return a variant's `Template.loss` at all samples, but infinity only where the variant is not correct.

        Where the loss of a correct variant is infinite, the result is the largest finite number.
        """
        values = self._evaluated()
        loss = np.minimum(self.template.loss(variant, values), np.finfo(np.float64).max)
        return np.where(holds(values, variant.hard), loss, np.inf)

    def _evaluated(self) -> list[Values]:
        self.values = self.template.expressions.evaluate(list(self.columns), self.values)
        return self.values


def _columns(rows: Sequence[Sequence[int]], places: Sequence[int], count: int) -> Values:
    """Return combinations of `count` sizes as an array: a column for each combination in `rows`, a row for each size.

    A combination in `rows` has only the sizes with the numbers in `places`; all other sizes are 1.
    """
    found = np.ones((count, len(rows)), np.int64)
    found[list(places)] = np.array(rows, np.int64).reshape(len(rows), len(places)).T
    return found
