"""Plan files that do not fit: the native library refuses them by a sentence, or lets bodies run, and never crashes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import CPU, DEVICE, SHIFT, Stage, fails, feed, model, session
from stored_plans import gpu, native_options, native_session, plans, refusal, shifts, store

from onnxfuse.runtime.plan import Argument, Kernel, Plan, Pointer, Scalar, Struct
from onnxfuse.runtime.plan_file import (
    DIGEST_BYTES,
    FORMAT,
    MAGIC,
    PlanFile,
    SavedTemplate,
    read_plan_file,
    write_plan_file,
)

__all__ = ["gpu", "plans"]
BODY_AT = len(MAGIC) + 8 + DIGEST_BYTES


def edited(path: Path, change: Callable[[PlanFile], PlanFile]) -> Path:
    """Return a changed copy of a plan file."""
    copy = path.with_name("edited.plans")
    write_plan_file(copy, change(read_plan_file(path)))
    return copy


def damaged(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.with_name("edited.plans").write_bytes(data)
    return path.with_name("edited.plans")


def of_other_format(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    struct.pack_into("<q", data, len(MAGIC), 6)
    path.with_name("edited.plans").write_bytes(data)
    return path.with_name("edited.plans")


def no_plans(path: Path) -> Path:
    path.with_name("edited.plans").write_bytes(path.read_bytes()[:47])
    return path.with_name("edited.plans")


def for_other_gpus(path: Path) -> Path:
    def change(file: PlanFile) -> PlanFile:
        other = replace(DEVICE, name="other", arch=80)
        return replace(file, templates=[replace(each, device=other) for each in file.templates])

    return edited(path, change)


MISFITS = [
    (damaged, "edited.plans: it is damaged; make it again"),
    (of_other_format, "it is of format 6, this library reads 9; make it with the library's version of onnxfuse"),
    (no_plans, "it is not a plan file"),
    (lambda path: path.with_name("absent"), "absent: No such file or directory"),
    (lambda path: path.parent, "it is a directory; name a file in it"),
    (lambda path: Path("/dev/null"), "it is not a regular file"),
    (
        for_other_gpus,
        "plan files do not fit: {folder}/edited.plans (for other (sm_80, 132 multiprocessors)); "
        "this process has stand-in (sm_90, 132 multiprocessors)",
    ),
]


@pytest.mark.parametrize("misfit, message", MISFITS)
def test_a_file_that_does_not_fit_is_refused_or_bodies_run(
    gpu: Stage, plans: Path, misfit: Callable[[Path], Path], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = misfit(plans)
    expected = message.replace("{folder}", str(plans.parent))
    assert expected in refusal(lambda: native_options(path))
    before = gpu.launches()
    capfd.readouterr()
    shifts(native_session(model(SHIFT), path, missing="body"), 4)
    assert gpu.launches() == before
    text = capfd.readouterr().err
    assert text.startswith("onnxfuse: all fused nodes run as their bodies: ") and expected in text


def test_a_word_that_missing_does_not_know_is_refused(gpu: Stage, plans: Path) -> None:
    message = refusal(lambda: native_options(plans, missing="bodies"))
    assert "onnxfuse.missing is 'bodies', required refuse or body" in message


def test_a_model_that_was_changed_is_refused(gpu: Stage, plans: Path) -> None:
    changed = SHIFT.replace('operands = "x bias"', 'operands = "bias x"')
    message = refusal(lambda: native_session(model(changed), plans))
    assert (
        "shift: node 'node_0': plan files have no template of it for stand-in (sm_90, 132 multiprocessors)" in message
    )
    assert "make them again for this model and GPU, or do not register the library, so that bodies run" in message
    more = SHIFT.replace('operands = "x bias"', 'operands = "x bias", extra = 3, attributes = "extra"')
    message = refusal(lambda: native_session(model(more), plans))
    assert "its attribute extra is unknown to the plan files; the model was changed" in message


def test_tf32_is_told_apart(gpu: Stage, tmp_path: Path) -> None:
    run = native_session(model(SHIFT), store(tmp_path / "plans", model(SHIFT), tf32=False))
    message = fails(run, feed(2, 3))
    assert "the session has use_tf32=1, for which plan files have no template of this node" in message


@pytest.mark.parametrize(("library", "name"), [("cublaslt", "cuBLASLt"), ("cudnn", "cuDNN")])
def test_algorithms_are_for_one_version_of_their_library(gpu: Stage, plans: Path, library: str, name: str) -> None:
    def change(file: PlanFile) -> PlanFile:
        templates = [replace(each, libraries={library: True}) for each in file.templates]
        return replace(file, versions={**file.versions, library: 90000}, templates=templates)

    message = refusal(lambda: native_session(model(SHIFT), edited(plans, change)))
    assert f"its plans were chosen for {name} 90000, this process has " in message


def with_sizes(path: Path, *multiprocessors: int) -> Path:
    """Return a copy for GPUs of other sizes; the templates are for the last."""

    def change(file: PlanFile) -> PlanFile:
        *others, last = (replace(DEVICE, name=f"gpu {n}", multiprocessors=n) for n in multiprocessors)
        templates = [replace(each, device=device, node=b"other") for device in others for each in file.templates[:1]]
        return replace(file, templates=[*templates, *(replace(each, device=last) for each in file.templates)])

    return edited(path, change)


def test_plans_of_the_nearest_gpu_of_one_architecture_run(
    gpu: Stage, plans: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = native_options(with_sizes(plans, 30, 300, 120))
    options.log_severity_level = 2
    runs = [ort.InferenceSession(model(SHIFT), options, [CPU]) for _ in range(2)]
    for run in runs:
        shifts(run, 4)
    text = capfd.readouterr().err
    assert text.count("was made for gpu 120 (sm_90, 120 multiprocessors), this GPU is stand-in (sm_90, 132") == 1
    assert "its plans are right, but may not be the fastest" in text
    message = refusal(lambda: native_session(model(SHIFT), with_sizes(plans, 30, 300)))
    assert "node 'node_0': plan files have no template of it for stand-in" in message, "30 is nearer"


def with_kernels(template: SavedTemplate, **change: int) -> SavedTemplate:
    return replace(template, kernels=tuple(replace(each, **change) for each in template.kernels))


@pytest.mark.parametrize("change", [{"shared": 228 * 1024}, {"cluster": 16}])
def test_kernels_that_are_too_large_for_other_gpus_are_refused(gpu: Stage, plans: Path, change: dict[str, int]) -> None:
    def larger(file: PlanFile) -> PlanFile:
        return replace(file, templates=[with_kernels(each, **change) for each in file.templates])

    plans.write_bytes(edited(plans, larger).read_bytes())
    assert "plan files do not fit" in refusal(lambda: native_options(with_sizes(plans, 120)))


def test_bodies_run_where_one_of_the_gpus_has_no_plans(
    gpu: Stage, plans: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever registers operators does not know on which GPU the session will run."""

    def change(file: PlanFile) -> PlanFile:
        return replace(file, templates=[with_kernels(each, cluster=16) for each in file.templates])

    path = edited(plans, change)  # for this kind of GPU only
    gpu.cuda.fake_second_multiprocessors(100)
    shifts(native_session(model(SHIFT), path), 4)
    before = gpu.launches()
    shifts(native_session(model(SHIFT), path, missing="body"), 4)
    assert gpu.launches() == before
    assert "stand-in (sm_90, 132 multiprocessors), stand-in (sm_90, 100 multiprocessors)" in capfd.readouterr().err


class _Base(ctypes.Structure):
    _fields_ = (("get_api", ctypes.c_void_p), ("get_version", ctypes.c_void_p))


def test_an_older_onnxruntime_is_refused_or_bodies_run(
    gpu: Stage, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    messages: list[bytes] = []
    create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(
        lambda _, text: messages.append(text) or 1
    )
    table = (ctypes.c_void_p * 1)(ctypes.cast(create, ctypes.c_void_p))
    get_api = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(lambda _: ctypes.addressof(table))
    text = ctypes.create_string_buffer(b"1.22.0")
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(text))
    base = _Base(*(ctypes.cast(each, ctypes.c_void_p) for each in (get_api, get_version)))
    register = gpu.library.RegisterCustomOps
    register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]
    assert register(None, ctypes.addressof(base)) == 1
    assert messages == [b"onnxfuse: onnxruntime 1.23 or newer is required, found 1.22.0"]
    monkeypatch.setenv("ONNXFUSE_MISSING", "body")
    assert register(None, ctypes.addressof(base)) is None
    assert "run as their bodies: onnxruntime 1.23 or newer is required" in capfd.readouterr().err


def test_a_message_is_text_whatever_bytes_a_name_has(gpu: Stage, plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.fsencode(plans.parent)
    for name, shown in (
        (b"\xff.plans", "?.plans"),
        ("\u00e4\u20ac\U0001f600".encode() + b"\xe2\x82", "\u00e4\u20ac\U0001f600??"),
    ):
        monkeypatch.setenv("ONNXFUSE_PLANS", os.fsdecode(folder + b"/" + name))
        assert f"/{shown}: No such file or directory" in refusal(lambda: native_options())


# --- robustness -------------------------------------------------------------------------------------------------------


def sealed(body: bytes) -> bytes:
    return MAGIC + struct.pack("<q", FORMAT) + hashlib.sha256(body).digest() + body


@pytest.mark.parametrize("padding", range(9))
def test_the_digest_is_sha_256_for_every_length(gpu: Stage, plans: Path, padding: int) -> None:
    longer = edited(plans, lambda file: replace(file, versions={**file.versions, "": "x" * 8 * padding}))
    shifts(native_session(model(SHIFT), longer), 2)


def one_less(arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
    return arguments[:-1]


def in_a_struct(arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
    return (Struct(tuple(each for each in arguments if isinstance(each, Pointer | Scalar))),)


@pytest.mark.parametrize(
    "entry, change, message",
    [
        ("shift", one_less, "a launch has 4 arguments, its function takes 5"),
        ("copy", lambda arguments: arguments, "a launch has 5 arguments, its function takes 3"),
        ("unmap", lambda arguments: arguments[:2], "argument 0 of a launch has 8 bytes, its function takes 128"),
        ("shift_by_struct", in_a_struct, "argument 0 of a launch has 40 bytes, its function takes 48"),
    ],
)
def test_a_launch_has_the_arguments_of_its_function(
    gpu: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    entry: str,
    change: Callable[[tuple[Argument, ...]], tuple[Argument, ...]],
    message: str,
) -> None:
    """The driver would read behind the last argument, or more bytes than an argument has."""
    host = gpu.kernels("shift")
    good = host.candidates

    def candidates(*arguments: object) -> list[Plan]:
        (plan,) = good(*arguments)
        step = replace(plan.steps[0], kernel=Kernel("shift", entry), arguments=change(plan.steps[0].arguments))
        return [replace(plan, steps=(step,))]

    monkeypatch.setattr(host, "candidates", candidates)
    path = store(tmp_path / "plans", model(SHIFT))
    assert f"the plan is malformed: {message}" in refusal(lambda: native_session(model(SHIFT), path))
    assert message in fails(session(model(SHIFT)), feed(2, 3)), "the same of plans that Python makes"


def test_no_change_of_a_file_crashes(gpu: Stage, plans: Path) -> None:
    """Every word that is missing or another is refused by a sentence, or does not matter for this run."""
    body, path, source = plans.read_bytes()[BODY_AT:], plans.with_name("changed.plans"), model(SHIFT)
    draw = random.Random(1)
    values = [-1, 0, 1, 2, 63, 1 << 20, 1 << 46, (1 << 63) - 1, -(1 << 63)]
    changed = [body[:size] for size in range(0, len(body), 8 * max(1, len(body) // 8 // 60))]
    for _ in range(300):
        words = bytearray(body)
        for _ in range(draw.choice([1, 1, 1, 3])):
            struct.pack_into("<q", words, 8 * draw.randrange(len(body) // 8), draw.choice(values))
        changed.append(bytes(words))
    refused = 0
    for number, each in enumerate(changed):
        path.write_bytes(sealed(each))
        os.utime(path, ns=(number, number))
        try:
            native_session(source, path).run(None, feed(2, 3))
        except Exception as error:  # onnxruntime's errors have no common class
            assert "onnxfuse" in str(error), error
            refused += 1
    assert refused > len(changed) // 2
