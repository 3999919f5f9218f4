"""The cosines and sines that rotary embedding turns by."""

from onnx import TensorProto

from onnxfuse.dsl import choose, fusion, op, rearrange, scalar, tensor, weight


@fusion(out=("batch rows width", "batch rows width"), casts=True)
def rotary_table(
    positions=tensor(),
    frequencies=weight("half", optional=True),
    column=weight("1 half 1", optional=True),
    factor=scalar(optional=True),
):
    """cos, sin = cos(angles) * factor, sin(angles) * factor

    angles = positions * frequencies, once or twice side by side (Su et al. 2021, arXiv:2104.09864).  Positions are
    integers, (batch, seq) or (seq); the frequencies may be a column.
    """

    def of(axes):
        of_each, of_all = (rearrange(positions, f"{given} {axes}") for given in ("batch seq -> batch", "seq -> 1"))
        return op.Cast(choose("sequences", each=of_each, all=of_all), to=TensorProto.FLOAT)

    angles = choose(
        "product",
        outer=of("seq 1") * frequencies,
        matrix=rearrange(op.MatMul(column, of("1 seq")), "batch half seq -> batch seq half"),
    )
    angles = choose("angles", twice=op.Concat(angles, angles, axis=-1), once=angles)
    cos, sin = op.Cos(angles), op.Sin(angles)
    return choose("scaling", factor=cos * factor, none=cos), choose("scaling", factor=sin * factor, none=sin)
