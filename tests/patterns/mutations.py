"""Mutations: valid changes of one thing in the unfused model of a fusion."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
from onnx import TensorProto, helper, numpy_helper
from runtimes import run
from spellings import Unfused

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.ir.attributes import schema

PACKED = {"DequantizeLinear", "MatMulNBits"}
AXES = {"axis", "axes", "perm"}
VIEWS = {"Expand", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}


@dataclass(frozen=True)
class Mutant:
    """A changed model; an explanation must quote one of `names` or show one of `values`."""

    model: onnx.ModelProto
    inputs: dict[str, np.ndarray]
    names: tuple[str, ...]
    values: tuple[str, ...] = ()
    dtype: int = TensorProto.FLOAT


@dataclass(frozen=True)
class Mutation:
    """One change of a fusion's body; `make` returns the changed model."""

    fusion: Fusion
    what: str
    node: str
    opset: int
    make: Callable[[], Mutant] = field(repr=False)

    @property
    def id(self) -> str:
        return f"{self.fusion.name}-{self.what}-{self.node}-opset{self.opset}"


Change = tuple[str, str, Callable[[], Mutant]]  # what, node, make


def mutations(unfused: Unfused) -> Iterator[Mutation]:
    """Yield every change of a model that leaves it valid."""
    kinds = (readers, axes, dims, constants, wider, cycles, attributes, broadcasts, computed_weights, doubles)
    for kind in kinds:
        for what, node, make in kind(unfused):
            yield Mutation(unfused.spelling.fusion, what, node, unfused.spelling.opset, make)


def _copy(unfused: Unfused) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(unfused.model)
    return model


def _node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def _interior(unfused: Unfused) -> Iterator[onnx.NodeProto]:
    """Yield the nodes whose results are neither outputs of the model nor constants."""
    outputs = {o.name for o in unfused.model.graph.output}
    constant: set[str] = {t.name for t in unfused.model.graph.initializer}
    for node in unfused.model.graph.node:
        if constant.issuperset(node.input):
            constant.update(node.output)
        elif not outputs.intersection(node.output):
            yield node


def _constants(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {n.output[0]: n for n in model.graph.node if n.op_type == "Constant"}


def _typed(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Infer the types of the outputs anew and return the model; None if it is no longer valid.

    onnx infers nothing for operators of onnxruntime, whose recorded types stay.
    """
    recorded = {info.name: info for info in model.graph.value_info}
    for output in model.graph.output:
        output.CopyFrom(recorded.get(output.name, onnx.ValueInfoProto(name=output.name)))
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return None
    if not all(o.type.HasField("tensor_type") for o in inferred.graph.output):
        return None
    for output, typed in zip(model.graph.output, inferred.graph.output, strict=True):
        output.type.CopyFrom(typed.type)
    return model


def _runs(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> bool:
    """Return whether the model is valid, by running it: onnx compares some shapes only then."""
    return _typed(model) is not None and run(model, inputs)[0] is not None


CONDITION = "condition"  # an input: an If whose condition is a constant gives way to its branch


# --- an outside reader -------------------------------------------------------------------------------------------


def readers(unfused: Unfused) -> Iterator[Change]:
    """Yield models in which an interior value is read outside: by a node, as an output, in a subgraph."""
    ways = {"read": _read_by_node, "output": _made_output, "subgraph": _read_in_subgraph}
    for node in _interior(unfused):
        for what, change in ways.items():
            yield what, node.name, functools.partial(_outside, unfused, node.name, change)


def _outside(unfused: Unfused, name: str, change: Callable[[onnx.ModelProto, str], str]) -> Mutant:
    model = _copy(unfused)
    tensor = _node(model, name).output[0]
    reader = change(model, tensor)
    assert _typed(model)
    condition = {CONDITION: np.array(True)} if change is _read_in_subgraph else {}
    return Mutant(model, {**unfused.inputs, **condition}, (name, tensor, reader))


def _read_by_node(model: onnx.ModelProto, tensor: str) -> str:
    model.graph.node.append(helper.make_node("Identity", [tensor], ["seen"], "outside"))
    model.graph.output.append(onnx.ValueInfoProto(name="seen"))
    return "seen"


def _made_output(model: onnx.ModelProto, tensor: str) -> str:
    model.graph.output.append(onnx.ValueInfoProto(name=tensor))
    return tensor


def _read_in_subgraph(model: onnx.ModelProto, tensor: str) -> str:
    inferred = onnx.shape_inference.infer_shapes(model)
    dtype = next(v.type.tensor_type.elem_type for v in inferred.graph.value_info if v.name == tensor)
    inner = [
        helper.make_graph(
            [helper.make_node("Identity", [tensor], [branch])], branch, [],
            [helper.make_tensor_value_info(branch, dtype, None)],
        )
        for branch in ("yes", "no")
    ]  # fmt: skip
    model.graph.input.append(helper.make_tensor_value_info(CONDITION, onnx.TensorProto.BOOL, []))
    model.graph.node.append(
        helper.make_node("If", [CONDITION], ["seen"], "outside", then_branch=inner[0], else_branch=inner[1])
    )
    model.graph.output.append(onnx.ValueInfoProto(name="seen"))
    return "outside"


# --- another axis, constant, attribute ---------------------------------------------------------------------------


def axes(unfused: Unfused) -> Iterator[Change]:
    """Yield models in which an axis, a list of axes or a permutation is another one."""
    for node in unfused.model.graph.node:
        for attribute in node.attribute:
            if attribute.name in AXES:
                value = helper.get_attribute_value(attribute)
                for other in _other_axes(attribute.name, value):
                    model = _copy(unfused)
                    changed = next(a for a in _node(model, node.name).attribute if a.name == attribute.name)
                    changed.CopyFrom(helper.make_attribute(attribute.name, other))
                    if _runs(model, dict(unfused.inputs)):
                        yield f"{attribute.name}={other}", node.name, _with(unfused, model, node, other)
                        break
        found = schema(node.op_type, unfused.spelling.opset)
        for index, name in enumerate(node.input):
            maker = _constants(unfused.model).get(name)
            if found and maker and index < len(found.inputs) and found.inputs[index].name in AXES:
                value = numpy_helper.to_array(maker.attribute[0].t).tolist()
                yield from _other_input(unfused, node, index, _other_axes(found.inputs[index].name, value))


def dims(unfused: Unfused) -> Iterator[Change]:
    """Yield models in which the target of a Reshape has two sizes exchanged."""
    for node in unfused.model.graph.node:
        maker = _constants(unfused.model).get(node.input[1]) if node.op_type == "Reshape" else None
        if maker:
            shape = numpy_helper.to_array(maker.attribute[0].t).tolist()
            yield from _other_input(unfused, node, 1, _swaps(shape))


def _other_input(unfused: Unfused, node: onnx.NodeProto, index: int, others: Iterator[list[int]]) -> Iterator[Change]:
    """Yield the change of an input to the first of other constants with which the model stays valid."""
    for other in others:
        model = _copy(unfused)
        model.graph.initializer.append(numpy_helper.from_array(np.array(other, np.int64), "changed"))
        _node(model, node.name).input[index] = "changed"
        if _runs(model, dict(unfused.inputs)):
            found = schema(node.op_type, unfused.spelling.opset)
            assert found
            yield f"{found.inputs[index].name}={other}", node.name, _with(unfused, model, node, other)
            return


def _other_axes(name: str, value: Any) -> Iterator[Any]:
    if name == "perm":
        yield from _swaps(list(value))
    elif isinstance(value, int):
        yield from (axis for axis in (-2, -1, 1, 0) if axis != value)
    else:
        yield from ([axis, *value[1:]] for axis in (-2, -1, 1, 0, 2) if axis not in value)


def _swaps(value: list[int]) -> Iterator[list[int]]:
    for i in range(len(value) - 1, 0, -1):
        for j in range(i):
            if value[i] != value[j]:
                other = list(value)
                other[i], other[j] = value[j], value[i]
                yield other


def _with(unfused: Unfused, model: onnx.ModelProto, node: onnx.NodeProto, value: Any) -> Callable[[], Mutant]:
    names = (node.name, *node.output, *_views_of(model, node.output[0]), *_of_other_shape(unfused.model, model))
    return functools.partial(lambda m: m, Mutant(model, dict(unfused.inputs), names, (str(value),)))


def _views_of(model: onnx.ModelProto, tensor: str) -> Iterator[str]:
    """Yield the views of a tensor: chains of views are composed before matching, and named after the last one."""
    for node in model.graph.node:
        if node.op_type in VIEWS and node.input[0] == tensor:
            yield node.output[0]
            yield from _views_of(model, node.output[0])


def _of_other_shape(before: onnx.ModelProto, after: onnx.ModelProto) -> list[str]:
    """Return the values whose shapes a change altered: a reason may name the one where the shape first matters."""
    old, new = (
        {info.name: str(info.type.tensor_type.shape) for info in onnx.shape_inference.infer_shapes(m).graph.value_info}
        for m in (before, after)
    )
    return [name for name, shape in new.items() if old.get(name, shape) != shape]


def constants(unfused: Unfused) -> Iterator[Change]:
    """Yield models in which a scalar constant has another value."""
    for name, maker in _constants(unfused.model).items():
        array = numpy_helper.to_array(maker.attribute[0].t)
        if array.size != 1 or array.dtype.kind != "f":
            continue
        value = float(array.reshape(()))
        other = 1.5 if value == 0 else -1.5 if math.isinf(value) else value * 1.5
        if value == 2:  # an exponent, which stays even so that nothing becomes NaN
            other = 4.0
        model = _copy(unfused)
        changed = numpy_helper.from_array(np.full_like(array, other))
        _node(model, maker.name).attribute[0].CopyFrom(helper.make_attribute("value", changed))
        mutant = Mutant(model, dict(unfused.inputs), (name,), (f"{other:g}",))
        yield f"{value:g}->{other:g}", maker.name, functools.partial(lambda m: m, mutant)


def wider(unfused: Unfused) -> Iterator[Change]:
    """Yield models in which a scalar constant has six axes, which its readers get too; any reason explains that."""
    for maker in _constants(unfused.model).values():
        array = numpy_helper.to_array(maker.attribute[0].t)
        if array.size != 1 or array.dtype.kind != "f":
            continue
        model = _copy(unfused)
        changed = numpy_helper.from_array(array.reshape((1,) * 6))
        _node(model, maker.name).attribute[0].CopyFrom(helper.make_attribute("value", changed))
        if _runs(model, dict(unfused.inputs)):
            yield "axes=6", maker.name, functools.partial(lambda m: m, Mutant(model, dict(unfused.inputs), ("",)))


def attributes(unfused: Unfused) -> Iterator[Change]:
    """Yield models in which an attribute that the body leaves at its default has another value."""
    for node in unfused.model.graph.node:
        found = schema(node.op_type, unfused.spelling.opset)
        said = {a.name for a in node.attribute}
        for name, formal in sorted(found.attributes.items()) if found else []:
            other = _other_value(formal)
            if other is None or name in said or name in AXES:
                continue
            model = _copy(unfused)
            _node(model, node.name).attribute.append(helper.make_attribute(name, other))
            if _runs(model, dict(unfused.inputs)):
                yield f"{name}={other}", node.name, _with(unfused, model, node, other)


def _other_value(formal: onnx.defs.OpSchema.Attribute) -> Any:
    usual = helper.get_attribute_value(formal.default_value) if formal.default_value.name else None
    if formal.type == onnx.defs.OpSchema.AttrType.INT:
        return 1 - (usual or 0)
    if formal.type == onnx.defs.OpSchema.AttrType.FLOAT:
        return (usual or 1.0) * 1.5
    return None


# --- other operands ----------------------------------------------------------------------------------------------


def cycles(unfused: Unfused) -> Iterator[Change]:
    """Yield models in which an operand is computed from the second output, which does not need that operand."""
    outputs = [o.name for o in unfused.model.graph.output]
    if len(outputs) < 2:
        return
    needed = _upstream(unfused.model, outputs[1])
    for operand in unfused.variant.dtypes:
        if operand not in needed:
            yield "cycle", operand, functools.partial(_cyclic, unfused, outputs[1], operand)


def _upstream(model: onnx.ModelProto, name: str) -> set[str]:
    makers = {o: node for node in model.graph.node for o in node.output}
    seen, work = set(), [name]
    while work:
        name = work.pop()
        if name not in seen:
            seen.add(name)
            work.extend(makers[name].input if name in makers else ())
    return seen


def _cyclic(unfused: Unfused, second: str, operand: str) -> Mutant:
    model = _copy(unfused)
    nodes = list(model.graph.node)
    for node in nodes:
        node.input[:] = ["around" if name == operand else name for name in node.input]
    needed = _upstream(model, second)
    first = [n for n in nodes if n.op_type == "Constant" or needed & set(n.output)]
    new = [helper.make_node("ReduceMean", [second], ["level"], "levelled", keepdims=0)]
    if unfused.variant.dtypes[operand] == TensorProto.BOOL:
        new.append(helper.make_node("Cast", ["level"], ["some"], "truth", to=TensorProto.BOOL))
        new.append(helper.make_node("And", [operand, "some"], ["around"], "turned"))
    elif unfused.variant.dtypes[operand] == TensorProto.UINT8:
        new.append(helper.make_node("Cast", [operand], ["wide"], "widened", to=TensorProto.FLOAT))
        new.append(helper.make_node("Mul", ["wide", "level"], ["product"], "multiplied"))
        new.append(helper.make_node("Cast", ["product"], ["around"], "turned", to=TensorProto.UINT8))
    else:
        new.append(helper.make_node("Mul", [operand, "level"], ["around"], "turned"))
    rest = [n for n in nodes if not any(n is other for other in first)]
    del model.graph.node[:]
    model.graph.node.extend([*first, *new, *rest])
    assert _typed(model)
    return Mutant(model, dict(unfused.inputs), ("around", "turned", second, operand))


def broadcasts(unfused: Unfused) -> Iterator[Change]:
    """Yield models in which an operand has a shape that is broadcast to the required one."""
    for operand in unfused.variant.dtypes:
        shape = _shape(unfused, operand)
        others = [(1,), (1, shape[-1]), (*(1 for _ in shape[:-1]), shape[-1])] if shape else []
        for other in dict.fromkeys(o for o in others if o != shape):
            mutant = _reshaped(unfused, operand, other)
            if mutant:
                yield f"shape={list(other)}", operand, functools.partial(lambda m: m, mutant)


def _shape(unfused: Unfused, operand: str) -> tuple[int, ...]:
    weights = {t.name: tuple(t.dims) for t in unfused.model.graph.initializer}
    return weights[operand] if operand in weights else unfused.inputs[operand].shape


def _reshaped(unfused: Unfused, operand: str, shape: tuple[int, ...]) -> Mutant | None:
    model, inputs = _copy(unfused), dict(unfused.inputs)
    for tensor in model.graph.initializer:
        if tensor.name == operand:
            array = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(array.reshape(-1)[: math.prod(shape)].reshape(shape), operand))
    for info in model.graph.input:
        if info.name == operand:
            array = inputs[operand]
            inputs[operand] = array.reshape(-1)[: math.prod(shape)].reshape(shape)
            info.CopyFrom(helper.make_tensor_value_info(operand, info.type.tensor_type.elem_type, shape))
    text = ", ".join(map(str, shape))
    return Mutant(model, inputs, (operand,), (text, f"[{text}]")) if _runs(model, inputs) else None


def computed_weights(unfused: Unfused) -> Iterator[Change]:
    """Yield models in which a weight is an input of the model."""
    for weight in unfused.model.graph.initializer:
        yield "computed", weight.name, functools.partial(_computed, unfused, weight.name)


def _computed(unfused: Unfused, name: str) -> Mutant:
    model = _copy(unfused)
    tensor = next(t for t in model.graph.initializer if t.name == name)
    model.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    inputs = {**unfused.inputs, name: numpy_helper.to_array(tensor)}
    model.graph.initializer.remove(tensor)
    return Mutant(model, inputs, (name,))


def doubles(unfused: Unfused) -> Iterator[Change]:
    """Yield the model in double precision, unless it has quantized weights, whose scales are never of that dtype."""
    if not any(node.op_type in PACKED for node in unfused.model.graph.node):
        yield "double", "all", functools.partial(_doubled, unfused)


def _doubled(unfused: Unfused) -> Mutant:
    model = _copy(unfused)
    stored = [*model.graph.initializer, *(a.t for n in model.graph.node for a in n.attribute if a.HasField("t"))]
    for tensor in stored:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    for info in model.graph.input:
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = TensorProto.DOUBLE
    for to in (a for n in model.graph.node if n.op_type == "Cast" for a in n.attribute if a.name == "to"):
        to.i = TensorProto.DOUBLE if to.i == TensorProto.FLOAT else to.i
    assert _typed(model)
    wide = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in unfused.inputs.items()}
    return Mutant(model, wide, (), ("double",), TensorProto.DOUBLE)


# --- rounding between float32 values -----------------------------------------------------------------------------


def roundings(unfused: Unfused) -> Iterator[Mutation]:
    """Yield models in which a value, as one node reads it or as all do, is rounded to a half precision and cast back.

    The constants are left out: casting these is folded.
    """
    inferred = onnx.shape_inference.infer_shapes(unfused.model)
    infos = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
    floats = {v.name for v in infos if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    floats -= {*_constants(unfused.model), *(t.name for t in unfused.model.graph.initializer)}
    fusion, opset = unfused.spelling.fusion, unfused.spelling.opset
    for half in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        for name in sorted(floats):
            nodes = [
                n.name for n in unfused.model.graph.node if name in n.input and n.op_type not in ("Shape", "IsNaN")
            ]
            for read in (*((node,) for node in nodes), *([tuple(nodes)] if len(nodes) > 1 else [])):
                what = f"{TensorProto.DataType.Name(half).lower()}-{name}"
                make = functools.partial(_rounded, unfused, name, read, half)
                yield Mutation(fusion, what, "+".join(read), opset, make)


def _rounded(unfused: Unfused, name: str, nodes: Sequence[str], half: int) -> Mutant:
    """Make these nodes read, in float32, a value that was rounded to another dtype."""
    model = _copy(unfused)
    casts = [
        helper.make_node("Cast", [name], ["rounded"], "round", to=half),
        helper.make_node("Cast", ["rounded"], ["widened"], "widen", to=TensorProto.FLOAT),
    ]
    first = next(i for i, node in enumerate(model.graph.node) if node.name in nodes)
    for node in model.graph.node:
        if node.name in nodes:
            node.input[:] = ["widened" if each == name else each for each in node.input]
    kept = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*kept[:first], *casts, *kept[first:]])
    assert _typed(model)
    results = [output for node in nodes for output in _node(model, node).output]
    return Mutant(model, dict(unfused.inputs), ("round", "rounded", "widened", name, *nodes, *results), (), half)
