"""Plan files that are damaged, malformed, or of another version are refused in one sentence, and crash nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from plan_files import X, changed, edited, gpu, new, saved
from stand_in import CPU, SHIFT, Stage, model

from onnxfuse.errors import UsageError
from onnxfuse.runtime import plan_file
from onnxfuse.runtime.loaded_plans import load_plans
from onnxfuse.runtime.plan import Kernel, Plan, Pointer
from onnxfuse.runtime.plan_file import (
    FORMAT,
    MAGIC,
    PlanFileError,
    SavedTemplate,
    read_plan_file,
    write_plan_file,
)
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.saved_plans import save_plans
from onnxfuse.runtime.template_words import TemplateWords, read_template

__all__ = ["gpu", "saved"]
HEAD = len(MAGIC) + 8 + 32  # bytes in front of what the digest is of


def signed(body: bytes) -> bytes:
    """Return a plan file with this content behind its digest."""
    return MAGIC + struct.pack("<q", FORMAT) + hashlib.sha256(body).digest() + body


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "versions, message",
    [
        ({"onnxfuse": "0.0.1"}, r"written by onnxfuse 0\.0\.1, this is .*; make it again"),
        ({"kernels": "0" * 16}, r"made from other kernels than there are here; add the folders .* and packages"),
        ({"cublaslt": 120101}, r"its plans were chosen for cuBLASLt 120101, this is 120903; make it again"),
        ({"cudnn": 92000}, r"its plans were chosen for cuDNN 92000, this is 91900; make it again"),
    ],
)
def test_other_versions_are_refused(saved: Path, versions: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        load_plans(edited(saved, **versions), CPU)
    assert not planner.plan_files


def test_another_format_is_refused(saved: Path) -> None:
    saved.write_bytes(MAGIC + struct.pack("<q", 99) + saved.read_bytes()[len(MAGIC) + 8 :])
    with pytest.raises(PlanFileError, match=f"written in format 99, this onnxfuse reads {FORMAT}; make it again"):
        load_plans(saved, CPU)


def test_a_byte_that_was_changed_is_found(saved: Path) -> None:
    data = saved.read_bytes()
    for at in random.Random(1).sample(range(len(MAGIC), len(data)), 200):
        saved.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])
        with pytest.raises(PlanFileError, match=r"written in format \d+|it is corrupted; make it again"):
            load_plans(saved, CPU)
    assert not planner.plan_files


@pytest.mark.parametrize("size, message", [(0, "no plan file"), (10, "no plan file"), (-8, "it is corrupted")])
def test_a_truncated_file_is_refused(saved: Path, size: int, message: str) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    with pytest.raises(PlanFileError, match=message):
        load_plans(saved, CPU)


def test_what_is_no_plan_file_is_refused(gpu: Stage, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(model(SHIFT))
    with pytest.raises(PlanFileError, match=r"model\.onnx: no plan file"):
        load_plans(tmp_path / "model.onnx", CPU)


def test_a_file_is_read_if_it_is_plain_and_no_larger_than_plan_files_are(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.plans")
    (tmp_path / "zero.plans").symlink_to("/dev/zero")
    for name in "pipe.plans", "zero.plans":
        with pytest.raises(PlanFileError, match="it is a device or a pipe"):
            load_plans(tmp_path / name, CPU)
    monkeypatch.setattr(plan_file, "MAX_BYTES", 1000)
    with pytest.raises(PlanFileError, match="more than the 1,000 that are read"):
        load_plans(saved, CPU)


def test_a_missing_file_and_a_full_folder_are_errors(gpu: Stage, tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"cannot be read: .*No such file"):
        load_plans(tmp_path / "none", CPU)
    (tmp_path / "file").touch()
    for parent in "no", "file":
        with pytest.raises(PlanFileError, match="cannot be written"):
            save_plans(tmp_path / parent / "plans", CPU)


@pytest.mark.parametrize("act", [save_plans, load_plans])
def test_a_provider_without_kernels_is_named(saved: Path, act: Callable[[Path, str], int]) -> None:
    with pytest.raises(UsageError, match=r"kernels run on .*, not on CUDAExecutionProvide; there are no plans"):
        act(saved, "CUDAExecutionProvide")


def test_one_file_is_written_by_many_at_once(saved: Path) -> None:
    run = new()
    run.run(None, X)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: save_plans(saved, CPU), range(64))) == [1] * 64
    assert load_plans(saved, CPU) == 1
    assert list(saved.parent.iterdir()) == [saved]


def test_a_file_whose_code_does_not_load_is_not_used(gpu: Stage, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The nodes of such a file are planned by the session instead."""

    def change(each: SavedTemplate) -> SavedTemplate:
        return dataclasses.replace(each, kernels=tuple(dataclasses.replace(k, cubin=b"no cubin") for k in each.kernels))

    load_plans(changed(saved, change), CPU)
    np.testing.assert_array_equal(new().run(None, X)[0], X["x"] + X["b"])
    assert f"{saved} is not used for shift: cuModuleLoadData failed: CUDA_ERROR_INVALID_IMAGE" in caplog.text


# --- malformed content ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"[" * 100_000, b"[]", b"{", b"\xff"])
def test_versions_that_are_malformed_are_refused(saved: Path, text: bytes) -> None:
    body = saved.read_bytes()[HEAD:]
    size = struct.unpack_from("<q", body)[0]
    padded = text + bytes(-len(text) % 8)
    saved.write_bytes(signed(struct.pack("<q", len(text)) + padded + body[8 + size + -size % 8 :]))
    with pytest.raises(PlanFileError, match="it is malformed: ") as caught:
        load_plans(saved, CPU)
    assert "\n" not in str(caught.value)


def test_every_count_and_index_of_a_file_is_checked(gpu: Stage, tmp_path: Path) -> None:
    saved, run = tmp_path / "plans", new(SHIFT.replace("float[n, d] x, float[d] b", "float[n, 3] x, float[3] b"))
    run.run(None, X)
    save_plans(saved, CPU)
    body = saved.read_bytes()[HEAD:]
    said = set()
    for at in range(0, len(body), 8):
        for word in (-1, 1 << 40, (1 << 63) - 1):
            saved.write_bytes(signed(body[:at] + struct.pack("<q", word) + body[at + 8 :]))
            try:
                load_plans(saved, CPU)
            except PlanFileError as error:
                assert "\n" not in str(error)
                said.add(str(error).partition(": ")[2])
    text = "\n".join(said)
    for what in (
        "the number of devices is -1", "the number of cubins is", "a kernel's device is -1, required 0 to 0",
        "a kernel's cubin is", "a kernel's shared memory is -1", "a kernel's cluster is", "the number of operators is",
        "a template's TF32 is -1",
        "the libraries of a template is -1, required 0 to 15", "the number of bytes of a node is",
        "a template: the number of variants is",
        "a template: the function of a patch is", "a template: the flags of an input is", "a template has kernel -1",
    ):  # fmt: skip
        assert what in text, what


def test_what_follows_the_end_is_refused(saved: Path) -> None:
    saved.write_bytes(signed(saved.read_bytes()[HEAD:] + bytes(8)))
    with pytest.raises(PlanFileError, match="it is malformed: bytes follow its end"):
        load_plans(saved, CPU)


def idle(*arguments: Any) -> list[Plan]:
    """Return the plan of a host whose kernel does nothing, so that no argument can harm."""
    (plan,) = SHIFT_CANDIDATES(*arguments)
    (step,) = plan.steps
    first = dataclasses.replace(step, kernel=Kernel("shift", "noop"))
    second = dataclasses.replace(first, arguments=(Pointer("scratch", 0, 8), *step.arguments[3:]))
    return [dataclasses.replace(plan, steps=(first, second), scratch=(1024,))]


SHIFT_CANDIDATES: Callable[..., list[Plan]]


def test_no_word_of_a_template_can_crash_the_process(
    gpu: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python refuses the file, or the native library the template; a number that is only wrong has its effect."""
    global SHIFT_CANDIDATES
    SHIFT_CANDIDATES = gpu.kernels("shift").candidates
    monkeypatch.setattr(gpu.kernels("shift"), "candidates", idle)
    graph = SHIFT.replace("float[n, d] x, float[d] b", "float[n, 3] x, float[3] b")
    path, run = tmp_path / "plans", new(graph)
    run.run(None, X)
    save_plans(path, CPU)
    del run
    file = read_plan_file(path)
    (template,) = file.templates
    data, said = template.words.data(), set()
    for at in range(0, len(data), 8):
        for word in (-1, 0, 1, 2, 1 << 62, -(1 << 63)):
            words = raw(data[:at] + struct.pack("<q", word) + data[at + 8 :])
            write_plan_file(path, dataclasses.replace(file, templates=[dataclasses.replace(template, words=words)]))
            try:
                load_plans(path, CPU)
                new(graph).run(None, X)
            except Exception as error:  # onnxruntime's errors have no common class
                said.add(str(error))
    text = "\n".join(said)
    for what in (
        "it is not a template of this format", "a patch", "the number of variants is",
        "a launch is of none of the template's functions", "a pointer's offset is", "the format mark is",
        "an operation is", "a guard's answer is", "an output's rank is",
    ):  # fmt: skip
        assert what in text, what


class Raw(TemplateWords):
    """A template of any bytes."""

    def data(self) -> bytes:
        return self.expressions


def raw(data: bytes) -> TemplateWords:
    return Raw((), data, (), ())


def test_a_template_is_read_as_it_was_written(saved: Path) -> None:
    (template,) = read_plan_file(saved).templates
    words = template.words
    assert read_template(words.data()) == words
    second_sizes = {each.hints[1] for each in words.variants if all(each.hints)}
    assert len(words.functions) == len(template.kernels) == len(second_sizes)
    with pytest.raises(ValueError, match="words follow its end"):
        read_template(words.data() + bytes(8))
