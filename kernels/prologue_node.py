"""Products into which a norm of x was fused: the attribute `prologue` describes the norm, which is computed first.

The node's first operands are those of the norm: x, `norm_residual` if the norm adds a residual, and `norm_scale`.  If
the norm outputs its sum, the sum is the node's last output.  Either the product's kernel normalizes the rows of x
(norm_of_rows.cuh), or the plan of the norm runs first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.ir.domain import OF_NORM, PROLOGUE
from onnxfuse.kernels.epilogue_node import Supports, is_joined, moved
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.norms import host as norms
from onnxfuse.kernels.norms.norm import norm_candidates
from onnxfuse.kernels.tensors import (
    ABSENT,
    ITEM_BYTES,
    STORAGE,
    Defines,
    element_count,
    operand_pointer,
    required_pointer,
    required_spec,
)
from onnxfuse.runtime.plan import Device, FusedNode, Plan, Pointer, Scalar, Struct, TensorSpec, Value

NORM_WIDTH: Final = 8  # elements of x per access of norm_of_rows.cuh


@dataclass(frozen=True)
class Norm:
    """An RMSNorm of x, or of x + added; a product reads its result. `sum` points to the output x + added."""

    node: FusedNode
    inputs: tuple[TensorSpec, ...]
    x: Pointer
    added: Value
    scale: Pointer
    sum: Pointer | None

    @property
    def sums(self) -> tuple[TensorSpec, ...]:
        """The output x + added; empty if nothing reads it."""
        x = self.inputs[0]
        return tuple(TensorSpec(x.shape, dtype, x.aligned) for dtype in self.node.output_dtypes[1:])

    @property
    def has_constant_scale(self) -> bool:
        """Whether no kernel writes the scale."""
        return required_spec(self.node, self.inputs, "scale").constant

    def defines(self) -> Defines:
        """Return the macros of norm_of_rows.cuh that depend on the norm, and NORM."""
        scale = required_spec(self.node, self.inputs, "scale")
        return {"NORM": 1, "NORM_ADDS": int(self.added is not ABSENT), "NORM_SCALE_T": STORAGE[scale.dtype]}

    @property
    def argument(self) -> Struct:
        """The struct Norm of norm_of_rows.cuh."""
        epsilon = Scalar(self.node.number("epsilon", 1e-5), "float32")
        return Struct((self.added, self.scale, self.sum or ABSENT, epsilon))


def norm_vectors(rows: int, k: int, warps: int) -> int:
    """Return how many vectors of x a thread keeps in registers while a block of `warps` warps normalizes its rows."""
    return rows * -(-k // (NORM_WIDTH * 32 * warps))


def norm_before(node: FusedNode, inputs: Sequence[TensorSpec], results: int) -> Norm | None:
    """Return the norm that was fused into a node whose product has `results` outputs; None without a norm.

    Raises ValueError if the attribute is malformed.
    """
    norm = _norm_of(node)
    if norm is None:
        return None
    return Norm(
        norm, tuple(inputs[: len(norm.operands)]), required_pointer(node, "x"),
        operand_pointer(node, f"{OF_NORM}residual"), required_pointer(node, f"{OF_NORM}scale"),
        Pointer("output", results) if len(norm.output_dtypes) > 1 else None,
    )  # fmt: skip


def after_norm(norm: Norm, ways: Iterable[Implementation], device: Device) -> list[Implementation]:
    """Return implementations that first write the norm's result to scratch memory, and then multiply it.

    `ways` are implementations of the product of x itself, in which the norm's result takes the place of x.
    """
    plan, *_ = norm_candidates(norm.node, norm.inputs, device)
    return [_after(norm, plan, way) for way in ways]


def _after(norm: Norm, plan: Plan, way: Implementation) -> Implementation:
    result, x = Pointer("scratch", len(way.scratch)), norm.inputs[0]
    results = {Pointer("output", 0): result, Pointer("output", 1): norm.sum or result}

    def of_product(old: Pointer) -> Pointer:
        return replace(result, offset=old.offset) if replace(old, offset=0) == norm.x else old

    before = (moved(step, lambda old: results.get(old, old)) for step in plan.steps)
    steps = (*before, *(moved(step, of_product) for step in way.steps))
    return Implementation(f"norm, {way.name}", steps, (*way.scratch, element_count(x) * ITEM_BYTES[x.dtype]))


def also_normalized(supports: Supports) -> Supports:
    """Make a function `supports` answer also for nodes into which a norm was fused.

    The function returns why no kernel can run a node, given the dtypes of its inputs and the device; None if one can.
    """

    @functools.wraps(supports)
    def answer(node: FusedNode, dtypes: Sequence[str], device: Device) -> str | None:
        try:
            norm = _norm_of(node)
        except ValueError as error:
            return str(error)
        if norm is None:
            return supports(node, dtypes, device)
        own = len(norm.operands)
        product = replace(
            node, operands=("x", *node.operands[own:]),
            output_dtypes=node.output_dtypes[: len(node.output_dtypes) - len(norm.output_dtypes) + 1],
        )  # fmt: skip
        if is_joined(node) and len(product.output_dtypes) > 1:
            return f"{node.fusion}: a norm and operators with several results were fused into it; required one result"
        return norms.supports(norm, dtypes[:own], device) or supports(product, [dtypes[0], *dtypes[own:]], device)

    return answer


def _norm_of(node: FusedNode) -> FusedNode | None:
    """Return the norm that was fused into a node, or None.  Raises ValueError if the attribute is malformed."""
    if PROLOGUE not in node.attributes:
        return None
    try:
        said = json.loads(node.text(PROLOGUE))
        fusion, operands, attributes = str(said["fusion"]), tuple(said["operands"]), dict(said["attributes"])
        dtypes = tuple(map(str, said["dtypes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{node.fusion}: its norm cannot be read: {type(error).__name__}: {error}") from error
    return FusedNode(fusion, node.name, operands, attributes, dtypes)
