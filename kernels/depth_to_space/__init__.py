"""DepthToSpace and SpaceToDepth of channels-last tensors: move channels to blocks of pixels, and back."""

from typing import Final

FUSIONS: Final = ("depth_to_space", "space_to_depth")
