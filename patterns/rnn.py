"""Simple recurrent layers, as ONNX has them."""

from onnxfuse.dsl import Term, attribute, fusion, op, results, tensor, weight
from onnxfuse.patterns._recurrent import require_recurrent_layer


@fusion(out=("steps directions batch hidden", "directions batch hidden"))
def rnn(
    x: Term = tensor("steps batch inputs"),
    w: Term = weight("directions gates inputs"),
    r: Term = weight("directions gates hidden"),
    bias: Term = weight("directions biases", optional=True),
    sequence_lens: Term = tensor("batch", optional=True),
    initial_h: Term = tensor("directions batch hidden", optional=True),
    hidden_size: Term = attribute(),
    direction: Term = attribute(),
    activations: Term = attribute(),
    activation_alpha: Term = attribute(),
    activation_beta: Term = attribute(),
    clip: Term = attribute(),
) -> tuple[Term, ...]:
    """ONNX RNN: h = tanh(x W^T + h R^T + b)

    The results are h of all steps, and the last h.  The body is the operator itself.  A layer whose activation no
    kernel has stays as it is.
    """
    require_recurrent_layer(1)
    node = op.RNN(
        x, w, r, bias, sequence_lens, initial_h,
        hidden_size=hidden_size, direction=direction, activations=activations, activation_alpha=activation_alpha,
        activation_beta=activation_beta, clip=clip,
    )  # fmt: skip
    return results(node, 2)
