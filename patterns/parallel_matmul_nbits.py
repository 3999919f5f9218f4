"""Matrix products of one input with two or three quantized weights."""

from onnxfuse.dsl import Term, attribute, fusion, require, tensor, weight
from onnxfuse.patterns._quantized_linear import EXAMPLE, Quantized, quantized_linear, require_blocks

OTHERS = {
    f"{name}_{i}": f"n_{i} {axis}" for i in (2, 3) for name, axis in (("scales", "blocks"), ("zero_points", "zeros"))
}


@fusion(out=("... n", "... n_2", "... n_3"), prologue=True, example={**EXAMPLE, **OTHERS})
def parallel_matmul_nbits(
    x: Term = tensor("... k"),
    w: Term = weight(),
    scales: Term = weight(),
    zero_points: Term = weight(optional=True),
    bias: Term = weight("n", optional=True),
    w_2: Term = weight(),
    scales_2: Term = weight(),
    zero_points_2: Term = weight(optional=True),
    bias_2: Term = weight("n_2", optional=True),
    w_3: Term = weight(optional=True),
    scales_3: Term = weight(optional=True),
    zero_points_3: Term = weight(optional=True),
    bias_3: Term = weight("n_3", optional=True),
    bits: Term = attribute(),
    block_size: Term = attribute(),
    accuracy_level: Term = attribute(),
) -> tuple[Term, Term, Term]:
    """y = x w + bias, y_2 = x w_2 + bias_2, y_3 = x w_3 + bias_3; each w is stored as in matmul_nbits"""
    require_blocks()
    require("w_3 has scales_3", lambda w_3, scales_3: (w_3 is None) == (scales_3 is None))
    require(
        "the weights have one dtype",
        lambda dtypes: len({dtype for name, dtype in dtypes.items() if name in ("w", "w_2", "w_3")}) == 1,
    )
    said = bits, block_size, accuracy_level
    return (
        quantized_linear(x, Quantized(w, scales, zero_points, *said), bias),
        quantized_linear(x, Quantized(w_2, scales_2, zero_points_2, *said), bias_2, "_2"),
        quantized_linear(x, Quantized(w_3, scales_3, zero_points_3, *said), bias_3, "_3"),
    )
