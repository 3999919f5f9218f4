"""Measurements on disk: what was stored is found, damaged files and other machines' are not, and nothing raises."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onnxfuse.runtime import cache_folder as cache_folder_module
from onnxfuse.runtime.cache_folder import cache_folder
from onnxfuse.tuning import cache
from onnxfuse.tuning.cache import lookup, lookup_case, store

HERE = {"gpu": "a", "driver": "1"}
NODE = {"fusion": "layer_norm", "attributes": {"epsilon": 1e-5, "masked_score": float("-inf")}}
SMALL, LARGE = {"shapes": ["4x8 float16"]}, {"shapes": ["4096x768 float16"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folder_module, "_warned", set())
    monkeypatch.setattr(cache, "_unwritten", {})
    return tmp_path / "cache"


def written(folder: Path) -> Path:
    """The one measurement below a folder."""
    (path,) = folder.rglob("*.json")
    return path


def test_a_measurement_comes_back(folder: Path) -> None:
    assert store(HERE, NODE, LARGE, "body", {"kernel": 7.4e-6, "body": 6.1e-6})
    assert store(HERE, NODE, SMALL, "kernel", {"kernel": 1e-6, "body": 3e-6})
    found = {each.chosen: each for each in lookup(HERE, NODE)}
    assert found["body"].case == LARGE and found["body"].seconds == {"kernel": 7.4e-6, "body": 6.1e-6}
    assert found["kernel"].case == SMALL
    assert lookup_case(HERE, NODE, LARGE) == found["body"]
    assert found["body"].measured.startswith("20") and found["body"].measured.endswith("+00:00")
    assert sorted(path.suffix for path in folder.rglob("*.*")) == [".json", ".json"]


def test_a_later_measurement_replaces_an_earlier_one() -> None:
    store(HERE, NODE, LARGE, "body", {"kernel": 2e-6, "body": 1e-6})
    store(HERE, NODE, LARGE, "kernel", {"kernel": 1e-6, "body": 2e-6})
    assert [each.chosen for each in lookup(HERE, NODE)] == ["kernel"]


@pytest.mark.parametrize("mode", [None, 0o755])
def test_the_folder_is_for_its_user_alone_unless_it_was_made_for_all_to_read(folder: Path, mode: int | None) -> None:
    """A container image may be tuned by root and run by another user."""
    before = os.umask(0)
    try:
        if mode:
            folder.mkdir(mode)
        store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    finally:
        os.umask(before)
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    assert len(folders) == 4 and {path.stat().st_mode & 0o777 for path in folders} == {mode or 0o700}


def test_a_folder_that_others_can_write_to_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    for mode in 0o770, 0o702, 0o1777:
        caplog.clear()
        folder.chmod(mode)
        assert cache_folder() is None and lookup(HERE, NODE) == []
        why = f"others can write to it (its mode is {mode:o}); empty it and run `chmod go-w '{folder}'`"
        assert why in told(caplog)
        assert not store(HERE, NODE, LARGE, "kernel", {"kernel": 1.0})
        assert lookup_case(HERE, NODE, LARGE), "known to this process alone"
        cache._unwritten.clear()
    folder.chmod(0o755)
    caplog.clear()
    (folder / "measurements").chmod(0o777)
    assert lookup(HERE, NODE) == [] and cache.is_empty() and f"the cache '{folder}/measurements' is not" in told(caplog)
    (folder / "measurements").chmod(0o755)
    caplog.clear()
    assert cache_folder() == folder and len(lookup(HERE, NODE)) == 1
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if folder.stat().st_uid == 0:
        assert cache_folder() == folder, "root may write to it anyway"
        os.chown(folder, 4712, -1)
    assert cache_folder() is None and f"it belongs to user {folder.stat().st_uid}" in told(caplog)


def test_nothing_is_found_where_nothing_was_kept() -> None:
    assert lookup(HERE, NODE) == []
    assert lookup_case(HERE, NODE, LARGE) is None
    store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    assert lookup({**HERE, "driver": "2"}, NODE) == []
    assert lookup(HERE, {**NODE, "fusion": "rms_norm"}) == []
    assert lookup_case(HERE, NODE, LARGE) is None


DAMAGE = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[1, 2]",
    "null": lambda text: "null",
    "deep": lambda text: "[" * 100_000,
    "binary": lambda text: "\0\1\2",
    "a newer format": lambda text: text.replace('"format": 1', '"format": 2'),
    "about another node": lambda text: text.replace("layer_norm", "softmax"),
    "times that are not numbers": lambda text: text.replace("1.0", '"fast"'),
    "times that are not positive": lambda text: text.replace("1.0", "-1.0"),
    "times too large": lambda text: text.replace("1.0", "9" * 400),
    "another case": lambda text: text.replace('"4x8 float16"', "5"),
    "times without end": lambda text: text.replace("1.0", "Infinity"),
    "no date": lambda text: text.replace('"measured": "2', '"measured": "x'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored_and_named(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    path = written(folder)
    path.write_text(DAMAGE[damage](path.read_text(encoding="utf-8")), encoding="utf-8")
    assert lookup(HERE, NODE) == []
    assert lookup_case(HERE, NODE, SMALL) is None
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"measurement {path} is ignored: ") and message.endswith("it may be deleted")
    store(HERE, NODE, SMALL, "body", {"kernel": 2.0, "body": 1.0})
    assert [each.chosen for each in lookup(HERE, NODE)] == ["body"]


def test_bytes_that_are_no_text_are_ignored(folder: Path) -> None:
    store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    written(folder).write_bytes(b"\xff\xfe\x80")
    assert lookup(HERE, NODE) == []


def told(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    return record.getMessage()


def test_a_file_in_the_folders_place_is_survived(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("not a folder")
    assert not store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    assert not store(HERE, {**NODE, "fusion": "rms_norm"}, SMALL, "kernel", {"kernel": 1.0})
    assert "cannot be written to" in told(caplog) and "set ONNXFUSE_CACHE_DIR" in told(caplog)


def test_what_cannot_be_written_lasts_as_long_as_the_process(folder: Path) -> None:
    store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    moved = folder.rename(folder.with_name("moved"))
    folder.write_text("not a folder")
    for chosen in ("kernel", "body"):
        assert not store(HERE, NODE, LARGE, chosen, {"kernel": 2.0, "body": 1.0})
    (found,) = lookup(HERE, NODE)
    assert (found.case, found.chosen, found.seconds) == (LARGE, "body", {"kernel": 2.0, "body": 1.0})
    assert lookup_case(HERE, NODE, LARGE) == found and lookup_case(HERE, NODE, SMALL) is None
    assert lookup({**HERE, "driver": "2"}, NODE) == []
    folder.unlink()
    moved.rename(folder)
    assert {each.chosen for each in lookup(HERE, NODE)} == {"kernel", "body"}
    assert store(HERE, NODE, LARGE, "kernel", {"kernel": 1.0, "body": 3.0})
    assert [each.chosen for each in lookup(HERE, NODE)] == ["kernel", "kernel"]


def test_a_read_only_folder_is_survived(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    if os.geteuid() == 0:  # root may write everywhere, so that the refusal has to be simulated
        own = Path.open

        def open_to_read(path: Path, mode: str = "r", **more: Any) -> Any:
            if "x" in mode:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return own(path, mode, **more)

        monkeypatch.setattr(Path, "open", open_to_read)
    read_only = written(folder).parent
    read_only.chmod(0o555)
    try:
        assert not store(HERE, NODE, LARGE, "kernel", {"kernel": 1.0})
    finally:
        read_only.chmod(0o755)
    assert "Permission denied" in told(caplog)
    assert len(list(folder.rglob("*.json"))) == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("step", ["mkdir", "replace"])
def test_a_folder_that_takes_nothing_is_survived(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, code: int, step: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, step, fail)
    assert not store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    assert os.strerror(code) in told(caplog)
    assert list(folder.rglob("*.*")) == []


def test_a_disk_that_fills_up_leaves_no_half_file(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(record: Any, file: Any, **_: Any) -> None:
        file.write('{"format": 1,')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    monkeypatch.setattr(json, "dump", half)
    assert not store(HERE, NODE, SMALL, "body", {"body": 1.0})
    assert "No space left" in told(caplog)
    assert json.loads(written(folder).read_text())["chosen"] == "kernel"
    assert [path.suffix for path in folder.rglob("*.*")] == [".json"]


def test_without_a_home_nothing_is_written(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ONNXFUSE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert not store(HERE, NODE, SMALL, "kernel", {"kernel": 1.0})
    assert [each.chosen for each in lookup(HERE, NODE)] == ["kernel"]
    assert "set ONNXFUSE_CACHE_DIR" in told(caplog)


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("ONNXFUSE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "onnxfuse"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "onnxfuse"


def test_two_processes_write_one_measurement() -> None:
    """A reader finds the whole measurement of one of them at any time, never a mixture."""
    script = """
import sys
from onnxfuse.tuning.cache import lookup, store
for i in range(300):
    name = sys.argv[1] * (1 + i % 50)
    assert store({"gpu": "a"}, "node", "case", name, {name: 1.0 + i})
    (found,) = lookup({"gpu": "a"}, "node")
    assert set(found.seconds) == {found.chosen} and len(set(found.chosen)) == 1, found
"""
    running = [subprocess.Popen([sys.executable, "-c", script, name], stderr=subprocess.PIPE) for name in "ab"]
    assert [(each.communicate()[1], each.returncode) for each in running] == [(b"", 0), (b"", 0)]
    assert len(lookup({"gpu": "a"}, "node")) == 1
