"""Test what the command line says of regions."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from region_models import parsed

from onnxfuse.cli import main

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
    text = said("optimize", model, "--dry-run", "--no-verify", "--regions")
    assert "Regions: 1 node in place of 2, 512 B and 1 launch saved" in text
    assert "Regions" not in said("optimize", model, "--dry-run", "--no-verify")
    assert "Regions" not in said("optimize", model, "--dry-run", "--no-verify", "--regions", "--skip", "region")


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
