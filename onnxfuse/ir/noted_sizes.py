"""Sizes that were proven equal, noted in a model's metadata for the next time that the model is optimized.

An operator of the original, such as a Reshape to a computed shape, can imply that two sizes are equal.  A fused node
replaces it by operators that run for other sizes too, so that the fact is in no operator any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import onnx

from onnxfuse.ir.digest import graph_digest

KEY: Final = "onnxfuse.sizes"


def note_sizes(model: onnx.ModelProto, sizes: Mapping[str, Sequence[str]]) -> None:
    """Write into the metadata, by tensor, one text for each dimension: equal texts are equal sizes.

    The note holds only for the nodes that the model has now.  It replaces an earlier one.
    """
    kept = [each for each in model.metadata_props if each.key != KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    if sizes:
        model.metadata_props.add(key=KEY, value=json.dumps({"nodes": graph_digest(model), "sizes": sizes}))


def noted_sizes(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Return what `note_sizes` wrote; nothing if the nodes have changed since, or if it cannot have written this."""
    text = next((each.value for each in model.metadata_props if each.key == KEY), "{}")
    try:
        note: Any = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    sizes = note.get("sizes") if isinstance(note, dict) and note.get("nodes") == graph_digest(model) else None
    found = sizes if isinstance(sizes, dict) else {}
    return {name: dims for name, dims in found.items() if isinstance(dims, list) and all(type(d) is str for d in dims)}
