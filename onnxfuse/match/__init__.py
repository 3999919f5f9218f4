"""Match a fusion's terms against a model's tensors: the result is a Match, or the nearest Miss.

The matched nodes are of two kinds.  The nodes of a Match are replaced by the fused node.  The matcher looks through
the other nodes: views and scalings of an operand, Casts of an input, and nodes that compute shared values.  These other
nodes are removed later if nothing else reads them.
"""

from onnxfuse.match.matcher import Matcher
from onnxfuse.match.state import Match, Miss

__all__ = ["Match", "Matcher", "Miss"]
