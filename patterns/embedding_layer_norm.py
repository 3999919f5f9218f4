"""LayerNorm of embeddings: rows of a table, with those of positions and token types or other tensors added."""

from onnxfuse.dsl import choose, fusion, op, require, scalar, tensor, weight
from onnxfuse.patterns._norms import layer_normalized
from onnxfuse.shapes.dims import symbols


@fusion(out=("b s d", "b s d"), casts=True)
def embedding_layer_norm(
    ids=tensor("b s"),
    table=weight("v d"),
    ids_2=tensor("b? p?", optional=True),
    table_2=weight("v_2 d", optional=True),
    ids_3=tensor("b? s?", optional=True),
    table_3=weight("v_3 d", optional=True),
    added=tensor("b? p? d", optional=True),
    row=weight("d", optional=True),
    scale=weight("d"),
    bias=weight("d", optional=True),
    epsilon=scalar(default=1e-5),
):
    """sum = table[ids] + table_2[ids_2] + table_3[ids_3] + added + row, of these at most three; y = layer_norm(sum)"""
    require(
        "as many positions as ids, {s}, or one are added; there are {p}",
        lambda s, p: p in (None, s) or not {*symbols(s)}.isdisjoint(symbols(p)),  # of 512, [:s] has min(512, s)
    )
    tokens, second, third = (op.Gather(*pair) for pair in ((table, ids), (table_2, ids_2), (table_3, ids_3)))
    total = choose(
        "addends",
        two_tables=tokens + second + third,
        table_and_tensor=tokens + second + added,
        table=tokens + second,
        tensor_and_row=tokens + added + row,
        tensor=tokens + added,
        none=tokens,
    )
    return layer_normalized(total, scale, bias, epsilon), total
