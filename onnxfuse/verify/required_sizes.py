"""Find the input sizes that some operators require: to try sizes for them would be unsafe, or would rarely succeed.

onnxruntime may run a Conv on a wrong number of channels: its convolutions in a blocked layout then read past the end of
memory.  GroupQueryAttention accepts cached keys and values (a past) only if their heads fit, and if all layers and the
mask agree on the length of the past.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import onnx
import onnx.inliner

from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import ModelError
from onnxfuse.ir.protos import nodes, without_initializers
from onnxfuse.verify.input_uses import PAST_KEY, axes_of_keys, integer_uses, links_of
from onnxfuse.verify.inputs import Input

OPERATORS: Final = frozenset({"Conv", "ConvTranspose", "FusedConv"})
CACHED: Final = "GroupQueryAttention"
PAST_VALUE, BIAS = 4, 10  # inputs of GroupQueryAttention
PAST, NEW = "past_length", "new_length"  # names given to the dims that have no name


@dataclass(frozen=True)
class Required:
    """The inputs of a model, with the sizes that it requires: a dim is a number if only one is possible.

    Dims that must be equal have one name.  For a model with a cache, `steps` holds more sets of sizes, for several
    sequences: a prompt without a past, and one token with a past.  With a past, onnxruntime's CPU provider accepts
    several tokens only for a single sequence.
    """

    inputs: list[Input]
    steps: tuple[Mapping[str, int], ...] = ()


def required_sizes(model: onnx.ModelProto, inputs: Sequence[Input]) -> Required:
    """Return the inputs of a model with the sizes that its convolutions, and attention with a cache, require."""
    has_dynamic = any(isinstance(dim, str) for each in inputs for dim in each.dims[1:])
    found = {node.op_type for node in nodes(model.graph, *model.functions)} if has_dynamic else set[str]()
    if not found & {*OPERATORS, CACHED}:
        return Required(list(inputs))
    inlined = _inlined(model)
    shapes = inferred_shapes(inlined, None)
    known = {} if shapes is None else {tensor.name: shapes.shape(tensor) for tensor in shapes.graph.linked.inputs}
    completed = [_completed(each, known.get(each.name)) for each in inputs]
    return _with_cache(inlined, completed) if CACHED in found else Required(completed)


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with all functions inlined, including the functions of fused nodes."""
    if not model.functions:
        return model
    result = onnx.inliner.inline_local_functions(without_initializers(model))
    result.graph.initializer.extend(model.graph.initializer)
    return result


def _completed(each: Input, known: Sequence[object] | None) -> Input:
    if known is None or len(known) != len(each.dims):
        return each
    pairs = zip(each.dims, known, strict=True)
    return replace(each, dims=tuple(size if isinstance(size, int) else dim for dim, size in pairs))


def _with_cache(model: onnx.ModelProto, inputs: list[Input]) -> Required:
    """Return the inputs with the lengths that GroupQueryAttention requires.

    All its pasts (cached keys and values) have the same length, and masks and biases cover the past and the new tokens.
    Dims of one name get the same size in all inputs.
    """
    known, links, uses = {each.name: each for each in inputs}, links_of(model), integer_uses(model)
    attention = next((node for node in links.producers.values() if node.op_type == CACHED), None)
    axes = [] if attention is None else [(known[name], axis) for name, axis in axes_of_keys(attention, links)]
    if len(axes) != 2 or any(len(each.dims) <= axis for each, axis in axes):
        return Required(inputs)
    (cache, past_axis), (tokens, new_axis) = axes
    past, new = (
        dim if not isinstance(dim, str) or dim.isidentifier() else name
        for dim, name in ((cache.dims[past_axis], PAST), (tokens.dims[new_axis], NEW))
    )
    sizes: dict[str, int | str] = {}
    for node in links.producers.values():
        for name in node.input[PAST_KEY : PAST_VALUE + 1] if node.op_type == CACHED else ():
            batch, _, length, *_ = known[name].dims if name in known and len(known[name].dims) == 4 else (0, 0, 0)
            sizes |= {dim: to for dim, to in ((batch, cache.dims[0]), (length, past)) if isinstance(dim, str)}
    sizes |= {dim: new for dim in tokens.dims[new_axis : new_axis + 1] if isinstance(dim, str)}
    total = past + new if isinstance(past, int) and isinstance(new, int) else f"{past} + {new}"
    biases = {
        name for node in links.producers.values() if node.op_type == CACHED for name in node.input[BIAS : BIAS + 1]
    }
    for each in inputs:
        is_mask = each.name in uses and uses[each.name].kind == "ones" and len(each.dims) == 2
        if is_mask or (each.name in biases and len(each.dims) == 4):
            sizes |= {dim: total for dim in each.dims[-1:] if isinstance(dim, str) and dim not in (past, new)}
    renamed = [
        replace(each, dims=tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in each.dims))
        for each in inputs
    ]
    steps = ({past: 0}, {new: 1}) if isinstance(past, str) and isinstance(new, str) else ()
    return Required(renamed, steps)


def inferred_shapes(model: onnx.ModelProto, folder: Path | None) -> ShapeInfo | None:
    """Return the shapes of a model's tensors; None if it cannot be read.  `folder` has its external data."""
    try:
        return read_and_infer(model, folder)
    except ModelError:  # raised for fused nodes of another version of onnxfuse, and for a cycle
        return None
