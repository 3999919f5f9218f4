"""Recognise what onnxruntime 1.32 leaves undetermined, so that two models may differ in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_slice import Slice_10
from overflow import NEAR_LARGEST, OPERATORS
from sessions import Session, outputs_of

from onnxfuse.ir.execution_order import in_execution_order
from onnxfuse.ir.extract import ancestors, extract
from onnxfuse.ir.graph import OPSET_OF_UNCUT_SLICES
from onnxfuse.ir.protos import OneNode, defined_names, graphs, nodes, opset_of, tensors
from onnxfuse.ir.slices import SLICE_INPUTS_SINCE
from onnxfuse.verify.cpu_session import input_of, open_session, run

SMALL = 1e-3  # the largest relative difference that counts as small
NORMS_OF_GROUPS = ("InstanceNormalization", "GroupNormalization")
WINDOWS = ("AveragePool", "LpPool", "MaxPool")
QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
MAX_SCALE = 2.0**32  # products of two are finite, and their quotients by small scales, too
MAX_OTHER_STEPS = 0.02  # of the values of a tensor
# Parts of errors from nodes that onnxruntime's optimizations write: of a branch whose quantized weight is outside, of
# a norm whose data broadcasts to its scale, of a norm that begins with a Cast, of a norm whose parts have readers
# outside, of a Reshape with -1 in place of a computed size, and of int8 that was moved after a Reshape or Transpose
# with its zero point, which another optimization makes uint8 if the same graph holds it.
ERRORS_OF_REWRITES = (
    "TransposeDQWeightsForMatMulNBits Missing required ",  # a weight or a scale of an outer graph
    "LayerNormFusion/' Status Message: Scale and (optional) bias must match",
    "(LayerNormalization) bound to different types",
    "Failed to find kernel for LayerNormalization(1)",  # whose data is bfloat16 or float64, and whose scale is float32
    "is not a graph input, initializer, or output of a previous node",
    "Product cannot be 0 in combination with -1",
    "output_dtype INT8 does not match y_zero_point type UINT8",
    "No Op registered for Round with domain_version of 10",  # by which it quantizes the bias of a product
)
LOST_VALUE = "OrtValue::Get()"  # in the error of a node that reads a value which nothing has made
# The error of inference at a node that kernels run: a reduction of a scalar, along any axis.
REDUCES_SCALAR = "axis must be in [-rank, rank-1]. Input rank was 0"
# The error of inference at a node whose kernel ends before it checks the axis, if there are no elements.
MISSING_AXIS = "(Softmax) [ShapeInferenceError] 'axis' must be in"


def joins_unequal_sizes(model: onnx.ModelProto, outputs: Sequence[str], feeds: Mapping[str, Any]) -> bool:
    """Return whether outputs depend on a Concat whose operands have unequal sizes along the axes that it does not join.

    ONNX does not allow that.  onnxruntime takes it if an operand is empty, and leaves elements of the result unwritten.
    """
    part = extract(in_execution_order(model), outputs)
    if not any(node.op_type == "Concat" for node in nodes(part.graph)):
        return False
    has_steps = any(opset.domain == "" and opset.version >= SLICE_INPUTS_SINCE for opset in part.opset_import)
    try:
        with np.errstate(all="ignore"):
            microsoft = {node.op_type for node in nodes(part.graph) if node.domain == ByOnnxruntime.op_domain}
            known = [each for each in OPERATORS if each.__name__ not in microsoft]
            others = [*known, *(type(name, (ByOnnxruntime,), {}) for name in sorted(microsoft))]
            ReferenceEvaluator(part, new_ops=[Slice, *others] if has_steps else others).run(None, dict(feeds))
    except Exception as error:  # whatever NumPy raises
        return "array dimensions except for the concatenation axis must match" in str(error)
    return False


class ByOnnxruntime(OpRun):
    """An operator of onnxruntime's own domain, which the evaluator lacks."""

    op_domain = "com.microsoft"

    def _run(self, *values: Any, **attributes: Any) -> Any:
        names = [f"x{i}" if value is not None else "" for i, value in enumerate(values)]
        outputs = [f"y{i}" for i in range(len(self.onnx_node.output))]
        node = onnx.NodeProto(op_type=self.onnx_node.op_type, domain=self.op_domain, input=names, output=outputs)
        node.attribute.extend(self.onnx_node.attribute)
        feeds = {name: value for name, value in zip(names, values, strict=True) if name}
        inputs = [input_of(name, value) for name, value in feeds.items()]
        graph = helper.make_graph([node], "node", inputs, [onnx.ValueInfoProto(name=name) for name in outputs])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(self.op_domain, 1)]
        return tuple(run(open_session(helper.make_model(graph, opset_imports=opsets, ir_version=8)), feeds).values())


class Slice(Slice_10):  # the evaluator finds it by the name of the operator
    """Slice as onnxruntime's kernel reads it.

    A backward one to the largest integer goes to the first element, which is empty in ONNX, and one that starts before
    the first element takes that element, which is empty in NumPy.
    """

    op_domain = ""

    def _run(self, data: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
        if steps is not None:
            sizes = np.array(data.shape)[range(len(starts)) if axes is None else axes]
            starts = np.where(steps < 0, np.maximum(starts, -sizes), starts)
            ends = np.where(_is_open(ends, steps), np.iinfo(np.int64).min, ends)
        return super()._run(data, starts, ends, axes, steps)


def relies_on_empty_slices(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> bool:
    """Return whether onnxruntime refuses the model once its backward Slices are written as its own kernel reads them.

    It takes such a Slice for empty when it infers shapes, as above, and so accepts in a branch that is not run what no
    run could compute: the sum of a Slice that has two rows and a tensor that has none.
    """
    settled, count = onnx.ModelProto(), 0
    settled.CopyFrom(model)
    constants = _constants(settled.graph)
    for node in nodes(settled.graph):
        if node.op_type == "Slice" and len(node.input) > 4:
            ends, steps = (constants.get(node.input[i], np.zeros(0)) for i in (2, 4))
            if ends.shape == steps.shape and (is_open := _is_open(ends, steps)).any():
                count += 1
                node.input[2] = f"settled::{count}"
                new = np.where(is_open, np.iinfo(ends.dtype).min, ends)
                settled.graph.initializer.append(numpy_helper.from_array(new, node.input[2]))
    if not count:
        return False
    try:
        run(open_session(settled, None, optimize=False), feeds)
    except Exception:  # onnxruntime has no public base class of its errors
        return True
    return False


def expands_to_several_axes(model: onnx.ModelProto, error: str) -> bool:
    """Return whether onnxruntime refuses an Expand for sizes that have other axes than one, which ONNX requires.

    It runs such an Expand where it infers nothing of what is expanded, as behind a Reshape to what a Cast computes.
    """
    ranks = {name: value.ndim for name, value in _constants(model.graph).items()}
    for node in nodes(in_execution_order(model).graph):
        if node.op_type in ("Cast", "Identity") and node.input[0] in ranks:
            ranks[node.output[0]] = ranks[node.input[0]]
        if node.op_type == "Expand" and ranks.get(node.input[1], 1) != 1:
            return "'shape' input must be 1D tensor" in error
    return False


def reuses_memory_of_a_slice(optimized: onnx.ModelProto, error: str) -> bool:
    """Return whether onnxruntime writes to memory that is too small, which a Slice of opset 10 had.

    In this opset its inference, which is onnx's, gives a Slice the named sizes of its input (900004731).
    """
    every = nodes(optimized.graph, *optimized.functions)
    is_cut = opset_of(optimized) == OPSET_OF_UNCUT_SLICES and any(node.op_type == "Slice" for node in every)
    return is_cut and "OpKernelContext::OutputMLValue" in error


def confuses_optimizations(optimized: onnx.ModelProto, feeds: Mapping[str, Any], error: str) -> bool:
    """Return whether onnxruntime's optimizations are known to break the nodes of a model, whose session gave an error.

    Its LayerNormFusion reads sqrt(var + epsilon) / (x - mean) as the inverse, mean - x as x - mean, and the power
    pow(2, x) as pow(x, 2).  It takes an Expand of one element to no elements for one that does nothing, if the target
    is constant or the Shape of a tensor that it knows to be empty (seed 1010018022).  Its ReshapeFusion writes -1 for a
    size that is computed, which Reshape refuses beside the size of an empty axis.  Its MatmulTransposeFusion crashes in
    float16 where a Transpose moves the first axis.  Its MatMulScaleFusion divides the product by 0 in place of the
    operand, whose elements would be infinite (seed 1030048497).  It makes a MatMulIntegerToFloat, which takes scales of
    columns alone, of a weight with scales of blocks (seed 1062003722), and a MatMulNBits without the zero point of a
    weight in a branch, if the graph around it holds that (seed 1063003362).
    """
    if any(part in error for part in ERRORS_OF_REWRITES):
        return True
    if has_outer_zero_points(optimized):
        return True
    if "while running MatMulIntegerToFloat node" in error and has_scales_of_blocks(optimized):
        return True
    has_nothing = any(np.size(each) == 0 for each in feeds.values())
    every = list(nodes(optimized.graph, *optimized.functions))
    made = {name: node.op_type for node in every for name in node.output}
    held = {name: value for part in (optimized.graph, *optimized.functions) for name, value in _constants(part).items()}
    has_products = any(node.op_type == "MatMul" for node in every)

    def is_confusing(node: onnx.NodeProto) -> bool:
        match node.op_type, *node.input:
            case "Reshape", _, target:
                return has_nothing and made.get(target) == "Concat"
            case "Div", root, divisor:
                return made.get(root) == "Sqrt" or (has_products and not np.all(held.get(divisor, 1)))
            case "Sub", mean, _:
                return made.get(mean) == "ReduceMean"
            case "Pow", base, _:
                return base in held
            case "Expand", _, shape:
                return 0 in held.get(shape, ()) or made.get(shape) == "Shape"
            case "Transpose", _:
                moves_first = any(each.name == "perm" and each.ints[0] != 0 for each in node.attribute)
                return "SIGSEGV" in error and has_products and moves_first
        return False

    return any(map(is_confusing, every))


def has_scales_of_blocks(model: onnx.ModelProto) -> bool:
    """Return whether a DequantizeLinear has a scale for each block."""
    every = nodes(model.graph, *model.functions)
    return any(a.name == "block_size" and a.i for node in every if "Dequantize" in node.op_type for a in node.attribute)


def has_outer_zero_points(model: onnx.ModelProto) -> bool:
    """Return whether a DequantizeLinear in a body reads the zero point of a graph around it."""
    bodies = [part for part in graphs(model.graph, *model.functions) if isinstance(part, onnx.GraphProto)][1:]
    return any(
        node.op_type == "DequantizeLinear" and len(node.input) > 2 and node.input[2] not in defined_names(body)
        for body in bodies for node in body.node
    )  # fmt: skip


def pools_nothing(model: onnx.ModelProto, feeds: Mapping[str, Any], error: str) -> bool:
    """Return whether onnxruntime refuses a pool of no channels, and the model has one of integers, which it runs."""
    is_pool = any(node.op_type.startswith("QLinear") and node.op_type.endswith("Pool") for node in nodes(model.graph))
    return is_pool and "PoolAttributes::SetOutputSize" in error and any(np.size(each) == 0 for each in feeds.values())


def has_lost_value(model: onnx.ModelProto, feeds: Mapping[str, Any], error: str) -> bool:
    """Return whether onnxruntime drops a value that a Loop reads, and in the original by its optimizations, too.

    It removes Casts that follow each other, also those whose results a body reads (seed 1120010330).
    """
    if LOST_VALUE not in error:
        return False
    session = Session(model, optimize=True)
    return outputs_of(session, dict(feeds)) is None and LOST_VALUE in session.error


def has_matrix_as_scale(model: onnx.ModelProto, error: str) -> bool:
    """Return whether onnxruntime refuses a QLinearSoftmax for the axes of its scale, and in the original too.

    It looks at a constant scale alone.  Its own optimizations fold a computed one, as onnxfuse does (seed 1110047551).
    """
    said = "BuildLookupTableIfFixed"
    return said in error and said in Session(model, optimize=True).error


def hides_nan(model: onnx.ModelProto) -> bool:
    """Return whether a model looks for NaN, and so may give a number in the place of one."""
    return any(node.op_type == "IsNaN" for node in nodes(model.graph, *model.functions))


def never_runs(model: onnx.ModelProto, feeds: Mapping[str, Any], error: str) -> bool:
    """Return whether onnxruntime refuses what a Loop would compute, and the model or a caller asks for no iteration.

    It runs such a model if it infers nothing of the body's tensors.
    """
    counts = {node.input[0] for node in nodes(model.graph) if node.op_type == "Loop"}
    known = {**_constants(model.graph), **feeds}
    return "Incompatible dimensions" in error and any(
        np.size(v) == 1 and not v for n, v in known.items() if n in counts
    )


def bounds_masks(optimized: onnx.ModelProto, half: str | None) -> bool:
    """Return whether a conversion to half precision bounds masks by its lowest number (docs/half.md), -inf among them.

    Rows that are masked everywhere by -inf then have equal weights in place of NaN.
    """
    if half is None:
        return False
    lowest = float(np.float32(ml_dtypes.finfo(half).min))
    held = tensors(optimized.graph, *optimized.functions)
    return any((numpy_helper.to_array(t) == lowest).any() for t in held if t.data_type == TensorProto.FLOAT)


def broadcasts_data_to_slopes(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> bool:
    """Return whether a PRelu has slopes that do not broadcast to its data, which ONNX requires.

    onnxruntime's kernel broadcasts the data, but its inference gives the result the shape of the data, and plans memory
    by that unless the result is an output.
    """
    prelus = [node for node in in_execution_order(model).graph.node if node.op_type == "PRelu"]
    found = _values(model, [name for node in prelus for name in (node.input[0], node.output[0])], feeds)
    return any(np.shape(found[node.input[0]]) != np.shape(found[node.output[0]]) for node in prelus if found)


def has_windows_beyond_data(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> bool:
    """Return whether the window of a pool is larger than its padded data, so that ONNX gives the result no size.

    onnxruntime divides the negative difference towards 0: with a stride of 2, a window of 2 has a result in 1 element.
    """
    pools = [node for node in in_execution_order(model).graph.node if node.op_type in WINDOWS]
    found = _values(model, [node.input[0] for node in pools], feeds)
    for node in pools if found else ():
        given = {each.name: list(each.ints) for each in node.attribute if each.ints}
        if any(each.name == "auto_pad" and each.s.startswith(b"SAME") for each in node.attribute):
            continue
        kernel = np.array(given["kernel_shape"])
        reach = (kernel - 1) * given.get("dilations", [1] * kernel.size) + 1
        padded = np.array(np.shape(found[node.input[0]])[2:]) + np.reshape(given.get("pads", [0, 0]), (2, -1)).sum(0)
        if (reach > padded).any():
            return True
    return False


def normalizes_other_channels(model: onnx.ModelProto, feeds: Mapping[str, Any], error: str) -> bool:
    """Return whether a GroupNormalization gets other channels than its scale has, and onnxruntime refuses them.

    ONNX requires a scale for each channel.  onnxruntime checks that only if there are elements, and uses a scale of one
    element for all channels.
    """
    held = _constants(model.graph)
    norms = [node for node in nodes(model.graph, *model.functions) if node.op_type == "GroupNormalization"]
    shares_scale = any(np.size(held.get(node.input[1])) == 1 for node in norms if node.input[1] in held)
    channels = [size for each in feeds.values() for size in np.shape(each)[1:2]]
    are_other = 0 in channels or (shares_scale and any(size > 1 for size in channels))
    return bool(norms) and are_other and "Got invalid dimensions for input" in error


def _values(model: onnx.ModelProto, names: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors of the main graph in a run of the model; none if it does not run."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    shown.graph.ClearField("output")
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names))
    try:
        return run(open_session(shown, None, optimize=False), feeds)
    except Exception:  # onnxruntime has no public base class of its errors
        return {}


def without_false_shapes(
    model: onnx.ModelProto, original: onnx.ModelProto, values: Mapping[str, Any]
) -> onnx.ModelProto | None:
    """Return the model without the shapes of outputs that have other ranks than it or its original declares, or None.

    onnxruntime takes a declared shape for that of the tensor where it infers none, and may then refuse what reads it,
    or fold the Shape of an output that the original computes twice (seed 970003954).  Shapes of outputs that are
    computed from such an output go as well: onnx inferred them from what was declared (seed 1050010752).
    """
    declared = [(each.name, each.type.tensor_type) for part in (model, original) for each in part.graph.output]
    false = [name for name, each in declared if name in values and each.HasField("shape")
             and len(each.shape.dim) != np.ndim(values[name])]  # fmt: skip
    if not false:
        return None
    result = onnx.ModelProto()
    result.CopyFrom(in_execution_order(model))
    for each in result.graph.output:
        made = {name for node in ancestors(result.graph.node, [each.name]) for name in node.output}
        if each.HasField("type") and not made.isdisjoint(false):
            each.type.tensor_type.ClearField("shape")
    return result


def scans_rows_of_false_shapes(model: onnx.ModelProto, values: Mapping[str, Any], feeds: Mapping[str, Any]) -> bool:
    """Return whether a Scan takes the shape of its rows from a false declaration of an output.

    onnxruntime makes the result by that shape, and runs the model where the rows have as many elements (1050046254).
    """
    settled = without_false_shapes(model, model, values)
    session = Session(settled) if settled else None
    if session is None or outputs_of(session, feeds):
        return False
    return "Subgraph must have the shape set for all outputs" in session.error


def _constants(graph: onnx.GraphProto | onnx.FunctionProto) -> dict[str, Any]:
    """Return the values of initializers and of Constants by name, at any depth."""
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors(graph)}
    for node in nodes(graph):
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                found[node.output[0]] = numpy_helper.to_array(attribute.t)
    return found


def _is_open(ends: Any, steps: Any) -> Any:
    """Return which ends of a Slice are taken for the first element, as onnxruntime's kernel does."""
    return (steps < 0) & ((ends == np.iinfo(np.int32).max) | (ends == np.iinfo(np.int64).max))


def outputs_of_attention(optimized: onnx.ModelProto) -> set[str]:
    """Return what depends on attention as one operator or fused node, which takes masked scores for finite."""
    found: set[str] = set()
    for node in in_execution_order(optimized).graph.node:
        inner = list(nodes(OneNode((node,))))
        if any(map(_is_attention, inner)) or any(name in found for each in inner for name in each.input):
            found.update(node.output)
    return found


def _is_attention(node: onnx.NodeProto) -> bool:
    return "attention" in node.op_type.lower()


def computes_nothing(optimized: onnx.ModelProto, error: str, *values: Mapping[str, Any]) -> bool:
    """Return whether onnxruntime refuses ONNX's Attention or GroupNormalization, and an input or an output is empty."""
    is_group_norm = any(node.op_type == "GroupNormalization" for node in nodes(optimized.graph))
    named = "Attention node" in error or (is_group_norm and "Reshape node. Name:''" in error)
    return named and any(np.size(each) == 0 for group in values for each in group.values())


def copies_sizes_of_empty_axes(model: onnx.ModelProto, feeds: Mapping[str, Any], want: Any, got: Any) -> bool:
    """Return whether two empty results of unequal shapes may be of a Reshape to two computed sizes that are both 0.

    Each 0 copies the size of the input's axis, which may be another one; onnxfuse compares such views at one size of 0
    (onnxfuse/passes/empty_views.py).
    """
    if not all(isinstance(each, np.ndarray) and each.size == 0 for each in (want, got)) or want.shape == got.shape:
        return False
    held = _constants(model.graph)
    copies = any(node.op_type == "Reshape" and node.input[1] not in held for node in nodes(model.graph))
    return copies and any(value.shape.count(0) > 1 for value in feeds.values())


def has_rows_of_no_iterations(model: onnx.ModelProto, want: Any, got: Any) -> bool:
    """Return whether two empty results may be the rows that a Loop gives in no iterations.

    onnxruntime gives them the shape that it infers, which is [0] where it infers none.
    """
    if not all(isinstance(each, np.ndarray) and each.ndim and each.shape[0] == 0 for each in (want, got)):
        return False
    loops = [node for node in nodes(model.graph) if node.op_type == "Loop"]
    return any(len(node.output) > len(node.input) - 2 for node in loops)


def takes_other_steps(model: onnx.ModelProto, want: Any, got: Any, is_optimized: bool) -> bool:
    """Return whether few values are at the next step of a quantizer, as where onnxruntime fuses quantized products.

    After several quantizers they are so many steps apart as what lies between makes of one step (seed 970005661).  All
    values may be where onnxruntime merges two pairs of quantizers of which one is in the original no pair of ONNX's
    operators: it gives both the scale of one (seed 6000000118).  Without its optimizations, operators on integers
    multiply by a product of scales, so that ties may be at the next step (seed 11000000465).  One value may be there in
    a tensor of any size (seed 1060001553).
    """
    operators = sum(node.op_type.startswith(("QLinear", "QGemm")) for node in nodes(model.graph))
    quantizers = operators + sum(node.op_type == "QuantizeLinear" for node in nodes(model.graph))
    if not (quantizers if is_optimized else operators):
        return False
    if not isinstance(want, np.ndarray) or want.dtype != got.dtype or want.shape != got.shape:
        return False
    with np.errstate(all="ignore"):
        apart = np.abs(want.astype(np.float64) - got.astype(np.float64))
    moved = apart[~(apart <= np.abs(want.astype(np.float64)) * SMALL)]
    are_steps = quantizers > 1 or bool(np.allclose(moved, moved[:1], rtol=SMALL))
    are_few = moved.size <= MAX_OTHER_STEPS * want.size or (moved.size == 1 and _is_scale(model, moved[0]))
    return (are_few and are_steps) or (is_optimized and _may_merge_pairs(model))


def _is_scale(model: onnx.ModelProto, step: float) -> bool:
    """Return whether a number is a constant scale of a quantizer."""
    held = _constants(model.graph)
    scales = [held[n.input[1]] for n in nodes(model.graph) if n.op_type in QUANTIZERS and n.input[1] in held]
    return any(bool(np.isclose(step, scale.astype(np.float64), SMALL, 0).any()) for scale in scales)


def has_huge_scales(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> bool:
    """Return whether products of scales may be infinite, by which onnxruntime's operators on integers multiply.

    The numbers between the quantizers may be finite, as 0 is with any scale (seed 1050011977), or their sums NaN, where
    a sum of integers is a number (seed 1050014023).
    """
    parts = (model.graph, *model.functions)
    held = {name: value for part in parts for name, value in _constants(part).items()} | dict(feeds)
    scales = [held[node.input[1]] for node in nodes(*parts) if node.op_type in QUANTIZERS and node.input[1] in held]
    return any(not (np.abs(scale.astype(np.float32)) <= MAX_SCALE).all() for scale in scales)


def _may_merge_pairs(model: onnx.ModelProto) -> bool:
    """Return whether a QuantizeLinear reads a DequantizeLinear, in a model with operators on integers or of others.

    Operators may lie between that change nothing, such as the difference from 0.
    """
    made = {name: node for node in nodes(model.graph) for name in node.output}
    sources = [made.get(node.input[0]) for node in nodes(model.graph) if node.op_type == "QuantizeLinear"]
    for i, node in enumerate(sources):
        while node is not None and node.op_type in ("Add", "Cast", "Div", "Identity", "Mul", "Sub"):
            node = made.get(node.input[0])
        sources[i] = node
    others = any(
        node.op_type.startswith(("QLinear", "QGemm")) or (node.domain and node.op_type.endswith("QuantizeLinear"))
        for node in nodes(model.graph)
    )
    return others and any(node is not None and node.op_type == "DequantizeLinear" for node in sources)


def normalizes_few_elements(
    model: onnx.ModelProto, optimized: onnx.ModelProto, feeds: Mapping[str, Any], want: Any, got: Any
) -> bool:
    """Return whether a small difference may be that of groups of one element, or of rows that an operator normalizes.

    A kernel that adds x * scale / std and bias - mean * scale / std, each of which is large, rounds groups of one
    element, which are no more than their bias.  One that takes mean(x^2) - mean(x)^2 for the variance, as operators
    do, rounds rows that vary little.
    """
    first, second = ({node.op_type for node in nodes(each.graph)} for each in (model, optimized))
    has_groups = not first.isdisjoint(NORMS_OF_GROUPS)
    has_groups &= any(value.ndim > 2 and np.prod(value.shape[2:]) == 1 for value in feeds.values())
    is_norm = has_groups or not (second - first).isdisjoint(("LayerNormalization", *NORMS_OF_GROUPS))
    if not is_norm or want.shape != got.shape:
        return False
    with np.errstate(all="ignore"):
        return bool(np.allclose(got, want, rtol=SMALL, atol=SMALL, equal_nan=True))


def scales_zero_by_infinity(model: onnx.ModelProto, optimized: onnx.ModelProto, want: Any, got: Any) -> bool:
    """Return whether a result is NaN in one model and infinite in the other, where a norm has an infinite scale.

    An element that equals its row's mean gives NaN; if an operator adds the row in another order, it is infinite.
    onnxruntime's norms of groups subtract mean * scale from x * scale, which is NaN wherever both are infinite.
    """
    held = (value for part in (model.graph, *model.functions) for value in _constants(part).values())
    has_infinity = any(value.dtype.kind == "f" and np.isinf(value).any() for value in held)
    if not has_infinity or not _norms_by_scale(optimized) - _norms_by_scale(model) or want.shape != got.shape:
        return False
    differs = ~((want == got) | (np.isnan(want) & np.isnan(got)))
    return not np.isfinite(want[differs]).any() and not np.isfinite(got[differs]).any()


def sums_infinity(model: onnx.ModelProto, want: Any, got: Any) -> bool:
    """Return whether results are NaN in one model alone, after a product by certain weights.

    They have infinite elements, and others near the largest number: a partial sum of these is infinite, and NaN with
    the former, in some orders of the sum, where it is infinite in others, or 0 after a Relu (seed 1060001536).
    """
    held = {name: value for part in (model.graph, *model.functions) for name, value in _constants(part).items()}
    weights = [held[n] for node in nodes(model.graph, *model.functions) for n in node.input if n in held
               and node.op_type in ("Conv", "Gemm", "MatMul") and held[n].dtype == np.float32]  # fmt: skip
    is_open = any(np.isinf(each).any() and (np.abs(each[np.isfinite(each)]) > NEAR_LARGEST).any() for each in weights)
    if not is_open or want.shape != got.shape or want.dtype.kind != "f":
        return False
    differs = ~((want == got) | (np.isnan(want) & np.isnan(got)))
    return bool((np.isnan(want) | np.isnan(got))[differs].all())


def overflows_int32(model: onnx.ModelProto) -> bool:
    """Return whether a sum or product of integers may be beyond int32, to which onnxruntime rounds it at first.

    It then is the lowest number, though it is a large one (seed 1060004202).
    """
    held = {name: value for part in (model.graph, *model.functions) for name, value in _constants(part).items()}
    for node in nodes(model.graph, *model.functions):
        if node.op_type in ("QLinearAdd", "QLinearMul") and all(node.input[i] in held for i in (1, 4, 6)):
            a, b, c = (float(np.abs(held[node.input[i]]).max()) for i in (1, 4, 6))
            if not (max(a, b) * 2**8 if node.op_type == "QLinearAdd" else a * b * 2**16) < c * 2**31:
                return True
    return False


def _norms_by_scale(model: onnx.ModelProto) -> set[tuple[str, bool]]:
    """Return the operators of norms in a model, each with whether its scale is a constant of finite numbers."""
    found = set()
    for part in (model.graph, *model.functions):
        held = _constants(part)
        norms = (node for node in nodes(part) if node.op_type in ("LayerNormalization", *NORMS_OF_GROUPS))
        found |= {(node.op_type, bool(np.isfinite(held.get(node.input[1], np.inf)).all())) for node in norms}
    return found


def adds_zero(model: onnx.ModelProto, want: Any, got: Any) -> bool:
    """Return whether results are infinite with other signs, where a model adds 0: that turns -0 into +0.

    onnxfuse takes x + 0 for x, as onnxruntime does.
    """
    parts = (model.graph, *model.functions)
    zeros = {name for part in parts for name, value in _constants(part).items() if value.size == 1 and not value.any()}
    adds = any(n.op_type in ("Add", "Sub") and not zeros.isdisjoint(n.input) for n in nodes(*parts))
    if not adds or want.shape != got.shape:
        return False
    differs = ~((want == got) | (np.isnan(want) & np.isnan(got)))
    return bool((np.isinf(want) & np.isinf(got))[differs].all())


def normalizes_nothing(optimized: onnx.ModelProto, feeds: Mapping[str, Any]) -> bool:
    """Return whether the model may run an InstanceNormalization of no elements, on which onnxruntime crashes."""
    is_used = any(node.op_type == "InstanceNormalization" for node in nodes(optimized.graph, *optimized.functions))
    return is_used and not all(value.size for value in feeds.values())
