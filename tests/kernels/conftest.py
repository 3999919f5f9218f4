"""What tests of kernels share: fixtures that keep other tests of the process out of plans."""

from __future__ import annotations

import pytest

from onnxfuse.kernels.gemm import cublaslt


@pytest.fixture
def no_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave cuBLASLt out of plans, also where an earlier test of this process opened a stand-in of it."""
    monkeypatch.setattr(cublaslt, "_is_available", lambda: False)
