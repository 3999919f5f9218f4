"""Linear attention as onnxruntime's GatedDeltaNet has it: heads are an axis, and states are transposed."""

from onnxfuse.dsl import Term, attribute, contrib, fusion, require, results, tensor


@fusion(
    out=("... kv_heads value_size", "batch kv_heads value_size size"),
    example={
        "query": (2, 3, 2, 8), "key": (2, 3, 2, 8), "value": (2, 3, 4, 6), "decay": (2, 3, 4), "beta": (2, 3, 4),
        "past_state": (2, 4, 6, 8),
    },
)  # fmt: skip
def gated_delta_net(
    query: Term = tensor("... heads size"),
    key: Term = tensor("... heads size"),
    value: Term = tensor("... kv_heads value_size"),
    decay: Term = tensor(optional=True),
    beta: Term = tensor("... kv_heads", optional=True),
    past_state: Term = tensor("batch kv_heads value_size size"),
    update_rule: Term = attribute(),
    scale: Term = attribute(),
    chunk_size: Term = attribute(),
) -> tuple[Term, ...]:
    """S = exp(decay) S + k (beta (v - exp(decay) S^T k))^T and y = scale S^T q, as in linear_attention

    The axes before the heads are (batch, tokens), or the tokens of all sequences, which have one length; kernels take
    one such sequence.  States are S^T in float32.  Decays have one logarithm for each head, or one for each row of S;
    they and rates (beta) have the dtype of queries, or float32.  A scale of 0 means 1 / sqrt(size).

    The body is com.microsoft's operator.  Its packed operands, activations of gates and norms of queries and keys are
    spelled out before it is matched; sequences of different lengths stay onnxruntime's.
    """
    require(
        "there are exactly the decays and rates (beta) that the update rule has",
        lambda update_rule, decay, beta: (
            (decay is not None) == (update_rule in (None, "gated", "gated_delta"))
            and (beta is not None) == (update_rule in (None, "delta", "gated_delta"))
        ),
    )
    require("there are {heads} heads of queries and {kv_heads} of values; required a multiple",
            lambda heads, kv_heads: kv_heads % heads == 0)  # fmt: skip
    require(
        "one dtype of queries, keys and values, and states in float32",
        lambda dtypes: dtypes["query"] == dtypes["key"] == dtypes["value"] and dtypes["past_state"] == "float32",
    )
    node = contrib.GatedDeltaNet(
        query, key, value, None, decay, beta, past_state, update_rule=update_rule, scale=scale, chunk_size=chunk_size
    )
    return results(node, 2)
