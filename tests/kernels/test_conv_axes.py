"""Convolutions of three spatial axes that run as those of two, and which kernels take one and three axes; no GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from architectures import H200
from conv_cases import ConvCase, depthwise, image

from onnxfuse.kernels.conv import host
from onnxfuse.kernels.conv.problem import Conv, of_fewer_axes

CUBE = (1,) * 6


def sized(case: ConvCase, conv: Conv) -> ConvCase:
    """Return the case of a convolution with the same operands in memory."""
    fields = {name: getattr(conv, name) for name in ("n", "sizes", "kernel", "strides", "dilations")}
    return replace(case, **fields, pads=(*conv.pads_begin, *conv.pads_end))


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        (ConvCase(2, 8, 8, (3, 6, 5), (1, 3, 3), (1, 2, 1), (0, 1, 1, 0, 1, 1), extra=()), (6, 6, 5)),
        (ConvCase(2, 8, 8, (7, 3, 5), (3, 1, 1), (2, 1, 1), (1, 0, 0, 1, 0, 0), extra=()), (2, 7, 15)),
        (depthwise(2, 8, (7, 3, 5), (5, 1, 1), (1, 1, 1), (2, 0, 0, 2, 0, 0), (1, 1, 1)), (2, 7, 15)),
        (image(2, 3, 8, (7, 3, 5), (3, 1, 1), (1, 1, 1), (0, 0, 0, 1, 0, 0)), (2, 7, 15)),
        (image(2, 1, 8, (3, 6, 5), (1, 3, 3)), (6, 6, 5)),
        (image(2, 3, 8, (3, 6, 5), (1, 3, 3)), None),  # depths are not images where channels lie between
        (ConvCase(2, 8, 8, (4, 6, 5), (1, 3, 3), (2, 1, 1)), None),
        (ConvCase(2, 8, 8, (4, 6, 5), (1, 3, 3), (), (1, 0, 0, 0, 0, 0)), None),
        (ConvCase(2, 8, 8, (4, 6, 5), (3, 1, 1), (1, 1, 2)), None),
        (ConvCase(2, 8, 8, (4, 6, 5), (3, 3, 3), (), CUBE), None),
        (ConvCase(2, 8, 8, (1, 6), (1, 3)), None),
    ],
    ids=str,
)
def test_axes_of_one_tap(case: ConvCase, axes: tuple[int, ...] | None) -> None:
    conv = case.problem()
    found = of_fewer_axes(conv)
    if axes is None:
        assert found is conv
        return
    assert (found.n, *found.sizes) == axes and len(found.y_sizes) == len(found.kernel) == 2
    fewer, arrays = sized(case, found), case.arrays()
    assert fewer.y_sizes == found.y_sizes
    shapes = fewer.arrays()
    same = {name: value.reshape(shapes[name].shape) for name, value in arrays.items()}
    expected, _ = case.expect(arrays)
    np.testing.assert_allclose(fewer.expect(same)[0].reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (image(1, 1, 512, (80000,), (10,), (5,)), "stem"),  # the encoder of wav2vec 2.0
        (ConvCase(1, 512, 512, (15999,), (3,), (2,)), "conv_hopper"),
        (ConvCase(1, 768, 768, (499,), (128,), (), (64, 64), group=16), "conv_mma"),
        (depthwise(1, 256, (499,), (31,), (), (15, 15)), "depthwise_mma"),  # a Conformer
        (ConvCase(1, 64, 64, (25600,), (11,), (), (25, 25), (5,)), "conv_hopper"),  # a vocoder
        (ConvCase(1, 64, 128, (16000,), (3,), (), (512, 512), (512,)), "conv_hopper"),
        (ConvCase(4, 256, 256, (1000,), (9,), (), (4, 4), group=32), "grouped"),
        (ConvCase(1, 256, 512, (1000,), (1,)), "gemm_hopper"),
        (ConvCase(1, 64, 64, (16, 32, 32), (3, 3, 3), (), CUBE), "conv_hopper"),
        (ConvCase(1, 128, 256, (8, 28, 28), (1, 1, 1)), "gemm_hopper"),
        (image(1, 3, 64, (16, 112, 112), (3, 7, 7), (1, 2, 2), (1, 3, 3, 1, 3, 3)), "conv_mma"),
        (depthwise(1, 96, (8, 28, 28), (3, 3, 3), (), CUBE), "depthwise"),
        (ConvCase(1, 128, 128, (8, 28, 28), (3, 3, 3), (), CUBE, group=4), "conv_mma"),
    ],
    ids=str,
)
def test_kinds_of_one_and_three_axes(case: ConvCase, kind: str) -> None:
    names = [way.name for way in host.implementations(case.problem(), H200) if not way.name.startswith("cudnn")]
    assert names and names[0].startswith(kind), names
