"""A BatchNormalization that could not be folded into adjacent weights, and the activation that follows it."""

from onnxfuse.dsl import Term, attribute, fusion, op, scalar, tensor, weight
from onnxfuse.patterns._activations import activation


@fusion(out="n channels ...", last=True, channels_last=["x"])
def batch_norm_activation(
    x: Term = tensor("n channels ..."),
    scale: Term = weight("channels"),
    bias: Term = weight("channels"),
    mean: Term = weight("channels"),
    var: Term = weight("channels"),
    epsilon: Term = scalar(if_absent=1e-5),
    momentum: Term = attribute(),
    alpha: Term = scalar(optional=True),
    beta: Term = scalar(optional=True),
) -> Term:
    """y = activation((x - mean) * scale / sqrt(var + epsilon) + bias)

    Networks that normalize before a convolution, such as DenseNet, contain this operator.  `momentum` changes nothing:
    only training uses it, and it is declared so that nodes with any momentum match.
    """
    normalized = op.BatchNormalization(x, scale, bias, mean, var, epsilon=epsilon, momentum=momentum)
    return activation(normalized, alpha, beta)
