"""The language in which fusions are declared."""

from onnxfuse.dsl import declaration, words
from onnxfuse.dsl.declaration import *  # noqa: F403
from onnxfuse.dsl.words import *  # noqa: F403

__all__ = [*declaration.__all__, *words.__all__]
