"""Quantizers that onnxruntime would merge: a QuantizeLinear that reads the result of a DequantizeLinear.

onnxruntime 1.32 merges two successive pairs of a QuantizeLinear and a DequantizeLinear into one pair with one scale,
and so omits the second rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnxfuse.ir.node import Node, Tensor, consumers, producer, tensor_before

QUANTIZERS: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})
PASSING: Final = frozenset({"Identity", "Dropout"})  # operators that onnxruntime removes


def is_quantized_twice(tensor: Tensor) -> bool:
    """Return whether a tensor is the result of a QuantizeLinear that reads the result of a DequantizeLinear."""
    node = producer(tensor)
    return node is not None and node.op == "QuantizeLinear" and _dequantizer(node.inputs[0]) is not None


def joined_quantizers(old: Tensor, new: Tensor) -> Iterator[tuple[Node, Node]]:
    """Yield pairs of a DequantizeLinear and a QuantizeLinear that will read its result when `new` replaces `old`.

    Nothing is yielded if the QuantizeLinears already read the result of a DequantizeLinear.
    """
    dequantizer = _dequantizer(new)
    if dequantizer is None:
        return
    replaced = producer(old)
    # If one of these operators computes `old`, its QuantizeLinears already read the result of a DequantizeLinear.
    if replaced is None or replaced.op not in (*PASSING, "DequantizeLinear"):
        yield from ((dequantizer, quantizer) for quantizer in _quantizers(old))


def _dequantizer(tensor: Tensor) -> Node | None:
    """Return the DequantizeLinear that computes a tensor."""
    node = producer(tensor_before(tensor, PASSING))
    return node if node is not None and node.op == "DequantizeLinear" else None


def _quantizers(tensor: Tensor) -> Iterator[Node]:
    """Yield the QuantizeLinears that read a tensor, directly or through PASSING operators."""
    for node in consumers(tensor):
        if node.op in PASSING:
            yield from _quantizers(node.outputs[0])
        elif node.op == "QuantizeLinear":
            yield node
