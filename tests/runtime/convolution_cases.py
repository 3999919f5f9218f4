"""Convolutions as steps of plans: how tests write them, the shapes of their operands, and their results in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.runtime.plan import Convolution, Pointer

Array = np.ndarray[Any, Any]


def convolution(
    n: int, c: int, m: int, sizes: tuple[int, ...], kernel: tuple[int, ...], *, group: int = 1, **more: Any
) -> Convolution:
    """Return a convolution with asymmetric padding, strides and dilations; `more` are fields of Convolution."""
    axes = len(sizes)
    by_axis = {
        "strides": (2, 1, 2)[:axes],
        "dilations": (1, 2, 1)[:axes],
        "pads_begin": (1, 0, 1)[:axes],
        "pads_end": (0, 2, 1)[:axes],
    } | {name: more.pop(name) for name in ("strides", "dilations", "pads_begin", "pads_end") if name in more}
    one = tuple(
        (size + begin + end - (tap - 1) * dilation - 1) // stride + 1
        for size, tap, stride, dilation, begin, end in zip(sizes, kernel, *by_axis.values(), strict=True)
    )
    x_sizes, y_sizes = (one, sizes) if more.get("transposed") else (sizes, one)
    pointers = {"x": Pointer("input", 0), "w": Pointer("input", 1), "y": Pointer("output", 0)}
    fields: dict[str, Any] = {"dtype": "float32", "aligned": False, **pointers, **by_axis, **more}
    return Convolution(n=n, c=c, m=m, sizes=x_sizes, y_sizes=y_sizes, kernel=kernel, group=group, **fields)


def shapes(step: Convolution) -> dict[str, tuple[int, ...]]:
    """Return the shapes of x, w, bias, residual and y in memory."""
    filters, channels = (step.c, step.m) if step.transposed else (step.m, step.c)

    def image(channels: int, sizes: tuple[int, ...], last: bool) -> tuple[int, ...]:
        return (*sizes, channels) if last else (channels, *sizes)

    return {
        "x": (step.n, *image(step.c, step.sizes, step.channels_last)),
        "w": (filters, *image(channels // step.group, step.kernel, step.w_channels_last)),
        "bias": (step.m,),
        "residual": (step.n, *image(step.m, step.y_sizes, step.channels_last)),
        "y": (step.n, *image(step.m, step.y_sizes, step.channels_last)),
    }


def sums(step: Convolution, x: Array, w: Array) -> Array:
    """Return conv(x, w) in float64, in the layout of the step."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    x = np.moveaxis(x, -1, 1) if step.channels_last else x
    w = np.moveaxis(w, -1, 1) if step.w_channels_last else w
    image = step.y_sizes if step.transposed else step.sizes  # the one that is padded; filters lie on it
    grid = step.sizes if step.transposed else step.y_sizes
    padded = np.zeros(
        (
            step.n,
            step.m if step.transposed else step.c,
            *map(sum, zip(image, step.pads_begin, step.pads_end, strict=True)),
        )
    )
    inner = (..., *(slice(begin, begin + size) for begin, size in zip(step.pads_begin, image, strict=True)))
    y = np.zeros((step.n, step.m, *step.y_sizes))
    if not step.transposed:
        padded[inner] = x
    filters, channels = w.shape[0] // step.group, w.shape[1]
    for tap in itertools.product(*map(range, step.kernel)):
        window = tuple(
            slice(t * dilation, t * dilation + (size - 1) * stride + 1, stride)
            for t, dilation, size, stride in zip(tap, step.dilations, grid, step.strides, strict=True)
        )
        for g in range(step.group):
            of_filters, of_channels = slice(g * filters, (g + 1) * filters), slice(g * channels, (g + 1) * channels)
            weights = w[(of_filters, slice(None), *tap)]
            if step.transposed:
                padded[(slice(None), of_channels, *window)] += np.einsum("nf...,fc->nc...", x[:, of_filters], weights)
            else:
                y[:, of_filters] += np.einsum("nc...,fc->nf...", padded[(slice(None), of_channels, *window)], weights)
    y = padded[inner] if step.transposed else y
    return np.moveaxis(y, 1, -1) if step.channels_last else y


def reference(step: Convolution, given: Mapping[str, Array]) -> Array:
    """Return y in float64, in the layout of the step."""
    y = sums(step, given["x"], given["w"])
    channel = (-1,) if step.channels_last else (-1, *(1,) * len(step.y_sizes))
    bias = given["bias"].astype(np.float64).reshape(channel) if step.bias else 0.0
    residual = given["residual"].astype(np.float64) if step.residual else 0.0
    formula = ACTIVATIONS[step.activation].formula
    if step.residual_first:
        return np.asarray(formula(y + bias + residual, step.alpha, step.beta))
    return np.asarray(formula(y + bias, step.alpha, step.beta) + residual)
