"""The formulas of kernels in float64, for the tests of kernels on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
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


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


erfc = np.vectorize(math.erfc, otypes=[float])

ACTIVATIONS: dict[str, Callable[[np.ndarray, float, float], np.ndarray]] = {
    "none": lambda x, a, b: x,
    "relu": lambda x, a, b: np.maximum(x, 0),
    "gelu": lambda x, a, b: 0.5 * x * erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x, a, b: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "silu": lambda x, a, b: x * sigmoid(x),
    "quick_gelu": lambda x, a, b: x * sigmoid(1.702 * x),
    "hard_swish": lambda x, a, b: x * np.clip(x / 6 + 0.5, 0, 1),
    "mish": lambda x, a, b: x * np.tanh(np.logaddexp(0, x)),
    "sigmoid": lambda x, a, b: sigmoid(x),
    "tanh": lambda x, a, b: np.tanh(x),
    "softplus": lambda x, a, b: np.logaddexp(0, x),
    "clip": lambda x, a, b: np.clip(x, a, b),
    "leaky_relu": lambda x, a, b: np.where(x < 0, a * x, x),
    "elu": lambda x, a, b: np.where(x < 0, a * np.expm1(np.minimum(x, 0)), x),
    "hard_sigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
}
PARAMETERS = {"clip": (-0.5, 0.75), "leaky_relu": (0.1, 0.0), "elu": (1.3, 0.0), "hard_sigmoid": (0.2, 0.5)}


def with_parameters(activation: str) -> dict[str, Any]:
    alpha, beta = PARAMETERS.get(activation, (0.0, 0.0))
    given = {"alpha": alpha, "beta": beta} if activation in PARAMETERS else {}
    return {"activation": activation, **given}


def wide(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float64) for array in arrays]


def rotate_half(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin
