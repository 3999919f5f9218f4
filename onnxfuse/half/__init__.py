"""Convert a float32 model to float16 or bfloat16, so that it looks like an export in that precision."""

from onnxfuse.half.convert import Converted
from onnxfuse.half.precision import Kept, Precision

__all__ = ["Converted", "Kept", "Precision"]
