"""Gates of channels for the tests of kernels: convolutions that read gated images."""

from __future__ import annotations

from collections.abc import Iterator

from conv_cases import ConvCase

BOTH = ("bias", "residual", "gate")
# Images of fewer and of more pixels than a tile has rows, of one pixel, and without a common divisor with it.
IMAGES = ((3, (7, 5)), (300, (1, 1)), (2, (13, 14)), (1, (3, 3)), (5, (29,)), (2, (3, 4, 5)))


def gated_convs() -> Iterator[ConvCase]:
    """Yield convolutions of gated images: sizes of images, whole and odd numbers of channels, dtypes, alignment."""
    for n, sizes in IMAGES:
        ones = (1,) * len(sizes)
        yield ConvCase(n, 64, 24, sizes, ones, extra=BOTH)
        yield ConvCase(n, 96, 40, sizes, ones, extra=("gate",), activation="none")
    for c, m in ((144, 40), (45, 24), (46, 70), (44, 33), (8, 16), (672, 112)):
        for dtype in ("float16", "bfloat16", "float32"):
            yield ConvCase(2, c, m, (9, 7), (1, 1), dtype=dtype, tf32=dtype == "float32", extra=BOTH)
    yield ConvCase(2, 80, 96, (9, 9), (1, 1), extra=BOTH, aligned=False)
    yield ConvCase(2, 33, 24, (9, 9), (1, 1), extra=BOTH, aligned=False, dtype="float32", tf32=True)
    yield ConvCase(2, 64, 24, (9, 9), (1, 1), extra=BOTH, residual_first=False, activation="silu")
