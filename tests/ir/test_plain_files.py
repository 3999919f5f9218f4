"""Test reading within bounds and writing whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from onnxfuse.bench.bench import write_text
from onnxfuse.errors import ModelError
from onnxfuse.ir import plain_files
from onnxfuse.ir.plain_files import read_plain, write_whole
from onnxfuse.report.report import check_name


def special_files(folder: Path) -> list[Path]:
    """Return a pipe that nobody writes, a device that never ends, a link to it, and a folder."""
    os.mkfifo(folder / "pipe.json")
    (folder / "link.json").symlink_to("/dev/zero")
    (folder / "folder.json").mkdir()
    return [folder / "pipe.json", Path("/dev/zero"), folder / "link.json", folder / "folder.json"]


def test_what_is_no_plain_file_is_neither_read_nor_written(tmp_path: Path) -> None:
    for path in special_files(tmp_path):
        with pytest.raises(OSError, match=r"it is a device or a pipe|Is a directory"):
            read_plain(path, 100)
        with pytest.raises(OSError, match=r"it is a device or a pipe|Is a directory"):
            write_whole(path, b"text")
        with pytest.raises(
            ModelError, match=r"cannot write '.*': (it is a device or a pipe|Is a directory); give another"
        ):
            write_text(path, "text")
        if path.suffix:
            with pytest.raises(
                ModelError, match=r"cannot write the report .*: (it is a device or a pipe|Is a directory);"
            ):
                check_name(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.json", "link.json", "pipe.json"]


def test_the_size_is_bounded(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(b"12345")
    assert read_plain(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, more than the 4 that are read"):
        read_plain(path, 4)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "file").write_bytes(b"old")
    path.chmod(0o640)
    (link := tmp_path / "link").symlink_to(path)
    write_whole(link, b"new")
    assert link.is_symlink() and path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o640

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plain_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"newer")
    assert path.read_bytes() == b"new" and sorted(each.name for each in tmp_path.iterdir()) == ["file", "link"]
