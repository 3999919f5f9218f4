"""What one process has compiled, no other compiles again, and nothing else is taken for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import shared_cubins
from shared_cubins import Compile, shared

from onnxfuse.errors import KernelError
from onnxfuse.testing import emulated_build

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


def test_emulated_kernels_of_another_checkout_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another text of a header is compiled: the library, the header's object file and the standard headers."""
    run, commands = emulated_build._run, []
    monkeypatch.setattr(emulated_build, "_run", lambda command: commands.append(command) or run(command))
    monkeypatch.setattr(emulated_build, "folder", tmp_path)
    for checkout, number, compiled in ("one", 3, 3), ("other", 3, 0), ("third", 4, 2):
        folder = tmp_path / checkout
        folder.mkdir()
        (folder / "number.h").write_text("#include <cmath>\nint number();\n")
        (folder / "number.cc").write_text(f'#include "number.h"\nint number() {{ return {number}; }}\n')
        monkeypatch.setattr(emulated_build, "header_folders", [folder])
        commands.clear()
        text = '#include "number.h"\nextern "C" int twice() { return 2 * number(); }\n'
        assert emulated_build.load(text, {}, [], folder / "text.cc").twice() == 2 * number
        assert len(commands) == compiled


@pytest.mark.parametrize("installed", [True, False])
def test_a_library_is_linked_by_gold_or_without_it(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed and not shutil.which("ld.gold"):
        pytest.skip("gold is not installed")
    run, commands, which = emulated_build._run, [], shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: which(name) if installed or name != "ld.gold" else None)
    monkeypatch.setattr(emulated_build, "_run", lambda command: commands.append(command) or run(command))
    monkeypatch.setattr(emulated_build, "folder", tmp_path)
    emulated_build._linker.cache_clear()
    text = 'extern "C" int three() { return 3; }\n'
    assert emulated_build.load(text, {}, [], tmp_path / "text.cc").three() == 3
    assert [("-fuse-ld=gold" in each) for each in commands if "-shared" in each] == [installed]
    emulated_build._linker.cache_clear()
