"""Nodes of embedding_layer_norm and embedding_rms_norm with inputs, for the tests of their kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from kernel_references import layer_norm, rms_norm

from onnxfuse.runtime.plan import FusedNode, TensorSpec

# The operands that are added to the tokens: rows that further ids choose, a tensor, a row.
ADDENDS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "positions": ("ids_2",),
    "positions and types": ("ids_2", "ids_3"),
    "positions and a row": ("ids_2", "row"),
    "a tensor": ("added",),
    "a tensor and a row": ("added", "row"),
}


@dataclass(frozen=True)
class Embedding:
    """An embedding and its norm: a table of `vocabulary` rows of `size` elements, and ids of shape `ids`.

    `lead` is the shape of the position ids, or that of an added tensor without its last axis.
    """

    ids: tuple[int, ...]
    size: int
    addends: str = "none"
    lead: tuple[int, ...] = ()
    rms: bool = False
    dtype: str = "float16"
    ids_dtype: str = "int64"
    vocabulary: int = 50
    outputs: int = 2
    factor: float | None = None
    shapes: dict[str, tuple[int, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        names, tokens, row = ADDENDS[self.addends], (self.vocabulary, self.size), (self.size,)
        shapes = {"ids": self.ids, "table": tokens}
        if "ids_2" in names:
            shapes |= {"ids_2": self.lead, "table_2": (self.vocabulary // 2, self.size)}
        if "ids_3" in names:
            shapes |= {"ids_3": self.ids, "table_3": (2, self.size)}
        if "added" in names:
            shapes["added"] = (*self.lead, self.size)
        if "row" in names:
            shapes["row"] = row
        self.shapes.update(shapes, scale=row, **({} if self.rms else {"bias": row}))

    @property
    def fusion(self) -> str:
        return "embedding_rms_norm" if self.rms else "embedding_layer_norm"

    def node(self) -> FusedNode:
        factor = {} if self.factor is None else {"factor": self.factor}
        outputs = (self.dtype,) * self.outputs
        return FusedNode(self.fusion, self.fusion, tuple(self.shapes), {"epsilon": 1e-5, **factor}, outputs)

    def specs(self, aligned: bool = True) -> list[TensorSpec]:
        return [
            TensorSpec(shape, self.ids_dtype if name.startswith("ids") else self.dtype, aligned, name in CONSTANTS)
            for name, shape in self.shapes.items()
        ]


CONSTANTS = {"table", "table_2", "table_3", "row", "scale", "bias"}


def inputs(case: Embedding, numpy_dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return random ids, of which some count from the end, and normal values."""
    random, found = np.random.default_rng(7), {}
    for name, shape in case.shapes.items():
        if name.startswith("ids"):
            count = case.shapes[name.replace("ids", "table")][0]
            found[name] = random.integers(-count, count, shape).astype(case.ids_dtype)
        else:
            found[name] = random.standard_normal(shape, dtype=np.float32).astype(numpy_dtype)
    return found


def expected(case: Embedding, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the norm and the sum in float64."""
    wide = {name: array if name.startswith("ids") else array.astype(np.float64) for name, array in arrays.items()}
    total = wide["table"][wide["ids"]] * (1.0 if case.factor is None else case.factor)
    for number in "23":
        if f"ids_{number}" in wide:
            total = total + wide[f"table_{number}"][wide[f"ids_{number}"]]
    for name in ("added", "row"):
        total = total + wide.get(name, 0.0)
    if case.rms:
        return rms_norm(total, wide["scale"], 1e-5), total
    return layer_norm(total, wide["scale"], wide["bias"], 1e-5), total
