"""The kernel of the tutorial on a CPU: written to files as the page shows it, planned, and run by the emulator."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from documents import ROOT, blocks
from kernel_hosts import host_of
from outside import site

from onnxfuse.errors import MissingPackageError
from onnxfuse.runtime.kernel_folders import add_kernels
from onnxfuse.runtime.plan import FusedNode, TensorSpec
from onnxfuse.testing.emulated_launches import NUMPY, emulate

__all__ = ["site"]
# A row shorter than the block, rows as long, and one longer; the tolerance is relative to the largest element.
CASES = {"float32": ((3, 5), 1e-6), "float16": ((2, 2, 128), 1e-3), "bfloat16": ((2, 300), 8e-3)}
EPSILON = 1e-3


@pytest.fixture
def kernels(site: Path, tmp_path: Path) -> None:
    """Add the folder of kernels that the reader of the tutorial writes."""
    for block in blocks(ROOT / "docs" / "tutorials" / "fusion.md"):
        if block.title.startswith("kernels/"):
            path = tmp_path / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    assert add_kernels(tmp_path / "kernels") == ("l2_norm",)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", CASES)
def test_the_kernel_computes_what_the_page_says(dtype: str, tmp_path: Path) -> None:
    """The first rows are so small that epsilon decides."""
    shape, tolerance = CASES[dtype]
    x = np.random.default_rng(0).standard_normal(shape).astype(NUMPY[dtype])
    x[0] = 1e-5
    node = FusedNode("l2_norm", "n", ("x",), {"epsilon": EPSILON}, (dtype,))
    host = host_of("l2_norm")
    assert host.supports(node, [dtype], H200) is None
    (plan,) = host.candidates(node, [TensorSpec(shape, dtype)], H200)
    (y,) = emulate(plan, [x], tmp_path)
    exact = x.astype(np.float64)
    expected = exact / np.maximum(np.sqrt((exact**2).sum(-1, keepdims=True)), EPSILON)
    assert np.abs(y.astype(np.float64).reshape(shape) - expected).max() <= tolerance * np.abs(expected).max()


def test_planning_a_triton_kernel_without_triton_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "onnxfuse.runtime.triton_kernels", raising=False)
    with pytest.raises(MissingPackageError, match="pip install triton"):
        importlib.import_module("onnxfuse.runtime.triton_kernels")
