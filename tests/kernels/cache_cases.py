"""Attention nodes with caches: the inputs of attention_cases.py, their keys and values cut into past and new rows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from attention_cases import Case, joined, split
from described import described

from onnxfuse.runtime.plan import FusedNode, TensorSpec

AXES = {"bhsd": 2, "bshd": 1}  # the axis on which a cache grows, by its layout


@dataclass(frozen=True)
class CachedCase:
    """Attention (`case`) over caches whose first `past` rows are there; the other rows are new, in `layouts`."""

    case: Case
    past: int
    layouts: tuple[str, str] = ("bhsd", "packed")
    outputs: int = 3  # of the result and both present caches

    @property
    def cache_layout(self) -> str:
        return self.case.layouts[1]

    def node(self) -> FusedNode:
        whole = self.case.node()
        given = {**whole.attributes, "k_layout": self.layouts[0], "v_layout": self.layouts[1]}
        given["cache_layout"] = self.cache_layout
        outputs = (*whole.output_dtypes, self.case.dtype, self.case.dtype)[: self.outputs]
        return FusedNode("attention_with_cache", "n", tuple(described(self)), given, outputs)

    def inputs(self) -> dict[str, np.ndarray]:
        whole = self.case.inputs()
        cut = {name: np.split(whole[name], [self.past], AXES[self.cache_layout]) for name in "kv"}
        new = {name: self._laid_out(cut[name][1], layout) for name, layout in zip("kv", self.layouts, strict=True)}
        masks = {name: value for name, value in whole.items() if name not in "qkv"}
        return {"q": whole["q"], **new, "past_key": cut["k"][0], "past_value": cut["v"][0], **masks}

    def presents(self) -> tuple[np.ndarray, np.ndarray]:
        whole = self.case.inputs()
        return whole["k"], whole["v"]

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(shape, dtype, self.case.aligned) for shape, dtype in described(self).values())

    def present_specs(self) -> tuple[TensorSpec, ...]:
        """The caches with the new rows, as a plan describes them."""
        whole = described(self.case)
        return tuple(TensorSpec(*whole[name], self.case.aligned) for name in "kv")

    def _laid_out(self, rows: np.ndarray, layout: str) -> np.ndarray:
        heads = split(rows, self.cache_layout, self.case.kv_heads)
        return np.ascontiguousarray(joined(heads, layout)).astype(rows.dtype)


def cached(past: int, new: int, layout: str = "bhsd", new_layouts: tuple[str, str] = ("bhsd", "packed"),
           q_layout: str = "bhsd", **given: object) -> CachedCase:  # fmt: skip
    """A case of `new` rows behind `past` ones, with as many queries as there are new rows."""
    case = Case(keys=past + new, layouts=(q_layout, layout, layout), **{"queries": new, **given})  # type: ignore[arg-type]
    return CachedCase(dataclasses.replace(case, scale=case.scale or case.size**-0.5), past, new_layouts)
