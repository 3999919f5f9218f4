"""A fusion's terms against a model's tensors: a Match, or the Miss that came nearest.

Nodes are of two kinds.  Those of a Match are replaced by the fused node.  Views and scalings of an operand, Casts of an
input and shared values are only seen through, and are removed later if nothing else reads them.
"""

from onnxfuse.match.matcher import Matcher
from onnxfuse.match.state import Match, Miss

__all__ = ["Match", "Matcher", "Miss"]
