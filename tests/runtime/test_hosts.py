"""A folder with `FUSIONS` and a host is all that a family of kernels needs."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from stand_in import Stage, model, node, session, stage

import onnxfuse.kernels
from onnxfuse.runtime.hosts import find_host
from onnxfuse.session import explain_session

HOST = """
from onnxfuse.runtime.plan import Kernel, Launch, Plan, Pointer, Scalar

def supports(node, dtypes, device):
    return None if dtypes == ("float32",) else "twice takes float32"

def candidates(node, inputs, device):
    (x,) = inputs
    arguments = (Pointer("input", 0), Pointer("output", 0), Scalar(x.shape[0], "int64"), Scalar(2.0, "float32"))
    return [Plan((x,), (Launch(Kernel("scale", "scale"), (1, 1, 1), (32, 1, 1), arguments),))]
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return stage(monkeypatch)


def test_a_new_folder_adds_a_kernel(gpu: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "doubling").mkdir()
    (tmp_path / "doubling" / "__init__.py").write_text('FUSIONS = ("twice",)\n')
    (tmp_path / "doubling" / "host.py").write_text(HOST)
    monkeypatch.setattr(onnxfuse.kernels, "__path__", [*onnxfuse.kernels.__path__, str(tmp_path)])
    for name in ("onnxfuse.kernels.doubling", "onnxfuse.kernels.doubling.host"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    call = node("twice", "x", "y", operands="x")
    source = model(f"g (float[n] x) => (float[n] y) {{ {call} }}", twice="(x) => (y) { y = Add(x, x) }")
    before = gpu.launches()
    run = session(source)
    np.testing.assert_array_equal(run.run(None, {"x": np.float32([1, 2, 3])})[0], [2, 4, 6])
    assert gpu.launches() - before == 1
    assert [run.how for run in explain_session(run)] == ["kernel"]


def test_a_fusion_that_no_family_names_has_no_host() -> None:
    assert find_host("no_such_fusion") is None


def test_every_fusion_has_one_host_at_most() -> None:
    names = [each.name for each in pkgutil.iter_modules(onnxfuse.kernels.__path__) if each.ispkg]
    families = [importlib.import_module(f"onnxfuse.kernels.{name}") for name in names]
    fusions = Counter(fusion for family in families for fusion in family.FUSIONS)
    assert fusions and set(fusions.values()) == {1}
    for fusion in fusions:
        host = find_host(fusion)
        assert host is not None and callable(host.supports) and callable(host.candidates)
