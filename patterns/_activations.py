"""The activation functions and their spellings."""

from typing import Any

from onnxfuse.dsl import Term, choose, contrib, either, op, stored


def gelu(x: Term) -> Term:
    """x * Phi(x), with erf (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return stored(either(op.Gelu(x), x * 0.5 * (op.Erf(x * 0.7071067811865476) + 1)), ort=contrib.Gelu(x))


def gelu_tanh(x: Term) -> Term:
    """The tanh approximation of GELU."""
    inner = either(0.7978845608028654 * (x + 0.044715 * x**3), 0.7978845608028654 * x * (1 + 0.044715 * x * x))
    spellings = either(op.Gelu(x, approximate="tanh"), x * 0.5 * (1 + op.Tanh(inner)))
    return stored(spellings, ort=contrib.FastGelu(x))


def silu(x: Term) -> Term:
    """x * sigmoid(x)."""
    return stored(either(op.Swish(x), x * op.Sigmoid(x)), ort=contrib.QuickGelu(x, alpha=1.0))


def quick_gelu(x: Term) -> Term:
    """x * sigmoid(1.702 x)."""
    return stored(x * op.Sigmoid(x * 1.702), ort=contrib.QuickGelu(x, alpha=1.702))


def hard_swish(x: Term) -> Term:
    """x * clip(x / 6 + 1/2, 0, 1) (Howard et al. 2019, arXiv:1905.02244)."""
    return either(
        op.HardSwish(x),
        x * op.HardSigmoid(x, alpha=1 / 6, beta=0.5),
        x * op.Clip(x + 3, min=0.0, max=6.0) / 6,
    )


def mish(x: Term) -> Term:
    """x * tanh(softplus(x))."""
    return either(op.Mish(x), x * op.Tanh(op.Softplus(x)))


def activation(x: Term, alpha: Any, beta: Any, **others: Term) -> Term:
    """Any of the activations, or another variant; `alpha` and `beta` are their parameters where they have some."""
    return choose(
        "activation",
        relu=op.Relu(x),
        gelu=gelu(x),
        gelu_tanh=gelu_tanh(x),
        silu=silu(x),
        quick_gelu=quick_gelu(x),
        hard_swish=hard_swish(x),
        mish=mish(x),
        sigmoid=op.Sigmoid(x),
        tanh=op.Tanh(x),
        softplus=op.Softplus(x),
        clip=op.Clip(x, min=alpha, max=beta),
        leaky_relu=op.LeakyRelu(x, alpha=alpha),
        elu=op.Elu(x, alpha=alpha),
        hard_sigmoid=op.HardSigmoid(x, alpha=alpha, beta=beta),
        **others,
    )


def gate(x: Term) -> Term:
    """The activations of gated units."""
    return choose(
        "activation",
        silu=silu(x),
        gelu=gelu(x),
        gelu_tanh=gelu_tanh(x),
        quick_gelu=quick_gelu(x),
        relu=op.Relu(x),
        sigmoid=op.Sigmoid(x),
    )
