"""A causal convolution of each channel along a sequence, after the end of the sequence before."""

from onnxfuse.dsl import Term, attribute, choose, contrib, fusion, op, require, results, tensor


@fusion(
    out=("batch channels length", "batch channels before"),
    example={"x": (2, 6, 5), "weight": (6, 1, 4), "bias": (6,), "past_state": (2, 6, 3)},
)
def causal_conv_with_state(
    x: Term = tensor("batch channels length"),
    weight: Term = tensor("channels one size"),
    bias: Term = tensor("channels", optional=True),
    past_state: Term = tensor("batch channels before", optional=True),
    activation: Term = attribute(),
) -> tuple[Term, ...]:
    """y[t] = activation(sum(weight[i] * z[t + i]) + bias), where z is past_state and then x; the last columns of z

    past_state holds the size - 1 columns before x, zeros if it is absent, and the second output holds the last size - 1
    columns of z.  The activation is silu, or none.  The body is the operator itself, ONNX's or com.microsoft's, which
    also has forms for several axes, for dilated filters and for channels-last images; these stay as they are.
    """
    require(
        "activation is {activation}; required silu, swish or none",
        lambda activation: activation in (None, "none", "silu", "swish"),
    )
    operands = x, weight, bias, past_state
    node = choose(
        "domain",
        onnx=op.CausalConvWithState(*operands, activation=activation),
        microsoft=contrib.CausalConvWithState(*operands, activation=activation),
    )
    return results(node, 2)
