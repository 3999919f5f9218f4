"""Test what the command line says of regions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from region_models import parsed

from onnxfuse import optimize
from onnxfuse.cli import main
from onnxfuse.runtime.plan import Kernel

NODES = "a = Neg(x) b = Exp(a) c = MatMul(b, w) d = Expand(c, s) [last] z = Abs(d)"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(parsed(NODES, inputs="float[8, 8] x, float[8, 8] w, int64[3] s"), path)
    return path


def said(*arguments: object) -> str:
    done = CliRunner().invoke(main, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def test_the_report_counts_what_they_save(model: Path) -> None:
    text = said("optimize", model, "--dry-run", "--no-verify")
    assert "Regions: 1 node in place of 2; without them, there would be 1 more launch and 512 B more traffic" in text
    assert "Regions" not in said("optimize", model, "--dry-run", "--no-verify", "--no-regions")
    assert "Regions" not in said("optimize", model, "--dry-run", "--no-verify", "--skip", "region")


def test_epilogues_without_regions_are_told_alone(tmp_path: Path) -> None:
    nodes = "c = MatMul(x, w) d = Add(c, b) [last] z = Sin(d)"
    made = parsed(nodes, inputs="float[64, 64] x, float[64, 64] w, float[64] b")
    for name, shape in ("w", (64, 64)), ("b", (64,)):
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.full(shape, 0.5, np.float32), name))
    del made.graph.input[1:]
    onnx.save(made, tmp_path / "m.onnx")
    assert "Regions: 1 node in epilogues; without them, there would be 1 more launch and 32.8 KB more traffic" in said(
        "optimize", tmp_path / "m.onnx", "--dry-run"
    )


def test_explain_says_why_nodes_are_in_none(model: Path) -> None:
    text = said("explain", model, "region")
    assert "region: not at 'd': Expand stays out of regions: its shape is computed; required is a constant" in text
    assert "region: not at 'last': nothing beside it can be merged with it" in text
    found = said("explain", model, "--node", "b")
    assert found.startswith("'b' is part of the region node 'b/region', which --regions makes")
    assert said("explain", model, "--node", "d").startswith("region: not at 'd': Expand stays out")


def test_list_and_show_know_them() -> None:
    assert "region Connected operators that no other fusion names" in said("list")
    assert "Its attribute `program` says the same" in said("show", "region")


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    """A model with a region of a dynamic dim: a roll by two, and windows of four."""
    nodes = (
        "a0 := int64[1] {0} a2 := int64[1] {2} one := int64[1] {1} end := int64[1] {8} shape := int64[3] {-1, 4, 16} "
        "head = Slice(x, a0, a2, one) tail = Slice(x, a2, end, one) rolled = Concat <axis = 1> (tail, head) "
        "[last] z = Reshape(rolled, shape)"
    )
    result, _ = optimize(parsed(nodes, inputs="float16[batch, 8, 16] x"), verify=False)
    path = tmp_path / "fused.onnx"
    onnx.save(result, path)
    return path


PROGRAM = """last/region: x -> z
  x0: float16[batch, 8, 16] = x
  v0: float16[batch, 2, 16] = Slice(x0, axes=[1], starts=[0], ends=[2], steps=[1])
  v1: float16[batch, 6, 16] = Slice(x0, axes=[1], starts=[2], ends=[8], steps=[1])
  v2: float16[batch, 8, 16] = Concat(v1, v0, axis=1)
  v3: float16[2*batch, 4, 16] = Reshape(v2, shape=[-1, 4, 16])
  z = v3
"""


def test_show_lists_the_regions_of_a_model_and_prints_their_programs(fused: Path) -> None:
    run = CliRunner().invoke
    listed = run(main, ["show", "region", str(fused)])
    assert listed.output == "last/region: 4 operators, 1 operand, 1 output: Slice Slice Concat Reshape\n"
    for name in ("last/region", "z"):
        assert run(main, ["show", "region", str(fused), "--node", name]).output == PROGRAM


def test_show_lists_regions_with_equal_operators_once(tmp_path: Path) -> None:
    """Though they multiply by different numbers."""
    steps = [
        f"c{i} := float {{{i + 2}}} a{i} = Mul(x{i}, c{i}) [end{i}] b{i} = {op}(a{i})"
        for i, op in enumerate(("Exp", "Exp", "Abs", "Exp"))
    ]
    text = " ".join(f"{each} x{i + 1} = CumSum(b{i}, axis)" for i, each in enumerate(steps))
    nodes = f"axis := int64 {{1}} {text} z = CumSum(x4, axis)"
    result, _ = optimize(parsed(nodes, inputs="float[batch, 8] x0"), verify=False)
    onnx.save(result, tmp_path / "fused.onnx")
    lines = CliRunner().invoke(main, ["show", "region", str(tmp_path / "fused.onnx")]).output.splitlines()
    assert sorted(lines) == [
        "end0/region and 2 more: 2 operators, 1 operand, 1 output: Mul Exp",
        "end2/region: 2 operators, 1 operand, 1 output: Mul Abs",
    ]


def test_show_prints_the_kernels_of_a_region(fused: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")
    from onnxfuse.runtime.nvrtc import compile_cubin

    shown = CliRunner().invoke(main, ["show", "region", str(fused), "--node", "z", "--cuda", "--arch", "sm_80"])
    assert shown.exit_code == 0 and "last/region, for NVIDIA A100-SXM4-80GB (sm_80" in shown.output
    assert (
        PROGRAM.partition("\n")[2].partition("  z = ")[0].replace("  ", "//   ") + "//   y0 = v3, which is z\n"
        in shown.output
    )
    assert max(map(len, shown.output.splitlines())) <= 120
    assert "// variant as at batch=" in shown.output and "// nvrtc: -DPRECISE=0" in shown.output
    for text in shown.output.split("// nvrtc: -DPRECISE=0\n")[1:]:
        assert compile_cubin(Kernel("region", "region", {"PRECISE": 0}, text=text), 80).spill_stores == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["region", "MODEL", "--node", "last/regin"], "there is no region 'last/regin'. Did you mean 'last/region'?"),
        (["region", "--node", "z"], "give the fused model that has the region"),
        (["region", "MODEL", "--cuda"], "--cuda is of one region; name it with --node"),
        (["region", "MODEL", "--node", "z", "--cuda", "--arch", "90"], "'90' is not a compute capability"),
        (["softmax", "MODEL"], "only the regions of a model are shown, not its nodes of 'softmax'"),
        (["region", "PLAIN"], "has no regions; `onnxfuse optimize` makes them of what no pattern names"),
    ],
)  # fmt: skip
def test_show_says_what_is_wrong(arguments: list[str], sentence: str, fused: Path, model: Path) -> None:
    given = [{"MODEL": str(fused), "PLAIN": str(model)}.get(each, each) for each in arguments]
    done = CliRunner().invoke(main, ["show", *given])
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())
