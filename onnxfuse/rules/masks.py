"""Fills of scores under masks take one form."""

from __future__ import annotations

from typing import Final

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import op, scalar, tensor, when

SCORES: Final = (2, 3, 4, 5)


@rewrite(example={"a": (4, 5), "b": (2, 1, 1, 5), "scores": SCORES})
def merge_fills(a: Term = tensor(), b: Term = tensor(), scores: Term = tensor(), number: Term = scalar()) -> Rules:
    """Two fills with one number, one under each mask, are one fill under both masks.

    Conditions that say where scores are filled are negated where one of them is a triangle, because a fused attention
    knows a causal mask that says where scores are kept.
    """
    require(
        "both masks broadcast to the scores",
        lambda a, b, scores, broadcasts_to: broadcasts_to(a, scores) and broadcasts_to(b, scores),
    )
    kept = op.Where(op.And(a, b), scores, number)
    yield op.Where(a, op.Where(b, scores, number), number), kept
    yield op.Where(a, number, op.Where(b, scores, number)), op.Where(op.And(op.Not(a), b), scores, number)
    yield op.Where(a, op.Where(b, number, scores), number), op.Where(op.And(a, op.Not(b)), scores, number)
    filled = op.Where(a, number, op.Where(b, number, scores))
    has_triangle = when(filled, "a mask is a triangle", lambda a, b, is_triangle: is_triangle(a) or is_triangle(b))
    yield has_triangle, op.Where(op.And(op.Not(a), op.Not(b)), scores, number)
    yield filled, op.Where(op.Or(a, b), number, scores)


MASKS: Final[tuple[Rewrite, ...]] = merge_fills
