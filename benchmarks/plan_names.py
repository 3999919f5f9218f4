"""Name the plans that a host offers for one node."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.runtime.plan import Launch, Plan


def names_of(plans: Sequence[Plan]) -> list[str]:
    """Return a name of each plan: its kernels with the macros in which the plans differ, or what else its steps are."""
    values: dict[tuple[str, str], set[str]] = {}
    for plan in plans:
        for step in plan.steps:
            for macro, value in step.kernel.defines.items() if isinstance(step, Launch) else ():
                values.setdefault((step.kernel.source, macro), set()).add(str(value))
    names = list[str]()
    for number, plan in enumerate(plans):
        parts = []
        for step in plan.steps:
            if isinstance(step, Launch):
                source, defines = step.kernel.source, step.kernel.defines.items()
                differing = [f"{macro}={value}" for macro, value in defines if len(values[source, macro]) > 1]
                parts.append(" ".join([source, *differing]))
            else:
                parts.append(type(step).__name__.lower())
        names.append(f"{number}: {', '.join(parts)}")
    return names
