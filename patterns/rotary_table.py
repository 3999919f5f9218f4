"""The tables of cosines and sines that rotary embedding reads."""

from onnx import TensorProto

from onnxfuse.dsl import Term, choose, fusion, op, rearrange, scalar, tensor, weight


@fusion(out=("batch rows width", "batch rows width"), casts=True)
def rotary_table(
    positions: Term = tensor(),
    frequencies: Term = weight("half", optional=True),
    column: Term = weight("1 half 1", optional=True),
    factor: Term = scalar(optional=True),
) -> tuple[Term, Term]:
    """cos, sin = cos(angles) * factor, sin(angles) * factor

    angles = positions * frequencies, or two copies of that product, concatenated (Su et al. 2021, arXiv:2104.09864).
    Positions are integers of shape (batch, seq) or (seq); the frequencies may be a column.
    """

    def positions_as(axes: str) -> Term:
        own, common = rearrange(positions, f"batch seq -> batch {axes}"), rearrange(positions, f"seq -> 1 {axes}")
        return op.Cast(choose("sequences", each=own, all=common), to=TensorProto.FLOAT)

    angles = choose(
        "product",
        outer=positions_as("seq 1") * frequencies,
        matrix=rearrange(op.MatMul(column, positions_as("1 seq")), "batch half seq -> batch seq half"),
    )
    angles = choose("angles", twice=op.Concat(angles, angles, axis=-1), once=angles)
    cos, sin = op.Cos(angles), op.Sin(angles)
    return choose("scaling", factor=cos * factor, none=cos), choose("scaling", factor=sin * factor, none=sin)
