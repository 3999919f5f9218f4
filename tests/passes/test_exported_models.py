"""The passes on every exported model."""

from __future__ import annotations

import numpy as np
import pytest
from exported_models import load_exported, read_index
from onnx_models import apply, ops, run

from onnxfuse.algebra.size_parser import parse_size
from onnxfuse.algebra.sizes import evaluate
from onnxfuse.passes.fold_batch_norm import fold_batch_norm
from onnxfuse.passes.fold_constants import fold_constants
from onnxfuse.passes.fold_shapes import fold_shapes
from onnxfuse.passes.normalize import normalize

INDEX = read_index()


def feeds_of(entry: dict, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Return random inputs as the index of the exported models describes them."""
    random_state, feeds = np.random.default_rng(0), {}
    for each in entry["inputs"]:
        dims = [evaluate(parse_size(d), sizes) if isinstance(d, str) else d for d in each["dims"]]
        if each.get("prefix_mask"):
            array = np.arange(dims[1])[None] < random_state.integers(1, dims[1] + 1, (dims[0], 1))
        elif "range" in each:
            array = random_state.integers(each["range"][0], each["range"][1] + 1, dims)
        else:
            array = random_state.standard_normal(dims)
        feeds[each["name"]] = array.astype(each["dtype"])
    return feeds


@pytest.mark.parametrize("name", sorted(INDEX))
def test_exported_models(name: str) -> None:
    """Each exported model computes the same at two sizes, and no BatchNormalization is left that could be folded."""
    entry, model = INDEX[name], load_exported(name)
    passes = (fold_constants, normalize, fold_shapes, fold_constants, fold_batch_norm, normalize)
    after, results = apply(model, *passes)
    in_front_of_relu = entry["architecture"] == "densenet"  # after a Concat: no weights are there to fold it into
    assert "BatchNormalization" not in ops(after) or in_front_of_relu
    assert len(after.graph.node) <= len(model.graph.node)
    assert after.ByteSize() < model.ByteSize() * 1.01
    _, more = apply(after, *passes)
    assert not any(more), "a second run must find nothing"
    for sizes in entry["verified_sizes"]:
        feeds = feeds_of(entry, sizes)
        # Rounding weights again costs as much accuracy as half precision does; the index holds that error of the model.
        tol = max(3e-2, 20 * entry["max_relative_error"]) if entry["dtype"] == "fp16" else 1e-4
        for a, b in zip(run(model, feeds), run(after, feeds), strict=True):
            assert a.shape == b.shape
            assert np.abs(a.astype(float) - b).max() <= (tol if results[4] else tol / 10) * np.abs(a).max()
