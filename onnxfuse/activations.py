"""The activation functions: their names, parameters and formulas, for patterns, kernels and tests alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Activation:
    """An elementwise function of x and at most two numbers, alpha and beta.

    `name` is its label in the attribute `activation` of fused nodes, and the name of its function in activations.cuh.
    """

    name: str
    formula: Callable[[Array, float, float], Array]  # NumPy reference with the arguments x, alpha and beta
    source: str  # where the formula is defined: an ONNX operator, or a paper
    alpha: float = 0.0  # defaults of alpha and beta in ONNX, if the operator has these parameters
    beta: float = 0.0
    parameters: tuple[str, ...] = ()  # the parameters that the function has: "alpha", "beta", both or none
    gated: bool = False  # whether gated units use it, as activation(gate) * up


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


_erfc: Final = np.vectorize(math.erfc, otypes=[float])

_TABLE: Final = (
    Activation("none", lambda x, alpha, beta: x, "the identity: a fused node without an activation"),
    Activation("relu", lambda x, alpha, beta: np.maximum(x, 0), "ONNX Relu", gated=True),
    Activation(
        "gelu",
        lambda x, alpha, beta: 0.5 * x * _erfc(-x / math.sqrt(2)),
        "ONNX Gelu; Hendrycks and Gimpel 2016, arXiv:1606.08415",
        gated=True,
    ),
    Activation(
        "gelu_tanh",
        lambda x, alpha, beta: x * _sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
        "ONNX Gelu with approximate=tanh; (1 + tanh z) / 2 = sigmoid(2 z)",
        gated=True,
    ),
    Activation("silu", lambda x, alpha, beta: x * _sigmoid(x), "ONNX Swish with alpha=1", gated=True),
    Activation("quick_gelu", lambda x, alpha, beta: x * _sigmoid(1.702 * x), "arXiv:1606.08415, section 2", gated=True),
    Activation(
        "hard_swish",
        lambda x, alpha, beta: x * np.clip(x / 6 + 0.5, 0, 1),
        "ONNX HardSwish; Howard et al. 2019, arXiv:1905.02244",
    ),
    Activation(
        "scaled_hard_swish",
        lambda x, alpha, beta: x * np.clip(alpha * x + beta, 0, 1),
        "x * ONNX HardSigmoid(x)",
        0.2,
        0.5,
        ("alpha", "beta"),
    ),
    Activation("mish", lambda x, alpha, beta: x * np.tanh(np.logaddexp(0, x)), "ONNX Mish"),
    Activation("sigmoid", lambda x, alpha, beta: _sigmoid(x), "ONNX Sigmoid", gated=True),
    Activation("tanh", lambda x, alpha, beta: np.tanh(x), "ONNX Tanh"),
    Activation("softplus", lambda x, alpha, beta: np.logaddexp(0, x), "ONNX Softplus"),
    Activation(
        "clip",
        lambda x, alpha, beta: np.clip(x, alpha, beta),
        "ONNX Clip, where alpha is min and beta is max",
        -math.inf,
        math.inf,
        ("alpha", "beta"),
    ),
    Activation(
        "leaky_relu",
        lambda x, alpha, beta: np.where(x < 0, alpha * x, x),
        "ONNX LeakyRelu",
        0.01,
        parameters=("alpha",),
    ),
    Activation(
        "elu",
        lambda x, alpha, beta: np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x),
        "ONNX Elu",
        1.0,
        parameters=("alpha",),
    ),
    Activation(
        "hard_sigmoid",
        lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1),
        "ONNX HardSigmoid",
        0.2,
        0.5,
        ("alpha", "beta"),
    ),
)

ACTIVATIONS: Final[Mapping[str, Activation]] = {activation.name: activation for activation in _TABLE}

# ONNX PRelu: leaky_relu with one alpha per channel.  PRelu is not in ACTIVATIONS, because its alpha is a tensor: an
# operand of the fused node.  Fusions of convolutions and matrix products support it in addition to ACTIVATIONS.
PRELU: Final = "prelu"


@dataclass(frozen=True)
class Activated:
    """An activation with the numbers that it has in a node."""

    name: str
    alpha: float
    beta: float


def activations_of_recurrence(
    names: Sequence[str], alpha: Sequence[float], beta: Sequence[float]
) -> tuple[Activated, ...] | None:
    """Return the activations that the attributes of an LSTM, GRU or RNN name; None if one is not in ACTIVATIONS.

    As in onnxruntime, the lists alpha and beta have numbers for the activations with these parameters only, in order;
    where a list ends early, the remaining activations have their defaults.
    """
    known = {name.replace("_", ""): activation for name, activation in ACTIVATIONS.items() if name != "none"}
    alphas, betas, found = iter(alpha), iter(beta), []
    for name in names:
        activation = known.get(name.lower())
        if activation is None:
            return None
        has_alpha, has_beta = ("alpha" in activation.parameters), ("beta" in activation.parameters)
        numbers = (
            next(alphas, activation.alpha) if has_alpha else activation.alpha,
            next(betas, activation.beta) if has_beta else activation.beta,
        )
        found.append(Activated(activation.name, *numbers))
    return tuple(found)
