"""Norms with a sum before them, of channels-last images, or over several axes."""

from __future__ import annotations

from typing import Final

from onnxfuse.algebra.operators import MATRIX_PRODUCTS, VIEWS
from onnxfuse.analysis.rules import RuleTable
from onnxfuse.dsl.terms import Term, as_term
from onnxfuse.dsl.words import cast_like, full, op, rearrange
from onnxfuse.ir.node import Tensor, op_of, producer
from onnxfuse.patterns._activations import silu
from onnxfuse.patterns._norms import layer_normalized, rms_normalized
from onnxfuse.spell_out.call import Call, Rule

RULES = RuleTable[Rule]()

TO_CHANNELS_FIRST: Final = [0, 3, 1, 2]
TO_CHANNELS_LAST: Final = [0, 2, 3, 1]
CHANNELS: Final = "(groups size) -> (groups size) 1 1"  # makes a vector per channel broadcast to an image


@RULES.rule("com.microsoft::SkipLayerNormalization", "SkipLayerNormalization")
def _skip_layer_normalization(call: Call) -> dict[int, Term]:
    total = _sum(call, bias=4)
    epsilon = call.scalar("epsilon", call.number("epsilon", 1e-12))
    return {0: layer_normalized(total, call.input(2), call.optional(3), epsilon), 3: total}


@RULES.rule("com.microsoft::SkipSimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
def _skip_simplified_layer_normalization(call: Call) -> dict[int, Term]:
    total = _sum(call, bias=3)
    epsilon = call.scalar("epsilon", call.number("epsilon", 1e-12))
    return {0: rms_normalized(total, call.input(2), epsilon), 3: total}


def _sum(call: Call, bias: int) -> Term:
    """Return the sum of the first two inputs and the bias, which is added first to the result of a matrix product."""
    products = [_is_product(call.tensor(index)) for index in (0, 1)]
    return call.sum_of(1, bias, 0) if products == [False, True] else call.sum_of(0, bias, 1)


def _is_product(tensor: Tensor) -> bool:
    """Return whether the tensor is the result of a matrix product, perhaps after views."""
    node = producer(tensor)
    while node is not None and op_of(node) in VIEWS:
        node = producer(node.inputs[0])
    return node is not None and op_of(node) in MATRIX_PRODUCTS


@RULES.rule("com.microsoft::SimplifiedLayerNormalization", "SimplifiedLayerNormalization")
def _simplified_layer_normalization(call: Call) -> dict[int, Term] | str:
    if not _is_over_last_axis(call):
        return f"it normalizes several axes, from axis {call.integer('axis', -1)} on"
    epsilon = call.scalar("epsilon", call.number("epsilon", 1e-5))
    return {0: rms_normalized(call.input(0), call.input(1), epsilon)}


def _is_over_last_axis(call: Call) -> bool:
    rank = call.rank(0)
    return rank is not None and call.integer("axis", -1) in (-1, rank - 1)


@RULES.rule("LayerNormalization", "RMSNormalization")
def _normalization_of_several_axes(call: Call) -> dict[int, Term] | str | None:
    shape, axis = call.shape(0), call.integer("axis", -1)
    if _is_over_last_axis(call) or call.integer("stash_type", 1) != 1:
        return None
    if shape is None or not -len(shape) <= axis < len(shape):
        return "the rank of its input is not known"
    sizes = shape[axis:]
    vectors = [call.shape(index) for index in (1, 2) if call.has(index)]
    if not all(isinstance(size, int) for size in sizes) or any(vector != sizes for vector in vectors):
        return "its scale has not the known sizes of the axes that it normalizes"
    names = [f"axis_{i}" for i in range(len(shape))]
    call.dims |= dict(zip(names, shape, strict=True))
    front, back = " ".join(names[:axis]), " ".join(names[axis:])
    rows = rearrange(call.input(0), f"{front} {back} -> {front} ({back})")
    scale, shift = (rearrange(call.input(i), f"{back} -> ({back})") if call.has(i) else as_term(None) for i in (1, 2))
    epsilon = call.scalar("epsilon", call.number("epsilon", 1e-5))
    is_rms = op_of(call.node) == "RMSNormalization"
    normalized = rms_normalized(rows, scale, epsilon) if is_rms else layer_normalized(rows, scale, shift, epsilon)
    return {0: rearrange(normalized, f"{front} ({back}) -> {front} {back}")}


# --- GroupNorm -----------------------------------------------------------------------------------------------------


@RULES.rule("com.microsoft::GroupNorm", "com.microsoft::SkipGroupNorm")
def _group_norm(call: Call) -> dict[int, Term] | str:
    shape, groups = call.shape(0), call.integer("groups")
    if shape is None or len(shape) != 4:
        return "its image has not four axes"
    channels_last = call.integer("channels_last", 1) == 1
    batch, *others = shape
    channels = others.pop(2 if channels_last else 0)
    if not isinstance(channels, int) or not groups or channels % groups:
        return f"{channels} channels are no {groups} groups"
    call.dims |= {"n": batch, "h": others[0], "w": others[1], "groups": groups, "size": channels // groups}
    image = op.Transpose(call.input(0), perm=TO_CHANNELS_FIRST) if channels_last else call.input(0)
    if op_of(call.node) == "com.microsoft::SkipGroupNorm":
        skip = _skipped(call, channels_last)
        if skip is None:
            return "what is added to its image has not two or four axes"
        image = image + rearrange(call.input(4), CHANNELS) + skip if call.has(4) else image + skip
        call.may_remain.add("Add")  # of a time embedding, which exports add in a separate node, too
    normalized = _normalized_groups(call, rearrange(image, "n (groups size) h w -> n groups (size h w)"))
    result = cast_like(silu(normalized) if call.integer("activation") else normalized, like=image)
    outputs = {0: result, 1: image}
    return {i: op.Transpose(x, perm=TO_CHANNELS_LAST) for i, x in outputs.items()} if channels_last else outputs


def _skipped(call: Call, channels_last: bool) -> Term | None:
    """Return the tensor that a SkipGroupNorm adds to its image, channels first; None if its rank is not 2 or 4."""
    rank, skip = call.rank(3), call.input(3)
    if rank == 2:
        return op.Unsqueeze(skip, axes=[2, 3])
    if rank == 4:
        return op.Transpose(skip, perm=TO_CHANNELS_FIRST) if channels_last else skip
    return None


@RULES.rule("GroupNormalization")
def _group_normalization(call: Call) -> dict[int, Term] | str | None:
    """Spell out the operator of opsets 18 to 20, which has a scale and a shift per group."""
    if call.graph.opset >= 21:
        return None
    shape, groups = call.shape(0), call.integer("num_groups")
    if shape is None or len(shape) != 4 or not isinstance(shape[1], int) or not groups or shape[1] % groups:
        return "its image has not four axes, or an unknown number of channels"
    call.dims |= {"n": shape[0], "h": shape[2], "w": shape[3], "groups": groups, "size": shape[1] // groups}
    rows = rearrange(call.input(0), "n (groups size) h w -> n groups (size h w)")
    return {0: _normalized_groups(call, rows, "groups -> (groups size) 1 1")}


def _normalized_groups(call: Call, rows: Term, channels: str = CHANNELS) -> Term:
    """Normalize rows that are groups; return them as an image with a scale and a shift per channel applied."""
    epsilon = call.scalar("epsilon", call.number("epsilon", 1e-5))
    ones, zeros = full(1, "groups"), full(0, "groups")
    normalized = op.InstanceNormalization(rows, ones, zeros, epsilon=epsilon)
    spatial = rearrange(normalized, "n groups (size h w) -> n (groups size) h w")
    scale, shift = (rearrange(call.input(i), channels) for i in (1, 2))
    return spatial * scale + shift
