"""Writes a fusion's terms as ONNX nodes: the body, the ONNX function that a fused node can run as.

A body is written for one `Variant`, which says the opset, the dtypes, and the captured values, sizes and choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.defs import OpSchema

from onnxfuse.algebra.operators import FLOAT32_SCALES, TRUTHS
from onnxfuse.algebra.sizes import Dim, Size
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.guards import Guard
from onnxfuse.dsl.terms import (
    Alternatives,
    Apply,
    Capture,
    Constant,
    Literals,
    Number,
    OperatorSet,
    Product,
    Rearrange,
    Term,
    Value,
)
from onnxfuse.dsl.words import Choose, Computed, Precision, When
from onnxfuse.ir.attributes import input_index, schema
from onnxfuse.ir.domain import DOMAIN, ORT_DOMAIN
from onnxfuse.ir.dtypes import FLOAT_BITS, FLOATS, Array
from onnxfuse.ir.slices import SLICE_INPUTS_SINCE
from onnxfuse.match.named_dims import with_sizes
from onnxfuse.rewrite.rearrange_body import reshape_targets, write_rearrange
from onnxfuse.rewrite.variant import Variant

BFLOAT16, FLOAT = "tensor(bfloat16)", "tensor(float)"  # the names in operator schemas
REFUSED: Final = "onnxfuse.refused"
LAST_OPSETS: Final = {"Swish": 24}  # the newest opset in which onnxruntime 1.32 runs an operator


SelectOption: TypeAlias = Callable[[Alternatives, Sequence[Term]], Term]  # selects among options that can be written


def first_option(term: Alternatives, options: Sequence[Term]) -> Term:
    """Select the first option, as for the bodies that are stored in models."""
    return options[0]


def body(
    fusion: Fusion, variant: Variant, select: SelectOption = first_option
) -> tuple[list[onnx.NodeProto], list[str]]:
    """Return the nodes that compute the fusion from values named like its operands, and the names of its outputs.

    Raises PatternError where the opset cannot express the body.
    """
    builder = BodyBuilder(variant, select)
    outputs = builder.outputs(fusion)
    return builder.nodes, outputs


def function(fusion: Fusion, variant: Variant, name: str, attributes: Sequence[str]) -> onnx.FunctionProto:
    """Return the body as a model-local function `onnxfuse::name` with the operands as inputs.

    If a term is preferred for the variant's set of operators, but cannot be written, the metadata entry REFUSED of the
    function says why.
    """
    builder = BodyBuilder(variant)
    outputs = builder.outputs(fusion)
    domains = {node.domain for node in builder.nodes} - {""}
    imports = [helper.make_opsetid("", variant.opset), *(helper.make_opsetid(d, 1) for d in sorted(domains))]
    made = helper.make_function(
        DOMAIN, name, list(variant.dtypes), outputs, builder.nodes, imports, attributes, doc_string=fusion.doc
    )
    if builder.refused:
        made.metadata_props.add(key=REFUSED, value="; ".join(dict.fromkeys(builder.refused)))
    return made


class BodyBuilder:
    """Writes terms as nodes, each term once.  It implements the protocol `Writing` of the pattern language."""

    def __init__(self, variant: Variant, select: SelectOption = first_option) -> None:
        self.variant, self.select = variant, select
        self.nodes: list[onnx.NodeProto] = []
        self.refused: list[str] = []  # why preferred terms cannot be written
        self._values: dict[int, Value] = {}
        self._can_write: dict[int, tuple[Term, bool]] = {}
        self._count = 0
        widest = max((FLOAT_BITS.get(dtype, 0) for dtype in variant.out), default=0)
        self._operands = {}
        for name, dtype in variant.dtypes.items():
            operand = Value(name, dtype)
            is_narrower = dtype in FLOAT_BITS and FLOAT_BITS[dtype] < widest
            in_float32 = is_narrower or variant.in_float32
            self._operands[name] = self.cast(operand, TensorProto.FLOAT) if in_float32 else operand

    def outputs(self, fusion: Fusion) -> list[str]:
        """Add the nodes of a fusion, and return the names of its outputs."""
        outputs: list[str] = []
        for term, dtype in zip(fusion.outputs, self.variant.out, strict=False):
            value = self.cast(self.value(term), dtype)
            if value.name in self.variant.dtypes or value.name in outputs:
                value = self.node("Identity", [value], value.dtype)
            outputs.append(value.name)
        return outputs

    def value(self, term: Term) -> Value:
        """Return the value of a term; its nodes are added on the first call."""
        if id(term) not in self._values:
            self._values[id(term)] = term.write(self)
        return self._values[id(term)]

    def can_write(self, term: Term) -> bool:
        """Return whether the opset has the operators of a term, and its required operands are present."""
        if id(term) not in self._can_write:  # without this cache, nested alternatives would check a term 1000 times
            self._can_write[id(term)] = term, term.can_write(self)
        return self._can_write[id(term)][1]

    # --- the variant ---------------------------------------------------------------------------------------------

    @property
    def opset(self) -> int:
        """The version of the ONNX operators."""
        return self.variant.opset

    @property
    def operators(self) -> OperatorSet:
        """The set of operators that are allowed in the body."""
        return self.variant.operators

    def refuse(self, term: Term) -> None:
        """Note why a preferred term cannot be written."""
        self.refused.append(self._why_not(term))

    def _why_not(self, term: Term) -> str:
        """Return why a term cannot be written: a condition that does not hold, or a missing operator.

        If there are several ways to write a term, this is the reason for the last one, which is the most general.
        """
        if isinstance(term, When) and not self.holds(term.guard):
            return self.variant.reason(term.guard)
        parts = [term.labelled(self.label(term.name))] if isinstance(term, Choose) else term.parts
        lacking = [part for part in parts if not (self.can_write(part) or part.is_optional)]
        if lacking:
            return self._why_not(lacking[-1])
        what = f"'{term.op}' with sizes that are known at run time" if isinstance(term, Apply) else "it"
        return f"opset {self.opset} has no way to write {what}"

    def has(self, capture: Capture) -> bool:
        """Return whether an operand is present, or a scalar has a value; attributes can always be left out."""
        if capture.is_operand:
            return capture.name in self.variant.dtypes
        return capture.kind == "attribute" or capture.name in self.variant.values

    def holds(self, guard: Guard) -> bool:
        """Return whether a condition is true of the values, sizes and choices of this variant."""
        return self.variant.holds(guard)

    def label(self, choice: str) -> str:
        """Return the label of a choice in this variant."""
        return self.variant.choices[choice]

    def operand(self, name: str) -> Value:
        """Return an operand, cast to float32 if an output has a wider dtype or `in_float32` of the variant is set."""
        return self._operands[name]

    def scalar(self, name: str) -> float:
        """Return the value of a scalar."""
        value = self.variant.values[name]
        assert isinstance(value, int | float)
        return float(value)

    def captured_number(self, name: str) -> int | None:
        """Return the integer that matching has captured under a name; None if there is none."""
        found = self.variant.values.get(name)
        return found if isinstance(found, int) else None

    @property
    def leading_rank(self) -> int:
        """The number of axes that "..." stands for."""
        return len(self.variant.dims.get("...", ()))

    def size(self, name: str) -> Size:
        """Return the size of a named dimension; "...0" is the first axis of "...", and a numeral is its own size."""
        if name.isdecimal():
            return int(name)
        size: Size = self.variant.dims["..."][int(name[3:])] if name.startswith("...") else self.variant.dims[name]
        return size

    def full(self, value: Number, dims: str) -> Array:
        """Return an array in which all elements are `value`; `dims` names its axes, separated by spaces.

        An axis of symbolic size is left out.  An axis `name?` is optional: it is left out if the variant (the form of
        the fused operator that was found) has no dimension of this name.
        """
        names = [name.rstrip("?") for name in dims.split() if not name.endswith("?") or name[:-1] in self.variant.dims]
        sizes = [self.size(name) for name in names]
        return np.full([size for size in sizes if is_static(size)], value)

    # --- nodes ---------------------------------------------------------------------------------------------------

    def node(self, op: str, inputs: Sequence[Value | None], dtype: int, **attributes: Any) -> Value:
        """Append a node with one output of dtype `dtype`, and return the output."""
        self._count += 1
        name = f"t{self._count}"
        domain, _, op_type = op.rpartition("::")
        names = [value.name if value else "" for value in inputs]
        while names and not names[-1]:
            names.pop()
        self.nodes.append(helper.make_node(op_type, names, [name], domain=domain, **attributes))
        return Value(name, dtype)

    def cast(self, value: Value, dtype: int) -> Value:
        """Return the value cast to another floating dtype; a value of any other dtype is returned unchanged."""
        if value.dtype == dtype or value.dtype not in FLOAT_BITS or dtype not in FLOAT_BITS:
            return value
        return self.node("Cast", [value], dtype, to=dtype)

    def constant(self, value: Literals | Sequence[Size], dtype: int) -> Value:
        """Return the value of a new Constant node; before opset 9, integers and booleans need a Cast after it."""
        if self.opset < 9 and dtype not in FLOATS:  # in these opsets, a Constant holds floating-point numbers only
            return self.node("Cast", [self.constant(value, TensorProto.DOUBLE)], dtype, to=dtype)
        array = np.asarray(value).astype(helper.tensor_dtype_to_np_dtype(dtype))
        return self.node("Constant", [], dtype, value=numpy_helper.from_array(array))

    # --- terms ---------------------------------------------------------------------------------------------------

    def can_write_operator(self, term: Apply) -> bool:
        """Return whether the opset has the operator for its dtype, and its inputs and attributes can be written."""
        known = term.op.startswith(ORT_DOMAIN) or self._has(term)
        return known and all(map(self._is_static, term.attributes.values())) and all(
            self.can_write(item) or self._may_lack(term.op, index, item) for index, item in enumerate(term.inputs)
        )  # fmt: skip

    def _has(self, term: Apply) -> bool:
        """Return whether the opset has the operator, and has it for bfloat16 if an input of the term is bfloat16.

        Few operators of older opsets accept bfloat16.
        """
        found = schema(term.op, self.opset)
        is_newer = self.opset > LAST_OPSETS.get(term.op, self.opset)
        if found is None or is_newer or self._lacks_steps(term) or self._lacks_attribute(term, found):
            return False
        narrow = any(operand.dtype == TensorProto.BFLOAT16 for operand in self._operands.values())
        return not narrow or all(
            BFLOAT16 in formal.types or FLOAT not in formal.types or self._dtype(item) != TensorProto.BFLOAT16
            for item, formal in zip(term.inputs, found.inputs, strict=False)
        )

    def _lacks_attribute(self, term: Apply, found: OpSchema) -> bool:
        """Return whether an attribute of the term is neither an attribute nor an input of the operator in this opset.

        The steps of a Slice are left out, because `_lacks_steps` checks them.
        """
        names = (
            name for name, wanted in term.attributes.items()
            if name not in found.attributes and name != "steps" and not self._is_absent(wanted)
        )  # fmt: skip
        return any(input_index(term.op, name, self.opset) is None for name in names)

    def _is_absent(self, wanted: object) -> bool:
        """Return whether an attribute's value is captured but absent in the model: then it is not written."""
        return isinstance(wanted, Capture) and self.variant.values.get(wanted.name) is None

    def _lacks_steps(self, term: Apply) -> bool:
        """Return whether a term is a Slice with steps other than 1 in an opset before 10, which has no steps."""
        steps = term.attributes.get("steps") if term.op == "Slice" else None
        return self.opset < SLICE_INPUTS_SINCE and isinstance(steps, Sequence) and any(step != 1 for step in steps)

    def _dtype(self, term: Term) -> int | None:
        """Return the dtype that a term will have, or None if it is not known.

        A cast, a Shape or an operator with boolean results determines its own dtype.  Any other term has the dtype of
        its first part whose dtype is known.
        """
        if isinstance(term, Precision):
            return TensorProto.FLOAT if term.like is None else self._dtype(term.like)
        if isinstance(term, Capture):
            return self._operands[term.name].dtype if term.name in self._operands else None
        if isinstance(term, Apply) and (term.op == "Shape" or term.op in TRUTHS):
            return TensorProto.INT64 if term.op == "Shape" else TensorProto.BOOL
        parts = [term.labelled(self.label(term.name))] if isinstance(term, Choose) else term.parts
        return next((dtype for part in parts if (dtype := self._dtype(part)) is not None), None)

    def _is_static(self, wanted: object) -> bool:
        """Return whether an attribute can be written: it does not depend on sizes that are known only at run time."""
        if isinstance(wanted, list):
            return all(map(self._is_static, wanted))
        return not isinstance(wanted, Dim) or is_static(self._attribute(wanted))

    def _may_lack(self, op: str, index: int, term: Term) -> bool:
        """Return whether an input is optional both in the fusion and in the operator."""
        formals = found.inputs if (found := schema(op, self.opset)) else ()
        needed = index < len(formals) and formals[index].option == OpSchema.FormalParameterOption.Single
        return term.is_optional and not needed

    def write_operator(self, term: Apply) -> Value:
        """Append the node of an operator; attributes become inputs where the opset requires it."""
        inputs: list[Value | Literals | None] = []
        for item in term.inputs:
            number = item.number(self)
            if number is None and self.can_write(item):
                inputs.append(self.value(item))
            else:
                inputs.append(number)
        scales = [i for i in FLOAT32_SCALES.get(term.op, ()) if i < len(inputs)]
        ready = self._promoted([None if i in scales else value for i, value in enumerate(inputs)])
        for i in scales:
            ready[i] = value if isinstance(value := inputs[i], Value) else None
        found = [v.dtype for v in ready if v and v.dtype != TensorProto.BOOL]
        found += [v.dtype for v in ready if v] or [TensorProto.FLOAT]
        first = next((dtype for dtype in found if dtype in FLOAT_BITS), found[0])
        attributes = {}
        for name, wanted in term.attributes.items():
            value = self._attribute(wanted)
            index = None if term.op.startswith(ORT_DOMAIN) else self._input_index(term.op, name)
            if value is None or (term.op == "Slice" and name == "steps" and self.opset < SLICE_INPUTS_SINCE):
                continue
            if index is None:
                attributes[name] = value
            else:
                ready.extend([None] * (index + 1 - len(ready)))
                whole = isinstance(value, int) or (isinstance(value, list) and all(isinstance(v, int) for v in value))
                exact = whole and name not in ("min", "max")
                ready[index] = self.constant(value, TensorProto.INT64 if exact else first)
        dtype = TensorProto.BOOL if term.op in TRUTHS else TensorProto.INT64 if term.op == "Shape" else first
        if term.op == "Cast":
            dtype = attributes["to"]
        return self.node(term.op, ready, dtype, **attributes)

    def _input_index(self, op: str, name: str) -> int | None:
        """Return the index of the input that replaces an attribute in this opset; None if it is still an attribute."""
        found = schema(op, self.opset)
        return None if found and name in found.attributes else input_index(op, name, self.opset)

    def _attribute(self, wanted: object) -> Any:
        """Return an attribute's value with captured values and sizes substituted."""
        if isinstance(wanted, Capture):
            return self.variant.values.get(wanted.name)
        if isinstance(wanted, When):
            return self._attribute(wanted.inner) if self.holds(wanted.guard) else None
        if isinstance(wanted, Constant | Computed):
            return wanted.number(self)
        if isinstance(wanted, Product):
            factors = [factor for term in wanted.terms if (factor := self._attribute(term)) is not None]
            return math.prod(factors) if factors else None
        if isinstance(wanted, Dim):
            return with_sizes(wanted, self.variant.dims)
        return [self._attribute(item) for item in wanted] if isinstance(wanted, list) else wanted

    def write_output(self, operator: Term, index: int, count: int) -> Value:
        """Return the output `index` of an operator; all `count` outputs are named, because onnxruntime requires it."""
        first = self.value(operator)
        made = next(node for node in reversed(self.nodes) if node.output[0] == first.name)
        if len(made.output) < count:
            made.output.extend(f"{first.name}_{i}" for i in range(1, count))
        return Value(made.output[index], first.dtype)

    def write_associative(self, op: str, terms: Sequence[Term]) -> Value:
        """Combine the terms from the left; a number becomes a Constant when the dtype of the other operand is known."""
        numbers = [term.number(self) for term in terms]
        items = [self.value(term) if number is None else number for term, number in zip(terms, numbers, strict=True)]
        whole = items[0]
        for term, item in zip(terms[1:], items[1:], strict=True):
            if isinstance(term, Constant) and term.divisor is not None and isinstance(whole, Value):
                whole = self._binary("Div", whole, term.divisor)
            else:
                whole = self._binary(op, whole, item)
        return whole if isinstance(whole, Value) else self.constant(whole, TensorProto.FLOAT)

    def _binary(self, op: str, left: Value | Literals, right: Value | Literals) -> Value | Literals:
        if isinstance(left, Value) or isinstance(right, Value):
            a, b = self._promoted([left, right])
            return self.node(op, [a, b], a.dtype if a else 0)
        return left * right if op == "Mul" else left + right

    def _promoted(self, values: Sequence[Value | Literals | None]) -> list[Value | None]:
        """Return all values in the widest floating dtype among them; if all are integers, literals become integers."""
        found = [v.dtype for v in values if isinstance(v, Value) and v.dtype != TensorProto.BOOL]
        widest = max(found, key=lambda dtype: FLOAT_BITS.get(dtype, 0), default=int(TensorProto.FLOAT))
        return [
            None if v is None else self.cast(v, widest) if isinstance(v, Value) else self.constant(v, widest)
            for v in values
        ]

    def can_write_rearrange(self, term: Rearrange) -> bool:
        """Return whether the shapes of the Reshapes can be written: each has at most one unknown size."""
        return all(reshape_targets(self, term))

    def write_rearrange(self, term: Rearrange) -> Value:
        """Append the views that rearrange a value, or a slice of it."""
        return write_rearrange(self, term)

    def write_scaled(self, inner: Term, scale: str) -> Value:
        """Return `inner` times a scalar; for a MatMul, its left operand is scaled instead of its result."""
        factor, inner = self.scalar(scale), inner.unwrapped
        if factor == 1:
            return self.value(inner)
        if isinstance(inner, Apply) and inner.op == "MatMul":
            left, right = self._promoted([self.value(t) for t in inner.inputs])
            assert left and right
            left = self.node("Mul", [left, self.constant(factor, left.dtype)], left.dtype)
            return self.node("MatMul", [left, right], left.dtype)
        value = self.value(inner)
        return self.node("Mul", [value, self.constant(factor, value.dtype)], value.dtype)


def is_static(size: object) -> TypeGuard[int]:
    """Return whether a dimension is a number, not a symbol."""
    return isinstance(size, int) and not isinstance(size, bool) and math.isfinite(size)
