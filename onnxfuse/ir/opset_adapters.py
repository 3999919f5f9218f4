"""Rewrites of nodes for the operators whose meaning or form changes from one opset to the next.

`ADAPTERS` maps an operator and the opset that changed it to a function, which rewrites a node for that opset.  The
schemas describe all other changes: more dtypes, further optional inputs, and attributes that are absent by default.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from onnxfuse.algebra.operators import RANDOM
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import take_name
from onnxfuse.ir.protos import graphs, nodes, overridable_initializers, without_initializers
from onnxfuse.ir.slices import hide_ends

MAX_READ: Final = 64  # maximum number of elements of constants that adapters read, such as the scales of all axes
SINCE_OPTIONAL_ROI: Final = 13  # the first opset in which a Resize by scales can omit the region input

# Attributes that a newer version adds; their defaults keep the older version's meaning.
NEUTRAL_DEFAULTS: Final = frozenset({
    ("ArgMax", "select_last_index"), ("ArgMin", "select_last_index"), ("AveragePool", "ceil_mode"),
    ("Cast", "round_mode"), ("Cast", "saturate"), ("CastLike", "round_mode"), ("CastLike", "saturate"),
    ("DepthToSpace", "mode"), ("DequantizeLinear", "axis"), ("DequantizeLinear", "block_size"),
    ("DequantizeLinear", "output_dtype"), ("GRU", "layout"), ("GatherND", "batch_dims"), ("LSTM", "layout"),
    ("LpPool", "ceil_mode"), ("MaxPool", "ceil_mode"), ("MaxPool", "storage_order"), ("QuantizeLinear", "axis"),
    ("QuantizeLinear", "block_size"), ("QuantizeLinear", "output_dtype"), ("QuantizeLinear", "precision"),
    ("QuantizeLinear", "saturate"), ("RNN", "layout"), ("Reshape", "allowzero"), ("Resize", "antialias"),
    ("Resize", "keep_aspect_ratio_policy"), ("ScatterElements", "reduction"), ("ScatterND", "reduction"),
    ("Shape", "start"), ("TopK", "largest"), ("TopK", "sorted"),
})  # fmt: skip


class Refused(Exception):
    """A node cannot be written in a newer opset; the message says why."""


@dataclass
class Surroundings:
    """Facts about the model that contains the rewritten node; for a node of a function, `model` holds that function."""

    model: onnx.ModelProto  # the model before the conversion
    opset: int  # the opset to convert to
    enlarging: set[str] = field(default_factory=set)  # outputs of Resizes that replaced Upsamples
    with_empty: set[str] = field(default_factory=set)  # outputs of Reshapes with a target that can contain a 0

    @cached_property
    def defined(self) -> Counter[str]:
        """How often each name is defined in all graphs; an input and the initializer that is its default count once."""
        found = Counter[str]()
        for part in graphs(self.model.graph):
            names = {each.name for each in (*part.input, *part.initializer)}
            found.update([*names, *(name for node in part.node for name in node.output)])
        return found

    @cached_property
    def names(self) -> set[str]:
        """The names of all tensors and nodes in the model."""
        read = {name for each in nodes(self.model.graph) for name in (each.name, *each.input)}
        return {*read, *self.defined}

    @cached_property
    def read(self) -> set[str]:
        """The names of tensors that are a node's input or a graph's output."""
        results = {value.name for part in graphs(self.model.graph) for value in part.output}
        return results | {name for each in nodes(self.model.graph) for name in each.input}

    @cached_property
    def constants(self) -> dict[str, Array]:
        """The values of small constants, by name; a name that several graphs define is left out."""
        found = {each.name: each for part in graphs(self.model.graph) for each in part.initializer}
        variable = overridable_initializers(self.model)
        for node in nodes(self.model.graph):
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                found[node.output[0]] = node.attribute[0].t
        return {
            name: onnx.numpy_helper.to_array(tensor)
            for name, tensor in found.items()
            if self.defined[name] == 1 and name not in variable
            and math.prod(tensor.dims) <= MAX_READ and not uses_external_data(tensor)
        }  # fmt: skip

    @cached_property
    def types(self) -> dict[str, onnx.TypeProto]:
        """The types of tensors that onnx infers, by name; a name that several graphs define is left out."""
        light = without_initializers(self.model)
        given = {each.name for each in light.graph.input}
        light.graph.input.extend(
            onnx.helper.make_tensor_value_info(each.name, each.data_type, list(each.dims))
            for each in self.model.graph.initializer
            if each.name not in given
        )
        hide_ends(light)
        with suppress(Exception):  # inference can raise any error; then only recorded types are used
            light = onnx.shape_inference.infer_shapes(light)
        values = [each for part in graphs(light.graph) for each in (*part.input, *part.output, *part.value_info)]
        return {each.name: each.type for each in values if self.defined[each.name] == 1}

    def dtype(self, name: str) -> int:
        """Return the dtype of a tensor; 0 if it is not known."""
        return self.types[name].tensor_type.elem_type if name in self.types else 0

    def rank(self, name: str) -> int | None:
        """Return how many axes a tensor has; None if that is not known."""
        kind = self.types[name].tensor_type if name in self.types else None
        return len(kind.shape.dim) if kind is not None and kind.HasField("shape") else None


@dataclass
class Place:
    """A node that is rewritten in place, with the nodes to insert before and after it."""

    node: onnx.NodeProto
    around: Surroundings
    before: list[onnx.NodeProto] = field(default_factory=list)
    after: list[onnx.NodeProto] = field(default_factory=list)

    def take(self, name: str, default: Any = None) -> Any:
        """Remove an attribute, and return its value; `default` if the node has none.

        Raises Refused if the attribute refers to an attribute of the surrounding function: its value is not known here.
        """
        for i, attribute in enumerate(self.node.attribute):
            if attribute.name == name:
                if attribute.ref_attr_name:
                    raise Refused(f"its attribute '{name}' is the attribute '{attribute.ref_attr_name}' of a function")
                value = onnx.helper.get_attribute_value(attribute)
                del self.node.attribute[i]
                return value
        return default

    def give(self, **attributes: Any) -> None:
        """Add attributes to the node."""
        self.node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in attributes.items())

    def name(self, stem: str) -> str:
        """Return a new name that begins with `stem`."""
        return take_name(self.around.names, stem)

    def compute(self, op: str, inputs: Sequence[str], what: str, **attributes: Any) -> str:
        """Insert a new node before the rewritten node; return the name of its result, which ends in `what`."""
        result = self.name(f"{self.node.output[0]}_{what}")
        self.before.append(onnx.helper.make_node(op, inputs, [result], result, **attributes))
        return result

    def constant(self, value: Array, what: str) -> str:
        """Insert a constant before this node, and return its name, which ends in `what`."""
        return self.compute("Constant", [], what, value=onnx.numpy_helper.from_array(value))

    def to_input(self, index: int, value: Array, what: str) -> None:
        """Add a value as the input at `index`; inputs before it that the node does not list are added as omitted."""
        self.node.input.extend([""] * (index - len(self.node.input)))
        self.node.input.append(self.constant(value, what))

    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the first input.  Raises Refused if it is not known."""
        found = self.around.dtype(self.node.input[0])
        if not found:
            raise Refused(f"the dtype of '{self.node.input[0]}' is not known, which its bounds or fill must have")
        return onnx.helper.tensor_dtype_to_np_dtype(found)


Adapter: TypeAlias = Callable[[Place], None]


def _floating(place: Place) -> None:
    if (
        not np.issubdtype(place.dtype(), np.floating)
        and place.around.dtype(place.node.input[0]) != TensorProto.BFLOAT16
    ):
        raise Refused("its operand has integers, which newer opsets do not take")


def _axes(place: Place) -> None:
    """Turn the attribute `axes` into an input."""
    axes = place.take("axes")
    if axes:
        place.to_input(1, np.array(axes, np.int64), "axes")


def _slice(place: Place) -> None:
    starts, ends, axes = (place.take(name) for name in ("starts", "ends", "axes"))
    for index, (what, value) in enumerate((("starts", starts), ("ends", ends), ("axes", axes)), 1):
        if value:
            place.to_input(index, np.array(value, np.int64), what)


def _split(place: Place) -> None:
    sizes = place.take("split")
    if sizes:
        place.to_input(1, np.array(sizes, np.int64), "sizes")


def _equal_parts(place: Place) -> None:
    if len(place.node.input) < 2 or not place.node.input[1]:
        place.give(num_outputs=len(place.node.output))


def _top_k(place: Place) -> None:
    place.to_input(1, np.array([place.take("k")], np.int64), "k")


def _clip(place: Place) -> None:
    """Turn a Clip's bounds into inputs in the data's dtype; float16 bounds that would be too large become infinite."""
    dtype, largest = place.dtype(), float(np.finfo(np.float32).max)
    for index, (what, default) in enumerate((("min", -largest), ("max", largest)), 1):
        bound = place.take(what, default)
        if bound != default or dtype != np.float32:
            with np.errstate(over="ignore"):
                place.to_input(index, np.array(bound).astype(dtype), what)


def _pad(place: Place) -> None:
    place.to_input(1, np.array(place.take("pads"), np.int64), "pads")
    fill = place.take("value", 0.0)
    if fill:
        place.to_input(2, np.array(fill).astype(place.dtype()), "fill")


def _dropout_mask(place: Place) -> None:
    """Drop an unused mask of a Dropout.

    Before opset 12 the values of the mask were not defined, and before opset 10 the mask was not boolean.
    """
    if any(name in place.around.read for name in place.node.output[1:]):
        raise Refused("its mask is read, which another opset defines in another way")
    del place.node.output[1:]


def _dropout(place: Place) -> None:
    _dropout_mask(place)
    ratio = place.take("ratio")
    if ratio is not None:
        place.to_input(1, np.array(ratio, np.float32), "ratio")


def _spatial(place: Place) -> None:
    if place.take("spatial", 1) == 0:
        raise Refused("it has spatial = 0, statistics of each pixel, which no newer opset has")


def _no_statistics(place: Place) -> None:
    """Drop the outputs that exist for training only, because newer opsets have changed these outputs."""
    if any(place.node.output[1:]):
        raise Refused("it writes the statistics of training, which newer opsets define in another way")
    del place.node.output[1:]


def _upsample_scales(place: Place) -> None:
    place.to_input(1, np.array(place.take("scales"), np.float32), "scales")


def _upsample(place: Place) -> None:
    place.node.op_type = "Resize"
    place.around.enlarging.add(place.node.output[0])


def _resize(place: Place) -> None:
    """Add the attributes that state how the older Resize computed coordinates.

    In mode nearest, the older Resize rounded coordinates up along axes that shrink, and down along others.
    """
    node = place.node
    scales = node.input[1]
    roi = "" if place.around.opset >= SINCE_OPTIONAL_ROI else place.constant(np.zeros(0, np.float32), "roi")
    place.give(coordinate_transformation_mode="asymmetric")
    if place.take("mode", b"nearest") != b"nearest":
        place.give(mode="linear")
    else:
        place.give(mode="nearest")
        known = place.around.constants.get(scales)
        if node.output[0] in place.around.enlarging or (known is not None and (known >= 1).all()):
            place.give(nearest_mode="floor")
        elif known is None:
            raise Refused(f"its scales, '{scales}', are not constant, and mode nearest rounds by them")
        else:
            if (known > 1).any():
                enlarged = place.constant(np.maximum(known, 1).astype(np.float32), "enlarging")
                node.input[0] = place.compute(
                    "Resize", [node.input[0], roi, enlarged], "enlarged", mode="nearest", nearest_mode="floor",
                    coordinate_transformation_mode="asymmetric",
                )  # fmt: skip
                scales = place.constant(np.minimum(known, 1).astype(np.float32), "shrinking")
            place.give(nearest_mode="ceil")
    del node.input[1:]
    node.input.extend([roi, scales])


def _one_of_both(place: Place) -> None:
    """Omit a Resize's scales if sizes are given, and omit an empty region: both are optional in the newer opset."""
    inputs = place.node.input
    if len(inputs) > 3 and inputs[3]:
        inputs[2] = ""
    for i in (1, 2):
        known = place.around.constants.get(inputs[i]) if i < len(inputs) else None
        if known is not None and known.size == 0:
            inputs[i] = ""


def _over_images(place: Place) -> None:
    if place.node.attribute:  # before opset 9, onnxruntime has an operator of this name with other attributes
        raise Refused(f"it has the attribute '{place.node.attribute[0].name}', which opset 9 does not have")


def _in_float32(place: Place) -> None:
    """Cast the operands to float32, the only dtype for which the newer operator's function definition type-checks."""
    dtype, result = place.around.dtype(place.node.input[0]), place.node.output[0]
    if dtype == TensorProto.FLOAT:
        return
    if not dtype:
        raise Refused(f"the dtype of '{place.node.input[0]}' is not known")
    place.node.input[0] = place.compute("Cast", [place.node.input[0]], "float32", to=TensorProto.FLOAT)
    place.node.output[0] = place.name(f"{result}_normalized")
    place.after.append(
        onnx.helper.make_node("Cast", [place.node.output[0]], [result], place.name(f"{result}_cast"), to=dtype)
    )


def _scatter(place: Place) -> None:
    place.node.op_type = "ScatterElements"


def _flattened(place: Place) -> None:
    """Compute along the last axis of a matrix, as the operator did before opset 13.

    The axes of the input before `axis` are merged into rows of the matrix, the axes from `axis` on into columns.
    """
    node = place.node
    axis, rank = place.take("axis", 1), place.around.rank(node.input[0])
    place.give(axis=-1)
    if axis == -1 or (rank is not None and axis == rank - 1):
        return
    data, result = node.input[0], node.output[0]
    shape = place.compute("Shape", [data], "shape")
    node.input[0] = place.compute("Flatten", [data], "flattened", axis=axis)
    node.output[0] = place.name(f"{result}_matrix")
    place.after.append(
        onnx.helper.make_node("Reshape", [node.output[0], shape], [result], place.name(f"{result}_back"))
    )
    place.around.with_empty.add(result)


def _zeros(place: Place) -> None:
    """Set `allowzero` of a Reshape that `_flattened` added, so that a 0 in its target means the size 0."""
    if place.node.output[0] in place.around.with_empty:
        place.give(allowzero=1)


def _roi_align(place: Place) -> None:
    place.give(coordinate_transformation_mode="output_half_pixel")


def _grid_sample(place: Place) -> None:
    mode = place.take("mode")
    if mode is not None:
        place.give(mode={b"bilinear": b"linear", b"bicubic": b"cubic"}.get(mode, mode))


def _dft_axis(place: Place) -> None:
    place.to_input(2, np.array(place.take("axis", 1), np.int64), "axis")


def _scale_of_groups(place: Place) -> None:
    """Expand a GroupNormalization's scale and bias from one element per group to one per channel.

    A node in float64 still computes in float64.
    """
    node = place.node
    groups = next(each.i for each in node.attribute if each.name == "num_groups")
    channels = place.compute("Shape", [node.input[0]], "channels", start=1, end=2)
    count = place.compute("Div", [channels, place.constant(np.array([groups], np.int64), "groups")], "count")
    one, flat = (place.constant(np.array([n], np.int64), what) for n, what in ((1, "one"), (-1, "flat")))
    shape = place.compute("Concat", [one, count], "shape", axis=0)
    for index, what in ((1, "scale"), (2, "bias")):
        if place.around.rank(node.input[index]) not in (None, 1):
            raise Refused(f"its {what}, '{node.input[index]}', does not have one axis")
        column = place.compute("Unsqueeze", [node.input[index], one], f"{what}_column")
        repeated = place.compute("Expand", [column, shape], f"{what}_repeated")
        node.input[index] = place.compute("Reshape", [repeated, flat], what)
    if place.around.dtype(node.input[0]) == TensorProto.DOUBLE:
        place.give(stash_type=TensorProto.DOUBLE)


REDUCTIONS: Final = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSumSquare",
)  # fmt: skip

ADAPTERS: Final[dict[tuple[str, int], Adapter]] = {
    ("BatchNormalization", 9): _spatial,
    ("MeanVarianceNormalization", 9): _over_images,
    ("Upsample", 9): _upsample_scales,
    ("Dropout", 10): _dropout_mask,
    ("Slice", 10): _slice,
    ("TopK", 10): _top_k,
    ("Upsample", 10): _upsample,
    ("Clip", 11): _clip,
    ("Pad", 11): _pad,
    ("Resize", 11): _resize,
    ("Scatter", 11): _scatter,
    ("Dropout", 12): _dropout,
    ("Erf", 13): _floating,
    ("Hardmax", 13): _flattened,
    ("LogSoftmax", 13): _flattened,
    ("ReduceSum", 13): _axes,
    ("Softmax", 13): _flattened,
    ("MeanVarianceNormalization", 13): _in_float32,
    ("Resize", 13): _one_of_both,
    ("Split", 13): _split,
    ("Squeeze", 13): _axes,
    ("Unsqueeze", 13): _axes,
    ("BatchNormalization", 14): _no_statistics,
    ("Reshape", 14): _zeros,
    ("RoiAlign", 16): _roi_align,
    **{(op, 18): _axes for op in REDUCTIONS},
    ("Split", 18): _equal_parts,
    ("DFT", 20): _dft_axis,
    ("GridSample", 20): _grid_sample,
    ("GroupNormalization", 21): _scale_of_groups,
}
# Operator -> the first opset for which onnxruntime does not have a kernel.
LACKING: Final = {
    **dict.fromkeys(
        ("Affine", "Crop", "DynamicSlice", "ImageScaler", "ParametricSoftplus", "Scale", "ScaledTanh"), 10
    ),
    **dict.fromkeys((*RANDOM, "GlobalLpPool", "MaxRoiPool", "RoiAlign"), 22),
}  # fmt: skip
