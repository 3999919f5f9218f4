"""Test the levels of verification: what a quick one still finds, what it leaves out, and what the report says."""

from __future__ import annotations

import html
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner
from test_parts import wrong_relu

from onnxfuse import UsageError, optimize, optimizer
from onnxfuse.cli import main
from onnxfuse.unfuse_model import unfuse
from onnxfuse.verify import extent
from onnxfuse.verify.extent import (
    DRAWN,
    EDGES,
    FLAGS,
    FULL,
    LEFT_OUT_BY_QUICK,
    OF_ORIGINAL,
    OF_PARTS,
    OPTIMIZED,
    OTHER_SIZES,
    QUICK,
    Budget,
)
from onnxfuse.verify.reference import run_original

QUICK_NOTE = f"the verification was quick: it left out {LEFT_OUT_BY_QUICK}"


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')


RELU = model("(float[b, s] x) => (float[b, s] y) { y = Relu(x) }")
SOFTMAX = model("(float[b, s] x) => (float[b, s] y) { y = Softmax(x) }")


def test_a_quick_verification_runs_the_original_once() -> None:
    flagged = model("(float[b, s] x, bool flag) => (float[b, s] y) { n = Neg(x)  y = Where(flag, x, n) }")
    full = run_original(flagged, None, {}, lambda line: None)
    quick = run_original(flagged, None, {}, lambda line: None, extent=QUICK)
    assert (len(full.runs), bool(full.edges), bool(full.optimized)) == (3, True, True)
    assert [each.sizes for each in quick.runs] == [full.runs[0].sizes]
    assert not quick.edges and not quick.optimized


def test_values_that_hide_errors_are_drawn_again() -> None:
    """The first values are all below 20, so that y is 0."""
    found = run_original(
        model("(float[3] x, float[3] z) => (float[3] y) <float t = {20}> { d = Sub(x, t)  y = Relu(d) }"),
        None, {}, lambda line: None, extent=QUICK,
    )  # fmt: skip
    assert len(found.runs) > 1 and np.asarray(found.runs[-1].outputs["y"]).any()


@pytest.mark.parametrize(
    ("wrong", "level", "kept"),
    [
        ("op.Abs(x)", "full", 0), ("op.Abs(x)", "quick", 0), ("op.Abs(x)", "off", 1),
        ("op.Clip(x, 0.0, 100.0)", "full", 0), ("op.Clip(x, 0.0, 100.0)", "quick", 1),  # it is wrong on drawn values
    ],
)  # fmt: skip
def test_wrong_nodes(tmp_path: Path, wrong: str, level: str, kept: int) -> None:
    _, report = optimize(RELU, only=["wrong_relu"], patterns=[wrong_relu(tmp_path, wrong)], verify=level)  # type: ignore[arg-type]
    assert report.counts.get("wrong_relu", 0) == kept


@pytest.mark.parametrize(
    ("verify", "level", "status", "notes"),
    [
        (True, "full", "verified", []), ("full", "full", "verified", []),
        ("quick", "quick", "verified", [QUICK_NOTE]),
        (False, "off", "none", []), ("off", "off", "none", []),
    ],
)  # fmt: skip
def test_the_report_says_the_level(verify: bool | str, level: str, status: str, notes: list[str]) -> None:
    fused, report = optimize(SOFTMAX, verify=verify)  # type: ignore[arg-type]
    found = report.to_json()["verified"]
    assert (found["level"], found["status"], found["notes"]) == (level, status, notes)
    _, verified = unfuse(fused, verify=verify)  # type: ignore[arg-type]
    assert (verified.level, verified.status, list(verified.notes)) == (level, status, notes)


def test_the_page_says_what_a_quick_verification_left_out(tmp_path: Path) -> None:
    for level, said in (("quick", True), ("full", False)):
        optimize(SOFTMAX, verify=level)[1].write(tmp_path / "r.html")  # type: ignore[arg-type]
        page = html.unescape((tmp_path / "r.html").read_text(encoding="utf-8"))
        assert (f"{QUICK_NOTE}." in page) == said


def test_a_long_verification_names_the_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "LONG_VERIFICATION", 0.0)
    (note,) = optimize(SOFTMAX)[1].verified.notes
    assert note == f"the verification took 0 s; with `--verify quick` it leaves out {LEFT_OUT_BY_QUICK}"
    assert optimize(SOFTMAX, verify="quick")[1].verified.notes == (QUICK_NOTE,)
    assert optimize(SOFTMAX, verify=False)[1].verified.notes == ()


def test_a_budget_gives_the_original_and_fused_nodes_shares_of_ten_own_runs() -> None:
    budget = Budget(began=time.monotonic() - 50.0)
    assert budget.allows(EDGES, OF_ORIGINAL) and not budget.notes  # the own run is not known yet
    budget.own = 10.0
    assert not budget.allows(EDGES, OF_ORIGINAL) and budget.allows(DRAWN, OF_PARTS)
    budget.own = 1.0
    assert not any(budget.allows(DRAWN, OF_PARTS) for _ in range(3))
    why = "for which the limit of 30 s left no time (10 times the original's own run of 1.0 s, and at least 30 s)"
    assert budget.notes == (f"the verification left out {EDGES} and {DRAWN}, {why}",)
    assert Budget(0.001, time.monotonic()).allows(DRAWN, OF_ORIGINAL)  # the least is 30 s


def test_a_verification_without_time_goes_on_as_a_quick_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes the runs of a quick one, and the report names all others that it would have made."""
    flagged = model(
        "(float[b, s] x, bool flag, float[b, s] z) => (float[b, s] y) { r = Relu(x)  y = Where(flag, r, z) }"
    )
    monkeypatch.setattr(extent, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(extent, "MAX_OWN_RUNS", 0.0)
    monkeypatch.setattr(optimizer, "LONG_VERIFICATION", 0.0)  # says no second time what was left out
    patterns = [wrong_relu(tmp_path, "op.Clip(x, 0.0, 100.0)")]  # it is wrong on drawn values
    _, report = optimize(flagged, only=["wrong_relu"], patterns=patterns)
    assert (report.counts, report.verified.level, report.verified.status) == ({"wrong_relu": 1}, "full", "verified")
    (note,) = report.verified.notes
    assert note.startswith(
        f"the verification left out {OTHER_SIZES}, {FLAGS}, {EDGES}, {OPTIMIZED} and {DRAWN}, for which"
    )
    found = run_original(flagged, None, {}, lambda line: None, extent=replace(FULL, budget=Budget()))
    assert len(found.runs) == 1 and not found.edges and not found.optimized


def test_a_budget_begins_with_the_run_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models take longer to fuse than to run."""
    own, budgets, fusing = optimizer.fuse_model, list[Budget](), list[float]()
    monkeypatch.setattr(
        optimizer, "fuse_model", lambda *given, **named: (fusing.append(time.monotonic()), own(*given, **named))[1]
    )
    monkeypatch.setattr(optimizer, "Budget", lambda: budgets.append(Budget()) or budgets[-1])
    optimize(SOFTMAX)
    assert fusing[0] < budgets[0].began < budgets[0].began + budgets[0].own < time.monotonic()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    _, report = optimize(SOFTMAX, dtype=dtype, verify="quick")  # type: ignore[call-overload]
    assert report.verified.level == "quick" and report.verified.passed
    assert report.half is not None and report.half.errors


def test_other_levels_are_refused() -> None:
    with pytest.raises(UsageError, match="verify is 'full', 'quick' or 'off', not 'fast'"):
        optimize(SOFTMAX, verify="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ([], "full"), (["--verify", "full"], "full"), (["--verify", "quick"], "quick"), (["--verify", "off"], "off"),
        (["--no-verify"], "off"),
    ],
)  # fmt: skip
def test_options_of_the_command(tmp_path: Path, options: list[str], level: str) -> None:
    source, report = tmp_path / "m.onnx", tmp_path / "r.json"
    onnx.save(SOFTMAX, source)
    done = CliRunner().invoke(main, ["optimize", str(source), "--dry-run", "--report", str(report), *options])
    assert done.exit_code == 0
    assert json.loads(report.read_text())["verified"]["level"] == level
    assert (" ".join(QUICK_NOTE.split()[:4]) in done.output) == (level == "quick")
