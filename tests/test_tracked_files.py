"""The tracked files are small enough to be copied to another machine beside a GPU's packages, within 64 MiB."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from exported_models import EXPORTED, SUFFIX, compress, load_exported, read, read_index

ROOT = Path(__file__).parent.parent
LARGEST_TREE = 7_300_000  # bytes; exported models are compressed, which takes 2.7 MB in place of 4.9


def test_the_tracked_tree_is_small() -> None:
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is no checkout of git")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert sum(path.lstat().st_size for path in paths if path.is_symlink() or path.exists()) <= LARGEST_TREE


def test_every_exported_model_is_a_compressed_file() -> None:
    assert {path.name for path in EXPORTED.iterdir()} == {f"{name}{SUFFIX}" for name in read_index()} | {"index.json"}


def test_compressing_gives_the_file_that_is_stored() -> None:
    name = min(read_index(), key=lambda each: len(read(each)))
    assert compress(read(name)) == (EXPORTED / f"{name}{SUFFIX}").read_bytes()
    assert load_exported(name).ByteSize() == read_index()[name]["bytes"]
