"""Regions: connected elementwise operators, views and reductions that become one fused node with a generated kernel."""

from typing import Final

SUMMARY: Final = "Connected operators that no other fusion names: elementwise ones, index maps and reductions of rows."
DESCRIPTION: Final = """\
What the other fusions leave becomes regions, where that saves memory traffic or launches.  The function that a region
calls holds the very nodes.  Its attribute `program` says the same in one form for every opset: `ops`, each with its
operator, inputs, outputs and attributes, `outputs`, and `dtypes` of all values; x0, x1 and so on are the operands.

Elementwise operators that read the result of a matrix product, a fused norm or attention, or a channels-last
convolution become part of its node instead, unless `--no-epilogues` says otherwise.  It has the attribute `program`
too: x0 is the product's result there.  After a product, these operators may end in an ArgMax or ArgMin of each row:
most kernels for up to 64 rows then select the indices, and do not store the logits.

A norm that reads the result of a region, or whose rows a region moves, becomes part of that region.

All reductions of a region are over the same axes of one shape, and what follows them stays where it is in the rows.
A region computes sizes that follow from dims by itself.  Operators with shapes that are computed from anything else,
shape arithmetic, control flow, and dtypes other than float16, bfloat16, float32, float64, int64, int32, int8, uint8,
bool and, between quantizers, float8, int16 and uint16 stay out.  `onnxfuse explain MODEL region` says why nodes are in
none."""
