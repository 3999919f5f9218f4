"""Linear attention: a recurrence whose state is a matrix for each head."""

from onnxfuse.dsl import Term, attribute, choose, contrib, fusion, op, require, results, tensor

DECAYED = ("gated", "gated_delta", None)  # None: the default, gated_delta
CORRECTED = ("delta", "gated_delta", None)


@fusion(
    out=("batch length context", "batch kv_heads size value_size"),
    example={"q_num_heads": 4, "kv_num_heads": 2, "decay": (2, 3, 2), "beta": (2, 3, 2)},
)
def linear_attention(
    query: Term = tensor("batch length width"),
    key: Term = tensor("batch length key_width"),
    value: Term = tensor("batch length value_width"),
    past_state: Term = tensor("batch kv_heads size value_size", optional=True),
    decay: Term = tensor("batch length decays", optional=True),
    beta: Term = tensor("batch length rates", optional=True),
    q_num_heads: Term = attribute(),
    kv_num_heads: Term = attribute(),
    scale: Term = attribute(),
    update_rule: Term = attribute(),
    chunk_size: Term = attribute(),
) -> tuple[Term, ...]:
    """S = exp(decay) S + k (beta (v - exp(decay) S^T k))^T and y = scale S^T q, token after token, for each head

    S is the state, which begins as past_state or as zeros.  The update rule gated has no beta and adds k v^T, delta has
    no decay, linear has neither, and gated_delta, the default, has both (Yang et al. 2024, arXiv:2412.06464).  Rows of
    decay have one logarithm for each head of the state, or one for each of its rows; rows of beta have one number for
    each head, or one for all.  A scale of 0 means 1 / sqrt(size).

    The body is the operator itself, ONNX's or com.microsoft's.  A com.microsoft operator can have more heads of the
    state than of queries and keys.  Operators that keep several states (state_window) stay as they are.

    Nodes that compute the same in chunks of tokens, as in Mamba-2 and Qwen3-Next, are recognized by their results, and
    are the body then.
    """
    require(
        "there are the decays and rates (beta) that the update rule has",
        lambda update_rule, decay, beta: (
            update_rule in (None, "linear", "gated", "delta", "gated_delta")
            and (decay is not None or update_rule not in DECAYED)
            and (beta is not None or update_rule not in CORRECTED)
        ),
    )
    require(
        "the state has {kv_num_heads} heads and queries have {q_num_heads}; required a multiple, or a divisor",
        lambda q_num_heads, kv_num_heads: (
            q_num_heads > 0 < kv_num_heads and (q_num_heads % kv_num_heads == 0 or kv_num_heads % q_num_heads == 0)
        ),
    )
    require(
        "one dtype of all operands but the state",
        lambda dtypes: len({dtype for name, dtype in dtypes.items() if name != "past_state"}) == 1,
    )
    operands = query, key, value, past_state, decay, beta
    said = {
        "q_num_heads": q_num_heads, "kv_num_heads": kv_num_heads, "scale": scale, "update_rule": update_rule,
        "chunk_size": chunk_size,
    }  # fmt: skip
    node = choose(
        "domain", onnx=op.LinearAttention(*operands, **said), microsoft=contrib.LinearAttention(*operands, **said)
    )
    return results(node, 2)
