"""Plan templates: how a fused node runs for all sizes of its dynamic dims, as variants with the sizes they are for."""

from __future__ import annotations

import itertools
import logging
import random
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import symint
from onnxfuse.runtime.expressions import Expressions, Values
from onnxfuse.runtime.hosts import Host
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorMap, TensorSpec
from onnxfuse.runtime.symint import SymInt, SymReal, Trace

log: Final = logging.getLogger("onnxfuse")
T = TypeVar("T")
MAX_SAMPLES: Final = 1024  # combinations of sizes at which a template is made to have the host's own choice
MAX_VARIANTS: Final = 48  # made for speed; more are made where none of these computes the right thing
MAX_ALL_VARIANTS: Final = 96
LARGEST_SIZE: Final = 1 << 16  # of a dim, among the samples
HALVED_ONCE: Final = {26, 194, 1538}  # sizes that 2 divides and 4 does not, for choices of the width of accesses
MAX_LOSS: Final = 0.03  # of time at a sample, as the host estimates it, up to which a kernel may be left out
MAX_MEAN_LOSS: Final = 0.001  # the same in the mean of all samples
MAX_TUNED_DISTANCE: Final = 1.0  # from the sizes at which a plan was measured, up to which it counts: a factor of two


@dataclass(frozen=True)
class Variant:
    """A plan for the sizes for which its guards hold; its numbers may be symbolic integers."""

    plan: Plan
    hard: tuple[tuple[int, bool], ...]  # expressions and what they must be, so that the plan is right
    soft: tuple[tuple[int, bool], ...]  # the same, so that it is the one that the host would choose
    hints: tuple[int, ...]  # sizes at which it was chosen
    fixed: tuple[tuple[str, int], ...]  # where the host used a size as a plain integer, and its value
    tuned: bool = False  # it was chosen by measuring, and counts for sizes near its hints

    @property
    def guards(self) -> tuple[tuple[int, bool], ...]:
        """The hard guards and the soft ones."""
        return (*self.hard, *self.soft)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of the plan's launches, in order."""
        return tuple(step.kernel for step in self.plan.steps if isinstance(step, Launch))


@dataclass(frozen=True, eq=False)
class Template:
    """The variants of a node for inputs whose dynamic dims are -1 - k, where k is the number of a size."""

    node: FusedNode
    inputs: tuple[TensorSpec, ...]
    device: Device
    expressions: Expressions
    variants: list[Variant] = field(default_factory=list)

    @property
    def kernels(self) -> list[Kernel]:
        """The different kernels of all variants, in a fixed order."""
        return list({repr(kernel): kernel for each in self.variants for kernel in each.kernels}.values())

    def chosen(self, sizes: Sequence[int]) -> Variant | None:
        """Return the variant that the native library takes for these sizes; None if it has none for them."""
        values = self.expressions.evaluate([np.array([size]) for size in sizes])
        right = [each for each in self.variants if _holds(values, each.hard).all()]

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
        """Return how much slower than its choice the host expects a variant to be: 0 where the soft guards hold.

        `values` are those of all expressions.  It is infinite for sizes for which the plan is not right.
        """
        missed = [self.expressions.miss(number, answer, values) for number, answer in variant.soft]
        return np.where(_holds(values, variant.hard), np.maximum.reduce(missed) if missed else 0.0, np.inf)


def distance(sizes: Sequence[int], hints: Sequence[int]) -> float:
    """Return how far sizes are from a variant's hints: the sum of their ratios' logarithms to base 2."""
    return float(sum(abs(np.log2(max(1, a)) - np.log2(max(1, b))) for a, b in zip(sizes, hints, strict=True)))


def size_count(inputs: Sequence[TensorSpec]) -> int:
    """Return how many different dynamic sizes the inputs of a template have."""
    return max((-dim for spec in inputs for dim in spec.shape if dim < 0), default=0)


def with_sizes(inputs: Sequence[TensorSpec], sizes: Sequence[int]) -> tuple[TensorSpec, ...]:
    """Return the inputs with these sizes, which may be symbolic, in place of the dynamic dims."""
    return tuple(replace(i, shape=tuple(sizes[-1 - dim] if dim < 0 else dim for dim in i.shape)) for i in inputs)


def sizes_of(inputs: Sequence[TensorSpec], found: Sequence[TensorSpec]) -> tuple[int, ...] | None:
    """Return the sizes of the dynamic dims in inputs that were found; None if these do not fit the template's."""
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
    samples: Sequence[Sequence[int]] = (),
) -> Template:
    """Return the template of a node whose dynamic dims are -1 - k; without them it has one variant.

    The host is asked at each of the `samples`, combinations of sizes, that no earlier answer is for; at sizes of the
    usual spread if there are none.  Raises what the host raises where it has a plan for no sample.
    """
    template = Template(node, tuple(inputs), device, Expressions())
    ties, error = template.expressions.ties, None
    points = _Samples(template.expressions, size_count(inputs), samples)
    while len(template.variants) < MAX_ALL_VARIANTS and (sizes := points.take()) is not None:
        known_ties, variant, record = len(ties), None, Trace(template.expressions)
        try:
            variant = candidates_at(host, template, sizes, record)[0]
        except (ArithmeticError, ValueError, OnnxfuseError) as found:  # no kernel or library takes these shapes
            error = error or found
        if len(ties) > known_ties and not samples:
            points = _Samples(template.expressions, size_count(inputs))
            for each in template.variants:
                points.cover(each.guards)
            continue
        template.variants.extend([variant] if variant else [])
        points.cover((*record.hard.items(), *record.soft.items()))  # if the host refused, it does so wherever they hold
        if len(template.variants) >= MAX_VARIANTS:
            for each in template.variants:
                points.cover(each.hard)
    if points.left.any():
        log.info("%s: %d combinations of sizes take a plan of others", node.name, points.left.sum())
    if len(template.variants) > 1:
        template.variants[:] = points.needed(template)
    if not template.variants and error:
        raise error
    return template


def candidates_at(host: Host, template: Template, sizes: Sequence[int], record: Trace | None = None) -> list[Variant]:
    """Return all plans that a host offers at these sizes, the expected fastest first.

    `record`, an empty trace, then has the guards of that answer.  Raises what the host raises, and ValueError where it
    takes what depends on dynamic sizes for a plain number.
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
    soft, fixed, hard = tuple(sorted(record.soft.items())), tuple(record.fixed.items()), record.hard
    found = [Variant(first, tuple(sorted(hard.items())), soft, tuple(sizes), fixed)]
    later = tuple(sorted((hard | record.later).items()))
    return [*found, *(Variant(plan, later, soft, tuple(sizes), fixed) for plan in others)]


def _no_plan_of_dynamic_sizes(template: Template, error: TypeError) -> str:
    """Return why a host, which ended with that error, has no plan: it takes what depends on dynamic sizes as a number.

    The line is that of the host, not that of the arithmetic that it calls.
    """
    frames = traceback.extract_tb(error.__traceback__)
    at = next((f for f in reversed(frames) if Path(f.filename).name != Path(symint.__file__).name), frames[-1])
    where = f"{Path(at.filename).parent.name}/{Path(at.filename).name}:{at.lineno}"
    shapes = [list(spec.shape) for spec in template.inputs]
    return (
        f"{template.node.fusion}: its host has no plan for shapes {shapes}, where negative numbers are dynamic sizes; "
        f"a known size is required at {where} ({error})"
    )


def _holds(values: Sequence[Values], guards: Sequence[tuple[int, bool]]) -> Any:
    return np.logical_and.reduce([values[number].astype(bool) == answer for number, answer in guards] or [True])


def concrete(plan: T) -> T:
    """Return a plan, or a part of one, with the hints of its symbolic numbers in their place."""
    if isinstance(plan, SymInt | SymReal):
        return cast(T, plan.hint)
    if isinstance(plan, tuple):
        return cast(T, tuple(concrete(each) for each in plan))
    if is_dataclass(plan) and not isinstance(plan, type):
        return cast(T, replace(plan, **{each.name: concrete(getattr(plan, each.name)) for each in fields(plan)}))
    return plan


def _finished(plan: Plan) -> Plan:
    """Return a plan as templates hold it: without steps if there is nothing to compute, and with plain constants."""
    if all(0 in output.shape for output in plan.outputs):
        return replace(plan, steps=())
    return replace(plan, steps=tuple(_plain(step) if isinstance(step, Launch) else step for step in plan.steps))


def _plain(step: Launch) -> Launch:
    """Return a launch whose compile-time constants, block and shared memory are plain integers: see Trace.fix."""
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
    """Return a value, or the hint of a symbolic integer, which is then fixed at `where`."""
    return cast(T, value.trace.fix(value, where)) if isinstance(value, SymInt) else value


# --- samples ----------------------------------------------------------------------------------------------------------


def usual_samples(count: int) -> Iterator[tuple[int, ...]]:
    """Yield combinations of `count` sizes: powers of two and numbers between them, odd ones too, common ones first."""
    if not count:
        yield ()
        return
    per_octave = next((n for n in (8, 4, 2, 1) if len(_spread(n)) ** count <= MAX_SAMPLES), 1)
    spread = coarse = _spread(per_octave)
    while len(coarse) ** count > 4 * MAX_SAMPLES:  # odd sizes are left out first, then the largest or every second
        powers = [size for size in coarse if not size & (size - 1)]
        coarse = powers if len(powers) < len(coarse) else coarse[:-1] if count < 4 else coarse[::2]
    usual = sorted(coarse, key=lambda size: (size & (size - 1) != 0, abs(np.log2(size) - 7)))
    yield from itertools.product(usual, repeat=count)
    if len(coarse) < len(spread):  # it has hardly any odd sizes, and few small products
        chance = random.Random(0)
        yield from (tuple(chance.choices(spread, k=count)) for _ in range(MAX_SAMPLES))
        for axis, size in itertools.product(range(count), spread):
            yield tuple(size if i == axis else 1 for i in range(count))


class _Samples:
    """Combinations of sizes, and for which of them no variant is so far."""

    def __init__(self, expressions: Expressions, count: int, given: Sequence[Sequence[int]] = ()) -> None:
        """Take those that are given; else the usual ones, in which tied sizes follow from the others."""
        free = [i for i in range(count) if given or i not in expressions.ties]
        rows = list(given or usual_samples(len(free)))
        points = np.array(rows, dtype=np.int64).reshape(len(rows), len(free))
        columns = [np.ones(len(points), np.int64)] * count
        for i, place in enumerate(free):
            columns[place] = points[:, i]
        if not given:
            for i, number in reversed(expressions.ties.items()):  # a tie depends on no size that was tied before it
                columns[i] = expressions.evaluate(columns)[number]
        self.expressions, self.columns = expressions, columns
        self.meant = np.logical_and.reduce([column >= 0 for column in columns] or [np.ones(1, bool)])
        self.left = self.meant.copy()
        self.values: list[Values] = []

    def take(self) -> tuple[int, ...] | None:
        """Return the next combination, which is then no longer left; None if there is none."""
        if not self.left.any():
            return None
        at = int(np.argmax(self.left))
        self.left[at] = False
        return tuple(int(column[at]) for column in self.columns)

    def cover(self, guards: Sequence[tuple[int, bool]]) -> None:
        """Leave out the combinations for which guards hold."""
        if self.columns:
            self.values = self.expressions.evaluate(self.columns, self.values)
            self.left &= ~_holds(self.values, guards)

    def needed(self, template: Template) -> list[Variant]:
        """Return a template's variants without those that no combination needs, and without kernels that gain little.

        A kernel is left out if it is hardly faster than others, and that at few combinations.
        """
        variants, shape = template.variants, self.meant.shape
        losses = [np.broadcast_to(template.loss(each, self.values), shape)[self.meant] for each in variants]
        least = np.minimum.reduce(losses)
        covered, kept = np.isfinite(least), list(range(len(variants)))
        for i in sorted(kept, key=lambda i: np.count_nonzero(losses[i] == 0)):
            rest = [other for other in kept if other != i]
            known = [kernel for other in rest for kernel in variants[other].kernels]
            if not rest or not covered.any():
                break
            lost = np.minimum.reduce([losses[other] for other in rest])[covered] - least[covered]
            little = lost.max() <= MAX_LOSS and lost.mean() <= MAX_MEAN_LOSS
            if not lost.any() or (little and any(kernel not in known for kernel in variants[i].kernels)):
                kept = rest
        return [variants[i] for i in kept]


def _spread(per_octave: int) -> list[int]:
    """Return sizes from 1 on, so many in each octave, and an odd one in each."""
    found = {1, 2, 3}
    octave = 4
    while octave <= LARGEST_SIZE:
        found |= {octave + octave * i // per_octave for i in range(per_octave)} | {octave + octave // 3 | 1}
        octave *= 2
    return sorted(found | HALVED_ONCE)


def sizes_between(low: int, high: int, per_octave: int) -> list[int]:
    """Return the sizes of the usual spread from `low` to `high`, and these themselves."""
    return sorted({low, high, *(size for size in _spread(per_octave) if low <= size <= high)})
