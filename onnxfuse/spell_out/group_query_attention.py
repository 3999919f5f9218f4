"""Spell out onnxruntime's GroupQueryAttention in basic operators, if all sequences are as long as the tensors.

The operator reads the length of each sequence, so that sequences can be padded on the right, and caches can be longer
than their contents.  The operator equals the attention that fusions match, over past and new keys, only if all
sequences of the batch are as long as the past and the new keys together.  These lengths must follow from the model's
shapes, or from a mask of ones that the model builds and counts.  A mask that is a graph input is not enough, because
callers can pass fewer ones.
"""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.operators import VIEWS
from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.rules import RuleTable, axes_parameter
from onnxfuse.analysis.shape_info import CannotInfer
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op
from onnxfuse.ir.attributes import tensor_attribute
from onnxfuse.ir.node import Node, Tensor, op_of, producer, tensor_before
from onnxfuse.patterns._attention import axis_size
from onnxfuse.spell_out.attention import Heads, after_past, attended, name_keys
from onnxfuse.spell_out.call import Call, NoSpelling, Rule, known, stay_if
from onnxfuse.spell_out.rotary import Table, rotated
from onnxfuse.spell_out.views import parts_of, repeat_heads, split_heads

RULES = RuleTable[Rule]()

QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, LENGTHS, TOTAL, COS, SIN, _, BIAS = range(11)
# An operator that has any of these inputs is not spelled out: positions, a sink, scales of a quantized cache, norms of
# queries and keys, and lengths of queries.
UNKNOWN_INPUTS: Final = (9, *range(11, 17))
SUPPORTED_VALUES: Final = {  # by attribute: the only values with which the operator is spelled out, the default first
    "local_window_size": (-1,), "smooth_softmax": (-1, 0), "causal": (1,), "sliding_window_cache": (0,),
    "kv_cache_bit_width": (0,), "rotary_interleaved": (0,),
}  # fmt: skip
# Operators: if all elements of the input are equal, so are all elements of the output.
UNIFORM: Final = VIEWS | {"Cast", "Tile"}


@RULES.rule("com.microsoft::GroupQueryAttention")
def _group_query_attention(call: Call) -> dict[int, Term]:
    stay_if(any(map(call.has, UNKNOWN_INPUTS)), "it has positions, a sink, norms, or a quantized cache")
    for name, usual in SUPPORTED_VALUES.items():
        value = call.attribute(name, usual[0])
        stay_if(value not in usual, f"its attribute {name} is {value}")
    size = _name_sizes(call)
    _check_lengths(call)
    queries, keys, values = _new_heads(call, size)
    past: Term | int = axis_size(call.input(PAST_KEY), 2) if call.has(PAST_KEY) else 0
    if call.attribute("do_rotary", 0):
        half = (call.shape(COS) or (None,))[-1]
        if not isinstance(half, int) or not 0 < 2 * half <= size:
            raise NoSpelling("its tables are not as wide as a part of its heads")
        end = past + axis_size(call.input(QUERY), 1)
        places = op.Unsqueeze(op.Range(past, end, 1), axes=[0])
        cos, sin = Table(call.input(COS), places), Table(call.input(SIN), places)
        queries, keys = (rotated(x, cos, sin, half, size) for x in (queries, keys))
    keys, values = after_past(call, PAST_KEY, keys), after_past(call, PAST_VALUE, values)
    length, softcap = axis_size(keys, 2), call.attribute("softcap", 0.0)
    heads = Heads(queries, repeat_heads(keys), repeat_heads(values), length, is_causal=True, softcap=softcap)
    return {0: attended(call, heads, BIAS), 1: keys, 2: values}


def _name_sizes(call: Call) -> int:
    """Store the sizes of queries and keys in `call.dims`; return the size of a head."""
    reason = "its queries have not three known axes, or its heads of keys do not serve as many queries each"
    batch, new, width = call.axes(QUERY, reason, 3)
    heads, kv_heads = call.attribute("num_heads", 0), call.attribute("kv_num_heads", 0)
    stay_if(heads < 1 or kv_heads < 1 or heads % kv_heads, reason)
    no_size = "the size of its heads is not known"
    size, rest = divmod(known(width, no_size), heads if call.has(KEY) else heads + 2 * kv_heads)
    stay_if(rest, no_size)
    call.dims |= {
        "batch": batch, "queries": new, "new": new, "heads": heads, "kv_heads": kv_heads, "size": size,
        "value_size": size, "repeats": heads // kv_heads,
    }  # fmt: skip
    name_keys(call, PAST_KEY)
    return size


def _check_lengths(call: Call) -> None:
    """Raise NoSpelling unless every sequence is known to be as long as past and new keys together."""
    keys = call.dims["keys"]
    for index, length in (LENGTHS, keys - 1), (TOTAL, keys):
        tensor = call.tensor(index)
        name, found, mask = tensor.name, _number(call, tensor), _counted_mask(tensor)
        if found is None and mask is not None:
            end = "new keys do not follow the past of sequences with padding"
            raise NoSpelling(f"'{name}' counts '{mask.name}': {end}")
        unknown = f"the shapes do not tell the lengths '{name}': sequences may be shorter, padded on the right"
        stay_if(found is None, unknown)
        stay_if(found != length, f"'{name}' is {found}; required {length}, past and new keys")


def _number(call: Call, tensor: Tensor) -> Size | None:
    """Return the value that all elements of an integer tensor have; None if it is not known, or they differ."""
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
    """Return the mask whose rows are summed to compute the lengths, as exporters write it; None if there is none."""
    node = producer(tensor_before(tensor, UNIFORM | {"Add", "Sub"}))
    return tensor_before(node.inputs[0], {"Cast"}) if node is not None and op_of(node) == "ReduceSum" else None


def _new_heads(call: Call, size: int) -> tuple[Term, Term, Term]:
    """Return the queries, keys and values of this step as (batch, heads, rows, size)."""
    if call.has(KEY):
        queries, keys, values = (call.input(index) for index in (QUERY, KEY, VALUE))
    else:
        wide, narrow = call.attribute("num_heads", 0) * size, call.attribute("kv_num_heads", 0) * size
        queries, keys, values = parts_of(call.input(QUERY), wide, narrow, narrow)
    keys, values = (split_heads(x, "new", heads="kv_heads") for x in (keys, values))
    return split_heads(queries, "new"), keys, values
