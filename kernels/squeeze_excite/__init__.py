"""The gates of squeeze-and-excite blocks: the mean over the pixels of an image, then two small matrix products."""

from typing import Final

FUSIONS: Final = ("squeeze_excite",)
