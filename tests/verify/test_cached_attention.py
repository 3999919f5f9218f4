"""Test that inputs drawn for models with GroupQueryAttention fit together: pasts, masks, lengths and positions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
import pytest
from genai_graphs import load_genai

import onnxfuse
from onnxfuse.verify import own_process
from onnxfuse.verify.input_uses import Use, integer_uses
from onnxfuse.verify.reference import Reference, run_original


@pytest.fixture(autouse=True)
def models_run_in_their_own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Otherwise no size is 0."""
    monkeypatch.setattr(own_process, "enabled", True)
    with own_process.own_process(60):
        yield


LAYER = """
  QUERY = MatMul(x, w)
  y, pk, pv = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1>
      (QUERY, , , k0, v0, lengths, total, cos, sin, PLACES)
  z, qk, qv = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1>
      (QUERY, , , k1, v1, lengths, total, cos, sin, PLACES)
  u = Add(y, z)"""


def layers(signature: str, before: str = "", places: str = "") -> onnx.ModelProto:
    """Return two attentions over one input x, or a sum of words, with heads of 16 elements."""
    body = before + LAYER.replace("QUERY", "q").replace("PLACES", places)
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
        g ({signature}) => (float[b, s, 64] u, float[n, 2, m, 16] pk, float[n, 2, m, 16] qk)
        <float[32, 128] w, float[40, 8] cos, float[40, 8] sin, float[50, 32] words> {{ {body} }}""")
    random = np.random.default_rng(0)
    for value in model.graph.value_info:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        array = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    return model


def reference(model: onnx.ModelProto) -> Reference:
    return run_original(model, None, {}, lambda line: None)


@pytest.mark.parametrize("name", ["int4.onnx", "fp16.onnx"])
def test_a_model_of_genai_runs(name: str) -> None:
    found = reference(load_genai(name))
    assert [run.sizes["past_sequence_length"] for run in found.runs] == [3, 4]
    for run in (*found.runs, *found.edges):
        (batch, new), past = run.feeds["input_ids"].shape, run.feeds["past_key_values.1.value"].shape
        assert past == (batch, 2, run.sizes["past_sequence_length"], 32)
        assert (run.feeds["attention_mask"] == 1).all() and run.feeds["attention_mask"].shape == (batch, new + past[2])
        assert run.feeds["input_ids"].max() < 272
    several = {(run.feeds["input_ids"].shape, run.sizes["past_sequence_length"]) for run in found.edges}
    assert {((2, 5), 0), ((3, 1), 4)} <= several, "a prompt and a token of several sequences"


def test_a_model_for_several_sequences_runs() -> None:
    """With several tokens and a past, onnxruntime's CPU provider takes one sequence only."""
    model = load_genai("int4.onnx")
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[0].dim_value = 3
    shapes = [(run.feeds["input_ids"].shape, run.sizes["past_sequence_length"]) for run in reference(model).runs]
    assert shapes == [((3, 5), 0), ((3, 1), 4)]


@pytest.mark.parametrize("name", ["int4.onnx", "fp16.onnx"])
def test_an_optimized_model_of_genai_is_compared(name: str) -> None:
    """Its fused nodes have inputs that fit, too: a fused model may be the original."""
    made, report = onnxfuse.optimize(load_genai(name))
    assert report.verified.status == "verified" and len(report.verified.outputs) == 5
    attentions = [node for node in made.graph.node if node.op_type == "group_query_attention"]
    assert [{a.name: a.i for a in node.attribute}["size"] for node in attentions] == [32, 32], (
        "inputs have a name there"
    )
    assert [run.feeds["past_key_values.1.key"].shape for run in reference(made).runs] == [(1, 2, 3, 32), (1, 2, 4, 32)]


@pytest.mark.parametrize("name", ["int4.onnx", "fp16.onnx"])
def test_attentions_with_quantized_caches_equal_what_they_replace(name: str) -> None:
    """In half precision, too: were a body in float32, numbers of the cache would be a step off."""
    model = load_genai(name)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input.extend([""] * (12 - len(node.input)) + ["scale"] * 2)
            kinds = dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_TENSOR")
            given = {**kinds, "kv_cache_bit_width": 8}
            node.attribute.extend(onnx.helper.make_attribute(key, value) for key, value in given.items())
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0.02], np.float32), "scale"))
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present")):
            value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    made, report = onnxfuse.optimize(model)
    assert sum(node.op_type == "group_query_attention" for node in made.graph.node) == 2 and not report.dropped
    assert report.verified.equal_parts == sum(node.domain == "onnxfuse" for node in made.graph.node)


PASTS = "float[b, 2, p, d] k0, float[b, 2, p, d] v0, float[c, 2, r, e] k1, float[?, 2, ?, ?] v1"


def test_lengths_that_are_inputs_count_past_and_new_keys() -> None:
    model = layers(f"float[b, s, 32] x, {PASTS}, int32[b] lengths, int32 total, int64[b, s] places", places="places")
    for run in reference(model).runs:
        (batch, new, _), past = run.feeds["x"].shape, run.feeds["k0"].shape[2]
        assert {run.feeds[name].shape for name in ("k0", "v0", "k1", "v1")} == {(batch, 2, past, 16)} and past
        assert run.feeds["total"] == past + new and (run.feeds["lengths"] == past + new - 1).all()
        assert run.feeds["places"].max() < 40


COUNTED = """
  x = Gather(words, ids)  one = Constant<value_ints = [1]>()  i = Constant<value_int = 1>()
  sum = ReduceSum<keepdims = 0>(mask, one)  less = Sub(sum, one)  lengths = Cast<to = 6>(less)
  shape = Shape(mask)  columns = Gather(shape, i)  total = Cast<to = 6>(columns)"""


@pytest.mark.parametrize("dim", ["columns", "total_sequence_length", "?"])
def test_a_mask_that_is_counted_has_ones_for_past_and_new_keys(dim: str) -> None:
    model = layers(f"int64[b, s] ids, int64[b, {dim}] mask, {PASTS}", COUNTED)
    for run in reference(model).runs:
        (batch, new), past = run.feeds["ids"].shape, run.feeds["k1"].shape[2]
        assert run.feeds["mask"].shape == (batch, past + new) and (run.feeds["mask"] == 1).all()
        assert run.feeds["ids"].max() < 50


def test_a_mask_that_divides_is_not_counted() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 20]>
        g (float[b, s] x, int64[b, s] mask) => (float[b, s] y) {
          one = Constant<value_ints = [1]>()  sum = ReduceSum(mask, one)  n = Cast<to = 1>(sum)  y = Div(x, n) }""")
    assert [(run.feeds["mask"] == 0).any() for run in reference(model).runs[:2]] == [True, True]


def test_words_are_rows_of_a_table_that_is_quantized() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        g (int64[b, s] ids) => (float[b, s, 32] y)
        <uint8[5, 32] w = {WORDS}, float[5, 2] z = {SCALES}> {
          y = com.microsoft.GatherBlockQuantized<block_size = 16, bits = 8>(w, ids, z) }"""
        .replace("WORDS", ", ".join(map(str, range(160)))).replace("SCALES", ", ".join(["0.5"] * 10)))  # fmt: skip
    assert integer_uses(model) == {"ids": Use("row", 5)}
    assert {int(run.feeds["ids"].max()) for run in reference(model).runs} == {4}
