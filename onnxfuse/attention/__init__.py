"""Attention in one form: four axes, a row for each query, and scores with scale, biases and masks in one order.

Each round of `pipeline.py` applies the passes of ATTENTION in this order.  `add_heads_axis` is applied only once no
other pass changes anything.  `analysis/scores.py` finds the nodes between a Softmax and its products.
"""

from __future__ import annotations

from onnxfuse.attention.canonicalize_scores import canonicalize_scores
from onnxfuse.attention.expand_batches import expand_batches
from onnxfuse.attention.extract_alibi import extract_alibi
from onnxfuse.attention.four_axes import add_heads_axis, merge_window_axes
from onnxfuse.attention.heads_first import heads_first
from onnxfuse.attention.join_key_groups import join_key_groups
from onnxfuse.attention.merge_value_products import merge_value_products
from onnxfuse.attention.orient_products import orient_products
from onnxfuse.attention.regroup_addends import regroup_addends
from onnxfuse.attention.split_merged_heads import split_merged_heads
from onnxfuse.attention.split_merged_rows import split_merged_rows
from onnxfuse.attention.unbroadcast_masks import unbroadcast_masks
from onnxfuse.passes import Pass

ATTENTION: tuple[Pass, ...] = (
    orient_products,  # writes Transposes, which are composed with adjacent views in the next round
    split_merged_rows,  # before `merge_window_axes`, which merges key heads and groups again
    heads_first,  # before `merge_window_axes`, which would merge batch and queries
    join_key_groups,  # before `merge_window_axes`, which merges the axes of one product
    merge_window_axes,
    regroup_addends,  # makes scores keep one shape up to the Softmax
    split_merged_heads,  # writes views, which are composed with adjacent views
    merge_value_products,  # needs attention of four axes, as the passes above write it
    expand_batches,  # needs attention of four axes
    canonicalize_scores,  # needs attention of four axes
    extract_alibi,  # needs biases that are added separately, as `canonicalize_scores` writes them
    unbroadcast_masks,  # recognizes masks by their index arithmetic, which it follows through constants and views
)
# The passes that rewrite scores; they can change the results where a masked score is not finite.
SCORE_PASSES = frozenset({"canonicalize_scores", "extract_alibi", "write_masked_sums"})

__all__ = ["ATTENTION", "SCORE_PASSES", "add_heads_axis"]
