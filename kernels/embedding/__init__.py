"""Kernels of embeddings and the norm of them, in one launch."""

from typing import Final

FUSIONS: Final = ("embedding_layer_norm", "embedding_rms_norm")
