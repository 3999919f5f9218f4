"""A fusion's terms against a model's tensors: a Match, or the Miss that came nearest.

Nodes are of two kinds: those of a Match are replaced by the fused node; views and scalings of an operand, Casts of an
input and shared values are only seen through, and die later if nothing else reads them.
"""

from onnxfuse.match.matcher import Matcher
from onnxfuse.match.state import Match, Miss
from onnxfuse.match.words import count, needed_ops, node_name

__all__ = ["Match", "Matcher", "Miss", "count", "needed_ops", "node_name"]
