"""Nodes of disentangled attention: their operands, and the results in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from attention_cases import FLOATS, HALF_ULP, NUMPY, SMALLEST, joined, split
from described import described

from onnxfuse.runtime.plan import FusedNode, TensorSpec

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A node and the sizes of its inputs; there are `count` positions in either direction of a query."""

    queries: int
    keys: int
    batch: int = 1
    heads: int = 2
    size: int = 64
    value_size: int = 64
    dtype: str = "float16"
    layouts: tuple[str, str, str] = ("packed", "packed", "packed")
    out_layout: str = "packed"
    mask: str = "inverted"
    masked: float = -65504.0
    count: int = 40
    index_dtype: str = "int64"
    aligned: bool = True

    def node(self) -> FusedNode:
        layouts = {f"{name}_layout": layout for name, layout in zip("qkv", self.layouts, strict=True)}
        given: dict[str, Any] = {**layouts, "out_layout": self.out_layout, "heads": self.heads}
        given |= {"size": self.size, "value_size": self.value_size, "mask_kind": self.mask, "masked_score": self.masked}
        given |= {"scale": 0.07, "key_positions_scale": 0.08, "query_positions_scale": 0.05}
        return FusedNode("disentangled_attention", "n", tuple(described(self)), given, (self.dtype,))

    def inputs(self) -> Arrays:
        """Return random operands; the mask leaves the second query no key, and some indices count from the end."""
        random = np.random.default_rng(self.queries * 4099 + self.keys)

        def normal(*shape: int) -> np.ndarray:
            return random.standard_normal(shape, dtype=np.float32).astype(NUMPY[self.dtype])

        def heads(operand: int, length: int, size: int) -> np.ndarray:
            shapes = {"packed": (self.batch, length, self.heads * size), "bshd": (self.batch, length, self.heads, size)}
            shapes |= {"seq_first": (length, self.batch, self.heads * size)}
            return normal(*{**shapes, "bhsd": (self.batch, self.heads, length, size)}[self.layouts[operand]])

        distance = np.arange(self.queries)[:, None] - np.arange(self.keys)
        near = np.clip(distance, -self.count, self.count - 1)
        order = random.permutation(2 * self.count)  # neighbours of a distance may have any vectors
        made = {
            "q": heads(0, self.queries, self.size),
            "k": heads(1, self.keys, self.size),
            "v": heads(2, self.keys, self.value_size),
            "key_positions": normal(self.heads, 2 * self.count, self.size),
            "query_positions": normal(self.heads, 2 * self.count, self.size),
            "key_index": order[near + self.count][None].astype(self.index_dtype),
            "query_index": near.T[None].astype(self.index_dtype),
        }
        if self.mask != "none":
            kept = random.random((self.batch, 1, self.queries, self.keys)) < 0.8
            kept[:, :, 1:2] = False
            made["mask"] = ~kept if self.mask == "inverted" else kept
        if self.mask == "additive":
            made["mask"] = np.where(made["mask"], 0, -3).astype(NUMPY[self.dtype])
        return made

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(*each, self.aligned) for each in described(self).values())


def formula(case: Case, inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return the result in float64, and by how much each of its elements may differ."""
    q, k, v = (split(inputs[name], layout, case.heads) for name, layout in zip("qkv", case.layouts, strict=True))
    key_positions, query_positions = (inputs[f"{name}_positions"].astype(FLOATS) for name in ("key", "query"))

    def scores(q: np.ndarray, k: np.ndarray, by_key: np.ndarray, by_query: np.ndarray) -> np.ndarray:
        key_index, query_index = (
            np.broadcast_to(inputs[f"{name}_index"] % (2 * case.count), (case.batch, case.heads, *shape))
            for name, shape in (("key", (case.queries, case.keys)), ("query", (case.keys, case.queries)))
        )
        near_keys = np.take_along_axis(q @ by_key.swapaxes(-1, -2), key_index, axis=-1)
        near_queries = np.take_along_axis(k @ by_query.swapaxes(-1, -2), query_index, axis=-1)
        return q @ k.swapaxes(-1, -2) * 0.07 + near_keys * 0.08 + near_queries.swapaxes(-1, -2) * 0.05

    found = scores(q, k, key_positions, query_positions)
    sizes = scores(*map(np.abs, (q, k, key_positions, query_positions)))
    if case.mask == "additive":
        found = found + inputs["mask"].astype(FLOATS)
    elif case.mask != "none":
        found = np.where(inputs["mask"] == (case.mask == "boolean"), found, case.masked)
    with np.errstate(invalid="ignore"):
        powers = np.exp(found - found.max(-1, keepdims=True))
    weights = powers / powers.sum(-1, keepdims=True)
    slack = 2.2 * HALF_ULP[case.dtype] + 1e-6 * sizes.max(-1, keepdims=True)
    lost = case.keys * SMALLEST * np.abs(v).max() if case.dtype == "float16" else 0.0
    tolerance = slack * (np.nan_to_num(weights) @ np.abs(v)) + lost + 1e-7
    return joined(weights @ v, case.out_layout), joined(tolerance, case.out_layout)


# Lengths on and off the edges of tiles of 64, 32 and 16 queries and keys; heads not a multiple of a product's 16.
CASES = {
    "one_tile": Case(64, 64),
    "several_tiles": Case(130, 190, heads=1),
    "more_queries_than_keys": Case(100, 5, mask="none"),
    "one_query": Case(1, 70, mask="boolean"),
    "few_positions": Case(70, 70, heads=1, count=3),
    "many_positions": Case(33, 65, count=200, index_dtype="int32"),
    "added_mask": Case(40, 70, heads=1, mask="additive"),
    "batches": Case(20, 30, batch=3, heads=3, size=32, value_size=16, layouts=("bhsd", "bshd", "seq_first")),
    "odd_heads": Case(40, 36, size=24, value_size=10, out_layout="bhsd"),
    "float32": Case(70, 40, dtype="float32"),
    "float32_of_odd_heads": Case(33, 20, size=24, value_size=10, dtype="float32", aligned=False),
    "large_heads": Case(40, 70, heads=1, size=128, value_size=128, dtype="bfloat16"),
    "unaligned": Case(20, 70, size=20, value_size=12, aligned=False, dtype="bfloat16"),
    "nothing_left": Case(70, 20, mask="boolean", masked=-np.inf),
}  # fmt: skip
