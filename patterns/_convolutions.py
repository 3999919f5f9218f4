"""What the fusions of convolutions share."""

from onnxfuse.dsl import Term, either, when


def before_activation(product: Term, residual: Term) -> Term:
    """Return what the activation behind a convolution reads: the sum with the residual, or the product alone."""
    added = when(
        product + residual,
        "the residual is added before the activation",
        lambda residual_position: residual_position == "before",
    )
    return either(added, product)
