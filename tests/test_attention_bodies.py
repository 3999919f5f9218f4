"""Attention stored as com.microsoft.MultiHeadAttention: where it computes the same, and only there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from runtimes import assert_close, run
from spellings import Spelling, build

from onnxfuse import optimize
from onnxfuse.patterns.attention import attention

EXPORTED = Path(__file__).parent.parent / "models" / "exported"
CASES = Path(__file__).parent / "cases"
LAYOUTS = ("packed", "seq_first", "bshd", "bhsd")
RESULTS = ("packed", "rows", "bshd", "seq_first", "seq_first_rows", "bhsd")
LOWEST = float(np.finfo(np.float32).min)
INFINITY = float("inf")


def variant(choices: dict[str, str], dtype: int = TensorProto.FLOAT, **values: float) -> Spelling:
    said = ",".join(f"{name}={value}" for name, value in {**choices, **values}.items())
    return Spelling(attention, said or "plain", choices=choices, values=values, dtype=dtype, opset=18)


def differ(spelling: Spelling, *, masks: str = "") -> tuple[bool, onnx.ModelProto]:
    """Compare what is stored for onnxruntime with the model; whether it is MultiHeadAttention."""
    unfused = build(spelling)
    inputs = {name: array.copy() for name, array in unfused.inputs.items()}
    if masks == "rows":  # nothing counts for the first query of the first image
        kind = unfused.variant.choices["mask_kind"]
        inputs["mask"][0, :, 0] = {"boolean": False, "inverted": True, "additive": -np.inf}[kind]
    optimized, report = optimize(unfused.model, only=["attention"], fallback="ort", verify=False)
    assert report.counts == {"attention": 1}
    expected, reason = run(unfused.model, inputs)
    assert expected is not None, reason
    actual, reason = run(optimized, inputs)
    assert actual is not None, reason
    for want, have in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(np.isnan(want), np.isnan(have))
        if masks == "rows" and spelling.choices["fully_masked"] == "zero" and "masked_score" not in spelling.values:
            assert not np.isnan(have).any()
    assert_close([np.nan_to_num(e) for e in expected], [np.nan_to_num(a) for a in actual], spelling.dtype)
    return uses_operator(optimized), optimized


def uses_operator(model: onnx.ModelProto) -> bool:
    (body,) = (f for f in model.functions if f.name == "attention")
    return any(node.op_type == "MultiHeadAttention" for node in body.node)


def layouts() -> Iterator[dict[str, str]]:
    for q, k, v in itertools.product(LAYOUTS, repeat=3):
        yield {"q_layout": q, "k_layout": k, "v_layout": v}
    yield from ({"out_layout": out} for out in RESULTS)


@pytest.mark.parametrize("chosen", [*layouts()], ids=lambda chosen: "-".join(chosen.values()))
def test_every_layout(chosen: dict[str, str]) -> None:
    assert differ(variant(chosen))[0]


MASKS = [
    {"mask_kind": mask, "bias_kind": bias, "fully_masked": full}
    for mask in ("boolean", "inverted", "additive", "none")
    for bias in ("position", "none")
    for full in ("zero", "softmax")
]


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16], ids=["float32", "float16"])
@pytest.mark.parametrize("chosen", MASKS, ids=lambda chosen: "-".join(chosen.values()))
def test_every_mask(chosen: dict[str, str], dtype: int) -> None:
    infinite = {"masked_score": -INFINITY} if chosen["mask_kind"] in ("boolean", "inverted") else {}
    assert differ(variant(chosen, dtype, **infinite))[0]


@pytest.mark.parametrize("chosen", MASKS, ids=lambda chosen: "-".join(chosen.values()))
def test_rows_in_which_nothing_counts(chosen: dict[str, str]) -> None:
    if chosen["mask_kind"] == "none":
        return
    scores = (-INFINITY, LOWEST) if chosen["mask_kind"] != "additive" else (None,)
    for score in scores:
        values = {} if score is None else {"masked_score": score}
        assert differ(variant(chosen, **values), masks="rows")[0]


@pytest.mark.parametrize("kind", ["boolean", "inverted"])
def test_a_mild_mask_is_not_added(kind: str) -> None:
    """A score that is replaced by -10000 and one to which it is added differ."""
    assert not differ(variant({"mask_kind": kind, "bias_kind": "none"}, masked_score=-10000.0))[0]


def test_a_finite_mask_is_not_added_in_float16() -> None:
    """-65504 added to a score does not swallow it: a row in which nothing counts would be its softmax."""
    assert not differ(variant({"mask_kind": "boolean"}, TensorProto.FLOAT16, masked_score=-65504.0))[0]


def test_a_scale_of_zero_would_stand_for_the_default() -> None:
    assert not differ(variant({"mask_kind": "none", "bias_kind": "none"}, scale=0.0))[0]


def test_the_operator_of_opset_23() -> None:
    bare = Spelling(attention, "operator", choices={"form": "operator"}, absent=frozenset({"mask"}))
    for values, operator in (({}, True), ({"is_causal": 1}, False), ({"softcap": 2.0}, False)):
        unfused = build(Spelling(attention, "operator", choices=bare.choices, absent=bare.absent, values=values))
        optimized, _ = optimize(unfused.model, fallback="ort", verify=False)
        assert uses_operator(optimized) == operator, values
        assert_close(run(unfused.model, unfused.inputs)[0], run(optimized, unfused.inputs)[0], TensorProto.FLOAT)


def test_causal_where_queries_and_keys_are_equally_many() -> None:
    text = """
        <ir_version: 11, opset_import: ["" : 23]>
        main (float[batch,2,6,8] q, float[batch,2,6,8] k, float[batch,2,6,8] v) => (float[batch,2,6,8] y)
        { y = Attention <is_causal = 1> (q, k, v) }
    """
    model = onnx.parser.parse_model(text)
    optimized, report = optimize(model, fallback="ort")
    assert (report.counts, report.verified.passed, uses_operator(optimized)) == ({"attention": 1}, True, True)


@pytest.mark.parametrize(
    "name",
    ["bert_sdpa_ts_fp32", "gpt2_eager_dynamo_fp32", "llama_sdpa_dynamo_fp32", "llama_kvcache_sdpa_ts_fp32",
     "vit_sdpa_dynamo_fp16", "swin_eager_dynamo_fp32", "t5_encoder_eager_ts_fp32", "transformer_encoder_dynamo_fp32"],
)  # fmt: skip
def test_exported_models(name: str) -> None:
    optimized, report = optimize(str(EXPORTED / f"{name}.onnx"), fallback="ort")
    assert report.verified.passed
    bodies = [f for f in optimized.functions if f.name.startswith("attention")]
    assert bodies
    for body in bodies:
        assert any(node.op_type == "MultiHeadAttention" for node in body.node)


@pytest.mark.parametrize("shape", [(2, 3, 48), (2, 0, 48), (0, 3, 48)])
def test_heads_of_queries_keys_and_values_of_nothing(shape: tuple[int, ...]) -> None:
    """A Reshape to -1 would fail where another axis is empty."""
    text = (CASES / "attention_with_heads_of_queries_keys_and_values_in_turn.txt").read_text(encoding="utf-8")
    model = onnx.parser.parse_model(text[text.index("<") : text.index("---")])
    optimized, report = optimize(model)
    assert report.counts == {"attention": 1}
    inputs = {"qkv": np.random.default_rng(0).standard_normal(shape, dtype=np.float32)}
    (expected, _), (actual, reason) = run(model, inputs), run(optimized, inputs)
    assert expected is not None and actual is not None, reason
    assert_close(expected, actual, TensorProto.FLOAT)
