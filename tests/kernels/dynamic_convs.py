"""Convolutions of dynamic sizes for the tests of plan templates: usual ones of networks, and odd ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from conv_cases import BOTH, ConvCase, depthwise, image
from conv_transpose_cases import ConvTransposeCase, shuffled
from conv_transpose_cases import depthwise as transposed_depthwise

from onnxfuse.runtime.plan import Device, TensorSpec

SAME: Final = (1, 1, 1, 1)
MAX_IMAGES: Final = 64
HOPPER_ARCH: Final = 90
MAX_SIDE: Final = {1: 20000, 2: 400, 3: 60}  # by the number of spatial axes


@dataclass(frozen=True)
class DynamicConv:
    """A convolution of which some dims of x are dynamic: n, and the spatial axes d, h and w."""

    case: ConvCase
    dynamic: str

    def __str__(self) -> str:
        return f"{self.dynamic} {self.case}"

    def _dims(self) -> tuple[list[str], list[str]]:
        """Return the names of the dims of x and of y but their channels; "" for one that is not dynamic."""
        sides = [axis if axis in self.dynamic else "" for axis in "dhw"[-self.case.axes :]]
        batch = "n" if "n" in self.dynamic else ""
        return [batch, *sides], [batch, *(f"y_{axis}" if axis else "" for axis in sides)]

    def names(self) -> list[str]:
        """Return the names of the dynamic sizes, in order."""
        x, y = self._dims()
        return [name for name in dict.fromkeys([*x, *(y if "residual" in self.case.extra else ())]) if name]

    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return the inputs of the node; the number of a dynamic size k is -1 - k."""
        case, names, specs = self.case, self.names(), []
        for operand in ("x", "w", *case.extra):
            if operand == "gate":
                images = -1 - names.index("n") if "n" in names else case.n
                specs.append(TensorSpec((images, *[1] * case.axes, case.c), case.dtype, case.aligned))
                continue
            dims = {"x": self._dims()[0], "residual": self._dims()[1]}.get(operand)
            if dims is None:
                ones = (1,) * (case.axes if operand not in ("w", "bias") else 0)
                shape: tuple[int, ...] = case.w_shape if operand == "w" else (case.m, *ones)
            else:
                given = (case.n, *(case.sizes if operand == "x" else case.y_sizes))
                found = [-1 - names.index(name) if name else size for name, size in zip(dims, given, strict=True)]
                channels = case.c if operand == "x" else case.m
                last = operand == "residual" or not case.x_nchw
                shape = (*found, channels) if last else (found[0], channels, *found[1:])
            specs.append(TensorSpec(shape, case.dtype, case.aligned, case.constant and dims is None))
        return tuple(specs)

    def sized(self, seed: int, images: int = MAX_IMAGES, sides: Mapping[int, int] = MAX_SIDE) -> ConvCase:
        """Return the convolution at random sizes, whose logarithms are spread evenly; y has a pixel."""
        chance, case = random.Random(seed), self.case
        _, pads, dilations = case._geometry()
        sizes = []
        for i, (axis, size) in enumerate(zip("dhw"[-case.axes :], case.sizes, strict=True)):
            least = max(1, (case.kernel[i] - 1) * dilations[i] + 1 - pads[i] - pads[i + case.axes])
            most = max(least, sides[case.axes])
            sizes.append(int(least * (most / least) ** chance.random()) if axis in self.dynamic else size)
        n = int(images ** chance.random()) if "n" in self.dynamic else case.n
        return replace(case, n=n, sizes=tuple(sizes))

    def sizes_at(self, case: ConvCase) -> list[int]:
        """Return the dynamic sizes of the convolution at the sizes of a case."""
        values = {"n": case.n}
        for axis, size, y_size in zip("dhw"[-case.axes :], case.sizes, case.y_sizes, strict=True):
            values |= {axis: size, f"y_{axis}": y_size}
        return [values[name] for name in self.names()]

    def random_sizes(self, seed: int) -> list[int]:
        """Return random dynamic sizes."""
        return self.sizes_at(self.sized(seed))


USUAL: Final = ("n", "nhw", "hw", "nw")  # classifiers; detectors, of several images or one; readers of lines of text


def _of(case: ConvCase, *dynamic: str) -> Iterator[DynamicConv]:
    yield from (DynamicConv(case, each) for each in dynamic)


def convolutions() -> Iterator[DynamicConv]:
    """Yield convolutions that every kind of kernel runs."""
    yield from _of(ConvCase(1, 64, 64, (56, 56), (3, 3), (), SAME), *USUAL)
    yield from _of(ConvCase(1, 512, 512, (7, 7), (3, 3), (), SAME, extra=BOTH), *USUAL)
    yield from _of(ConvCase(1, 40, 72, (15, 17), (3, 5), (2, 1), (0, 1, 2, 3), dtype="bfloat16"), "n", "nhw")
    yield from _of(ConvCase(1, 31, 33, (15, 17), (3, 3), (2, 2), SAME, dtype="float32"), "n", "nhw")
    yield from _of(ConvCase(1, 64, 64, (14, 14), (3, 3), (), SAME, dtype="float32", tf32=True), "n", "hw")
    yield from _of(ConvCase(1, 512, 512, (1599,), (3,), (2,)), "n", "w", "nw")
    yield from _of(ConvCase(1, 64, 64, (16, 32, 32), (3, 3, 3), (), (1,) * 6), "n", "ndhw")
    yield from _of(image(1, 3, 64, (224, 224), (7, 7), (2, 2), (3, 3, 3, 3)), *USUAL)
    yield from _of(image(1, 3, 24, (32, 96), (3, 3), (2, 2), (1, 0, 1, 2), dtype="bfloat16"), "n", "nw")
    yield from _of(image(1, 1, 512, (80000,), (10,), (5,), extra=()), "w", "nw")
    yield from _of(depthwise(1, 240, (28, 28), (5, 5), (1, 1), (2, 2, 2, 2)), *USUAL)
    yield from _of(depthwise(1, 96, (112, 112), (3, 3), (2, 2), SAME), *USUAL)
    yield from _of(depthwise(1, 100, (28, 28), (3, 3), (1, 1), SAME, dtype="float32"), "n", "nhw")
    yield from _of(depthwise(1, 20, (28, 28), (3, 3), (2, 2), SAME, aligned=False), "n", "nhw")
    yield from _of(depthwise(1, 512, (500,), (31,), (1,), (15, 15)), "n", "nw")
    yield from _of(depthwise(1, 16, (8, 8, 8), (3, 3, 3), (), (1,) * 6), "n", "ndhw")
    yield from _of(ConvCase(1, 256, 256, (28, 28), (3, 3), (1, 1), SAME, group=32), *USUAL)
    yield from _of(ConvCase(1, 48, 48, (28, 28), (3, 3), (2, 2), SAME, group=6, extra=BOTH), "n", "nhw")


def gated() -> Iterator[DynamicConv]:
    """Yield convolutions of images with a gate."""
    yield from _of(ConvCase(1, 144, 40, (28, 28), (1, 1), extra=(*BOTH, "gate")), *USUAL)
    yield from _of(ConvCase(1, 672, 112, (14, 14), (1, 1), extra=("bias", "gate")), "n", "nhw")
    yield from _of(ConvCase(1, 30, 20, (7, 7, 7), (1, 1, 1), dtype="float32", extra=("gate",)), "n", "ndhw")


def transposed() -> Iterator[DynamicConv]:
    """Yield transposed convolutions that every kind of kernel runs."""
    yield from _of(shuffled(1, 64, 64, (32, 32), (2, 2)), *USUAL)
    yield from _of(ConvTransposeCase(1, 64, 64, (16, 16), (4, 4), (2, 2), SAME, extra=BOTH), *USUAL)
    yield from _of(ConvTransposeCase(1, 30, 36, (16, 16), (3, 3), (2, 2), SAME, output_padding=(1, 1)), "n", "nhw")
    yield from _of(ConvTransposeCase(1, 64, 40, (160,), (8,), (4,), (2, 2), dtype="float32"), "n", "nw")
    yield from _of(transposed_depthwise(1, 64, (16, 16), (4, 4), (2, 2), SAME), "n", "nhw")


def own_tilings(conv: DynamicConv, device: Device) -> bool:
    """Return whether a template may have other configs than the host looks at for any sizes.

    Tiles of grouped and depthwise convolutions have no more columns than y, where these are known; boxes of
    conv_transpose_hopper.cu are of one row, where these are not; and strips of sliding threads have few heights.
    """
    case = conv.case
    if isinstance(case, ConvTransposeCase):
        return device.arch == HOPPER_ARCH and "w" in conv.dynamic
    slides = case.group == case.c and (1, *case._geometry()[0])[-2] == 1
    return case.group > 1 and (conv.dynamic != "n" or slides)
