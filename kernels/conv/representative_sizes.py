"""Usual sizes of convolutions: the kernels of a plan for dynamic sizes are chosen by their cost at these sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.runtime.expressions import Expressions, Values
from onnxfuse.runtime.symint import SymInt

DYNAMIC: Final = ("n", "sizes", "y_sizes", "pads_begin", "pads_end")  # the fields that depend on dynamic sizes
BATCHES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  # batch sizes, if only the batch is dynamic
# (images, pixels along each of two axes). A single axis, or three axes together, have as many pixels as the two axes.
IMAGES: Final = ((1, 10), (1, 20), (1, 40), (1, 80), (1, 160), (1, 320), (8, 14), (8, 28), (8, 80), (32, 14), (32, 56))


def usual(conv: Conv) -> tuple[Conv, ...]:
    """Return the convolution at usual sizes, as plain integers; only the convolution itself if no size is dynamic."""
    given: tuple[Any, ...] = (conv.n, *conv.sizes)
    symbolic = [each for each in given if isinstance(each, SymInt)]
    if not symbolic:
        return (conv,)
    rows = symbolic[0].trace.expressions
    batch = _sizes_of(rows, conv.n)
    sides = {size for each in conv.sizes for size in _sizes_of(rows, each)} - batch
    axes = len(conv.sizes)
    points = [(images, round(side ** (2 / axes))) for images, side in IMAGES] if sides else [(n, 0) for n in BATCHES]
    if not batch:
        points = list(dict.fromkeys((0, side) for _, side in points))
    sizes: dict[int, Values] = {
        **{size: np.array([max(1, round(images ** (1 / len(batch)))) for images, _ in points]) for size in batch},
        **{size: np.array([side for _, side in points]) for size in sides},
    }
    known: dict[int, Values] = {}
    found = (_at(conv, rows, sizes, known, i) for i in range(len(points)))
    return tuple(dict.fromkeys(each for each in found if each.pixels > 0))


def _sizes_of(rows: Expressions, value: Any) -> set[int]:
    return rows.sizes_in(value.number) if isinstance(value, SymInt) else set()


def _at(conv: Conv, rows: Expressions, sizes: Mapping[int, Values], known: dict[int, Values], index: int) -> Conv:
    """Return the convolution with each dynamic size replaced by one of its values: the one at `index`."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        if not isinstance(value, SymInt):
            return value
        values = rows.value(value.number, sizes, known)
        return int(values[index] if values.ndim else values)

    return replace(conv, **{name: plain(getattr(conv, name)) for name in DYNAMIC})
