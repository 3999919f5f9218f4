"""Test how the fused nodes are found because of which a model differs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.parser
import pytest
from exported_models import load_exported

from onnxfuse import optimize
from onnxfuse.culprits import Culprit, FusedNode, find_culprits
from onnxfuse.dsl import catalogue
from onnxfuse.fuse_model import FusedModel, Settings, fuse_model
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.protos import nodes
from onnxfuse.layout.conversion import Layout
from onnxfuse.verify.compare import Verification, compare

HEAD = '<ir_version: 9, opset_import: ["" : 18]>'
AGREES = Verification(True, (), "", ())


def chain(count: int) -> onnx.ModelProto:
    """Return a chain in which every other fused node is a Softmax, and the others are Swishes."""
    softmax = "m{i} = ReduceMax (x{i}, last)  d{i} = Sub (x{i}, m{i})  e{i} = Exp (d{i})  s{i} = ReduceSum (e{i}, last)  x{j} = Div (e{i}, s{i})"  # noqa: E501
    swish = "g{i} = Sigmoid (x{i})  x{j} = Mul (x{i}, g{i})"
    text = "\n".join((swish if i % 2 else softmax).format(i=i, j=i + 1) for i in range(count))
    signature = f"(float[b, 8] x0) => (float[b, 8] x{count}) <int64[1] last = {{-1}}>"
    return onnx.parser.parse_model(f"{HEAD} g {signature} {{ {text} }}")


def fused(model: onnx.ModelProto, layout: Layout = "nchw", regions: bool = False) -> FusedModel:
    return fuse_model(
        model, None, Settings(catalogue.with_folders([]), layout=layout, regions=regions, keep_unfused=True)
    )


def search(result: FusedModel, wrong: Callable[[set[str]], str]) -> tuple[list[Culprit], list[set[str]]]:
    """Return the culprits, where `wrong` says of the names of fused nodes what differs, and all tries."""
    tried: list[set[str]] = []

    def differs(names: set[str]) -> Verification:
        reason = wrong(names)
        return Verification(not reason, (), reason, ())

    def compared(model: onnx.ModelProto) -> Verification:
        tried.append({node.name for node in nodes(model.graph) if node.domain == DOMAIN})
        return differs(tried[-1])

    return find_culprits(result, differs({one.node for one in result.fused}), compared), tried


def nodes_of(result: FusedModel) -> list[str]:
    """Return the names of the fused nodes of a chain, in execution order."""
    return sorted((one.node for one in result.fused), key=lambda name: int(name.partition("/")[0][1:]))


def names(found: list[Culprit]) -> list[str]:
    return [one.node.fused.node for one in found]


def test_one_culprit_takes_a_logarithm_of_comparisons() -> None:
    result = fused(chain(32))
    every = nodes_of(result)
    assert len(every) == 32
    for culprit in every[0], every[17], every[31]:
        found, tried = search(result, lambda those, culprit=culprit: "output 'y' differs" if culprit in those else "")  # type: ignore[misc]
        assert names(found) == [culprit] and found[0].differs_alone
        assert len(tried) <= math.log2(len(every)) + 3


def test_independent_culprits_are_found_each() -> None:
    result = fused(chain(16))
    every = nodes_of(result)
    wrong = {every[2], every[5]}
    found, tried = search(result, lambda those: "output 'y' differs" if wrong & those else "")
    assert set(names(found)) == wrong and len(tried) <= 2 * (math.log2(16) + 3)


def test_of_culprits_with_one_body_all_are_taken() -> None:
    result = fused(chain(16))
    every = nodes_of(result)
    wrong = {every[2], every[8], every[14]}
    found, _ = search(result, lambda those: "output 'y' differs" if wrong & those else "")
    assert set(names(found)) == {*every[::2]}


def test_what_onnxruntime_names_is_taken_at_once() -> None:
    result = fused(chain(16))
    culprit = nodes_of(result)[9]
    found, tried = search(result, lambda those: f"it failed: Node ({culprit}) Op (Reshape)" if culprit in those else "")
    assert names(found) == [culprit] and len(tried) == 3


def test_an_innocent_node_that_is_named_stays() -> None:
    """onnxruntime may name the node that meets what another one did wrong."""
    result = fused(chain(16))
    culprit, named = nodes_of(result)[3], nodes_of(result)[11]
    found, _ = search(result, lambda those: f"Node ({named}) failed" if culprit in those else "")
    assert names(found) == [culprit]


def test_nodes_that_differ_only_together_do_not_differ_alone() -> None:
    result = fused(chain(8))
    _, first, *_, second, _ = nodes_of(result)
    pair = {first, second}
    found, _ = search(result, lambda those: "output 'y' differs" if pair <= those else "")
    assert names(found) == [second] and not found[0].differs_alone


def test_nothing_is_found_where_the_model_differs_without_fused_nodes() -> None:
    found, tried = search(fused(chain(4)), lambda those: "output 'y' differs")
    assert not found and tried == [set()]


def test_names_are_whole_words() -> None:
    node = FusedNode("", fused(chain(1)).fused[0], "softmax_2", False)
    assert node.is_named("in function softmax_2, node Reshape")
    assert not node.is_named("in function softmax_21")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    "name", ["resnet50_ts13_bn_fp32.onnx", "detector_ts11_bn_fp32.onnx", "swin_eager_dynamo_fp32.onnx"]
)
def test_models_with_some_of_their_fused_nodes_compute_the_same(name: str, layout: Layout) -> None:
    original = load_exported(name)
    result = fused(original, layout, regions=True)
    every = {one.node for one in result.fused}
    chosen = random.Random(name)
    some = {one for one in sorted(every) if chosen.random() < 0.5}
    seen: list[int] = []

    def compared(model: onnx.ModelProto) -> Verification:
        """Compare the model that lacks one half of the nodes; the search then ends."""
        seen.append(sum(node.domain == DOMAIN for node in model.graph.node))
        found = compare(original, model, shapes=())
        assert found.passed is True, found.reason
        return found

    from onnxfuse import culprits

    kept = [one for one in culprits.fused_nodes(result) if one.fused.node in some]
    culprits._compare_with(compared, result, kept)
    culprits._compare_with(compared, result, [])
    assert 0.9 * len(kept) <= seen[0] <= len(kept) and seen[1] == 0


BRANCHES = """
main (float[b, 8] x, bool c) => (float[b, 8] y) <int64[1] last = {-1}>
{
  y = If (c) <
    then_branch = t () => (float[b, 8] p) {
      m = ReduceMax (x, last)  d = Sub (x, m)  e = Exp (d)  s = ReduceSum (e, last)  u = Div (e, s)
      half = Constant <value = float {0.5}> ()  one = Constant <value = float {1.0}> ()
      g = Sigmoid (x)  h = Mul (x, g)  p = Add (u, h)
    },
    else_branch = f () => (float[b, 8] q) {
      n = ReduceMax (x, last)  k = Sub (x, n)  l = Exp (k)  r = ReduceSum (l, last)  q = Div (l, r)
    }>
}"""
ONLY_IN_LARGE_BATCHES = '''"""A Swish whose stored body is another function where the batch is 1."""

from onnxfuse import either, fusion, op, tensor


@fusion(out="...")
def {name}(x=tensor("...")):
    """y = {formula}"""
    return either(op.Where(op.Less(op.Cast(op.Size(x), to=1), 9.0), op.Neg(x), {right}), {right})
'''


def test_a_culprit_in_one_branch_leaves_the_other_branch_fused(tmp_path: Path) -> None:
    """The parts agree on the values of the run that they are compared on; the model differs at a batch of 1."""
    text = ONLY_IN_LARGE_BATCHES.format(name="wrong_swish", formula="x sigmoid(x)", right="x * op.Sigmoid(x)")
    (tmp_path / "wrong_swish.py").write_text(text, encoding="utf-8")
    model = onnx.parser.parse_model(f"{HEAD} {BRANCHES}")
    _, report = optimize(model, only=["wrong_swish", "softmax"], patterns=[tmp_path])
    assert [one.fusion for one in report.dropped] == ["wrong_swish"]
    assert report.dropped[0].reason.startswith("at b=1 output 'y' is off by ")
    assert report.counts == {"softmax": 2} and report.verified.status == "verified"
