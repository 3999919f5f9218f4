"""A fusion's terms as ONNX nodes: the body of the fused operator, in one opset, for one variant and its dtypes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.defs import OpSchema

from onnxfuse.errors import PatternError
from onnxfuse.language.terms import (
    Absent,
    Apply,
    Capture,
    Causal,
    Choose,
    Constant,
    Either,
    Filled,
    Fusion,
    Given,
    Output,
    Precision,
    Product,
    Rearrange,
    Scaled,
    Size,
    Stored,
    Sum,
    Term,
    bare,
    parts,
)
from onnxfuse.model.graph import DOMAIN, Array, input_place, schema
from onnxfuse.rewrite.build_moves import rearranged, targets

FLOATS: dict[int, int] = {TensorProto.FLOAT16: 16, TensorProto.BFLOAT16: 16, TensorProto.FLOAT: 32}  # bits
BOOLEAN = {"IsNaN", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "And", "Or", "Not"}
ORT_DOMAIN = "com.microsoft"
Number: TypeAlias = float | Array  # a constant whose dtype is that of what it meets


@dataclass(frozen=True)
class Value:
    """A named value and its TensorProto.DataType."""

    name: str
    dtype: int


@dataclass(frozen=True)
class Variant:
    """All that decides a body: dtypes of the operands, and what was captured."""

    opset: int
    dtypes: Mapping[str, int]  # of the present operands, by name, in order
    out: tuple[int, ...]  # dtypes of the outputs
    rank: int  # of the first output
    values: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    ort: bool = False  # whether com.microsoft operators may be used

    def key(self) -> Hashable:
        """Equal for variants with equal bodies."""
        maps = self.dtypes, self.values, self.dims, self.choices
        return (self.opset, self.out, self.rank, self.ort, *(repr(sorted(m.items())) for m in maps))

    def holds(self, guard: Any) -> bool:
        """Whether a condition on what was captured is true of this variant."""
        known: dict[str, Any] = {**dict.fromkeys(self.dtypes, True), **self.dims, **self.values, **self.choices}
        known |= {"dtype": _numpy_name(self.out[0]), "rank": self.rank, "opset": self.opset}
        known["dtypes"] = {name: _numpy_name(dtype) for name, dtype in self.dtypes.items()}
        return bool(guard.holds(**{name: known.get(name) for name in guard.names}))


Pick = Callable[[Either, Sequence[Term]], Term]


def body(fusion: Fusion, variant: Variant, pick: Pick | None = None) -> tuple[list[onnx.NodeProto], list[str]]:
    """(nodes, output names) that compute the fusion from values named like its operands.

    `pick` chooses among the expressible spellings of an Either; the first one by default.
    """
    builder = Builder(variant, pick or (lambda _, options: options[0]))
    outputs = []
    for term, dtype in zip(fusion.outputs, variant.out, strict=False):
        value = builder.cast(builder.value(term), dtype)
        if value.name in variant.dtypes or value.name in outputs:
            value = builder.node("Identity", [value], value.dtype)
        outputs.append(value.name)
    return builder.nodes, outputs


def function(fusion: Fusion, variant: Variant, name: str, attributes: Sequence[str]) -> onnx.FunctionProto:
    """The body as a model-local function `onnxfuse::name` with the operands as inputs."""
    nodes, outputs = body(fusion, variant)
    domains = {node.domain for node in nodes} - {""}
    imports = [helper.make_opsetid("", variant.opset), *(helper.make_opsetid(d, 1) for d in sorted(domains))]
    return helper.make_function(
        DOMAIN, name, list(variant.dtypes), outputs, nodes, imports, attributes, doc_string=fusion.doc
    )


class Builder:
    """Writes terms as nodes; each term once."""

    def __init__(self, variant: Variant, pick: Pick) -> None:
        self.variant, self.pick = variant, pick
        self.nodes: list[onnx.NodeProto] = []
        self._values: dict[int, Value] = {}
        self._count = 0
        widest = max((FLOATS.get(dtype, 0) for dtype in variant.out), default=0)
        self._operands = {}
        for name, dtype in variant.dtypes.items():
            operand = Value(name, dtype)
            narrow = dtype in FLOATS and FLOATS[dtype] < widest
            self._operands[name] = self.cast(operand, TensorProto.FLOAT) if narrow else operand

    def value(self, term: Term) -> Value:
        """The value of a term."""
        if id(term) not in self._values:
            self._values[id(term)] = self._value(term)
        return self._values[id(term)]

    def _value(self, term: Term) -> Value:
        match term:
            case Capture(name=name):
                return self._operands[name]
            case Stored(inner=inner, ort=ort):
                return self.value(ort if self.variant.ort and self.expressible(ort) else inner)
            case Either(options=options):
                possible = [option for option in options if self.expressible(option)]
                if not possible:
                    raise PatternError(f"{term.span}: no spelling can be written in opset {self.variant.opset}")
                return self.value(self.pick(term, possible))
            case Choose(name=name, options=options):
                return self.value(options[self.variant.choices[name]])
            case Precision(inner=inner, like=None):
                return self.cast(self.value(inner), TensorProto.FLOAT)
            case Precision(inner=inner, like=Term() as like):
                return self.cast(self.value(inner), self.value(like).dtype)
            case Causal(inner=inner):
                return self.value(inner)
            case Rearrange():
                return rearranged(self, term)
            case Scaled():
                return self._scaled(term)
            case Sum(terms=terms):
                return self._chain("Add", terms)
            case Product(terms=terms):
                return self._chain("Mul", terms)
            case Apply():
                return self._apply(term)
            case Output():
                return self._output(term)
            case _:
                return self.value(bare(term))

    def expressible(self, term: Term) -> bool:
        """Whether the opset has the term's operators and the operands it needs are there."""
        match term:
            case Absent():
                return False
            case Capture(kind=kind, name=name):
                there = {"tensor": self.variant.dtypes, "weight": self.variant.dtypes, "scalar": self.variant.values}
                return kind not in there or name in there[kind]
            case Given(inner=inner, guard=guard):
                return self.variant.holds(guard) and self.expressible(inner)
            case Either(options=options):
                return any(map(self.expressible, options))
            case Choose(name=name, options=options):
                return self.expressible(options[self.variant.choices[name]])
            case Rearrange(inner=inner):
                return self.expressible(inner) and all(targets(self, term))
            case Stored(inner=inner):
                return self.expressible(inner)
            case Apply(op=op, inputs=inputs, attributes=attributes):
                known = op.startswith(ORT_DOMAIN) or schema(op, self.variant.opset) is not None
                return known and all(map(self._stated, attributes.values())) and all(
                    self.expressible(item) or self._may_lack(op, place, item) for place, item in enumerate(inputs)
                )
            case _:
                return all(map(self.expressible, parts(term)))

    def _stated(self, wanted: Any) -> bool:
        """Whether an attribute can be written: what is open until the model runs cannot."""
        if isinstance(wanted, list):
            return all(map(self._stated, wanted))
        return not isinstance(wanted, Size) or is_static(self._parameter(wanted))

    def _may_lack(self, op: str, place: int, term: Term) -> bool:
        """Whether the operand is optional, for the fusion and for the operator."""
        formals = found.inputs if (found := schema(op, self.variant.opset)) else ()
        needed = place < len(formals) and formals[place].option == OpSchema.FormalParameterOption.Single
        return _optional(term) and not needed

    # --- nodes ---------------------------------------------------------------------------------------------------

    def node(self, op: str, inputs: Sequence[Value | None], dtype: int, **attributes: Any) -> Value:
        """Append a node with one output."""
        self._count += 1
        name = f"t{self._count}"
        domain, _, op_type = op.rpartition("::")
        names = [value.name if value else "" for value in inputs]
        while names and not names[-1]:
            names.pop()
        self.nodes.append(helper.make_node(op_type, names, [name], domain=domain, **attributes))
        return Value(name, dtype)

    def cast(self, value: Value, dtype: int) -> Value:
        """The value in another floating dtype; a value of another kind as it is."""
        if value.dtype == dtype or value.dtype not in FLOATS or dtype not in FLOATS:
            return value
        return self.node("Cast", [value], dtype, to=dtype)

    def constant(self, value: Any, dtype: int) -> Value:
        """A Constant node."""
        array = np.asarray(value).astype(helper.tensor_dtype_to_np_dtype(dtype))
        return self.node("Constant", [], dtype, value=numpy_helper.from_array(array))

    def _chain(self, op: str, terms: Sequence[Term]) -> Value:
        """The terms added or multiplied from the left; numbers stay numbers until the dtype beside them is known."""
        items = [number if (number := self._number(t)) is not None else self.value(t) for t in terms]
        whole = functools.reduce(lambda a, b: self._binary(op, a, b), items)
        return whole if isinstance(whole, Value) else self.constant(whole, TensorProto.FLOAT)

    def _number(self, term: Term) -> Number | None:
        inner = bare(term)
        if isinstance(inner, Constant):
            return inner.value
        if isinstance(inner, Filled):
            return np.full([self.size(name) for name in inner.dims.split()], inner.value)
        if isinstance(inner, Capture) and inner.kind == "scalar":
            return float(self.variant.values[inner.name])
        return None

    def _binary(self, op: str, left: Value | Number, right: Value | Number) -> Value | Number:
        if isinstance(left, Value) or isinstance(right, Value):
            a, b = self._promoted([left, right])
            return self.node(op, [a, b], a.dtype if a else 0)
        return left * right if op == "Mul" else left + right

    def _promoted(self, values: Sequence[Value | Number | None]) -> list[Value | None]:
        """Values and numbers in one floating dtype, the widest among the values; numbers beside integers as these."""
        found = [v.dtype for v in values if isinstance(v, Value) and v.dtype != TensorProto.BOOL]
        widest = max(found, key=lambda dtype: FLOATS.get(dtype, 0), default=int(TensorProto.FLOAT))
        return [
            None if v is None else self.cast(v, widest) if isinstance(v, Value) else self.constant(v, widest)
            for v in values
        ]

    def _apply(self, term: Apply) -> Value:
        inputs: list[Value | Number | None] = []
        for item in term.inputs:
            number = self._number(item)
            absent = number is None and not self.expressible(item)
            inputs.append(number if number is not None else None if absent else self.value(item))
        ready = self._promoted(inputs)
        found = [v.dtype for v in ready if v and v.dtype != TensorProto.BOOL]
        found += [v.dtype for v in ready if v] or [TensorProto.FLOAT]
        first = next((dtype for dtype in found if dtype in FLOATS), found[0])
        attributes = {}
        for name, wanted in term.attributes.items():
            value = self._parameter(wanted)
            place = None if term.op.startswith(ORT_DOMAIN) else self._place(term.op, name)
            if value is None or (term.op == "Slice" and name == "steps" and self.variant.opset < 10):
                continue  # before opset 10 all steps were one
            if place is None:
                attributes[name] = value
            else:
                ready.extend([None] * (place + 1 - len(ready)))
                whole = isinstance(value, int) or (isinstance(value, list) and all(isinstance(v, int) for v in value))
                exact = whole and name not in ("min", "max")
                ready[place] = self.constant(value, TensorProto.INT64 if exact else first)
        dtype = TensorProto.BOOL if term.op in BOOLEAN else TensorProto.INT64 if term.op == "Shape" else first
        if term.op == "Cast":
            dtype = attributes["to"]
        return self.node(term.op, ready, dtype, **attributes)

    def _output(self, term: Output) -> Value:
        first = self.value(term.inner)
        made = next(node for node in reversed(self.nodes) if node.output[0] == first.name)
        if len(made.output) < term.count:  # all are named: onnxruntime requires those that its schema does
            made.output.extend(f"{first.name}_{place}" for place in range(1, term.count))
        return Value(made.output[term.place], first.dtype)

    def _place(self, op: str, name: str) -> int | None:
        found = schema(op, self.variant.opset)
        return None if found and name in found.attributes else input_place(op, name, self.variant.opset)

    def _parameter(self, wanted: Any) -> Any:
        if isinstance(wanted, Capture):
            return self.variant.values.get(wanted.name)
        if isinstance(wanted, Size):
            return wanted.compute(self.variant.dims)
        return [self._parameter(item) for item in wanted] if isinstance(wanted, list) else wanted

    def _scaled(self, term: Scaled) -> Value:
        scale = float(self.variant.values[term.scale.name])
        inner = bare(term.inner)
        if scale == 1:
            return self.value(inner)
        if isinstance(inner, Apply) and inner.op == "MatMul":
            left, right = self._promoted([self.value(t) for t in inner.inputs])
            assert left and right
            left = self.node("Mul", [left, self.constant(scale, left.dtype)], left.dtype)
            return self.node("MatMul", [left, right], left.dtype)
        value = self.value(inner)
        return self.node("Mul", [value, self.constant(scale, value.dtype)], value.dtype)

    # --- sizes -----------------------------------------------------------------------------------------------------

    def size(self, name: str) -> Any:
        """The size of a named dimension, "...0" the first that "..." stands for; a number for itself."""
        if name.isdecimal():
            return int(name)
        if name.startswith("..."):
            return self.variant.dims["..."][int(name[3:])]
        return self.variant.dims[name]


def _numpy_name(dtype: int) -> str:
    return str(helper.tensor_dtype_to_np_dtype(dtype).name)


def _optional(term: Term) -> bool:
    inner = bare(term)
    return isinstance(inner, Absent) or (isinstance(inner, Capture) and inner.optional)


def is_static(size: Any) -> bool:
    """Whether a dimension is a number."""
    return isinstance(size, int) and not isinstance(size, bool) and math.isfinite(size)
