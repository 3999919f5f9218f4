"""Match a fusion's terms against a model's tensors: the result is a Match, or the nearest Miss.

The matched nodes are of two kinds.  The nodes of a Match are replaced by the fused node.  The other nodes compute views
or scalings of an operand, Casts of an input, or shared values: the matcher looks through them, and they are removed
later if nothing else reads them.
"""

from onnxfuse.match.matcher import Matcher
from onnxfuse.match.state import Match, Miss

__all__ = ["Match", "Matcher", "Miss"]
