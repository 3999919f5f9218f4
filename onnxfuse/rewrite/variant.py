"""The properties that determine a body, which is the ONNX function of a fused operator."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from onnx import TensorProto

from onnxfuse.dsl.guards import Guard
from onnxfuse.dsl.terms import OperatorSet
from onnxfuse.ir.dtypes import HALF_PRECISION, dtype_name
from onnxfuse.match.state import Dims


@dataclass(frozen=True)
class Variant:
    """Everything that a body depends on: the opset, dtypes, and the captured values, sizes and choices."""

    opset: int
    dtypes: Mapping[str, int]  # dtypes of the present operands, by name, in the fusion's order
    out: tuple[int, ...]  # dtypes of the outputs
    rank: int  # rank of the first output
    values: Mapping[str, object] = field(default_factory=dict)
    dims: Dims = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    operators: OperatorSet = "onnx"  # operators that are allowed in the body
    in_float32: bool = False  # whether operands in half precision are cast to float32 first

    def key(self) -> Hashable:
        """Return a key; variants with equal keys have equal bodies (ONNX functions)."""
        maps = self.dtypes, self.values, self.dims, self.choices
        scalars = self.opset, self.out, self.rank, self.operators, self.in_float32
        return (*scalars, *(repr(sorted(m.items())) for m in maps))

    def holds(self, guard: Guard) -> bool:
        """Return whether a pattern's condition is true of the values, sizes and choices of this variant."""
        return guard.check(self._known)

    def reason(self, guard: Guard) -> str:
        """Return why a pattern's condition is not true of this variant."""
        return guard.reason(self._known)

    @functools.cached_property
    def _known(self) -> Mapping[str, object]:
        """The values that conditions can use, by name."""
        known: dict[str, object] = {**dict.fromkeys(self.dtypes, True), **self.dims, **self.values, **self.choices}
        known |= {"dtype": self._name(self.out[0]), "rank": self.rank, "opset": self.opset}
        return known | {"dtypes": {name: self._name(dtype) for name, dtype in self.dtypes.items()}}

    def _name(self, dtype: int) -> str:
        """Return the name of the dtype in which the body computes with values of `dtype`."""
        return dtype_name(TensorProto.FLOAT if self.in_float32 and dtype in HALF_PRECISION else dtype)
