"""The documents of tests/cases, of which case_documents.py says how they are written."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import onnx
import pytest
from case_documents import Case, CaseError, differences, read_cases

from onnxfuse import optimize
from onnxfuse.dsl import catalogue
from onnxfuse.explain import nearest
from onnxfuse.fuse_model import Settings, fuse_model

FOLDER = Path(__file__).parent / "cases"
CASES = [case for path in sorted(FOLDER.glob("*.txt")) for case in read_cases(path).values()]
GOOD = """with_relu: A Relu behind an Add of a bias.
<ir_version: 8, opset_import: ["" : 17]>
main (float[batch,8] x) => (float[batch,8] y)
<float[8] bias>
{
  h = Add (x, bias)
  y = Relu (h)
}
---
fused bias_activation(x, bias) -> y {activation=relu}
"""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, request: pytest.FixtureRequest) -> None:
    for line in case.of("xfail"):
        request.applymarker(pytest.mark.xfail(strict=True, reason=line.text))
    model, report = optimize(case.model, regions=False)
    assert report.verified.passed is (None if "unverified" in case.lines else True), report.verified.reason
    assert not report.dropped
    if report.verified.passed:
        onnx.checker.check_model(model, full_check=True)
    found = differences(
        case, model, report, nearest(fuse_model(case.model, None, Settings(catalogue.builtin())).missed)
    )
    if found:
        pytest.fail(found, pytrace=False)


def test_each_case_has_a_name_of_its_own() -> None:
    names = Counter(case.name for case in CASES)
    assert [name for name, count in names.items() if count > 1] == []


def test_each_file_of_cases_is_named_as_a_fusion_or_as_what_fusions_are_inside() -> None:
    inside = {"control_flow", "functions"}
    assert {case.path.stem for case in CASES} <= {fusion.name for fusion in catalogue.builtin()} | inside


def test_every_fusion_has_a_case() -> None:
    fused = {re.split(r"\W", line.text)[0] for case in CASES for line in case.of("fused")}
    lacking = sorted({fusion.name for fusion in catalogue.builtin()} - fused)
    assert not lacking, f"no document of tests/cases has a line `fused {lacking[0]}(...)`; write one"


# --- documents that are wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "with_relu: A Relu behind an Add of a bias.\n",
            "",
            "case.txt:12: the first line of a document is `name: title`, not '<ir",
        ),
        (
            "with_relu: ",
            "",
            "case.txt:12: the first line of a document is `name: title`, not 'A Relu behind an Add of a",
        ),
        ("with_relu", "first", "case.txt:12: another document of this file is named 'first' too"),
        ("---\n", "", "case.txt:12: a line `---` must stand between the model"),
        ("fused bias_activation(x, bias) -> y {activation=relu}", "", "case.txt:12: no line stands under `---`"),
        ("Relu (h)", "Relu h", "case.txt:12: the model is not ONNX text"),
        ("fused bias", "fusd bias", "case.txt:21: a line cannot begin with 'fusd'. Did you mean 'fused'?"),
        ("fused bias", "look bias", "case.txt:21: a line cannot begin with 'look'. It is one of fused, folded,"),
        (" -> y {", " = y {", "case.txt:21: write `fused fusion(operands) -> outputs {attribute=value}`"),
        ("fused bias_activation(x, bias) -> y", "missed layer_norm", "case.txt:21: write `missed fusion at node: rea"),
    ],
)
def test_a_document_that_is_no_case_says_what_is_wrong(right: str, wrong: str, message: str, tmp_path: Path) -> None:
    assert right in GOOD
    path = tmp_path / "case.txt"
    first = GOOD.replace("with_relu", "first")
    path.write_text(f"{first}===\n{GOOD.replace(right, wrong)}", encoding="utf-8")
    with pytest.raises(CaseError, match=re.escape(message)):
        read_cases(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fused bias_activation(x, bias) -> y {activation=relu}\nleft", ""),
        ("fused bias_activation(x, bias) -> y {activation=gelu}", "line 10: activation is relu, not gelu"),
        ("fused activation(x) -> y", "line 10: no node is activation(x) -> y"),
        ("left Add, Relu", "no line says: fused bias_activation(x, bias) -> y"),
        ("left Add, Relu", "line 10: the operators that are left are: none"),
        ("folded batch_norm h -> y", "nothing was folded as: batch_norm h -> y"),
        ("missed layer_norm at y: ...", "line 10: layer_norm is not nearly matched at 'y'"),
        ("left Add", "The report says:\n  fused bias_activation(x, bias) -> y {activation=relu, d=8}\n"),
    ],
)
def test_a_document_that_the_report_contradicts_says_in_what(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "case.txt"
    path.write_text(GOOD.partition("fused")[0] + line, encoding="utf-8")
    (case,) = read_cases(path).values()
    model, report = optimize(case.model, regions=False, verify=False)
    found = differences(
        case, model, report, nearest(fuse_model(case.model, None, Settings(catalogue.builtin())).missed)
    )
    assert message in found and bool(message) == bool(found), found
