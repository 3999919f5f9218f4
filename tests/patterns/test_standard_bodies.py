"""What is written as ONNX's own operators (`--emit standard`) computes what was fused, in onnxruntime's kernels."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import pytest
from conftest import EachCase
from onnx import TensorProto
from runtimes import assert_close, run
from sampling import by_parts, part_of
from spellings import GENERATED, Spelling, Unfused, build, spellings
from test_attention_bodies import CACHED, INFINITY, LOWEST, MASKS, SIZES, causal, layouts, variant

from onnxfuse import Fusion, Report, optimize
from onnxfuse.verify.compare import compare

PARTS = 18  # of the spellings of a fusion
by_name = pytest.mark.parametrize("fusion", GENERATED, ids=lambda fusion: fusion.name)
OPERATORS = {
    "attention": "Attention", "attention_with_cache": "Attention", "attention_with_rotary_embedding": "Attention",
    "add_layer_norm": "LayerNormalization", "layer_norm": "LayerNormalization", "group_norm": "GroupNormalization",
    "embedding_layer_norm": "LayerNormalization", "add_rms_norm": "RMSNormalization", "rms_norm": "RMSNormalization",
    "embedding_rms_norm": "RMSNormalization", "softmax": "Softmax",
}  # fmt: skip
RANDOM = np.random.default_rng(0)


def written(spelling: Spelling, *, masks: str = "") -> tuple[onnx.ModelProto, Report]:
    """Compare the model in ONNX's own operators with the unfused one; return it and the report."""
    unfused = build(spelling)
    inputs = {name: array.copy() for name, array in unfused.inputs.items()}
    if masks:  # all keys are masked for the first query of the first batch element
        kind = unfused.variant.choices["mask_kind"]
        number = -np.inf if masks == "infinite rows" else np.finfo(inputs["q"].dtype).min
        inputs["mask"][0, :, 0] = {"boolean": False, "inverted": True, "additive": number}[kind]
    return compared(unfused, inputs)


def compared(unfused: Unfused, inputs: dict[str, np.ndarray]) -> tuple[onnx.ModelProto, Report]:
    name = unfused.spelling.fusion.name
    model, report = optimize(unfused.model, only=[name], emit="standard", verify=False)
    assert report.counts == {name: 1}
    assert not model.functions
    onnx.checker.check_model(model, full_check=True)
    expected, reason = run(unfused.model, inputs)
    assert expected is not None, reason
    actual, reason = run(model, inputs)
    assert actual is not None, reason
    for want, have in zip(expected, actual, strict=True):
        # Attention gives 0, or the mean of the values, for a row whose keys are all masked by -inf.
        have[np.isnan(want)] = 0
        assert not np.isnan(have).any()
    assert_close([np.nan_to_num(e) for e in expected], actual, unfused.spelling.dtype)
    return model, report


def inputs_of(model: onnx.ModelProto, op: str) -> list[int]:
    """Return the indices of the inputs that the one node of an operator has."""
    (node,) = (node for node in model.graph.node if node.op_type == op)
    return [index for index, name in enumerate(node.input) if name]


def attributes_of(model: onnx.ModelProto, op: str) -> dict[str, object]:
    (node,) = (node for node in model.graph.node if node.op_type == op)
    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}


@by_parts(PARTS)
@by_name
def test_every_spelling(fusion: Fusion, part: int, each_case: EachCase) -> None:
    for spelling, subtest in each_case(part_of(spellings(fusion).written, part, PARTS)):
        with subtest:
            unfused = build(spelling)
            if run(unfused.model, unfused.inputs)[0] is None:  # bfloat16, and tables that are broadcast over a batch
                continue
            model, report = compared(unfused, unfused.inputs)
            wanted = OPERATORS.get(fusion.name)
            if "instances" in spelling.choices.get("scale_layout", "") and spelling.leading > 1:
                wanted = (
                    "InstanceNormalization"  # with pixels on one axis, the scale of each image stands behind groups
                )
            assert wanted is None or Counter(node.op_type for node in model.graph.node)[wanted] == 1, report.standard


# --- attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [*layouts()], ids=lambda chosen: "-".join(chosen.values()))
def test_every_layout(chosen: dict[str, str]) -> None:
    """Where queries lie by rows, the operator reads heads side by side, and then no Transpose is needed."""
    model, _ = written(variant(chosen))
    assert ("q_num_heads" in attributes_of(model, "Attention")) == (chosen.get("q_layout", "packed") != "bhsd")
    if set(chosen.values()) == {"packed"}:
        assert "Transpose" not in {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16], ids=["float32", "float16"])
@pytest.mark.parametrize("chosen", MASKS, ids=lambda chosen: "-".join(chosen.values()))
def test_every_mask(chosen: dict[str, str], dtype: int) -> None:
    is_boolean = chosen["mask_kind"] in ("boolean", "inverted")
    infinite = {"masked_score": -INFINITY} if is_boolean else {}
    model, report = written(variant(chosen, dtype, **infinite))
    assert report.standard.counts == {"Attention": 1}
    read = chosen["mask_kind"] != "none" or chosen["bias_kind"] != "none"
    assert inputs_of(model, "Attention") == [0, 1, 2, 3][: 4 if read else 3]


@pytest.mark.parametrize("full", ["softmax", "zero"])
@pytest.mark.parametrize("score", [None, LOWEST, -1e38], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "inverted", "additive"])
def test_rows_in_which_all_keys_have_the_lowest_score(kind: str, score: float | None, full: str) -> None:
    """Their keys have equal weight; onnxruntime gives 0 where all masks of a row are the lowest number."""
    chosen = {"mask_kind": kind, "bias_kind": "none", "fully_masked": full}
    values = {} if score is None else {"masked_score": score}
    if (kind == "additive") == (score is None):
        written(variant(chosen, **values), masks="rows")


def test_rows_of_infinite_masks_whose_probabilities_are_replaced_by_zero() -> None:
    chosen = {"mask_kind": "additive", "bias_kind": "none", "fully_masked": "zero"}
    written(variant(chosen), masks="infinite rows")


def test_finite_masks_are_kept_above_the_lowest_number_by_one_node() -> None:
    chosen = {"mask_kind": "causal", "bias_kind": "none", "fully_masked": "zero"}
    spelling = variant(chosen, TensorProto.FLOAT16, masked_score=-65504.0)
    model, _ = optimize(build(spelling).model, emit="standard", verify=False)
    found = [node.op_type for node in model.graph.node]
    assert (found.count("Max"), found.count("Greater"), found.count("Attention")) == (1, 0, 1)


def test_a_row_of_nan_is_no_reason_to_take_attention_back() -> None:
    """The operator gives 0 for a row whose keys are all masked by -inf."""
    chosen = {"mask_kind": "boolean", "bias_kind": "none", "fully_masked": "softmax"}
    given = build(variant(chosen, masked_score=-INFINITY)).model
    model, report = optimize(given, emit="standard")
    assert (report.dropped, report.verified.status, compare(given, model).status) == ((), "verified", "verified")
    assert "Attention" in {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("kind", ["boolean", "inverted"])
def test_a_mild_mask_stays_in_plain_operators(kind: str) -> None:
    _, report = written(variant({"mask_kind": kind, "bias_kind": "none"}, masked_score=-10000.0))
    (attention,) = report.standard.written
    assert attention.operators == ()
    assert attention.reason.startswith("required: a score to which the mask is added becomes what the mask replaces it")


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_is_not_positive_stays_in_plain_operators(scale: float) -> None:
    _, report = written(variant({"mask_kind": "none", "bias_kind": "none"}, scale=scale))
    assert report.standard.written[0].reason == f"required: a scale that is positive; found scale {scale:g}, no cap"


def test_softcap() -> None:
    """The operator divides by softcap inside tanh, so that its scale is that of the pattern times the cap."""
    model, _ = written(variant({"capped": "tanh"}, scale=0.25, cap=2.0))
    found = attributes_of(model, "Attention")
    assert (found["scale"], found["softcap"]) == (0.5, 2.0)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("sizes", "absent", "is_causal", "masked"),
    [({}, {"mask"}, True, False), ({"queries": 4}, {"mask"}, False, True), ({}, set(), False, True)],
    ids=["alone", "fewer-queries", "and-padding"],
)
def test_a_causal_mask_is_an_attribute_where_it_ends_at_the_diagonal(
    sizes: dict[str, int], absent: set[str], is_causal: bool, masked: bool, cached: bool
) -> None:
    spelling = causal(sizes=(CACHED if cached else SIZES) | sizes, dtype=TensorProto.FLOAT, absent=frozenset(absent))
    model, _ = written(spelling)
    assert ("is_causal" in attributes_of(model, "Attention")) == is_causal
    assert inputs_of(model, "Attention") == [0, 1, 2] + [3] * masked + [4, 5] * cached


def test_grouped_heads_are_not_repeated() -> None:
    model, _ = written(causal(sizes=SIZES, dtype=TensorProto.FLOAT))
    found = attributes_of(model, "Attention")
    assert (found["q_num_heads"], found["kv_num_heads"]) == (6, 3)


def test_a_cache_with_rows_before_heads_is_appended_to_in_front() -> None:
    model, _ = written(causal({"cache_layout": "bshd"}, CACHED, TensorProto.FLOAT))
    assert 4 not in inputs_of(model, "Attention")
    assert [node.op_type for node in model.graph.node].count("Concat") >= 2


@pytest.mark.parametrize("form", [{}, {"is_causal": 1}, {"softcap": 2.0}])
def test_the_operator_stays_what_it_is(form: dict[str, float]) -> None:
    bare = Spelling(
        variant({}).fusion, "operator", choices={"form": "operator"}, absent=frozenset({"mask"}), values=form
    )
    model, _ = written(bare)
    assert attributes_of(model, "Attention").get("softcap", 0.0) == form.get("softcap", 0.0)


def test_a_causal_operator_under_a_mask_that_is_causal_too() -> None:
    """The operator's attribute counts keys from the first one, and the mask counts them from the last."""
    sizes = SIZES | {"queries": 4, "repeats": 1}
    chosen = {"form": "causal_operator", "q_layout": "bhsd", "k_layout": "bhsd", "v_layout": "bhsd"}
    spelling = replace(causal(chosen, sizes, TensorProto.FLOAT, is_causal=1), opset=23)
    model, report = written(spelling)
    assert (report.standard.counts, attributes_of(model, "Attention")["is_causal"]) == ({"Attention": 1}, 1)
    assert inputs_of(model, "Attention") == [0, 1, 2, 3]


# --- rotary embedding ----------------------------------------------------------------------------------------------

TABLES = {
    "halves": "c = Concat <axis = -1> (a, a)",
    "pairs": """one = Constant <value_ints = [-1]> ()  u = Unsqueeze (a, one)  d = Concat <axis = -1> (u, u)
        flat = Constant <value_ints = [0, 0, -1]> ()  c = Reshape (d, flat)""",
    "unknown": "b = Neg (a)  c = Concat <axis = -1> (a, b)",
}
TURNED = {
    "halves": """s0 = Constant <value_ints = [0]> ()  s1 = Constant <value_ints = [HALF]> ()
        s2 = Constant <value_ints = [WIDE]> ()  ax = Constant <value_ints = [-1]> ()
        left = Slice (part, s0, s1, ax)  right = Slice (part, s1, s2, ax)  neg = Neg (right)
        turned = Concat <axis = -1> (neg, left)""",
    "pairs": """s0 = Constant <value_ints = [0]> ()  s1 = Constant <value_ints = [1]> ()
        s2 = Constant <value_ints = [WIDE]> ()  ax = Constant <value_ints = [-1]> ()
        two = Constant <value_ints = [2]> ()
        left = Slice (part, s0, s2, ax, two)  right = Slice (part, s1, s2, ax, two)  neg = Neg (right)
        neg1 = Unsqueeze (neg, ax)  left1 = Unsqueeze (left, ax)  both = Concat <axis = -1> (neg1, left1)
        back = Constant <value_ints = [0, 0, 0, -1]> ()  turned = Reshape (both, back)""",
}


def rotary(pairs: str, table: str, rotated: int, batch: str, layout: str) -> onnx.ModelProto:
    """Return a rotary embedding of the first `rotated` of 16 elements of 4 heads."""
    first = "" if rotated < 16 else "part = Identity (h)"
    cut = f"""r0 = Constant <value_ints = [0]> ()  r1 = Constant <value_ints = [{rotated}]> ()
        r2 = Constant <value_ints = [16]> ()  rx = Constant <value_ints = [-1]> ()
        part = Slice (h, r0, r1, rx)  rest = Slice (h, r1, r2, rx)"""
    heads = """hs = Constant <value_ints = [0, 0, 4, 16]> ()  split = Reshape (x, hs)
        h = Transpose <perm = [0, 2, 1, 3]> (split)"""
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        main (float[batch,{"seq,64" if layout == "packed" else "4,seq,16"}] x, float[{batch},seq,{rotated // 2}] a)
          => (float[batch,4,seq,16] y) {{
        {heads if layout == "packed" else "h = Identity (x)"}  {first or cut}  {TABLES[table]}
        cosine = Cos (c)  sine = Sin (c)  hax = Constant <value_ints = [1]> ()
        cos = Unsqueeze (cosine, hax)  sin = Unsqueeze (sine, hax)
        {TURNED[pairs].replace("HALF", str(rotated // 2)).replace("WIDE", str(rotated))}
        m1 = Mul (part, cos)  m2 = Mul (turned, sin)
        {"y = Add (m1, m2)" if first else "z = Add (m1, m2)  y = Concat <axis = -1> (z, rest)"} }}"""
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("layout", ["packed", "bhsd"])
@pytest.mark.parametrize("batch", ["batch", "1"])
@pytest.mark.parametrize("rotated", [16, 8])
@pytest.mark.parametrize("pairs", ["halves", "pairs"])
def test_rotary_embedding(pairs: str, rotated: int, batch: str, layout: str) -> None:
    model = rotary(pairs, pairs, rotated, batch, layout)
    optimized, report = optimize(model, only=["rotary_embedding"], emit="standard")
    assert (report.counts, report.standard.counts) == ({"rotary_embedding": 1}, {"RotaryEmbedding": 1})
    assert report.verified.status == "verified"
    found = attributes_of(optimized, "RotaryEmbedding")
    assert found.get("interleaved", 0) == (pairs == "pairs")
    assert found.get("rotary_embedding_dim", 0) == (rotated if rotated < 16 else 0)
    inputs = {
        "x": RANDOM.standard_normal((3, 5, 64) if layout == "packed" else (3, 4, 5, 16)).astype(np.float32),
        "a": RANDOM.standard_normal((3 if batch == "batch" else 1, 5, rotated // 2)).astype(np.float32),
    }
    (expected, _), (actual, reason) = run(model, inputs), run(optimized, inputs)
    assert expected is not None and actual is not None, reason
    assert_close(expected, actual, TensorProto.FLOAT)


@pytest.mark.parametrize(("pairs", "table"), [("halves", "pairs"), ("pairs", "halves"), ("halves", "unknown")])
def test_tables_whose_columns_do_not_repeat(pairs: str, table: str) -> None:
    """The operator reads each column once, so that the table must be known to hold it twice."""
    _, report = optimize(rotary(pairs, table, 16, "batch", "bhsd"), only=["rotary_embedding"], emit="standard")
    (one,) = report.standard.written
    assert (one.operators, report.verified.status) == ((), "verified")
    assert one.reason.startswith(f"required: the columns of cos and sin are known to repeat, in {pairs}; found ")
