"""Test reports: their plain data, the estimate, the misses and the table in the terminal."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from rich.console import Console
from test_optimize import BLOCK, parse

from onnxfuse import ModelError, Report, UsageError, optimize
from onnxfuse.bench.bench import BenchSettings, bench
from onnxfuse.report.report import RegionGain, _region_lines
from onnxfuse.report.similar import group

# A schema is a type, a list with the type of its elements, or a dict; the key `...` stands for any keys.
SCHEMA: dict[str, Any] = {
    "input": {"path": str, "nodes": int, "fused": int, "opset": int, "bytes": int, "digest": str},
    "output": {"path": str, "nodes": int, "bytes": int},
    "counts": {...: int},
    "subgraphs": [{"where": str, "nodes_before": int, "nodes_after": int, "counts": {...: int}, "added": {...: int}}],
    "functions": {"inlined": int, "kept": [str]},
    "fused": [{"fusion": str, "match": str, "node": str, "where": str, "replaces": [str], "dims": {...: (int, str)}}],
    "folded": [{"what": str, "node": str, "into": str}],
    "missed": [{"fusion": str, "node": str, "matched": int, "of": int, "reason": str, "source": str}],
    "stays": [{"op": str, "node": str, "reason": str}],
    "quantized": {...: int},
    "dropped": [{"fusion": str, "node": str, "reason": str}],
    "layout": {
        "nodes": int,
        "transposes": int,
        "ends": [{"tensor": str, "reason": str}],
        "channels_first": [{"node": str, "output": str, "reason": str}],
    },
    "regions": {"nodes": int, "replaced": int, "joined": int, "bytes_saved": int, "launches_saved": int},
    "estimate": {
        "bytes_before": int,
        "bytes_after": int,
        "launches_before": int,
        "launches_after": int,
        "flops": int,
        "assumed": {...: int},
    },
    "standard": {},  # but for emit="standard"
    "operators": [{"op": str, "before": int, "after": int}],
    "unmatched": {...: str},
    "switched_off": [str],
    "left_out": [{"step": str, "error": str, "where": str, "traceback": str}],
    "half": {},  # but with a dtype
    "weights": {},  # but where weights are quantized
    "reference": {},  # but where a float model is given
    "verified": {
        "level": str,
        "status": str,
        "passed": bool,
        "reason": str,
        "outputs": [{"name": str, "max_abs": float, "max_rel": float, "tolerance": float, "set_by": str, "base": str}],
        "equal_parts": int,
        "not_compared": [{"name": str, "reason": str}],
        "notes": [str],
    },
    "times": {},  # but in a report of `onnxfuse bench`
    "seconds": {...: float},
}
EVERYTHING = """
g (float[batch,3,8,8] image, float[batch,8] x, float[batch,2,5,4] queries, float[batch,2,4,5] keys)
=> (float[batch,4,8,8] y, float[batch,6] z, float[batch,2,5,5] weights, float[batch,2,5,4] attended)
<float[4,3,3,3] kernel, float[4] s, float[4] t, float[4] m, float[4] v, float[8,6] w, float[6] b, float root = {1.5},
 float one = {1}, float half = {0.5}>
{
  [conv] c = Conv <pads = [1, 1, 1, 1]> (image, kernel)
  [norm] n = BatchNormalization (c, s, t, m, v)
  y = Relu (n)
  product = MatMul (x, w)
  h = Add (b, product)
  divided = Div (h, root)
  erf = Erf (divided)
  shifted = Add (erf, one)
  gated = Mul (h, shifted)
  z = Mul (gated, half)
  [scores] s1 = MatMul (queries, keys)
  weights = Softmax (s1)
  [context] attended = MatMul (weights, queries)
}
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return the report of a model in which something is fused, folded and missed."""
    path = tmp_path_factory.mktemp("report") / "m.onnx"
    onnx.save(parse(EVERYTHING), path)
    optimized, found = optimize(path)
    onnx.save(optimized, path.with_name("out.onnx"))
    return found.written(path.with_name("out.onnx"))


def misfits(value: Any, schema: Any, place: str = "report") -> list[str]:
    """Return the paths of values that differ from the schema."""
    if isinstance(schema, dict) and ... in schema:
        return [text for key, each in value.items() for text in misfits(each, schema[...], f"{place}.{key}")]
    if isinstance(schema, dict):
        if list(value) != list(schema):
            return [f"{place} has the keys {list(value)}"]
        return [text for key in schema for text in misfits(value[key], schema[key], f"{place}.{key}")]
    if isinstance(schema, list):
        return [text for i, each in enumerate(value) for text in misfits(each, schema[0], f"{place}[{i}]")]
    return [] if isinstance(value, schema) else [f"{place} is {value!r}"]


def test_regions_that_move_more_bytes_say_so() -> None:
    (line,) = _region_lines(RegionGain(2, 7, 0, -212_000, 5), False)
    assert "there would be 5 more launches and 212 KB less traffic" in str(line)


def test_the_plain_data_is_as_documented(report: Report) -> None:
    data = report.to_json()
    assert misfits(data, SCHEMA) == []
    assert data["fused"] and data["folded"] and data["missed"] and data["verified"]["outputs"]
    assert json.loads(json.dumps(data)) == data


def test_what_is_reported(report: Report) -> None:
    data = report.to_json()
    assert data["counts"] == {"conv_bias_activation": 1, "gemm_bias_activation": 1, "softmax": 1}
    # Five operators join h (6 floats): five values are neither written nor read, h is not read again, nor are scalars.
    saved = 4 * (2 * 5 * 6 + 6 + 3)
    assert data["regions"] == {"nodes": 0, "replaced": 0, "joined": 5, "bytes_saved": saved, "launches_saved": 5}
    assert {"what": "batch_norm", "node": "norm", "into": "conv"} in data["folded"]
    (miss,) = data["missed"]
    assert (miss["fusion"], miss["node"]) == ("attention", "context")
    assert miss["reason"].startswith("'keys' (batch, 2, 4, 5) is not made by batch keys (kv_heads size) -> ")
    assert miss["source"].partition(":")[0].endswith("patterns/_attention.py")
    assert 1 < miss["matched"] < miss["of"]
    assert set(data["seconds"]) == {"load", "normalize", "fuse", "write", "verify"}
    gemm = next(f for f in data["fused"] if f["fusion"] == "gemm_bias_activation")
    joined = {"divided", "erf", "shifted", "gated", "z"}
    assert (set(gemm["replaces"]), gemm["dims"]) == ({"product", "h"} | joined, {"n": 6, "k": 8})


def test_a_model_that_comes_from_no_file() -> None:
    data = optimize(parse(BLOCK))[1].to_json()
    assert (data["input"]["path"], data["output"]["path"]) == (None, None)


def test_an_infinite_error_is_null_in_json() -> None:
    from onnxfuse.verify.compare import compare

    other = parse(EVERYTHING.replace("Relu (n)", "Log (n)").replace("float half", "float[1,1] half"))
    data = compare(parse(EVERYTHING), other).to_json()
    assert data["passed"] is False
    assert None in [output["max_rel"] for output in data["outputs"]]
    json.dumps(data, allow_nan=False)


def test_the_estimate_reads_and_writes_each_value_once() -> None:
    """A Relu of 1 x 8 floats and an Add of a bias move 4 bytes per element, in one launch per node."""
    text = "g (float[batch,8] x) => (float[batch,8] y) <float[8] b> { r = Relu (x) y = Add (r, b) }"
    estimate = optimize(parse(text), regions=False, verify=False)[1].to_json()["estimate"]
    assert estimate["bytes_before"] == estimate["bytes_after"] == 4 * (8 + 8) + 4 * (8 + 8 + 8)
    assert estimate["launches_before"] == 2


def test_the_estimate_says_which_sizes_it_assumes() -> None:
    model = parse("g (float[batch,seq,8] x, float[1,8] y) => (float[batch,seq,8] z) { s = Add (x, y)  z = Relu (s) }")
    assert optimize(model, verify=False)[1].before.assumed == {"batch": 1, "seq": 128}
    model.graph.input[0].type.tensor_type.shape.dim[1].ClearField("dim_param")
    report = optimize(model, verify=False)[1]
    assert "Launches and traffic are estimated, for batch = 1, x[1] = 128." in text_of(report)
    assert report.before.bytes == 4 * 8 * (4 * 128 + 1)  # a tensor of 128 x 8 is read and written twice


def test_the_estimate_is_for_one_image() -> None:
    """Whatever name the first dim of an image has; the other dims, and those of other inputs, are 128."""
    ends = "(float[N,3,h,8] image, float[rows,8] x) => (float[N,3,h,8] y, float[rows,8] z)"
    report = optimize(parse(f"g {ends} {{ y = Relu (image) z = Relu (x) }}"), verify=False)[1]
    assert report.before.assumed == {"N": 1, "h": 128, "rows": 128}
    assert report.before.bytes == 2 * 4 * (3 * 128 * 8 + 128 * 8)


@pytest.mark.parametrize(("name", "size"), [("unk__749", 1), ("s6", 1), ("", 1), ("seq", 128), ("N", 128)])
def test_the_estimate_is_for_one_sound_or_text(name: str, size: int) -> None:
    """Unless the name of the first of two or three dims may mean a length."""
    for dims, numbers in (("80,800", [size]), ("t", [size, 128])):
        given = parse(f"g (float[N,{dims}] x) => (float[N,{dims}] y) {{ y = Relu (x) }}")
        dim = given.graph.input[0].type.tensor_type.shape.dim[0]
        dim.Clear() if not name else setattr(dim, "dim_param", name)
        report = optimize(given, verify=False)[1]
        assert list(report.before.assumed.values()) == numbers
        assert report.before.bytes == 2 * 4 * size * (80 * 800 if len(numbers) == 1 else 128)


def test_the_estimate_is_for_the_sizes_that_are_asked_for() -> None:
    """Also of a model that is fused already, of dims without names, and of sizes that are computed from them."""
    text = "g (float[n,8] x) => (float y) { a = Add (x, x) b = Exp (a) c = Abs (b) y = ReduceSum (c) }"
    given = parse(text)
    given.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    model, report = optimize(given, verify=False, shapes=["x:5x8"])
    again = optimize(model, verify=False, shapes=["x:5x8"])[1]
    assert report.before.assumed == again.before.assumed == {"x[0]": 5}
    assert report.before.bytes == 4 * (7 * 5 * 8 + 1) and again.before.bytes == report.after.bytes
    half = optimize(given, shapes=["x:5x8"], dtype="float16")[1]
    assert (half.before.assumed, half.before.bytes) == (report.before.assumed, report.before.bytes)


def test_the_estimate_of_fused_nodes() -> None:
    """Values between fused nodes are neither written nor read."""
    batch, k, n = 1, 8, 6
    estimate = optimize(parse(BLOCK), verify=False)[1].to_json()["estimate"]
    inside = 2 * batch * n  # the product and the biased product, each written and read
    assert estimate["bytes_before"] - estimate["bytes_after"] == 4 * 2 * inside
    assert (estimate["launches_before"], estimate["launches_after"]) == (4, 2)
    assert estimate["flops"] == 2 * batch * k * n
    assert estimate["bytes_after"] == 4 * (batch * k + k * n + n + batch * n) + 4 * (batch * n + 2 * n + batch * n)


def text_of(report: Report, everything: bool = False, width: int = 160) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(report.table(everything))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_the_table(report: Report) -> None:
    """What changed stands first, and last whether the result is right; nothing is wider than a terminal."""
    before, after = (Path(str(side["path"])).stat().st_size for side in (report.input, report.output))
    lines = text_of(report, width=80)
    assert [re.sub("  +", " | ", line.strip()) for line in lines[:15]] == [
        "before | after",
        "nodes | 13 | 5",
        "kernel launches | 13 | 5",
        "memory traffic | 8.42 KB | 3.95 KB",
        f"file | {before / 1e3:.3g} KB | {after / 1e3:.3g} KB",
        "Launches and traffic are estimated, for batch = 1.",
        "",
        "Fused | nodes | replaced",
        "conv_bias_activation | 1 | 2",
        "gemm_bias_activation | 1 | 7",
        "",
        "Replaced one to one | nodes",
        "softmax | 1",
        "",
        "Other operators | before | after",
    ]
    assert "Folded: 1 batch_norm" in lines
    assert "Not fused, though it is an attention, at 1 node" in lines
    assert any(line.startswith("      'keys' (batch, 2, 4, 5) is not made by ") for line in lines)
    assert lines[-1].startswith("Verified: 4 outputs equal")
    assert max(map(len, lines)) <= 80


GELU_OF_ANOTHER_ROOT = """
  divided%d = Div (x%d, root)  erf%d = Erf (divided%d)  shifted%d = Add (erf%d, one)
  gated%d = Mul (x%d, shifted%d)  [gelu%d] y%d = Mul (gated%d, half)
"""


@pytest.fixture(scope="module")
def near_misses() -> Report:
    """Return the report of six GELUs that divide by a wrong constant, and that no region takes."""
    inputs, outputs = (", ".join(f"float[batch,8] {name}{i}" for i in range(6)) for name in "xy")
    gelus = "".join(GELU_OF_ANOTHER_ROOT.replace("%d", str(i)) for i in range(6))
    constants = "<float root = {1.5}, float one = {1}, float half = {0.5}>"
    return optimize(parse(f"g ({inputs}) => ({outputs}) {constants} {{ {gelus} }}"), regions=False, verify=False)[1]


def test_near_misses_are_grouped_by_reason(near_misses: Report) -> None:
    lines = text_of(near_misses)
    head = lines.index("   6x gated_activation: 5 of 10 nodes agree, first at 'gelu0'")
    assert lines[head + 1] == "      the constant is 0.666667 ('root'); required 0.707107"


def test_misses_of_which_little_agrees_are_asked_for(near_misses: Report) -> None:
    """A node that misses several fusions is one node, and no other one."""
    some = [each for each in near_misses.missed if 2 * each.matched < each.of or each.node[-1] in "012"]
    report = replace(near_misses, missed=tuple(some))
    shown, everything = text_of(report), text_of(report, everything=True)
    assert "Nearly fused at 6 nodes" in shown
    assert "At 3 other nodes, less than half of a pattern agrees; --all shows them." in shown
    assert "Nearly fused at 9 nodes" in everything
    assert not any("--all" in line for line in everything)
    assert "Nearly fused at 12 nodes" in text_of(near_misses)


def test_an_attention_of_which_little_agrees_is_not_nearly_fused(report: Report) -> None:
    """It is shown all the same, because an attention that is not fused costs most."""
    (miss,) = (each for each in report.missed if each.fusion.name == "attention")
    lines = text_of(replace(report, missed=(miss._replace(matched=1),)))
    assert not any("Nearly fused" in line or "less than half" in line for line in lines)
    head = lines.index("Not fused, though it is an attention, at 1 node")
    assert lines[head + 1].startswith("   1x attention: 1 of ")


@pytest.mark.parametrize(
    ("sentences", "merged"),
    [
        (["the constant is 2 ('a'); required 0.5", "the constant is 3 ('b'); required 0.5"],
         {"the constant is … ('…'); required 0.5": 2}),
        (["the constant is 2 ('a'); required 0.5", "the constant is 2 ('a'); required 0.25"],
         {"the constant is 2 ('a'); required 0.5": 1, "the constant is 2 ('a'); required 0.25": 1}),
        (["'x' (8, 4) is not read", "'layer.1/x' (8, 4) is not read", "no Softmax"],
         {"'…' (8, 4) is not read": 2, "no Softmax": 1}),
    ],
)  # fmt: skip
def test_sentences_that_differ_in_names_and_numbers_are_one(sentences: list[str], merged: dict[str, int]) -> None:
    assert {one.sentence: len(one.items) for one in group(sentences, str)} == merged


def test_a_fusion_that_was_asked_for_and_matches_nothing(report: Report) -> None:
    model = parse(EVERYTHING)
    for fusion, why in (
        ("group_norm", "it needs one of "),
        ("gated_activation", "it comes nearest at 'z', where "),
        ("region", "no two operators side by side are worth a kernel; `onnxfuse explain MODEL region`"),
    ):
        given = parse("g (float[n] x) => (float[n] y) { y = Exp (x) }") if fusion == "region" else model
        found = optimize(given, only=[fusion], verify=False)[1]
        assert found.unmatched[fusion].startswith(why), found.unmatched
        assert any(line.startswith(f"{fusion} matches nothing: {why[:20]}") for line in text_of(found))
    assert optimize(model, only=["conv_bias_activation"], verify=False)[1].unmatched == {}


def test_names_with_brackets_are_shown_as_they_are() -> None:
    model = parse(EVERYTHING)
    model.graph.node[-1].name = "layer[0]/[bold]gelu"
    lines = text_of(optimize(model, verify=False)[1])
    assert any("layer[0]/[bold]gelu" in line for line in lines)


def test_writing(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8")) == report.to_json()
    report.write(tmp_path / "R.HTML")
    assert "conv_bias_activation" in (tmp_path / "R.HTML").read_text(encoding="utf-8")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ModelError, match=r"cannot write the report '.*folder\.json': Is a directory"):
        report.write(tmp_path / "folder.json")
    with pytest.raises(UsageError, match=r"cannot write the report '.*r\.txt': its name must end in \.json or \.html"):
        report.write(tmp_path / "r.txt")


def test_the_counts_of_a_model_in_which_nothing_is_fused() -> None:
    report = optimize(parse("g (float[n] x) => (float[n] y) { y = Exp (x) }"))[1]
    assert (report.counts, report.fused, report.missed) == ({}, (), ())
    assert report.verified.passed
    assert np.isfinite(report.verified.outputs[0].max_rel)


def test_only_the_rows_of_a_table_that_are_read_count(tmp_path: Path) -> None:
    text = """g (int64[batch, 4] ids) => (float[batch, 4, 8] y) <float[1000, 8] table, float[8] scale, float[8] bias>
        { rows = Gather (table, ids)  y = LayerNormalization (rows, scale, bias) }"""
    optimized, report = optimize(parse(text))
    assert report.counts == {"embedding_layer_norm": 1}
    ids, rows, vector = 8 * 4, 4 * 4 * 8, 4 * 8  # bytes, of one batch
    assert report.before.bytes == (ids + 2 * rows) + (2 * rows + 2 * vector)
    assert report.after.bytes == ids + 2 * rows + 2 * vector
    onnx.save(optimized, tmp_path / "fused.onnx")
    result = bench(tmp_path / "fused.onnx", BenchSettings(shapes=["ids:3x4"], runs=1))
    (fused,) = (op for op in result.ops if op.fusion == "embedding_layer_norm")
    assert fused.bytes == 3 * (ids + 2 * rows) + 2 * vector
