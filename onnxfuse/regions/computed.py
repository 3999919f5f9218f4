"""Sizes that a model computes from dims, such as the end of a Slice, as expressions over the dims of tensors.

An expression is an integer, ["dim", tensor, axis], or [operator, operand, operand] with the operator "+", "*", "//",
"%", "max" or "min".  In the function of a region, the tensor is a name; in the program of a region, it is an index of
the operator's inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import TensorProto, helper

from onnxfuse.algebra.sizes import Dim, NonPolynomial, Size, symbol
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.node import Tensor, is_constant, op_of, producer

Expression: TypeAlias = "int | list[Any]"
DIM: Final = "dim"
# Maps an operator of expressions to the ONNX operator that computes it.
OPERATORS: Final = {"+": "Add", "*": "Mul", "//": "Div", "%": "Mod", "max": "Max", "min": "Min"}
SHAPE_OF_AXES_OPSET: Final = 15  # the first opset whose Shape can return a range of the dims
MAX_FOLLOWED: Final = 24  # maximum number of nodes followed from a parameter back to Shapes


@dataclass(frozen=True)
class ComputedInput:
    """An input that holds sizes, such as the shape of a Reshape; the region's function computes it from dims."""

    name: str
    dtype: int
    is_scalar: bool
    sizes: tuple[Expression, ...]  # these expressions refer to tensors by their names


def expression_of(size: Size, dims: Mapping[Size, Expression]) -> Expression:
    """Return a size as an expression over known dims.  Raises KeyError for a symbol that is not among them."""
    if isinstance(size, int):
        return size
    if size in dims:
        return dims[size]
    terms = []
    for monomial, factor in size.terms:
        factors = [_symbol(name, dims) for name in monomial]
        terms.append(_chain("*", [*factors, *([factor] if factor != 1 or not factors else [])]))
    return _chain("+", terms)


def _symbol(name: str, dims: Mapping[Size, Expression]) -> Expression:
    known: Dim = symbol(name)
    if known in dims or not isinstance(name, NonPolynomial):
        return dims[known]
    return _chain(name.op.lower(), [expression_of(each, dims) for each in name.args])


def _chain(operator: str, operands: Sequence[Expression]) -> Expression:
    return functools.reduce(lambda left, right: [operator, left, right], operands)


def known_dims(shapes: ShapeInfo, tensors: Iterable[Tensor]) -> dict[Size, Expression]:
    """Map each dynamic dim of the tensors to the expression that reads it from the first tensor that has it."""
    found: dict[Size, Expression] = {}
    for tensor in tensors:
        for axis, size in enumerate(shapes.shape(tensor) or ()):
            if isinstance(size, Dim):
                found.setdefault(size, [DIM, tensor.name, axis])
    return found


def tensors_in(expression: Expression) -> Iterator[str]:
    """Yield the names of the tensors whose dims an expression reads."""
    if isinstance(expression, list) and expression[0] == DIM:
        yield expression[1]
    elif isinstance(expression, list):
        for operand in expression[1:]:
            yield from tensors_in(operand)


def by_index(expression: Expression, index: Callable[[str], int]) -> Expression:
    """Return an expression with each tensor's name replaced by the index that `index` returns for it."""
    if not isinstance(expression, list):
        return expression
    if expression[0] == DIM:
        return [DIM, index(expression[1]), expression[2]]
    return [expression[0], *(by_index(operand, index) for operand in expression[1:])]


def measured(parameter: Tensor) -> list[Tensor]:
    """Return the tensors from whose shapes a parameter is computed, ordered by the number of nodes in between."""
    work, seen, found = [parameter], set[int](), list[Tensor]()
    while work and len(seen) < MAX_FOLLOWED:
        node = producer(work.pop(0))
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if op_of(node) == "Shape":
            found += [each for each in node.inputs if not is_constant(each)]
        else:
            work += [each for each in node.inputs if each.name and not is_constant(each)]
    return found


def nodes_of(computed: ComputedInput, names: Mapping[str, str], result: str, opset: int) -> list[onnx.NodeProto]:
    """Return nodes that compute the tensor of sizes `result`; `names` maps tensors to their names in the function."""
    nodes, count = list[onnx.NodeProto](), 0

    def add(op: str, inputs: Sequence[str], **attributes: Any) -> str:
        nonlocal count
        count += 1
        nodes.append(helper.make_node(op, inputs, [f"{result}_{count}"], **attributes))
        return f"{result}_{count}"

    def number(*values: int) -> str:
        return add("Constant", [], value=onnx.numpy_helper.from_array(np.array(values, np.int64)))

    def made(expression: Expression) -> str:
        if not isinstance(expression, list):
            return number(expression)
        if expression[0] == DIM:
            _, tensor, axis = expression
            if opset >= SHAPE_OF_AXES_OPSET:
                return add("Shape", [names[tensor]], start=axis, end=axis + 1)
            return add("Gather", [add("Shape", [names[tensor]]), number(axis)])
        return add(OPERATORS[expression[0]], [made(operand) for operand in expression[1:]])

    values = [made(each) for each in computed.sizes]
    value = add("Reshape", [values[0], number()]) if computed.is_scalar else add("Concat", values, axis=0)
    if computed.dtype != TensorProto.INT64:
        add("Cast", [value], to=computed.dtype)
    nodes[-1].output[0] = result
    return nodes
