"""The snake activation of neural vocoders and audio codecs, with parameters for each channel."""

from onnxfuse import Term, choose, fusion, op, tensor, weight


@fusion(out="batch channels length", channels_last=["x"])
def snake(
    x: Term = tensor("batch channels length"),
    alpha: Term = weight("1 channels 1"),
    gain: Term = weight("1 channels 1"),
) -> Term:
    """y = x + sin(alpha * x)^2 * gain, or with the quotient in place of the product (Ziyin et al., arXiv:2006.08195)"""
    wave = op.Sin(alpha * x) ** 2
    return choose("form", product=x + wave * gain, quotient=x + op.Div(wave, gain))
