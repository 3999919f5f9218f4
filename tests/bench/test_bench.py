"""`onnxfuse bench` and benchmarks/models.py on the CPU: results, files, and messages for wrong options and models."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from click.testing import CliRunner, Result
from exported_models import unpack

from onnxfuse import optimize
from onnxfuse.bench.bench import Bench, BenchSettings, Contender, bench, has_products, with_speed_ups
from onnxfuse.bench.chart import tables
from onnxfuse.cli import main
from onnxfuse.tuning import memory_rate, timing
from onnxfuse.tuning.timing import RunTimes
from onnxfuse.verify import own_process

DONE, FAILED, USAGE = 0, 1, 2
TIMES = {"median_ms", "q1_ms", "q3_ms", "min_ms", "runs"}


def run(*arguments: str | Path) -> Result:
    """Run `onnxfuse bench` in this process, on the CPU unless a provider is given."""
    command = ["bench", *map(str, arguments), *([] if "--provider" in arguments else ["--provider", "cpu"])]
    result = CliRunner().invoke(main, command)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def wrong(source: Path, target: Path) -> Path:
    """Write the model with its largest weight halved."""
    model = onnx.load(source)
    weight = max(model.graph.initializer, key=lambda tensor: tensor.ByteSize())
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) / 2, weight.name))
    onnx.save(model, target)
    return target


@pytest.fixture(scope="session")
def bert(exported: Callable[[str], Path]) -> Path:
    return exported("bert_sdpa_dynamo_fp16.onnx")


@pytest.fixture(scope="session")
def resnet(exported: Callable[[str], Path]) -> Path:
    return exported("resnet50_dynamo_fp32.onnx")


# --- onnxfuse bench --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, bert: Path) -> Iterator[tuple[Result, dict[str, Any], str]]:
    """Time BERT beside a wrong model; yield what is printed, the JSON and the page."""
    folder = tmp_path_factory.mktemp("bench")
    other, chart, numbers = wrong(bert, folder / "wrong.onnx"), folder / "out.html", folder / "out.json"
    files = "--json", numbers, "--chart", chart
    result = run(bert, "--shape", "input_ids:3x16", "--against", other, "--runs", "5", *files)
    yield result, json.loads(numbers.read_text(encoding="utf-8")), chart.read_text(encoding="utf-8")


def test_the_json_says_what_was_measured_and_where(measured: tuple[Result, dict[str, Any], str], bert: Path) -> None:
    _, result, _ = measured
    assert set(result) == {"schema", "date", "model", "provider", "device", "versions", "inputs", "fused", "models",
                           "ops", "ops_error", "copy_bytes_per_second"}  # fmt: skip
    assert (result["schema"], result["provider"], result["model"]) == (1, "cpu", str(bert))
    assert result["inputs"] == {"input_ids": "3x16 int64", "attention_mask": "3x16 int64"}
    assert result["fused"]["layer_norm"] == 4
    assert {"python", "onnxfuse", "numpy"} <= set(result["versions"])
    assert result["copy_bytes_per_second"] > 0


def test_models_have_times_and_are_compared(measured: tuple[Result, dict[str, Any], str]) -> None:
    _, result, _ = measured
    assert [(each["name"], each["mode"]) for each in result["models"]] == [
        ("original", "plain"), ("fused", "plain"), ("wrong.onnx", "plain")]  # fmt: skip
    for each in result["models"]:
        assert set(each) == {"name", "mode", "agrees", "reason", "speed_up", "time", "not_compared"}
        assert set(each["time"]) == TIMES and each["time"]["runs"] == 5
        assert 0 < each["time"]["min_ms"] <= each["time"]["q1_ms"] <= each["time"]["median_ms"] <= each["time"]["q3_ms"]
    original, fused, _ = result["models"]
    assert original["agrees"] and original["speed_up"] is None
    assert fused["agrees"] and fused["reason"] == ""
    assert fused["speed_up"] == pytest.approx(original["time"]["median_ms"] / fused["time"]["median_ms"], rel=1e-2)


def test_a_wrong_model_gets_no_speed_up(measured: tuple[Result, dict[str, Any], str]) -> None:
    printed, result, _ = measured
    other = result["models"][-1]
    assert (other["agrees"], other["speed_up"]) == (False, None)
    assert "is off by" in other["reason"]
    assert printed.exit_code == FAILED
    row = next(line for line in printed.stdout.splitlines() if line.startswith("wrong.onnx"))
    assert row.rstrip().endswith("wrong result")


def test_every_fused_operator_is_timed_alone(measured: tuple[Result, dict[str, Any], str]) -> None:
    _, result, _ = measured
    fused = [op for op in result["ops"] if op["how"] != "onnxruntime"]
    assert sum(len(op["nodes"]) for op in fused) == sum(result["fused"].values())
    for op in fused:
        assert op["error"] == "" and op["how"] == "body" and op["kernel_us"] is None
        assert op["body_us"] >= 0
    norm = next(op for op in result["ops"] if op["fusion"] == "layer_norm")
    assert norm["shapes"] == ["3x16x24 float16", "24 float16", "24 float16"]
    assert norm["bytes"] == 2 * (2 * 3 * 16 * 24 + 2 * 24)


def test_what_nothing_fused_is_timed_alone(measured: tuple[Result, dict[str, Any], str]) -> None:
    printed, result, _ = measured
    others = {op["fusion"]: op for op in result["ops"] if op["how"] == "onnxruntime"}
    assert {"Gather", "Slice"} <= others.keys()
    assert "Shape" not in others
    assert all(op["body_us"] is not None and op["kernel_us"] is None for op in others.values() if not op["error"])
    words = [line.split() for line in printed.stdout.splitlines()]
    nodes = sum(len(op["nodes"]) for op in result["ops"] if (op["fusion"], op["how"]) == ("Gather", "onnxruntime"))
    assert ["Gather", str(nodes)] in [line[:2] for line in words]
    assert any(line[:4] == ["In", "total,", "each", "timed"] for line in words)


def test_on_a_cpu_nothing_is_shown_that_only_a_gpu_has(measured: tuple[Result, dict[str, Any], str]) -> None:
    result, _, page = measured
    for word in " mode ", " plain", "kernel", "of a copy", "TB/s":
        assert word not in result.stdout and word not in page, word
    assert all(len(line.rstrip()) <= 80 for line in result.stdout.splitlines())


def test_the_labels_of_the_chart_are_whole(measured: tuple[Result, dict[str, Any], str]) -> None:
    """A character of 13 pixels is 6.5 pixels wide on average, which is more than labels have to the left of bars."""
    labels = re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="end">(.*?)</text>', measured[2])
    assert len(labels) > 3 and all(float(x) > 6.5 * len(label) for x, label in labels)


def test_the_chart_is_well_formed(measured: tuple[Result, dict[str, Any], str]) -> None:
    _, result, page = measured
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    bars = [each for each in root.iter() if each.tag.endswith("rect")]
    assert len(bars) == 3 + len([op for op in result["ops"] if op["how"] != "onnxruntime"])
    assert [each.get("class") for each in bars[:3]] == ["plain", "fused", "wrong"]
    assert "wrong result" in "".join(root.itertext())


def test_fused_nodes_in_bodies_are_not_timed_as_if_they_took_no_time(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[n,8] x, bool f) => (float[n,8] y, float[8,8] s) { s = Einsum <equation = "ij,ik->jk"> (x, x)
      y = If (f) <then_branch = yes () => (float[n,8] t) { b = Exp (x) c = Sin (b) t = Abs (c) },
                  else_branch = no () => (float[n,8] e) { e = Neg (x) }> }"""), tmp_path / "m.onnx")  # fmt: skip
    result = run(tmp_path / "m.onnx", "--runs", "2")
    assert "1 fused node is in bodies of If, Loop or Scan, and not timed alone" in result.output


def check_trace_events(events: Sequence[dict[str, Any]]) -> None:
    """Check the fields that the Chrome trace format requires of metadata and of complete events, in microseconds."""
    for each in events:
        assert isinstance(each["name"], str) and type(each["pid"]) is int and type(each.get("tid", 0)) is int
        if each["ph"] == "M":
            assert each["name"] in ("process_name", "thread_name") and isinstance(each["args"]["name"], str)
        else:
            assert each["ph"] == "X" and isinstance(each["cat"], str) and isinstance(each["args"], dict)
            assert all(isinstance(each[time], int | float) and each[time] >= 0 for time in ("ts", "dur"))
    threads = {(each["pid"], each["tid"]) for each in events if each["ph"] == "X"}
    for thread in threads:  # complete events of one thread must be nested or apart
        times = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == thread
        )
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(times))


def test_a_trace_shows_the_operators_of_both_models(tmp_path: Path, bert: Path) -> None:
    given = ("--shape", "input_ids:2x8", "--shape", "attention_mask:2x8", "--runs", "2")
    result = run(bert, *given, "--trace", tmp_path / "t.json")
    assert result.exit_code == DONE, result.output
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    check_trace_events(events)
    named = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    estimated = ", estimated for an NVIDIA H200 with batch = 2, seq = 8"
    assert named == {0: "original", 1: "fused", 2: f"original{estimated}", 3: f"fused{estimated}"}
    nodes = {pid: [each for each in events if each["ph"] == "X" and each["pid"] == pid] for pid in named}
    assert {"layer_norm", "gemm_bias_activation"} <= {each["name"] for each in nodes[1]}
    assert {"MatMul", "Add"} <= {each["name"] for each in nodes[0]} and len(nodes[0]) > len(nodes[1])
    for each, later in (pair for of in nodes.values() for pair in itertools.pairwise(of)):
        assert each["dur"] >= 0 and each["args"]["bytes"] > 0 and each["args"]["node"]
        assert isinstance(each["args"]["FLOPs"], int)
        assert round(1000 * later["ts"]) == round(1000 * each["ts"]) + round(1000 * each["dur"])
    for each in (node for of in nodes.values() for node in of if node["dur"] > 0):
        assert each["args"]["share of the roofline"] >= 0, each
    flops = [sum(each["args"]["FLOPs"] for each in nodes[pid]) for pid in named]
    assert flops[0] == flops[1] > 2e5  # fusing changes nothing in products and attentions
    assert flops[2:] == flops[:2] and {each["cat"] for pid in (2, 3) for each in nodes[pid]} == {"estimate"}
    fused, _ = optimize(bert, verify=False)
    order = [each.name for each in fused.graph.node]
    assert [order.index(each["args"]["node"]) for each in nodes[1]] == sorted(
        order.index(each["args"]["node"]) for each in nodes[1]
    )


def test_a_report_has_the_times_of_both_models(tmp_path: Path, bert: Path) -> None:
    result = run(bert, "--shape", "input_ids:2x8", "--runs", "2", "--report", tmp_path / "r.json")
    assert result.exit_code == DONE, result.output
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    times = report["times"]
    assert report["verified"]["passed"] and times["inputs"]["input_ids"].startswith("2x8") and times["copy_rate"] > 0
    assert {one["node"] for one in report["fused"]} <= {one["node"] for one in times["after"]}
    assert len(times["before"]) > len(times["after"]) and times["before"][0]["how"] == "onnxruntime"
    (product, *_) = (one for one in times["after"] if one["op"] == "gemm_bias_activation")
    assert product["flops"] > product["bytes"] > 0 and product["seconds"] >= 0


def test_the_sizes_that_are_timed_are_those_of_the_estimates(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[N,3,h,8] image, float[m,2] x) => (float[N,3,h,8] y, float[m,2] z) { y = Exp (image) z = Exp (x) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    for shape, sizes in (((), {"N": 1, "h": 128, "m": 128}), (("--shape", "x:5x2"), {"N": 1, "h": 128, "m": 5})):
        result = run(tmp_path / "m.onnx", *shape, "--runs", "2", "--report", tmp_path / "r.json")
        assert result.exit_code == DONE, result.output
        report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
        assert report["estimate"]["assumed"] == sizes
        assert report["times"]["inputs"] == {"image": "1x3x128x8 float32", "x": f"{sizes['m']}x2 float32"}


def test_sizes_that_end_onnxruntime_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 128 rows, the model divides an integer by 0."""
    monkeypatch.setattr(own_process, "enabled", True)
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[rows,2] x) => (int64[2] y) <int64 limit = {128}> { n = Shape (x) d = Sub (n, limit) y = Mod (n, d) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    result = run(tmp_path / "m.onnx", "--runs", "2", "--no-ops")
    assert result.exit_code == DONE and "x 2x2 float32" in result.output
    result = run(tmp_path / "m.onnx", "--shape", "x:128x2", "--runs", "2", "--no-ops")
    assert result.exit_code == FAILED and "the model does not run on generated inputs (" in result.output


def test_outputs_whose_allowed_error_is_half_of_them_are_named(tmp_path: Path) -> None:
    source = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
    g (float[n,8] x) => (float[n,8] y, float[n,8] z) <float f = {300}> { a = Mul (x, f) y = Sin (a) z = Exp (x) }""")
    onnx.save(source, tmp_path / "m.onnx")
    onnx.save(optimize(source, dtype="float16")[0], tmp_path / "half.onnx")
    result = run(tmp_path / "m.onnx", "--against", tmp_path / "half.onnx", "--runs", "2", "--no-ops")
    said = "half.onnx: 'y' is not compared at these inputs: the error that was allowed for float16 is 6.4e-01 of its"
    assert result.exit_code == DONE and " ".join(result.output.split()).count(said) == 1
    runs = [Contender("half.onnx", mode, not_compared={"y": "why"}) for mode in ("plain", "cuda graph")]
    text = str(tables(Bench("m.onnx", "cuda", {"name": "H200"}, {}, {}, tuple(runs), (), None)).renderables)
    assert text.count("half.onnx: 'y' is not compared at these inputs: why") == 1
    assert "'z'" not in result.output and "fused: " not in result.output


def test_a_trace_has_operators_with_attributes_that_are_tensors(tmp_path: Path) -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    filled (float[3,4] x, int64[2] shape) => (float[n,4] y) {
        twos = ConstantOfShape <value: tensor = float[1] {2.0}>(shape)
        z = Add(x, twos)
        y = Relu(z)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    np.savez(tmp_path / "in.npz", x=np.ones((3, 4), np.float32), shape=np.int64([3, 4]))
    result = run(tmp_path / "m.onnx", "--input", tmp_path / "in.npz", "--runs", "2", "--trace", tmp_path / "t.json")
    assert result.exit_code == DONE and "not timed alone" not in result.output, result.output
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    (filled,) = (each for each in events if each["name"] == "ConstantOfShape" and each["pid"] == 0)
    assert filled["args"]["bytes"] > 0


def test_a_model_that_records_a_wrong_shape_of_its_output_is_timed(tmp_path: Path) -> None:
    """As `verify` and `optimize` run it, and onnxruntime with outputs of its own."""
    text = """
    <ir_version: 8, opset_import: ["" : 17]>
    flat (float[2,3,4] x, int64[n] shape) => (float[1,m] y) { z = Reshape(x, shape) y = Relu(z) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    np.savez(tmp_path / "in.npz", x=np.ones((2, 3, 4), np.float32), shape=np.int64([6, 4]))
    given = ("--input", tmp_path / "in.npz", "--runs", "2", "--no-ops")
    result = run(tmp_path / "m.onnx", *given)
    assert result.exit_code == DONE and "does not run" not in result.output, result.output


def test_a_report_needs_the_original(tmp_path: Path, resnet: Path) -> None:
    onnx.save(optimize(resnet, verify=False)[0], tmp_path / "fused.onnx")
    result = run(tmp_path / "fused.onnx", "--report", tmp_path / "r.html")
    assert result.exit_code == USAGE and "this one is fused already; give the original" in result.output


@pytest.mark.parametrize("option", ["--trace", "--report"])
def test_a_trace_and_a_report_need_the_times_of_operators(option: str, tmp_path: Path, bert: Path) -> None:
    result = run(bert, "--no-ops", option, tmp_path / "t.json")
    assert result.exit_code == 2
    assert f"{option} shows the time of each operator, which --no-ops leaves out" in result.output


def test_a_fused_model_is_compared_with_its_own_bodies(tmp_path: Path, resnet: Path) -> None:
    onnx.save(optimize(resnet, verify=False)[0], tmp_path / "fused.onnx")
    result = bench(tmp_path / "fused.onnx", BenchSettings(shapes=["2x3x32x32"], runs=2, ops=False))
    assert [each.name for each in result.contenders] == ["bodies", "fused"]
    assert result.counts["conv_bias_activation"] == 53
    assert result.passed


def test_models_are_timed_once_their_kernels_are_compiled(resnet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, settings = sys.modules["onnxfuse.bench.bench"], list[dict[str, Any]]()
    own = module.InferenceSession  # type: ignore[attr-defined]
    monkeypatch.setattr(
        module, "InferenceSession", lambda *given, **named: (settings.append(named), own(*given, **named))[1]
    )
    bench(resnet, BenchSettings(shapes=["2x3x32x32"], runs=2, ops=False))
    assert [each["wait"] for each in settings] == [True]


def test_inputs_may_be_given(tmp_path: Path, bert: Path) -> None:
    given = {name: np.ones((4, 9), np.int64) for name in ("input_ids", "attention_mask")}
    np.savez(tmp_path / "x.npz", **given)
    result = run(bert, "--input", tmp_path / "x.npz", "--no-ops", "--runs", "2")
    assert (result.exit_code, "input_ids 4x9 int64" in " ".join(result.stdout.split())) == (DONE, True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--shape", "input_id:8x16"], "no input 'input_id'. Did you mean 'input_ids'?"),
        (["--shape", "input_ids:8"], "input 'input_ids' has 1 dims; the model takes 2: batch x seq"),
        (["--shape", "8x16"], "--shape '8x16' is not of the form input:8x512"),
        (["--shape", "input_ids:8,16"], "--shape 'input_ids:8,16' is not of the form input:8x512"),
        (["--shape", "input_ids:8x16", "--shape", "input_ids:8x8"], "--shape is given twice for input 'input_ids'"),
        (["--shape", "input_ids:8x16", "--shape", "attention_mask:8x9"], "dim 'seq' is 16 in input 'input_ids' and 9"),
        (["--shape", "input_ids:9999999999999x16"], "inputs of these sizes cannot be made: Unable to allocate"),
        (["--shape", "input_ids:99999999999999999999x16"], "cannot be made: Maximum allowed dimension exceeded"),
        (["--chart", "out.pdf"], "charts are .html or .png"),
    ],
)
def test_wrong_options(options: list[str], sentence: str, bert: Path) -> None:
    result = run(bert, *options)
    assert result.exit_code == USAGE
    assert sentence in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_fixed_dim_stays_as_it_is(resnet: Path) -> None:
    result = run(resnet, "--shape", "pixel_values:2x3x64x64")
    assert (result.exit_code, "the model takes batch x 3 x 32 x 32" in result.stderr) == (USAGE, True)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch, bert: Path) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    result = run(bert, "--chart", "out.png")
    assert (result.exit_code, "needs matplotlib, which is not installed" in result.stderr) == (USAGE, True)


def test_a_model_that_does_not_run_at_this_size_is_a_sentence(bert: Path) -> None:
    result = run(bert, "--shape", "input_ids:2x99")  # the model has 32 positions
    assert (result.exit_code, "does not run on generated inputs" in result.stderr) == (FAILED, True)


@pytest.mark.parametrize("seed", ["", "<seed = 1.0>"])  # a seed is for a session: its second run draws other numbers
def test_a_model_that_draws_random_numbers_is_a_sentence(seed: str, tmp_path: Path) -> None:
    text = f"(float[b,4] x) => (float[b,4] y) {{ n = RandomNormalLike{seed}(x) y = Add(x, n) }}"
    result = run(saved(text, tmp_path / "noisy.onnx"))
    assert (result.exit_code, "RandomNormalLike node 'n' draws random numbers" in result.stderr) == (FAILED, True)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("(float[b,4] x) => (seq(float[b,4]) y) { r = Relu(x) y = SequenceConstruct(r, x) }", "a seq(tensor(float))"),
        ("(float[b,4] x) => (float8e5m2[b,4] y) { y = Cast<to = 19>(x) }", "a tensor(float8e5m2)"),
        ("(int8[b,4] x) => (int4[b,4] y) { y = Cast<to = 22>(x) }", "a tensor(int4)"),
    ],
)
def test_an_output_that_is_no_array_is_a_sentence(text: str, kind: str, tmp_path: Path) -> None:
    path = saved(text, tmp_path / "odd.onnx")
    result = run(path)
    assert (result.exit_code, f"output 'y' is {kind}, of which numpy makes no array" in result.stderr) == (FAILED, True)
    plain = saved(f"{text.partition(' =>')[0]} => (int8[b,4] z) {{ z = Cast<to = 3>(x) }}", tmp_path / "plain.onnx")
    other = bench(plain, BenchSettings(against=[path], runs=2, ops=False)).contenders[-1]
    assert other.reason.startswith("does not run: output 'y'")


def test_an_output_that_is_listed_twice_counts_once(tmp_path: Path) -> None:
    text = "(float[b,4] x) => (float[b,4] y, float[b,4] z, float[b,4] y) { y = Relu(x) z = Neg(y) }"
    path = saved(text, tmp_path / "m.onnx")
    assert bench(path, BenchSettings(runs=2, ops=False)).passed


def test_a_size_that_cannot_be_computed_is_a_name(tmp_path: Path) -> None:
    path = saved("(float[b,4] x) => (float[b,4] y) { y = Relu(x) }", tmp_path / "m.onnx")
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "16//0"
    onnx.save(model, path)
    for shape in ([], ["--shape", "x:8x4"]):
        assert run(path, *shape, "--runs", "2", "--no-ops").exit_code == DONE


def saved(text: str, path: Path) -> Path:
    """Write a model that is given as ONNX text."""
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}'), path)
    return path


def test_a_model_with_other_inputs_did_not_run(bert: Path, resnet: Path) -> None:
    result = bench(bert, BenchSettings(against=[resnet], runs=2, ops=False))
    other = result.contenders[-1]
    assert (other.agrees, other.times, other.speed_up) == (None, None, None)
    assert other.reason == "does not run: it has an input 'pixel_values', which the model does not have"
    assert not result.passed


def test_models_of_one_file_name_are_told_apart(tmp_path: Path, resnet: Path) -> None:
    paths = [tmp_path / "a" / "m.onnx", tmp_path / "b" / "m.onnx"]
    for path in paths:
        path.parent.mkdir()
        shutil.copy(resnet, path)
    result = bench(resnet, BenchSettings(against=[*paths, paths[0]], runs=2, ops=False))
    assert [each.name for each in result.contenders] == ["original", "fused", *map(str, paths)]
    assert result.passed


def test_without_times_of_operators_the_models_are_shown(monkeypatch: pytest.MonkeyPatch, bert: Path) -> None:
    def fail(*_: object, **more: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("onnxfuse.bench.bench.op_times", fail)
    result = run(bert, "--runs", "2")
    assert (result.exit_code, "Operators were not timed alone: no memory" in result.stdout) == (DONE, True)


def test_speed_ups_are_within_a_mode_and_need_a_right_original() -> None:
    def of(name: str, mode: str, seconds: float, agrees: bool = True) -> Contender:
        return Contender(name, mode, RunTimes(seconds, seconds, seconds, seconds, 1), agrees)

    modes = [of("original", "plain", 4), of("fused", "plain", 2), of("original", "cuda graph", 3, False),
             of("fused", "cuda graph", 1)]  # fmt: skip
    assert [each.speed_up for each in with_speed_ups(modes, "original")] == [None, 2.0, None, None]


def test_that_no_cuda_graph_is_possible_is_no_failure() -> None:
    rows = (Contender("fused", "plain", RunTimes.of([1.0, 2.0]), True), Contender("fused", "cuda graph", reason="no"))
    assert Bench("m", "cuda", {}, {}, {}, rows, (), None).passed


def test_times_are_stated_as_median_and_quartiles() -> None:
    assert RunTimes.of([1.0, 2.0, 3.0, 4.0, 5.0]) == RunTimes(3.0, 2.0, 4.0, 1.0, 5)
    assert RunTimes.of([2.0]) == RunTimes(2.0, 2.0, 2.0, 2.0, 1)


def test_the_rate_of_a_copy_counts_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count()  # seconds; the clock is read before and after each copy
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(now)))
    memory_rate._rate.cache_clear()
    assert memory_rate.copy_rate("cpu", 1) == memory_rate.MIN_COPY_BYTES
    assert memory_rate.copy_rate("cpu", 2 * memory_rate.MIN_COPY_BYTES) == 2 * memory_rate.MIN_COPY_BYTES
    memory_rate._rate.cache_clear()


# --- benchmarks/models.py --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> ModuleType:
    """Import benchmarks/models.py, which is a script."""
    path = Path(__file__).parents[2] / "benchmarks" / "models.py"
    spec = importlib.util.spec_from_file_location("benchmarks_models", path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(models: ModuleType, folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = models.read_result((folder / "models.json").read_text(encoding="utf-8"))["results"]
    return {(row["model"], row["peer"]): row for row in rows}


def test_peers_are_measured_or_recorded_as_missing(
    models: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "onnx").mkdir()
    unpack("vit_sdpa_dynamo_fp16.onnx", tmp_path / "onnx").rename(tmp_path / "onnx" / "vit.onnx")
    missing = [name for name in ("torch", "onnxscript") if importlib.util.find_spec(name) is None]
    peers = "ort,onnxfuse,onnxfuse-bodies" + ",torch-eager" * ("torch" in missing)
    peers += ",onnxscript" * ("onnxscript" in missing)
    models.main(["--out", str(tmp_path), "--only", "vit-b1", "--peers", peers, "--quick", "--provider", "cpu"])
    found = results(models, tmp_path)
    for name in "ort", "onnxfuse", "onnxfuse-bodies":
        row = found["vit-b1", name]
        assert set(row) >= TIMES and row["agrees"] and row["relative_error"] < 5e-3, row
        assert set(row["paced"]) == TIMES and row["paced"]["runs"] <= row["runs"]
    if "torch" in missing:
        assert found["vit-b1", "torch-eager"]["error"] == "torch is not installed"
    if "onnxscript" in missing:
        assert found["vit-b1", "onnxscript"]["error"] == "onnxscript is not installed"
    head = json.loads((tmp_path / "models.json").read_text(encoding="utf-8"))
    assert {"schema", "date", "provider", "device", "versions", "cases", "left_out"} <= set(head)
    assert head["left_out"] == []
    printed = capsys.readouterr().out
    assert "back to back, ms" in printed and "paced, ms" in printed


def test_earlier_results_stay_where_nothing_changed(models: ModuleType, tmp_path: Path) -> None:
    head, pairs = models.about("cpu"), models.pairs_of(["vit-b1"], ["ort"])
    rows = [{"model": "vit-b1", "peer": "ort"}, {"model": "vit-b1", "peer": "onnxfuse"}]
    models.write(tmp_path, head, rows)
    assert models.earlier(tmp_path, head, pairs) == rows[1:]
    assert models.earlier(tmp_path, {**head, "versions": {}}, pairs) == []
    assert models.earlier(tmp_path / "nowhere", head, pairs) == []


def test_the_default_set_of_exported_models_takes_seven_minutes(models: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    for case in models.CASES:
        (tmp_path / "onnx" / f"{case.architecture}.onnx").touch()
    assert models.estimate(models.pairs_of([], []), tmp_path) < 420


def test_a_spent_budget_leaves_the_rest_out(
    models: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.main(["--out", str(tmp_path), "--only", "vit-b1", "--quick", "--budget", "0", "--provider", "cpu"])
    assert results(models, tmp_path) == {}
    assert "not measured, the 0 s are spent: vit-b1 ort" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "limit", "error"),
    [("exit 7", "600", "the process died (exit code 7); see models.log"),
     ("kill -SEGV $$", "600", "the process died (signal 11)"),
     ("sleep 600", "0.3", "took longer than 0.3 s")],
)  # fmt: skip
def test_a_worker_that_dies_or_hangs_costs_its_results_only(
    models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit: str, error: str
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    common = ["--out", str(tmp_path), "--only", "vit-b1", "--peers", "ort,ort-graph", "--limit", limit]
    models.main([*common, "--provider", "cpu"])
    rows = results(models, tmp_path)
    assert list(rows) == [("vit-b1", "ort"), ("vit-b1", "ort-graph")]
    assert all(row["error"].startswith(error) for row in rows.values())


def test_unknown_names_are_refused(models: ModuleType, tmp_path: Path) -> None:
    for option in (["--only", "gpt5"], ["--peers", "tensorrt"]):
        with pytest.raises(SystemExit, match=r"unknown: .*; models: bert-b8-s512, .*; peers: ort, "):
            models.main(["--out", str(tmp_path), "--provider", "cpu", *option])


def test_wrong_results_show_no_time(models: ModuleType) -> None:
    row = {"model": "vit-b1", "peer": "ort", "median_ms": 1.0, "agrees": False, "relative_error": 0.5}
    text = models.tables([row], ["vit-b1"])
    assert "wrong" in text and "1.000" not in text and "off by 0.5" in text


@pytest.mark.parametrize(("nodes", "products"), [("z = Exp(x)", False), ("t = Transpose(x) z = MatMul(x, t)", True)])
def test_only_models_with_products_are_judged_as_tf32(nodes: str, products: bool) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[2, 2] x) => (float[2, 2] z) {{ {nodes} }}'
    assert has_products(onnx.parser.parse_model(text)) is products
