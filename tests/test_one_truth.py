"""Every sentence and figure that the tool prints agrees with all others, and with the model that it wrote."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
from exported_models import load_exported, read, read_index
from sampling import sampled
from test_choices import TWO_BRANCHES
from test_cli import run
from test_optimize import BLOCK, parse
from test_report import EVERYTHING, GELU_OF_ANOTHER_ROOT, text_of

from onnxfuse import optimize
from onnxfuse.half.result import half_lines
from onnxfuse.inspection.inspect_model import inspect_model
from onnxfuse.ir.protos import count_nodes, nodes
from onnxfuse.printing import Line, SafeConsole, bytes_text, counted
from onnxfuse.report.lines import verification_lines
from onnxfuse.report.page import write_page
from onnxfuse.report.sections import fate_counts
from onnxfuse.verify.accepted import KEY, Accepted, state_accepted
from onnxfuse.verify.compare import Verification, compare
from onnxfuse.verify.difference import TOLERANCES, Standard, compare_output

DETECTOR = "detector_ts11_bn_fp32.onnx"
MODELS = (DETECTOR, "bert_sdpa_ts_fp32.onnx", "bert_sdpa_dynamo23_fp32.onnx", "two branches")


def model_of(name: str) -> onnx.ModelProto:
    return parse(TWO_BRANCHES) if name == "two branches" else load_exported(name)


# --- numbers of nodes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("emit", ["functions", "standard"])
@pytest.mark.parametrize("name", MODELS)
def test_every_number_of_nodes_is_one(name: str, emit: Literal["functions", "standard"], tmp_path: Path) -> None:
    """The summary, the tables, the page, `inspect` and the written model agree: with bodies, without Constants."""
    given = model_of(name)
    onnx.save(given, tmp_path / "given.onnx")
    model, report = optimize(given, verify=False, emit=emit)
    before, after = report.input["nodes"], report.output["nodes"]
    assert before == sum(one.before for one in report.operators) == sum(fate_counts(report).values())
    assert before == sum(inspect_model(tmp_path / "given.onnx").operators.values())
    if emit == "functions":
        onnx.save(model, tmp_path / "fused.onnx")
        unfused = run("unfuse", tmp_path / "fused.onnx", tmp_path / "plain.onnx", "--no-verify").stdout
        plain = count_nodes(onnx.load(tmp_path / "plain.onnx").graph)
        assert unfused.startswith(f"Nodes: {after} -> {plain}\n")
    assert after == sum(one.after for one in report.operators) + (len(report.fused) if emit == "functions" else 0)
    assert after == sum(node.op_type != "Constant" for node in nodes(model.graph))
    lines = text_of(report)
    assert re.fullmatch(f"nodes +{before} +{after}", lines[1])
    start, *_, end = (
        i for i, line in enumerate(lines) if line.startswith(("Fused ", "Replaced one", "Other operators "))
    )
    counts = [int(found[1]) for line in lines[start:end] if (found := re.match(r"\w+ +(\d+)", line))]
    assert sum(counts) == len(report.fused)


def test_a_model_that_is_fused_already() -> None:
    """Its nodes are counted as fused, and its channels-last convolutions are not said to be channels-first."""
    fused, _ = optimize(parse(EVERYTHING), verify=False, layout="nhwc")
    lines = text_of(optimize(fused, verify=False)[1])
    assert "Nothing was fused; 3 nodes are fused already." in lines
    assert not any("Layout" in line for line in lines)


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_has_one_estimate(name: str) -> None:
    """The traffic after fusing is the traffic before fusing again, though the sizes of bodies are not recorded."""
    model, report = optimize(model_of(name), verify=False)
    del model.graph.value_info[:]
    assert replace(optimize(model, verify=False)[1].before, flops=0) == replace(report.after, flops=0)


# --- near misses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_what_is_fused_is_not_said_to_be_nearly_fused(name: str) -> None:
    model, report = optimize(model_of(name), verify=False)
    left = {node.name or node.output[0] for node in nodes(model.graph) if node.domain != "onnxfuse"}
    assert {miss.node for miss in report.missed} <= left


def test_explain_gives_each_reason_once(tmp_path: Path) -> None:
    """The model has six GELUs that divide by another root; `explain` shows the first."""
    inputs, outputs = (", ".join(f"float[batch,8] {name}{i}" for i in range(6)) for name in "xy")
    gelus = "".join(GELU_OF_ANOTHER_ROOT.replace("%d", str(i)) for i in range(6))
    constants = "<float root = {1.5}, float one = {1}, float half = {0.5}>"
    onnx.save(parse(f"g ({inputs}) => ({outputs}) {constants} {{ {gelus} }}"), tmp_path / "m.onnx")
    lines = run("explain", tmp_path / "m.onnx", "gated_activation").stdout.splitlines()
    assert lines[0] == "gated_activation: not at 'gelu0' (5 of 10 nodes agree)"
    assert lines.count("  the constant is 0.666667 ('root'); required 0.707107") == 1
    assert "  the same at 5 more nodes: 'gelu1', 'gelu2', 'gelu3', 'gelu4', 'gelu5'" in lines


def test_explain_shows_a_near_miss_of_a_rule_at_a_node_that_a_region_took(tmp_path: Path) -> None:
    text = """g (float[64,64] x) => (float[64,64] z) <float tenth = {0.1}, float one = {1}> {
        s = Mul (x, tenth) c = Less (x, one) [pick] y = Where (c, s, x) z = Exp (y) }"""
    onnx.save(parse(text), tmp_path / "m.onnx")
    assert optimize(parse(text), verify=False)[1].counts == {"region": 1}
    shown = run("explain", tmp_path / "m.onnx").stdout
    assert "rule selected_slopes: not at 'pick' (2 of 3 nodes agree)\n  'one' is 1; required 0\n" in shown


# --- weights -------------------------------------------------------------------------------------------------------


def test_weights_in_constants_are_weights(tmp_path: Path) -> None:
    """In the line of half precision, in the facts of the page, and in `inspect`: 64 floats, then as many halves."""
    text = (
        "g (float[batch,8] x) => (float[batch,8] y) { w = Constant <value = float[8,8] {VALUES}> () y = MatMul (x, w) }"
    )
    given = parse(text.replace("VALUES", ", ".join(f"{i / 64}" for i in range(64))))
    onnx.save(given, tmp_path / "given.onnx")
    report = optimize(given, dtype="float16")[1]
    assert report.half is not None and report.facts is not None
    assert "Half precision: 1 of 1 floating-point node in float16, 256 B -> 128 B of weights" in text_of(report)
    assert (report.half.bytes_before, report.half.bytes_after) == (256, 128)
    assert (report.facts.weights_before, report.facts.weights_after) == (256, 128)
    assert sum(each.bytes for each in inspect_model(tmp_path / "given.onnx").weights.values()) == 256


def test_why_a_node_stays_in_float32_is_a_sentence() -> None:
    text = """g (float start, float limit, float[4] x) => (float[m] r, float[4] y) <float one = {1}>
        { r = Range (start, limit, one) y = Exp (x) }"""
    report = optimize(parse(text), dtype="float16", verify=False)[1]
    sentence = "1 node stays in float32, because it counts positions, which half precision would round"
    assert sentence in " ".join(" ".join(text_of(report)).split())


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_long_formulas_of_dims_are_cut_off(tmp_path: Path) -> None:
    formula = " + ".join(f"length_{i}" for i in range(30))
    given = parse("g (float[n] x) => (float[n] y) { y = Relu (x) }")
    for value in (*given.graph.input, *given.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = formula
    onnx.save(given, tmp_path / "given.onnx")
    shown = run("inspect", tmp_path / "given.onnx").stdout
    assert shown.count(formula[:37] + "...") == 2 and formula not in shown
    report = optimize(given, verify=False)[1]
    assert len(report.before.assumed) == 30 and not any(formula in line for line in text_of(report))


@pytest.mark.parametrize("width", range(40, 70))
def test_a_number_and_what_it_counts_are_in_one_line(width: int) -> None:
    out = io.StringIO()
    text = "69 matches in 'p.json': 42 conv_bias_activation, 2 conv_transpose_bias_activation, copy 4.09 TB/s"
    SafeConsole(file=out, width=width).print(Line(text))
    assert " ".join(out.getvalue().split()) == text
    assert not [line for line in out.getvalue().splitlines() if line[-1:].isdigit()]


def test_bytes_are_rounded_before_their_unit_is_chosen() -> None:
    assert [bytes_text(count) for count in (999, 999.6, 999_499, 999_600_000, 1e12)] == [
        "999 B", "1 KB", "999 KB", "1 GB", "1 TB"
    ]  # fmt: skip


def test_an_estimate_of_the_main_graph_says_so() -> None:
    first, last = ("Launches and traffic of the main graph are estimated.", "Launches and traffic are estimated.")
    more = TWO_BRANCHES.replace("=> (float[4,8] y)", "=> (float[4,8] y, float[4,8] a)").replace(
        "[choice]", "m = MatMul (x, w)  a = Add (m, b)  [choice]"
    )
    assert first in text_of(optimize(parse(more), verify=False)[1])
    assert last in text_of(optimize(parse("g (float[4] x) => (float[4] y) { y = Relu (x) }"), verify=False)[1])


def test_nothing_is_estimated_where_only_bodies_changed() -> None:
    """Neither are the savings of regions in bodies."""
    text = TWO_BRANCHES.replace("e = Softmax (x)", "f = Sin (x) g = Exp (f) e = Mul (g, f)")
    report = optimize(parse(text), verify=False)[1]
    lines = text_of(report)
    assert "Regions: 1 node in place of 3" in lines
    assert "<h2>Nodes</h2>" in write_page(report) and "<h2>Kernel launches</h2>" not in write_page(report)
    assert "launches" not in report._repr_html_()
    assert not any(line.startswith(("kernel launches", "memory traffic", "Launches")) for line in lines)


def test_a_conversion_counts_the_nodes_of_bodies_as_they_were_given() -> None:
    text = TWO_BRANCHES.replace("e = Softmax (x)", "f = Identity (x) g = Identity (f) e = Softmax (g)")
    plain, half = (optimize(parse(text), verify=False, dtype=dtype)[1] for dtype in (None, "float16"))
    assert [each.nodes_before for each in half.subgraphs] == [each.nodes_before for each in plain.subgraphs] == [3, 3]


def test_a_fused_node_is_counted_by_its_fusion(tmp_path: Path) -> None:
    """Functions of one fusion have several names, such as conv_bias_activation_2."""
    model, report = optimize(load_exported(DETECTOR), verify=False)
    onnx.save(model, tmp_path / "fused.onnx")
    operators = inspect_model(tmp_path / "fused.onnx").operators
    assert {name: operators[f"onnxfuse::{name}"] for name in report.counts} == report.counts


# --- one judge, one tolerance --------------------------------------------------------------------------------------

# Sums that cancel: one unit in the last place of their weights moves the result by more than float32 allows.
NOISY = """g (float[4,8] x) => (float[4,8] y) <float large = {100000.3}, float other = {100000.1}>
{ sum = Add (x, large) y = Sub (sum, other) }"""
STEADY = "g (float[4,8] x) => (float[4,8] y) <float difference = {0.2}> { y = Add (x, difference) }"


def printed(verified: Verification) -> str:
    return str(next(verification_lines(verified)))


def test_verify_and_bench_allow_the_same_noise(tmp_path: Path) -> None:
    for name, text in (("noisy", NOISY), ("steady", STEADY)):
        onnx.save(parse(text), tmp_path / f"{name}.onnx")
    files = tmp_path / "noisy.onnx", tmp_path / "steady.onnx"
    (output,) = compare(*files).outputs
    assert output.passed and output.tolerance > 1e-5 and output.set_by == "4 times the original's own noise"
    shown = run("verify", *files).stdout
    assert "the tolerance of 'y' is 4 times the original's own noise" in shown and shown.endswith("equal\n")
    assert run("bench", files[0], "--against", files[1], "--runs", "2", "--no-ops").exit_code == 0
    result = run("bench", files[1], "--against", files[0], "--runs", "2", "--no-ops")
    assert result.exit_code == 1 and "wrong result" in result.stdout
    assert run("verify", *reversed(files)).exit_code == 1


def test_verify_ends_with_one_verdict(tmp_path: Path) -> None:
    texts = {
        "zero": "g (float[4] x) => (float[4] y) { z = Sub (x, x)  y = Abs (z) }",
        "wider": "g (float[4] x) => (float[8] y) { y = Concat <axis = 0> (x, x) }",
        "one": "g (float[4] x) => (float[4] y, float[4] o) { y = Relu (x)  z = Sub (x, x)  o = Abs (z) }",
    }
    for name, text in texts.items():
        onnx.save(parse(text), tmp_path / f"{name}.onnx")
    zero, wider, one = (tmp_path / f"{name}.onnx" for name in texts)
    *_, verdict = run("verify", zero, wider).stdout.splitlines()
    shown = " ".join(run("verify", zero, wider).stdout.split())
    assert "different: output 'y' is float32 of shape 8; the original has float32 of shape 4" in shown
    assert "not compared" not in shown and verdict and "inf" not in shown
    for path, last in ((zero, "nothing was compared"), (one, "equal, as far as compared")):
        lines = run("verify", path, path).stdout.splitlines()
        assert lines[-1] == last and sum("is not compared: it is 0" in line for line in lines) == 1


def test_nothing_that_is_equal_exceeds_its_tolerance() -> None:
    """Where the original's own float16 is off by more than float16 allows, that error is the tolerance, by name."""
    exact = np.ones(8, np.float32)
    far, near = ((exact * np.float32(1 + error)).astype(np.float16) for error in (8e-3, 5e-3))
    found = compare_output("y", far, near, exact, Standard("float16"))
    assert found.passed and TOLERANCES["float16"] < found.max_rel <= found.tolerance == found.original_rel
    line = printed(Verification(True, (found,), "", ()))
    assert re.search(r"1 output equal \(at \d\d% of the original's own error in float16\)", line)
    worse = compare_output("y", near, far, exact, Standard("float16"))
    assert not worse.passed and worse.reason.endswith(f"float16 allows {found.max_rel:.1e}")


@pytest.mark.parametrize(("dtype", "io"), [("float16", "float32"), ("float16", "half"), ("bfloat16", "float32")])
def test_verify_accepts_what_a_conversion_accepted(
    dtype: Literal["float16", "bfloat16"], io: Literal["float32", "half"], tmp_path: Path
) -> None:
    given = load_exported("bert_sdpa_ts_fp32.onnx")
    onnx.save(given, tmp_path / "given.onnx")
    converted, report = optimize(given, dtype=dtype, io=io)
    onnx.save(converted, tmp_path / "half.onnx")
    assert report.half is not None
    found = compare(tmp_path / "given.onnx", tmp_path / "half.onnx")
    assert found.status == "verified", found.reason
    assert {each.name: each.tolerance for each in found.outputs} == report.half.tolerances
    assert {each.set_by for each in found.outputs} == {f"the error that was allowed for {dtype}"}
    (line,) = (line for line in half_lines(report.half) if "is off by" in line)
    assert report.half.worst is not None
    assert f", and {report.half.tolerances[report.half.worst.name]:.1e} is allowed; " in line


def test_each_error_of_a_conversion_says_what_it_is_measured_from(tmp_path: Path) -> None:
    """Fused nodes are compared with the converted model, and the errors of the conversion are those to the original."""
    given = parse(BLOCK)
    onnx.save(given, tmp_path / "given.onnx")
    converted, report = optimize(given, dtype="float16")
    onnx.save(converted, tmp_path / "half.onnx")
    assert re.search(
        r"1 output equal to that of the converted model \(at \d+% of the tolerance\)", printed(report.verified)
    )
    (line,) = (line for line in half_lines(report.half) if "is off by" in line)
    assert line.startswith("  compared with the original, 'y' is off by ")
    page = " ".join(write_page(report).split())
    assert "computed what the converted model computes" in page and line.strip().replace("'", "&#39;") in page
    assert "in 1 output compared with the converted model." in page
    assert [each["base"] for each in report.verified.to_json()["outputs"]] == ["converted model"]
    assert [each.base for each in compare(given, converted).outputs] == ["original"]
    plain = printed(optimize(given)[1].verified)
    assert "1 output equal (at " in plain and "original" not in plain


def test_an_output_whose_shape_half_precision_changes_is_compared_by_no_command(tmp_path: Path) -> None:
    """As of a decoder that runs until a token ends it: `optimize` allowed any error, and `verify` said "different"."""
    given, other = (
        parse(f"""g (float[n,8] x) => (float[k] y) <float a = {{{number}}}, int64[1] flat = {{-1}}> {{
            b = Greater (x, a) taken = Reshape (b, flat) y = Compress (x, taken) }}""")
        for number in (0.5, 0.25)
    )
    assert compare(given, other).status == "failed"
    state_accepted(other, given, Accepted({"y": math.inf}, "the error that was allowed for float16", "float16"))
    (entry,) = (each for each in other.metadata_props if each.key == KEY)
    assert json.loads(entry.value)["tolerances"] == {"y": None}
    found = compare(given, other)
    why = "any error was allowed, because rounding weights to float16 changes its shape or makes it infinite"
    assert found.status == "none" and [each.reason for each in found.not_compared] == [why]
    for name, model in ("given", given), ("other", other):
        onnx.save(model, tmp_path / f"{name}.onnx")
    shown = run("bench", tmp_path / "given.onnx", "--against", tmp_path / "other.onnx", "--runs", "2", "--no-ops")
    assert (
        "'y' is not compared at these inputs: any error was allowed" in " ".join(shown.stdout.split())
        and shown.exit_code == 0
    )


def test_verify_allows_the_noise_of_half_precision_at_other_sizes(tmp_path: Path) -> None:
    """A quick conversion ran at two rows; at three, the differences are 26 times as large before the Sigmoid."""
    given = parse("""g (float[n,8] x) => (float[n,8] y)
        <int64[1] zero = {0}, float offset = {100}, float scale = {0.00006}> {
        s = Shape (x) n1 = Gather (s, zero) n2 = Mul (n1, n1) n4 = Mul (n2, n2) n8 = Mul (n4, n4)
        p = Cast <to = 1> (n8) h = Add (x, offset) a = MatMul (h, w) b = Mul (a, p) l = Mul (b, scale)
        y = Sigmoid (l) }""")
    w = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32) / 3
    given.graph.initializer.append(onnx.numpy_helper.from_array(w - w.mean(0), "w"))
    onnx.save(given, tmp_path / "given.onnx")
    converted, report = optimize(given, dtype="float16", verify="quick")
    onnx.save(converted, tmp_path / "half.onnx")
    found = compare(tmp_path / "given.onnx", tmp_path / "half.onnx")
    assert found.status == report.verified.status == "verified" and report.half is not None
    assert report.half.tolerances["y"] < found.outputs[0].max_rel < found.outputs[0].tolerance
    assert found.outputs[0].set_by == "4 times the noise of float16"
    shown = run("bench", tmp_path / "given.onnx", "--against", tmp_path / "half.onnx", "--runs", "2", "--no-ops",
                "--shape", "x:3x8")  # fmt: skip
    assert shown.exit_code == 0, shown.stdout


def rounded_near(number: int) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return (x + number) - number, and a model that rounds the sum to float16 and says that this was accepted."""
    ends = f"g (float[n,8] x) => (float[n,8] y) <float c = {{{number}}}>"
    given = parse(f"{ends} {{ s = Add (x, c) y = Sub (s, c) }}")
    half = parse(f"{ends} {{ s = Add (x, c) h = Cast <to = 10> (s) r = Cast <to = 1> (h) y = Sub (r, c) }}")
    assert compare(given, half).status == "failed"
    state_accepted(half, given, Accepted({"y": 1e-4}, "the error that was allowed for float16", "float16"))
    return given, half


def test_the_noise_of_half_precision_is_that_of_results_too() -> None:
    """A sum near 100 loses five bits, which no rounding of inputs or weights shows; it is off by 0.03 at most."""
    (output,) = compare(*rounded_near(100)).outputs
    assert output.passed and 1e-3 < output.max_rel < output.tolerance < 0.1


def test_too_much_noise_of_half_precision_is_not_called_the_original_s(tmp_path: Path) -> None:
    """`bench` says the same, of the inputs that it times, and that `verify` runs others."""
    pair = rounded_near(1000)
    (output,) = compare(*pair).not_compared
    assert output.reason.startswith("the noise of float16 is 1.")
    for name, model in zip(("given", "half"), pair, strict=True):
        onnx.save(model, tmp_path / f"{name}.onnx")
    paths = tmp_path / "given.onnx", tmp_path / "half.onnx"
    shown = run("bench", paths[0], "--against", paths[1], "--runs", "2", "--no-ops", "--shape", "x:1x8")
    text = " ".join(shown.stdout.split())
    assert "half.onnx: 'y' is not compared at these inputs: the noise of float16 is " in text
    assert "`onnxfuse verify` also compares at other sizes and values." in text


def test_a_conversion_is_accepted_beside_its_own_original_alone() -> None:
    given, other = parse(BLOCK), parse(BLOCK.replace("Relu", "Abs"))
    converted, _ = optimize(given, dtype="float16")
    assert compare(given, converted).status == "verified"
    assert compare(given, converted, tolerance=1e-6).reason.endswith("the given tolerance allows 1.0e-06")
    assert compare(other, converted).status == "failed"
    (entry,) = (each for each in converted.metadata_props if each.key == KEY)
    for text in ("", "{", "[]", "{}", entry.value.replace("false", "0"), entry.value.replace('"float16"', '"float8"')):
        entry.value = text
        assert compare(given, converted).status == "failed"


def test_verify_accepts_the_tolerance_that_optimize_was_given() -> None:
    optimized, report = optimize(parse(NOISY), tolerance=0.25)
    found = compare(parse(NOISY), optimized)
    assert [each.tolerance for each in (*report.verified.outputs, *found.outputs)] == [0.25, 0.25]
    assert report.verified.outputs[0].set_by == "the given tolerance"
    assert found.outputs[0].set_by == "the tolerance that `optimize` was given"


# --- all commands --------------------------------------------------------------------------------------------------

TESTS = Path(__file__).parent
ARCHITECTURES = {name.split("_")[0]: name for name in sorted(read_index(), reverse=True)}  # one model of each


@pytest.mark.parametrize("name", sampled(ARCHITECTURES.values(), 4))
def test_all_commands_agree_about_a_model(
    name: str, columns: Callable[[int], None], tmp_path: Path, monkeypatch
) -> None:
    """Numbers of nodes, estimates and verdicts are the same everywhere, and no line is wider than the terminal."""
    columns(100)
    monkeypatch.chdir(tmp_path)
    Path("given.onnx").write_bytes(read(name))

    def printed(command: str, code: int = 0) -> str:
        done = run(*command.split())
        lines = done.stdout.splitlines()
        assert done.exit_code == code, done.output
        assert [line for line in lines if len(line.rstrip()) > 100] == []
        return done.stdout

    def row(text: str, what: str) -> list[str]:
        """Return the cells of the row `what` of the first table, which are two columns apart."""
        return re.split(r"  +", next(line for line in text.splitlines() if line.startswith(what)).strip())[1:]

    first = printed("optimize given.onnx fused.onnx --all --report report.json")
    report = json.loads(Path("report.json").read_text())
    again = printed("optimize fused.onnx again.onnx --verify quick")
    for what in "nodes", "kernel launches", "memory traffic":
        assert row(again, what) == [row(first, what)[1]] * 2
    nodes_before, nodes_after = (int(each.replace(",", "")) for each in row(first, "nodes"))
    for file, count in ("given", nodes_before), ("fused", nodes_after):
        assert re.search(rf"^{count:,} operators? of ", printed(f"inspect {file}.onnx --all"), re.MULTILINE)
    fused = len(report["fused"])
    assert f"Nothing was fused; {counted(fused, 'node is', 'nodes are')} fused already." in again
    assert printed("plan given.onnx -o plan.json").startswith(counted(fused, "match", "matches"))
    assert printed("verify given.onnx fused.onnx").rstrip().endswith("equal")
    assert printed("unfuse fused.onnx plain.onnx --no-verify").startswith(f"Nodes: {nodes_after:,} -> ")
    has_regions = any(a.name == "program" for node in nodes(onnx.load("fused.onnx").graph) for a in node.attribute)
    printed("show region fused.onnx", 0 if has_regions else 2)
    explained = " ".join(printed("explain given.onnx").split())
    shares = re.findall(r"rule \w+: not at '[^']*' \((\d+) of (\d+) nodes agree", explained)
    assert all(2 * int(matched) > int(of) for matched, of in shares)
    inspected = printed("inspect fused.onnx")
    assert f"{counted(fused, 'node is', 'nodes are')} fused already." in inspected and "--dry-run" not in inspected
    assert "Nearly fused" not in again and "nearly fused" not in inspected


def test_each_contradiction_has_a_test() -> None:
    rows = re.findall(r"^\| .* \| (\S+)::(\w+) \|$", (TESTS / "one_truth.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) >= 40
    assert [test for file, test in rows if f"def {test}(" not in (TESTS / file).read_text("utf-8")] == []
