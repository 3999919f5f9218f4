"""What one process has compiled, no other compiles again, and nothing else is taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import shared_cubins
from shared_cubins import Compile, shared

from onnxfuse.errors import KernelError

FLAGS = ["-arch=sm_90", "-DN=1", "-I/one/include"]


def counting(compiled: list[tuple[str, str]]) -> Compile:
    def compile_(source: str, name: str, flags: list[str]) -> tuple[bytes, str]:
        compiled.append((source, " ".join(flags)))
        if source == "wrong":
            raise KernelError("does not compile")
        return source.encode(), "log"

    return compile_


def test_a_text_is_compiled_once_for_each_set_of_flags(tmp_path: Path) -> None:
    compiled: list[tuple[str, str]] = []
    for _ in range(2):  # as two processes, or two runs of the tests, call it
        compile_ = shared(counting(compiled), tmp_path)
        for source, flags in (("a", FLAGS), ("b", FLAGS), ("a", ["-arch=sm_80", *FLAGS[1:]]), ("a", FLAGS[::2])):
            assert compile_(source, "a.cu", flags) == (source.encode(), "log")
    assert len(compiled) == 4


def test_the_folder_of_headers_counts_where_a_source_includes_one(tmp_path: Path) -> None:
    compiled: list[tuple[str, str]] = []
    compile_ = shared(counting(compiled), tmp_path)
    for source, count in (("a", 1), ("#include <cuda_fp16.h>", 2)):
        compiled.clear()
        for folder in ("/one/include", "/other/include"):
            compile_(source, "a.cu", [*FLAGS[:-1], f"-I{folder}"])
        assert len(compiled) == count


def test_another_compiler_compiles_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, str]] = []
    compile_ = shared(counting(compiled), tmp_path)
    compile_("a", "a.cu", FLAGS)
    monkeypatch.setattr(shared_cubins, "compiler_version", lambda: (99, 0))
    compile_("a", "a.cu", FLAGS)
    monkeypatch.setattr(shared_cubins, "_package", lambda: "99.0.1")
    compile_("a", "a.cu", FLAGS)
    assert len(compiled) == 3


def test_what_does_not_compile_is_not_kept(tmp_path: Path) -> None:
    compiled: list[tuple[str, str]] = []
    compile_ = shared(counting(compiled), tmp_path)
    for _ in range(2):
        with pytest.raises(KernelError, match="does not compile"):
            compile_("wrong", "a.cu", FLAGS)
    assert len(compiled) == 2
