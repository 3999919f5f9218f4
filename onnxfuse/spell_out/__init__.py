"""Spell out the operators of which one computes what patterns know in several.

onnxruntime's own tools write operators of com.microsoft, and newer opsets of ONNX have large ones.  Each rule says in
the language of the patterns what one of them computes.  `spell_out` writes that in place of the node, so that all of
it, or parts together with the neighbours, can be fused.  What is not fused keeps its operator: see `fuse_model.py`.
"""

from __future__ import annotations

from onnxfuse.spell_out.spell_out import Spelled, SpelledOut, Stays, in_terms_of_model, left_over, spell_out

__all__ = ["Spelled", "SpelledOut", "Stays", "in_terms_of_model", "left_over", "spell_out"]
