"""Kernels that reduce each row of a tensor and then scale it: norms and softmax."""

from typing import Final

FUSIONS: Final = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "group_norm", "softmax")
