"""Machine code on disk: it is compiled once, a damaged file costs itself, and a folder costs the cache only."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from onnxfuse.runtime import cache_folder, code_cache
from onnxfuse.runtime.code_cache import cached_cubin
from onnxfuse.runtime.nvrtc import Cubin, Identity, kernel_text
from onnxfuse.runtime.plan import Kernel

KERNEL = Kernel("activation", "activation", {"WIDTH": 8})


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Kernel, int]]:
    """Return the list of what is compiled, by a stand-in for NVRTC; the cache is empty."""
    calls: list[tuple[Kernel, int]] = []

    def compile_cubin(kernel: Kernel, arch: int) -> Cubin:
        calls.append((kernel, arch))
        return Cubin(f"code {len(calls)}".encode(), 0, 0, 0, 0, 0, "")

    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folder, "_warned", set())
    monkeypatch.setattr(code_cache, "compile_cubin", compile_cubin)
    monkeypatch.setattr(code_cache, "compiler_version", lambda: (13, 0))
    return calls


def test_a_kernel_is_compiled_once_for_each_architecture_and_set_of_macros(
    compiled: list[tuple[Kernel, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Kernel("activation", "activation", {"WIDTH": 4})
    wanted = [(KERNEL, 90), (KERNEL, 80), (other, 90)]
    first = [cached_cubin(*each) for each in wanted]
    assert first == [b"code 1", b"code 2", b"code 3"] == [cached_cubin(*each) for each in wanted]
    assert compiled == wanted
    monkeypatch.setattr(code_cache, "compiler_version", lambda: (13, 1))
    assert cached_cubin(KERNEL, 90) == b"code 4", "another compiler"
    monkeypatch.setattr(code_cache, "identity", lambda kernel: Identity("another", 7))
    assert cached_cubin(KERNEL, 90) == b"code 5"


@pytest.mark.parametrize("data", [b"", b"short", bytes(32) + b"other code"])
def test_a_damaged_file_is_compiled_again(compiled: list[tuple[Kernel, int]], tmp_path: Path, data: bytes) -> None:
    cached_cubin(KERNEL, 90)
    (file,) = (tmp_path / "cache" / "code").iterdir()
    file.write_bytes(data)
    assert [cached_cubin(KERNEL, 90), cached_cubin(KERNEL, 90)] == [b"code 2", b"code 2"]
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_made_costs_the_cache_only(
    compiled: list[tuple[Kernel, int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("no folder")
    with caplog.at_level(logging.WARNING, "onnxfuse"):
        assert [cached_cubin(KERNEL, 90), cached_cubin(KERNEL, 90)] == [b"code 1", b"code 2"]
    (record,) = caplog.records
    assert record.getMessage().startswith("compiled kernels cannot be kept in ")


def test_a_cache_that_changes_while_a_kernel_compiles_is_named(
    compiled: list[tuple[Kernel, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A background thread can still compile after the process has chosen another folder."""

    def compile_cubin(*_: object) -> Cubin:
        monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "other"))
        return Cubin(b"code", 0, 0, 0, 0, 0, "")

    monkeypatch.setattr(code_cache, "compile_cubin", compile_cubin)
    assert cached_cubin(KERNEL, 90) == b"code"
    (record,) = caplog.records
    assert (
        f"cannot be kept in {tmp_path}/cache/code: the cache folder has changed to {tmp_path}/other"
        in record.getMessage()
    )


@pytest.mark.parametrize("which", ["cache", "cache/code", "file"])
def test_code_that_others_could_have_written_is_not_loaded(
    compiled: list[tuple[Kernel, int]], tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    """The kernel is compiled, as without a cache, and nothing is written there."""
    cached_cubin(KERNEL, 90)
    (file,) = (tmp_path / "cache" / "code").iterdir()
    open_to_others = file if which == "file" else tmp_path / which
    open_to_others.chmod(open_to_others.stat().st_mode | 0o020)
    before = file.read_bytes()
    with caplog.at_level(logging.WARNING, "onnxfuse"):
        assert cached_cubin(KERNEL, 90) == b"code 2"
    (record,) = caplog.records
    assert f"the cache '{open_to_others}' is not used, as it holds machine code" in record.getMessage()
    if which != "file":  # which is replaced
        assert file.read_bytes() == before


def test_no_half_written_file_stays(
    compiled: list[tuple[Kernel, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert cached_cubin(KERNEL, 90) == b"code 1"
    assert not list((tmp_path / "cache" / "code").iterdir())


def test_a_text_is_compiled_in_place_of_a_file(compiled: list[tuple[Kernel, int]]) -> None:
    """The compiled text has each header of onnxfuse once; kernels of different texts are different kernels."""
    text = '#include "types.cuh"\n#include "types.cuh"\nextern "C" __global__ void made() {{ {} }}\n'
    first, second = (Kernel("made", "made", text=text.format(body)) for body in ("", "wait_for_predecessor();"))
    whole = kernel_text(first)
    assert whole.count("struct Divisor {") == 1 and "#include" not in whole
    assert '#line 2 "made.cu"' in whole, "messages of the compiler count the text's own lines"
    assert first.key != second.key != Kernel("made", "made").key
    assert [cached_cubin(each, 90) for each in (first, second, first)] == [b"code 1", b"code 2", b"code 1"]
