"""What a kernel takes as arguments: sizes that depend on dynamic dims, and numbers of quantizers."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field, replace
from typing import Final

from onnxfuse.algebra.sizes import Size
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.kernels.tensors import divisor
from onnxfuse.runtime.plan import Argument, Scalar

NUMBER: Final = re.compile(r"ARGUMENT\((-?[\d.e+-]+)f\)")
MAX_VALUES: Final = 16  # with so many values, further numbers stay in the code: a launch has at most 64 arguments


@dataclass
class Arguments:
    """The arguments of a kernel besides pointers, without duplicates."""

    sizes: Sizes
    is_wide: bool  # whether indices have 64 bits
    declared: list[str] = field(default_factory=list)
    values: list[Argument] = field(default_factory=list)
    names: dict[tuple[str, Size | str], str] = field(default_factory=dict)

    @property
    def index_type(self) -> str:
        """The type of an index in C++."""
        return "long long" if self.is_wide else "int"

    def numbers(self, text: str) -> str:
        """Return C++ code in which arguments replace numbers in ARGUMENT(...), until there are MAX_VALUES values."""

        def given(found: re.Match[str]) -> str:
            key = ("number", found[1])
            if key not in self.names and len(self.values) < MAX_VALUES:
                self.names[key] = name = f"n{len(self.names)}"
                self.declared.append(f"float {name}")
                self.values.append(Scalar(float(found[1]), "float32"))
            return self.names.get(key, found[0])

        return NUMBER.sub(given, text)

    def size(self, size: Size) -> str:
        """Return a size as an expression: a number, or an argument."""
        if isinstance(size, int):
            return f"{size}ll" if abs(size) >= 2**31 else str(size)
        key = ("size", size)
        if key not in self.names:
            self.names[key] = name = f"n{len(self.names)}"
            self.declared.append(f"{self.index_type} {name}")
            self.values.append(Scalar(self.sizes.value(size), "int64" if self.is_wide else "int32"))
        return self.names[key]

    def quotient(self, index: str, by: Size, operator: str = "/") -> str:
        """Return the quotient of an index >= 0 by a size or, with the operator %, the remainder.

        The code divides unsigned integers, because that takes the fewest instructions.
        """
        if index == "0":
            return index
        if not isinstance(by, int):
            return f"({in_parentheses(index)} {operator} {self._divisor(by)})"
        if self.is_wide:
            return f"(long long)(u64({index}) {operator} {by}u)"
        if index.startswith("(") and in_parentheses(index) == index:
            index = index[1:-1]
        inner = index.removeprefix("int(").removesuffix(")")  # a quotient inside int(...) is unsigned
        is_unsigned = index == f"int({inner})" and index.startswith("int(u32") and _is_closed(inner)
        return f"int({f'({inner})' if is_unsigned else f'u32({index})'} {operator} {by}u)"

    def _divisor(self, size: Size) -> str:
        key = ("divisor", size)
        if key not in self.names:
            self.names[key] = name = f"n{len(self.names)}"
            value, multiplier = divisor(self.sizes.value(size))
            self.declared += [f"{'u64' if self.is_wide else 'u32'} {name}_value", f"u64 {name}_multiplier"]
            self.values += [replace(value, type="int64") if self.is_wide else value, multiplier]
        name = self.names[key]
        return f"{'WideDivisor' if self.is_wide else 'Divisor'}{{{name}_value, {name}_multiplier}}"


def in_parentheses(text: str) -> str:
    """Return an expression in parentheses, or unchanged if it is a single word or number, or a single call or cast."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0 and letter in " )" and i < len(text) - 1:
            return f"({text})"
    return f"({text})" if text.startswith("-") else text


def _is_closed(text: str) -> bool:
    """Return whether every closing parenthesis of an expression matches an earlier opening one."""
    depths = itertools.accumulate((letter == "(") - (letter == ")") for letter in text)
    return all(depth >= 0 for depth in depths)
