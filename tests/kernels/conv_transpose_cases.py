"""Transposed convolutions for the tests of kernels, and what they compute."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
from conv_cases import ConvCase, with_vectors

from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.runtime.plan import FusedNode

BOTH: Final = ("bias", "residual")
SAME: Final = (1, 1, 1, 1)
KINDS: Final = (("float16", False), ("bfloat16", False), ("float32", True), ("float32", False))


@dataclass(frozen=True)
class ConvTransposeCase(ConvCase):
    """A transposed convolution; `w_hwio` says that its weights are hwoi."""

    FUSION: ClassVar = "conv_transpose_bias_activation"

    output_padding: tuple[int, ...] = ()

    def __str__(self) -> str:
        added = f" +{'x'.join(map(str, self.output_padding))}" if self.output_padding else ""
        return f"transposed {super().__str__()}{added}"

    @property
    def y_sizes(self) -> tuple[int, ...]:
        stride, pads, dilation = self._geometry()
        return tuple(
            (size - 1) * stride[i] + (self.kernel[i] - 1) * dilation[i] + 1 - pads[i] - pads[i + self.axes]
            + (self.output_padding[i] if self.output_padding else 0)
            for i, size in enumerate(self.sizes)
        )  # fmt: skip

    @property
    def w_shape(self) -> tuple[int, ...]:
        filters = self.m // self.group
        return (*self.kernel, filters, self.c) if self.w_hwio else (self.c, *self.kernel, filters)

    @property
    def w_layout(self) -> str:
        return "hwoi" if self.w_hwio else "ihwo"

    def node(self) -> FusedNode:
        node = super().node()
        given = {name: value for name, value in node.attributes.items() if name != "x_layout"}
        padding = {"output_padding": list(self.output_padding)} if self.output_padding else {}
        return replace(node, attributes={**given, **padding})

    def problem(self) -> Conv:
        return replace(super().problem(), transposed=True)

    def _convolve(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Add what each pixel of x gives to the pixels of y; `w` is (channels, taps, filters of a group)."""
        strides, pads, dilations = self._geometry()
        filters = self.m // self.group
        reached = [
            (size - 1) * strides[i] + (self.kernel[i] - 1) * dilations[i] + 1 for i, size in enumerate(self.sizes)
        ]
        whole = [max(reached[i], pads[i] + y) for i, y in enumerate(self.y_sizes)]
        y = np.zeros((self.n, *whole, self.group, filters))
        x = x.reshape(self.n, *self.sizes, self.group, -1)
        w = w.reshape(self.group, -1, *self.kernel, filters)
        for tap in itertools.product(*map(range, self.kernel)):
            part = np.einsum("...gc,gcm->...gm", x, w[(slice(None), slice(None), *tap)])
            first = [tap[i] * dilations[i] for i in range(self.axes)]
            cut = [slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(first, self.sizes, strides, strict=True)]
            y[(slice(None), *cut)] += part
        cut = [slice(pads[i], pads[i] + size) for i, size in enumerate(self.y_sizes)]
        return y[(slice(None), *cut)].reshape(self.n, *self.y_sizes, self.m)


def shuffled(n: int, c: int, m: int, sizes: tuple[int, ...], factors: tuple[int, ...], **more: Any) -> Any:
    """Return one whose filter is as large as its stride, so that each pixel of y reads one of x."""
    return ConvTransposeCase(n, c, m, sizes, factors, factors, **more)


def depthwise(n: int, c: int, sizes: tuple[int, ...], kernel: tuple[int, ...], *more: Any, **named: Any) -> Any:
    """Return a depthwise one; `more` are strides, pads and dilations."""
    return ConvTransposeCase(n, c, c, sizes, kernel, *more, **{"group": c, "w_hwio": True, **named})


def shapes() -> Iterator[ConvTransposeCase]:
    """Yield phases of unequal and of no taps, odd sizes, what is cut off one side, and what no tap reaches."""
    for i, strides in enumerate(((1, 1), (1, 2), (2, 1), (2, 3), (3, 3), (2, 2))):
        for dilations in ((1, 1), (2, 1), (1, 3), (2, 2)):
            added = tuple(min(stride - 1, 1 + i % 2) for stride in strides)
            yield ConvTransposeCase(2, 16, 40, (7, 5), (3, 2), strides, (0, 1, 2, 0), dilations, output_padding=added)
    for kernel, pads in (((4, 4), SAME), ((3, 3), SAME), ((2, 2), (0, 0, 0, 0)), ((5, 4), (2, 0, 1, 3)), ((1, 1), ())):
        yield ConvTransposeCase(2, 32, 72, (6, 7), kernel, (2, 2), pads, extra=BOTH)
        yield ConvTransposeCase(1, 24, 36, (6, 7), kernel, (2, 2), pads, extra=BOTH, residual_first=False)
    yield ConvTransposeCase(1, 64, 64, (8, 8), (4, 4), (2, 2), SAME)
    yield ConvTransposeCase(3, 16, 32, (1, 1), (4, 4), (2, 2), SAME)
    yield ConvTransposeCase(1, 16, 32, (1, 1), (4, 4), (1, 1))
    yield ConvTransposeCase(1, 16, 32, (3, 2), (16, 16), (8, 8), (4, 4, 4, 4))
    yield ConvTransposeCase(1, 16, 32, (3, 4), (2, 3), (4, 5))


def widths() -> Iterator[ConvTransposeCase]:
    """Yield copies and accesses of every width, groups, one and three axes, dtypes, and other magnitudes."""
    for dtype, tf32 in KINDS:
        given: dict[str, Any] = {"dtype": dtype, "tf32": tf32}
        for c, m in ((64, 64), (32, 6), (6, 34), (5, 33), (20, 1), (1, 3)):
            yield ConvTransposeCase(2, c, m, (5, 6), (3, 3), (2, 2), SAME, extra=BOTH, **given)
        yield ConvTransposeCase(2, 24, 48, (5, 6), (4, 4), (2, 2), SAME, group=3, extra=BOTH, **given)
        yield ConvTransposeCase(1, 9, 15, (5, 6), (3, 3), (2, 2), SAME, group=3, **given)
        yield ConvTransposeCase(1, 8, 16, (5, 6), (2, 2), (2, 2), group=8, **given)
        yield ConvTransposeCase(2, 16, 40, (19,), (5,), (3,), (2, 1), **given)
        yield ConvTransposeCase(2, 12, 20, (3, 4, 5), (3, 2, 4), (2, 1, 2), (1, 0, 1, 1, 1, 2), (1, 1, 1), **given)
        yield ConvTransposeCase(2, 16, 40, (5, 6), (3, 3), (2, 2), SAME, aligned=False, extra=BOTH, **given)
        yield ConvTransposeCase(2, 16, 40, (5, 6), (3, 3), (2, 2), SAME, scale=300.0, **given)


def products() -> Iterator[ConvTransposeCase]:
    """Yield those that are one product: columns of no whole vectors, one filter, other axes, tiles and dtypes."""
    for dtype, tf32 in KINDS:
        given: dict[str, Any] = {"dtype": dtype, "tf32": tf32}
        yield shuffled(2, 64, 64, (5, 7), (2, 2), extra=BOTH, **given)
        yield shuffled(2, 16, 1, (9, 7), (2, 2), **given)
        yield shuffled(1, 24, 3, (9, 7), (4, 2), activation="silu", extra=BOTH, residual_first=False, **given)
        yield shuffled(1, 40, 20, (6, 5), (3, 3), **given)
        yield shuffled(2, 5, 7, (6, 5), (2, 3), extra=BOTH, **given)
        yield shuffled(2, 16, 12, (21,), (2,), **given)
        yield shuffled(1, 16, 6, (2, 3, 5), (2, 1, 2), extra=BOTH, **given)
        yield shuffled(1, 16, 12, (6, 5), (2, 2), aligned=False, extra=BOTH, **given)
    yield shuffled(1, 32, 64, (7, 9), (1, 1), activation="gelu")


# Filters, strides, dilations and padding that differ by axis and by side; phases of no taps; one and three axes; widths
# that leave pixels of a strip in front of y and behind it; vectors of every width.
DEPTHWISE: Final = [
    depthwise(2, 24, (5, 7), (4, 4), (2, 2), SAME, extra=BOTH),
    depthwise(
        1, 40, (5, 7), (3, 3), (2, 2), SAME, output_padding=(1, 1), dtype="bfloat16", extra=BOTH, residual_first=False
    ),
    depthwise(1, 16, (4, 6), (8, 8), (4, 4), (2, 2, 2, 2), dtype="float32"),
    depthwise(1, 20, (5, 5), (3, 3), (1, 1), (1, 0, 1, 2), activation="silu"),
    depthwise(1, 7, (6, 5), (5, 3), (3, 2), (2, 1, 0, 1), constant=False),
    depthwise(1, 16, (4, 7), (3, 3), (2, 3), (1, 4, 2, 0), (2, 2)),
    depthwise(1, 16, (4, 7), (3, 2), (2, 4), (), (2, 2), output_padding=(1, 3)),
    depthwise(2, 12, (5, 6), (2, 2), (2, 2), aligned=False, extra=BOTH),
    depthwise(1, 8, (23,), (9,), (4,), (3, 2), dtype="float32", extra=()),
    depthwise(2, 8, (3, 4, 5), (3, 2, 4), (2, 1, 2), (1, 0, 1, 1, 1, 1), extra=()),
    depthwise(1, 6, (3, 3), (64, 64), (32, 32), (16, 16, 16, 16)),
    depthwise(1, 8, (3, 5), (2, 2), (5, 3)),
]

# Several taps in a phase and one; boxes of a part of a row, of a row and of several rows; positions that end inside a
# tile; channels that end inside a block of k; what is cut off unequally, one axis, and a walk that begins behind x;
# neighbouring pixels that count as one.
HOPPER: Final = [
    ConvTransposeCase(2, 72, 64, (5, 8), (4, 4), (2, 2), SAME, extra=BOTH),
    ConvTransposeCase(3, 24, 128, (7, 16), (4, 2), (2, 1), (1, 1, 1, 0), dtype="bfloat16"),
    shuffled(2, 136, 64, (3, 40), (2, 2), extra=BOTH, residual_first=False),
    shuffled(1, 8, 192, (5, 24), (3, 2), extra=()),
    shuffled(2, 72, 32, (5, 16), (2, 2), extra=BOTH),
    ConvTransposeCase(1, 24, 16, (5, 16), (4, 4), (2, 4), (1, 0, 1, 0), extra=("bias",)),
    ConvTransposeCase(1, 40, 64, (4, 32), (6, 6), (3, 2), (2, 3, 1, 1), extra=("bias",)),
    ConvTransposeCase(2, 16, 64, (48,), (8,), (4,), (1, 3)),
    ConvTransposeCase(1, 16, 64, (6, 17), (2, 2), (1, 1), (0, 1, 1, 1)),
    ConvTransposeCase(1, 16, 64, (9, 20), (2, 2), (2, 2), (4, 4, 2, 4)),
]

# By the kind of kernel.  Fewer filters than a vector has elements, and pixels that count as one, repeat the vectors.
WITH_VECTORS: Final = {
    "mma": with_vectors(
        ConvTransposeCase(2, 16, 40, (5, 4), (3, 3), (2, 2), SAME),
        ConvTransposeCase(1, 6, 34, (5, 4), (4, 4), (2, 3), (1, 1, 0, 1), dtype="bfloat16"),
        ConvTransposeCase(1, 24, 20, (7,), (3,), (2,), (1, 0), dtype="float32", tf32=True),
        shuffled(1, 24, 3, (5, 4), (4, 2)),
    ),
    "depthwise": with_vectors(DEPTHWISE[0], DEPTHWISE[2]),
    "hopper": with_vectors(HOPPER[4], HOPPER[8]),
}
