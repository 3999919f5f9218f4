"""Every step of optimizing is made to raise: it is left out, the report names it, and the rest is written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import onnx
import pytest
import test_spelled_rules as rules
from layout_models import parse as parsed_image
from spelled_models import parsed
from spellings import GENERATED, Unfused, Unwritable, build, longest
from test_quantized_rules import EXACT, FLOATS, with_integers

from onnxfuse import Fusion, Report, fuse_model, halving, optimize, optimizer, unfuse, verifier
from onnxfuse.analysis.shape_rules import SHAPE_RULES
from onnxfuse.analysis.value_rules import VALUE_RULES
from onnxfuse.ir.graph import Graph
from onnxfuse.match.matcher import Matcher
from onnxfuse.pipeline import LATE_PASSES, PIPELINE
from onnxfuse.regions.joining import Joining
from onnxfuse.rewrite import replace
from onnxfuse.rewrite.make_keys_row_major import make_keys_row_major
from onnxfuse.spell_out.spell_out import RULES
from onnxfuse.steps import left_out as left_out_record
from onnxfuse.verify.compare import compare
from onnxfuse.verify.compare_parts import PartFinding, PartsVerification

BLOCK = parsed(
    "(float[n,4,8] x) => (float[n,4,8] y) <float[8] g, float[8] b, float[8,8] w, float[8] c, float one = {1}> "
    "{ h = LayerNormalization(x, g, b) p = MatMul(h, w) q = Add(p, c) r = Relu(q) s = Mul(r, one) y = Add(s, x) }"
)
IMAGE = parsed_image(
    "(float[n,8,6,6] x) => (float[n,8,6,6] y) <float[8,8,3,3] v, float[8,8,3,3] w> "
    "{ a = Conv <pads = [1,1,1,1]> (x, v) b = Relu(a) y = Conv <pads = [1,1,1,1]> (b, w) }"
)
FUSIONS = [fusion.name for fusion in GENERATED]


def raises(*_: object, **__: object) -> NoReturn:
    raise KeyError("on purpose")


def left_out(model: onnx.ModelProto, **options: Any) -> tuple[onnx.ModelProto, Report, list[str]]:
    """Optimize a model; return what is written, the report, and the names of the steps that were left out."""
    made, report = optimize(model, **options)
    for one in report.left_out:
        assert one.error == "KeyError: 'on purpose'" and Path(one.where.rpartition(":")[0]).name == Path(__file__).name
        assert "in raises" in one.traceback
    return made, report, [one.step for one in report.left_out]


def kinds(report: Report) -> set[str]:
    return {one.fusion for one in report.fused}


@pytest.mark.parametrize("name", [each.__name__ for each in (*PIPELINE, *LATE_PASSES, make_keys_row_major)])
def test_a_pass_that_raises_half_way_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(graph: Graph, *_: object) -> NoReturn:
        graph.nodes[0].inputs.clear()
        raises()

    breaks.__name__ = name
    for table in ("PIPELINE", "LATE_PASSES"):
        with_it = tuple(breaks if each.__name__ == name else each for each in getattr(fuse_model, table))
        monkeypatch.setattr(fuse_model, table, with_it)
    if name == make_keys_row_major.__name__:
        monkeypatch.setattr(fuse_model, name, breaks)
    _, report, steps = left_out(BLOCK)
    assert steps == [f"pass {name}"]
    assert report.verified.status == "verified"
    assert kinds(report) == {"layer_norm", "gemm_bias_activation"}


@functools.cache
def models_of_rules() -> dict[str, list[onnx.ModelProto]]:
    """Return models by the operators that rules spell out."""
    texts = [parsed(text) for text in rules.IN_ONNXRUNTIME.values()]
    texts += [parsed(text, opset) for (opset, _), text in rules.OF_ONNX.items()]
    texts += [parsed(text) for text, _ in rules.IN_NUMPY.values()]
    texts += [with_integers(text) for text in (EXACT | FLOATS).values()]
    found: dict[str, list[onnx.ModelProto]] = {}
    for model in texts:
        for node in model.graph.node:
            found.setdefault(f"{node.domain}::{node.op_type}" if node.domain else node.op_type, []).append(model)
    return found


ALIKE = {  # operators of no model of those, and operators that are spelled alike
    "com.microsoft::SimplifiedLayerNormalization": "SimplifiedLayerNormalization",
    "com.microsoft::TransposeMatMul": "com.microsoft::FusedMatMul",
}
NOT_LOADED = {"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"}  # ONNX has no such operators


@pytest.mark.parametrize("op", sorted(RULES.keys() - NOT_LOADED))
def test_a_spelling_that_raises_is_left_out(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(models_of_rules()[ALIKE.get(op, op)][0])
    domain, _, name = op.rpartition("::")
    for node in model.graph.node:
        if (node.domain, node.op_type) in ((domain, name), tuple(ALIKE.get(op, "::").rpartition("::")[::2])):
            node.domain, node.op_type = domain, name
    assert any((node.domain, node.op_type) == (domain, name) for node in model.graph.node)
    monkeypatch.setitem(RULES, op, raises)
    made, report, steps = left_out(model, skip=["group_query_attention"])  # which takes an operator as a whole
    assert steps == [f"spelling {op} out"]
    assert report.stays[0].reason == "its rule raised KeyError"
    assert any((node.domain, node.op_type) == (domain, name) for node in made.graph.node)
    assert report.verified.passed or "cannot run the original" in report.verified.reason


@functools.cache
def model_of(name: str) -> Unfused:
    """Return a model in which a fusion is found."""
    fusion = next(fusion for fusion in GENERATED if fusion.name == name)
    for opset in (17, 20, 23):
        try:
            return build(longest(fusion, opset))
        except Unwritable:
            continue
    raise AssertionError(f"{name} has no model")


def raising_for(wanted: str, function: Callable[..., Any], fusion_of: Callable[..., Fusion]) -> Callable[..., Any]:
    """Return a function that raises for one fusion, and else does what `function` does."""
    return lambda *given: raises() if fusion_of(*given).name == wanted else function(*given)


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_whose_matching_raises_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matcher, "_at", raising_for(name, Matcher._at, lambda matcher, _: matcher.fusion))
    unfused = model_of(name)
    _, report, steps = left_out(unfused.model, inputs=unfused.inputs)
    assert steps == [f"fusion {name}"]
    assert name not in kinds(report)
    assert report.verified.passed, report.verified.reason


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_whose_body_cannot_be_written_for_an_error_is_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfused = model_of(name)
    assert name in kinds(optimize(unfused.model, verify=False, regions=False)[1])
    monkeypatch.setattr(replace, "function", raising_for(name, replace.function, lambda fusion, *_: fusion))
    _, report, steps = left_out(unfused.model, inputs=unfused.inputs, regions=False)
    assert steps == [f"fusion {name}"]
    assert name not in kinds(report)
    assert report.verified.passed, report.verified.reason


def test_control_characters_of_an_error_are_escapes() -> None:
    assert left_out_record("pass a", ValueError("name \x1b]8;;")).error == "ValueError: name \\x1b]8;;"


def test_fusions_that_all_raise_are_all_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matcher, "_at", raises)
    _, report, steps = left_out(BLOCK, regions=False)
    assert {"fusion layer_norm", "fusion gemm_bias_activation"} <= set(steps)
    assert not report.fused and report.verified.status == "verified"


LOOP = parsed(
    "(float[n,4,8] x, float[8,8] w) => (float[n,4,8] y) "
    "<int64 count = {3}, bool always = {1}, float[8] g, float[8] b> { "
    "y = Loop <body = step (int64 i, bool more, float[n,4,8] a) => (bool again, float[n,4,8] z) "
    "{ again = Identity(more) h = LayerNormalization(a, g, b) z = MatMul(h, w) }> (count, always, x) }"
)
CALL = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17, "own" : 1]> main (float[n,8] x) => (float[n,8] y) { y = own.f(x) } '
    '<domain: "own", opset_import: ["" : 17]> f (a) => (b) { c = Relu(a) b = Exp(c) }'
)
SOFTMAX = parsed("(float[n,8] x) => (float[n,8] y) { h = Exp(x) y = Softmax <axis = -1> (h) }")
STEPS = [  # the model, the step, what raises in it, and the fusions that are left
    (BLOCK, "spelling operators out", (fuse_model, "spell_out"), {"layer_norm", "gemm_bias_activation"}),
    (BLOCK, "spelling operators out", (fuse_model, "left_over"), {"layer_norm", "gemm_bias_activation"}),
    (BLOCK, "estimating traffic", (fuse_model, "estimate_traffic"), {"layer_norm", "gemm_bias_activation"}),
    (BLOCK, "forming regions", (fuse_model, "assign_regions"), {"layer_norm", "gemm_bias_activation"}),
    (SOFTMAX, "forming regions", (Joining, "_may_be_in_region"), {"softmax"}),
    (IMAGE, "assigning layouts", (fuse_model, "assign_layouts"), {"conv_bias_activation"}),
    (LOOP, "fusing inside If, Loop and Scan", (fuse_model, "with_known_branches"), set()),
    (LOOP, "fusing inside If, Loop and Scan", (fuse_model, "read_invariants_outside"), set()),
    (LOOP, "fusing inside If, Loop and Scan", (fuse_model, "infer_results"), set()),
    (LOOP, "fusing inside If, Loop and Scan", (fuse_model, "read_bodies"), set()),
    (LOOP, "fusing inside If, Loop and Scan", (fuse_model, "write_body"), set()),
    (CALL, "inlining of functions", (fuse_model, "inline_functions"), set()),
    (BLOCK, "report", (optimizer, "gather_facts"), {"layer_norm", "gemm_bias_activation"}),
    (BLOCK, "report", (optimizer, "count_operators"), {"layer_norm", "gemm_bias_activation"}),
]


@pytest.mark.parametrize(("model", "name", "place", "left"), STEPS, ids=[step[2][1] for step in STEPS])
def test_any_other_step_that_raises_is_left_out(
    model: onnx.ModelProto, name: str, place: tuple[Any, str], left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"layout": "nhwc"} if model is IMAGE else {}
    assert optimize(model, **options)[1].fused
    monkeypatch.setattr(*place, raises)
    _, report, steps = left_out(model, **options)
    assert steps == [name]
    assert kinds(report) == left
    assert report.verified.passed, report.verified.reason


@pytest.mark.parametrize("table", [SHAPE_RULES, VALUE_RULES], ids=["shapes", "values"])
def test_rules_of_inference_that_raise_tell_nothing(
    table: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for op in table:
        monkeypatch.setitem(table, op, raises)
    model = parsed("(float[n,8] x) => (float[n,8] y) { s = Shape(x) h = Reshape(x, s) y = Relu(h) }")
    _, report, steps = left_out(model)
    assert "inference of Shape" in steps
    assert report.verified.passed, report.verified.reason


@pytest.mark.parametrize("name", ["wrong_constants", "compare_parts", "distinct_parts", "compare_with", "run_original"])
def test_a_verification_that_raises_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it could not compare is not compared, and the rest is."""
    monkeypatch.setattr(verifier, name, raises)
    made, report, steps = left_out(BLOCK)
    assert set(steps) == {"verification"}
    assert kinds(report) == {"layer_norm", "gemm_bias_activation"}
    assert report.verified.status == ("verified" if name == "wrong_constants" else "partly")
    assert compare(BLOCK, made).passed


def test_what_was_taken_back_stays_so_where_the_verification_raises_later(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_parts, rounds = verifier.compare_parts, iter(range(10))

    def first(unfused: Any, model: Any, parts: Any, **options: Any) -> PartsVerification:
        if next(rounds):
            raises()
        found = [one for one in parts if one.fused.op_type == "layer_norm"]
        assert compare_parts(unfused, model, parts, **options)
        return PartsVerification(tuple(PartFinding(one, "it differs") for one in found), (), frozenset())

    monkeypatch.setattr(verifier, "compare_parts", first)
    _, report, steps = left_out(BLOCK)
    assert set(steps) == {"verification"}
    assert [one.fusion for one in report.dropped] == ["layer_norm"]
    assert kinds(report) == {"gemm_bias_activation"}


@pytest.mark.parametrize(("function", "name"), [("scale_queries", "queries"), ("scale_products", "products")])
def test_a_step_of_half_precision_that_raises_is_left_out(
    function: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halving, function, raises)
    made, report, steps = left_out(BLOCK, dtype="float16")
    assert steps == [f"scaling of {name}"]
    assert report.verified.passed, report.verified.reason
    assert report.half is not None and report.half.nodes
    assert any(each.data_type == onnx.TensorProto.FLOAT16 for each in made.graph.initializer)


def test_a_pass_that_raises_in_unfuse_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fused, _ = optimize(BLOCK)
    raising = functools.wraps(PIPELINE[0])(raises)
    monkeypatch.setattr(fuse_model, "PIPELINE", (raising, *PIPELINE[1:]))
    apart, verified = unfuse(fused)
    assert not apart.functions and verified.passed
    assert f"left out: pass {PIPELINE[0].__name__} raised KeyError: 'on purpose'" in caplog.text
