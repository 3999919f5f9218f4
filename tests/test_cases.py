"""Cases written as documents: a title, a model in ONNX text, and under it what the report says of it.

In a document of tests/cases, everything above the line `---` but the title is the model; values that `<...>` declares
without a value are weights, drawn at random.  Below the line, each line is one of

    fused layer_norm(x, w, b) -> y {epsilon=1e-05}     every fused node is listed; attributes only where they matter
    folded batch_norm scale -> conv                    every folded kind but constants and shapes is listed
    missed layer_norm at y: ... is computed ...        what `onnxfuse explain` says; `...` stands for any text
    left Conv, Mul                                     the operators left over, in order, where that is of interest
    unverified                                         onnxruntime gets no inputs, as a rank or a dtype is unknown
    xfail why                                          the lines say what should be, and the code does not do it yet
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper

from onnxfuse import Report, optimize
from onnxfuse.cli import main

FOLDER = Path(__file__).parent / "cases"


@dataclass
class Case:
    """One document."""

    title: str
    model: onnx.ModelProto
    expected: dict[str, list[str]] = field(default_factory=dict)  # lines by their first word


def read_case(path: Path) -> Case:
    title, text = path.read_text(encoding="utf-8").split("\n", 1)
    model_text, _, lines = text.partition("\n---\n")
    case = Case(title, with_weights(onnx.parser.parse_model(model_text)))
    for line in filter(None, map(str.strip, lines.splitlines())):
        kind, _, rest = line.partition(" ")
        case.expected.setdefault(kind, []).append(rest)
    assert title and case.expected.keys() <= {"fused", "folded", "missed", "left", "unverified", "xfail"}, path
    return case


def with_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Random initializers for the values that are declared and computed by no node."""
    random = np.random.default_rng(0)
    known = {t.name for t in model.graph.initializer} | {o for n in model.graph.node for o in n.output}
    for value in model.graph.value_info:
        if value.name not in known:
            kind = value.type.tensor_type
            shape = [d.dim_value for d in kind.shape.dim]
            array = random.uniform(0.5, 1.5, shape).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
    del model.graph.value_info[:]
    return model


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_case(path: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    case = read_case(path)
    for reason in case.expected.get("xfail", ()):
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    model, report = optimize(case.model)
    assert report.verified.passed is (None if "unverified" in case.expected else True), report.verified.reason
    assert not report.dropped
    if report.verified.passed:
        onnx.checker.check_model(model, full_check=True)
    assert_fused(case.expected.get("fused", []), model)
    assert sorted(case.expected.get("folded", [])) == sorted(folded(report))
    onnx.save(case.model, tmp_path / "case.onnx")
    assert_missed(case.expected.get("missed", []), tmp_path / "case.onnx")
    if "left" in case.expected:
        left = ", ".join(node.op_type for node in model.graph.node if node.domain != "onnxfuse")
        assert [left] == case.expected["left"]


def assert_fused(expected: Iterable[str], model: onnx.ModelProto) -> None:
    """The fused nodes, all of them, as `fusion(operands) -> outputs {attributes}`; attributes as far as expected."""
    nodes = {call(node): node for node in model.graph.node if node.domain == "onnxfuse"}
    wanted = dict(line.partition(" {")[::2] for line in expected)
    assert sorted(wanted) == sorted(nodes)
    for line, attributes in wanted.items():
        values = {a.name: shown(helper.get_attribute_value(a)) for a in nodes[line].attribute}
        pairs = dict(pair.split("=") for pair in attributes.rstrip("}").split(", ") if pair)
        assert {name: values.get(name) for name in pairs} == pairs


def call(node: onnx.NodeProto) -> str:
    name = re.sub(r"_\d+$", "", node.op_type)  # a second variant of a fusion is a second function
    return f"{name}({', '.join(node.input)}) -> {', '.join(node.output)}"


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value.decode() if isinstance(value, bytes) else str(value)


def folded(report: Report) -> list[str]:
    return [f"{one.what} {one.node} -> {one.into}" for one in report.folded if one.what not in ("constant", "shape")]


def assert_missed(expected: Iterable[str], path: Path) -> None:
    for line in expected:
        place, _, reason = line.partition(": ")
        fusion, _, node = place.partition(" at ")
        result = CliRunner().invoke(main, ["explain", str(path), fusion, "--limit", "100"])
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        heads = [i for i, each in enumerate(lines) if each.startswith(f"{fusion}: not at '{node}' (")]
        assert heads, result.output
        found = lines[heads[0] + 1].strip()
        assert re.fullmatch(".*".join(map(re.escape, reason.split("..."))), found), found


def test_there_are_cases() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 25
