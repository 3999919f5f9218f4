"""Sessions that run by plan files: the native library finds them, checks them, and never asks Python."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

import stand_in
from stand_in import CPU, DEVICE, SHIFT, Stage, fails, feed, model, node, stage
from stored_plans import native_options, native_session, store

from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.plan import Plan
from onnxfuse.runtime.plan_file import DIGEST_BYTES, MAGIC, PlanFile, SavedTemplate, read_plan_file, write_plan_file
from onnxfuse.session import InferenceSession

BODY_AT = len(MAGIC) + 8 + DIGEST_BYTES
PAIR = "g (float[n] x, float[n] r) => (float[n] d, float[n] t) {{ {} {} }}".format(
    node("pair", "x, r", "s, d", operands="x r", types="1, 1"),
    node("scale", "s", "t", operands="x", more=', factor = 0.1, sizes = [3, 4], mode = "fast", half = [0.5, 2.0]'),
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    gc.collect()  # because tracebacks of other tests may hold sessions
    result = stage(monkeypatch)
    for name in "PLANS", "MISSING", "PROVIDER":
        monkeypatch.delenv(f"ONNXFUSE_{name}", raising=False)
    yield result
    result.cuda.fake_second_multiprocessors(132)
    result.cuda.fake_fail_next(0)


@pytest.fixture
def plans(gpu: Stage, tmp_path: Path) -> Path:
    """Return a plan file of SHIFT; the hosts have forgotten that they were asked."""
    path = store(tmp_path / "shift.plans", model(SHIFT))
    gpu.kernels("shift").calls.clear()
    return path


def shifts(run: ort.InferenceSession, n: int, d: int = 3) -> None:
    """Check what a session of SHIFT computes."""
    given = feed(n, d)
    np.testing.assert_array_equal(run.run(None, given)[0], given["x"] + given["b"])


def refusal(make: Callable[[], object]) -> str:
    """Return the message of what must fail; its log goes to stderr."""
    with pytest.raises(Exception) as caught:  # onnxruntime's errors have no common class
        make()
    return str(caught.value)


def edited(path: Path, change: Callable[[PlanFile], PlanFile]) -> Path:
    """Return a changed copy of a plan file."""
    copy = path.with_name("edited.plans")
    write_plan_file(copy, change(read_plan_file(path)))
    return copy


# --- running ----------------------------------------------------------------------------------------------------------


def test_all_shapes_run_and_python_is_never_asked(gpu: Stage, plans: Path) -> None:
    run = native_session(model(SHIFT), plans)
    before = gpu.launches()
    for n, d in [(2, 3), (5, 3), (2, 3), (1, 8), (1000, 1)]:
        shifts(run, n, d)
    assert gpu.launches() == before + 5
    assert not gpu.kernels("shift").calls


def test_nodes_are_known_by_all_kinds_of_attributes(gpu: Stage, tmp_path: Path) -> None:
    run = native_session(model(PAIR), store(tmp_path / "plans", model(PAIR)))
    x, r = np.float32([1, 2, 3]), np.float32([4, 5, 7])
    before = gpu.launches()
    difference, scaled = run.run(None, {"x": x, "r": r})
    np.testing.assert_array_equal(difference, x - r)
    np.testing.assert_array_equal(scaled, (x + r) * np.float32(0.1))
    assert gpu.launches() == before + 2


PRODUCT = "g (float[m, k] x, float[k, n] w, float[n] b) => (float[m, n] y) { " + node(
    "product", "x, w, b", "y", operands="x w bias"
) + " }"  # fmt: skip
CONVOLVE = "g (float[1, 2, 3, 3] x, float[3, 2, 2, 2] w, float[3] b) => (float[1, 3, 2, 2] y) { " + node(
    "convolve", "x, w, b", "y", operands="x w bias"
) + " }"  # fmt: skip


def test_products_and_convolutions_call_libraries(gpu: Stage, tmp_path: Path) -> None:
    plans = store(tmp_path / "plans", model(PRODUCT), model(CONVOLVE))
    product, convolve = native_session(model(PRODUCT), plans), native_session(model(CONVOLVE), plans)
    before = gpu.products(), gpu.cudnn.fake_runs()
    ones = {"x": np.ones((2, 3), np.float32), "w": np.ones((3, 4), np.float32), "b": np.ones(4, np.float32)}
    np.testing.assert_array_equal(product.run(None, ones)[0], np.full((2, 4), 4, np.float32))
    image = {"x": np.ones((1, 2, 3, 3)), "w": np.ones((3, 2, 2, 2)), "b": np.ones(3)}
    result = convolve.run(None, {name: value.astype(np.float32) for name, value in image.items()})[0]
    np.testing.assert_array_equal(result, np.full((1, 3, 2, 2), 9, np.float32))
    assert (gpu.products(), gpu.cudnn.fake_runs()) == (before[0] + 1, before[1] + 1)


def test_several_models_files_and_sessions_in_one_process(gpu: Stage, plans: Path, tmp_path: Path) -> None:
    pair = store(tmp_path / "pair.plans", model(PAIR))
    both = f"{plans}:{pair}"
    runs = [native_session(model(SHIFT), Path(both)), native_session(model(PAIR), Path(both))]
    options = native_options(Path(both))
    runs += [ort.InferenceSession(model(graph), options, [CPU]) for graph in (SHIFT, PAIR)]
    x = np.float32([1, 2])
    for run in runs[::2]:
        shifts(run, 4)
    for run in runs[1::2]:
        np.testing.assert_array_equal(run.run(None, {"x": x, "r": x})[0], x - x)


def test_kernels_are_loaded_with_the_session_shared_and_unloaded(gpu: Stage, plans: Path) -> None:
    two = "g (float[n, d] x, float[d] b) => (float[n, d] y) {{ {} {} }}".format(
        *(node("shift", f"{x}, b", y, operands="x bias") for x, y in (("x", "z"), ("z", "y")))
    )
    before = gpu.cuda.fake_modules()
    runs = [native_session(model(two), plans), native_session(model(SHIFT), plans)]
    assert gpu.cuda.fake_modules() == before + 1, "of four nodes on one GPU"
    made = gpu.library.onnxfuse_plans_made()
    shifts(runs[1], 4)
    shifts(runs[1], 4)
    assert gpu.cuda.fake_modules() == before + 1
    assert gpu.library.onnxfuse_plans_made() == made + 1
    gpu.cuda.fake_other_captures(1)  # the driver refuses to unload in threads that are not in relaxed mode
    del runs
    gc.collect()
    gpu.cuda.fake_other_captures(0)
    assert gpu.cuda.fake_modules() == before


def test_eight_threads_share_a_session(gpu: Stage, plans: Path) -> None:
    run = native_session(model(SHIFT), plans)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: [shifts(run, (seed * i) % 23 + 1) for i in range(50)], range(8)))


def constant_bias(source: bytes) -> bytes:
    """Return SHIFT with a bias that the model holds."""
    proto = onnx.load_model_from_string(source)
    del proto.graph.input[1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(feed(4, 3)["b"], "b"))
    return bytes(proto.SerializeToString())


def test_a_plan_for_constants_starts_no_kernel_early_where_there_are_none(
    gpu: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel reads what it takes for constant while the kernel in front of it runs."""
    host = gpu.kernels("shift")
    good = host.candidates

    def early(*arguments: Any) -> list[Plan]:
        return [replace(plan, steps=tuple(replace(s, pdl=True) for s in plan.steps)) for plan in good(*arguments)]

    monkeypatch.setattr(host, "candidates", early)
    constant = constant_bias(model(SHIFT))
    for_constants = store(tmp_path / "constants.plans", constant)
    native_session(constant, for_constants).run(None, {"x": feed(4, 3)["x"]})
    assert gpu.cuda.fake_last_pdl() == 1
    shifts(native_session(model(SHIFT), for_constants), 4)
    assert gpu.cuda.fake_last_pdl() == 0
    for_any = store(tmp_path / "any.plans", model(SHIFT))
    x, b = feed(4, 3).values()
    np.testing.assert_array_equal(native_session(constant, for_any).run(None, {"x": x})[0], x + b)
    assert gpu.cuda.fake_last_pdl() == 1, "constants are more than this plan relies on"


def test_unaligned_memory_needs_plans_of_its_own(gpu: Stage, plans: Path) -> None:
    memory = np.zeros(4 * 3 + 1, np.float32)
    offset = 1 if memory.ctypes.data % 16 == 0 else 0
    x = memory[offset : offset + 12].reshape(4, 3)
    assert x.ctypes.data % 16
    binding = (run := native_session(model(SHIFT), plans)).io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_cpu_input("b", np.ones(3, np.float32))
    binding.bind_output("y")
    message = refusal(lambda: run.run_with_iobinding(binding))
    assert "shift 'node_0' (float32[4,3], float32[3]): plan files have no plan for these inputs" in message


def test_a_python_session_may_take_plans_first(gpu: Stage, plans: Path, tmp_path: Path) -> None:
    """Python is asked for what the files do not have, and for nothing else."""

    def run(path: Path) -> int:
        options = ort.SessionOptions()
        options.add_session_config_entry("onnxfuse.plans", str(path))
        made = InferenceSession(model(SHIFT), options, [CPU], tune="never")
        shifts(made, 4)
        return len(stand_in.planner.templates_in_use())

    relying = store(tmp_path / "constant.plans", constant_bias(model(SHIFT)))
    assert (run(plans), run(relying)) == (0, 1)


# --- where files are found --------------------------------------------------------------------------------------------

ALONE = """
import sys
import numpy as np
import onnxruntime as ort

library, source = sys.argv[1:3]
options = ort.SessionOptions()
for name, value in (entry.split("=") for entry in sys.argv[3:]):
    options.add_session_config_entry(name, value)
try:
    options.register_custom_ops_library(library)
    run = ort.InferenceSession(source, options, ["CPUExecutionProvider"])
    x, b = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([10, 20, 30])
    print("result", (run.run(None, {"x": x, "b": b})[0] - x - b).max())
except Exception as error:
    print("error", error)
assert "onnxfuse" not in sys.modules
import ctypes, os
if os.path.exists(os.environ["ONNXFUSE_LIBCUDA"]):
    print("launches", ctypes.CDLL(os.environ["ONNXFUSE_LIBCUDA"]).fake_launches())
"""


@pytest.fixture
def alone(gpu: Stage, plans: Path, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs SHIFT in a process which does not import onnxfuse, with a copy of the library."""
    folder = tmp_path / "served"
    folder.mkdir()
    library = shutil.copy(native.library_path() or "", folder / "libonnxfuse.so")
    source = folder / "model.onnx"
    source.write_bytes(model(SHIFT))

    def run(*entries: str, **variables: str) -> str:
        environment = {**os.environ, "ONNXFUSE_PROVIDER": CPU, **variables}
        command = [sys.executable, "-c", ALONE, str(library), str(source), *entries]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    return run


RAN = "result 0.0\nlaunches 1\n"


@pytest.mark.parametrize("place", ["entry", "variable", "library.plans", "folder"])
def test_files_are_found(alone: Callable[..., str], plans: Path, tmp_path: Path, place: str) -> None:
    if place == "entry":
        assert alone(f"onnxfuse.plans={plans}", ONNXFUSE_PLANS="/nothing") == RAN
    elif place == "variable":
        assert alone(ONNXFUSE_PLANS=f"{plans}:") == RAN
    else:
        name = "libonnxfuse.so.plans" if place == "library.plans" else "any.plans"
        shutil.copy(plans, tmp_path / "served" / name)
        if place == "library.plans":
            (tmp_path / "served" / "other.plans").write_text("no plan file")
        assert alone() == RAN


def test_a_process_without_plans_or_driver_refuses_or_runs_bodies(alone: Callable[..., str], plans: Path) -> None:
    message = alone()
    assert "error" in message and "no plan file: name one in the session config entry onnxfuse.plans" in message
    assert "served/libonnxfuse.so.plans" in message
    bodies = alone(ONNXFUSE_MISSING="body")
    assert bodies.startswith("result 0.0\nlaunches 0\nonnxfuse: all fused nodes run as their bodies: no plan file")
    message = alone(f"onnxfuse.plans={plans}", ONNXFUSE_LIBCUDA="/no/libcuda.so")
    assert "error" in message and "cannot open the CUDA driver: /no/libcuda.so" in message
    message = alone(f"onnxfuse.plans={plans}", "onnxfuse.missing=body", ONNXFUSE_LIBCUDA="/no/libcuda.so")
    assert message.startswith("result 0.0\nonnxfuse: all fused nodes run as their bodies: cannot open the CUDA driver")


# --- what does not fit ------------------------------------------------------------------------------------------------


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
    (of_other_format, "it is of format 6, this library reads 7; make it with the library's version of onnxfuse"),
    (no_plans, "it is no plan file"),
    (lambda path: path.with_name("absent"), "absent: No such file or directory"),
    (lambda path: path.parent, "it is no regular file"),
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


# --- robustness -------------------------------------------------------------------------------------------------------


def sealed(body: bytes) -> bytes:
    return MAGIC + struct.pack("<q", 7) + hashlib.sha256(body).digest() + body


@pytest.mark.parametrize("padding", range(9))
def test_the_digest_is_sha_256_for_every_length(gpu: Stage, plans: Path, padding: int) -> None:
    longer = edited(plans, lambda file: replace(file, versions={**file.versions, "": "x" * 8 * padding}))
    shifts(native_session(model(SHIFT), longer), 2)


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
