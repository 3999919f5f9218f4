"""onnxruntime's GroupQueryAttention, where all sequences are as long as the tensors.

The operator reads the length of each sequence, so that sequences may be padded on the right, and caches may be longer
than their contents.  It equals the attention of fusions, over past and new keys, only if all sequences of the batch are
as long as the past and the new keys together.  This must follow from the model's shapes, or from a mask of ones that
the model builds and counts; a mask that is a graph input may have fewer ones.
"""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.operators import VIEWS
from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.rules import RuleTable, axes_parameter
from onnxfuse.analysis.shape_info import CannotInfer
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op, rearrange
from onnxfuse.ir.attributes import tensor_attribute
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.patterns._attention import axis_size
from onnxfuse.spell_out.attention import Heads, attended, columns_of
from onnxfuse.spell_out.call import Call, Rule
from onnxfuse.spell_out.rotary import Table, rotated

RULES = RuleTable[Rule]()

QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LENGTHS, TOTAL, COS, SIN, POSITIONS, BIAS = range(11)
UNKNOWN_INPUTS: Final = range(
    11, 17
)  # a sink, scales of a quantized cache, norms of queries and keys, lengths of queries
UNKNOWN_ATTRIBUTES: Final = {  # by attribute: the values that have no effect
    "local_window_size": (-1,), "smooth_softmax": (-1, 0), "causal": (1,), "sliding_window_cache": (0,),
    "kv_cache_bit_width": (0,), "rotary_interleaved": (0,),
}  # fmt: skip
UNIFORM: Final = VIEWS | {"Cast", "Tile"}  # if all elements of the input are one number, so are those of the result


@RULES.rule("com.microsoft::GroupQueryAttention")
def _group_query_attention(call: Call) -> dict[int, Term] | str:
    if any(map(call.has, UNKNOWN_INPUTS)) or call.has(POSITIONS):
        return "it has positions, a sink, norms, or a quantized cache"
    for name, usual in UNKNOWN_ATTRIBUTES.items():
        if call.integer(name, usual[0]) not in usual:
            return f"its attribute {name} is {call.integer(name)}"
    if reason := _name_sizes(call) or _unequal_lengths(call):
        return reason
    queries, keys, values = _new_heads(call)
    past: Term | int = axis_size(call.input(PAST_KEY), 2) if call.has(PAST_KEY) else 0
    if call.integer("do_rotary"):
        half, size = (call.shape(COS) or (None,))[-1], call.dims["size"]
        if not isinstance(half, int) or not isinstance(size, int) or not 0 < 2 * half <= size:
            return "its tables are not as wide as a part of its heads"
        end = past + axis_size(call.input(QUERY), 1)
        places = op.Unsqueeze(op.Range(past, end, 1), axes=[0])
        cos, sin = Table(call.input(COS), places), Table(call.input(SIN), places)
        queries, keys = (rotated(x, cos, sin, half, size) for x in (queries, keys))
    if call.has(PAST_KEY):
        keys = op.Concat(call.input(PAST_KEY), keys, axis=2)
        values = op.Concat(call.input(PAST_VALUE), values, axis=2)
    copies = "batch kv_heads keys size -> batch (kv_heads repeats) keys size"
    heads = Heads(queries, rearrange(keys, copies), rearrange(values, copies), axis_size(keys, 2), is_causal=True)
    heads.added, heads.softcap = (call.input(BIAS),) if call.has(BIAS) else (), call.number("softcap", 0.0)
    return {0: attended(call, heads), 1: keys, 2: values}


def _name_sizes(call: Call) -> str | None:
    """Name the sizes of queries and keys in `call.dims`; return the reason if they are not known."""
    query, past = call.shape(QUERY), call.shape(PAST_KEY)
    heads, kv_heads = call.integer("num_heads"), call.integer("kv_num_heads")
    if query is None or len(query) != 3 or not heads or not kv_heads or heads % kv_heads:
        return "its queries have not three known axes, or its heads of keys do not serve as many queries each"
    parts = heads if call.has(KEY) else heads + 2 * kv_heads
    if not isinstance(query[2], int) or query[2] % parts:
        return "the size of its heads is not known"
    if call.has(PAST_KEY) and (past is None or len(past) != 4):
        return "its past has not four known axes"
    size, new = query[2] // parts, query[1]
    call.dims |= {
        "batch": query[0], "queries": new, "new": new, "heads": heads, "kv_heads": kv_heads, "size": size,
        "value_size": size, "repeats": heads // kv_heads, "keys": new + past[2] if past else new,
    }  # fmt: skip
    return None


def _unequal_lengths(call: Call) -> str | None:
    """Return why a sequence may be shorter than past and new keys together; None if none can be."""
    keys = call.dims["keys"]
    for index, length in (LENGTHS, keys - 1), (TOTAL, keys):
        found = _number(call, call.tensor(index))
        if found is None:
            name, mask = call.tensor(index).name, _counted_mask(call.tensor(index))
            if mask is not None:
                return f"'{name}' counts '{mask.name}': new keys do not stand behind the past of sequences with padding"
            return f"the shapes do not tell the lengths '{name}': sequences may be shorter, padded on the right"
        if found != length:
            return f"'{call.tensor(index).name}' is {found}; required {length}, past and new keys"
    return None


def _number(call: Call, tensor: Tensor) -> Size | None:
    """Return the number that all elements of an integer tensor equal; None where it is not known."""
    value, node = call.shapes.value(tensor), producer(tensor)
    if value is not None and value.size:
        elements = list(value.reshape(-1))
        return elements[0] if all(element == elements[0] for element in elements) else None
    op = op_of(node) if node is not None else ""
    if node is None or (op not in UNIFORM and op not in ("Add", "ConstantOfShape", "ReduceSum", "Sub")):
        return None
    if op == "ConstantOfShape":
        filled = tensor_attribute(node, "value")
        value = None if filled is None else call.shapes.exact_constant(filled)
        return None if value is None else int(value.item())
    first = _number(call, node.inputs[0])
    if first is None or op in UNIFORM:
        return first
    if op == "ReduceSum":
        return _sum_of_axis(call, node, first)
    second = _number(call, node.inputs[1])
    return None if second is None else first + second if op == "Add" else first - second


def _sum_of_axis(call: Call, node: Node, number: Size) -> Size | None:
    """Return the sum over one axis of a tensor whose elements all equal `number`; None where it is not known."""
    shape = call.shapes.shape(node.inputs[0])
    try:
        axes = None if shape is None else axes_parameter(call.shapes, node, len(shape))
    except CannotInfer:
        return None
    return None if shape is None or axes is None or len(axes) != 1 else number * shape[axes[0]]


def _counted_mask(tensor: Tensor) -> Tensor | None:
    """Return the mask whose elements are summed up to the lengths, as exporters write it; None if there is none."""
    while (node := producer(tensor)) is not None and op_of(node) in UNIFORM | {"Add", "ReduceSum", "Sub"}:
        if op_of(node) == "ReduceSum":
            return _before_casts(node.inputs[0])
        tensor = node.inputs[0]
    return None


def _before_casts(tensor: Tensor) -> Tensor:
    """Return the tensor before any Casts."""
    while (node := producer(tensor)) is not None and op_of(node) == "Cast":
        tensor = node.inputs[0]
    return tensor


def _new_heads(call: Call) -> tuple[Term, Term, Term]:
    """Return the queries, keys and values of this step as (batch, heads, rows, size)."""
    size, heads, kv_heads = call.dims["size"], call.dims["heads"], call.dims["kv_heads"]
    parts = [call.input(QUERY)] * 3
    if call.has(KEY):
        parts = [call.input(index) for index in (QUERY, KEY, VALUE)]
    else:
        assert isinstance(size, int) and isinstance(heads, int) and isinstance(kv_heads, int)
        wide, narrow = heads * size, kv_heads * size
        places = (0, wide), (wide, narrow), (wide + narrow, narrow)
        parts = [columns_of(part, *place) for part, place in zip(parts, places, strict=True)]
    names = "heads", "kv_heads", "kv_heads"
    queries, keys, values = (
        rearrange(part, f"batch new ({name} size) -> batch {name} new size")
        for part, name in zip(parts, names, strict=True)
    )
    return queries, keys, values
