"""The formulas of norms, softmax and rotary embedding in NumPy, for the tests of kernels on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np


def layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray | float, epsilon: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def rms_norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def softmax(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)


# Values of alpha and beta that tests give to those activations that have parameters.
PARAMETERS = {
    "clip": (-0.5, 0.75), "leaky_relu": (0.1, 0.0), "elu": (1.3, 0.0), "hard_sigmoid": (0.2, 0.5),
    "scaled_hard_swish": (0.25, 0.4),
}  # fmt: skip


def with_parameters(activation: str) -> dict[str, Any]:
    """Return the attributes of a node with that activation."""
    alpha, beta = PARAMETERS.get(activation, (0.0, 0.0))
    given = {"alpha": alpha, "beta": beta} if activation in PARAMETERS else {}
    return {"activation": activation, **given}


def wide(*arrays: np.ndarray) -> list[np.ndarray]:
    """Return the arrays in float64."""
    return [array.astype(np.float64) for array in arrays]


def rotate_half(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def rotate_pairs(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Return x rotated by tables of its own width, where neighbours are pairs."""
    turned = np.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)
    return x * cos + turned * sin


def rotate_complex(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, form: str) -> np.ndarray:
    """Return x whose pairs are multiplied by cos + i sin, in one of the forms that begin with complex_."""
    half = x.shape[-1] // 2
    ends = (x[..., :half], x[..., half:]) if form == "complex_halves" else (x[..., ::2], x[..., 1::2])
    turned = ends[0] * cos - ends[1] * sin, ends[1] * cos + ends[0] * sin
    return np.stack(turned, axis=-1).reshape(x.shape) if form.endswith("pairs") else np.concatenate(turned, -1)


def group_norm_nhwc(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, groups: int, epsilon: float) -> np.ndarray:
    rows = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    centred = rows - rows.mean((1, 3), keepdims=True)
    normal = centred / np.sqrt((centred**2).mean((1, 3), keepdims=True) + epsilon)
    return normal.reshape(x.shape) * scale + bias
