"""Nodes into which elementwise operators were fused: the attribute `program` lists these operators.

Such a node is a product, a norm or an attention, followed by any elementwise operators.  A kernel computes these
operators in its epilogue if it supports them (epilogue_program.py).  Otherwise the node is split: the plan of the node
without the operators runs first, and then the plan of a region, a generated kernel that computes the operators.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Final, TypeAlias

from onnxfuse.kernels.region import host as region
from onnxfuse.kernels.tensors import ITEM_BYTES, element_count
from onnxfuse.runtime.plan import (
    Convolution,
    Device,
    FusedNode,
    Launch,
    Matmul,
    Matrix,
    Plan,
    Pointer,
    Step,
    Struct,
    TensorMap,
    TensorSpec,
)

REGION: Final = "region"  # the `fusion` of nodes that consist only of a program
RESULT: Final = "x0"  # the program's name for the product's result; x1, x2, ... are the node's last operands
MAX_TWO_STEPS: Final = 2  # maximum number of plans that compute the program in a separate launch
WITH_POINTERS: Final = (Launch, Matmul, Convolution, Matrix, Struct, TensorMap)  # dataclasses that hold pointers
Supports: TypeAlias = Callable[[FusedNode, Sequence[str], Device], str | None]
Planner: TypeAlias = Callable[[FusedNode, Sequence[TensorSpec], Device], list[Plan]]


@dataclass(frozen=True)
class Joined:
    """A fused node split in two: the product (or norm, or attention), and the region of operators fused into it.

    The product has the node's first operands.  The region reads the product's first result and the node's remaining
    operands.  The node's outputs are those of the region, followed by any further results of the product.
    """

    product: FusedNode
    behind: FusedNode
    outputs: tuple[str, ...]  # names of outputs; RESULT is one of them if the node outputs the product's result

    @property
    def own(self) -> int:
        """The number of the product's operands."""
        return len(self.product.operands)

    def other_result(self, index: int) -> Pointer:
        """Return the node's output that holds result number `index` of the product; `index` is not 0."""
        return Pointer("output", len(self.outputs) + index - 1)

    def region_inputs(self, y: TensorSpec, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """Return the operands of the region."""
        return [y, *inputs[self.own :]]


def is_joined(node: FusedNode) -> bool:
    """Return whether elementwise operators were fused into a node."""
    return "program" in node.attributes and node.fusion != REGION


def joined(node: FusedNode) -> Joined:
    """Return a node split into its product and the region of elementwise operators that were fused into the node.

    Raises ValueError if the attribute `program`, the text of these operators, is malformed.
    """
    attributes = {name: value for name, value in node.attributes.items() if name != "program"}
    try:
        content = json.loads(node.text("program"))
        dtypes, outputs = content["dtypes"], tuple(content["outputs"])
        result = str(dtypes[RESULT])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{node.fusion}: its program cannot be read: {type(error).__name__}: {error}") from error
    others = [name for name in dtypes if name.startswith("x") and name != RESULT]
    own = len(node.operands) - len(others)
    of_program, others_of_product = node.output_dtypes[: len(outputs)], node.output_dtypes[len(outputs) :]
    product = replace(
        node, operands=node.operands[:own], attributes=attributes, output_dtypes=(result, *others_of_product)
    )
    text = json.dumps({**content, "outputs": [name for name in outputs if name != RESULT]}, separators=(",", ":"))
    given = tuple(dtype for name, dtype in zip(outputs, of_program, strict=True) if name != RESULT)
    behind = FusedNode(REGION, node.name, (RESULT, *others), {"program": text}, given)
    return Joined(product, behind, outputs)


def also_joined(supports: Supports) -> Supports:
    """Extend a function `supports` to nodes into which elementwise operators were fused.

    The function returns why no kernel can run a node, given the dtypes of its inputs and the device; None if one can.
    """

    @functools.wraps(supports)
    def answer(node: FusedNode, dtypes: Sequence[str], device: Device) -> str | None:
        if not is_joined(node):
            return supports(node, dtypes, device)
        try:
            both = joined(node)
        except ValueError as error:
            return str(error)
        refused = supports(both.product, dtypes[: both.own], device)
        return refused or region.supports(both.behind, [both.product.output_dtypes[0], *dtypes[both.own :]], device)

    return answer


def in_two_steps(both: Joined, inputs: Sequence[TensorSpec], device: Device, plans: Planner) -> list[Plan]:
    """Return plans that run the product, planned by the function `plans`, and then the region.

    Raises ValueError if shapes do not fit.
    """
    products = plans(both.product, inputs[: both.own], device)[:MAX_TWO_STEPS]
    results = {id(y): y for y, *_ in (each.outputs for each in products)}  # symbolic sizes cannot be hashed
    regions = {
        key: region.candidates(both.behind, both.region_inputs(y, inputs), device)[0] for key, y in results.items()
    }
    return [_one_after_the_other(both, each, regions[id(each.outputs[0])]) for each in products]


def _one_after_the_other(both: Joined, product: Plan, behind: Plan) -> Plan:
    y, *others = product.outputs
    specs = iter(behind.outputs)
    outputs = (*(y if name == RESULT else next(specs) for name in both.outputs), *others)
    given = [i for i, name in enumerate(both.outputs) if name != RESULT]
    scratch, before = product.scratch, len(product.scratch)
    result = Pointer("scratch", before)
    if RESULT in both.outputs:
        result = Pointer("output", both.outputs.index(RESULT))
    elif product.steps:
        scratch = (*scratch, element_count(y) * ITEM_BYTES[y.dtype])
    kept = len(scratch)

    def of_product(pointer: Pointer) -> Pointer:
        if pointer.kind != "output":
            return pointer
        return replace(both.other_result(pointer.index) if pointer.index else result, offset=pointer.offset)

    def of_region(pointer: Pointer) -> Pointer:
        if pointer.kind == "input":
            index = pointer.index
            return (
                replace(result, offset=pointer.offset) if index == 0 else replace(pointer, index=index - 1 + both.own)
            )
        index = given[pointer.index] if pointer.kind == "output" else pointer.index + kept
        return replace(pointer, index=index)

    steps = (*(moved(step, of_product) for step in product.steps), *(moved(step, of_region) for step in behind.steps))
    return Plan(outputs, steps, (*scratch, *behind.scratch))


def moved(step: Step, to: Callable[[Pointer], Pointer]) -> Step:
    """Return a step in which each pointer p is replaced by to(p)."""

    def each(value: Any) -> Any:
        if isinstance(value, Pointer):
            return to(value)
        if isinstance(value, tuple):
            found = tuple(map(each, value))
            return value if all(map(is_, found, value)) else found
        if isinstance(value, WITH_POINTERS):
            held = {name: old for name, old in vars(value).items() if isinstance(old, (Pointer, tuple, *WITH_POINTERS))}
            changed = {name: new for name, old in held.items() if (new := each(old)) is not old}
            return replace(value, **changed) if changed else value
        return value

    found: Step = each(step)
    return found
