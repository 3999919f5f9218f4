"""Verdicts on disk: what is kept comes back, what is damaged or of another machine does not, and nothing ever fails."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import onnxfuse
from onnxfuse.provider import verdicts
from onnxfuse.provider.plan import Device
from onnxfuse.provider.verdicts import environment, keep, recall, recall_case, session_environment

DEVICE = Device("NVIDIA H200", 90, 132, 227 * 1024)
CUDA = "CUDAExecutionProvider"
HERE = {"gpu": "a", "driver": "1"}
NODE = {"fusion": "layer_norm", "attributes": {"epsilon": 1e-5, "masked_score": float("-inf")}}
SMALL, LARGE = {"shapes": ["4x8 float16"]}, {"shapes": ["4096x768 float16"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "_told", set())
    monkeypatch.setattr(verdicts, "_unwritten", {})
    return tmp_path / "cache"


def written(folder: Path) -> Path:
    """The one verdict below a folder."""
    (path,) = folder.rglob("*.json")
    return path


def test_a_verdict_comes_back(folder: Path) -> None:
    assert keep(HERE, NODE, LARGE, "body", {"kernel": 7.4e-6, "body": 6.1e-6})
    assert keep(HERE, NODE, SMALL, "kernel", {"kernel": 1e-6, "body": 3e-6})
    found = {each.chosen: each for each in recall(HERE, NODE)}
    assert found["body"].case == LARGE and found["body"].seconds == {"kernel": 7.4e-6, "body": 6.1e-6}
    assert found["kernel"].case == SMALL
    assert recall_case(HERE, NODE, LARGE) == found["body"]
    assert found["body"].measured.startswith("20") and found["body"].measured.endswith("+00:00")
    assert sorted(path.suffix for path in folder.rglob("*.*")) == [".json", ".json"]


def test_a_later_verdict_replaces_an_earlier_one() -> None:
    keep(HERE, NODE, LARGE, "body", {"kernel": 2e-6, "body": 1e-6})
    keep(HERE, NODE, LARGE, "kernel", {"kernel": 1e-6, "body": 2e-6})
    assert [each.chosen for each in recall(HERE, NODE)] == ["kernel"]


def test_a_verdict_is_for_all_whom_the_umask_lets_read(folder: Path) -> None:
    """An image tuned by one user runs as another."""
    before = os.umask(0o022)
    try:
        keep(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    finally:
        os.umask(before)
    assert written(folder).stat().st_mode & 0o777 == 0o644


def test_nothing_is_found_where_nothing_was_kept() -> None:
    assert recall(HERE, NODE) == []
    assert recall_case(HERE, NODE, LARGE) is None
    keep(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    assert recall({**HERE, "driver": "2"}, NODE) == []
    assert recall(HERE, {**NODE, "fusion": "rms_norm"}) == []
    assert recall_case(HERE, NODE, LARGE) is None


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[1, 2]",
    "null": lambda text: "null",
    "deep": lambda text: "[" * 100_000,
    "binary": lambda text: "\0\1\2",
    "a newer format": lambda text: text.replace('"format": 1', '"format": 2'),
    "about another node": lambda text: text.replace("layer_norm", "softmax"),
    "times that are no numbers": lambda text: text.replace("1.0", '"fast"'),
    "times that are not positive": lambda text: text.replace("1.0", "-1.0"),
    "times too large": lambda text: text.replace("1.0", "9" * 400),
    "another case": lambda text: text.replace('"4x8 float16"', "5"),
    "times without end": lambda text: text.replace("1.0", "Infinity"),
    "no date": lambda text: text.replace('"measured": "2', '"measured": "x'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored_and_named(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    keep(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    path = written(folder)
    path.write_text(DAMAGE[damage](path.read_text(encoding="utf-8")), encoding="utf-8")
    assert recall(HERE, NODE) == []
    assert recall_case(HERE, NODE, SMALL) is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"verdict {path} is ignored: ") and message.endswith("it may be deleted")
    keep(HERE, NODE, SMALL, "body", {"kernel": 2.0, "body": 1.0})
    assert [each.chosen for each in recall(HERE, NODE)] == ["body"]


def test_bytes_that_are_no_text_are_ignored(folder: Path) -> None:
    keep(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    written(folder).write_bytes(b"\xff\xfe\x80")
    assert recall(HERE, NODE) == []


def told(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    return record.getMessage()


def test_a_file_in_the_folders_place_is_survived(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("not a folder")
    assert not keep(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    assert not keep(HERE, {**NODE, "fusion": "rms_norm"}, SMALL, "kernel", {"kernel": 1.0})
    assert "cannot be written to" in told(caplog) and "set ONNXFUSE_CACHE_DIR" in told(caplog)


def test_what_cannot_be_written_lasts_as_long_as_the_process(folder: Path) -> None:
    keep(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    moved = folder.rename(folder.with_name("moved"))
    folder.write_text("not a folder")
    for chosen in ("kernel", "body"):
        assert not keep(HERE, NODE, LARGE, chosen, {"kernel": 2.0, "body": 1.0})
    (found,) = recall(HERE, NODE)
    assert (found.case, found.chosen, found.seconds) == (LARGE, "body", {"kernel": 2.0, "body": 1.0})
    assert recall_case(HERE, NODE, LARGE) == found and recall_case(HERE, NODE, SMALL) is None
    assert recall({**HERE, "driver": "2"}, NODE) == []
    folder.unlink()
    moved.rename(folder)
    assert {each.chosen for each in recall(HERE, NODE)} == {"kernel", "body"}
    assert keep(HERE, NODE, LARGE, "kernel", {"kernel": 1.0, "body": 3.0})
    assert [each.chosen for each in recall(HERE, NODE)] == ["kernel", "kernel"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_survived(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    place = written(folder).parent
    place.chmod(0o555)
    try:
        assert not keep(HERE, NODE, LARGE, "kernel", {"kernel": 1.0})
    finally:
        place.chmod(0o755)
    assert "Permission denied" in told(caplog)
    assert len(list(folder.rglob("*.json"))) == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("step", ["mkdir", "replace"])
def test_a_folder_that_takes_nothing_is_survived(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int, step: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, step, fail)
    assert not keep(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    assert os.strerror(code) in told(caplog)
    assert list(folder.rglob("*.*")) == []


def test_a_disk_that_fills_up_leaves_no_half_file(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(record: Any, file: Any, **_: Any) -> None:
        file.write('{"format": 1,')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keep(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    monkeypatch.setattr(json, "dump", half)
    assert not keep(HERE, NODE, SMALL, "body", {"body": 1.0})
    assert "No space left" in told(caplog)
    assert json.loads(written(folder).read_text())["chosen"] == "kernel"
    assert [path.suffix for path in folder.rglob("*.*")] == [".json"]


def test_without_a_home_nothing_is_written(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ONNXFUSE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert not keep(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    assert [each.chosen for each in recall(HERE, NODE)] == ["kernel"]
    assert "set ONNXFUSE_CACHE_DIR" in told(caplog)


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert verdicts.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("ONNXFUSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert verdicts.cache_folder() == tmp_path / "onnxfuse"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verdicts.cache_folder() == tmp_path / ".cache" / "onnxfuse"


def test_two_processes_write_one_verdict(tmp_path: Path) -> None:
    """Whoever reads meanwhile finds a whole verdict of one of them, never a mixture."""
    script = """
import sys
from onnxfuse.provider.verdicts import keep, recall
for i in range(300):
    name = sys.argv[1] * (1 + i % 50)
    assert keep({"gpu": "a"}, "node", "case", name, {name: 1.0 + i})
    (found,) = recall({"gpu": "a"}, "node")
    assert set(found.seconds) == {found.chosen} and len(set(found.chosen)) == 1, found
"""
    running = [subprocess.Popen([sys.executable, "-c", script, name], stderr=subprocess.PIPE) for name in "ab"]
    assert [(each.communicate()[1], each.returncode) for each in running] == [(b"", 0), (b"", 0)]
    assert len(recall({"gpu": "a"}, "node")) == 1


# --- what verdicts are kept under ---


def test_another_gpu_or_setting_is_another_environment() -> None:
    one = environment(CUDA, DEVICE)
    assert environment(CUDA, dataclasses.replace(DEVICE, ordinal=1)) == one
    for other in (
        environment(CUDA, dataclasses.replace(DEVICE, name="NVIDIA L4")),
        environment(CUDA, dataclasses.replace(DEVICE, tf32=False)),
        environment("CPUExecutionProvider", DEVICE),
    ):
        assert other != one
    assert set(one) == {"provider", "gpu", "arch", "multiprocessors", "tf32", "driver", "cuda", "libraries",
                        "onnxfuse", "onnxruntime", "kernels"}  # fmt: skip


@pytest.mark.parametrize("options, same", [
    ({}, True), ({"device_id": 1, "gpu_mem_limit": 1 << 30, "enable_cuda_graph": "1"}, True),
    ({"prefer_nhwc": "0", "cudnn_conv_algo_search": "EXHAUSTIVE"}, True), ({"sdpa_kernel": False}, True),
    ({"prefer_nhwc": "1"}, False), ({"cudnn_conv_algo_search": "HEURISTIC"}, False), ({"sdpa_kernel": 2}, False),
    ({"an_option_of_later_versions": "yes"}, False),
])  # fmt: skip
def test_options_that_change_what_bodies_run_as_change_the_environment(options: dict[str, Any], same: bool) -> None:
    assert (session_environment(CUDA, DEVICE, options) == session_environment(CUDA, DEVICE, {})) == same


def test_texts_and_numbers_of_an_option_are_the_same() -> None:
    found = [session_environment(CUDA, DEVICE, {"prefer_nhwc": value}) for value in (1, "1", True, "true")]
    assert found == [found[0]] * 4


@pytest.mark.parametrize("name", ["driver_version", "cuda_version", "library_versions"])
def test_another_version_is_another_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    one = environment(CUDA, DEVICE)
    monkeypatch.setattr(verdicts, name, lambda *_: "other")
    assert environment(CUDA, DEVICE) != one


def test_another_onnxfuse_is_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is known without the metadata of a package, which a frozen program lacks."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(verdicts, "version", missing)
    one = environment(CUDA, DEVICE)
    monkeypatch.setattr(onnxfuse, "__version__", "9.9")
    assert environment(CUDA, DEVICE) != one


def test_another_kernel_is_another_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import onnxfuse.kernels

    one = environment(CUDA, DEVICE)
    (tmp_path / "mine.cu").write_text("// mine")
    monkeypatch.setattr(onnxfuse.kernels, "__path__", [*onnxfuse.kernels.__path__, str(tmp_path)])
    assert environment(CUDA, DEVICE) != one


def test_the_driver_is_read_from_where_the_kernel_module_says_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@)\n"
        "GCC version:  gcc version 15.3.0 (GCC)\n"
    )
    monkeypatch.setattr(verdicts, "DRIVER", tmp_path / "version")
    assert verdicts.driver_version.__wrapped__() == "580.159.04"
