"""Spell out large operators in the smaller operators that patterns match.

onnxruntime's own tools write operators of com.microsoft, and newer opsets of ONNX have large ones.  Each rule gives the
spelling of such an operator: terms of the pattern language that compute the same.  `spell_out` writes the spelling in
place of the node, so that all of it, or parts of it together with neighbouring nodes, can be fused.  If the spelling is
not fused, the model keeps the operator: see `fuse_model.py`.
"""

from __future__ import annotations

from onnxfuse.spell_out.spell_out import (
    Spelled,
    SpelledOut,
    Stays,
    in_terms_of_model,
    left_by_regions,
    left_over,
    spell_out,
)

__all__ = ["Spelled", "SpelledOut", "Stays", "in_terms_of_model", "left_by_regions", "left_over", "spell_out"]
