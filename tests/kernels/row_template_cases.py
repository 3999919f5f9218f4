"""Nodes of rows, elements and pixels with dynamic dims, whose templates the tests check, compile, emulate and run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from kernel_references import group_norm_nhwc, layer_norm, rms_norm, rotate_complex, rotate_half, rotate_pairs, softmax
from template_checks import check_template, template_of

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.runtime.plan import Device, FusedNode, TensorSpec
from onnxfuse.runtime.template import Template, Variant, size_count

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
BATCH, SEQUENCE, OTHER = -1, -2, -3  # sizes 0, 1 and 2; OTHER is a past length, a width, or positions of their own
NORM_WEIGHTS = ("scale", "bias", "mean", "var")
INTEGERS = ("ids", "ids_2", "ids_3", "positions")
# Where sizes are symbolic, these macros are a general choice: the last block may have less to do than the others, and
# as many blocks are resident as registers allow.
GENERIC = ("FULL_BLOCKS", "MIN_BLOCKS", "WHOLE")

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TemplateCase:
    """A node: the shapes of its operands, of which dynamic dims are negative, and its formula in float64."""

    fusion: str
    shapes: Mapping[str, tuple[int, ...]]
    formula: Callable[[Arrays], Sequence[np.ndarray]]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    max_kernels: int = 4
    tied: bool = False  # OTHER equals SEQUENCE in every run
    even: tuple[int, ...] = ()  # the numbers of sizes that must be even
    own_tilings: bool = False  # the host has tilings for symbolic sizes alone

    def __str__(self) -> str:
        dims = {BATCH: "b", SEQUENCE: "s", OTHER: "t"}
        first = next(iter(self.shapes.values()))
        size = "x".join(str(dims.get(dim, dim)) for dim in self.shapes.get("x", first))
        return f"{self.fusion} {len(self.shapes)} {size} {self.attributes.get('layout', '')}".strip()

    def node(self, dtype: str) -> FusedNode:
        return FusedNode(self.fusion, "n", tuple(self.shapes), self.attributes, (dtype,) * self.outputs)

    def specs(self, dtype: str, aligned: bool = True) -> list[TensorSpec]:
        return [
            TensorSpec(shape, "int64" if name in INTEGERS else dtype, aligned, aligned and min(shape) > 0)
            for name, shape in self.shapes.items()
        ]

    def template(self, dtype: str, device: Device, aligned: bool = True) -> Template:
        return template_of(self.node(dtype), self.specs(dtype, aligned), device)

    def check(self, dtype: str, device: Device, aligned: bool = True) -> Template:
        return check_template(
            self.node(dtype), self.specs(dtype, aligned), device, max_kernels=self.max_kernels,
            sizes=lambda seed: self.fitted([int(8192 ** random.Random(f"{seed} {i}").random()) for i in range(3)]),
            generic=GENERIC, own_tilings=self.own_tilings,
        )  # fmt: skip

    def fitted(self, sizes: Sequence[int]) -> list[int]:
        """Return as many of these sizes as the node has, changed where they must be even or equal."""
        found = [size + size % 2 if i in self.even else size for i, size in enumerate(sizes)]
        if self.tied:
            found[-1 - OTHER] = found[-1 - SEQUENCE]
        return found[: size_count(self.specs("float16"))]

    def elements(self, sizes: Sequence[int]) -> int:
        """Return the elements of the largest tensor with dynamic dims; ids count as the rows of their table."""
        return max(
            math.prod(sizes[-1 - dim] if dim < 0 else dim for dim in shape)
            * (self.shapes[name.replace("ids", "table")][1] if name.startswith("ids") else 1)
            for name, shape in self.shapes.items()
            if min(shape) < 0
        )

    def arrays(self, dtype: str, sizes: Sequence[int]) -> dict[str, np.ndarray]:
        """Return operands at random, of these sizes."""
        chance, found = np.random.default_rng(1), {}
        for name, shape in self.shapes.items():
            dims = [sizes[-1 - dim] if dim < 0 else dim for dim in shape]
            if name in INTEGERS:
                count = self.shapes[name.replace("ids", "table")][0] if name.startswith("ids") else 50
                found[name] = chance.integers(0, count, dims)
            else:
                values = chance.standard_normal(dims, dtype=np.float32)
                found[name] = (np.abs(values) + 0.5 if name == "var" else values).astype(NUMPY[dtype])
        return found

    def expected(self, arrays: Arrays) -> list[np.ndarray]:
        """Return the outputs in float64."""
        wide = {name: each if name in INTEGERS else each.astype(np.float64) for name, each in arrays.items()}
        return list(self.formula(wide))[: self.outputs]


def sizes_by_variant(
    case: TemplateCase, template: Template, most: int, of_each: int
) -> Iterator[tuple[Variant, list[int]]]:
    """Yield so many sizes for each variant, odd and even ones, where no tensor of dynamic dims has more elements."""
    chance, left = random.Random(7), {id(variant): of_each for variant in template.variants}
    for _ in range(300):
        if not any(left.values()):
            return
        sizes = case.fitted([int(most ** chance.uniform(0, 0.75)) for _ in range(3)])
        if case.elements(sizes) > most:
            continue
        variant = template.chosen(sizes)
        assert variant, f"no variant for {sizes}"
        if left[id(variant)]:
            left[id(variant)] -= 1
            yield variant, sizes


# --- formulas ---------------------------------------------------------------------------------------------------------


def _silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(ACTIVATIONS["silu"].formula(x, 0, 0))


def _added(a: Arrays) -> list[np.ndarray]:
    total = a["x"] + a["residual"]
    if "bias" in a:
        return [layer_norm(total, a["scale"], a["bias"], 1e-5), total]
    return [rms_norm(total, a["scale"], 1e-5), total]


def _epsilon(channels: int, groups: int) -> float:
    """Return a larger epsilon for groups of one channel: of two pixels that are nearly equal, few digits differ."""
    return 1e-5 if groups < channels else 1e-1


def _group_norm_nchw(a: Arrays, groups: int) -> list[np.ndarray]:
    epsilon = _epsilon(a["x"].shape[1], groups)
    y = group_norm_nhwc(np.moveaxis(a["x"], 1, -1), a["scale"], a["bias"], groups, epsilon)
    return [_silu(np.moveaxis(y, -1, 1))]


def _batch_norm(a: Arrays) -> list[np.ndarray]:
    normal = (a["x"] - a["mean"]) / np.sqrt(a["var"] + 1e-5) * a["scale"] + a["bias"]
    return [np.maximum(normal, 0)]


def _embedding(a: Arrays) -> list[np.ndarray]:
    total = a["table"][a["ids"]]
    for number in "23":
        if f"ids_{number}" in a:
            total = total + a[f"table_{number}"][a[f"ids_{number}"]]
    total = total + a.get("added", 0.0)
    if "bias" in a:
        return [layer_norm(total, a["scale"], a["bias"], 1e-5), total]
    return [rms_norm(total, a["scale"], 1e-5), total]


def _rotary(a: Arrays, layout: str) -> list[np.ndarray]:
    x = a["x"]
    if layout == "packed":
        x = x.reshape(*x.shape[:2], -1, a["cos"].shape[-1])
    if layout != "bhsd":
        x = np.swapaxes(x, 1, 2)
    return [rotate_half(x, a["cos"][:, None], a["sin"][:, None])]


def _rotary_behind_one(a: Arrays) -> list[np.ndarray]:
    """Return x, of which the first row stays as it is."""
    return [np.concatenate([a["x"][:, :, :1], rotate_half(a["x"][:, :, 1:], a["cos"], a["sin"])], axis=2)]


def _rotary_of_neighbours(a: Arrays, layout: str) -> list[np.ndarray]:
    """Rotate adjacent pairs; return rows before heads.  The tables have an axis of one head after their rows."""
    x = a["x"]
    if layout == "packed":
        x = x.reshape(*x.shape[:2], -1, a["cos"].shape[-1])
    if layout == "bhsd":
        x = np.swapaxes(x, 1, 2)
    return [rotate_pairs(x, a["cos"], a["sin"])]


def _rotary_of_complex(a: Arrays, layout: str, form: str) -> list[np.ndarray]:
    """Rotate pairs as complex numbers; return heads before rows.  The tables have one column per pair."""
    x = a["x"]
    if layout == "packed":
        x = x.reshape(*x.shape[:2], -1, 2 * a["cos"].shape[-1])
    if layout != "bhsd":
        x = np.swapaxes(x, 1, 2)
    return [rotate_complex(x, a["cos"][:, None], a["sin"][:, None], form)]


def _table(a: Arrays) -> list[np.ndarray]:
    rounded = (a["positions"][..., None] * a["frequencies"]).astype(np.float32)  # as the operators round it
    angles = np.tile(rounded.astype(np.float64), 2)
    return [np.cos(angles), np.sin(angles)]


def _to_space(x: np.ndarray) -> np.ndarray:
    n, h, w, c = x.shape
    return x.reshape(n, h, w, 2, 2, c // 4).transpose(0, 1, 3, 2, 4, 5).reshape(n, h * 2, w * 2, c // 4)


def _to_depth(x: np.ndarray) -> np.ndarray:
    n, h, w, c = x.shape
    return x.reshape(n, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(n, h // 2, w // 2, c * 4)


# --- cases ------------------------------------------------------------------------------------------------------------


def norm_cases() -> Iterator[TemplateCase]:
    """Yield norms of dynamic batch and sequence, softmax of any length, and group norms of any image."""
    epsilon = {"epsilon": 1e-5}
    for d in (24, 256, 768, 1023, 4096, 40960):
        x, w = (BATCH, SEQUENCE, d), (d,)
        yield TemplateCase("layer_norm", {"x": x, "scale": w, "bias": w}, lambda a: [layer_norm(*a.values(), 1e-5)],
                           epsilon)  # fmt: skip
        yield TemplateCase("rms_norm", {"x": x, "scale": w}, lambda a: [rms_norm(*a.values(), 1e-5)], epsilon)
        yield TemplateCase("add_layer_norm", {"x": x, "residual": x, "scale": w, "bias": w}, _added, epsilon, 2)
        yield TemplateCase("add_rms_norm", {"x": x, "residual": x, "scale": w}, _added, epsilon, 2)
    for x in ((BATCH, 12, SEQUENCE, SEQUENCE), (BATCH, 3, SEQUENCE, OTHER)):
        yield TemplateCase("softmax", {"x": x}, lambda a: [softmax(a["x"])], max_kernels=6, own_tilings=True)
    yield TemplateCase("softmax", {"x": (BATCH, 1000)}, lambda a: [softmax(a["x"])])
    for x, groups in (
        ((BATCH, 64, SEQUENCE, OTHER), 8),
        ((BATCH, 2, SEQUENCE, OTHER), 1),
        ((BATCH, 320, 64, 64), 32),
        ((BATCH, 60, 7, 7), 4),
        ((BATCH, 24, SEQUENCE, OTHER), 24),
    ):
        yield TemplateCase(
            "group_norm", {"x": x, "scale": x[1:2], "bias": x[1:2]}, lambda a, g=groups: _group_norm_nchw(a, g),
            {"epsilon": _epsilon(x[1], groups), "groups": groups, "activation": "silu"}, max_kernels=5,
            own_tilings=SEQUENCE in x,
        )  # fmt: skip


def group_norm_nhwc_cases() -> Iterator[TemplateCase]:
    """Yield group norms of channels-last images of any number or size."""
    for c, groups in ((320, 32), (64, 8), (60, 4), (48, 48)):
        for spatial in ((SEQUENCE, OTHER), (16, 16)):
            yield TemplateCase(
                "group_norm", {"x": (BATCH, *spatial, c), "scale": (c,), "bias": (c,)},
                lambda a, g=groups: [group_norm_nhwc(*a.values(), g, _epsilon(a["x"].shape[-1], g))],
                {"epsilon": _epsilon(c, groups), "groups": groups, "layout": "nhwc"}, max_kernels=6,
                own_tilings=SEQUENCE in spatial,
            )  # fmt: skip


def element_cases() -> Iterator[TemplateCase]:
    """Yield elementwise functions, copies of channels and blocks of pixels."""
    silu, nhwc = {"activation": "silu"}, {"layout": "nhwc"}
    for d in (24, 768, 1023):
        x, image = (BATCH, SEQUENCE, d), (BATCH, SEQUENCE, OTHER, d)
        yield TemplateCase("activation", {"x": x}, lambda a: [_silu(a["x"])], silu)
        yield TemplateCase("bias_activation", {"x": x, "bias": (d,)}, lambda a: [_silu(a["x"] + a["bias"])], silu)
        yield TemplateCase("gated_activation", {"gate": x, "up": x}, lambda a: [_silu(a["gate"]) * a["up"]], silu)
        both = (BATCH, SEQUENCE, 2 * d)
        yield TemplateCase(
            "gated_activation", {"gate": both, "up": both},
            lambda a, n=d: [_silu(a["gate"][..., :n]) * a["up"][..., n:]],
            {**silu, "d": d, "gate_offset": 0, "up_offset": d},
        )  # fmt: skip
        gate = (BATCH, 1, 1, d)
        yield TemplateCase("channel_scale", {"x": image, "gate": gate}, lambda a: [a["x"] * a["gate"]], nhwc)
        yield TemplateCase("batch_norm_activation", {"x": image, **dict.fromkeys(NORM_WEIGHTS, (d,))},
                           _batch_norm, {**nhwc, "activation": "relu", "epsilon": 1e-5})  # fmt: skip
        yield TemplateCase("concat", {"x_0": image, "x_1": image}, lambda a: [np.concatenate(list(a.values()), -1)],
                           {**nhwc, "axis": -1})  # fmt: skip
        yield TemplateCase("split", {"x": image}, lambda a, n=d: [a["x"][..., : n // 3], a["x"][..., n // 3 :]],
                           {**nhwc, "axis": -1, "split": [d // 3, d - d // 3]}, 2)  # fmt: skip
    yield TemplateCase("gated_activation", dict.fromkeys(("gate", "up"), (BATCH, 3, SEQUENCE, OTHER)),
                       lambda a: [_silu(a["gate"]) * a["up"]], silu)  # fmt: skip
    two = {**nhwc, "blocksize": 2}
    x = (BATCH, SEQUENCE, OTHER, 24)
    yield TemplateCase("depth_to_space", {"x": x}, lambda a: [_to_space(a["x"])], two)
    yield TemplateCase("space_to_depth", {"x": x}, lambda a: [_to_depth(a["x"])], two, even=(1, 2))


def rotary_cases() -> Iterator[TemplateCase]:
    """Yield rotary embeddings of each layout, with tables for all images or for each, and the tables."""
    for layout, x in (
        ("packed", (BATCH, SEQUENCE, 512)),
        ("bshd", (BATCH, SEQUENCE, 8, 64)),
        ("bhsd", (BATCH, 8, -2, 64)),
    ):
        for tables in (1, BATCH):
            table = (tables, SEQUENCE, 64)
            yield TemplateCase("rotary_embedding", {"x": x, "cos": table, "sin": table},
                               lambda a, of=layout: _rotary(a, of), {"layout": layout})  # fmt: skip
            table = (tables, SEQUENCE, 1, 64)
            form = {"layout": layout, "form": "rotate_pairs", "order": "rows_first", "table": "bs1d"}
            yield TemplateCase("rotary_embedding", {"x": x, "cos": table, "sin": table},
                               lambda a, of=layout: _rotary_of_neighbours(a, of), form)  # fmt: skip
        table, size = (1, SEQUENCE, 32), {"size": 64}
        for name in "complex_halves", "complex_pairs", "complex_pairs_to_halves":
            yield TemplateCase("rotary_embedding", {"x": x, "cos": table, "sin": table},
                               lambda a, of=layout, form=name: _rotary_of_complex(a, of, form),
                               {"layout": layout, "form": name, **size})  # fmt: skip
    table, by_heads = (8, SEQUENCE, 64), {"layout": "bhsd", "table": "hsd"}
    yield TemplateCase("rotary_embedding", {"x": (BATCH, 8, -2, 64), "cos": table, "sin": table},
                       lambda a: [rotate_half(a["x"], a["cos"], a["sin"])], by_heads)  # fmt: skip
    behind_one = {"layout": "bhsd", "first_rows": "kept", "kept": 1}
    for rows in (37, 1):
        table = (1, rows, 64)
        yield TemplateCase("rotary_embedding", {"x": (BATCH, 8, 38, 64), "cos": table, "sin": table},
                           _rotary_behind_one, behind_one)  # fmt: skip
    yield TemplateCase("rotary_table", {"positions": (BATCH, SEQUENCE), "frequencies": (32,)}, _table,
                       {"angles": "twice"}, 2)  # fmt: skip


def embedding_cases() -> Iterator[TemplateCase]:
    """Yield embeddings with positions of every kind, also with a dynamic dim of their own, and without any."""
    for d in (24, 768, 1023, 4096):
        w, ids = {"scale": (d,), "bias": (d,)}, (BATCH, SEQUENCE)
        tokens = {"table": (500, d), "ids": ids}
        for positions in ((1, SEQUENCE), (1, OTHER), (OTHER,), (BATCH, SEQUENCE), (1,)):
            more = {"table_2": (50, d), "ids_2": positions, "table_3": (2, d), "ids_3": ids}
            yield TemplateCase("embedding_layer_norm", {**tokens, **more, **w}, _embedding, {"epsilon": 1e-5}, 1,
                               tied=OTHER in positions)  # fmt: skip
        yield TemplateCase("embedding_layer_norm", {**tokens, "added": (1, SEQUENCE, d), **w}, _embedding,
                           {"epsilon": 1e-5}, 2)  # fmt: skip
        yield TemplateCase("embedding_rms_norm", {**tokens, "scale": (d,)}, _embedding, {"epsilon": 1e-5}, 2)


def all_cases() -> list[TemplateCase]:
    return [*norm_cases(), *group_norm_nhwc_cases(), *element_cases(), *rotary_cases(), *embedding_cases()]
