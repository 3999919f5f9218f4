"""Rewrite rules by subject: tables of patterns and their replacements, both in the pattern language."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onnxfuse.dsl.declaration import Rewrite
from onnxfuse.rules.activations import ACTIVATIONS, LIMITS
from onnxfuse.rules.convolutions import AFFINE, IMAGES
from onnxfuse.rules.masks import MASKED_SUMS, MASKS
from onnxfuse.rules.no_ops import GROUPS, NO_OPS
from onnxfuse.rules.products import GATES
from onnxfuse.rules.roots import ROOTS, VARIANCES
from onnxfuse.rules.rotations import ROTATIONS
from onnxfuse.rules.rows import ROWS

SUBJECTS: Final[Mapping[str, tuple[Rewrite, ...]]] = {
    "activations": (*ACTIVATIONS, *LIMITS),
    "convolutions": (*IMAGES, *AFFINE),
    "masks": (*MASKED_SUMS, *MASKS),
    "operators in one form": (*NO_OPS, *GROUPS),
    "products": GATES,
    "roots": (*ROOTS, *VARIANCES),
    "rotations": ROTATIONS,
    "rows": ROWS,
}
RULES: Final[tuple[Rewrite, ...]] = tuple(rule for table in SUBJECTS.values() for rule in table)
