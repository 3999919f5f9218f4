"""The sums of a filter's taps inside an image, against every pixel of small images."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest

from onnxfuse.algebra.filter_edges import most_taps_beyond, row_count, sums_inside


@pytest.mark.parametrize("seed", range(30))
def test_each_pixel_has_a_row_with_the_sum_of_its_taps_inside_the_image(seed: int) -> None:
    random = Random(seed)
    axes = random.randint(1, 3)
    kernel, dilations, strides = (
        tuple(random.randint(1, most) for _ in range(axes)) for most in ((4, 3, 3), (3, 2, 2), (2, 2, 2))[axes - 1]
    )
    begin, end = (tuple(random.randint(0, 4) for _ in range(axes)) for _ in range(2))
    sizes = tuple((taps - 1) * step + random.randint(1, 4) for taps, step in zip(kernel, dilations, strict=True))
    weights = np.random.default_rng(seed).integers(-128, 128, (5, *kernel, 3)).astype(np.int8)
    beyond = most_taps_beyond(kernel, dilations, begin, end)
    sums = sums_inside(weights, beyond)
    assert sums.dtype == np.int32 and sums.shape == (row_count(beyond), 5)

    results = [
        (size + sum(pads) - (taps - 1) * step - 1) // stride + 1
        for size, taps, step, stride, pads in zip(
            sizes, kernel, dilations, strides, zip(begin, end, strict=True), strict=True
        )
    ]
    for pixel in itertools.product(*map(range, results)):
        row, inside = 0, []
        for axis, at in enumerate(pixel):
            places = [at * strides[axis] - begin[axis] + tap * dilations[axis] for tap in range(kernel[axis])]
            before, after = sum(p < 0 for p in places), sum(p >= sizes[axis] for p in places)
            assert before <= beyond[axis][0] and after <= beyond[axis][1]
            row = row * (beyond[axis][0] + 1) * (beyond[axis][1] + 1) + before * (beyond[axis][1] + 1) + after
            inside.append([i for i, place in enumerate(places) if 0 <= place < sizes[axis]])
        expected = weights[(slice(None), *np.ix_(*inside))].astype(np.int64).sum(axis=tuple(range(1, axes + 2)))
        assert (sums[row] == expected).all(), pixel


def test_a_matrix_has_one_row() -> None:
    weights = np.arange(-6, 6, dtype=np.int8).reshape(3, 4)
    assert sums_inside(weights, ()).tolist() == [[-18, -2, 14]]


def test_no_filters_have_no_sums() -> None:
    assert sums_inside(np.zeros((0, 3, 3, 16), np.int8), ((1, 1), (1, 1))).shape == (16, 0)
