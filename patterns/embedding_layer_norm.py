"""LayerNorm of a sum of embeddings: table rows selected by tokens, positions and token types, or other tensors."""

from onnxfuse.dsl import Term, choose, fusion, op, require, scalar, tensor, weight
from onnxfuse.patterns._norms import layer_normalized, require_epsilon


@fusion(out=("b s d", "b s d"), casts=True)
def embedding_layer_norm(
    ids: Term = tensor("b s"),
    table: Term = weight("v d"),
    ids_2: Term = tensor("b? p?", optional=True),
    table_2: Term = weight("v_2 d", optional=True),
    ids_3: Term = tensor("b? s?", optional=True),
    table_3: Term = weight("v_3 d", optional=True),
    added: Term = tensor("b? p? d", optional=True),
    row: Term = weight("d", optional=True),
    scale: Term = weight("d"),
    bias: Term = weight("d", optional=True),
    epsilon: Term = scalar(if_absent=1e-5),
) -> tuple[Term, Term]:
    """sum = table[ids] + table_2[ids_2] + table_3[ids_3] + added + row, at most three of them; y = layer_norm(sum)"""
    require(
        "{p} positions are added; required {s}, as many as ids, or one",
        # A slice [:s] of a table of 512 rows has p = min(512, s) rows, so s and p share the symbol s.
        lambda s, p, share_symbols: p in (None, s) or share_symbols(s, p),
    )
    tokens, second, third = op.Gather(table, ids), op.Gather(table_2, ids_2), op.Gather(table_3, ids_3)
    total = choose(
        "addends",
        two_tables=tokens + second + third,
        table_and_tensor=tokens + second + added,
        table=tokens + second,
        tensor_and_row=tokens + added + row,
        tensor=tokens + added,
        none=tokens,
    )
    require_epsilon()
    return layer_normalized(total, scale, bias, epsilon), total
