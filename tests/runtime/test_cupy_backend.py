"""Import CuPy where its cache folder cannot be made; test_cupy_backend_gpu.py runs sessions there."""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from onnxfuse.runtime.cupy_backend import cupy_module


def folders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of cache folders that are set when CuPy is imported."""
    seen: list[str] = []
    monkeypatch.setattr(
        importlib, "import_module", lambda name: seen.append(os.environ["CUPY_CACHE_DIR"]) or SimpleNamespace()
    )
    return seen


def test_a_folder_that_can_be_made_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = folders(monkeypatch)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "new" / "cache"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    cupy_module()
    assert seen == [str(tmp_path / "new" / "cache")]
    assert "CUPY_CACHE_IN_MEMORY" not in os.environ


def test_a_folder_that_cannot_be_made_costs_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = folders(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")
    with caplog.at_level(logging.WARNING, "onnxfuse"):
        cupy_module()
        cupy_module()
    assert seen == [os.sep] * 2
    assert os.environ["CUPY_CACHE_IN_MEMORY"] == "1"
    assert [record.getMessage()[:41] for record in caplog.records] == ["kernels are not cached on disk from now o"]


def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen = folders(monkeypatch)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")
    with caplog.at_level(logging.WARNING, "onnxfuse"):
        cupy_module()
        cupy_module()
    assert seen == [os.sep] * 2 and os.environ["CUPY_CACHE_IN_MEMORY"] == "1"
    assert "others can write to it (its mode is 777)" in caplog.text and len(caplog.records) == 1


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A container may run under a user number that has no entry in /etc/passwd."""

    def nobody(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    seen = folders(monkeypatch)
    monkeypatch.setenv("CUPY_CACHE_DIR", "")
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")
    monkeypatch.setattr(Path, "expanduser", nobody)
    cupy_module()
    assert (seen, os.environ["CUPY_CACHE_IN_MEMORY"]) == ([os.sep], "1")
    assert "kernels are not cached on disk from now on: Could not determine home directory." in caplog.text


def test_a_root_without_any_folder_to_write_to_costs_the_cache_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    seen = folders(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "")
    monkeypatch.setattr(tempfile, "gettempdir", none)
    cupy_module()
    assert seen == [os.sep]
