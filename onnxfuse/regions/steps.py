"""Steps: the operators of a region's program, to which ONNX operators of every opset are converted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from onnx import TensorProto

from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import ModelError
from onnxfuse.ir.attributes import AtRunTime, attribute_or_input
from onnxfuse.ir.dtypes import Array, dtype_name
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant
from onnxfuse.region_operators import DTYPES
from onnxfuse.regions.computed import (
    ComputedInput,
    Expression,
    by_index,
    expression_of,
    known_dims,
    measured,
    tensors_in,
)

Value: TypeAlias = "int | float | str | list[Any]"  # value of a step's attribute; a list can hold expressions
MAX_RANK: Final = 8


class StaysOut(Exception):
    """An operator cannot be part of a region; the message says why, as a sentence."""


@dataclass(frozen=True)
class Step:
    """An operator of a region's program.  One or more steps compute a node of the graph.

    Inputs and outputs are names of the graph's tensors, or `#0`, `#1`, ... for values between the steps of a node.  The
    last inputs can be tensors from which only dims are read, for expressions in the step's attributes.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Value]
    dtype: int  # dtype of the outputs
    # Tensors, other than the first input, whose dims occur in the expressions of `attributes`.
    measured: tuple[Tensor, ...] = ()
    computed: tuple[ComputedInput, ...] = ()  # inputs that hold sizes; `attributes` holds the same sizes

    @property
    def keeps_last_axis(self) -> bool:
        """Whether elements that are adjacent along the last axis stay adjacent."""
        if self.op == "Transpose":
            perm: list[int] = self.attributes["perm"]  # type: ignore[assignment]
            return perm[-1] == len(perm) - 1
        return self.op != "GatherElements"

    def renamed(self, names: Mapping[str, str]) -> Step:
        """Return the step with its tensors renamed by `names`; other names do not change."""
        inputs, outputs = (tuple(names.get(name, name) for name in part) for part in (self.inputs, self.outputs))
        return replace(self, inputs=inputs, outputs=outputs)


@dataclass
class Steps:
    """Collects the steps that one node of the graph is converted to."""

    shapes: ShapeInfo
    node: Node
    found: list[Step] = field(default_factory=list)
    _count: int = 0
    _measured: dict[str, Tensor] = field(default_factory=dict)
    _computed: list[ComputedInput] = field(default_factory=list)

    # --- the node's inputs and attributes -----------------------------------------------------------------------------

    def shape(self, tensor: Tensor) -> Shape:
        """Return the symbolic shape of a tensor.  Raises StaysOut if its rank is unknown or above 8."""
        shape = self.shapes.shape(tensor)
        if shape is None or len(shape) > MAX_RANK:
            what = "of unknown rank" if shape is None else f"of {len(shape)} axes"
            raise StaysOut(f"'{tensor.name}' is {what}; required is a known one of at most {MAX_RANK}")
        return shape

    def rank(self, index: int = 0) -> int:
        """Return the rank of the node's input `index`."""
        return len(self.shape(self.node.inputs[index]))

    def has(self, index: int) -> bool:
        """Return whether the node has an input `index`."""
        return index < len(self.node.inputs) and bool(self.node.inputs[index].name)

    def dtype(self, index: int = 0) -> int:
        """Return the dtype of the node's input `index`."""
        return self.shapes.dtype(self.node.inputs[index])

    @property
    def out_dtype(self) -> int:
        """The dtype of the node's first output."""
        return self.shapes.dtype(self.node.outputs[0])

    def data(self, index: int, rank_beside: int = 0) -> str:
        """Return the name of an input's value; for a constant of one element, add a step that holds the number.

        `rank_beside` is the rank of the other operands; a constant of a higher rank is reshaped to keep its rank.
        """
        tensor = self.node.inputs[index]
        if not is_constant(tensor) or math.prod(tensor.shape) != 1:
            return tensor.name
        number = self.number(self.constant(tensor).reshape(-1)[0], self.shapes.dtype(tensor))
        rank = len(tensor.shape)
        return number if rank <= rank_beside else self.emit("Reshape", [number], shape=[1] * rank)

    def elementwise(self, indices: Sequence[int]) -> list[str]:
        """Return the names, as from `data`, of the values of inputs that are broadcast with each other."""
        ranks = {i: self.rank(i) for i in indices}
        single = {i for i in indices if is_constant(t := self.node.inputs[i]) and math.prod(t.shape) == 1}
        beside = max((rank for i, rank in ranks.items() if i not in single), default=0)
        return [self.data(i, beside) for i in indices]

    def constant(self, tensor: Tensor) -> Array:
        """Return the value of a constant.  Raises StaysOut if the tensor is not constant, or cannot be read."""
        if not is_constant(tensor):
            raise StaysOut(f"'{tensor.name}' is computed; required is a constant")
        try:
            return constant_value(self.shapes.graph, tensor)
        except ModelError as error:
            raise StaysOut(str(error)) from error

    def parameter(self, name: str) -> object:
        """Return the value of an attribute, or of the constant input that replaces it in later opsets, or None."""
        found = attribute_or_input(self.shapes.graph, self.node, name)
        if not isinstance(found, int | float | str | list) and found is not None:
            raise StaysOut(f"its {name} is computed; required is a constant")
        return found

    def ints(self, name: str) -> list[int] | None:
        """Return a parameter (see `parameter`) that is a list of integers; None if it is absent."""
        found = self.parameter(name)
        if found is None:
            return None
        values = found if isinstance(found, list) else [found]
        numbers = [int(each) for each in values if isinstance(each, int | float)]
        if len(numbers) < len(values):  # an invalid model, with values that are not numbers
            raise StaysOut(f"its {name} are not numbers")
        return numbers

    def sizes(self, name: str) -> list[Expression] | None:
        """Return a parameter as a list of integers or of expressions over dims; None if it is absent.

        Expressions refer to tensors by their index in `data_and_measured`.  Raises StaysOut if a size is unknown.
        """
        found = attribute_or_input(self.shapes.graph, self.node, name)
        if not isinstance(found, AtRunTime):
            return None if (known := self.ints(name)) is None else [*known]
        tensor = found.tensor
        value = self.shapes.value(tensor)
        if value is None or value.ndim > 1:
            raise StaysOut(f"its {name} is computed; required is a constant, or sizes that follow from dims")
        sources = measured(tensor)
        sizes = tuple(self._named(size, name, sources) for size in value.reshape(-1).tolist())
        self._computed.append(ComputedInput(tensor.name, self.shapes.dtype(tensor), value.ndim == 0, sizes))
        return [self._indexed(each, sources) for each in sizes]

    def size(self, size: Size) -> Expression:
        """Return a size as an expression over the first input's dims.  Raises StaysOut if it depends on other sizes."""
        return self._indexed(self._named(size, "size", []), [])

    def _named(self, size: Size, name: str, sources: Sequence[Tensor]) -> Expression:
        usable = [each for each in sources if dtype_name(self.shapes.dtype(each)) in DTYPES]
        dims = {**known_dims(self.shapes, usable), **known_dims(self.shapes, self.node.inputs[:1])}
        try:
            return expression_of(size, dims)
        except KeyError as error:
            raise StaysOut(f"its {name} depends on {error.args[0]}, which is not a dim of a tensor in front") from error

    def _indexed(self, expression: Expression, sources: Sequence[Tensor]) -> Expression:
        """Replace the tensors in an expression by input indices; record those tensors, except the first input."""
        first, by_name = self.node.inputs[0].name, {each.name: each for each in sources}
        self._measured |= {name: by_name[name] for name in tensors_in(expression) if name != first}
        return by_index(expression, lambda name: 0 if name == first else 1 + list(self._measured).index(name))

    def data_and_measured(self) -> list[str]:
        """Return the inputs of a node's last step: the first input, and the tensors whose dims its attributes use."""
        return [self.data(0), *self._measured]

    def integer(self, name: str, default: int) -> int:
        """Return an integer attribute, or `default` if it is absent."""
        found = self.parameter(name)
        return default if found is None else int(found)  # type: ignore[call-overload]

    def real(self, name: str, default: float) -> float:
        """Return a numeric attribute, or `default` if it is absent."""
        found = self.parameter(name)
        return default if found is None else float(found)  # type: ignore[arg-type]

    # --- the node's steps ---------------------------------------------------------------------------------------------

    def emit(self, op: str, inputs: Sequence[str], dtype: int = 0, **attributes: Value) -> str:
        """Add a step, and return its output's name; the default dtype is that of the node's first input."""
        name = f"#{self._count}"
        self._count += 1
        self.found.append(Step(op, tuple(inputs), (name,), attributes, dtype or self.dtype()))
        return name

    def number(self, value: object, dtype: int) -> str:
        """Add a constant, and return its name."""
        return self.emit("Constant", [], dtype, value=json_number(value, dtype))

    def end(self, op: str, inputs: Sequence[str], **attributes: Value) -> None:
        """Add the last step, which computes the node's outputs."""
        names = tuple(each.name for each in self.node.outputs)
        beside = tuple(self._measured.values()), tuple(self._computed)
        self.found.append(Step(op, tuple(inputs), names, attributes, self.out_dtype, *beside))

    def give(self, op: str, value: str, index: int, **attributes: Value) -> None:
        """Add a step that computes output `index` of the node from `value`, if the node has this output."""
        if index < len(self.node.outputs) and self.node.outputs[index].name:
            output = self.node.outputs[index]
            self.found.append(Step(op, (value,), (output.name,), attributes, self.shapes.dtype(output)))


Writer: TypeAlias = Callable[[Steps], None]


def json_number(value: object, dtype: int) -> Value:
    """Return a number as a JSON value; infinities and NaN become strings."""
    if dtype == TensorProto.BOOL:
        return int(bool(value))
    if dtype in (TensorProto.INT64, TensorProto.INT32, TensorProto.INT8, TensorProto.UINT8):
        return int(value)  # type: ignore[call-overload, no-any-return]
    number = float(value)  # type: ignore[arg-type]
    if math.isnan(number):
        return "nan"
    return ("inf" if number > 0 else "-inf") if math.isinf(number) else number


def require_dtypes(shapes: ShapeInfo, tensors: Sequence[Tensor]) -> None:
    """Raise StaysOut if a tensor has a dtype that regions do not support."""
    for tensor in tensors:
        if tensor.name and dtype_name(dtype := shapes.dtype(tensor)) not in DTYPES:
            what = dtype_name(dtype) if dtype else "of unknown dtype"
            raise StaysOut(f"'{tensor.name}' is {what}; regions have {', '.join(DTYPES)}")


def axis_of(axis: int, rank: int) -> int:
    """Return an axis as a nonnegative number.  Raises StaysOut if there is no such axis."""
    if not -rank <= axis < rank:
        raise StaysOut(f"there is no axis {axis} in a tensor of {rank} dims")
    return axis % rank
