"""Encode plan templates for the native library, as 64-bit words."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, cast

from onnxfuse.runtime.plan import Kernel
from onnxfuse.runtime.plan_bytes import input_words, packed, plan_words
from onnxfuse.runtime.symint import SymInt
from onnxfuse.runtime.template import Template, Variant

TEMPLATE_MARK: Final = 0x6F6E66740001  # kTemplateMark in native/template.h
EXPRESSION: Final = 0  # what a patch takes: Template::PatchKind in native/template.h
FUNCTION: Final = 1


class _Function:
    """Stands for the handle of a kernel among a plan's words."""

    def __init__(self, index: int) -> None:
        self.index = index


def template_bytes(template: Template, functions: Mapping[str, int]) -> bytes:
    """Return a template as 64-bit words; `functions` are the CUfunction handles of its kernels by `kernel_key`."""
    keys = list(functions)
    indices = {key: i for i, key in enumerate(keys)}
    variants = [word for variant in template.variants for word in _variant(variant, indices)]  # may make expressions
    words = [TEMPLATE_MARK, len(template.inputs), *input_words(template.inputs), len(template.expressions.rows)]
    words += [word for op, a, b in template.expressions.rows for word in (int(op), a, b)]
    words += [len(keys), *functions.values(), len(template.variants)]
    return packed([*words, *variants])


def kernel_key(kernel: Kernel) -> str:
    """Return a text that is equal for equal kernels."""
    own = (hashlib.sha256(kernel.text.encode()).hexdigest(),) if kernel.text else ()
    return repr((kernel.source, kernel.entry, sorted(kernel.defines.items()), kernel.arch_specific, *own))


def _variant(variant: Variant, indices: Mapping[str, int]) -> list[int]:
    functions = [_Function(indices[kernel_key(kernel)]) for kernel in variant.kernels]
    words = plan_words(variant.plan, cast(Sequence[int], functions))
    plain: list[int] = []
    patches: list[int] = []
    for i, word in enumerate(words):
        if isinstance(word, _Function):
            patches += [i, FUNCTION, word.index]
        elif isinstance(word, SymInt):
            patches += [i, EXPRESSION, word.number]
        plain.append(0 if isinstance(word, _Function | SymInt) else word)
    guards = [[len(of), *(int(word) for guard in of for word in guard)] for of in (variant.hard, variant.soft)]
    return [*variant.hints, int(variant.tuned), *guards[0], *guards[1], len(plain), *plain, len(patches) // 3, *patches]
