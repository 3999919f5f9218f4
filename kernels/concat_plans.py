"""Joins two plans into one that runs both in turn: the second plan reads the first one's result from scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxfuse.kernels.epilogue_node import moved
from onnxfuse.kernels.tensors import ITEM_BYTES, element_count
from onnxfuse.runtime.plan import Plan, Pointer


def chained(first: Plan, second: Plan, of_first: Sequence[int], of_second: Sequence[int | None]) -> Plan:
    """Return one plan that runs `first`, which has one output, and then `second`; the outputs are those of `second`.

    Input i of `first` is the whole plan's input number `of_first[i]`. Input i of `second` is the whole plan's input
    number `of_second[i]`, or the output of `first` if `of_second[i]` is None.
    """
    (between,) = first.outputs
    kept = len(second.scratch)
    stored = Pointer("scratch", kept)

    def to_first(pointer: Pointer) -> Pointer:
        if pointer.kind == "output":
            return replace(stored, offset=pointer.offset)
        index = of_first[pointer.index] if pointer.kind == "input" else pointer.index + kept + 1
        return replace(pointer, index=index)

    def to_second(pointer: Pointer) -> Pointer:
        index = of_second[pointer.index] if pointer.kind == "input" else pointer.index
        return replace(stored, offset=pointer.offset) if index is None else replace(pointer, index=index)

    steps = (*(moved(step, to_first) for step in first.steps), *(moved(step, to_second) for step in second.steps))
    scratch = (*second.scratch, element_count(between) * ITEM_BYTES[between.dtype], *first.scratch)
    return Plan(second.outputs, steps, scratch)
