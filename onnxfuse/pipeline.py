"""The passes and rules that bring a graph into one form, in the order in which a round applies them."""

from __future__ import annotations

from onnxfuse.attention.add_heads_axis import add_heads_axis
from onnxfuse.attention.canonicalize_masked_sums import canonicalize_masked_sums
from onnxfuse.attention.canonicalize_scores import canonicalize_scores
from onnxfuse.attention.extract_alibi import extract_alibi
from onnxfuse.attention.merge_value_products import merge_value_products
from onnxfuse.attention.merge_window_axes import merge_window_axes
from onnxfuse.attention.orient_products import orient_products
from onnxfuse.attention.regroup_addends import regroup_addends
from onnxfuse.attention.split_merged_heads import split_merged_heads
from onnxfuse.attention.unbroadcast_masks import unbroadcast_masks
from onnxfuse.passes import Pass
from onnxfuse.passes.canonicalize_roots import canonicalize_roots
from onnxfuse.passes.canonicalize_rotary_pairs import canonicalize_rotary_pairs
from onnxfuse.passes.canonicalize_rotations import canonicalize_rotations
from onnxfuse.passes.conv_to_matmul import conv_to_matmul
from onnxfuse.passes.einsum_to_matmul import einsum_to_matmul
from onnxfuse.passes.fold_batch_norm import fold_batch_norm
from onnxfuse.passes.fold_constants import fold_constants
from onnxfuse.passes.fold_pads import fold_pads
from onnxfuse.passes.fold_quantized_weights import fold_quantized_weights
from onnxfuse.passes.fold_shapes import fold_shapes
from onnxfuse.passes.fold_variance_factor import fold_variance_factor
from onnxfuse.passes.normalize import normalize
from onnxfuse.passes.normalize_backward_slices import normalize_backward_slices
from onnxfuse.passes.scatter_to_concat import scatter_to_concat
from onnxfuse.passes.sizes_of_operands import sizes_of_operands
from onnxfuse.passes.split_packed_gate import split_packed_gate
from onnxfuse.passes.spread_affine import spread_affine
from onnxfuse.rewrite.apply_rules import rules_pass
from onnxfuse.rules.activations import ACTIVATIONS
from onnxfuse.rules.masks import MASKS
from onnxfuse.rules.roots import ROOTS

# The passes in the order in which a round applies them.  Rounds follow each other until none of them changes anything.
PIPELINE: tuple[Pass, ...] = (
    fold_constants,  # first, because the other passes ask which inputs are constant
    fold_quantized_weights,
    fold_shapes,  # views can be composed when their targets are constant
    normalize_backward_slices,
    scatter_to_concat,
    einsum_to_matmul,  # its Transposes compose with those around it
    sizes_of_operands,
    rules_pass("write_roots", ROOTS),
    canonicalize_roots,  # so that a mean that is computed twice is computed once
    normalize,  # so that patterns, and the passes below, meet each computation in one form
    orient_products,  # its Transposes compose with those around it in the next round
    merge_window_axes,  # behind the views that normalize has composed
    regroup_addends,  # so that the shape of scores stays the same up to the softmax
    split_merged_heads,  # its views compose where they meet others
    merge_value_products,  # of four axes
    canonicalize_masked_sums,
    rules_pass("merge_fills", MASKS),  # before a fill becomes a sum
    canonicalize_scores,  # of four axes
    extract_alibi,  # which stand alone by then
    canonicalize_rotations,
    canonicalize_rotary_pairs,
    rules_pass("recognize_activations", ACTIVATIONS),  # before a scale of theirs is folded into the operator in front
    fold_pads,  # where Transposes meet windows; before a pass asks whether a convolution has pads
    unbroadcast_masks,  # follows the index arithmetic of masks through constants and views
    conv_to_matmul,  # makes products, into whose weights the next pass can fold
    fold_batch_norm,
    fold_variance_factor,
    spread_affine,  # of what could not be folded
    split_packed_gate,  # last, because scales and biases of a packed product are folded by then
)
# The passes that are applied when no other changes anything, because they rewrite what others could not.
LATE_PASSES: tuple[Pass, ...] = (add_heads_axis,)
PASS_NAMES: tuple[str, ...] = tuple(each.__name__ for each in (*PIPELINE, *LATE_PASSES))
# The names of the passes that give weights new values.
WEIGHT_PASSES = frozenset({"fold_batch_norm", "fold_variance_factor", "split_packed_gate"})
# Those that write scores as attention has them, which may give other results where a masked score is not finite.
SCORE_PASSES = frozenset({"canonicalize_masked_sums", "canonicalize_scores", "extract_alibi"})
