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

    def quotient(self, index: str, by: Size, operator: str = "/") -> str:
        """Return the quotient or, with the operator %, the remainder of an index that is 0 or more.

        Division of unsigned words takes the fewest instructions.
        """
        if self.is_wide:
            return f"({_in_parentheses(index)} {operator} {self.size(by)})"
        if by.constant is not None:
            inner = index.removeprefix("int")  # what an unsigned division gives is unsigned before it is an int
            is_unsigned = index.startswith("int(u32") and _in_parentheses(inner) == inner
            return f"int({inner if is_unsigned else f'u32{_in_parentheses(index)}'} {operator} {by.constant}u)"
        return f"({_in_parentheses(index)} {operator} {self._divisor(by)})"

    def _divisor(self, size: Size) -> str:
        key = ("divisor", size)
        if key not in self.names:
            self.names[key] = name = f"n{len(self.names)}"
            self.declared += [f"u32 {name}_value", f"u64 {name}_multiplier"]
            self.values += divisor(self.sizes.value(size))
        name = self.names[key]
        return f"Divisor{{{name}_value, {name}_multiplier}}"


def _in_parentheses(text: str) -> str:
    """Return an expression in one pair of parentheses."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and i < len(text) - 1:
            return f"({text})"
    return text if text.startswith("(") else f"({text})"
