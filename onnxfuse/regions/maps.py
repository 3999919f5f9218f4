"""Converts operators that only move elements to steps, the operators of a region's program (see `steps.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from onnxfuse.algebra.sizes import Size
from onnxfuse.ir.node import is_constant
from onnxfuse.regions.computed import Expression, by_index
from onnxfuse.regions.steps import StaysOut, Steps, Writer, axis_of, json_number

HUGE: Final = 2**63 - 1


def _reshape(s: Steps) -> None:
    target = s.sizes("shape")
    if target is None:
        raise StaysOut("it has no shape")
    if s.integer("allowzero", 0) and 0 in target:
        raise StaysOut("it is given a size of zero")
    s.end("Reshape", s.data_and_measured(), shape=target)


def _flatten(s: Steps) -> None:
    shape, axis = s.shape(s.node.inputs[0]), axis_of(s.integer("axis", 1), s.rank())
    before, after = _elements(shape[:axis]), _elements(shape[axis:])
    if axis == 1:
        target = [0, -1]
    elif after:
        target = [-1, after]
    elif before:
        target = [before, -1]
    else:
        raise StaysOut("it flattens sizes that are not known")
    s.end("Reshape", [s.data(0)], shape=target)


def _elements(shape: Sequence[Size]) -> int | None:
    """Return the number of elements of a shape; None if any of its sizes is symbolic."""
    known = [size for size in shape if isinstance(size, int)]
    return math.prod(known) if len(known) == len(shape) else None


def _transpose(s: Steps) -> None:
    perm = s.ints("perm") or list(range(s.rank()))[::-1]
    s.end("Transpose", [s.data(0)], perm=perm)


def _unsqueeze(s: Steps) -> None:
    rank = len(s.shape(s.node.outputs[0]))
    s.end("Unsqueeze", [s.data(0)], axes=sorted(axis_of(axis, rank) for axis in s.ints("axes") or []))


def _squeeze(s: Steps) -> None:
    axes, shape = s.ints("axes"), s.shape(s.node.inputs[0])
    if axes is None:
        if not all(isinstance(size, int) for size in shape):
            raise StaysOut("it names no axes, and which of them are one is not known")
        axes = [i for i, size in enumerate(shape) if size == 1]
    s.end("Squeeze", [s.data(0)], axes=sorted(axis_of(axis, len(shape)) for axis in axes))


def _expand(s: Steps) -> None:
    target = s.sizes("shape")
    if target is None:
        raise StaysOut("it has no shape")
    s.end("Expand", s.data_and_measured(), shape=target)


def _slice(s: Steps) -> None:
    starts, ends = s.sizes("starts"), s.sizes("ends")
    if starts is None or ends is None:
        raise StaysOut("it has no starts or ends")
    axes = s.ints("axes") or list(range(len(starts)))
    steps = (s.ints("steps") if s.shapes.graph.opset >= 10 else None) or [1] * len(starts)
    axes = [axis_of(axis, s.rank()) for axis in axes]
    s.end("Slice", s.data_and_measured(), axes=axes, starts=starts, ends=ends, steps=steps)


def _concat(s: Steps) -> None:
    axis = axis_of(s.integer("axis", 0), s.rank())
    s.end("Concat", [s.data(i) for i in range(len(s.node.inputs))], axis=axis)


def _split(s: Steps) -> None:
    axis, count = axis_of(s.integer("axis", 0), s.rank()), len(s.node.outputs)
    sizes = s.sizes("split")
    if sizes is None:
        total = s.shape(s.node.inputs[0])[axis]
        part = -(-total // count)
        sizes = [s.size(each) for each in [part] * (count - 1) + [total - part * (count - 1)]]
    if not all(output.name for output in s.node.outputs):
        raise StaysOut("one of its outputs is left out")
    s.end("Split", s.data_and_measured(), axis=axis, sizes=sizes)


def _pad(s: Steps) -> None:
    rank, pads = s.rank(), s.sizes("pads")
    if pads is None:
        raise StaysOut("it has no pads")
    if s.has(3):
        axes = [axis_of(int(axis), rank) for axis in s.constant(s.node.inputs[3]).reshape(-1)]
        every: list[Expression] = [0] * (2 * rank)
        for i, axis in enumerate(axes):
            every[axis], every[axis + rank] = pads[i], pads[i + len(axes)]
        pads = every
    value: object = s.constant(s.node.inputs[2]).reshape(-1)[0] if s.has(2) else s.node.attrs.get("value", 0)
    mode = str(s.parameter("mode") or "constant")
    if mode != "constant" and not all(isinstance(pad, int) and pad >= 0 for pad in pads):
        raise StaysOut(f"it may take elements away in mode {mode}")
    s.end("Pad", s.data_and_measured(), pads=pads, mode=mode, value=json_number(value, s.dtype()))


def _gather(s: Steps) -> None:
    """Write a Gather; a Gather with a single constant index becomes a Slice."""
    axis, indices = axis_of(s.integer("axis", 0), s.rank()), s.node.inputs[1]
    if not is_constant(indices) or math.prod(indices.shape) != 1 or len(indices.shape) > 1:
        s.end("Gather", [s.data(0), indices.name], axis=axis)
        return
    index = int(s.constant(indices).reshape(-1)[0])
    last: dict[str, Any] = {"axes": [axis], "starts": [index], "ends": [index + 1 or HUGE], "steps": [1]}
    if indices.shape:
        s.end("Slice", [s.data(0)], **last)
    else:
        s.end("Squeeze", [s.emit("Slice", [s.data(0)], **last)], axes=[axis])


def _gather_elements(s: Steps) -> None:
    s.end("GatherElements", [s.data(0), s.node.inputs[1].name], axis=axis_of(s.integer("axis", 0), s.rank()))


def _tile(s: Steps) -> None:
    repeats = s.sizes("repeats")
    if repeats is None:
        raise StaysOut("it has no repeats")
    s.end("Tile", s.data_and_measured(), repeats=repeats)


def _blocks(s: Steps, split: Sequence[Size], perm: list[int], joined: Sequence[Size]) -> None:
    """Write SpaceToDepth or DepthToSpace as Reshape, Transpose and Reshape."""
    first, last = ([s.size(size) for size in target] for target in (split, joined))
    data = s.data(0)  # the last Reshape also reads the dims of `data`
    moved = s.emit("Transpose", [s.emit("Reshape", [data], shape=first)], perm=perm)
    s.end("Reshape", [moved, data], shape=[by_index(each, lambda _: 1) for each in last])


def _sizes(s: Steps) -> tuple[int, Size, int, Size, Size]:
    """Return the node's block size, and the batch, channels, rows and columns of its input."""
    shape = s.shape(s.node.inputs[0])
    if len(shape) != 4 or not isinstance(shape[1], int):
        raise StaysOut("its channels are not known")
    return s.integer("blocksize", 1), shape[0], shape[1], shape[2], shape[3]


def _depth_to_space(s: Steps) -> None:
    block, images, channels, height, width = _sizes(s)
    inner = channels // block**2
    crd = s.parameter("mode") == "CRD"
    blocks: list[Size] = [inner, block, block] if crd else [block, block, inner]
    perm = [0, 1, 4, 2, 5, 3] if crd else [0, 3, 4, 1, 5, 2]
    _blocks(s, [images, *blocks, height, width], perm, [images, inner, height * block, width * block])


def _space_to_depth(s: Steps) -> None:
    block, images, channels, height, width = _sizes(s)
    split: list[Size] = [images, channels, height // block, block, width // block, block]
    _blocks(s, split, [0, 3, 5, 1, 2, 4], [images, channels * block**2, height // block, width // block])


MAPS: Final[Mapping[str, Writer]] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Expand": _expand,
    "Slice": _slice,
    "Concat": _concat,
    "Split": _split,
    "Pad": _pad,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Tile": _tile,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
}
