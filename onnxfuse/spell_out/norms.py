"""Spelling rules, which write large operators as smaller ones: norms of sums, of embeddings and of other tensors.

The other tensors are channels-last images, and tensors that are normalized over several axes.
"""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.operators import MATRIX_PRODUCTS, VIEWS
from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term, as_term
from onnxfuse.dsl.words import cast_like, full, op, rearrange
from onnxfuse.ir.node import Tensor, op_of, producer, tensor_before
from onnxfuse.patterns._activations import silu
from onnxfuse.patterns._norms import layer_normalized, rms_normalized
from onnxfuse.spell_out.call import Call, NoSpelling, Rule, stay_if
from onnxfuse.spell_out.views import channels_first, channels_last, parts_of

RULES = RuleTable[Rule]()

CHANNELS: Final = "(groups size) -> (groups size) 1 1"  # makes a vector per channel broadcast to an image


@RULES.rule("com.microsoft::SkipLayerNormalization", "SkipLayerNormalization")
def _skip_layer_normalization(call: Call) -> dict[int, Term]:
    total = _sum(call, bias=4)
    return {0: layer_normalized(total, call.input(2), call.optional(3), call.epsilon(1e-12)), 3: total}


@RULES.rule("com.microsoft::SkipSimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
def _skip_simplified_layer_normalization(call: Call) -> dict[int, Term]:
    total = _sum(call, bias=3)
    return {0: rms_normalized(total, call.input(2), call.epsilon(1e-12)), 3: total}


def _sum(call: Call, bias: int) -> Term:
    """Return the sum of the first two inputs and the bias.

    The bias is first added to one of the inputs: to the second if only the second is a matrix product's result, else to
    the first.
    """
    products = [_is_product(call.tensor(index)) for index in (0, 1)]
    return call.sum_of(1, bias, 0) if products == [False, True] else call.sum_of(0, bias, 1)


def _is_product(tensor: Tensor) -> bool:
    """Return whether the tensor is the result of a matrix product, perhaps after views."""
    node = producer(tensor_before(tensor, VIEWS))
    return node is not None and op_of(node) in MATRIX_PRODUCTS


@RULES.rule("com.microsoft::SimplifiedLayerNormalization", "SimplifiedLayerNormalization")
def _simplified_layer_normalization(call: Call) -> dict[int, Term]:
    stay_if(not _is_over_last_axis(call), f"it normalizes several axes, from axis {call.attribute('axis', -1)} on")
    return {0: rms_normalized(call.input(0), call.input(1), call.epsilon(1e-5))}


def _is_over_last_axis(call: Call) -> bool:
    rank = call.rank(0)
    return rank is not None and call.attribute("axis", -1) in (-1, rank - 1)


@RULES.rule("LayerNormalization", "RMSNormalization")
def _normalization_of_several_axes(call: Call) -> dict[int, Term] | None:
    shape, axis = call.shape(0), call.attribute("axis", -1)
    if _is_over_last_axis(call) or call.attribute("stash_type", 1) != 1:
        return None
    if shape is None or not -len(shape) <= axis < len(shape):
        raise NoSpelling("the rank of its input is not known")
    sizes = shape[axis:]
    vectors = [call.shape(index) for index in (1, 2) if call.has(index)]
    unknown = not all(isinstance(size, int) for size in sizes) or any(vector != sizes for vector in vectors)
    stay_if(unknown, "its scale has not the known sizes of the axes that it normalizes")
    names = [f"axis_{i}" for i in range(len(shape))]
    call.dims |= dict(zip(names, shape, strict=True))
    front, back = " ".join(names[:axis]), " ".join(names[axis:])
    rows = rearrange(call.input(0), f"{front} {back} -> {front} ({back})")
    scale, shift = (rearrange(call.input(i), f"{back} -> ({back})") if call.has(i) else as_term(None) for i in (1, 2))
    is_rms, epsilon = op_of(call.node) == "RMSNormalization", call.epsilon(1e-5)
    normalized = rms_normalized(rows, scale, epsilon) if is_rms else layer_normalized(rows, scale, shift, epsilon)
    return {0: rearrange(normalized, f"{front} ({back}) -> {front} {back}")}


# --- embeddings ----------------------------------------------------------------------------------------------------


@RULES.rule("com.microsoft::EmbedLayerNormalization")
def _embed_layer_normalization(call: Call) -> dict[int, Term]:
    reason = "its ids have not two known axes, or it has segments without a table"
    _, columns = call.axes(0, reason, 2)
    stay_if(call.has(1) != call.has(4), reason)
    total: Term = op.Gather(call.input(2), call.input(0))
    if call.has(8):
        total = total + op.Gather(call.input(3), call.input(8))
    elif isinstance(columns, int):
        total = total + parts_of(call.input(3), columns, axis=0)[0]
    else:
        length = op.Gather(op.Shape(call.input(0)), 1)
        total = total + op.Gather(call.input(3), op.Range(0, length, 1))
    if call.has(1):
        total = total + op.Gather(call.input(4), call.input(1))
    normalized = layer_normalized(total, call.input(5), call.input(6), call.epsilon(1e-12))
    return {0: normalized, 1: _lengths(call), 2: total}


def _lengths(call: Call) -> Term:
    """Return the number of ids that the mask keeps in each sequence; 0 if there is no mask."""
    if not call.has(7):
        return op.Gather(op.Sub(call.input(0), call.input(0)), 0, axis=1)
    counts = op.Cast(op.Equal(call.input(7), 1), to=call.dtype(7))
    return op.ReduceSum(counts, axes=[1], keepdims=0)


# --- GroupNorm -----------------------------------------------------------------------------------------------------


@RULES.rule("com.microsoft::GroupNorm", "com.microsoft::SkipGroupNorm")
def _group_norm(call: Call) -> dict[int, Term]:
    is_last = call.attribute("channels_last", 1) == 1
    _name_groups(call, "groups", is_last)
    image = channels_first(call.input(0)) if is_last else call.input(0)
    if op_of(call.node) == "com.microsoft::SkipGroupNorm":
        skip = _skipped(call, is_last)
        image = image + rearrange(call.input(4), CHANNELS) + skip if call.has(4) else image + skip
        call.may_remain.add("Add")  # an Add of a time embedding can remain a node, as in many exports
    normalized = _normalized_groups(call, image)
    result = cast_like(silu(normalized) if call.attribute("activation", 0) else normalized, like=image)
    return {0: channels_last(result), 1: channels_last(image)} if is_last else {0: result, 1: image}


def _skipped(call: Call, is_last: bool) -> Term:
    """Return the tensor that a SkipGroupNorm adds to its image, channels first."""
    skip, axes = call.input(3), call.axes(3, "the tensor added to its image does not have two or four axes", 2, 4)
    if len(axes) == 2:
        return op.Unsqueeze(skip, axes=[2, 3])
    return channels_first(skip) if is_last else skip


@RULES.rule("GroupNormalization")
def _group_normalization(call: Call) -> dict[int, Term] | None:
    """Spell out the operator of opsets 18 to 20, which has a scale and a shift per group."""
    if call.graph.opset >= 21:
        return None
    _name_groups(call, "num_groups")
    return {0: _normalized_groups(call, call.input(0), "groups -> (groups size) 1 1")}


def _name_groups(call: Call, attribute: str, is_last: bool = False) -> None:
    """Store the sizes of an image in `call.dims`; the attribute says how many groups its channels form."""
    batch, *others = call.axes(0, "its image has not four axes", 4)
    channels, groups = others.pop(2 if is_last else 0), call.attribute(attribute, 0)
    if not isinstance(channels, int) or groups < 1 or channels % groups:
        raise NoSpelling(f"{channels} channels are not divisible by {groups} groups")
    call.dims |= {"n": batch, "h": others[0], "w": others[1], "groups": groups, "size": channels // groups}


def _normalized_groups(call: Call, image: Term, channels: str = CHANNELS) -> Term:
    """Return an image whose groups are normalized, with a scale and a shift per channel applied."""
    rows = rearrange(image, "n (groups size) h w -> n groups (size h w)")
    ones, zeros = full(1, "groups"), full(0, "groups")
    normalized = op.InstanceNormalization(rows, ones, zeros, epsilon=call.epsilon(1e-5))
    spatial = rearrange(normalized, "n groups (size h w) -> n (groups size) h w")
    scale, shift = (rearrange(call.input(i), channels) for i in (1, 2))
    return spatial * scale + shift
