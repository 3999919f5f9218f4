"""Review before applying: what `onnxfuse plan` writes, and what `optimize --plan` makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner
from exported_models import unpack
from test_optimize import BLOCK, parse

from onnxfuse import ModelError, UsageError, choices, optimize
from onnxfuse.cli import main
from onnxfuse.optimizer import find_matches

DONE, USAGE = 0, 2
TWO_BRANCHES = """
g (float[4,8] x, bool c) => (float[4,8] y) <float[8,8] w, float[8] b>
{
  [choice] y = If <
    then_branch = yes () => (float[4,8] t) { p = MatMul (x, w)  h = Add (p, b)  t = Relu (h) },
    else_branch = no () => (float[4,8] e) { [last] e = Softmax (x) }> (c)
}
"""


@pytest.fixture
def block(tmp_path: Path) -> Path:
    """Write a model with one gemm_bias_activation (product, biased, active) and one layer_norm (y)."""
    path = tmp_path / "block.onnx"
    onnx.save(parse(BLOCK), path)
    return path


def switched(model: Path, off: Callable[[str], bool], **options: Any) -> Path:
    """Write a plan of the model in which the matches of some names are off."""
    data = find_matches(model, **options).to_json()
    for match in data["matches"]:
        match["apply"] = not off(match["name"])
    path = model.with_name("plan.json")
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def fused_nodes(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_the_file(block: Path, tmp_path: Path) -> None:
    """Each match has a name that is the same in every run, the nodes that it replaces, and a switch."""
    result = CliRunner().invoke(main, ["plan", str(block), "-o", str(tmp_path / "plan.json")])
    assert result.exit_code == DONE
    shown = f"2 matches in '{tmp_path / 'plan.json'}': 1 gemm_bias_activation, 1 layer_norm"
    assert result.output.split() == shown.split()  # broken into lines at 80 columns
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert (data["format"], data["version"], data["model"]["name"]) == ("onnxfuse-plan", 1, "block.onnx")
    assert len(bytes.fromhex(data["model"]["digest"])) == 32
    for match in data["matches"]:
        match["nodes"].sort()
    assert data["matches"] == [
        {"name": "layer_norm:y", "fusion": "layer_norm", "nodes": ["y"], "apply": True},
        {"name": "gemm_bias_activation:active", "fusion": "gemm_bias_activation",
         "nodes": ["active", "biased", "product"], "apply": True},
    ]  # fmt: skip
    assert [one.name for one in find_matches(block).matches] == [match["name"] for match in data["matches"]]


def test_with_all_switched_on_the_model_is_the_same(block: Path) -> None:
    plan = switched(block, lambda name: False)
    assert optimize(block, plan=plan)[0] == optimize(block)[0]


def test_a_match_that_is_off_is_not_fused(block: Path, tmp_path: Path) -> None:
    plan = switched(block, lambda name: name == "gemm_bias_activation:active")
    out = tmp_path / "out.onnx"
    result = CliRunner().invoke(main, ["optimize", str(block), str(out), "--plan", str(plan)])
    assert result.exit_code == DONE
    assert "Switched off by the plan: 1 match\n" in result.output
    assert fused_nodes(onnx.load(out)) == ["MatMul", "Add", "Relu", "layer_norm"]


def test_nothing_else_takes_the_nodes_of_a_match_that_is_off(block: Path) -> None:
    """Without their product, an Add and a Relu would be a region with the norm, and without that a bias_activation."""
    skipped = optimize(block, skip=["gemm_bias_activation"])[1]
    assert skipped.counts == {"region": 1}
    apart = optimize(block, skip=["gemm_bias_activation"], regions=False)[1]
    assert apart.counts == {"bias_activation": 1, "layer_norm": 1}
    report = optimize(block, plan=switched(block, lambda name: name.startswith("gemm")))[1]
    assert report.counts == {"layer_norm": 1}
    assert report.to_json()["switched_off"] == ["gemm_bias_activation:active"]


@pytest.mark.parametrize(
    "off", ["gemm_bias_activation:t in the then branch of If 'choice'", "softmax:e in the else branch of If 'choice'"]
)
def test_a_match_in_a_body(off: str, tmp_path: Path) -> None:
    onnx.save(parse(TWO_BRANCHES), tmp_path / "m.onnx")
    assert optimize(tmp_path / "m.onnx")[1].counts == {"gemm_bias_activation": 1, "softmax": 1}
    report = optimize(tmp_path / "m.onnx", plan=switched(tmp_path / "m.onnx", lambda name: name == off))[1]
    (left,) = report.fused
    assert left.match != off and report.verified.status == "verified"


def test_matches_of_bodies_with_equal_names_are_switched_apart(tmp_path: Path) -> None:
    """Exporters name the tensors of two Loops alike; a plan lists as many matches as there are fused nodes."""
    body = "b (int64 i, bool c, float[4,8] s) => (bool go, float[4,8] e) { go = Identity (c) e = Softmax (s) }"
    loops = "".join(f"[loop{i}] y{i} = Loop <body = {body}> (n, true, x)" for i in (1, 2))
    text = "g (float[4,8] x) => (float[4,8] y1, float[4,8] y2) <int64 n = {3}, bool true = {1}>"
    onnx.save(parse(f"{text} {{ {loops} }}"), tmp_path / "m.onnx")
    names = ["softmax:e in the body of Loop 'loop1'", "softmax:e in the body of Loop 'loop2'"]
    assert sorted(one.name for one in find_matches(tmp_path / "m.onnx").matches) == names
    report = optimize(tmp_path / "m.onnx", plan=switched(tmp_path / "m.onnx", lambda name: name == names[0]))[1]
    assert [one.match for one in report.fused] == [names[1]]


def test_an_operator_of_another_tool_stays_whole(tmp_path: Path) -> None:
    """Such an operator is spelled out to be fused; if its match is off, the model has it as in the original."""
    model = parse("g (float[2,4,8] x) => (float[2,4,8] y) <float[8] b> { [gelu] y = com.microsoft.BiasGelu (x, b) }")
    model.opset_import.add(domain="com.microsoft", version=1)
    onnx.save(model, tmp_path / "m.onnx")
    (match,) = find_matches(tmp_path / "m.onnx").matches
    assert match.nodes == ("gelu",)
    optimized, _ = optimize(tmp_path / "m.onnx", plan=switched(tmp_path / "m.onnx", lambda name: True))
    assert [(node.name, node.op_type) for node in optimized.graph.node] == [("gelu", "BiasGelu")]


@pytest.mark.parametrize(
    "name", ["bert_sdpa_dynamo_fp32.onnx", "detector_ts11_bn_fp32.onnx", "mobilenetv3_ts13_bn_fp32.onnx"]
)
def test_matches_of_exported_models_are_switched_off(name: str, tmp_path: Path) -> None:
    """Every third match is off, in channels-last regions and epilogues too; its nodes are in nothing that is fused."""
    path = unpack(name, tmp_path)
    matches = find_matches(path).matches
    off = {match.name: match.nodes for match in matches[::3]}
    plan = switched(path, lambda match: match in off)
    report = optimize(path, plan=plan)[1]
    taken = {node for one in report.fused for node in one.replaces}
    assert len(off) > 3 and not taken & {node for nodes in off.values() for node in nodes}
    assert report.verified.passed


def test_with_standard_operators(tmp_path: Path) -> None:
    """There are no regions and no channels-last images then, so the plan is made without them."""
    path = unpack("bert_sdpa_dynamo_fp32.onnx", tmp_path)
    plan = switched(path, lambda name: name.startswith("attention"), regions=False, layout="nchw")
    standard = fused_nodes(optimize(path, emit="standard", verify=False)[0])
    assert standard.count("Attention") == 2
    assert "Attention" not in fused_nodes(optimize(path, emit="standard", plan=plan, verify=False)[0])


LONG = "softmax:" + "y" * 100_000


def changed(data: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    return {**data, **change}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "else"}, 'it lacks "format": "onnxfuse-plan"; make it again with `onnxfuse plan`'),
        ({"version": 2}, "it has version 2; this onnxfuse reads 1"),
        ({"version": [[2]]}, "it has no version; this onnxfuse reads 1"),
        ({"model": {"name": "m"}}, '"model" lacks the "digest"'),
        ({"model": {"name": "bert.onnx", "digest": "0" * 64}},
         "was made for another model, 'bert.onnx': the digest of its nodes differs; make it again"),
        ({"matches": {}}, '"matches" is not a list'),
        ({"matches": [{"name": "softmax:y", "fusion": "softmax", "nodes": [], "apply": 1}]},
         '"matches"[0] needs "apply", which is true or false'),
        ({"matches": [{"name": "softmax:y", "fusion": "softmax", "nodes": ["y", ["y"]], "apply": True}]},
         '"matches"[0] needs "nodes", which is a list of texts'),
        ({"matches": [{"name": "softmax:y", "fusion": "softmax", "nodes": [], "apply": True}] * 2},
         "it lists 'softmax:y' twice"),
        ({"matches": [{"name": "layer_nor:y", "fusion": "layer_norm", "nodes": [], "apply": False}]},
         "the plan names 'layer_nor:y', which this model does not have with these options; did you mean "
         "'layer_norm:y'? give the options that the plan was made with, or make it again"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit(change: Mapping[str, Any], sentence: str, block: Path) -> None:
    plan = switched(block, lambda name: False)
    plan.write_text(json.dumps(changed(json.loads(plan.read_text(encoding="utf-8")), change)), encoding="utf-8")
    with pytest.raises(UsageError) as error:
        optimize(block, plan=plan)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 10**4000},
        {"model": {"name": LONG, "digest": "0" * 64}},
        {"matches": [{"name": LONG, "fusion": "softmax", "nodes": [], "apply": True}] * 2},
        {"matches": [{"name": LONG, "fusion": "softmax", "nodes": [], "apply": True}]},
    ],
)
def test_long_names_of_a_plan_are_cut(change: Mapping[str, Any], block: Path) -> None:
    plan = switched(block, lambda name: False)
    plan.write_text(json.dumps(changed(json.loads(plan.read_text(encoding="utf-8")), change)), encoding="utf-8")
    with pytest.raises(UsageError) as error:
        optimize(block, plan=plan)
    assert "..." in str(error.value) and len(str(error.value)) < 500 + len(str(plan))


def test_a_file_that_is_none(block: Path, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("hello", encoding="utf-8")
    for name, sentence in (("text.json", "it is not JSON"), ("no.json", "No such file or directory")):
        result = CliRunner().invoke(main, ["optimize", str(block), "--dry-run", "--plan", str(tmp_path / name)])
        assert (result.exit_code, sentence in result.stderr, "onnxfuse plan" in result.stderr) == (USAGE, True, True)
    with pytest.raises(ModelError, match=r"cannot write the plan"):
        find_matches(block).write(tmp_path)


def test_files_of_strangers(block: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not a plain file, or larger than any plan, is not read; JSON may nest as deep as it likes."""
    (tmp_path / "deep.json").write_text('{"matches":' + "[" * 100_000 + "]" * 100_000 + "}", encoding="utf-8")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    plan = switched(block, lambda name: False)
    monkeypatch.setattr(choices, "MAX_BYTES", 100)
    for path, sentence in (
        (tmp_path / "deep.json", "more than the 100 that are read"),
        (plan, "more than the 100 that are read"),
        (tmp_path / "pipe.json", "it is a device or a pipe"),
        (tmp_path / "zero.json", "it is a device or a pipe"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(UsageError, match=f"cannot read the plan '{path}': .*{sentence}; `onnxfuse plan` writes"):
            optimize(block, plan=path)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="not a plan that can be read: its JSON is nested too deeply"):
        optimize(block, plan=tmp_path / "deep.json")


def test_a_plan_of_many_matches_is_read_once(block: Path) -> None:
    """Names are compared as often as there are matches, not as often as there are pairs of them."""

    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    count = 3000
    matches = [{"name": Name(f"softmax:{i}"), "fusion": "softmax", "nodes": [], "apply": True} for i in range(count)]
    data = {"format": "onnxfuse-plan", "version": 1, "model": {"name": "m", "digest": ""}, "matches": matches}
    assert len(choices._parsed(block, data).matches) == count
    assert Name.compared <= count


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_plan_is_written_to_plain_files_alone(block: Path, tmp_path: Path, kind: str) -> None:
    os.mkfifo(path := tmp_path / "pipe.json")
    if kind == "device":
        path = Path(os.devnull)
    result = CliRunner().invoke(main, ["plan", str(block), "-o", str(path)])
    assert result.exit_code == 1 and "it is a device or a pipe" in result.stderr
    with pytest.raises(ModelError, match=r"cannot write the plan '.*': it is a device or a pipe"):
        find_matches(block).write(path)


def test_a_plan_does_not_replace_its_model(block: Path) -> None:
    before = block.read_bytes()
    result = CliRunner().invoke(main, ["plan", str(block), "-o", str(block)])
    assert result.exit_code == USAGE and "is the model to read; give another name" in result.stderr
    assert block.read_bytes() == before


def test_a_plan_of_other_options_is_an_error(block: Path) -> None:
    plan = switched(block, lambda name: False)
    with pytest.raises(UsageError, match="the plan names 'layer_norm:y', which this model does not have with these"):
        optimize(block, skip=["layer_norm"], plan=plan)
