"""The gates of squeeze-and-excite blocks: a mean over the pixels of an image, and two small products after it."""

from typing import Final

FUSIONS: Final = ("squeeze_excite",)
