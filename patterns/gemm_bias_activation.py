"""A matrix product with the bias, activation, scale of columns and residual that follow it."""

from onnxfuse.dsl import Term, either, fusion, op, require, scalar, tensor, weight
from onnxfuse.patterns._activations import activation
from onnxfuse.patterns._linear import linear


@fusion(out="... n", epilogue=True, prologue=True, selection=True)
def gemm_bias_activation(
    x: Term = tensor("... k"),
    w: Term = weight(),
    bias: Term = weight("n", optional=True),
    slope: Term = weight("n", optional=True),
    column_scale: Term = weight("n", optional=True),
    residual: Term = tensor("... n", optional=True),
    alpha: Term = scalar(optional=True),
    beta: Term = scalar(optional=True),
) -> Term:
    """y = activation(x w + bias) * column_scale + residual; w is (k, n), or (n, k) with weight_layout nk

    `slope` is the slope of a PRelu.
    """
    require(
        "a bias, an activation, a scale or a residual follows the product, or operators or a norm join it",
        lambda bias, column_scale, residual, activation, joined: (
            joined or activation != "none" or any(operand is not None for operand in (bias, column_scale, residual))
        ),
    )
    product = linear(x, w, bias)
    activated = activation(product, alpha, beta, none=product, prelu=op.PRelu(product, slope))
    scaled = either(activated * column_scale, activated)
    return either(scaled + residual, scaled)
