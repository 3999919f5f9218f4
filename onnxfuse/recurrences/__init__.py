"""Replaces each recurrence over a sequence, which is a Loop, a Scan or unrolled steps, by one fused node."""

from typing import Final

SCAN: Final = "scan"  # the fusion's name
SUMMARY: Final = "A recurrence over a sequence, such as a selective scan, whose states stay in registers."
DESCRIPTION: Final = """\
Such a node replaces a Scan, a Loop that goes along a sequence, or steps that an exporter has unrolled.  Elementwise
operators around it join it where that saves memory traffic.  The function that it calls holds them and a Loop.  Its
attribute `program` says what a step computes: `axes` of the operands, `states`, `ops` and `outputs`.

An mLSTM that a model computes in chunks of tokens, as xLSTM does, becomes such a node, too.  Its function holds the
model's nodes.

A step consists of elementwise operators, views that move no elements, and sums of products over one axis of at most 256
elements, such as the product of a state with a vector.  Every other axis is computed in parallel.
`onnxfuse explain MODEL scan` says why a Loop or Scan does not become such a node."""
