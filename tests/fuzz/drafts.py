"""Drafts of models: graphs that generators write node by node, with the sizes that their symbols have at first."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.ir.protos import nodes

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
SYMBOLS = {"batch": 2, "seq": 3, "extra": 4}  # the first sizes of the symbols that generators give to inputs
DTYPES = {
    "tensor(float)": TensorProto.FLOAT, "tensor(float16)": TensorProto.FLOAT16,
    "tensor(bfloat16)": TensorProto.BFLOAT16, "tensor(double)": TensorProto.DOUBLE, "tensor(bool)": TensorProto.BOOL,
    "tensor(int64)": TensorProto.INT64, "tensor(int32)": TensorProto.INT32,
}  # fmt: skip
WORD = re.compile(r"[A-Za-z_]\w*")
# The input that holds sizes, or steps.
TARGETS = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1, "Slice": 4, "Tile": 1}
RESIZING = ("Resize", "Upsample")
MAX_SIZE = 2**20  # that inference is asked about
FIRST_IR_WITH_CONSTANTS = 4  # initializers that are not inputs
FIRST_IR_WITH_FUNCTIONS = 8
Dim = int | str | None


@dataclass(frozen=True)
class Value:
    """A tensor of a draft, with the shape that it has at the first sizes of the symbols."""

    name: str
    dtype: int
    shape: tuple[int, ...]


class Unavailable(Exception):
    """The opset of a draft has no such operator, or none with such attributes."""


@functools.cache
def has_operator(op: str, opset: int) -> bool:
    """Return whether an opset has an operator."""
    try:
        onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return False
    return True


@dataclass
class Draft:
    """A graph that is being written; `sizes` are the first sizes of the symbols of its inputs."""

    random: Random
    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    inputs: dict[str, tuple[int, tuple[Dim, ...]]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    without_rank: set[str] = field(default_factory=set)  # inputs whose shape is not declared
    sizes: dict[str, int] = field(default_factory=lambda: dict(SYMBOLS))
    made: int = 0

    def fresh(self, stem: str = "v") -> str:
        """Return a name that no value has yet."""
        self.made += 1
        return f"{stem}{self.made}"

    def node(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> str:
        """Write a node and return the name of its first output; the further ones are listed in its NodeProto.

        Raises Unavailable if the opset has no such operator.
        """
        if not attributes.get("domain") and not has_operator(op, self.opset):
            raise Unavailable(f"opset {self.opset} has no {op}")
        names = [self.fresh() for _ in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, self.fresh(op.lower()), **attributes))
        return names[0]

    def constant(self, array: np.ndarray) -> str:
        """Store a constant, as an initializer or as the output of a Constant node."""
        name = self.fresh("c")
        tensor = numpy_helper.from_array(np.asarray(array), name)
        if self.random.random() < 0.5:
            self.weights.append(tensor)
        else:
            self.nodes.append(helper.make_node("Constant", [], [name], f"constant_{name}", value=tensor))
        return name

    def integers(self, *numbers: int) -> str:
        """Store a constant of one axis in int64."""
        return self.constant(np.array(numbers, np.int64))

    def input(self, dtype: int, dims: Sequence[Dim]) -> Value:
        """Declare an input."""
        name = self.fresh("in")
        self.inputs[name] = (dtype, tuple(dims))
        return Value(name, dtype, shape_at(dims, self.sizes))

    def declared(self) -> dict[str, tuple[Dim, ...]]:
        """Return the dims of inputs whose shape the model does not declare."""
        return {name: self.inputs[name][1] for name in sorted(self.without_rank & self.inputs.keys())}

    def model(self) -> onnx.ModelProto:
        """Return the model, whose outputs have the types that onnx infers, or none."""
        inputs = [
            helper.make_tensor_value_info(name, dtype, None if name in self.without_rank else dims)
            for name, (dtype, dims) in self.inputs.items()
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(self.outputs)]
        graph = helper.make_graph(self.nodes, "fuzz", inputs, outputs, self.weights)
        opsets = [helper.make_opsetid("", self.opset)]
        version = max(helper.find_min_ir_version_for(opsets), FIRST_IR_WITH_CONSTANTS)
        domains = {node.domain for node in nodes(graph) if node.domain} - {"local"}
        opsets += [helper.make_opsetid(domain, 1) for domain in sorted(domains)]
        if self.functions:
            opsets, version = [*opsets, helper.make_opsetid("local", 1)], max(version, FIRST_IR_WITH_FUNCTIONS)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=version, functions=self.functions)
        type_outputs(model)
        return model


def shape_at(dims: Sequence[Dim], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sizes of dims, where a text is a product or sum of symbols or any other name, and None is 2."""
    return tuple(2 if d is None else d if isinstance(d, int) else _evaluate(d, sizes) for d in dims)


def _evaluate(text: str, sizes: Mapping[str, int]) -> int:
    if not WORD.sub("", text).strip(" 0123456789+-*()"):
        with suppress(SyntaxError, TypeError):  # a name such as " " or "a b"
            return max(0, int(eval(WORD.sub(lambda word: str(sizes.get(word[0], 2)), text))))
    return sizes.get(text, 2)


def type_outputs(model: onnx.ModelProto) -> None:
    """Give outputs the types that onnx infers for them, or onnxruntime; what neither can infer keeps none."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for output in bare.graph.output:
        output.ClearField("type")
    found = types(bare)
    for output in model.graph.output:
        if output.name in found and found[output.name].tensor_type.elem_type:
            output.type.CopyFrom(found[output.name])
    if not all(map(_is_typed, model.graph.output)):
        for output, typed in zip(model.graph.output, _outputs_in_onnxruntime(model), strict=False):
            if not _is_typed(output):
                dtype = DTYPES.get(typed.type, TensorProto.FLOAT)
                output.CopyFrom(helper.make_tensor_value_info(output.name, dtype, typed.shape))


def _is_typed(output: onnx.ValueInfoProto) -> bool:
    """Return whether an output has a type, and its shape if it is a tensor."""
    return output.HasField("type") and (
        not output.type.HasField("tensor_type") or output.type.tensor_type.HasField("shape")
    )


def types_in_onnxruntime(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Return the dtypes of the main graph's results in onnxruntime, whose own operators onnx gives none."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    present = {output.name for output in model.graph.output}
    made = dict.fromkeys(name for node in model.graph.node for name in node.output if name and name not in present)
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    found = {output.name: DTYPES[output.type] for output in _outputs_in_onnxruntime(shown) if output.type in DTYPES}
    return {name: helper.make_tensor_type_proto(dtype, None) for name, dtype in found.items()}


def _outputs_in_onnxruntime(model: onnx.ModelProto) -> list[Any]:
    """Return the outputs with the types that onnxruntime infers; none where it refuses the model."""
    if names_odd_size(model):
        return []
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # onnxruntime has no public base class of its errors
        return []
    return list(session.get_outputs())


def types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """Return the types that onnx infers, by the name of the value; none where it refuses the model."""
    known = inferred(model)
    return types_in(known.graph) if known else {}


def inferred(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the model with the types that onnx infers, in bodies too; None where it refuses the model."""
    if names_odd_size(model):
        return None
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return None


def types_in(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """Return the types of values that a graph records, without those of its bodies."""
    found = {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output) if v.HasField("type")}
    for tensor in graph.initializer:
        found.setdefault(tensor.name, helper.make_tensor_type_proto(tensor.data_type, tensor.dims))
    return found


def names_odd_size(model: onnx.ModelProto) -> bool:
    """Return whether a constant target of a Reshape or the like holds a huge size, or scales or N are negative.

    What is reshaped to that may be taken for a shape.  onnx 1.23 then makes a dimension of each of its elements, be
    they 10^9: Concat and Mul do so where values are propagated, Expand does it below opset 13, also in onnxruntime.
    A Slice of what may be a shape ends the process if its step is 2^31 or more (970012128).  The inputs of functions
    have the names of the graph's constants (1030023441).  A backward Slice of a negative size, which onnx infers for a
    Resize by a negative scale, ends the process, too, in onnxruntime as well (1050004084).  So does any Slice of the
    result of a MatMulNBits whose N is negative, in onnxruntime (1110029878).
    """
    constants = {t.name: t for t in model.graph.initializer}
    every = list(nodes(model.graph, *model.functions))
    for node in every:
        constants.update(
            (node.output[0], a.t) for a in node.attribute if node.op_type == "Constant" and a.name == "value"
        )
    targets = {node.input[index] for node in every if (index := TARGETS.get(node.op_type, 9)) < len(node.input)}
    scales = {name for node in every if node.op_type in RESIZING for name in node.input[1:]}
    arrays = [numpy_helper.to_array(constants[name]) for name in targets | scales if name in constants]
    is_huge = any(array.dtype.kind == "i" and (array > MAX_SIZE).any() for array in arrays)
    counts = [a.i for node in every if node.op_type == "MatMulNBits" for a in node.attribute if a.name == "N"]
    is_negative = any(array.dtype.kind == "f" and not (array >= 0).all() for array in arrays)
    return is_huge or is_negative or min(counts, default=0) < 0
