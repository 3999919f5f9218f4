"""Attributes of operators: typed access, the schemas' defaults, and attributes that became inputs in later opsets."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import onnx

from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import AttributeValue, Constant, Node, Tensor, is_constant, op_of

T = TypeVar("T")


@overload
def int_attribute(node: Node, name: str, default: int) -> int: ...
@overload
def int_attribute(node: Node, name: str, default: None = None) -> int | None: ...
def int_attribute(node: Node, name: str, default: int | None = None) -> int | None:
    """Return an attribute that is an int; `default` where it is absent.  Raises TypeError for another type."""
    return _checked(node, name, int, default)


def flag_attribute(node: Node, name: str, default: bool) -> bool:
    """Return whether an int attribute is 1; `default` where it is absent.  As in onnxruntime, 2 and -1 count as 0."""
    return int_attribute(node, name, int(default)) == 1


@overload
def str_attribute(node: Node, name: str, default: str) -> str: ...
@overload
def str_attribute(node: Node, name: str, default: None = None) -> str | None: ...
def str_attribute(node: Node, name: str, default: str | None = None) -> str | None:
    """Return an attribute that is a string; `default` where it is absent.  Raises TypeError for another type."""
    return _checked(node, name, str, default)


@overload
def ints_attribute(node: Node, name: str, default: Sequence[int]) -> list[int]: ...
@overload
def ints_attribute(node: Node, name: str, default: None = None) -> list[int] | None: ...
def ints_attribute(node: Node, name: str, default: Sequence[int] | None = None) -> list[int] | None:
    """Return an attribute that is a list of ints; `default` where it is absent.  Raises TypeError for another type."""
    found = _checked(node, name, list, None)
    if found is None:
        return None if default is None else list(default)
    return found


def perm_of(transpose: Node, rank: int) -> list[int]:
    """Return the perm of a Transpose of a tensor of this rank; without the attribute, it reverses the axes."""
    return ints_attribute(transpose, "perm") or [*range(rank)][::-1]


def tensor_attribute(node: Node, name: str) -> Constant | None:
    """Return an attribute that is a tensor; None where it is absent.  Raises TypeError for another type."""
    found = node.attrs.get(name)
    if found is None or is_constant(found):
        return found
    raise _wrong_type(node, name, found, "tensor")


def _checked(node: Node, name: str, kind: type[T], default: T | None) -> T | None:
    found = node.attrs.get(name)
    if found is None:
        return default
    if isinstance(found, kind):
        return found
    raise _wrong_type(node, name, found, kind.__name__)


def _wrong_type(node: Node, name: str, found: object, required: str) -> TypeError:
    return TypeError(f"attribute '{name}' of {op_of(node)} '{node.name}' is {found!r}; required is a value of type "
                     f"{required}")  # fmt: skip


@dataclass(frozen=True, eq=False)
class AtRunTime:
    """A parameter whose value is known only at run time, with the input that holds it; it never equals a number."""

    tensor: Tensor


def attribute_or_input(graph: Graph, node: Node, name: str) -> AttributeValue | AtRunTime | None:
    """Return a parameter of an ONNX operator: an attribute or, in later opsets, an input.

    Returns its value as Python numbers if it is an attribute or a constant input, and AtRunTime if it is any other
    input.  If it is absent, returns the schema's default, or None without a default.
    """
    if name in node.attrs:
        return node.attrs[name]
    index = input_index(op_of(node), name, graph.opset)
    if index is not None and index < len(node.inputs) and node.inputs[index].name:
        tensor = node.inputs[index]
        return constant_value(graph, tensor).tolist() if is_constant(tensor) else AtRunTime(tensor)
    return attribute_default(op_of(node), name, graph.opset)


def number_parameter(graph: Graph, node: Node, name: str) -> int | float:
    """Return a parameter that is a number, or the schema's default.  Raises TypeError where it is anything else."""
    found = attribute_or_input(graph, node, name)
    if isinstance(found, int | float):
        return found
    raise _wrong_type(node, name, found, "int or float")


@functools.cache
def schema(op: str, opset: int) -> onnx.defs.OpSchema | None:
    """Return the schema of an operator of the ONNX domain in an opset; None where the opset has no such operator."""
    try:
        return onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return None


@functools.cache
def input_index(op: str, name: str, opset: int) -> int | None:
    """Return the index of an operator's input `name` in an opset; None where the operator has no such input there."""
    found = schema(op, opset)
    return next((i for i, formal in enumerate(found.inputs) if formal.name == name), None) if found else None


@functools.cache
def attribute_default(op: str, name: str, opset: int) -> AttributeValue | None:
    """Return the default of an operator's attribute in an opset; None if it has no default."""
    found = schema(op, opset)
    formal = found.attributes.get(name) if found else None
    if formal is None or not formal.default_value.name:
        return None
    value = onnx.helper.get_attribute_value(formal.default_value)
    if formal.default_value.type == onnx.AttributeProto.STRINGS:
        return [text.decode() for text in value]
    return value.decode() if isinstance(value, bytes) else value
