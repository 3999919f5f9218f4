"""The tracked files can be copied to another machine beside a GPU's packages, within 64 MiB, and collected there."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from exported_models import EXPORTED, SUFFIX, compress, decompress, load_exported, read, read_index

ROOT = Path(__file__).parent.parent
LARGEST_TREE = 7_300_000  # bytes; exported models are compressed, which takes 1.5 MB in place of 4.9


def test_each_test_file_has_a_name_of_its_own() -> None:
    """The folders of tests are no packages, so that pytest would take the second file of a name for the first."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_tracked_tree_is_small() -> None:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert sum(path.lstat().st_size for path in paths if path.is_symlink() or path.exists()) <= LARGEST_TREE


def test_every_exported_model_is_in_the_archive_of_its_architecture() -> None:
    expected: dict[str, dict[str, int]] = defaultdict(dict)
    for name, entry in read_index().items():
        expected[f"{entry['architecture']}{SUFFIX}"][name] = entry["bytes"]
    stored = {path.name: decompress(path.read_bytes()) for path in EXPORTED.iterdir() if path.name != "index.json"}
    assert {path: {name: len(model) for name, model in models.items()} for path, models in stored.items()} == expected


def test_a_model_is_read_from_the_archive_of_its_architecture() -> None:
    name = "bert_sdpa_ts_fp16.onnx"
    model = load_exported(name)
    assert model.SerializeToString() == read(name) == decompress((EXPORTED / f"bert{SUFFIX}").read_bytes())[name]


def test_compressing_gives_the_file_that_is_stored() -> None:
    path = min(EXPORTED.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_size)
    assert compress(decompress(path.read_bytes())) == path.read_bytes()


def test_an_archive_depends_on_nothing_but_its_models() -> None:
    models = {"b.onnx": b"second", "a.onnx": b"first"}
    content = compress(models)
    assert content == compress(dict(sorted(models.items()))) and decompress(content) == models
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        entries = [(each.name, each.mtime, each.uid, each.gid, each.uname, each.gname) for each in archive]
    assert entries == [("a.onnx", 0, 0, 0, "", ""), ("b.onnx", 0, 0, 0, "", "")]
