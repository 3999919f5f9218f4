"""DepthToSpace and SpaceToDepth of channels-last tensors: blocks of pixels that become channels, and back."""

from typing import Final

FUSIONS: Final = ("depth_to_space", "space_to_depth")
