"""Linear attention with and without decays and the delta rule, and the causal convolutions before it."""

from typing import Final

FUSIONS: Final = ("linear_attention", "gated_delta_net", "causal_conv_with_state")
