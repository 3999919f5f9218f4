"""Parses and checks a node's attribute `program`, which lists the operators of a region.

The program is JSON: "ops" are [operator, inputs, outputs, attributes] in an order in which they can be computed,
"outputs" are the values that the node gives, and "dtypes" names the dtype of every value.  Operands are x0, x1, ...
Operators have ONNX's semantics, in any opset of the model; onnxfuse/region_operators.py lists them.  An integer of an
attribute may be an expression over the dims of the operator's inputs, as onnxfuse/regions/computed.py says.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from onnxfuse.algebra.operators import DISCONTINUOUS
from onnxfuse.ir.dtypes import LARGEST_FLOAT8
from onnxfuse.region_operators import DTYPES, EXACT, FLOATS, HALVES, QUANTIZED, REDUCTIONS, SIXTEEN_BITS, dtypes_of
from onnxfuse.runtime.plan import FusedNode

VALUE_NAME: Final = re.compile(r"[a-z]+[0-9]+")  # names appear in C++, and model files are untrusted
SHIFTS: Final = ("LEFT", "RIGHT")
PAD_MODES: Final = ("constant", "reflect", "edge", "wrap")
MAX_OPERANDS: Final = 64  # maximum number of operands of a kernel


@dataclass(frozen=True)
class Operation:
    """One operator of a program."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def integers(self, name: str) -> tuple[int, ...]:
        """Return the value of an attribute that is a list of integers."""
        return tuple(int(each) for each in self.attributes[name])


@dataclass(frozen=True)
class Program:
    """All operators, the outputs and the dtypes of all values."""

    operations: tuple[Operation, ...]
    outputs: tuple[str, ...]
    dtypes: Mapping[str, str]

    @functools.cached_property
    def producers(self) -> Mapping[str, Operation]:
        """The operation that computes each value; operands are not among the keys."""
        return {name: each for each in self.operations for name in each.outputs}

    def undone(self, operation: Operation) -> Operation | None:
        """Return the QuantizeLinear to integers whose result a DequantizeLinear dequantizes; None if there is none."""
        made = self.producers.get(operation.inputs[0]) if operation.name == "DequantizeLinear" else None
        is_undone = made is not None and made.name == "QuantizeLinear" and made.inputs[1:] == operation.inputs[1:]
        return made if is_undone and self.dtypes[operation.inputs[0]] not in LARGEST_FLOAT8 else None

    @functools.cached_property
    def read_by_steps(self) -> frozenset[str]:
        """The values on which results of discontinuous operators depend: the last bit of these values can matter."""
        found: set[str] = set()
        for each in reversed(self.operations):
            is_cut = each.name == "Cast" and self.dtypes[each.outputs[0]] not in FLOATS
            if each.name in DISCONTINUOUS or is_cut or found & set(each.outputs):
                found |= set(each.inputs)
        return frozenset(found)

    @functools.cached_property
    def rounded(self) -> frozenset[str]:
        """The 16-bit float values that kernels round to their dtype, as the model does.

        These are the 16-bit values of `read_by_steps`; results of operators that only move values are rounded already.
        """
        halves = {name for name in self.read_by_steps if self.dtypes[name] in HALVES}
        return frozenset(halves - {name for each in self.operations if each.name in EXACT for name in each.outputs})

    def inexact_after(self, *results: str) -> frozenset[str]:
        """Return the values whose last bits are arbitrary: `results`, sums of floats, and values that depend on these.

        Kernels add the terms of a sum in any order.  Values that depend on such values only through steps, such as a
        QuantizeLinear, a comparison or a Cast to integers, are not included.
        """
        found = set(results)
        for each in self.operations:
            is_step = each.name in DISCONTINUOUS and each.name != "Mod"  # whose results have the last bits, too
            if is_step or self.dtypes[each.outputs[0]] not in FLOATS:
                continue
            if each.name in REDUCTIONS - EXACT or found & set(each.inputs):
                found |= set(each.outputs)
        return frozenset(found)

    def readers(self, name: str) -> frozenset[str]:
        """Return the results of the operators that read a value, and the value itself if it is an output."""
        read = {each.outputs[0] for each in self.operations if name in each.inputs}
        return frozenset(read | ({name} & set(self.outputs)))

    def is_only_quantized(self, name: str) -> bool:
        """Return whether only QuantizeLinears to 8 bits read a value."""
        makers = (self.producers[each] for each in self.readers(name))
        are_quantizers = all(each.name == "QuantizeLinear" and name not in each.outputs for each in makers)
        return are_quantizers and all(self.dtypes[each.outputs[0]] in QUANTIZED for each in makers)

    def dtype_of_input(self, operation: Operation, index: int = 0) -> str:
        """Return the dtype of one of an operation's inputs."""
        return self.dtypes[operation.inputs[index]]


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> Program:
    content = json.loads(text)
    operations = tuple(
        Operation(name, tuple(inputs), tuple(outputs), attributes)
        for name, inputs, outputs, attributes in content["ops"]
    )
    return Program(operations, tuple(content["outputs"]), content["dtypes"])


def parse(node: FusedNode) -> Program:
    """Return the program of a node.  Raises ValueError if the attribute is malformed or values are not in order."""
    try:
        program = _parsed(node.text("program"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"region: its program cannot be read: {type(error).__name__}: {error}") from error
    known = {f"x{i}" for i in range(len(node.operands))}
    for each in program.operations:
        missing = [name for name in each.inputs if name not in known]
        if missing:
            raise ValueError(f"region: {each.name} reads {missing[0]}, which nothing before it gives")
        if unfit := next((name for name in each.outputs if not VALUE_NAME.fullmatch(name)), None):
            raise ValueError(f"region: {each.name} gives {unfit!r}; names of values are v0, v1 and so on")
        known |= set(each.outputs)
    for name in program.outputs:
        if name not in program.producers:
            raise ValueError(f"region: output {name} is the result of no operator")
    absent = sorted(known - set(program.dtypes))
    if absent:
        raise ValueError(f"region: the program has no dtype for {absent[0]}")
    return program


def refusal(program: Program, dtypes: Sequence[str], output_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel can be generated for a program's operators or dtypes; None if one can."""
    if len(dtypes) > MAX_OPERANDS:
        return f"region: it has {len(dtypes)} operands; a kernel takes {MAX_OPERANDS}"
    for i, dtype in enumerate(dtypes):
        if program.dtypes.get(f"x{i}") != dtype:
            return f"region: x{i} is {dtype}; its program says {program.dtypes.get(f'x{i}')}"
    given = tuple(program.dtypes[name] for name in program.outputs)
    if given != tuple(output_dtypes):
        return f"region: its outputs are {', '.join(output_dtypes)}; its program says {', '.join(given)}"
    for name, dtype in program.dtypes.items():
        if dtype not in DTYPES:
            return f"region: {name} is {dtype}; kernels are generated for {', '.join(DTYPES)}"
    return next(filter(None, (operator_refusal(program, each) for each in program.operations)), None)


def operator_refusal(program: Program, operation: Operation) -> str | None:
    """Return why no kernel can be generated for an operator of a program; None if one can."""
    name = operation.name
    if name == "Constant":
        return None
    taken = dtypes_of(name)
    if not taken:
        return f"region: kernels are not generated for the operator {name}"
    dtype = program.dtype_of_input(operation)
    if dtype not in taken:
        return f"region: {name} is of {dtype}; kernels are generated for it in {', '.join(taken)}"
    if name == "Pad" and operation.attributes.get("mode", "constant") not in PAD_MODES:
        return f"region: Pad has the mode {operation.attributes['mode']}; kernels have {', '.join(PAD_MODES)}"
    if name == "QuantizeLinear" and program.dtypes[operation.outputs[0]] not in (*QUANTIZED, *SIXTEEN_BITS):
        required = ", ".join((*QUANTIZED, *SIXTEEN_BITS))
        return f"region: QuantizeLinear gives {program.dtypes[operation.outputs[0]]}; required is one of {required}"
    if name == "BitShift" and operation.attributes.get("direction") not in SHIFTS:
        return f"region: BitShift has the direction {operation.attributes.get('direction')}; required LEFT or RIGHT"
    return None
