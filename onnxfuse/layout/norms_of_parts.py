"""Let a BatchNormalization read the parts of its image, instead of a Concat that it alone reads, as in DenseNet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from onnxfuse.ir.node import producer
from onnxfuse.layout.channel_rules import between_transposes
from onnxfuse.layout.joins import Joined, Joins
from onnxfuse.rewrite.chain_bodies import chained

NORM: Final = "batch_norm_activation"


def norms_of_parts(joins: Joins) -> Iterator[Joined]:
    """Yield each channels-last Concat joined with the BatchNormalization and activation that alone read it."""
    for node in joins.graph.nodes:
        norm = joins.call(node)
        if norm is None or not norm.is_channels_last(NORM) or (NORM, joins.original(node.outputs[0])) in joins.excluded:
            continue
        image = norm.operands["x"]
        parts = joins.call(producer(image))
        if parts is not None and parts.fusion == "concat" and joins.graph.sole_consumer(image) is node:
            weights = {name: tensor for name, tensor in norm.operands.items() if name != "x"}
            body = chained(between_transposes(parts.body), norm.body)
            yield Joined((parts.node, node), norm, body, {**parts.operands, **weights}, {})
