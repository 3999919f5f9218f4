"""What holds of every plan template: it says at any sizes what its host says there."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorSpec
from onnxfuse.runtime.plan_bytes import plan_words
from onnxfuse.runtime.symint import SymInt, SymReal
from onnxfuse.runtime.template import Template, Variant, make_template, size_count, with_sizes


def template_of(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Template:
    """Return the template of a node whose dynamic dims are -1 - k."""
    host = find_host(node.fusion)
    assert host is not None
    return make_template(host, node, inputs, device)


def plan_at(template: Template, variant: Variant, sizes: Sequence[int]) -> tuple[list[Kernel], list[Any]]:
    """Return the kernels of a variant, and the words of its plan at these sizes but those of functions."""
    words = _without_functions(plan_words(variant.plan))  # makes expressions: the bits of real numbers
    values = template.expressions.evaluate([np.array([size]) for size in sizes])
    return list(variant.kernels), [int(values[w.number][0]) if isinstance(w, SymInt) else w for w in words]


def _without_functions(words: Sequence[Any]) -> list[Any]:
    return [word for word in words if not isinstance(word, Kernel)]


def concrete_plan(template: Template, variant: Variant, sizes: Sequence[int]) -> Plan:
    """Return the plan of a variant at these sizes: every symbolic number in it is replaced by its value."""
    values = [each[0] for each in template.expressions.evaluate([np.array([size]) for size in sizes])]

    def concrete(part: Any) -> Any:
        if isinstance(part, SymInt | SymReal):
            return values[part.number].item()
        if isinstance(part, tuple | list):
            return type(part)(concrete(each) for each in part)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            fields = {each.name: concrete(getattr(part, each.name)) for each in dataclasses.fields(part) if each.init}
            return dataclasses.replace(part, **fields)
        return part

    plan: Plan = concrete(variant.plan)
    return plan


def right_variants(template: Template, sizes: Sequence[int]) -> list[Variant]:
    """Return the variants whose plans are right at these sizes, whether or not the host would choose them there."""
    values = template.expressions.evaluate([np.array([size]) for size in sizes])
    return [
        variant
        for variant in template.variants
        if all(bool(values[number][0]) == answer for number, answer in variant.hard)
    ]


def with_dynamic_dims(inputs: Sequence[TensorSpec], *dynamic: int) -> tuple[TensorSpec, ...]:
    """Return inputs whose dims of these sizes are dynamic; they are numbered as they come first."""
    numbers: dict[int, int] = {}

    def dim(size: int) -> int:
        return -1 - numbers.setdefault(size, len(numbers)) if size in dynamic else size

    return tuple(dataclasses.replace(spec, shape=tuple(map(dim, spec.shape))) for spec in inputs)


def host_plan_at(template: Template, sizes: Sequence[int]) -> tuple[list[Kernel], list[Any]]:
    """Return the same of the plan that the host has first for these very sizes; raises what the host raises."""
    host = find_host(template.node.fusion)
    assert host is not None
    plan = host.candidates(template.node, with_sizes(template.inputs, sizes), template.device)[0]
    kernels = [step.kernel for step in plan.steps if isinstance(step, Launch)]
    return kernels, _without_functions(plan_words(plan))


def random_sizes(count: int, seed: int, largest: int = 1 << 13) -> list[int]:
    """Return sizes whose logarithms are spread evenly."""
    chance = random.Random(seed)
    return [int(largest ** chance.random()) for _ in range(count)]


def check_template(
    node: FusedNode,
    inputs: Sequence[TensorSpec],
    device: Device,
    *,
    max_kernels: int,
    sizes: Callable[[int], Sequence[int]] | None = None,
    tries: int = 40,
    generic: Sequence[str] = (),
    own_tilings: bool = False,
) -> Template:
    """Check a template, and return it.

    - The host uses no dynamic size as a plain integer: it would have to plan again for every size.
    - It has at most `max_kernels` kernels, because each of them is compiled before the first run.
    - At random sizes (or those that `sizes` makes of a seed) it has a plan wherever the host has one, with the same
      output shapes.  If the host takes the same kernels for these very sizes, all numbers are the same, too.  Kernels
      are the same if they differ in macros that are expressions, and in `generic` ones only: those for which the host
      takes a general choice where sizes are symbolic.  Where the host has `own_tilings` for symbolic sizes, no numbers
      but the outputs' shapes are compared.
    """
    template = template_of(node, inputs, device)
    fixed = sorted({where for variant in template.variants for where, _ in variant.fixed})
    assert not fixed, f"{node.fusion}: sizes are used as plain integers at {', '.join(fixed)}"
    assert len(template.kernels) <= max_kernels, f"{len(template.kernels)} kernels: {summary(template)}"
    compared = 0
    for seed in range(tries):
        at = list(sizes(seed) if sizes else random_sizes(size_count(inputs), seed))
        try:
            kernels, words = host_plan_at(template, at)
        except ValueError:
            continue
        variant = template.chosen(at)
        assert variant, f"no variant for the sizes {at}, where the host has a plan"
        found_kernels, found = plan_at(template, variant, at)
        assert _outputs(found) == _outputs(words), f"at {at}"
        if own_tilings:
            continue
        if len(kernels) == len(found_kernels) and all(map(_same(generic), found_kernels, kernels)):
            assert found == words, f"at {at}"
            compared += 1
    assert compared or own_tilings, "the template never has the host's own choice"
    return template


def _outputs(words: Sequence[int]) -> list[int]:
    """Return the words of a plan's outputs: their number, then dtype, flags, rank and dims of each."""
    end = 2
    for _ in range(words[1]):
        end += 3 + words[end + 2]
    return list(words[1:end])


def _same(generic: Sequence[str]) -> Callable[[Kernel, Kernel], bool]:
    """Return whether a template's kernel is that of other sizes, as `check_template` says."""

    def same(symbolic: Kernel, plain: Kernel) -> bool:
        shared = {
            name: plain.defines[name]
            if name in plain.defines and (name in generic or _is_expression(value, plain.defines[name]))
            else value
            for name, value in symbolic.defines.items()
        }
        return dataclasses.replace(symbolic, defines=shared) == plain

    return same


def _is_expression(value: object, plain: object) -> bool:
    return isinstance(value, str) and isinstance(plain, int)


def summary(template: Template) -> str:
    """Return the macros in which the template's kernels differ."""
    kernels = template.kernels
    names = sorted({name for kernel in kernels for name in kernel.defines})
    parts = []
    for name in names:
        values = {str(kernel.defines.get(name)) for kernel in kernels}
        if len(values) > 1:
            parts.append(f"{name}: {' '.join(sorted(values))}")
    return f"{sorted({kernel.source for kernel in kernels})} " + "; ".join(parts)
