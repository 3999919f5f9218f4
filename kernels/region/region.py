"""The input of a region's code generator: the program, the shapes, and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.kernels.region.program import Program
from onnxfuse.kernels.region.shapes import Shapes
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.runtime.plan import Device


@dataclass(frozen=True)
class Region:
    """A region's program, shapes and device, which determine its kernels."""

    program: Program
    shapes: Shapes
    aligned: bool  # whether operands and outputs start at multiples of 16 bytes
    device: Device
    is_wide: bool = False  # whether indices have 64 bits

    @property
    def sizes(self) -> Sizes:
        """The values of the sizes in the shapes; comparisons of sizes add guards (conditions) to the plan."""
        return self.shapes.sizes
