"""Kernels that gather embeddings, add them and normalize the sum in one launch."""

from typing import Final

FUSIONS: Final = ("embedding_layer_norm", "embedding_rms_norm")
