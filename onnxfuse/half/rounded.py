"""Perturb weights and inputs by a rounding error of half precision, to measure the noise of the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx

from onnxfuse.half.precision import Precision
from onnxfuse.half.weights import ScratchFolder, Weights
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.protos import graphs, has_external_data, replace_tensors, subgraphs
from onnxfuse.verify.noise import move_by_rounding


def with_moved_weights(
    plain: onnx.ModelProto, folder: Path | None, precision: Precision, draw: int
) -> tuple[onnx.ModelProto, Weights]:
    """Return a model with weights perturbed by one rounding error of half precision, and the owner of its data folder.

    draw  the number of the draw: each draw perturbs the values in other directions
    """
    weights = Weights(folder, precision)
    if has_external_data(plain):
        weights.scratch = ScratchFolder()
    result = replace_tensors(plain, lambda tensor: weights.moved(tensor, draw))
    for part in graphs(*(inner for node in result.graph.node for inner in subgraphs(node))):
        for tensor in part.initializer:
            tensor.CopyFrom(weights.moved(tensor, draw))
    return result, weights


def moved(feeds: Mapping[str, Array], precision: Precision, draw: int) -> dict[str, Array]:
    """Return inputs whose floating-point values are perturbed, up or down, by one rounding error of half precision."""
    return {name: move_by_rounding(name, value, precision.rounding, draw) for name, value in feeds.items()}
