"""The sizes that a kernel takes as arguments, because they depend on dynamic dims."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxfuse.kernels.region.sizes import Size, Sizes
from onnxfuse.kernels.tensors import divisor
from onnxfuse.runtime.plan import Argument, Scalar


@dataclass
class Arguments:
    """The kernel's arguments that are sizes, each of them once."""

    sizes: Sizes
    is_wide: bool  # indices have 64 bits
    declared: list[str] = field(default_factory=list)
    values: list[Argument] = field(default_factory=list)
    names: dict[tuple[str, Size], str] = field(default_factory=dict)

    @property
    def index_type(self) -> str:
        """The type of an index in C++."""
        return "long long" if self.is_wide else "int"

    def size(self, size: Size) -> str:
        """Return a size as an expression: a number, or an argument."""
        if size.constant is not None:
            return f"{size.constant}ll" if abs(size.constant) >= 2**31 else str(size.constant)
        key = ("size", size)
        if key not in self.names:
            self.names[key] = name = f"n{len(self.names)}"
            self.declared.append(f"{self.index_type} {name}")
            self.values.append(Scalar(self.sizes.value(size), "int64" if self.is_wide else "int32"))
        return self.names[key]

    def by(self, size: Size) -> str:
        """Return a size by which an index is divided: the argument is a Divisor where indices have 32 bits."""
        if size.constant is not None or self.is_wide:
            return self.size(size)
        key = ("divisor", size)
        if key not in self.names:
            self.names[key] = name = f"n{len(self.names)}"
            self.declared += [f"u32 {name}_value", f"u64 {name}_multiplier"]
            self.values += divisor(self.sizes.value(size))
        name = self.names[key]
        return f"Divisor{{{name}_value, {name}_multiplier}}"
