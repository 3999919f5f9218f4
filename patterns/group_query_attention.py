"""Attention of onnxruntime's generative models: an operand says how many rows of the caches each sequence has."""

from typing import Final

from onnxfuse.dsl import Term, attribute, contrib, fusion, require, results, tensor

INTEGERS: Final = {"seqlens_k", "total_sequence_length", "position_ids"}
CACHES: Final = {"past_key", "past_value"}
SCALES: Final = {"k_scale", "v_scale"}


@fusion(
    out=("batch queries context", "batch kv_heads rows size", "batch kv_heads rows size"),
    example={"num_heads": 4, "kv_num_heads": 2},
)
def group_query_attention(
    query: Term = tensor("batch queries width"),
    seqlens_k: Term = tensor(),
    total_sequence_length: Term = tensor(),
    key: Term = tensor("batch queries kv_width", optional=True),
    value: Term = tensor("batch queries kv_width", optional=True),
    past_key: Term = tensor("batch kv_heads past size", optional=True),
    past_value: Term = tensor("batch kv_heads past size", optional=True),
    cos_cache: Term = tensor("positions half", optional=True),
    sin_cache: Term = tensor("positions half", optional=True),
    position_ids: Term = tensor("batch queries", optional=True),
    attention_bias: Term = tensor(optional=True),
    head_sink: Term = tensor("heads", optional=True),
    k_scale: Term = tensor(optional=True),
    v_scale: Term = tensor(optional=True),
    q_norm_weight: Term = tensor("size", optional=True),
    k_norm_weight: Term = tensor("size", optional=True),
    num_heads: Term = attribute(),
    kv_num_heads: Term = attribute(),
    scale: Term = attribute(),
    softcap: Term = attribute(),
    local_window_size: Term = attribute(),
    smooth_softmax: Term = attribute(),
    do_rotary: Term = attribute(),
    rotary_interleaved: Term = attribute(),
    qk_norm_epsilon: Term = attribute(),
    q_norm_epsilon: Term = attribute(),
    k_norm_epsilon: Term = attribute(),
    causal: Term = attribute(),
    qk_output: Term = attribute(),
    sliding_window_cache: Term = attribute(),
    kv_cache_bit_width: Term = attribute(),
    k_quant_type: Term = attribute(),
    v_quant_type: Term = attribute(),
) -> tuple[Term, ...]:
    """com.microsoft.GroupQueryAttention: sequence b attends to the first seqlens_k[b] + 1 rows of its present caches

    The last of these rows are the new rows of the sequence, which the node writes into the present caches.  A present
    cache is as long as the past cache, or as total_sequence_length if that is more; total_sequence_length is at most
    the number of past and new rows.  A caller may bind a past and its present to one address: then only new rows are
    written.  Queries and keys are normalized with q_norm_weight and k_norm_weight and rotated by cos_cache and
    sin_cache first.  Query rows beyond the length of a prompt that is padded on the right are unspecified, as are the
    rows of the caches beyond the length.

    The caches may hold int8 or float8 (e4m3fn) numbers, which are multiplied by k_scale and v_scale: one float32 scale
    or, with PER_CHANNEL, one for each element of each head.  A new element is divided by its scale and rounded to the
    nearest number, ties to even, or to the largest one; queries attend to the numbers.

    The body is the operator itself.  Kernels support neither quantized caches of 4 bits, nor caches of the size of a
    window, nor the output of the products of queries and keys (qk_output), so that operators with one of these stay as
    they are.
    """
    require(
        "keys and values are quantized alike and have scales, or neither is quantized",
        lambda k_quant_type, v_quant_type, k_scale, v_scale: (
            (k_quant_type or "NONE") == (v_quant_type or "NONE")
            and (k_quant_type in (None, "NONE")) == (k_scale is None) == (v_scale is None)
        ),
    )
    require(
        "kv_cache_bit_width is {kv_cache_bit_width}; required 8, of a past in int8 or float8e4m3fn",
        lambda k_scale, kv_cache_bit_width, dtypes: (
            k_scale is None
            or (kv_cache_bit_width == 8 and {dtypes.get(name) for name in CACHES} in ({"int8"}, {"float8_e4m3fn"}))
        ),
    )
    require(
        "num_heads is {num_heads}; required a multiple of kv_num_heads, {kv_num_heads}",
        lambda num_heads, kv_num_heads: num_heads >= kv_num_heads > 0 == num_heads % kv_num_heads,
    )
    require(
        "a row of queries has {width} elements; required {num_heads} heads of {size}, and if packed {kv_num_heads} "
        "more of keys and of values",
        lambda width, size, num_heads, kv_num_heads, key: (
            not isinstance(width, int) or width == (num_heads + (2 * kv_num_heads if key is None else 0)) * size
        ),
    )
    require(
        "do_rotary is {do_rotary}, rotary_interleaved {rotary_interleaved} and smooth_softmax {smooth_softmax}; "
        "required 0 or 1 for each",
        lambda do_rotary, rotary_interleaved, smooth_softmax: (
            {do_rotary, rotary_interleaved, smooth_softmax} <= {None, 0, 1}
        ),
    )
    require("softcap is {softcap}; required 0 or more", lambda softcap: softcap is None or softcap >= 0)
    require("causal is {causal}; required 1", lambda causal: causal in (None, 1))
    require("qk_output is {qk_output}; required none", lambda qk_output: not qk_output)
    require("no cache of the size of a window", lambda sliding_window_cache: not sliding_window_cache)
    require(
        "one dtype of queries, keys, values, caches, tables, sinks and norms; quantized caches have one of their own",
        lambda dtypes, k_scale: (
            len({dtypes[name] for name in dtypes.keys() - INTEGERS - (CACHES | SCALES if k_scale else set())}) == 1
        ),
    )
    node = contrib.GroupQueryAttention(
        query, key, value, past_key, past_value, seqlens_k, total_sequence_length, cos_cache, sin_cache, position_ids,
        attention_bias, head_sink, k_scale, v_scale, q_norm_weight, k_norm_weight,
        num_heads=num_heads, kv_num_heads=kv_num_heads, scale=scale, softcap=softcap,
        local_window_size=local_window_size, smooth_softmax=smooth_softmax, do_rotary=do_rotary,
        rotary_interleaved=rotary_interleaved, qk_norm_epsilon=qk_norm_epsilon, q_norm_epsilon=q_norm_epsilon,
        k_norm_epsilon=k_norm_epsilon, causal=causal, qk_output=qk_output, sliding_window_cache=sliding_window_cache,
        kv_cache_bit_width=kv_cache_bit_width, k_quant_type=k_quant_type, v_quant_type=v_quant_type,
    )  # fmt: skip
    return results(node, 3)
