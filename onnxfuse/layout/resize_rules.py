"""Rules for Resize and Upsample of spatial axes: the fused nodes' functions have Transposes, but the kernel needs none.

The new size is an attribute of the node, as scales or sizes.  If the sizes are computed at run time, the node gets an
operand `like` without elements, whose shape is (0, *spatial).  This operand is a Reshape of an empty constant to the
given sizes, and costs nothing.  A plan for symbolic sizes takes the result's spatial sizes from the shape of `like`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import TensorProto, helper

from onnxfuse.algebra.index_maps import transposed
from onnxfuse.algebra.sizes import Shape, Size, divide
from onnxfuse.ir.attributes import attribute_or_input, int_attribute, ints_attribute, str_attribute
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant
from onnxfuse.ir.serde import node_proto
from onnxfuse.layout.axes import spatial_axes, to_last
from onnxfuse.layout.bodies import body_of_node
from onnxfuse.layout.conversion import NOT_AN_IMAGE, Conversion, Kind, Model, constants_of
from onnxfuse.layout.vectors import in_order
from onnxfuse.layout.writer import ImageCall, Writer, image_rank
from onnxfuse.rewrite.chain_bodies import function_of

FUSION: Final = "resize"
LIKE: Final = "like"  # name of the operand whose shape gives the sizes
MODES: Final = ("nearest", "linear")
COORDINATES: Final = ("half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners")
SYMMETRIC: Final = "half_pixel_symmetric"  # equal to half_pixel if no size is rounded
NO_SCALES: Final = "its scales are computed, or not one for each axis"
MOVED_INTEGERS: Final = frozenset({int(TensorProto.INT8), int(TensorProto.UINT8)})  # also of max_pool's kernels
BEFORE_COORDINATES: Final = 11  # before this opset, coordinates are always asymmetric


@dataclass(frozen=True)
class _Target:
    """The new size of a Resize as attributes of the fused node, or `is_computed` for sizes known at run time only."""

    attributes: Mapping[str, AttributeValue]
    factors: tuple[int, ...] = ()  # scale factors of the spatial axes, if computed sizes are multiples of the image's
    spatial: tuple[int, ...] = ()  # spatial sizes, if they are known although the node's sizes are not constant
    is_computed: bool = False


def resize(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a Resize that keeps batch and channels; scales must be constant, sizes need not be."""
    x = node.inputs[0]
    is_nearest = str_attribute(node, "mode", "nearest") == "nearest"
    dtypes = FUSIBLE_FLOATS | MOVED_INTEGERS if is_nearest else FUSIBLE_FLOATS
    if not image_rank(model.shapes, x) or model.shapes.dtype(x) not in dtypes:
        return NOT_AN_IMAGE
    if reason := _unsupported(model, node):
        return reason
    before, after = model.shapes.shape(x), model.shapes.shape(node.outputs[0])
    if before is None or after is None or before[:2] != after[:2]:
        return "it may resize other axes than the spatial ones"
    target = _target(model, node, before, after)
    if isinstance(target, str):
        return target
    body = _body(model, node, target)
    own = {name: value for name, value in node.attrs.items() if name not in ("axes", "keep_aspect_ratio_policy")}
    own |= {**_coordinates(model, node), **target.attributes}

    def write(writer: Writer) -> None:
        given = {"x": x}
        if target.is_computed:
            given[LIKE] = _empty(writer, node.inputs[3], _places(node, len(before)), model.shapes.dtype(x))
        writer.call(node, ImageCall(FUSION, body, given, own))

    return Conversion(node, Kind.WRAPPED, (0,), (0,), write, fusion=FUSION)


def _unsupported(model: Model, node: Node) -> str:
    """Return why there is no kernel for a Resize, whatever its size; "" if there is one."""
    mode, coordinates = (
        str_attribute(node, name, default)
        for name, default in (("mode", "nearest"), ("coordinate_transformation_mode", "half_pixel"))
    )
    if mode not in MODES:
        return f"its mode is {mode}, neither nearest nor linear"
    if coordinates not in (*COORDINATES, SYMMETRIC):
        return f"its coordinate_transformation_mode is {coordinates}"
    if int_attribute(node, "antialias", 0):
        return "it filters an image that it makes smaller (antialias)"
    return "" if _scales(model, node) or _sizes_of(model, node) is not None else NO_SCALES


def _coordinates(model: Model, node: Node) -> dict[str, AttributeValue]:
    """Return the attributes for the kernel that state which pixels are read, if they differ from the operator's own."""
    if model.graph.opset < BEFORE_COORDINATES:
        smaller = any(scale < 1 for scale in _scales(model, node).values())
        return {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "ceil" if smaller else "floor"}
    is_symmetric = str_attribute(node, "coordinate_transformation_mode", "") == SYMMETRIC
    return {"coordinate_transformation_mode": "half_pixel"} if is_symmetric else {}


def _scales(model: Model, node: Node) -> dict[int, float]:
    """Return the constant scales of a Resize, by axis; empty if there are none, or not one per axis."""
    found, axes = attribute_or_input(model.graph, node, "scales"), _axes(node, model.shapes.rank(node.inputs[0]) or 0)
    if not isinstance(found, list) or len(found) != len(axes):
        return {}
    scales = [float(scale) for scale in found if isinstance(scale, int | float)]
    return dict(zip(axes, scales, strict=True)) if len(scales) == len(axes) else {}


def _sizes_of(model: Model, node: Node) -> Tensor | None:
    """Return the `sizes` input of a Resize; None if it has scales."""
    is_given = len(node.inputs) > 3 and node.inputs[3].name and model.graph.opset >= BEFORE_COORDINATES
    return node.inputs[3] if is_given else None


def _axes(node: Node, rank: int) -> list[int]:
    return [axis % rank for axis in ints_attribute(node, "axes", range(rank))]


def _places(node: Node, rank: int) -> dict[int, int]:
    """Return, by axis, the index of the axis's size in the list of sizes of a Resize, which can omit axes."""
    return {axis: place for place, axis in enumerate(_axes(node, rank))}


def _target(model: Model, node: Node, before: Shape, after: Shape) -> _Target | str:
    """Return the new size of a Resize in channels-last form, or why there is no kernel for it."""
    rank, is_symmetric = len(before), str_attribute(node, "coordinate_transformation_mode", "") == SYMMETRIC
    if scales := _scales(model, node):
        exact = [scales.get(axis, 1.0) for axis in to_last(rank)]
        if is_symmetric and not all(scale.is_integer() for scale in exact):
            return f"its coordinate_transformation_mode is {SYMMETRIC}, and its scales are not integers"
        is_rounded = model.graph.opset < BEFORE_COORDINATES and str_attribute(node, "mode", "nearest") == "nearest"
        if is_rounded and min(exact) < 1 < max(exact):
            return "it makes one axis larger and another smaller, whose pixels its opset rounds in two ways"
        return _Target({"scales": exact})
    policy = str_attribute(node, "keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        return f"it keeps the ratio of its sizes (keep_aspect_ratio_policy is {policy})"
    if not spatial_axes(rank) <= _places(node, rank).keys():
        return "it does not resize every spatial axis"
    factors = [divide(new, old) for new, old in zip(after[2:], before[2:], strict=True)]
    is_multiple = all(isinstance(factor, int) and factor > 0 for factor in factors)
    if is_symmetric and not is_multiple:
        return (
            f"its coordinate_transformation_mode is {SYMMETRIC}, and its sizes are not multiples of those of its image"
        )
    sizes = _sizes_of(model, node)
    return _sizes(before, after, tuple(factors) if is_multiple else (), sizes is not None and is_constant(sizes))


def _sizes(before: Shape, after: Shape, factors: tuple[Size | None, ...], is_constant: bool) -> _Target:
    """Return the target of a Resize by sizes: known sizes, multiples of the image's sizes, or computed ones.

    In the attribute, a 0 stands for an unknown batch or channel size, which a Resize keeps.
    """
    perm, outer = to_last(len(before)), [size if isinstance(size, int) else 0 for size in before[:2]]
    known = tuple(size for size in after[2:] if isinstance(size, int))
    if len(known) == len(after) - 2:
        own: dict[str, AttributeValue] = {"sizes": list(transposed([*outer, *known], perm))}
        return _Target(own, spatial=() if is_constant else known)
    found = tuple(factor for factor in factors if isinstance(factor, int))
    if found:
        return _Target({"scales": list(transposed([1.0, 1.0, *map(float, found)], perm))}, factors=found)
    return _Target({}, is_computed=True)


def _empty(writer: Writer, sizes: Tensor, places: Mapping[int, int], dtype: int) -> Tensor:
    """Return an empty tensor of shape (0, *spatial); the spatial sizes are those of the Resize."""
    graph, spatial = writer.graph, [place for axis, place in sorted(places.items()) if axis > 1]
    target = in_order(writer, sizes, [None, *spatial])
    empty = graph.constant(f"{sizes.name}/none", np.zeros(0, helper.tensor_dtype_to_np_dtype(dtype)))
    return writer.computed_by("Reshape", [empty, target], f"{sizes.name}/{LIKE}")


# --- bodies ------------------------------------------------------------------------------------------------------


def _body(model: Model, node: Node, target: _Target) -> onnx.FunctionProto:
    """Return the body (ONNX function) of the fused node: the Resize, and nodes that compute its other inputs."""
    proto, rank = node_proto(model.graph, node), model.shapes.rank(node.inputs[0]) or 0
    del proto.output[1:]
    before: list[onnx.NodeProto] = []
    if model.graph.opset >= BEFORE_COORDINATES and node.inputs[1].name and not is_constant(node.inputs[1]):
        before.append(_constant("roi", np.zeros(0, np.float32)))  # only the mode tf_crop_and_resize reads the roi
        proto.input[1] = "roi"
    if target.factors:
        scales = np.array([1.0, 1.0, *target.factors], np.float32)[_axes(node, rank)]
        before.append(_constant("scales", scales))
        proto.input[2] = "scales"
        del proto.input[3:]
    elif target.spatial or target.is_computed:
        before += _nodes_of_sizes(_axes(node, rank), target.spatial, rank)
        proto.input[3] = "sizes"
    # The scales of a Resize with sizes must be empty.
    if len(proto.input) > 3 and proto.input[2] and not is_constant(node.inputs[2]):
        before.append(_constant("scales", np.zeros(0, np.float32)))
        proto.input[2] = "scales"
    made = {name: name for each in before for name in each.output}
    constants = constants_of(model, node, {t.name for t in node.inputs}.difference(proto.input) | made.keys())
    found = body_of_node(proto, {proto.input[0]: "x", **made}, constants, model.graph.opset)
    operands = ["x", LIKE] if target.is_computed else ["x"]
    return function_of(operands, [*before, *found.node], model.graph.opset)


def _nodes_of_sizes(axes: Sequence[int], spatial: Sequence[int], rank: int) -> list[onnx.NodeProto]:
    """Return nodes that compute `sizes`: the sizes of the Resize's result along `axes`.

    The numbers of images and channels are those of x.  The spatial sizes are `spatial` or, if it is empty, those of the
    channels-last operand LIKE.
    """
    shapes = [
        helper.make_node("Shape", ["x"], ["x_shape"]),
        _constant("first", np.arange(2)),
        helper.make_node("Gather", ["x_shape", "first"], ["outer"], axis=0),
    ]
    if spatial:
        inner = [_constant("spatial", np.array(spatial))]
    else:
        inner = [
            helper.make_node("Shape", [LIKE], ["like_shape"]),
            _constant("behind", np.arange(1, rank - 1)),
            helper.make_node("Gather", ["like_shape", "behind"], ["spatial"], axis=0),
        ]
    joined = helper.make_node("Concat", ["outer", "spatial"], ["all_sizes"], axis=0)
    taken = [_constant("axes", np.array(axes)), helper.make_node("Gather", ["all_sizes", "axes"], ["sizes"], axis=0)]
    return [*shapes, *inner, joined, *taken]


def _constant(name: str, value: np.ndarray[tuple[int], np.dtype[np.generic]]) -> onnx.NodeProto:
    exact = value.astype(np.int64) if value.dtype.kind == "i" else value
    return helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(exact))
