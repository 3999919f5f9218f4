"""The spellings of the activations: how exporters write each function of onnxfuse.activations."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.dsl import Term, choose, contrib, either, op, stored, when


def gelu(x: Term) -> Term:
    """Return x * Phi(x), with erf (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return stored(either(op.Gelu(x), x * 0.5 * (op.Erf(x / 1.4142135623730951) + 1)), ort=contrib.Gelu(x))


def gelu_tanh(x: Term) -> Term:
    """Return the tanh approximation of gelu(x)."""
    inner = either(0.7978845608028654 * (x + 0.044715 * x**3), 0.7978845608028654 * x * (1 + 0.044715 * x * x))
    spellings = either(op.Gelu(x, approximate="tanh"), x * 0.5 * (1 + op.Tanh(inner)))
    fast = when(contrib.FastGelu(x), "FastGelu takes no tensor without axes", lambda rank: rank > 0)
    return stored(spellings, ort=fast)


def silu(x: Term) -> Term:
    """Return x * sigmoid(x)."""
    return stored(either(op.Swish(x), x * op.Sigmoid(x)), ort=contrib.QuickGelu(x, alpha=1.0))


def quick_gelu(x: Term) -> Term:
    """Return x * sigmoid(1.702 x)."""
    return stored(x * op.Sigmoid(x * 1.702), ort=contrib.QuickGelu(x, alpha=1.702), standard=op.Swish(x, alpha=1.702))


def hard_swish(x: Term) -> Term:
    """Return x * clip(x / 6 + 1/2, 0, 1) (Howard et al. 2019, arXiv:1905.02244)."""
    return either(
        op.HardSwish(x),
        x * op.HardSigmoid(x, alpha=1 / 6, beta=0.5),
        x * op.Clip(x + 3, min=0.0, max=6.0) / 6,
    )


def scaled_hard_swish(x: Term, alpha: Term | None, beta: Term | None) -> Term:
    """Return x * clip(alpha x + beta, 0, 1): a hard swish with other constants."""
    return x * op.HardSigmoid(x, alpha=alpha, beta=beta)


def mish(x: Term) -> Term:
    """Return x * tanh(softplus(x))."""
    return either(op.Mish(x), x * op.Tanh(op.Softplus(x)))


SPELLINGS: Final[Mapping[str, Callable[[Term, Term | None, Term | None], Term]]] = {  # called with x, alpha and beta
    "relu": lambda x, alpha, beta: op.Relu(x),
    "gelu": lambda x, alpha, beta: gelu(x),
    "gelu_tanh": lambda x, alpha, beta: gelu_tanh(x),
    "silu": lambda x, alpha, beta: silu(x),
    "quick_gelu": lambda x, alpha, beta: quick_gelu(x),
    "hard_swish": lambda x, alpha, beta: hard_swish(x),
    "scaled_hard_swish": scaled_hard_swish,
    "mish": lambda x, alpha, beta: mish(x),
    "sigmoid": lambda x, alpha, beta: op.Sigmoid(x),
    "tanh": lambda x, alpha, beta: op.Tanh(x),
    "softplus": lambda x, alpha, beta: op.Softplus(x),
    "clip": lambda x, alpha, beta: op.Clip(x, min=alpha, max=beta),
    "leaky_relu": lambda x, alpha, beta: op.LeakyRelu(x, alpha=alpha),
    "elu": lambda x, alpha, beta: op.Elu(x, alpha=alpha),
    "hard_sigmoid": lambda x, alpha, beta: op.HardSigmoid(x, alpha=alpha, beta=beta),
}


def spelled(names: Iterable[str], x: Term, alpha: Term | None = None, beta: Term | None = None) -> dict[str, Term]:
    """Return the named activations of x as a dict by name, in the order of `ACTIVATIONS`."""
    wanted = set(names)
    return {name: SPELLINGS[name](x, alpha, beta) for name in ACTIVATIONS if name in wanted}


def activation(x: Term, alpha: Term, beta: Term, **others: Term) -> Term:
    """Return a choice of all activations of x and of `others`; alpha and beta are parameters of some activations."""
    return choose("activation", **spelled(SPELLINGS, x, alpha, beta), **others)


def gate_activation(x: Term) -> Term:
    """Return a choice of the activations that gated units use; SiLU is tried first, because most models use it."""
    gated = spelled((a.name for a in ACTIVATIONS.values() if a.gated), x)
    return choose("activation", silu=gated.pop("silu"), **gated)
