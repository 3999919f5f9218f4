"""Test the regions of exported models: what they compute, and how little is left beside them."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import onnx
import pytest
from exported_models import load_exported
from region_models import assert_programs_agree, left_by_onnxruntime, regions
from test_models import INDEX, draw

from onnxfuse import Report, optimize
from onnxfuse.algebra.operators import FREE
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.node import op_of
from onnxfuse.ir.serde import read_graph
from onnxfuse.regions.host import host_nodes
from onnxfuse.regions.maps import MAPS
from onnxfuse.regions.pointwise import POINTWISE

SAMPLE = ("bert_sdpa_dynamo_fp16", "detector_ts11_bn_fp32", "swin_eager_dynamo_fp32", "t5_encoder_eager_ts_fp32")
NAMES = [
    pytest.param(name, marks=() if name.removesuffix(".onnx") in SAMPLE else pytest.mark.slow) for name in sorted(INDEX)
]
ALLOWED = 0.05  # of the nodes


@functools.cache
def with_regions(name: str) -> tuple[onnx.ModelProto, Report]:
    return optimize(load_exported(name), verify=False)


@pytest.mark.parametrize("name", NAMES)
def test_programs_compute_what_bodies_do(name: str) -> None:
    model, report = with_regions(name)
    feeds = draw(INDEX[name]["inputs"], INDEX[name]["verified_sizes"][0])
    assert assert_programs_agree(model, feeds) == report.counts.get("region", 0)
    assert report.counts.get("region", 0) or name.removesuffix(".onnx") not in SAMPLE


def single_operators(model: onnx.ModelProto) -> Counter[str]:
    """Return the elementwise operators and index maps that are in no region and take time on a GPU."""
    graph = read_graph(model)
    graph.sort()
    host = host_nodes(graph, infer_shapes(graph))
    nodes = (node for node in graph.nodes if node not in host and not node.domain)
    return Counter(op_of(node) for node in nodes if op_of(node) in {*POINTWISE, *MAPS} - FREE)


@pytest.mark.slow
def test_few_operators_are_in_no_region() -> None:
    left: Counter[str] = Counter()
    nodes = 0
    for name in sorted(INDEX):
        model, _ = with_regions(name)
        own = single_operators(model)
        print(f"{name}: {own.total()} of {len(model.graph.node)} {dict(own)}")
        left += own
        nodes += len(model.graph.node)
    print(f"{left.total()} of {nodes}: {left}")
    assert left.total() <= ALLOWED * nodes, f"{left.total()} of {nodes}: {left}"


@pytest.mark.parametrize("name", [f"{name}.onnx" for name in SAMPLE])
def test_onnxruntime_runs_the_same_operators_on_the_cpu(name: str, tmp_path: Path) -> None:
    """It inlines the bodies before its own fusions, so that regions block none of these.

    A region takes the dims that its sizes depend on by itself, which may be a Shape more.
    """
    apart, together = (optimize(load_exported(name), regions=regions, verify=False)[0] for regions in (False, True))
    assert len(together.graph.node) < len(apart.graph.node)
    found, expected = (left_by_onnxruntime(model, tmp_path) for model in (together, apart))
    assert found.pop("Shape", 0) <= expected.pop("Shape", 0) + len(regions(together)) and found == expected
