"""Nodes in onnxfuse's domain that onnxfuse did not write: they are what their function is, to all that reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper
from runtimes import open_on_cpu

from onnxfuse import optimize, unfuse
from onnxfuse.cli import main
from onnxfuse.errors import ModelError
from onnxfuse.ir.domain import DOMAIN, is_fused
from onnxfuse.optimizer import find_matches
from onnxfuse.runtime.fused_calls import read_calls

ATTRIBUTES = {
    "none": {},
    "a fusion that is a number": {"fusion": 1, "operands": "x"},
    "no operands": {"fusion": "layer_norm"},
    "too many operands": {"fusion": "layer_norm", "operands": "x scale", "output_types": [1]},
    "a lost attribute": {"fusion": "layer_norm", "operands": "x", "attributes": "epsilon", "output_types": [1]},
    "a fusion that is none": {"fusion": "own", "operands": "x", "output_types": [1]},
}
COMMANDS = (
    "optimize {} out.onnx --layout nhwc", "optimize {} out.onnx --emit standard",
    "optimize {} out.onnx --dtype float16",
    "plan {} -o plan.json", "explain {}", "explain {} --node call", "inspect {}", "unfuse {} apart.onnx",
    "show region {}", "compile {} --arch sm_90", "verify {} {}", "bench {} --provider cpu --runs 2",
    "export-triton {} repository", "tune {}",
)  # fmt: skip


def model_of(attributes: dict[str, object], has_function: bool = True, version: int = 1) -> onnx.ModelProto:
    """Return a model with a node between convolutions, whose function is named like a fusion."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17, "{DOMAIN}" : {version}]> '
        "main (float[b,4,6,6] x) => (float[b,4,6,6] y) <float[4,4,1,1] w> "
        f"{{ c = Conv(x, w) [call] s = {DOMAIN}.layer_norm(c) r = Relu(s) d = Conv(r, w) e = Sub(d, s) y = Exp(e) }} "
        f'<domain: "{DOMAIN}", opset_import: ["" : 17]> layer_norm (a) => (b) {{ b = Softplus(a) }}'
    )
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((4, 4, 1, 1)).astype(np.float32), "w")
    )
    del model.graph.value_info[:]
    model.graph.node[1].attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    if not has_function:
        del model.functions[:]
    return model


@pytest.mark.parametrize("attributes", ATTRIBUTES.values(), ids=ATTRIBUTES.keys())
def test_a_function_of_others_is_optimized_as_what_it_is(attributes: dict[str, object]) -> None:
    model = model_of(attributes)
    for layout in ("auto", "nhwc"):
        made, report = optimize(model, layout=layout)
        assert not report.left_out
        assert report.verified.status == "verified", report.verified.reason
        again, report = optimize(made, layout=layout)
        assert not report.left_out and report.verified.status == "verified", report.verified.reason
    x = np.ones((2, 4, 6, 6), np.float32)
    before, after = (open_on_cpu(each).run(None, {"x": x})[0] for each in (model, again))
    np.testing.assert_allclose(after, before, rtol=1e-4)


def test_an_operator_of_others_without_a_function_stays() -> None:
    made, report = optimize(model_of({}, has_function=False), layout="nhwc")
    assert not report.left_out
    assert [node.name for node in made.graph.node if node.op_type == "layer_norm"] == ["call"]


def test_a_newer_version_of_others_is_none_of_ours() -> None:
    assert not optimize(model_of({}, version=7), verify=False)[1].left_out
    newer = model_of(ATTRIBUTES["a fusion that is none"], version=7)
    with pytest.raises(ModelError, match="uses version 7 of the operators"):
        optimize(newer)


def test_a_fused_model_may_have_the_version_that_onnxruntime_writes() -> None:
    fused, report = optimize(model_of({}), layout="nhwc", verify=False)
    assert report.counts
    for opset in fused.opset_import:
        if opset.domain == DOMAIN:
            opset.version = 1000
    again, _ = optimize(fused, verify=False)
    assert any(map(is_fused, again.graph.node))


def test_there_is_nothing_to_unfuse_in_a_function_of_others() -> None:
    with pytest.raises(ModelError, match="no fused node"):
        unfuse(model_of({}))
    fused, _ = optimize(model_of({}, has_function=False), layout="nhwc", verify=False)
    apart, _ = unfuse(fused, verify=False)
    onnx.checker.check_model(apart)
    assert {node.op_type for node in apart.graph.node if node.domain} == {"layer_norm"}


def test_a_function_of_others_is_no_match_and_no_call() -> None:
    assert not read_calls(model_of({}))
    assert all("layer_norm" not in one.fusion for one in find_matches(model_of({})).matches)


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.parametrize("kind", [*ATTRIBUTES, "no function"])
def test_no_command_ends_in_an_error_that_nobody_expected(
    line: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(model_of(ATTRIBUTES.get(kind, {}), kind != "no function"), "model.onnx")
    done = CliRunner().invoke(main, line.replace("{}", "model.onnx").split())
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "please report" not in done.output
