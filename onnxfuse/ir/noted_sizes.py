"""Sizes that were proven equal, noted in a model's metadata for the next time that the model is optimized.

An operator of the original, such as a Reshape to a computed shape, can imply that two sizes are equal.  A fused node
replaces it by operators that run for other sizes too, so that the fact is in no operator any more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import onnx

from onnxfuse.ir.digest import graph_digest

KEY: Final = "onnxfuse.sizes"
MAX_ELEMENTS: Final = 64  # initializers up to this size are compared by their elements, which may be sizes


def note_sizes(model: onnx.ModelProto, sizes: Mapping[str, Sequence[str]]) -> None:
    """Write into the metadata, by tensor, one text for each dimension: equal texts are equal sizes.

    The note holds only for the nodes, inputs and constant sizes that the model has now.  It replaces an earlier one.
    """
    kept = [each for each in model.metadata_props if each.key != KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    if sizes:
        model.metadata_props.add(key=KEY, value=json.dumps({"digest": _digest(model), "sizes": sizes}))


def noted_sizes(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Return what `note_sizes` wrote; nothing if the model has changed since, or if it cannot have written this."""
    text = next((each.value for each in model.metadata_props if each.key == KEY), "{}")
    try:
        note: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    sizes = note.get("sizes") if isinstance(note, dict) and note.get("digest") == _digest(model) else None
    found = sizes if isinstance(sizes, dict) else {}
    return {name: dims for name, dims in found.items() if isinstance(dims, list) and all(type(d) is str for d in dims)}


def _digest(model: onnx.ModelProto) -> str:
    """Return a digest of what sizes depend on: nodes, inputs, and the shapes and small values of initializers."""
    digest = hashlib.sha256(graph_digest(model).encode())
    for info in model.graph.input:
        digest.update(info.SerializeToString(deterministic=True))
    for each in model.graph.initializer:
        digest.update(repr((each.name, each.data_type, tuple(each.dims))).encode())
        if each.data_location != onnx.TensorProto.EXTERNAL and math.prod(each.dims) <= MAX_ELEMENTS:
            digest.update(each.SerializeToString(deterministic=True))
    return digest.hexdigest()
