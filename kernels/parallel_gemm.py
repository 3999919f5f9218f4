"""Matrix products of one input with two or three weights on the GPU: the candidates for a node's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from onnxfuse.kernels import _gemm_hopper, _gemm_small
from onnxfuse.kernels._gemm import Candidate, Gemm, together
from onnxfuse.kernels._gemm_candidates import all_candidates
from onnxfuse.kernels._gemm_operands import gemm_of, refuse
from onnxfuse.provider.plan import Device, FusedNode, Plan, TensorSpec

MOST_TOGETHER = 4  # candidates that compute all products in one launch, of MOST in all
MOST = 8
NUMBERS = ("", "_2", "_3")  # what the names of a product's operands and choices end with


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    return next((why for one in _products(node) if (why := refuse(one, input_dtypes, device))), None)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The ways to run it, what is expected to be fastest first.  Raises ValueError where shapes do not fit."""
    found = [gemm_of(one, inputs, device, NUMBERS[i], i) for i, one in enumerate(_products(node))]
    gemms, outputs = zip(*found, strict=True)
    ways = [*_together(gemms, device)[:MOST_TOGETHER], *_one_after_the_other(gemms, device)]
    return [Plan(outputs, way.steps, way.scratch) for way in ways[:MOST]]


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes where nothing was measured.  Raises ValueError where shapes do not fit."""
    return candidates(node, inputs, device)[0]


def _products(node: FusedNode) -> list[FusedNode]:
    """The node once for each product, with that product's layout as its own."""
    numbers = [number for number in NUMBERS if node.place(f"w{number}") is not None]
    layouts = [node.attributes.get(f"weight_layout{number}", "kn") for number in numbers]
    return [replace(node, attributes={**node.attributes, "weight_layout": layout}) for layout in layouts]


def _together(gemms: Sequence[Gemm], device: Device) -> list[Candidate]:
    """All products in one launch, so that multiprocessors run out of tiles once and not three times."""
    gemm = together(gemms)
    if not gemm:
        return []
    return [*_gemm_small.plans(gemm, device)[: MOST_TOGETHER - 1], *_gemm_hopper.plans(gemm, device)]


def _one_after_the_other(gemms: Sequence[Gemm], device: Device) -> list[Candidate]:
    """Each product by itself, all by their first candidates, all by their second …; they use the same scratch."""
    lists = [all_candidates(gemm, device) for gemm in gemms if gemm.m * gemm.n]
    ways = []
    for i in range(max(map(len, lists), default=1)):
        parts = [found[min(i, len(found) - 1)] for found in lists]
        steps = tuple(step for part in parts for step in part.steps)
        scratch = tuple(max(sizes) for sizes in zip_longest(*(part.scratch for part in parts), fillvalue=0))
        ways.append(Candidate(", ".join(dict.fromkeys(part.name for part in parts)), steps, scratch))
    return ways
