"""How a node becomes one of channels-last tensors: what a rule answers, and what rules have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

import onnx

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS, Array, dtype_name
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant
from onnxfuse.layout.axes import IMAGE_RANKS
from onnxfuse.layout.writer import Writer, image_rank


class Kind(Enum):
    """What becoming channels-last is to a node."""

    CONVOLUTION = auto()  # it gains by that
    WRAPPED = auto()  # its function transposes, and it has a kernel that does not
    NEUTRAL = auto()  # its operator computes the same in either layout


@dataclass(frozen=True)
class Conversion:
    """A node that can be one of channels-last tensors.

    `reads` and `computes` are the indices of the inputs and outputs that become channels-last.  Inputs in
    `reads_either` are read in the layout in which they are computed.
    """

    node: Node
    kind: Kind
    reads: tuple[int, ...]
    computes: tuple[int, ...]
    write: Callable[[Writer], None]
    reads_either: tuple[int, ...] = ()
    fusion: str = ""  # of the fused node that it becomes; "" where it stays an operator


@dataclass(frozen=True)
class Model:
    """A sorted graph and what is known of it."""

    graph: Graph
    shapes: ShapeInfo
    functions: Mapping[str, onnx.FunctionProto]  # that fused nodes call, by name
    channels_last: Mapping[str, Sequence[str]]  # which operands of a fusion can be channels-last, by its name
    left_out: Collection[str] = frozenset()  # fusions that are not made


# Returns the conversion of a node, or why it stays channels-first: the end of a sentence that begins with the node.
Rule: TypeAlias = Callable[[Model, Node], "Conversion | str"]


def same_operator(
    node: Node,
    reads: tuple[int, ...],
    *,
    attributes: Mapping[str, AttributeValue | None] | None = None,
    constants: Mapping[int, Array] | None = None,
    broadcasts: bool = False,
    computes: tuple[int, ...] | None = None,
) -> Conversion:
    """Return the conversion to the same operator, which computes images from the inputs `reads`.

    `attributes` replace those of the node; one of None is removed.  `constants` replace inputs, by index.  With
    `broadcasts`, other constant inputs are broadcast to the images.  Without `computes` every output is an image.
    """
    if computes is None:
        computes = tuple(i for i, tensor in enumerate(node.outputs) if tensor.name)

    def write(writer: Writer) -> None:
        inputs = list(node.inputs)
        for i, tensor in enumerate(node.inputs):
            if constants and i in constants:
                inputs[i] = writer.graph.constant(f"{tensor.name}/nhwc", constants[i])
            elif i in reads:
                inputs[i] = writer.image(tensor)
            elif broadcasts and is_constant(tensor):
                inputs[i] = writer.broadcast(tensor, image_rank(writer.shapes, node.outputs[0]))
        outputs = [writer.computed(tensor) if i in computes else tensor for i, tensor in enumerate(node.outputs)]
        writer.rewrite(node, inputs, outputs, attributes)

    return Conversion(node, Kind.NEUTRAL, reads, computes, write)


def not_a_convolution(model: Model, operands: Mapping[str, Tensor], y: Tensor) -> str:
    """Return why a convolution, transposed or not, has no channels-last form; "" where it has one."""
    x, w, residual = operands["x"], operands["w"], operands.get("residual")
    if not is_constant(w):
        return f"its weights '{w.name}' are not constant"
    rank = len(w.shape)
    if not rank == model.shapes.rank(x) == model.shapes.rank(y) or rank not in IMAGE_RANKS:
        return f"it has {rank - 2} spatial axes, not 1 to {max(IMAGE_RANKS) - 2}"
    if is_constant(x):
        return "its image is a constant"
    if (dtype := model.shapes.dtype(x)) not in FUSIBLE_FLOATS:
        return f"it computes in {dtype_name(dtype)}"
    if residual and not image_rank(model.shapes, residual):
        return f"its residual '{residual.name}' is no computed tensor of three to five axes"
    return ""
