"""Fusions of single operators on channels-last images, which have no patterns: the layout step creates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# Names of fusions: those of patterns, whose nodes the layout step changes, and those that only the layout step makes.
PRODUCT: Final = "gemm_bias_activation"
CONVOLUTION: Final = "conv_bias_activation"
TRANSPOSED_CONVOLUTION: Final = "conv_transpose_bias_activation"
QUANTIZED_PRODUCT: Final = "quantized_gemm"
QUANTIZED_CONVOLUTION: Final = "quantized_conv"
CONVOLUTIONS: Final = (CONVOLUTION, TRANSPOSED_CONVOLUTION, QUANTIZED_CONVOLUTION)
GATE: Final = "channel_scale"
SQUEEZE: Final = "squeeze_excite"


@dataclass(frozen=True)
class LayoutFusion:
    """A fusion that the layout step creates.

    `operators` holds the operators that the fusion replaces; messages name them to explain why a model has no node of
    this fusion.  It is empty if an operator alone does not determine the fusion, like the Mul of a channel_scale.
    """

    summary: str
    operators: tuple[str, ...] = ()


LAYOUT_FUSIONS: Final[Mapping[str, LayoutFusion]] = {
    "average_pool": LayoutFusion("AveragePool of a channels-last image.", ("AveragePool",)),
    "channel_scale": LayoutFusion(
        "A channels-last image times one number for each of its channels, with a residual and an activation after it."
    ),
    "concat": LayoutFusion("Channels-last images, joined along their channels.", ("Concat",)),
    "depth_to_space": LayoutFusion("DepthToSpace of a channels-last image.", ("DepthToSpace",)),
    "global_average_pool": LayoutFusion(
        "The mean over all pixels of a channels-last image.", ("GlobalAveragePool", "ReduceMean")
    ),
    "global_max_pool": LayoutFusion(
        "The maximum over all pixels of a channels-last image.", ("GlobalMaxPool", "ReduceMax")
    ),
    "max_pool": LayoutFusion("MaxPool of a channels-last image.", ("MaxPool",)),
    "resize": LayoutFusion("Resize of the pixels of a channels-last image.", ("Resize", "Upsample")),
    "space_to_depth": LayoutFusion("SpaceToDepth of a channels-last image.", ("SpaceToDepth",)),
    "split": LayoutFusion("A channels-last image, divided along its channels.", ("Split",)),
    "squeeze_excite": LayoutFusion(
        "The mean over all pixels of a channels-last image, and the two small products that make a gate of it."
    ),
}
DESCRIPTION: Final = """\
Layouts make such nodes where images are channels-last: in regions around convolutions, which are nodes of
conv_bias_activation, conv_transpose_bias_activation or quantized_conv.  `--only` then has to name conv_bias_activation,
too."""
