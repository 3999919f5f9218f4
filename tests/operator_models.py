"""Small models of every operator: the forms that older opsets have, and the cases of onnx's own backend tests."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from runtimes import open_on_cpu

from onnxfuse.ir.attributes import schema

FLOATS: Final = np.random.default_rng(0).standard_normal((2, 4, 6, 5)).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A model of few nodes, its inputs, and the opsets that have its form."""

    lines: str
    opsets: range
    feeds: Mapping[str, np.ndarray]

    def model(self, opset: int) -> onnx.ModelProto:
        written = [onnx.parser.parse_node(line.strip()) for line in self.lines.split(";")]
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in self.feeds.items()
        ]
        results = [onnx.ValueInfoProto(name=name) for name in written[-1].output if name]
        graph = helper.make_graph(written, "g", inputs, results)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def case(first: int, last: int, lines: str, **feeds: Any) -> Case:
    return Case(lines, range(first, last + 1), {name: np.asarray(value) for name, value in feeds.items()})


X3, X4 = FLOATS[0], FLOATS
IMAGE = np.arange(48, dtype=np.float32).reshape(1, 2, 4, 6) % 17
ROWS = "y = {op} <axes = [{axes}], keepdims = {keep}> (x)"
REDUCTIONS = ["L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"]
ROIS = np.array([[0, 0, 3, 3], [1, 0.5, 4.5, 3.25]], np.float32)


def old_forms() -> Iterator[Case]:
    """Yield models of operators whose form or meaning a later opset changes."""
    for op in ("Softmax", "LogSoftmax", "Hardmax"):
        for x in (X4, X3, X3[0], X3[0, 0]):
            yield case(7, 12, f"y = {op} (x)", x=x) if x.ndim > 1 else case(7, 12, f"y = {op} <axis = 0> (x)", x=x)
            yield from (case(7, 12, f"y = {op} <axis = {axis}> (x)", x=x) for axis in range(x.ndim))
            yield from (case(11, 12, f"y = {op} <axis = {-axis - 1}> (x)", x=x) for axis in range(x.ndim))
        yield case(7, 12, f"h = Reshape (x, s); y = {op} <axis = 2> (h)", x=X4, s=[0, 4, -1, 3])
    for op in REDUCTIONS:
        x = np.abs(X3) + 0.5
        for axes, keep in (("1", 1), ("0, 2", 0), ("0, 1, 2", 1)):
            yield case(7, 17, ROWS.format(op=f"Reduce{op}", axes=axes, keep=keep), x=x)
        yield case(11, 17, ROWS.format(op=f"Reduce{op}", axes="-1", keep=1), x=x)
        yield case(7, 17, f"y = Reduce{op} (x)", x=x)
        yield case(18, 24, f"y = Reduce{op} <keepdims = 0> (x, axes)", x=x, axes=[1])
    for axes, keep in (("1", 1), ("0, 2", 0)):
        yield case(7, 12, ROWS.format(op="ReduceSum", axes=axes, keep=keep), x=X3)
    yield case(11, 12, ROWS.format(op="ReduceSum", axes="-2", keep=0), x=X3)
    yield case(7, 12, "y = ReduceSum (x)", x=X3)
    yield case(7, 12, "y = Squeeze <axes = [0, 2]> (x)", x=X3[None, :, None])
    yield case(7, 12, "y = Squeeze (x)", x=X3[None, :, None])
    yield case(11, 12, "y = Squeeze <axes = [-3]> (x)", x=X3[None, :, None])
    yield case(7, 12, "y = Unsqueeze <axes = [0, 3]> (x)", x=X3)
    yield case(11, 12, "y = Unsqueeze <axes = [-1]> (x)", x=X3)
    yield case(7, 12, "a, b = Split <axis = 1, split = [4, 2]> (x); y = Neg (b)", x=X3)
    yield case(7, 17, "a, b, c = Split <axis = 1> (x); y, z, w = Split <axis = 2> (a)", x=FLOATS[:, :3])
    yield case(13, 17, "y, z = Split <axis = 1> (x, sizes)", x=X3, sizes=[1, 5])
    yield case(7, 9, "y = Slice <axes = [1, 2], starts = [1, 0], ends = [-1, 1000]> (x)", x=X3)
    yield case(7, 9, "y = Slice <starts = [1, 2], ends = [3, 6]> (x)", x=X3)
    yield case(7, 9, "y, z = TopK <k = 3> (x)", x=X3)
    yield case(7, 9, "y, z = TopK <k = 2, axis = 1> (x)", x=X3)
    yield case(10, 10, "y, z = TopK <axis = 1> (x, k)", x=X3, k=[2])
    yield case(7, 11, "y = Dropout (x)", x=X3)
    yield case(7, 11, "h, mask = Dropout <ratio = 0.25> (x); y = Neg (h)", x=X3)
    for bounds in ("<min = -0.5, max = 0.25>", "<min = -0.5>", "<max = 0.25>", "", "<min = -1e30>"):
        special = np.array([np.inf, -np.inf, np.nan, 0, 1e10, -1e38], np.float32)
        yield case(7, 10, f"y = Clip {bounds} (x)", x=X3)
        yield case(7, 10, f"y = Clip {bounds} (x)", x=special)
        yield case(7, 10, f"y = Clip {bounds} (x)", x=np.array([np.inf, -np.inf, np.nan, 65504, 0], np.float16))
        yield case(7, 10, f"y = Clip {bounds} (x)", x=X3.astype(np.float16))
        yield case(7, 10, f"y = Clip {bounds} (x)", x=special.astype(np.float64) * 1e10)
    for form in ("value = 2.5", "value = -0.0", 'mode = "edge"', 'mode = "reflect"', 'mode = "constant"'):
        yield case(7, 10, f"y = Pad <pads = [0, 0, 1, 2, 0, 0, 3, 1], {form}> (x)", x=X4)
    yield case(7, 10, "y = Pad <pads = [0, -1, 1, 0, 0, 2], value = 1.5> (x)", x=X3)
    yield case(7, 10, "y = Pad <pads = [0, 1, 0, 1], value = 1.5> (x)", x=X3[0].astype(np.float64))
    yield case(7, 10, "y = Pad <pads = [0, 1, 0, 1], value = 1.5> (x)", x=X3[0].astype(np.float16))
    yield case(9, 10, "y = Scatter <axis = 1> (x, i, u)", x=X3[0], i=[[0, 3], [1, 2]], u=X3[1, :2, :2])
    statistics = {"s": np.array([1, 2, 3, 4.5], np.float32), "m": np.zeros(4, np.float32)}
    yield case(7, 8, "y = BatchNormalization <momentum = 0.5> (x, s, s, m, s)", x=X4, **statistics)
    yield case(7, 8, "y = BatchNormalization <spatial = 1> (x, s, s, m, s)", x=X4, **statistics)
    yield case(9, 13, "y = BatchNormalization <epsilon = 0.1> (x, s, s, m, s)", x=X4, **statistics)
    yield from resizes()
    for form in (
        "",
        '<mode = "max">',
        "<sampling_ratio = 2, spatial_scale = 0.5>",
        "<output_height = 2, output_width = 3>",
    ):
        yield case(10, 21, f"y = RoiAlign {form} (x, rois, i)", x=IMAGE, rois=ROIS, i=[0, 0])
    for form in ("output_half_pixel", "half_pixel"):
        line = f'y = RoiAlign <coordinate_transformation_mode = "{form}"> (x, rois, i)'
        yield case(16, 21, line, x=IMAGE, rois=ROIS, i=[0, 0])
    signal, complex_signal = X3[..., None], X4[..., :2]
    for form in ("", "<axis = 1>", "<axis = 2>", "<axis = 1, onesided = 1>"):
        yield case(17, 19, f"y = DFT {form} (x)", x=signal)
        yield case(17, 19, f"y = DFT {form} (x, n)", x=signal, n=np.int64(4))
    yield case(17, 19, "y = DFT <inverse = 1> (x)", x=complex_signal)
    for mode in ("", 'mode = "bilinear",', 'mode = "nearest",', 'mode = "bicubic",'):
        for rest in ("align_corners = 0", 'align_corners = 1, padding_mode = "border"', 'padding_mode = "reflection"'):
            grid = np.random.default_rng(1).uniform(-1.3, 1.3, (1, 3, 5, 2)).astype(np.float32)
            yield case(16, 19, f"y = GridSample <{mode} {rest}> (x, grid)", x=IMAGE, grid=grid)
    for dtype in (np.float32, np.float16, np.float64):
        weights = {"s": np.array([1, 3], dtype), "b": np.array([0.5, -2], dtype)}
        yield case(
            18, 20, "y = GroupNormalization <num_groups = 2> (x, s, b)", x=X4.astype(dtype) + dtype(3), **weights
        )
        line = "y = GroupNormalization <num_groups = 2, epsilon = 0.1> (x, s, b)"
        yield case(18, 20, line, x=X3[None].astype(dtype), **weights)
    yield case(7, 24, "y = DepthToSpace <blocksize = 2> (x)", x=X4)
    yield case(7, 24, "y = GlobalLpPool <p = 3> (x)", x=X4)
    yield case(
        7, 24, "y = MaxRoiPool <pooled_shape = [2, 2]> (x, rois)", x=IMAGE, rois=np.array([[0, 0, 0, 3, 3]], np.float32)
    )
    yield case(9, 24, "y = Cast <to = 7> (x)", x=np.array([0.9, -1.5, 2.5, 1e6], np.float32))
    yield case(9, 24, "y = Cast <to = 10> (x)", x=np.array([0.9, np.inf, 7e4, 1e-8, np.nan], np.float32))
    yield case(13, 24, "h = Cast <to = 16> (x); y = Cast <to = 1> (h)", x=np.array([0.9, np.inf, 7e4], np.float32))
    yield case(9, 24, "y = Cast <to = 8> (x)", x=np.array([0.5, -2, 1e10], np.float32))
    yield case(7, 24, "y = Cast <to = 9> (x)", x=np.array([0.5, -2, 0, np.nan], np.float32))
    yield case(19, 24, "h = Cast <to = 17> (x); y = Cast <to = 1> (h)", x=np.array([0.9, 1e4, -3], np.float32))
    yield case(7, 24, "y = ArgMax <axis = 0, keepdims = 0> (x)", x=np.ones((3, 2), np.float32))
    yield case(7, 24, "y = ArgMin <axis = 1> (x)", x=np.ones((3, 2), np.float32))


def resizes() -> Iterator[Case]:
    """Yield Upsample and Resize as they were before coordinates were attributes."""
    for mode in ("nearest", "linear"):
        for scales in ([1, 1, 2, 2], [1, 1, 3, 1], [1, 1, 1.5, 2.25], [1, 1, 1, 1]):
            text = ", ".join(f"{scale:.2f}" for scale in scales)
            yield case(7, 8, f'y = Upsample <mode = "{mode}", scales = [{text}]> (x)', x=IMAGE)
            line = f's = Constant <value = float[4] {{{text}}}> (); y = OP <mode = "{mode}"> (x, s)'
            yield case(9, 9, line.replace("OP", "Upsample"), x=IMAGE)
            yield case(9, 9, f'y = Upsample <mode = "{mode}"> (x, s)', x=IMAGE, s=np.array(scales, np.float32))
            yield case(10, 10, line.replace("OP", "Resize"), x=IMAGE)
        for scales in ([1, 1, 0.5, 0.5], [1, 1, 0.6, 0.3], [1, 1, 2, 0.5], [1, 1, 0.7, 1.7], [2, 0.5, 2, 0.5]):
            if mode == "linear" and scales[0] != 1:
                continue
            text = ", ".join(f"{scale:.2f}" for scale in scales)
            yield case(
                10, 10, f's = Constant <value = float[4] {{{text}}}> (); y = Resize <mode = "{mode}"> (x, s)', x=IMAGE
            )
        yield case(7, 8, f'y = Upsample <mode = "{mode}", scales = [2.0, 3.0]> (x)', x=IMAGE[0, 0])
    yield case(10, 10, 'y = Resize <mode = "linear"> (x, s)', x=IMAGE, s=np.array([1, 1, 0.5, 2], np.float32))
    for form in ("", '<mode = "linear", coordinate_transformation_mode = "align_corners">', '<mode = "cubic">',
                 '<nearest_mode = "ceil">', '<mode = "linear", coordinate_transformation_mode = "pytorch_half_pixel">',
                 '<mode = "linear", coordinate_transformation_mode = "asymmetric">'):  # fmt: skip
        s, roi = np.array([1, 1, 0.7, 2.2], np.float32), np.zeros(0, np.float32)
        yield case(11, 24, f"y = Resize {form} (x, roi, s)", x=IMAGE, roi=roi, s=s)
        yield case(13, 24, f"y = Resize {form} (x, , s)", x=IMAGE, s=s)
        yield case(11, 12, f"y = Resize {form} (x, roi, none, sizes)", x=IMAGE, roi=roi, none=roi, sizes=[1, 2, 7, 3])
        yield case(13, 24, f"y = Resize {form} (x, , , sizes)", x=IMAGE, sizes=[1, 2, 7, 3])


@functools.cache
def backend_cases() -> dict[str, list[tuple[onnx.ModelProto, dict[str, Any]]]]:
    """Return the models of one node among onnx's backend tests, by operator, with inputs."""
    found = defaultdict[str, list[tuple[onnx.ModelProto, dict[str, Any]]]](list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collected = collect_testcases("")
    for each in collected:
        model = each.model
        if model is None or model.functions or len(model.graph.node) != 1 or model.graph.node[0].domain:
            continue
        names = [value.name for value in model.graph.input]
        for inputs, _ in each.data_sets:
            arrays = [numpy_helper.to_array(one) if isinstance(one, TensorProto) else one for one in inputs]
            feeds = {n: np.asarray(a) if isinstance(a, np.generic) else a for n, a in zip(names, arrays, strict=True)}
            found[model.graph.node[0].op_type].append((model, feeds))
    return found


def in_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto | None:
    """Return a model of one node with another number of its opset; None if that lacks the form of its node."""
    node, found = model.graph.node[0], schema(model.graph.node[0].op_type, opset)
    if (
        found is None or found.deprecated or not all(each.name in found.attributes for each in node.attribute)
        or not found.min_input <= len(node.input) <= found.max_input or len(node.output) > found.max_output
    ):  # fmt: skip
        return None
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    changed.opset_import[0].version = opset
    changed.ir_version = 10
    with suppress(onnx.checker.ValidationError):  # of bodies, and of dtypes that are newer
        onnx.checker.check_model(changed)
        return changed
    return None


def run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any] | str:
    """Return what onnxruntime computes, or why it does not; inputs are copied, because it overwrites statistics."""
    try:
        return open_on_cpu(model, optimize=False).run(None, copy.deepcopy(dict(feeds)))
    except Exception as error:  # onnxruntime has no public base class of its errors
        return str(error).splitlines()[0]
