"""The operands of the Hopper convolutions on a CPU: the loads of conv_operands.cuh, carried out as TMA walks.

Every stage of every tile is gathered as the tensor maps and the recorded loads say, and the products of all stages are
compared with the convolution.  The main loop that runs on the GPU is that of the products, which has a test of its own.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from conv_cases import ConvCase

from onnxfuse.kernels.conv import hopper
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Launch, TensorMap
from onnxfuse.testing.emulated_build import load
from onnxfuse.testing.emulated_launches import value_of

RECORD = 10  # numbers of a load, as conv_operands_emulated.h has them

# One to three axes; strides, dilations and pads that differ by axis and by side; tiles that cross rows and images;
# channels that fill blocks of 64, 32 and 16 and that do not; taps and corners as far away as a walk may have them.
CASES = [
    ConvCase(3, 72, 40, (61,), (5,), (2,), (2, 1), extra=(), activation="none"),
    ConvCase(1, 16, 32, (700,), (3,), (), (300, 300), (300,), extra=(), activation="none"),
    ConvCase(2, 64, 32, (10, 13), (3, 5), (2, 1), (0, 1, 2, 3), (1, 2), extra=(), activation="none"),
    ConvCase(3, 24, 64, (7, 7), (3, 3), (), (1, 1, 1, 1), extra=(), activation="none"),
    ConvCase(2, 40, 32, (5, 7, 6), (3, 2, 3), (1, 2, 1), (1, 0, 1, 1, 1, 0), (1, 1, 2), extra=(), activation="none"),
    ConvCase(2, 64, 64, (4, 5, 5), (3, 3, 3), (), (1,) * 6, extra=(), activation="none"),
    ConvCase(1, 16, 32, (18, 3, 4), (9, 1, 2), (2, 1, 1), (15, 0, 0, 15, 0, 1), (2, 1, 1), extra=(), activation="none"),
]


def library(step: Launch, folder: Path) -> ctypes.CDLL:
    parts = re.split(r'(?m)^#line \d+ "([^"]+)"\n', kernel_text(step.kernel))
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    text = re.sub(r"(?m)^#(include|pragma).*$", "", texts["conv_operands.cuh"])
    names = r"TILE_M|TILE_N|K_BLOCK|CHANNELS|DIMS|(KERNEL|DILATION)_[DHW]"
    kept = {name: value for name, value in step.kernel.defines.items() if re.fullmatch(names, name)}
    text = (
        f'#include "conv_operands_emulated.h"\n{text}\n'
        'extern "C" int run(PixelSizes sizes, int row, int column, const int** found) {\n'
        "    const TensorMap x{true}, w{false};\n    records.clear();\n"
        "    PixelOperands operands{x, w, sizes};\n    operands.begin({row, column});\n"
        "    for (int step = 0; step * BLOCKS < ALL_BLOCKS; ++step) {\n"
        "        operands.load_x(step << 20, 0, step);\n        operands.load_weights(step << 20, 0, step);\n    }\n"
        "    *found = records.data();\n    return int(records.size());\n}\n"
    )
    return load(text, kept, [], folder / "operands.cc")


def walked(x: np.ndarray, tensor_map: TensorMap, at: list[int], offsets: list[int]) -> np.ndarray:
    """Return the pixels of a load in im2col mode: rows of channels, zero where they lie outside x (n, ..., c)."""
    walk, axes = tensor_map.im2col, len(tensor_map.sizes) - 2
    assert walk is not None
    channels, rows = tensor_map.box
    last = [size - 1 + upper for size, upper in zip(tensor_map.sizes[1:-1], walk.upper, strict=True)]
    first, place, image = at[0], at[1 : 1 + axes], at[1 + axes]
    assert all(low <= each <= high for low, each, high in zip(walk.lower, place, last, strict=True)), "outside the walk"
    found = np.zeros((rows, channels))
    for row in range(rows):
        pixel = [each + offset for each, offset in zip(place, offsets, strict=False)]
        inside = all(0 <= each < size for each, size in zip(pixel, tensor_map.sizes[1:-1], strict=True))
        if inside and image < tensor_map.sizes[-1]:
            values = x[(image, *reversed(pixel))][first : first + channels]
            found[row, : len(values)] = values
        for axis in range(axes):
            place[axis] += walk.steps[axis]
            if place[axis] <= last[axis]:
                break
            place[axis] = walk.lower[axis]
        else:
            image += 1
    return found


def boxed(w: np.ndarray, tensor_map: TensorMap, at: list[int]) -> np.ndarray:
    """Return the columns of a load of w (filters, taps, channels): rows of channels, zero where there are none."""
    channels, _, rows = tensor_map.box
    found = np.zeros((rows, channels))
    values = w[at[2] : at[2] + rows, at[1], at[0] : at[0] + channels]
    found[: values.shape[0], : values.shape[1]] = values
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_hold_the_operands_of_the_convolution(case: ConvCase, tmp_path: Path) -> None:
    conv, config = case.problem(), HopperConfig(64, 32)
    assert hopper.is_supported(conv, H200)
    (step,) = hopper.implementation(conv, config, H200).steps
    assert isinstance(step, Launch)
    x_map, w_map = (argument for argument in step.arguments[:2] if isinstance(argument, TensorMap))
    arrays = case.arrays()
    x, w = arrays["x"].astype(np.float64), arrays["w"].reshape(conv.m, conv.taps, -1).astype(np.float64)
    expected = case.expect(arrays)[0].reshape(conv.pixels, conv.m)
    sizes, loaded = value_of(step.arguments[-1], lambda pointer: 0), library(step, tmp_path)
    for row, column in itertools.product(range(0, conv.pixels, 64), range(0, conv.m, 32)):
        found = ctypes.POINTER(ctypes.c_int)()
        count = loaded.run(sizes, row, column, ctypes.byref(found))
        stages: dict[int, dict[int, np.ndarray]] = {0: {}, 1: {}}
        for start in range(0, count, RECORD):
            kind, to, *at = found[start : start + RECORD]
            assert kind in stages, "a load of the other operand's map"
            stages[kind][to] = walked(x, x_map, at[:5], at[5:]) if kind else boxed(w, w_map, at)
        block = 2 * hopper.k_block(conv)  # the bytes of a row of a block
        sums = np.zeros((64, 32))
        for to, values in stages[1].items():
            offset = to % (1 << 20) // (64 * block)
            sums += values @ stages[0][(to >> 20 << 20) + 64 * 128 + offset * 32 * block].T
        valid = expected[row : row + 64, column : column + 32]
        np.testing.assert_allclose(sums[: valid.shape[0], : valid.shape[1]], valid, rtol=1e-9, atol=1e-9)


def test_convolutions_of_different_strides_and_pads_share_a_kernel() -> None:
    cases = [
        ConvCase(1, 64, 64, (14, 14), (3, 3), (stride, stride), (pad,) * 4, extra=())
        for stride, pad in itertools.product((1, 2), (0, 1))
    ]
    for config in (HopperConfig(128, 64, pingpong=True), HopperConfig(128, 64, split_k=2)):
        found = [hopper.implementation(each.problem(), config, H200).steps[0] for each in cases]
        assert len({step.kernel.key for step in found if isinstance(step, Launch)}) == 1
