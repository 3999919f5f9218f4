"""Attention is stored as onnxruntime's own operators where these compute the same, and only there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from case_documents import read_cases
from exported_models import load_exported
from onnx import TensorProto
from runtimes import assert_close, run
from spellings import Spelling, build

from onnxfuse import optimize
from onnxfuse.patterns.attention import attention
from onnxfuse.patterns.attention_with_cache import attention_with_cache

CASES = Path(__file__).parents[1] / "cases" / "attention.txt"
LAYOUTS = ("packed", "seq_first", "bshd", "bhsd")
RESULTS = ("packed", "rows", "bshd", "seq_first", "seq_first_rows", "bhsd")
LOWEST = float(np.finfo(np.float32).min)
INFINITY = float("inf")
OPERATORS = ("MultiHeadAttention", "GroupQueryAttention")
MULTI_HEAD, GROUPED = OPERATORS


def variant(choices: dict[str, str], dtype: int = TensorProto.FLOAT, **values: float) -> Spelling:
    said = ",".join(f"{name}={value}" for name, value in {**choices, **values}.items())
    return Spelling(attention, said or "plain", choices=choices, values=values, dtype=dtype, opset=18)


def stored(spelling: Spelling, *, masks: str = "") -> str:
    """Compare the body for onnxruntime with the model; return its operator for attention, "" if it has none."""
    unfused = build(spelling)
    inputs = {name: array.copy() for name, array in unfused.inputs.items()}
    if masks == "rows":  # all keys are masked for the first query of the first batch element
        kind = unfused.variant.choices["mask_kind"]
        inputs["mask"][0, :, 0] = {"boolean": False, "inverted": True, "additive": -np.inf}[kind]
    name = spelling.fusion.name
    optimized, report = optimize(unfused.model, only=[name], fallback="ort", verify=False)
    assert report.counts == {name: 1}
    expected, reason = run(unfused.model, inputs)
    assert expected is not None, reason
    actual, reason = run(optimized, inputs)
    assert actual is not None, reason
    for want, have in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(np.isnan(want), np.isnan(have))
        if masks == "rows" and spelling.choices["fully_masked"] == "zero" and "masked_score" not in spelling.values:
            assert not np.isnan(have).any()
    assert_close([np.nan_to_num(e) for e in expected], [np.nan_to_num(a) for a in actual], spelling.dtype)
    return operator_of(optimized)


def operator_of(model: onnx.ModelProto) -> str:
    """Return the operator for attention that all bodies of attention have, "" if they have none."""
    bodies = (f for f in model.functions if f.name.startswith("attention"))
    (found,) = {next((n.op_type for n in body.node if n.op_type in OPERATORS), "") for body in bodies}
    return found


def layouts() -> Iterator[dict[str, str]]:
    for q, k, v in itertools.product(LAYOUTS, repeat=3):
        yield {"q_layout": q, "k_layout": k, "v_layout": v}
    yield from ({"out_layout": out} for out in RESULTS)


@pytest.mark.parametrize("chosen", [*layouts()], ids=lambda chosen: "-".join(chosen.values()))
def test_every_layout(chosen: dict[str, str]) -> None:
    assert stored(variant(chosen)) == MULTI_HEAD


MASKS = [
    {"mask_kind": mask, "bias_kind": bias, "fully_masked": full}
    for mask in ("boolean", "inverted", "additive", "none")
    for bias in ("slopes", "position", "none")
    for full in ("zero", "softmax")
    if (mask, bias) != ("none", "position")  # what is added alone is a mask
]


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16], ids=["float32", "float16"])
@pytest.mark.parametrize("chosen", MASKS, ids=lambda chosen: "-".join(chosen.values()))
def test_every_mask(chosen: dict[str, str], dtype: int) -> None:
    infinite = {"masked_score": -INFINITY} if chosen["mask_kind"] in ("boolean", "inverted") else {}
    assert stored(variant(chosen, dtype, **infinite)) == MULTI_HEAD


@pytest.mark.parametrize("chosen", MASKS, ids=lambda chosen: "-".join(chosen.values()))
def test_rows_in_which_all_keys_are_masked(chosen: dict[str, str]) -> None:
    if chosen["mask_kind"] == "none":
        return
    scores = (-INFINITY, LOWEST) if chosen["mask_kind"] != "additive" else (None,)
    for score in scores:
        values = {} if score is None else {"masked_score": score}
        assert stored(variant(chosen, **values), masks="rows") == MULTI_HEAD


@pytest.mark.parametrize("kind", ["boolean", "inverted"])
def test_a_mild_mask_is_not_added(kind: str) -> None:
    """Adding -10000 to a score does not give -10000."""
    assert not stored(variant({"mask_kind": kind, "bias_kind": "none"}, masked_score=-10000.0))


def test_a_finite_mask_is_not_added_in_float16() -> None:
    """-65504 added to a score does not swallow it: a row whose keys are all masked would become its softmax."""
    assert not stored(variant({"mask_kind": "boolean"}, TensorProto.FLOAT16, masked_score=-65504.0))


def test_a_scale_of_zero_would_stand_for_the_default() -> None:
    assert not stored(variant({"mask_kind": "none", "bias_kind": "none"}, scale=0.0))


def test_the_operator_of_opset_23() -> None:
    bare = Spelling(attention, "operator", choices={"form": "operator"}, absent=frozenset({"mask"}))
    for values, operator in (({}, MULTI_HEAD), ({"is_causal": 1}, ""), ({"softcap": 2.0}, "")):
        unfused = build(Spelling(attention, "operator", choices=bare.choices, absent=bare.absent, values=values))
        optimized, _ = optimize(unfused.model, fallback="ort", verify=False)
        assert operator_of(optimized) == operator, values
        assert_close(run(unfused.model, unfused.inputs)[0], run(optimized, unfused.inputs)[0], TensorProto.FLOAT)


def test_causal_where_queries_and_keys_are_equally_many() -> None:
    text = """
        <ir_version: 11, opset_import: ["" : 23]>
        main (float[batch,2,6,8] q, float[batch,2,6,8] k, float[batch,2,6,8] v) => (float[batch,2,6,8] y)
        { y = Attention <is_causal = 1> (q, k, v) }
    """
    model = onnx.parser.parse_model(text)
    optimized, report = optimize(model, fallback="ort")
    assert (report.counts, report.verified.passed, operator_of(optimized)) == ({"attention": 1}, True, MULTI_HEAD)


@pytest.mark.parametrize(
    "name",
    ["bert_sdpa_ts_fp32", "gpt2_eager_dynamo_fp32", "llama_sdpa_dynamo_fp32", "llama_kvcache_sdpa_ts_fp32",
     "llama_eager_ts_fp16", "llama_sdpa_dynamo_fp16", "llama_kvcache_sdpa_dynamo_fp16", "qwen3_sdpa_dynamo_fp32",
     "vit_sdpa_dynamo_fp16", "swin_eager_dynamo_fp32", "t5_encoder_eager_ts_fp32", "transformer_encoder_dynamo_fp32"],
)  # fmt: skip
def test_exported_models(name: str) -> None:
    """Their masks, where they have one, are padding masks; their rotary tables are float32 in float16 models, too."""
    optimized, report = optimize(load_exported(f"{name}.onnx"), fallback="ort")
    assert report.verified.passed
    assert operator_of(optimized) == MULTI_HEAD


@pytest.mark.parametrize("shape", [(2, 3, 48), (2, 0, 48), (0, 3, 48)])
def test_heads_of_queries_keys_and_values_of_nothing(shape: tuple[int, ...]) -> None:
    """The body has no Reshape to -1, which fails where another axis is empty."""
    model = read_cases(CASES)["attention_with_heads_of_queries_keys_and_values_in_turn"].model
    optimized, report = optimize(model)
    assert report.counts == {"attention": 1}
    inputs = {"qkv": np.random.default_rng(0).standard_normal(shape, dtype=np.float32)}
    (expected, _), (actual, reason) = run(model, inputs), run(optimized, inputs)
    assert expected is not None and actual is not None, reason
    assert_close(expected, actual, TensorProto.FLOAT)


# --- GroupQueryAttention -----------------------------------------------------------------------------------------

CAUSAL = {"mask_kind": "causal", "bias_kind": "none"}
SIZES = {"batch": 2, "queries": 6, "keys": 6, "kv_heads": 3, "repeats": 2, "size": 8, "value_size": 8}
CACHED = SIZES | {"batch": 1, "new": 6, "past": 5, "keys": 11}
ONE_QUERY = {"batch": 2, "queries": 1, "new": 1, "keys": 6}


def causal(
    choices: dict[str, str] | None = None, sizes: dict[str, int] | None = None, dtype: int = TensorProto.FLOAT16,
    absent: frozenset[str] = frozenset({"mask"}), **values: float,
) -> Spelling:  # fmt: skip
    """Return attention of grouped heads under nothing but a causal mask, with a cache if `sizes` has a past."""
    sizes = sizes or SIZES
    fusion = attention_with_cache if "past" in sizes else attention
    chosen, given = {**CAUSAL, **(choices or {})}, {"masked_score": -INFINITY, **values}
    said = f"{choices}{values}{sizes}"
    return Spelling(fusion, said, choices=chosen, values=given, sizes=sizes, dtype=dtype, absent=absent, opset=18)


@pytest.mark.parametrize(
    "chosen",
    [{"out_layout": out} for out in RESULTS] + [{f"{name}_layout": layout} for name in "qkv" for layout in LAYOUTS],
    ids=lambda chosen: "-".join(chosen.values()),
)
def test_the_cache_is_an_input_of_the_operator(chosen: dict[str, str]) -> None:
    assert stored(causal(chosen, CACHED)) == GROUPED
    assert stored(causal(chosen)) == MULTI_HEAD, "it is the faster one without a past"


@pytest.mark.parametrize("sizes", [{}, ONE_QUERY, {"repeats": 1}, {"repeats": 1, **ONE_QUERY}, {"past": 1, "keys": 7}])
def test_rows_behind_a_past(sizes: dict[str, int]) -> None:
    assert stored(causal(sizes=CACHED | sizes)) == GROUPED


@pytest.mark.parametrize(
    ("dtype", "score", "inputs"),
    [(TensorProto.FLOAT16, -INFINITY, 3), (TensorProto.FLOAT16, -65504.0, 3), (TensorProto.FLOAT16, -10000.0, 6),
     (TensorProto.FLOAT, LOWEST, 3), (TensorProto.FLOAT, -65504.0, 6)],
)  # fmt: skip
def test_a_causal_mask_is_an_attribute_or_a_bias(dtype: int, score: float, inputs: int) -> None:
    spelling = causal(dtype=dtype, masked_score=score)
    assert stored(spelling) == MULTI_HEAD
    (body,) = optimize(build(spelling).model, fallback="ort", verify=False)[0].functions
    assert [len(node.input) for node in body.node if node.op_type == MULTI_HEAD] == [inputs]


def test_the_lowest_float16_masks_as_minus_infinity_does() -> None:
    for full in ("zero", "softmax"):
        assert stored(causal({"fully_masked": full}, CACHED, masked_score=-65504.0)) == GROUPED


def test_one_query_without_a_mask_is_the_last() -> None:
    assert stored(causal({"mask_kind": "none"}, CACHED | ONE_QUERY)) == GROUPED
    assert stored(causal({"mask_kind": "none"}, CACHED)) == MULTI_HEAD


@pytest.mark.parametrize(
    ("spelling", "operator"),
    [
        (causal(sizes=CACHED, dtype=TensorProto.FLOAT), MULTI_HEAD),
        (causal(sizes=CACHED | {"size": 12, "value_size": 12}), MULTI_HEAD),
        (causal(sizes=CACHED | {"value_size": 16}), MULTI_HEAD),
        (causal(sizes=CACHED | {"size": 264, "value_size": 264}), MULTI_HEAD),
        (causal(sizes=CACHED | {"queries": 4}), MULTI_HEAD),
        (causal(sizes=CACHED | {"batch": 2}), MULTI_HEAD),
        (causal({"cache_layout": "bshd"}, CACHED), MULTI_HEAD),
        (causal({"bias_kind": "position"}, CACHED), MULTI_HEAD),
        (causal(sizes=CACHED, absent=frozenset()), MULTI_HEAD),
        (causal(sizes=CACHED, masked_score=-10000.0), MULTI_HEAD),
        (causal(sizes=CACHED, scale=0.0), ""),
    ],
    ids=["float32", "12-elements", "wider-values", "264-elements", "fewer-queries", "batch", "rows-before-heads",
         "biased", "padded", "mild", "scale-0"],
)  # fmt: skip
def test_where_group_query_attention_is_not_exact(spelling: Spelling, operator: str) -> None:
    assert stored(spelling) == operator


@pytest.mark.parametrize(("cap", "operator"), [(0.0, MULTI_HEAD), (2.0, GROUPED)])
def test_the_causal_operator_of_grouped_heads(cap: float, operator: str) -> None:
    """The operator is causal by its attribute, or by a mask that is a constant triangle."""
    by_attribute = f"y = Attention <is_causal = 1, softcap = {cap}> (q, k, v)"
    flags = ", ".join(str(int(key <= row)) for row in range(6) for key in range(6))
    by_mask = f"""numbers = Constant <value = int32[6,6] {{{flags}}}> ()
        mask = Cast <to = 9> (numbers)  y = Attention <softcap = {cap}> (q, k, v, mask)"""
    heads = "float16[3,4,6,8] q, float16[3,2,6,8] few_keys, float16[3,2,6,8] few_values"
    repeat = """twice = Constant <value_ints = [1, 1, 2, 1, 1]> ()  shape = Constant <value_ints = [3, 4, 6, 8]> ()
        two = Constant <value_ints = [2]> ()
        key = Unsqueeze (few_keys, two)  value = Unsqueeze (few_values, two)
        each_key = Expand (key, twice)  each_value = Expand (value, twice)
        k = Reshape (each_key, shape)  v = Reshape (each_value, shape)"""
    for nodes in (by_attribute, by_mask):
        head = '<ir_version: 11, opset_import: ["" : 23]>'
        model = onnx.parser.parse_model(f"{head} main ({heads}) => (float16[3,4,6,8] y) {{ {repeat} {nodes} }}")
        optimized, report = optimize(model, fallback="ort")
        assert (report.counts, report.verified.passed, operator_of(optimized)) == ({"attention": 1}, True, operator)


STEP = """
    <ir_version: 8, opset_import: ["" : 18]>
    main (float16[BATCH,4,1,8] q, float16[BATCH,4,1,8] k, float16[BATCH,4,1,8] v,
          float16[BATCH,4,past,8] old_keys, float16[BATCH,4,past,8] old_values)
      => (float16[BATCH,4,1,8] y, float16[BATCH,4,all,8] keys, float16[BATCH,4,all,8] values)
    {
        keys = Concat <axis = 2> (old_keys, k)
        values = Concat <axis = 2> (old_values, v)
        columns = Transpose <perm = [0, 1, 3, 2]> (keys)
        scores = MatMul (q, columns)
        p = Softmax <axis = -1> (scores)
        y = MatMul (p, values)
    }
"""


@pytest.mark.parametrize(("batch", "operator"), [("3", GROUPED), ("batch", MULTI_HEAD)])
def test_a_step_behind_any_past(batch: str, operator: str) -> None:
    """A past may be empty; an empty batch would end the process, and a dynamic batch may be empty."""
    model = onnx.parser.parse_model(STEP.replace("BATCH", batch))
    optimized, report = optimize(model, fallback="ort", verify=False)
    assert (report.counts, operator_of(optimized)) == ({"attention_with_cache": 1}, operator)
    for past in (0, 1, 9):
        for images in (3,) if batch == "3" else (3, 0):
            random = np.random.default_rng(past)
            shapes = {**dict.fromkeys("qkv", (images, 4, 1, 8)), "old_keys": (images, 4, past, 8)}
            shapes["old_values"] = shapes["old_keys"]
            inputs = {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
            (expected, _), (actual, reason) = run(model, inputs), run(optimized, inputs)
            assert expected is not None and actual is not None, reason
            assert_close(expected, actual, TensorProto.FLOAT16)


def test_rotated_queries_and_keys_are_rounded_in_front_of_the_product() -> None:
    """The model rotates them in float32, and multiplies them in float16."""
    cases = read_cases(CASES.with_name("attention_with_rotary_embedding.txt"))
    model = cases["attention_with_rotary_embedding_in_float32_of_float16"].model
    optimized, _ = optimize(model, verify=False)
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal((2, 4, 5, 8)).astype(np.float16) for name in "qkv"}
    inputs |= {name: random.uniform(-1, 1, (2, 1, 5, 8)).astype(np.float32) for name in ("cos", "sin")}
    (expected, _), (actual, reason) = run(model, inputs), run(optimized, inputs)
    assert expected is not None and actual is not None, reason
    np.testing.assert_array_equal(actual[0], expected[0])


def test_a_result_in_float32() -> None:
    """GroupQueryAttention would have to run in float32, for which the CUDA provider has no kernel."""
    unfused = build(causal(sizes=CACHED))
    unfused.model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    last = unfused.model.graph.node[-1]
    unfused.model.graph.node.append(onnx.helper.make_node("Cast", ["half"], [*last.output], to=TensorProto.FLOAT))
    last.output[0] = "half"
    optimized, report = optimize(unfused.model, fallback="ort")
    assert (report.counts, report.verified.passed, operator_of(optimized)) == ({"attention_with_cache": 1}, True, "")
