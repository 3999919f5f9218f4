"""Values that float32 cannot hold in one order of operations, and can in another.

(x * 1e38) * 0.1 is infinite for x = 4, and x * (1e38 * 0.1) is 4e37, which is right.  So where a value of the original
overflows in float32 and not in float64, an output may also be what the original computes in float64.  Float64 rounds
too: x * 1e38 + 1 - x * 1e38 is 0 there, so that values far smaller than others on the way to them tell nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_batch_normalization, op_conv, op_conv_transpose
from runtimes import DequantizeLinear, MatMulNBits

from onnxfuse.ir.execution_order import in_execution_order
from onnxfuse.ir.protos import graphs, tensors
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.widen import arrays_to_float32, model_to_float32

DTYPE_ATTRIBUTES = {"to", "dtype"}
ROUNDING = 2.0**-50  # of float64, of the largest value on the way to a result
NEAR_LARGEST = float(np.finfo(np.float32).max) / 2**10  # a sum or a product on the way to such a number may overflow
LOST = 1e-6  # of a value: with more noise, float64 is not better than float32


def without_overflow(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], float] | None:
    """Return the outputs in float64, and the largest value on the way; None if no value overflows in float32 alone."""
    names = [o.name for o in model.graph.output]
    open_model = _with_all_outputs(model)
    exact, rounded = _run(to_float64(open_model), to_float64_arrays(feeds)), _run(open_model, feeds)
    if exact is None or rounded is None:
        return None
    overflows = any(_overflows(value, exact[name]) for name, value in rounded.items())
    largest = max((_largest(value) for value in exact.values()), default=0.0)
    return ({name: exact[name] for name in names}, largest) if overflows else None


def allow_exact(
    want: Any, got: Any, near: Sequence[Any], exact: Any, largest: float, hides_nan: bool = False
) -> tuple[Any, list[Any]]:
    """Return wanted values, and what they are where they are rounded otherwise, for a model in which values overflow.

    A float that was found nearer to the exact one must be that one, infinite beyond float32, unless float64 has lost it
    beside the `largest` value on the way to the outputs.  Where that value is beyond float32, the order of operations
    decides what is found: where NaN is wanted, where it is found for 0, which an infinite number times 0 may be, and
    where no number is found for one near the largest; with `hides_nan` where 0 is wanted.  Others, such as indices, may
    be as in float64.
    """
    if not all(isinstance(each, np.ndarray) and each.shape == want.shape for each in (want, got, exact)):
        return want, list(near)
    if want.dtype != np.float32:
        return want, [*near, exact]
    with np.errstate(all="ignore"):
        may_overflow = np.isfinite(want) & ~np.isfinite(got) & (np.abs(exact) > NEAR_LARGEST)
        is_open = np.isnan(want) | ((want == 0) & (hides_nan | np.isnan(got))) | may_overflow
        depends = is_open & (largest > np.finfo(np.float32).max)
        is_nearer = np.isfinite(got) & np.isfinite(exact) & ~(np.abs(got - want) <= np.abs(got - exact))
        is_nearer |= depends | (got == exact.astype(np.float32))
        exact = np.where(depends | (ROUNDING * largest > LOST * np.abs(exact)), got, exact).astype(np.float32)
    want, *near = (np.where(is_nearer, exact, each) if each.shape == want.shape else each for each in (want, *near))
    return want, near


def in_float64(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the outputs in float64, in onnx's reference where onnxruntime has no kernel; None if neither runs."""
    return _run(to_float64(model), to_float64_arrays(feeds))


def largest_inside(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> float:
    """Return the largest finite number that a model holds, reads or computes outside Loops, in float64 if it can."""
    found = _run_in_float64(model, feeds)
    found = found if found is not None else _run(_with_all_outputs(model), feeds) or {}
    if opened := _with_taken_branches(model, {**feeds, **found}):
        found |= _run_in_float64(opened, feeds) or {}
    held = map(numpy_helper.to_array, tensors(model.graph, *model.functions))
    arrays = [value for value in (*found.values(), *feeds.values(), *held) if isinstance(value, np.ndarray)]
    return max((_largest(value.astype(np.float64)) for value in arrays if value.dtype.kind in "fV"), default=0.0)


def _run_in_float64(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return all values outside bodies; None if the model does not run in float64."""
    wide = to_float64(model_to_float32(model))
    return _run(_with_all_outputs(wide), to_float64_arrays(arrays_to_float32(feeds)))


def _largest(value: Any) -> float:
    if not isinstance(value, np.ndarray) or value.dtype != np.float64:
        return 0.0
    return float(np.abs(value[np.isfinite(value)]).max(initial=0.0))


def _overflows(value: Any, exact: Any) -> bool:
    if not isinstance(value, np.ndarray) or value.dtype != np.float32 or value.shape != exact.shape:
        return False
    return bool((~np.isfinite(value) & np.isfinite(exact)).any())


def _with_all_outputs(model: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.inliner.inline_local_functions(model)
    present = {o.name for o in model.graph.output}
    made = dict.fromkeys(name for node in result.graph.node for name in node.output if name)
    result.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made if name not in present)
    return result


def _with_taken_branches(model: onnx.ModelProto, values: Mapping[str, Any]) -> onnx.ModelProto | None:
    """Return the model with the nodes of taken branches in place of If nodes; None if no condition is known.

    Names of two taken branches may collide; such a model does not run.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    for node in model.graph.node:
        condition = values.get(node.input[0]) if node.op_type == "If" else None
        if condition is None:
            result.graph.node.append(node)
            continue
        (branch,) = (a.g for a in node.attribute if a.name == ("then_branch" if np.all(condition) else "else_branch"))
        result.graph.node.extend(branch.node)
        result.graph.initializer.extend(branch.initializer)
        for inner, outer in zip(branch.output, node.output, strict=True):
            if inner.name != outer:
                result.graph.node.append(helper.make_node("Identity", [inner.name], [outer]))
    return result if result.graph.node != model.graph.node else None


class Conv(op_conv.Conv):  # the evaluator finds it by the name of the operator
    """The operator with dilations, for which onnx's reference multiplies the elements between by 0: infinite ones too.

    onnxruntime runs none with dilations and SAME pads.
    """

    op_domain = ""

    def _run(self, x: Any, w: Any, b: Any = None, **attributes: Any) -> Any:
        if attributes["dilations"] is None:
            return super()._run(x, w, b, **attributes)
        rank = x.ndim - 2
        pads, strides = attributes["pads"] or [0] * 2 * rank, attributes["strides"] or [1] * rank
        columns, sizes = op_conv.im2col(x, w.shape[2:], pads, strides, attributes["dilations"])
        patches = np.moveaxis(columns.reshape(-1, len(x), *sizes), 1, 0)
        return super()._run(patches, w.reshape(len(w), -1, *(1,) * rank), b, group=attributes["group"])


class ConvTranspose(op_conv_transpose.ConvTranspose):  # the evaluator finds it by the name of the operator
    """The operator with an output shape in place of pads, for which onnx's reference takes pads of 0."""

    op_domain = ""

    def _run(self, *inputs: Any, auto_pad: str, output_shape: Any, pads: Any, **attributes: Any) -> Any:
        if output_shape is not None and pads is None and auto_pad == "NOTSET":
            auto_pad = "SAME_LOWER"  # the odd element comes first
        return super()._run(*inputs, auto_pad=auto_pad, output_shape=output_shape, pads=pads, **attributes)


class BatchNormalization(op_batch_normalization.BatchNormalization_14):  # the evaluator finds it by its name
    """The operator before opset 14 too, where onnx's reference normalizes by the batch's statistics, or fails."""

    op_domain = ""

    def _run(self, *inputs: Any, epsilon: float, momentum: float, training_mode: int = 0, **_: Any) -> Any:
        return super()._run(*inputs, epsilon=epsilon, momentum=momentum, training_mode=training_mode)


class GlobalMaxPool(OpRun):  # the evaluator finds it by the name of the operator
    """The operator as onnxruntime computes it, which passes over NaN; onnx's reference gives NaN."""

    op_domain = ""

    def _run(self, x: Any) -> Any:
        return (np.fmax.reduce(x, axis=tuple(range(2, x.ndim)), keepdims=True),)


class GroupNormalization(OpRun):  # the evaluator finds it by the name of the operator
    """The operator with a scale for each group, before opset 21, or for each channel; onnx's reference has none."""

    op_domain = ""

    def _run(self, x: Any, scale: Any, bias: Any, epsilon: Any = None, num_groups: Any = None, **_: Any) -> Any:
        groups = x.reshape(len(x), num_groups, -1)
        apart = groups - groups.mean(-1, keepdims=True)
        normal = apart / np.sqrt((apart**2).mean(-1, keepdims=True) + (1e-5 if epsilon is None else epsilon))
        parts = normal.reshape(len(x), scale.size, -1)
        return ((parts * scale[:, None] + bias[:, None]).reshape(x.shape).astype(x.dtype),)


# Operators that onnx's reference lacks, or computes otherwise.
OPERATORS = [
    BatchNormalization, Conv, ConvTranspose, DequantizeLinear, GlobalMaxPool, GroupNormalization, MatMulNBits,
]  # fmt: skip


def _run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run a model in onnxruntime, or, where that has no kernel for float64, in onnx's reference."""
    try:
        return run(open_session(model, None, optimize=False), feeds)
    except Exception:  # onnxruntime has no public base class of its errors
        pass
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(in_execution_order(model), new_ops=OPERATORS).run(None, dict(feeds))
    except Exception:  # whatever NumPy raises
        return None
    return dict(zip([o.name for o in model.graph.output], results, strict=True))


def to_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model that computes in float64 wherever it computes in float32."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for part in graphs(result.graph, *result.functions):
        for info in (*part.value_info, *(() if isinstance(part, onnx.FunctionProto) else (*part.input, *part.output))):
            if info.type.tensor_type.elem_type == TensorProto.FLOAT:
                info.type.tensor_type.elem_type = TensorProto.DOUBLE
        for tensor in () if isinstance(part, onnx.FunctionProto) else part.initializer:
            _tensor_to_float64(tensor)
        for node in part.node:
            for attribute in node.attribute:
                _attribute_to_float64(node, attribute)
    return result


def _attribute_to_float64(node: onnx.NodeProto, attribute: AttributeProto) -> None:
    if attribute.name in DTYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT:
        attribute.i = TensorProto.DOUBLE
    elif attribute.HasField("t"):
        _tensor_to_float64(attribute.t)
    elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        value = np.array(helper.get_attribute_value(attribute), np.float64)
        attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(value)))


def _tensor_to_float64(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def to_float64_arrays(feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays, with those of float32 converted to float64."""
    return {name: value.astype(np.float64) if value.dtype == np.float32 else value for name, value in feeds.items()}
