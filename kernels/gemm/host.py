"""The plans of matrix products: one product, a gated one, or two or three products of one x."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from onnxfuse.kernels.epilogue_node import also_joined, is_joined
from onnxfuse.kernels.epilogue_program import joined_plans
from onnxfuse.kernels.gemm import hopper, small, stream
from onnxfuse.kernels.gemm.implementations import MAX_IMPLEMENTATIONS, implementations, implementations_if_any
from onnxfuse.kernels.gemm.operands import gemm_of, unsupported
from onnxfuse.kernels.gemm.problem import Gemm, group
from onnxfuse.kernels.implementation import Implementation, one_after_the_other
from onnxfuse.kernels.prologue_node import Norm, after_norm, also_normalized, norm_before
from onnxfuse.kernels.tensors import required_spec
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.symint import for_later_plans

MAX_GROUPED: Final = 4  # maximum implementations that compute all products in one launch
SUFFIXES: Final = ("", "_2", "_3")  # suffixes of the operands and attributes of the first, second and third product


@also_normalized
@also_joined
def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    return next((why for product in product_nodes(node) if (why := unsupported(product, input_dtypes, device))), None)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if is_joined(node):
        return _joined(node, inputs, device)
    if node.fusion == "gated_gemm":
        required_spec(node, inputs, "up")
    products = [gemm_of(each, inputs, device, SUFFIXES[i], i) for i, each in enumerate(product_nodes(node))]
    gemms, outputs = zip(*products, strict=True)
    norm = norm_before(node, inputs, len(outputs))
    ways = functools.partial(_implementations, gemms, device)
    found = _after_norm(group(gemms), norm, ways, device) if norm else ways()
    outputs = (*outputs, *(norm.sums if norm else ()))
    return [Plan(outputs, each.steps, each.scratch) for each in found[:MAX_IMPLEMENTATIONS]]


def _joined(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans of a product with fused operators, and perhaps a norm."""
    norm = norm_before(node, inputs, 1)

    def of_programs(gemm: Gemm, device: Device) -> list[Implementation]:
        ways = functools.partial(implementations_if_any, gemm, device)
        return _after_norm(gemm, norm, ways, device) if norm else ways()

    others = norm.sums if norm else ()
    return joined_plans(node, inputs, device, gemm_of, of_programs, candidates, selects=True, others=others)


def _after_norm(
    gemm: Gemm | None, norm: Norm, ways: Callable[[], list[Implementation]], device: Device
) -> list[Implementation]:
    """Return the implementations of products of a norm's result; first those whose kernel computes the norm.

    `gemm` describes all products, if one launch can compute them; `ways` returns their implementations without a norm.
    """
    few = stream.normalizing_implementations(replace(gemm, norm=norm), device) if gemm else []
    with for_later_plans(gemm.m if gemm and few else 0):
        return [*few, *after_norm(norm, ways(), device)]


def _implementations(gemms: Sequence[Gemm], device: Device) -> list[Implementation]:
    """Return the implementations of one or several products of one x."""
    together = _in_one_launch(gemms, device)[:MAX_GROUPED] if len(gemms) > 1 else []
    with for_later_plans(gemms[0].m if together else 0):
        each = [implementations(gemm, device) for gemm in gemms if gemm.m * gemm.n]
        return [*together, *one_after_the_other(each)]


def product_nodes(node: FusedNode) -> list[FusedNode]:
    """Return a copy of the node per product, with that product's weight layout as the attribute `weight_layout`."""
    suffixes = [suffix for suffix in SUFFIXES if node.input_index(f"w{suffix}") is not None] or [SUFFIXES[0]]
    layouts = [node.attributes.get(f"weight_layout{suffix}", "kn") for suffix in suffixes]
    return [replace(node, attributes={**node.attributes, "weight_layout": layout}) for layout in layouts]


def _in_one_launch(gemms: Sequence[Gemm], device: Device) -> list[Implementation]:
    """Return implementations that compute all products in one launch, so that the GPU drains once, not per product."""
    gemm = group(gemms)
    if not gemm:
        return []
    for_few_rows = small.implementations(gemm, device)[: MAX_GROUPED - 1]
    with for_later_plans(gemm.m if for_few_rows else 0):
        return [*for_few_rows, *hopper.implementations(gemm, device)]
