"""Kernel or body, node by node, as earlier measurements of nodes and of the whole model say."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import onnx

from onnxfuse.model.graph import DOMAIN
from onnxfuse.provider import verdicts
from onnxfuse.provider.model import Call
from onnxfuse.provider.verdicts import Environment, Verdict

log: Final = logging.getLogger("onnxfuse")
Tune = Literal["never", "cached", "now"]  # whether verdicts count, and whether to measure first
KERNELS: Final = "kernels"  # a whole model with all kernels, with all bodies, with what is best node by node
BODIES: Final = "bodies"
PLAIN, GRAPH = "plain", "cuda graph"


@dataclass(frozen=True)
class Preference:
    """How a node should run, and the measurement that says so."""

    kernel: bool
    why: str


def preferences(
    model: onnx.ModelProto, calls: Sequence[Call], environment: Environment, mode: str, split: bool = True
) -> list[Preference | None]:
    """Per fused node what was measured, None where nothing was.

    Of a model that was timed as a whole, in this mode or else in another one, the fastest variant counts: all kernels,
    all bodies or the mix of what is best node by node. Where several shapes were timed, the sums of the times do.
    Without `split` all nodes that call one function are alike: a mix in which they are not does not count.
    """
    alone = by_node(model, calls, environment, split)
    timed = whole_model(environment, model, mode)
    if not timed:
        _tell_of_other_options(environment, model)
        return alone
    sums = _sums(timed, {KERNELS, BODIES, mix_name(alone)})
    if not sums:
        return alone
    best = min(sums, key=lambda name: sums[name])
    if best not in (KERNELS, BODIES):
        return alone
    why = f"the whole model with {_listed(sums, 1e3, 'ms')}{_at(timed)}"
    return [Preference(best == KERNELS, why) for _ in calls]


def _tell_of_other_options(environment: Environment, model: onnx.ModelProto) -> None:
    if other := verdicts.of_other_options(environment, model_subject(model)):
        here = {name: environment[name] for name in other}
        log.warning("the model was tuned for %s, which says nothing of this session's %s; tune it again", other, here)


def all_kernels(
    model: onnx.ModelProto, calls: Sequence[Call], environment: Environment, mode: str, split: bool = True
) -> list[Preference | None]:
    """No preference for any body, whatever was measured."""
    return [None] * len(calls)


def by_node(
    model: onnx.ModelProto, calls: Sequence[Call], environment: Environment, split: bool = True
) -> list[Preference | None]:
    """Per fused node what was measured of it alone; without `split` of all nodes that call its function, summed."""
    bodies = body_digests(model)
    subjects = [node_subject(call, bodies) for call in calls]
    keys = [repr(subject) for subject in subjects]
    timed = {key: verdicts.recall(environment, subject) for key, subject in zip(keys, subjects, strict=True)}
    if split:
        known = {key: _preference(each) for key, each in timed.items()}
        return [known[key] for key in keys]
    of_ops = defaultdict[str, list[Verdict]](list)
    for call, key in zip(calls, keys, strict=True):
        of_ops[call.op] += timed[key]
    ops = {op: _preference(each) for op, each in of_ops.items()}
    return [ops[call.op] for call in calls]


def _preference(timed: Sequence[Verdict]) -> Preference | None:
    sums = _sums(timed, {"kernel", "body"})
    if set(sums) != {"kernel", "body"}:
        return None
    first = "kernel" if sums["kernel"] <= sums["body"] else "body"
    ordered = {name: sums[name] for name in sorted(sums, key=lambda name: name != first)}
    return Preference(first == "kernel", f"{_listed(ordered, 1e6, 'us')}{_at(timed)}")


def _sums(timed: Sequence[Verdict], names: set[str]) -> dict[str, float]:
    """The sum over all cases of each variant that was timed in all of them."""
    return {
        name: sum(each.seconds[name] for each in timed)
        for name in sorted(names)
        if timed and all(name in each.seconds for each in timed)
    }


def _listed(seconds: Mapping[str, float], scale: float, unit: str) -> str:
    return ", ".join(f"{name.partition(' ')[0]}: {scale * value:.3g} {unit}" for name, value in seconds.items())


def _at(timed: Sequence[Verdict]) -> str:
    """Where and when."""
    shapes = [case_text(each.case) for each in timed]
    where = shapes[0] if len(shapes) == 1 else f"{len(shapes)} combinations of shapes, summed"
    return f" at {where}, measured {max(each.measured for each in timed)[:10]}"


def case_text(case: Any) -> str:
    """The shapes of a case, for reading."""
    shapes = case.get("shapes", ()) if isinstance(case, dict) else ()
    return shapes_text(list(map(str, shapes)))


def shapes_text(shapes: Sequence[str]) -> str:
    """Of "4096x768 float16" and the like; a dtype that all have once."""
    pairs = [each.rpartition(" ") for each in shapes]
    dtypes = {dtype for *_, dtype in pairs}
    if len(dtypes) == 1 and all(dims for dims, *_ in pairs):
        return f"{', '.join(dims for dims, *_ in pairs)} {dtypes.pop()}"
    return ", ".join(shapes) or "no inputs"


# --- what verdicts are about -----------------------------------------------------------------------------------------


def node_subject(call: Call, bodies: Mapping[str, str]) -> dict[str, Any]:
    """A fused node without its name and shapes, and its body: equal for nodes that do the same."""
    node = call.node
    return {
        "fusion": node.fusion,
        "operands": list(node.operands),
        "attributes": dict(node.attributes),
        "dtypes": list(call.dtypes),
        "outputs": list(node.output_dtypes),
        "body": bodies.get(call.op, ""),
    }


def body_digests(model: onnx.ModelProto) -> dict[str, str]:
    """A digest of each body, whatever its function is called."""
    result = {}
    for function in model.functions:
        if function.domain == DOMAIN:
            copy = onnx.FunctionProto()
            copy.CopyFrom(function)
            copy.name = ""
            result[function.name] = _digest(copy.SerializeToString(deterministic=True))
    return result


def model_subject(model: onnx.ModelProto) -> dict[str, str]:
    """A model without the values of its weights."""
    parts = [part.SerializeToString(deterministic=True) for part in (*model.graph.node, *model.functions)]
    parts += [each.SerializeToString(deterministic=True) for each in (*model.graph.input, *model.graph.output)]
    parts += [repr((t.name, list(t.dims), t.data_type)).encode() for t in model.graph.initializer]
    return {"model": _digest(b"\0".join(parts))}


def whole_model(environment: Environment, model: onnx.ModelProto, mode: str) -> list[Verdict]:
    """Its verdicts in this mode; where there are none, those in the other.  Without kernels and bodies one is none."""
    found = verdicts.recall(environment, model_subject(model))
    timed = [each for each in found if isinstance(each.case, dict) and {KERNELS, BODIES} <= each.seconds.keys()]
    return [each for each in timed if each.case.get("mode") == mode] or timed


def mix_name(alone: Sequence[Preference | None]) -> str:
    """The mix of these preferences by name; another mix has another name, and its times mean nothing here."""
    kernels = [each is None or each.kernel for each in alone]
    return f"mix {_digest(repr(kernels).encode())[:12]}"


def is_mixed(alone: Sequence[Preference | None]) -> bool:
    """Whether nodes differ in what is best for them."""
    return len(Counter(each is None or each.kernel for each in alone)) > 1


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
