"""The facts that decide how a region runs: its program, its shapes, and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.kernels.region.program import Program
from onnxfuse.kernels.region.shapes import Shapes
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.runtime.plan import Device


@dataclass(frozen=True)
class Region:
    """What decides how a region runs."""

    program: Program
    shapes: Shapes
    aligned: bool  # operands and outputs start at multiples of 16 bytes
    device: Device
    is_wide: bool = False  # indices have 64 bits

    @property
    def sizes(self) -> Sizes:
        """The sizes in the shapes."""
        return self.shapes.sizes
