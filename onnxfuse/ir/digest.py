"""A digest of a model's nodes, which identifies the model."""

from __future__ import annotations

import hashlib

import onnx


def graph_digest(model: onnx.ModelProto) -> str:
    """Return the SHA-256 of the nodes of a model's main graph, in hexadecimal; initializers are not included."""
    digest = hashlib.sha256()
    for node in model.graph.node:
        digest.update(node.SerializeToString(deterministic=True))
    return digest.hexdigest()
