"""The passes and rules that give equivalent graphs one form, in the order in which a round applies them."""

from __future__ import annotations

from onnxfuse.algebra.operators import CONVOLUTIONS
from onnxfuse.attention import ATTENTION, SCORE_PASSES, add_heads_axis
from onnxfuse.passes import Pass
from onnxfuse.passes.canonicalize_rotary_pairs import canonicalize_rotary_pairs
from onnxfuse.passes.einsum_to_matmul import einsum_to_matmul
from onnxfuse.passes.fold_batch_norm import fold_batch_norm
from onnxfuse.passes.fold_constants import fold_constants
from onnxfuse.passes.fold_pads import fold_pads
from onnxfuse.passes.fold_quantized_weights import fold_quantized_weights
from onnxfuse.passes.fold_shapes import fold_shapes
from onnxfuse.passes.merge_equal_sizes import merge_equal_sizes
from onnxfuse.passes.merge_integer_projections import merge_integer_projections
from onnxfuse.passes.move_integers import move_integers
from onnxfuse.passes.name_results import name_results
from onnxfuse.passes.normalize import normalize
from onnxfuse.passes.normalize_backward_slices import normalize_backward_slices
from onnxfuse.passes.normalize_slices import normalize_slices
from onnxfuse.passes.scatter_to_concat import scatter_to_concat
from onnxfuse.passes.sizes_of_operands import sizes_of_operands
from onnxfuse.passes.split_projections import split_projections
from onnxfuse.passes.undo_pads import undo_pads
from onnxfuse.rewrite.apply_rules import rules_pass
from onnxfuse.rules.activations import ACTIVATIONS, LIMITS
from onnxfuse.rules.convolutions import AFFINE, IMAGES
from onnxfuse.rules.masks import MASKED_SUMS, MASKS
from onnxfuse.rules.no_ops import GROUPS, NO_OPS
from onnxfuse.rules.products import GATES
from onnxfuse.rules.roots import ROOTS, VARIANCES
from onnxfuse.rules.rotations import ROTATIONS
from onnxfuse.rules.rows import ROWS

# The passes in the order in which a round applies them.  Rounds are repeated until one changes nothing.
PIPELINE: tuple[Pass, ...] = (
    fold_constants,  # first, because the other passes check which inputs are constant
    fold_quantized_weights,
    name_results,
    move_integers,
    fold_shapes,  # views can be composed when their targets are constant
    normalize_backward_slices,
    normalize_slices,
    scatter_to_concat,
    undo_pads,
    einsum_to_matmul,  # before normalize composes its Transposes with others
    # before normalize composes views after these products, and before sizes are read of the views
    rules_pass("write_products_of_rows", ROWS),
    sizes_of_operands,
    rules_pass("write_roots", ROOTS),  # before normalize, which then merges equal means
    rules_pass("write_one_form", NO_OPS),
    rules_pass("write_scales_of_norms", GROUPS, of=frozenset({"ReduceMean"})),
    normalize,  # so that the passes below, and patterns, find each computation in one form
    merge_integer_projections,
    rules_pass("write_masked_sums", MASKED_SUMS),
    rules_pass("merge_fills", MASKS),  # before canonicalize_scores writes fills as sums
    *ATTENTION,  # after normalize, which composes views
    canonicalize_rotary_pairs,  # writes the slices that the next rules match
    rules_pass("write_rotations", ROTATIONS),
    rules_pass("recognize_activations", ACTIVATIONS),  # before fold_batch_norm folds the scales of activations
    fold_pads,  # after Transposes are composed; before the passes that check the pads of a convolution
    # Before fold_batch_norm: these rules write MatMuls into which it folds scales and biases, and they move biases
    # next to the convolutions into which it folds them.
    rules_pass("write_images", IMAGES, of=CONVOLUTIONS),
    fold_batch_norm,
    rules_pass("fold_variance_factor", VARIANCES),
    # after fold_batch_norm, because these rules handle the factors that it could not fold
    rules_pass("spread_affine", AFFINE, of=CONVOLUTIONS | {"ConvInteger"}),
    # last, after scales and biases of packed products are folded
    rules_pass("split_packed_gate", GATES),
    split_projections,
)
# The passes that are applied once no other pass changes anything, because they rewrite only the remaining nodes.
LATE_PASSES: tuple[Pass, ...] = (merge_equal_sizes, add_heads_axis, rules_pass("write_limits", LIMITS))
PASS_NAMES: tuple[str, ...] = tuple(each.__name__ for each in (*PIPELINE, *LATE_PASSES))
# The names of the passes that change the values of weights.
WEIGHT_PASSES = frozenset({"fold_batch_norm", "fold_variance_factor", "split_packed_gate", "split_projections"})

__all__ = ["LATE_PASSES", "PASS_NAMES", "PIPELINE", "SCORE_PASSES", "WEIGHT_PASSES"]
