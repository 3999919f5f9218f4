"""Find the fused nodes that kernels can run, and the reasons why kernels cannot run the others.

The other nodes run as their bodies: the ONNX functions that they call.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.errors import ModelError
from onnxfuse.runtime.fused_calls import Call
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.plan import Device


def why_not_as_kernel(call: Call) -> str | None:
    """Return why a session cannot run a node as a kernel, even if there is a kernel for it; None if it can."""
    if call.in_function:
        return "it stands inside a function"
    if "" in call.proto.output:
        return f"its output {list(call.proto.output).index('')} is left out"
    if None in call.dtypes:
        i = call.dtypes.index(None)
        return f"the dtype of its operand {call.node.operands[i]} ('{call.proto.input[i]}') is not known"
    if not call.has_ranks:
        operand = call.node.operands[0]
        return f"it has no attribute output_ranks, and its outputs are not known to have {operand}'s rank"
    return None


def why_no_kernel(call: Call, device: Device) -> str | None:
    """Return why there is no kernel for a node on a GPU; None if there is one."""
    host = find_host(call.node.fusion)
    if host is None:
        return f"fusion {call.node.fusion} has no kernel in onnxfuse, an installed package or an added folder"
    if why := why_not_as_kernel(call):
        return why
    try:
        return host.supports(call.node, tuple(dtype for dtype in call.dtypes if dtype is not None), device)
    except (KeyError, TypeError, ValueError) as error:
        return f"its attributes are not what kernel {call.node.fusion} expects: {type(error).__name__}: {error}"


def require_bodies(calls: Sequence[Call], reasons: Sequence[str | None]) -> list[str | None]:
    """Return for each node why onnxruntime runs its ONNX function (its body); None if a kernel runs the node.

    Nodes run as bodies if no kernel can run them, or if their function is also called inside a function.  Raises
    ModelError for a node if no kernel can run it, and the model lacks its function.
    """
    for call, why in zip(calls, reasons, strict=True):
        if why and not call.has_body:
            raise ModelError(
                f"node '{call.node.name}' calls {call.proto.domain}::{call.op}, which the model has no function for, "
                f"and no kernel runs it: {why}"
            )
    in_functions = {call.op for call in calls if call.in_function}
    return [
        why or (f"{call.op} is also called inside a function" if call.op in in_functions else None)
        for call, why in zip(calls, reasons, strict=True)
    ]


def make_alike(calls: Sequence[Call], reasons: list[str | None], why: str) -> None:
    """Add reasons why nodes run as ONNX functions: if one node has a reason, all nodes that call its function get one.

    `why` is the end of each added reason.
    """
    bodies = {call.op: call.node.name for call, reason in zip(calls, reasons, strict=True) if reason}
    for i, call in enumerate(calls):
        if reasons[i] is None and call.op in bodies:
            reasons[i] = f"node '{bodies[call.op]}', which calls the same function, runs as its body{why}"
