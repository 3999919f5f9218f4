"""Long short-term memory, as ONNX has it."""

from onnxfuse.dsl import Term, attribute, fusion, op, results, tensor, weight
from onnxfuse.patterns._recurrent import require_recurrent_layer


@fusion(out=("steps directions batch hidden", "directions batch hidden", "directions batch hidden"))
def lstm(
    x: Term = tensor("steps batch inputs"),
    w: Term = weight("directions gates inputs"),
    r: Term = weight("directions gates hidden"),
    bias: Term = weight("directions biases", optional=True),
    sequence_lens: Term = tensor("batch", optional=True),
    initial_h: Term = tensor("directions batch hidden", optional=True),
    initial_c: Term = tensor("directions batch hidden", optional=True),
    peepholes: Term = weight("directions peepholes", optional=True),
    hidden_size: Term = attribute(),
    direction: Term = attribute(),
    activations: Term = attribute(),
    activation_alpha: Term = attribute(),
    activation_beta: Term = attribute(),
    clip: Term = attribute(),
    input_forget: Term = attribute(),
) -> tuple[Term, ...]:
    """ONNX LSTM: i, o, f = sigma(x W^T + h R^T + b); c = f c + i tanh(x Wc^T + h Rc^T + bc); h = o tanh(c)

    W, R and b have the gates i, o, f, c in this order.  With peepholes, i and f also add Pi c and Pf c of the step
    before, and o adds Po c of this step.  The results are h of all steps, and the last h and c.

    The body is the operator itself.  A layer whose activations no kernel has stays as it is.
    """
    require_recurrent_layer(3)
    node = op.LSTM(
        x, w, r, bias, sequence_lens, initial_h, initial_c, peepholes,
        hidden_size=hidden_size, direction=direction, activations=activations, activation_alpha=activation_alpha,
        activation_beta=activation_beta, clip=clip, input_forget=input_forget,
    )  # fmt: skip
    return results(node, 3)
