"""Write templates as 64-bit words, and read the parts that Python changes: their functions and their variants.

A template has the plans of a fused node for all sizes; each plan with its range of sizes is a variant.  The words of a
plan that depend on sizes, and its CUfunctions, are filled in by patches.  The native library checks the words of plans
when it first makes a plan of a template.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from onnxfuse.runtime.expressions import Expressions, Op, Values
from onnxfuse.runtime.plan import Kernel, TensorSpec
from onnxfuse.runtime.plan_bytes import input_words, packed, plan_words, read_input
from onnxfuse.runtime.symint import SymInt
from onnxfuse.runtime.template import Template, Variant, holds, size_count, sizes_of
from onnxfuse.runtime.word_reader import WORD, WordReader

TEMPLATE_MARK: Final = 0x6F6E66740001  # kTemplateMark in native/template.h
EXPRESSION: Final = 0  # EXPRESSION and FUNCTION are kinds of patches: Template::PatchKind in native/template.h
FUNCTION: Final = 1


@dataclass(frozen=True)
class VariantWords:
    """A variant (a plan for a range of sizes): its hints, the sizes at which it was chosen, and all its words.

    `tuned` says whether it was chosen by measuring.
    """

    hints: tuple[int, ...]
    tuned: bool
    data: bytes

    @property
    def hard(self) -> tuple[tuple[int, bool], ...]:
        """The conditions under which the plan is correct: numbers of comparisons, each with its required answer."""
        reader = WordReader(self.data)
        reader.skip(len(self.hints) + 1)
        words = reader.words(2 * reader.count("hard guards"))
        return tuple((number, bool(answer)) for number, answer in zip(words[::2], words[1::2], strict=True))


@dataclass(frozen=True)
class TemplateWords:
    """A template as words.  Its functions are CUfunction handles or, in a plan file, numbers of the file's kernels."""

    inputs: tuple[TensorSpec, ...]
    expressions: bytes
    functions: tuple[int, ...]
    variants: tuple[VariantWords, ...]

    def data(self) -> bytes:
        """Return all words, as bytes for the native library."""
        head = packed([TEMPLATE_MARK, len(self.inputs), *input_words(self.inputs)])
        functions = packed([len(self.functions), *self.functions, len(self.variants)])
        return b"".join((head, self.expressions, functions, *(each.data for each in self.variants)))

    def with_functions(self, functions: Sequence[int]) -> TemplateWords:
        """Return the template with other CUfunction handles or numbers of kernels, as many as before."""
        return replace(self, functions=tuple(functions))

    def for_inputs(self, inputs: Sequence[TensorSpec]) -> TemplateWords | None:
        """Return the template for `inputs`; None if it does not fit them.

        Dynamic dim number k of the inputs may be written as -1 - k.  The inputs may be aligned or constant where those
        of the template are not.
        """
        if len(inputs) != len(self.inputs):
            return None
        pairs = list(zip(self.inputs, inputs, strict=True))
        if any(own.aligned > other.aligned or own.constant > other.constant for own, other in pairs):
            return None
        strict = tuple(replace(own, aligned=other.aligned, constant=other.constant) for own, other in pairs)
        return replace(self, inputs=strict) if sizes_of(strict, inputs) is not None else None

    def have_plans(self, sizes: Sequence[Values]) -> Values:
        """Return for which combinations of sizes the template has a plan; `sizes` holds an array of values per size."""
        words = struct.unpack(f"<{len(self.expressions) // WORD}q", self.expressions)
        rows = Expressions()
        rows.rows = [(Op(op), a, b) for op, a, b in zip(words[1::3], words[2::3], words[3::3], strict=True)]
        values = rows.evaluate(sizes)
        return np.asarray(np.logical_or.reduce([holds(values, each.hard) for each in self.variants] or [False]))

    def untuned(self) -> TemplateWords:
        """Return the template without the variants (plans) that were chosen by measuring."""
        return replace(self, variants=tuple(each for each in self.variants if not each.tuned))

    @property
    def tuned_sizes(self) -> set[tuple[int, ...]]:
        """The sizes for which plans were chosen by measuring."""
        return {each.hints for each in self.variants if each.tuned}


# --- writing ----------------------------------------------------------------------------------------------------------


def words_of(template: Template, functions: Mapping[str, int]) -> TemplateWords:
    """Encode a template as words (64-bit integers), which the native library reads.

    `functions` maps the `Kernel.key` of each kernel of the template to the kernel's CUfunction handle.
    """
    indices = {key: i for i, key in enumerate(functions)}
    # The variants (plans) are encoded first, because this adds expressions.
    variants = tuple(_words_of_variant(each, indices) for each in template.variants)
    rows = template.expressions.rows
    expressions = packed([len(rows), *(word for op, a, b in rows for word in (int(op), a, b))])
    return TemplateWords(template.inputs, expressions, tuple(functions.values()), variants)


def _words_of_variant(variant: Variant, indices: Mapping[str, int]) -> VariantWords:
    plain: list[int] = []
    patches: list[int] = []
    for i, word in enumerate(plan_words(variant.plan)):
        if isinstance(word, Kernel):
            patches += [i, FUNCTION, indices[word.key]]
        elif isinstance(word, SymInt):
            patches += [i, EXPRESSION, word.number]
        plain.append(0 if isinstance(word, Kernel | SymInt) else word)
    guards = [word for of in (variant.hard, variant.soft) for word in (len(of), *itertools.chain(*of))]
    counted = [len(plain), *plain, len(patches) // 3, *patches]
    return VariantWords(variant.hints, variant.tuned, packed([*variant.hints, variant.tuned, *guards, *counted]))


# --- reading ----------------------------------------------------------------------------------------------------------


def read_template(data: bytes) -> TemplateWords:
    """Decode the words of a template.  Raises a ValueError that names the fault if they are malformed."""
    reader = WordReader(data)
    if reader.word() != TEMPLATE_MARK:
        raise ValueError("it is not a template of this format")
    inputs = _inputs(reader)
    sizes = size_count(inputs)
    start = reader.position
    reader.skip(3 * reader.count("expressions"))
    expressions = data[start : reader.position]
    functions = reader.words(reader.count("functions"))
    variants = tuple(_variant(reader, data, sizes, len(functions)) for _ in range(reader.count("variants")))
    if not reader.at_end:
        raise ValueError("words follow its end")
    return TemplateWords(inputs, expressions, functions, variants)


def _inputs(reader: WordReader) -> tuple[TensorSpec, ...]:
    """Read the inputs of a template, in which dynamic dim number k is written as -1 - k.

    Raises ValueError unless the numbers k are given in order of first use: 0, then 1, and so on.
    """
    inputs, sizes = list[TensorSpec](), 0
    for _ in range(reader.count("inputs")):
        inputs.append(read_input(reader))
        for dim in inputs[-1].shape:
            if dim < -1 - sizes:
                raise ValueError(f"a dim of an input is {dim}, required {-1 - sizes} or more")
            sizes = max(sizes, -dim)
    return tuple(inputs)


def _variant(reader: WordReader, data: bytes, sizes: int, functions: int) -> VariantWords:
    start = reader.position
    hints, tuned = reader.words(sizes), bool(reader.index("whether a variant was measured", 2))
    for kind in ("hard guards", "soft guards"):
        reader.skip(2 * reader.count(kind))
    words = reader.count("words of a plan")
    reader.skip(words)
    patches = reader.words(3 * reader.count("patches"))
    _require_range("the word of a patch", patches[::3], words)
    indices = [index for kind, index in zip(patches[1::3], patches[2::3], strict=True) if kind == FUNCTION]
    _require_range("the function of a patch", indices, functions)
    return VariantWords(hints, tuned, data[start : reader.position])


def _require_range(what: str, indices: Sequence[int], of: int) -> None:
    bad = [index for index in (min(indices, default=0), max(indices, default=0)) if not 0 <= index < of]
    if indices and bad:
        raise ValueError(f"{what} is {bad[0]}, required 0 to {of - 1}")
