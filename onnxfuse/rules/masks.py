"""Write masked attention scores in one form: a fill, which is a Where that selects either the scores or a number."""

from __future__ import annotations

import math
from typing import Final

from onnx import TensorProto

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import computed, op, scalar, shared, tensor, when
from onnxfuse.patterns._attention import LOWEST_FLOAT16, SWALLOWS_SCORES

SCORES: Final = (2, 3, 4, 5)


@rewrite(example={"a": (4, 5), "b": (2, 1, 1, 5), "scores": SCORES})
def merge_fills(a: Term = tensor(), b: Term = tensor(), scores: Term = tensor(), number: Term = scalar()) -> Rules:
    """Two Wheres that fill scores with the same number, each under a mask, become one Where under both masks.

    If both conditions are true where the number replaces scores, the new condition is Or(a, b).  But if a or b is a
    triangle (a causal mask), the new condition is And(Not(a), Not(b)), which is true where scores are kept, because a
    fused attention recognizes a causal mask only in this form.
    """
    require(
        "both masks must broadcast to the scores",
        lambda a, b, scores, broadcasts_to: broadcasts_to(a, scores) and broadcasts_to(b, scores),
    )
    kept = op.Where(op.And(a, b), scores, number)
    yield op.Where(a, op.Where(b, scores, number), number), kept
    yield op.Where(a, number, op.Where(b, scores, number)), op.Where(op.And(op.Not(a), b), scores, number)
    yield op.Where(a, op.Where(b, number, scores), number), op.Where(op.And(a, op.Not(b)), scores, number)
    filled = op.Where(a, number, op.Where(b, number, scores))
    has_triangle = when(filled, "a mask must be a triangle", lambda a, b, is_triangle: is_triangle(a) or is_triangle(b))
    yield has_triangle, op.Where(op.And(op.Not(a), op.Not(b)), scores, number)
    yield filled, op.Where(op.Or(a, b), number, scores)


@rewrite(of_scores=True, example={"scores": SCORES, "mask": (2, 1, 4, 5), "number": -10000.0})
def masked_sum(scores: Term = tensor(), mask: Term = tensor(), number: Term = scalar()) -> Rules:
    """`scores * mask + (1 - mask) * number`, for a mask of 0 and 1 (GPT), becomes `Where(mask, scores, number)`.

    Where the mask is 1, the sum is the score plus 0.  Where the mask is 0, the sum is 0 plus the number, because scores
    are finite.
    """
    require("the mask must hold 0 and 1", lambda mask, holds_zero_or_one: holds_zero_or_one(mask))
    require("the mask must broadcast to the scores", lambda mask, scores, broadcasts_to: broadcasts_to(mask, scores))
    require("the number must be finite", lambda number: math.isfinite(number))
    masked, kept = op.Mul(scores, mask), op.Cast(mask, to=TensorProto.BOOL)
    yield op.Add(masked, op.Mul(op.Sub(1, mask), number)), op.Where(kept, scores, number)
    lifted = op.Mul(op.Sub(mask, 1), number)
    yield op.Add(masked, lifted), op.Where(kept, scores, computed(lambda number: -number))


@rewrite(example={"x": SCORES, "y": (), "kept": (2, 1, 1, 5)})
def selected_sum(x: Term = tensor(), y: Term = tensor(), kept: Term = tensor()) -> Rules:
    """`x * kept + y * Not(kept)`, as tf2onnx writes it, becomes a Where, because finite numbers times 0 are 0."""
    require("x and y must be finite", lambda x, y, is_bounded: is_bounded(x) and is_bounded(y))
    hidden = shared(op.Cast(shared(op.Not(kept)), to=TensorProto.FLOAT))
    selected = op.Add(op.Mul(x, shared(op.Cast(kept, to=TensorProto.FLOAT))), shared(op.Mul(y, hidden)))
    yield when(selected, "x must be float32", lambda dtype: dtype == "float32"), op.Where(kept, x, y)


@rewrite(of_scores=True, example={"scores": SCORES, "mask": (2, 1, 4, 5), "number": -math.inf})
def limited_sum(scores: Term = tensor(), mask: Term = tensor(), number: Term = scalar()) -> Rules:
    """`Max(scores + mask, number)` becomes `scores + Max(mask, number)` if the number is lower than any score.

    OPT limits its scores in this way.  If the mask is finite, the Max of the mask is left out as well.  Infinite scores
    give another result than before.

    The rule does not apply if another mask may have been added to the scores before.  At a key that both masks hide,
    `scores + mask` may be -inf.  The original Max raises this sum to the number, but the Max of one mask would not.
    """
    require("the number must swallow scores that are added to it", lambda number: number < SWALLOWS_SCORES)
    require("scores must hold no numbers of masks", lambda scores, is_ordinary: is_ordinary(scores))
    limited = op.Max(op.Add(scores, mask), number)
    yield when(limited, "the mask must be finite", lambda mask, is_bounded: is_bounded(mask)), op.Add(scores, mask)
    yield limited, op.Add(scores, op.Max(mask, number))


@rewrite(of_scores=True, example={"scores": SCORES, "kept": (2, 1, 4, 5), "number": -math.inf})
def limited_fill(scores: Term = tensor(), kept: Term = tensor(), number: Term = scalar()) -> Rules:
    """`Max(scores + mask, number)` becomes a Where of the scores and the number, if the mask holds 0 and the number.

    The sum of the number and any score must be the number, or the number must be the lowest of float16.  XGLM in
    float16 limits its scores in this way.  The sum of float16's lowest number and a score below 16 is that
    number or -inf, which the Max raises to the number.  A larger score gives a larger sum, which has weight only if all
    keys of its row are masked.
    """
    require(
        "the number must swallow scores, or be the lowest of float16",
        lambda number, dtype: number < SWALLOWS_SCORES or (dtype == "float16" and number == LOWEST_FLOAT16),
    )
    require("no Cast may be between scores and sum", lambda dtype, dtypes: dtypes["scores"] == dtype)
    require("scores must hold no numbers of masks", lambda scores, is_ordinary: is_ordinary(scores))
    require("the mask must broadcast to the scores", lambda kept, scores, broadcasts_to: broadcasts_to(kept, scores))
    yield op.Max(op.Add(scores, shared(op.Where(kept, 0.0, number))), number), op.Where(kept, scores, number)
    yield op.Max(op.Add(scores, shared(op.Where(kept, number, 0.0))), number), op.Where(kept, number, scores)


@rewrite(of_scores=True, example={"scores": SCORES, "mask": (2, 1, 4, 5)})
def masked_probabilities(scores: Term = tensor(), mask: Term = tensor()) -> Rules:
    """Probabilities times a mask of 0 and 1, divided by their sum (flax.nnx), become a Softmax of masked scores.

    Rows in which all keys are masked are 0.  Where masked scores are 87 above all others, the sum of a row can
    underflow: the original gives 0 for such rows, and the rewritten form gives the probabilities of the unmasked keys.
    """
    require("the mask must hold 0 and 1", lambda mask, holds_zero_or_one: holds_zero_or_one(mask))
    require("the mask must broadcast to the scores", lambda mask, scores, broadcasts_to: broadcasts_to(mask, scores))
    kept = op.Mul(op.Softmax(scores, axis=-1), mask)
    total = op.ReduceSum(kept, axes=[-1], keepdims=1)
    has_keys = op.Greater(total, 0.0)
    probabilities = op.Softmax(op.Where(op.Cast(mask, to=TensorProto.BOOL), scores, -math.inf), axis=-1)
    yield (
        op.Where(has_keys, op.Div(kept, op.Where(has_keys, total, 1.0)), 0.0),
        op.Where(op.IsNaN(probabilities), 0.0, probabilities),
    )


MASKS: Final[tuple[Rewrite, ...]] = merge_fills
MASKED_SUMS: Final[tuple[Rewrite, ...]] = (
    *masked_sum,
    *selected_sum,
    *limited_sum,
    *limited_fill,
    *masked_probabilities,
)
