"""The command line: what each command prints and writes, its exit codes, and one line for each error."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from large_models import small
from rich.console import Console
from rich.progress import Progress
from test_optimize import BLOCK, LONE_RELU, SQUARE_ROOT_OF_RELU, STORED, WRONG, parse

from onnxfuse.cli import main, terminal
from onnxfuse.dsl import catalogue
from onnxfuse.explain import explain, nearest
from onnxfuse.fuse_model import Settings, fuse_model
from onnxfuse.ir.digest import graph_digest
from onnxfuse.rules import RULES
from onnxfuse.runtime.nvrtc import compile_cubin
from onnxfuse.runtime.plan import Kernel
from onnxfuse.verify import own_process
from onnxfuse.version import __version__

DONE, FAILED, USAGE, NOTHING = 0, 1, 2, 4  # 3 and 4 say how much was compared
HANGS = 600  # seconds; a program that takes longer waits for something


def test_the_time_limit_is_the_library_s() -> None:
    """The command line repeats it: the module that holds it imports numpy, which `--help` does without."""
    (option,) = (p for p in main.commands["optimize"].params if p.name == "timeout")
    assert option.default == own_process.DEFAULT_TIMEOUT


@pytest.fixture
def block(tmp_path: Path) -> Path:
    """Write a model with one gemm_bias_activation and one layer_norm."""
    path = tmp_path / "block.onnx"
    onnx.save(parse(BLOCK), path)
    return path


def run(*arguments: str | Path) -> Result:
    """Run `onnxfuse` in this process; an exception that reaches the user fails the test."""
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def error_line(result: Result) -> str:
    """Return the one line on stderr without its "error: " in front."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


# --- optimize ------------------------------------------------------------------------------------------------------


def test_optimize_writes_the_model_and_prints_the_report(block: Path, tmp_path: Path) -> None:
    result = run("optimize", block, tmp_path / "out.onnx")
    assert (result.exit_code, result.stderr) == (DONE, "")
    assert re.search(r"^gemm_bias_activation +1 +3$", result.stdout, re.MULTILINE)
    assert re.search(r"^Replaced one to one +nodes\nlayer_norm +1$", result.stdout, re.MULTILINE)
    assert re.search(r"^nodes +4 +2$", result.stdout, re.MULTILINE)
    lines = result.stdout.splitlines()
    assert lines.index(next(line for line in lines if line.startswith("Verified"))) == len(lines) - 1
    assert "Verified: 1 output equal" in result.stdout
    model = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["gemm_bias_activation", "layer_norm"]


def test_a_model_may_be_optimized_in_place(block: Path, tmp_path: Path) -> None:
    """This needs --overwrite, also if the target is another path to the same file."""
    before = block.read_bytes()
    (tmp_path / "link.onnx").symlink_to(block)
    for target in (block, tmp_path / "." / block.name, tmp_path / "link.onnx"):
        result = run("optimize", block, target)
        sentence = f"'{target}' is the model to read; give another name, or --overwrite to replace it"
        assert (result.exit_code, error_line(result)) == (USAGE, sentence)
    assert run("optimize", block, block, "--dry-run").exit_code == DONE
    assert block.read_bytes() == before
    assert run("optimize", block, tmp_path / "link.onnx", "--overwrite").exit_code == DONE
    assert len(onnx.load(block).graph.node) == 2
    assert (tmp_path / "link.onnx").is_symlink()


def test_a_model_and_its_backup_that_share_their_data(tmp_path: Path) -> None:
    """The backup stays whole, whichever of the two is written over the other, and in place."""
    backup, path = tmp_path / "model_backup.onnx", tmp_path / "model.onnx"
    onnx.save(parse(BLOCK), path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    backup.write_bytes(path.read_bytes())
    before = {each: each.read_bytes() for each in (backup, tmp_path / "model.onnx.data")}
    for arguments in ((backup, path), (path, path, "--overwrite")):
        assert run("optimize", *arguments).exit_code == DONE
        assert {each: each.read_bytes() for each in before} == before
        assert run("verify", backup, path).exit_code == DONE


def test_a_target_that_cannot_be_written_is_told_before_any_work(tmp_path: Path) -> None:
    for target, sentence in (
        (tmp_path, "it is a directory"),
        (tmp_path / "none" / "o.onnx", "does not exist; create it first"),
        (tmp_path / ("m" * 300), "File name too long; choose another name"),
    ):
        result = run("optimize", tmp_path / "not_even_read.onnx", target)
        assert (result.exit_code, sentence in error_line(result)) == (FAILED, True)


def test_dry_run_writes_nothing(block: Path, tmp_path: Path) -> None:
    before = block.read_bytes()
    for arguments in ((), (tmp_path / "out.onnx",)):
        result = run("optimize", block, *arguments, "--dry-run")
        assert result.exit_code == DONE
        assert "layer_norm" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["block.onnx"]
    assert block.read_bytes() == before


def test_without_verification_the_report_says_so(block: Path, tmp_path: Path) -> None:
    result = run("optimize", block, tmp_path / "out.onnx", "--no-verify")
    assert result.exit_code == DONE
    assert "Not verified: switched off; `onnxfuse verify A B` compares two models" in result.stdout


def test_without_onnxruntime_the_report_says_what_to_install(
    block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = run("optimize", block, tmp_path / "out.onnx")
    assert result.exit_code == NOTHING
    assert (tmp_path / "out.onnx").exists()
    assert "Not verified: onnxruntime is not installed" in result.stdout
    assert "pip install onnxruntime" in " ".join(result.stdout.split())


def test_fusions_are_chosen(block: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    run("optimize", block, out, "--only", "layer_norm")
    assert [node.op_type for node in onnx.load(out).graph.node] == ["MatMul", "Add", "Relu", "layer_norm"]
    run("optimize", block, out, "--skip", "layer_norm")
    assert [node.op_type for node in onnx.load(out).graph.node] == ["gemm_bias_activation", "LayerNormalization"]


def test_the_fallback_is_chosen(block: Path, tmp_path: Path) -> None:
    assert run("optimize", block, tmp_path / "out.onnx", "--fallback", "ort").exit_code == DONE
    assert run("optimize", block, tmp_path / "out.onnx", "--fallback", "cuda").exit_code == USAGE


def test_own_fusions(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "root_of_relu.py").write_text(SQUARE_ROOT_OF_RELU, encoding="utf-8")
    source = tmp_path / "in.onnx"
    onnx.save(parse("g (float[n,4] x) => (float[n,4] y) { a = Relu (x) y = Sqrt (a) }"), source)
    own = "--patterns", tmp_path / "mine"
    assert re.search(r"^root_of_relu +1 +2$", run("optimize", source, "--dry-run", *own).stdout, re.MULTILINE)
    assert "root_of_relu" in run("list", *own).stdout
    assert "return op.Sqrt(op.Relu(x))" in run("show", "root_of_relu", *own).stdout


def test_a_fusion_that_changes_an_output_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "wrong_relu.py").write_text(WRONG, encoding="utf-8")
    onnx.save(parse(LONE_RELU), tmp_path / "in.onnx")
    result = run("optimize", tmp_path / "in.onnx", tmp_path / "out.onnx", "--patterns", tmp_path / "mine")
    assert result.exit_code == DONE
    assert "Dropped wrong_relu at 'active/wrong_relu': on the values of a run its output" in result.stdout
    assert [node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node] == ["region"]


def test_inputs_to_verify_with(block: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((5, 8), np.float32))
    assert run("optimize", block, "--dry-run", "--input", tmp_path / "x.npz").exit_code == DONE
    np.savez(tmp_path / "y.npz", y=np.ones((5, 8), np.float32))
    result = run("optimize", block, "--dry-run", "--input", tmp_path / "y.npz")
    assert (result.exit_code, "has no input 'x'" in error_line(result)) == (USAGE, True)


def test_sizes_to_verify_with(tmp_path: Path) -> None:
    """Without --shape the Reshape of this model runs at none of the sizes that are tried."""
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    body = "s = Constant<value_ints = [-1, 997]>() r = Reshape (x, s) a = Relu (r) y = Sqrt (a)"
    onnx.save(parse(f"g (float[n,m] x) => (float[k,997] y) {{ {body} }}"), source)
    assert "Not verified: the original does not run on generated inputs" in run("optimize", source, out).stdout
    shape = "--shape", "x:3x997"
    assert "Verified: 1 output equal" in run("optimize", source, out, *shape).stdout
    assert run("verify", source, out, *shape).exit_code == DONE
    result = run("verify", source, out, "--shape", "z:3x997")
    assert (result.exit_code, "the model has no input 'z'" in error_line(result)) == (USAGE, True)


def test_external_weights_travel_beside_the_model(tmp_path: Path) -> None:
    original, (source, target) = parse(STORED), (tmp_path / "in", tmp_path / "out")
    source.mkdir(), target.mkdir()
    onnx.save(original, source / "m.onnx", save_as_external_data=True, location="weights.bin", size_threshold=1024)
    assert run("optimize", source / "m.onnx", target / "m.onnx").exit_code == DONE
    assert [path.suffix for path in sorted(target.iterdir())] == [".onnx", ".data"]
    assert run("verify", source / "m.onnx", target / "m.onnx").exit_code == DONE
    before = {t.name: onnx.numpy_helper.to_array(t) for t in parse(STORED).graph.initializer}
    after = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(target / "m.onnx").graph.initializer}
    assert {"w", "b"} <= before.keys() & after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before.keys() & after.keys())


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs a shell's way to name a pipe")
def test_a_pipe_is_refused(block: Path) -> None:
    """A pipe, as in `onnxfuse optimize <(cat block.onnx)`, can be read only once."""
    end, start = os.pipe()
    os.write(start, block.read_bytes())
    os.close(start)
    try:
        result = run("optimize", f"/dev/fd/{end}", "--dry-run")
    finally:
        os.close(end)
    assert (result.exit_code, "is a device or a pipe; expected an ONNX file" in error_line(result)) == (FAILED, True)


def test_progress_in_a_file_is_a_line_now_and_then(
    block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short command writes none, and a bar is for terminals only."""
    monkeypatch.setattr(terminal, "SECONDS_WITHOUT_PROGRESS", 0.0)
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 1000.0)
    result = run("optimize", block, tmp_path / "out.onnx")
    assert (result.exit_code, result.stderr) == (DONE, "")
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.001)
    errors = io.StringIO()
    with redirect_stderr(errors), terminal.shown_progress() as show:
        for stage, done, of, wanted in (
            ("fuse", 3, 504, " s: fuse, 3 of 504"),
            ("verify: run it", 0, 0, " s: verify: run it"),
        ):
            show(stage, done, of)
            until = time.monotonic() + 100
            while not any(line.endswith(wanted) for line in errors.getvalue().splitlines()):
                assert time.monotonic() < until, errors.getvalue()


def test_the_progress_bar_forgets_the_stage_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of unknown length has no count, and its bar moves; it does not stand at the count before it."""
    monkeypatch.setattr(terminal, "SECONDS_WITHOUT_PROGRESS", 0.0)
    on_terminal = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(terminal, "console", lambda stderr: on_terminal)
    bars: list[Progress] = []
    monkeypatch.setattr(
        "rich.progress.Progress", lambda *columns, **how: bars.append(Progress(*columns, **how)) or bars[0]
    )
    with terminal.shown_progress() as show:
        for stage, done, of, total in (("fuse", 3, 504, 504), ("fuse", 504, 504, 504), ("verify: run it", 0, 0, None)):
            show(stage, done, of)
            (task,) = bars[0].tasks
            assert (task.description, task.completed, task.total) == (stage, done, total)


# --- reports -------------------------------------------------------------------------------------------------------


def test_the_report_as_json(block: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "out.onnx", tmp_path / "report.json"
    assert run("optimize", block, out, "--report", path).exit_code == DONE
    report = json.loads(path.read_text(encoding="utf-8"))
    digest = graph_digest(onnx.load(block))
    sizes = block.stat().st_size, out.stat().st_size
    assert report["input"] == {
        "path": str(block),
        "nodes": 4,
        "fused": 0,
        "opset": 20,
        "bytes": sizes[0],
        "digest": digest,
    }
    assert report["output"] == {"path": str(out), "nodes": 2, "bytes": sizes[1]}
    assert report["counts"] == {"gemm_bias_activation": 1, "layer_norm": 1}
    assert report["verified"]["passed"] is True


def test_the_report_as_a_page(block: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert run("optimize", block, "--dry-run", "--report", path).exit_code == DONE
    page = path.read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert "gemm_bias_activation" in page


@pytest.mark.parametrize(
    "name, code, sentence",
    [
        ("no/report.json", FAILED, "there is no folder '{}/no'; create it first"),
        ("report.txt", USAGE, "its name must end in .json or .html"),
        ("report", USAGE, "its name must end in .json or .html"),
    ],
)
def test_a_report_that_cannot_be_written_is_told_before_any_work(
    tmp_path: Path, name: str, code: int, sentence: str
) -> None:
    result = run("optimize", tmp_path / "not_even_read.onnx", "--dry-run", "--report", tmp_path / name)
    assert result.exit_code == code
    assert error_line(result) == f"cannot write the report '{tmp_path / name}': {sentence.format(tmp_path)}"


# --- explain, list, show, verify, env ------------------------------------------------------------------------------

ANOTHER_CONSTANT = """
g (float[batch,8] x) => (float[batch,6] y)
<float[8,6] w, float[6] b, float root = {1.5}, float one = {1}, float half = {0.5}>
{
  product = MatMul (x, w)
  h = Add (b, product)
  divided = Div (h, root)
  erf = Erf (divided)
  shifted = Add (erf, one)
  gated = Mul (h, shifted)
  [last_of_gelu] y = Mul (gated, half)
}
"""


def test_explain_shows_the_source_and_the_node(tmp_path: Path, columns: Callable[[int], None]) -> None:
    columns(150)
    onnx.save(parse(ANOTHER_CONSTANT), tmp_path / "m.onnx")
    result = run("explain", tmp_path / "m.onnx", "gemm_bias_activation", "--node", "last_of_gelu")
    assert result.exit_code == DONE
    head, reason, place, _, line, carets, *_ = result.stdout.splitlines()
    assert re.fullmatch(r"gemm_bias_activation: not at 'last_of_gelu' \(\d+ of \d+ nodes agree\)", head)
    assert reason == "  the constant is 0.666667 ('root'); required 0.707107"
    assert re.fullmatch(r"  --> .*patterns/_activations\.py:\d+", place)
    number, text = line.split(" | ", 1)
    source = Path(__file__).parent.parent.joinpath("patterns", "_activations.py").read_text(encoding="utf-8")
    assert source.splitlines()[int(number) - 1] == text
    underlined = text[carets.index("^") - line.index(" | ") - 3 : carets.rindex("^") + 1 - line.index(" | ") - 3]
    assert "1.4142135623730951" in underlined


@pytest.mark.parametrize("width", [60, 100])
def test_explain_cuts_code_at_the_terminal_s_width(width: int, capsys, columns: Callable[[int], None]) -> None:
    """What the carets underline stays, or its beginning, and the carets stay below it."""
    columns(width)
    code = "    return choose(" + "first, " * 9 + "underlined" + ", last" * 9 + ")"
    for first, count in (4, 6), (code.index("underlined"), 10), (code.index("underlined"), 70):
        terminal.show_text(f"  143 | {code}\n      | {' ' * first}{'^' * count}")
        line, carets = capsys.readouterr().out.splitlines()
        assert max(len(line), len(carets)) <= width and line.startswith("  143 | ")
        marked = line[carets.index("^") : carets.rindex("^") + 1].removesuffix("...")
        assert code[first : first + count].startswith(marked) and len(marked) >= min(count, 10)
        assert "..." in line


QUANTIZED_BY_ONE_SCALE = """g (uint8[1,4,8,8] x, float s) => (float[1,4,8,8] y, float[1,6,8,8] z)
  <uint8[4,4,1,1] w, uint8[6,4,1,1] v, float t = {0.5}> {
    scale = Mul (s, t)
    a = ConvInteger (x, w) b = Cast <to = 1> (a) y = Mul (b, scale)
    c = ConvInteger (x, v) d = Cast <to = 1> (c) z = Mul (d, scale)
  }"""


def test_explain_gives_a_reason_for_all_sizes_once(tmp_path: Path) -> None:
    onnx.save(parse(QUANTIZED_BY_ONE_SCALE), tmp_path / "m.onnx")
    lines = run("explain", tmp_path / "m.onnx", "scales_of_channels").stdout.splitlines()
    assert lines[0] == "rule scales_of_channels: not at 'y' (3 of 3 nodes agree)"
    assert [line for line in lines if "required (channels=" in line] == [lines[1]]
    assert "  the same at 1 more node: 'z'" in lines


def test_explain_names_nodes_of_several_bodies_once() -> None:
    miss = nearest(fuse_model(parse(ANOTHER_CONSTANT), None, Settings(catalogue.builtin())).missed)[0]
    assert (
        f"  the same at 3 more nodes, some of them with equal names: '{miss.node}'"
        in explain(miss, miss, miss, miss).splitlines()
    )


def test_verify_says_once_who_set_the_tolerances(tmp_path: Path) -> None:
    onnx.save(parse("g (float[n] x) => (float[n] y, float[n] z) { y = Exp (x) z = Neg (y) }"), tmp_path / "m.onnx")
    run("optimize", tmp_path / "m.onnx", tmp_path / "half.onnx", "--dtype", "float16")
    shown = " ".join(run("verify", tmp_path / "m.onnx", tmp_path / "half.onnx").stdout.split())
    assert "the tolerance of 'y' and 1 more is the error that was allowed for float16 equal" in shown


def test_explain_says_where_a_node_went(block: Path) -> None:
    result = run("explain", block, "--node", "biased")
    words = ["'biased'", "is", "part", "of", "the", "gemm_bias_activation", "node", "'active/gemm_bias_activation'"]
    assert result.stdout.split() == words  # broken into lines at 80 columns


POOLED = """g (float[n,8,h,w] x) => (float[n,8,h,w] y, float[n,8,p,q] z)
  <float[8,8,3,3] k>
  { a = Conv <pads = [1, 1, 1, 1]> (x, k)  [pool] b = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (a)
    y = Conv <pads = [1, 1, 1, 1]> (b, k)  z, i = MaxPool <kernel_shape = [2, 2]> (y)  j = Cast <to = 1> (i)
    l = ReduceSum (j) }"""


def test_fusions_that_layouts_make_are_known(tmp_path: Path) -> None:
    """Every name that the report prints is one that options, `list`, `show` and `explain` know."""
    model = tmp_path / "m.onnx"
    onnx.save(parse(POOLED), model)

    def report(*options: str) -> str:
        done = run("optimize", model, tmp_path / "o.onnx", "--layout", "nhwc", "--no-verify", *options)
        return " ".join(done.stdout.split())

    assert "max_pool 1" in report()
    assert "MaxPool 'pool' is channels-first: the fusion max_pool is left out" in report("--skip", "max_pool")
    assert "layouts make it around convolutions; name conv_bias_activation, too" in report("--only", "max_pool")
    both = ("--only", "conv_bias_activation", "--only")
    assert "max_pool 1" in report(*both, "max_pool")
    assert "it needs one of Resize, Upsample, and the model has none" in report(*both, "resize")
    assert "max_pool is left out" in report(*both, "resize")
    named = report(*both, "layer_norm")
    assert "conv_bias_activation 2" in named and "max_pool 1" not in named
    assert "max_pool" in run("list").stdout
    assert run("show", "max_pool").stdout.startswith("max_pool\n\nMaxPool of a channels-last image.")
    why = run("explain", model, "max_pool").stdout
    assert why.startswith("layout: 'pool' and 1 more are channels-first\n  no channels-last convolution gains by it")


def test_explain_says_why_a_convolution_is_channels_first(tmp_path: Path) -> None:
    """Be it fused, by the name of a node that it replaced, or not, and all of them by the name of the fusion."""
    text = """g (float[n,8,h,w] x) => (float[n,8,h,w] y) <float[8,8,3,3] k>
      { [conv] c = Conv <pads = [1, 1, 1, 1]> (x, k)  [act] y = Relu (c) }"""
    onnx.save(parse(text), tmp_path / "m.onnx")
    lines = run("explain", tmp_path / "m.onnx", "--node", "conv").stdout.splitlines()
    sentence = " ".join(line.strip() for line in lines[2:])  # broken into lines at 80 columns
    assert lines[0] == "'conv' is part of the conv_bias_activation node 'act/conv_bias_activation'"
    assert lines[1] == "layout: 'act/conv_bias_activation' is channels-first"
    assert sentence.startswith("Transposes around its region would move 2.1 MB, which is more than 50% of the ")
    assert sentence.endswith("'x' is an input of the graph")
    assert "\n".join(lines[1:]) in run("explain", tmp_path / "m.onnx", "conv_bias_activation").stdout
    report = run("optimize", tmp_path / "m.onnx", tmp_path / "o.onnx", "--no-verify").stdout
    assert "Layout: 1 convolution channels-first\n   1x because Transposes around its region" in report


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("""g (float[2] x, bool c) => (float[2] y)
            { [choice] y = If <then_branch = yes () => (float[2] t) { [deep] t = Softmax (x) },
                               else_branch = no () => (float[2] e) { e = Neg (x) }> (c) }""",
         "'deep' is part of the softmax node 'deep/softmax' in the then branch of If 'choice'"),
        ("""g (float[2] x) => (float[2] y) { y = mine.twice (x) }
            <domain: "mine", opset_import: ["" : 20]> twice (v) => (u) { [deep] u = Add (v, v) }""",
         "'deep' is inside the function 'mine.twice', which is inlined where it is called: 'deep__1'"),
        ("""g (float[2] x) => (float[2] y) { y = com.microsoft.twice (x) }
            <domain: "com.microsoft", opset_import: ["" : 20]> twice (v) => (u) { [deep] u = Add (v, v) }""",
         "'deep' is inside the function 'com.microsoft.twice', which is not inlined, so that its nodes are not fused"),
        ("""g (seq(float[2]) x) => (seq(float[2]) y)
            { [each] y = SequenceMap <body = one (float[2] v) => (float[2] u) { [deep] u = Relu (v) }> (x) }""",
         "'deep' is inside a subgraph of SequenceMap 'each'; fused are subgraphs of If, Loop and Scan alone"),
    ],
)  # fmt: skip
def test_explain_of_a_node_outside_the_main_graph(tmp_path: Path, text: str, sentence: str) -> None:
    model = parse(text)
    model.opset_import.add(domain="mine", version=1)
    model.opset_import.add(domain="com.microsoft", version=1)
    onnx.save(model, tmp_path / "m.onnx")
    result = run("explain", tmp_path / "m.onnx", "--node", "deep")
    assert (result.exit_code, " ".join(result.stdout.split())) == (DONE, sentence)


def test_explain_shows_as_many_as_asked(tmp_path: Path) -> None:
    onnx.save(parse(ANOTHER_CONSTANT), tmp_path / "m.onnx")
    result = run("explain", tmp_path / "m.onnx", "gemm_bias_activation", "--limit", "1")
    assert result.stdout.count("gemm_bias_activation: not at") == 1
    assert re.search(r"^\d+ more; --limit \d+ shows all\.$", result.stdout, re.MULTILINE)


def test_explain_shows_no_negative_number_of_misses(block: Path) -> None:
    result = run("explain", block, "--limit", "-1")
    assert (result.exit_code, "-1 is not in the range x>=0" in result.stderr) == (USAGE, True)


def test_explain_where_nothing_is_near(block: Path) -> None:
    result = run("explain", block, "rotary_embedding")
    starts = "There are no near misses of rotary_embedding; 0 fused", "rotary_embedding: not"
    assert result.exit_code == DONE and result.stdout.startswith(starts)


def test_list_names_every_fusion() -> None:
    result = run("list")
    names = {path.stem for path in (Path(__file__).parent.parent / "patterns").glob("[!_]*.py")}
    assert result.exit_code == DONE
    assert names <= {line.split(" ")[0] for line in result.stdout.splitlines()}


def test_show_prints_the_operator_and_the_pattern() -> None:
    result = run("show", "layer_norm")
    assert result.exit_code == DONE
    text = " ".join(result.stdout.split())
    assert 'layer_norm(x: "... d", scale: "d", bias?: "d", epsilon?) -> ... d' in text
    assert "return layer_normalized(x, scale, bias, epsilon)" in text
    assert "patterns/layer_norm.py:" in text


def test_rules_are_listed_shown_and_explained(tmp_path: Path) -> None:
    """A rule has the same forms as a fusion: a line in a list, a page with both of its sides, and near misses."""
    listed = run("list", "--rules").stdout
    assert "convolutions\n  conv_to_matmul\n    A convolution whose windows do not overlap" in listed
    names = {line.strip() for line in listed.splitlines() if line.startswith("  ") and not line.startswith("   ")}
    assert names == {rule.left.name for rule in RULES}
    shown = run("show", "merge_fills").stdout
    assert "yield op.Where(a, op.Where(b, scores, number), number), kept" in shown and "rules/masks.py:" in shown
    text = """g (float[n,3,8,12] x) => (float[n,m,5] y) <float[5,3,2,4] w, int64[3] flat = {0, 5, -1}>
      { c = Conv <strides = [2, 4], pads = [0, 4, 0, 0]> (x, w)
        f = Reshape (c, flat)  y = Transpose <perm = [0, 2, 1]> (f) }"""
    onnx.save(parse(text), tmp_path / "m.onnx")
    explained = run("explain", tmp_path / "m.onnx", "conv_to_matmul").stdout
    assert "conv_to_matmul: not at 'y' (3 of 3 nodes agree)" in explained
    assert "4 windows of 4 columns cover the width 12" in explained and "rules/convolutions.py:" in explained
    onnx.save(parse(text.replace("[0, 4, 0, 0]", "[0, 0, 0, 0]")), tmp_path / "m.onnx")
    applied = run("explain", tmp_path / "m.onnx", "conv_to_matmul").stdout
    assert applied.startswith("conv_to_matmul: applied at 'y'") and "Nothing" not in applied


@pytest.mark.parametrize("shown", ["attention", "layer_norm"])
def test_show_prints_source_as_it_is(shown: str) -> None:
    """Lines that are wider than the terminal are neither cut off nor wrapped, and a pipe gets no colours."""
    printed = run("show", shown).stdout
    source = Path(__file__).parent.parent.joinpath("patterns", f"{shown}.py").read_text(encoding="utf-8")
    body = source[source.index(f"def {shown}(") :]
    assert body.rstrip() == printed[printed.index(f"def {shown}(") :].rstrip() and "\x1b" not in printed


@pytest.mark.parametrize("shown", ["attention_with_cache", "region", "scan"])
def test_show_breaks_its_text_at_the_terminal_s_width(shown: str) -> None:
    text, _, _ = run("show", shown).stdout.partition("\npatterns/")
    assert text.startswith(shown) and max(map(len, text.splitlines())) <= 80


def test_piped_output_is_not_wrapped(block: Path, tmp_path: Path) -> None:
    """Without a terminal, and without COLUMNS, a sentence is one line, however long the name of a node is."""
    model = onnx.load(block)
    model.graph.node[2].name = "layer/" * 40
    model.graph.node[2].op_type = "Celu"
    onnx.save(model, tmp_path / "long.onnx")
    command = [sys.executable, "-m", "onnxfuse", "inspect", str(tmp_path / "long.onnx")]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANGS, env=environment)
    assert f"     1x the CUDA provider has no kernel of Celu: '{'layer/' * 40}'\n" in done.stdout


def test_verify_compares_two_models(block: Path, tmp_path: Path) -> None:
    run("optimize", block, tmp_path / "out.onnx")
    result = run("verify", block, tmp_path / "out.onnx")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (DONE, "equal")
    assert re.search(r"^y +\S+ +\S+ +1e-05", result.stdout, re.MULTILINE)
    onnx.save(parse(BLOCK.replace("Relu", "Abs").replace("float[6] b,", "float[6] b = {-9, -9, -9, -9, -9, -9},")),
              tmp_path / "other.onnx")  # fmt: skip
    result = run("verify", block, tmp_path / "other.onnx")
    assert result.exit_code == FAILED
    assert "different: output 'y' is off by" in result.stdout and max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("missing", [0, 1])
def test_verify_with_a_missing_file(missing: int, block: Path, tmp_path: Path) -> None:
    files = [block, block]
    files[missing] = tmp_path / "no.onnx"
    result = run("verify", *files)
    assert (result.exit_code, "does not exist" in error_line(result)) == (FAILED, True)


def test_env_shows_versions() -> None:
    result = run("env")
    assert result.exit_code == DONE
    shown = {line.split()[0] for line in result.stdout.splitlines()}
    assert {"onnxfuse", "python", "onnx", "onnxruntime", "numpy", "native"} <= shown


# --- wrong usage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["optimize", "BLOCK"], "give the file to write as a second argument, or --dry-run"),
        (["optimize", "BLOCK", "OUT", "--only", "layernrm"],
         "there is no fusion 'layernrm'. Did you mean 'layer_norm'?"),
        (["optimize", "BLOCK", "OUT", "--skip", "atention"],
         "there is no fusion 'atention'. Did you mean 'attention'?"),
        (["explain", "BLOCK", "rms_nrom"], "there is no fusion 'rms_nrom'. Did you mean 'rms_norm'?"),
        (["explain", "BLOCK", "--node", "bias"], "there is no node 'bias'. Did you mean 'biased'?"),
        (["show", "layer_nor"], "there is no fusion 'layer_nor'. Did you mean 'layer_norm'?"),
    ],
)  # fmt: skip
def test_wrong_usage(arguments: list[str], sentence: str, block: Path, tmp_path: Path) -> None:
    places = {"BLOCK": block, "OUT": tmp_path / "out.onnx"}
    result = run(*(places.get(each, each) for each in arguments))
    assert (result.exit_code, error_line(result)) == (USAGE, sentence)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("arguments", [["optimise", "a", "b"], ["optimize", "a", "--bogus"], ["optimize"], ["show"]])
def test_wrong_commands_and_options(arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (USAGE, "")
    assert "Error: " in result.stderr


def test_a_compiler_s_messages_keep_their_lines(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> NoReturn:
        compile_cubin(Kernel("bad", "bad", text='extern "C" __global__ void bad() { int a = missing; }'), 90)

    monkeypatch.setattr("onnxfuse.compile.compile_file.compile_file", refused)
    result = run("compile", block, "--arch", "sm_90")
    lines = result.stderr.splitlines()
    assert result.exit_code == FAILED and "\\n" not in result.stderr
    assert lines[0].startswith("error: bad.cu does not compile: bad.cu(1): error: ")
    assert any(set(line) == {" ", "^"} for line in lines[1:])


# --- bad input -----------------------------------------------------------------------------------------------------


def missing(path: Path) -> str:
    return "does not exist"


def not_onnx(path: Path) -> str:
    path.write_text("hello, I am a text file\n", encoding="utf-8")
    return "is not an ONNX file"


def an_image(path: Path) -> str:
    path.write_bytes(b"\x89PNG\r\n\x1a\n0000")
    return "is not an ONNX file: it looks like a PNG image"


def empty(path: Path) -> str:
    path.write_bytes(b"")
    return "is empty"


def a_directory(path: Path) -> str:
    path.mkdir()
    return "is a directory"


def truncated(path: Path) -> str:
    content = parse(BLOCK).SerializeToString()
    path.write_bytes(content[: len(content) // 2])
    return "is damaged or cut short"


def unsupported_opset(path: Path) -> str:
    model = parse(BLOCK)
    model.opset_import[0].version = 99
    onnx.save(model, path)
    return "has opset 99; supported are 7 to 27"


def undefined_name(path: Path) -> str:
    model = parse(BLOCK)
    del model.graph.node[0]
    onnx.save(model, path)
    return "reads 'product', which nothing defines"


def undefined_output(path: Path) -> str:
    model = parse(BLOCK)
    model.graph.output[0].name = "z"
    onnx.save(model, path)
    return "has the graph output 'z', which no node writes"


def defined_twice(path: Path) -> str:
    model = parse(BLOCK)
    model.graph.node.add().CopyFrom(model.graph.node[1])
    onnx.save(model, path)
    return "defines 'biased' twice"


def a_cycle(path: Path) -> str:
    model = parse(BLOCK)
    model.graph.node[0].input[0] = "active"
    onnx.save(model, path)
    return "has a cycle"


def unknown_operator(path: Path) -> str:
    model = parse(BLOCK)
    model.graph.node[2].op_type = "Rellu"
    onnx.save(model, path)
    return "Rellu"


def stored(path: Path) -> onnx.ModelProto:
    onnx.save(parse(STORED), path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return onnx.load(path, load_external_data=False)


def external_data_missing(path: Path) -> str:
    stored(path)
    (path.parent / "weights.bin").unlink()
    return "is missing: "


def external_data_cut_short(path: Path) -> str:
    stored(path)
    os.truncate(path.parent / "weights.bin", 1000)
    return "is too short"


def external_data_outside(path: Path) -> str:
    model = stored(path)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../weights.bin"
    path.write_bytes(model.SerializeToString())
    return "outside the model's folder"


BAD = (
    missing, not_onnx, an_image, empty, a_directory, truncated, unsupported_opset, undefined_name, undefined_output,
    defined_twice, a_cycle, unknown_operator, external_data_missing, external_data_cut_short, external_data_outside,
)  # fmt: skip


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_bad_input(make: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source, target = tmp_path / "in" / "bad.onnx", tmp_path / "out.onnx"
    sentence = make(source)
    for command in (["optimize", source, target], ["optimize", source, "--dry-run"], ["explain", source]):
        result = run(*command)
        assert result.exit_code == FAILED
        assert sentence in error_line(result)
        assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("make", [truncated, undefined_name, external_data_missing], ids=lambda make: make.__name__)
def test_an_existing_output_survives_a_failure(make: Callable[[Path], str], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    make(tmp_path / "in" / "bad.onnx")
    target = tmp_path / "out.onnx"
    target.write_bytes(b"from before")
    assert run("optimize", tmp_path / "in" / "bad.onnx", target).exit_code == FAILED
    assert target.read_bytes() == b"from before"


def test_outputs_that_cannot_be_written(block: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.onnx").mkdir()
    for target, sentence in (("no/out.onnx", "does not exist"), ("folder.onnx", "is a directory")):
        result = run("optimize", block, tmp_path / target)
        assert (result.exit_code, sentence in error_line(result)) == (FAILED, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["block.onnx", "folder.onnx"]


def refuse(*_: object, **more: object) -> NoReturn:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_no_permission_to_write(block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may write everywhere, so that the refusal has to be simulated
        own = Path.open

        def open_to_read(path: Path, mode: str = "r", *arguments: Any, **more: Any) -> Any:
            return (refuse if "x" in mode else own)(path, mode, *arguments, **more)

        monkeypatch.setattr(Path, "open", open_to_read)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    result = run("optimize", block, closed / "out.onnx")
    assert (result.exit_code, "no permission" in error_line(result)) == (FAILED, True)
    assert list(closed.iterdir()) == []


def test_no_permission_to_read(block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may read everything, so that the refusal has to be simulated
        monkeypatch.setattr(Path, "read_bytes", refuse)
    block.chmod(0)
    result = run("optimize", block, tmp_path / "out.onnx")
    assert (result.exit_code, "no permission" in error_line(result)) == (FAILED, True)


def test_a_failure_while_writing_leaves_what_was_there(
    block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.onnx"
    target.write_bytes(b"from before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = run("optimize", block, target)
    assert (result.exit_code, "no space is left" in error_line(result)) == (FAILED, True)
    assert target.read_bytes() == b"from before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["block.onnx", "out.onnx"]


# --- as a program --------------------------------------------------------------------------------------------------


def program(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `onnxfuse` in a process, as a user does."""
    command = [sys.executable, "-c", "from onnxfuse.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANGS)


COMMANDS = [
    "optimize",
    "explain",
    "list",
    "show",
    "verify",
    "bench",
    "tune",
    "compile",
    "export-triton",
    "env",
    "unfuse",
    "plan",
    "inspect",
]
HEAVY = ("onnx", "onnxruntime", "numpy", "onnx_graphsurgeon", "rich", "importlib.metadata")


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], *([each, "--help"] for each in COMMANDS)], ids=" ".join
)
def test_versions_and_help_import_nothing_heavy(arguments: list[str]) -> None:
    """A help text appears at once. The imported modules are checked, because times depend on the machine."""
    script = f"""
import sys
from onnxfuse.cli import main
main({arguments}, standalone_mode=False)
print("imported:", *(each for each in {HEAVY} if each in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=HANGS)
    assert (done.returncode, done.stderr) == (DONE, "")
    assert done.stdout.splitlines()[-1] == "imported:"


def test_the_process_that_runs_models_starts_before_the_optimizer_is_imported(tmp_path: Path) -> None:
    """It imports onnxruntime meanwhile, and is the only one."""
    onnx.save(small(), tmp_path / "in.onnx")
    arguments = ["optimize", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")]
    script = f"""
import sys
from onnxfuse.cli import main
from onnxfuse.verify.own_process import Worker
def start(self, start=Worker.start):
    print("imported:", *(each for each in {HEAVY} if each in sys.modules))
    start(self)
Worker.start = start
main({arguments})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=HANGS)
    assert [line for line in done.stdout.splitlines() if line.startswith("imported:")] == ["imported:"]


UNUSED = ("onnxruntime", "onnx.reference", "onnxfuse.runtime", "onnxfuse.session", "onnxfuse.bench", "onnxfuse.genai")


def test_optimizing_without_verification_imports_only_what_it_needs(tmp_path: Path) -> None:
    """A model without operators to compute needs no reference implementation, which takes long to import."""
    onnx.save(small(), tmp_path / "in.onnx")
    arguments = ["optimize", "--verify", "off", str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")]
    script = f"""
import contextlib, sys
from onnxfuse.cli import main
with contextlib.suppress(SystemExit):
    main({arguments})
print("imported:", *(each for each in {UNUSED} if each in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=HANGS)
    assert done.stdout.splitlines()[-1] == "imported:"


def test_every_command_has_a_help_text_that_fits_the_list() -> None:
    lines = run("--help").stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == sorted(COMMANDS)
    assert not [line for line in lines if line.endswith("...")]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_a_help_text_are_calls_of_the_command(command: str) -> None:
    text = run(command, "--help").stdout
    examples = [line.strip() for line in text.partition("Examples:\n")[2].splitlines() if line.strip()]
    assert examples and max(map(len, text.splitlines())) <= 80
    for example in examples:
        program_name, name, *words = example.partition(" | ")[0].split()
        assert (program_name, name) == ("onnxfuse", command)
        main.commands[command].make_context(command, words)


def test_the_package_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "onnxfuse", "--version"], capture_output=True, text=True, check=False, timeout=HANGS
    )
    assert (done.returncode, done.stdout, done.stderr) == (DONE, f"onnxfuse, version {__version__}\n", "")


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_without_onnxruntime_a_command_says_what_to_install(command: str, block: Path) -> None:
    done = without_onnxruntime(f"from onnxfuse.cli import main; main([{command!r}, {str(block)!r}])")
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert re.fullmatch(
        r"error: onnxruntime is not installed, .* pip install 'onnxruntime-gpu\[cuda,cudnn\]' .*\n", done.stderr
    )


@pytest.mark.parametrize("command", ["optimize {} {}.out", "verify {} {}", "explain {}", "list", "show softmax", "env"])
def test_without_onnxruntime_no_command_ends_in_a_traceback(command: str, block: Path, tmp_path: Path) -> None:
    """onnxruntime is hidden from the processes that a command starts, too."""
    (tmp_path / "onnxruntime.py").write_text("raise ModuleNotFoundError('No module named onnxruntime')\n")
    arguments = command.format(block, block).split()
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "onnxfuse", *arguments],
        capture_output=True, text=True, check=False, timeout=HANGS, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    if arguments[0] in ("optimize", "verify"):
        assert "onnxruntime is not installed" in " ".join(done.stdout.split())
    else:
        assert (done.returncode, done.stderr) == (DONE, "")


@pytest.mark.parametrize("name", ["InferenceSession", "register", "explain_session"])
def test_without_onnxruntime_a_session_says_what_to_install(name: str) -> None:
    """The exception is an ImportError and a UsageError, so that programs that expect either handle it."""
    done = without_onnxruntime(f"from onnxfuse import {name}")
    assert done.stderr.splitlines()[-1].startswith(
        "onnxfuse.errors.MissingPackageError: onnxruntime is not installed, so no model can run; pip install "
    )
    script = f"""
import onnxfuse
for kind in (ImportError, onnxfuse.UsageError):
    try:
        onnxfuse.{name}
    except kind as error:
        print(error)
"""
    done = without_onnxruntime(script)
    assert (done.returncode, done.stderr, done.stdout.count("onnxruntime is not installed")) == (DONE, "", 2)


def without_onnxruntime(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process in which onnxruntime cannot be imported."""
    hidden = f"import sys; sys.modules['onnxruntime'] = None\n{script}"
    return subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False, timeout=HANGS)


def test_the_program(block: Path, tmp_path: Path) -> None:
    done = program("optimize", block, tmp_path / "out.onnx")
    assert (done.returncode, done.stderr) == (DONE, "")
    assert "Verified: 1 output equal" in done.stdout
    failed = program("optimize", tmp_path / "no.onnx", tmp_path / "other.onnx")
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (FAILED, "", 1)
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "other.onnx").exists()
    assert program("optimize", block).returncode == USAGE


@pytest.mark.parametrize("target", ["w.onnx", "w.json", "plan.json", "times.json", "times.html"])
def test_the_weights_of_the_source_are_never_written_over(target: str, tmp_path: Path) -> None:
    """A model may name any file of its folder as that of its weights."""
    weights = np.arange(4, dtype=np.float32)
    source = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { y = Add(x, w) }'
    )
    stored = source.graph.initializer.add(name="w", dims=[4], data_type=onnx.TensorProto.FLOAT)
    stored.data_location = onnx.TensorProto.EXTERNAL
    stored.external_data.add(key="location", value=target)
    (tmp_path / target).write_bytes(weights.tobytes())
    model, data = tmp_path / "m.onnx", tmp_path / target
    model.write_bytes(source.SerializeToString())
    arguments = {
        "w.onnx": ["optimize", str(model), str(data)],
        "w.json": ["optimize", str(model), str(tmp_path / "o.onnx"), "--report", str(data)],
        "plan.json": ["plan", str(model), "-o", str(data)],
        "times.json": ["bench", str(model), "--json", str(data)],
        "times.html": ["bench", str(model), "--chart", str(data)],
    }[target]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "holds weights of the model to read" in result.output
    assert data.read_bytes() == weights.tobytes()


def test_a_report_replaces_no_model(block: Path, tmp_path: Path) -> None:
    source = block.rename(tmp_path / "model.json")
    content = source.read_bytes()
    target = tmp_path / "out.json"
    for command, sentence in (
        (["optimize", source, target, "--report", source], f"'{source}' is the model to read; give another name"),
        (
            ["optimize", source, target, "--report", target],
            f"'{target}' is the model to write; give the report another name",
        ),
        (["bench", source, "--json", source], f"'{source}' is the model to read; give another name"),
    ):
        result = run(*command)
        assert (result.exit_code, error_line(result)) == (USAGE, sentence)
    assert source.read_bytes() == content and not target.exists()


@pytest.mark.parametrize("option", ["--tolerance", "--timeout", "--max-error"])
def test_nan_is_no_number_above_0(option: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["optimize", str(tmp_path / "m.onnx"), "--dry-run", option, "nan"])
    assert result.exit_code == 2


# --- JSON, -q and -v ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ("inspect BLOCK", {"name", "inputs", "operators", "findings", "misfits"}),
        ("verify BLOCK BLOCK", {"status", "outputs", "reason"}),
        ("explain BLOCK", {"explanations"}),
        ("explain BLOCK --node y", {"explanations"}),
        ("list", {"layer_norm", "region"}),
        ("list --rules", {"masks", "roots"}),
        ("env", {"onnxfuse", "GPU", "misfits"}),
    ],
)
def test_json_says_what_the_text_says(arguments: str, keys: set[str], block: Path) -> None:
    """With --quiet nothing else is printed."""
    words = [str(block) if word == "BLOCK" else word for word in arguments.split()]
    plain, quiet = run(*words, "--json"), run("-q", *words, "--json")
    assert keys <= json.loads(plain.stdout).keys()
    assert (plain.exit_code, quiet.stdout, quiet.stderr) == (run(*words).exit_code, plain.stdout, "")


@pytest.mark.parametrize(
    "line", ["-q optimize BLOCK OUT", "optimize BLOCK OUT -q", "verify BLOCK BLOCK --quiet", "list -q"]
)
def test_quiet_commands_print_errors_alone(line: str, block: Path, tmp_path: Path) -> None:
    names = {"BLOCK": str(block), "OUT": str(tmp_path / "out.onnx")}
    done = run(*(names.get(word, word) for word in line.split()))
    assert (done.exit_code, done.stdout, done.stderr) == (DONE, "", "")
    assert "no.onnx" in error_line(run("-q", "verify", "no.onnx", block))
    assert run("list").stdout


def test_verbose_commands_print_the_log(block: Path, tmp_path: Path) -> None:
    run("optimize", block, tmp_path / "fused.onnx")
    arguments = ["bench", tmp_path / "fused.onnx", "--no-ops", "--runs", "2"]
    assert "layer_norm: bodies run 1 node (the session does not use" in run("-v", *arguments).stderr
    assert "bodies run" not in run(*arguments).stderr
    assert "Fused nodes ran as their bodies" in run("bench", block, "--runs", "2").stdout


# --- pyproject.toml ---------------------------------------------------------------------------------------------------


def with_table(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a pyproject.toml, and go to a folder below its own."""
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")


def test_defaults_come_from_the_nearest_pyproject(block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_table('[tool.onnxfuse.optimize]\ndtype = "float16"\nskip = ["layer_norm"]\n', tmp_path, monkeypatch)
    shown = run("optimize", block, "out.onnx").stdout
    assert "Half precision" in shown and "layer_norm" not in shown
    assert "Half precision: " not in run("optimize", block, "out.onnx", "--dtype", "bfloat16", "-q").stdout
    assert "layer_norm" in run("optimize", block, "out.onnx", "--skip", "softmax").stdout
    (tmp_path / "below" / "pyproject.toml").write_text("# tool.onnxfuse is not here\n")
    assert "Half precision" not in run("optimize", block, "out.onnx").stdout


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("[tool.onnxfuse.optimise]", "is not a table of options of a command. Did you mean 'optimize'?"),
        ("[tool.onnxfuse.optimize]\ndtpe = 1", "[tool.onnxfuse.optimize] has no option 'dtpe'. Did you mean 'dtype'?"),
        ("[tool.onnxfuse.optimize]\npatterns = ['x']", "patterns chooses files, which no file may do; give"),
        ("[tool.onnxfuse.bench]\nreport = 'x.html'", "report chooses files, which no file may do; give --report on"),
        ("[tool.onnxfuse.optimize]\noverwrite = true", "overwrite chooses files, which no file may do; give"),
        ("[tool.onnxfuse.optimize", "cannot be read: "),
        ("tool.onnxfuse = 3", "tool.onnxfuse is not a table of commands"),
    ],
)
def test_wrong_tables(table: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_table(table, tmp_path, monkeypatch)
    result = run("list")
    assert result.exit_code == USAGE and sentence in error_line(result)
