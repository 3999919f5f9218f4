"""Loaded plans run without planning; files that are damaged or for another GPU or version are refused."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

import stand_in
from stand_in import CPU, SHIFT, Stage, model, node, stage

from onnxfuse.errors import UsageError
from onnxfuse.runtime import planner
from onnxfuse.runtime.plan import Convolution, Plan
from onnxfuse.runtime.plan_file import INDEX, PlanFileError, load_plans, save_plans
from onnxfuse.session import InferenceSession

X = {"x": np.ones((2, 3), np.float32), "b": np.arange(3, dtype=np.float32)}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    gc.collect()  # because tracebacks of other tests may hold sessions, whose plans would be saved too
    result = stage(monkeypatch)
    result.kernels("shift").calls.clear()
    yield result


@pytest.fixture
def saved(gpu: Stage, tmp_path: Path) -> Path:
    """Return a file with the plan of one shape."""
    run = new()
    run.run(None, X)
    assert save_plans(tmp_path / "plans.zip", CPU) == 1
    return tmp_path / "plans.zip"


def new() -> ort.InferenceSession:
    return InferenceSession(model(SHIFT), providers=[CPU])


PRODUCT = "g (float[m, k] x, float[k, n] w, float[n] b) => (float[m, n] y) { " + node(
    "product", "x, w, b", "y", operands="x w bias"
) + " }"  # fmt: skip
UNMAP = "g (float[n, d] x) => (float[n, d] y) { " + node("unmap", "x", "y", operands="x") + " }"
FACTORS = {"x": np.ones((2, 3), np.float32), "w": np.ones((3, 4), np.float32), "b": np.ones(4, np.float32)}
FAKE_ALGORITHM = (0xA160, 1024, 0, 0, 0, 0, 0, 1 << 63)


@pytest.fixture
def saved_steps(gpu: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a file with the plans of two living sessions: a product with an algorithm, and a tensor map."""
    product = gpu.kernels("product")
    good = product.candidates

    def candidates(*arguments: Any) -> list[Plan]:
        (made,) = good(*arguments)
        return [dataclasses.replace(made, steps=(dataclasses.replace(made.steps[0], algorithm=FAKE_ALGORITHM),))]

    with monkeypatch.context() as patch:
        patch.setattr(product, "candidates", candidates)
        runs = [InferenceSession(model(graph), providers=[CPU]) for graph in (PRODUCT, UNMAP)]
        runs[0].run(None, FACTORS)
        runs[1].run(None, {"x": np.ones((8, 32), np.float32)})
        assert save_plans(tmp_path / "plans.zip", CPU) == 2
    yield tmp_path / "plans.zip"
    runs.clear()


def rewritten(path: Path, name: str, change: Any) -> Path:
    """Return the file with one member changed."""
    with zipfile.ZipFile(path) as file:
        members = {member: file.read(member) for member in file.namelist()}
    target = next(member for member in members if member.endswith(name))
    members[target] = change(members[target])
    with zipfile.ZipFile(path, "w") as file:
        for member, data in members.items():
            file.writestr(member, data)
    return path


def edited(path: Path, **changes: Any) -> Path:
    return rewritten(path, INDEX, lambda data: json.dumps(json.loads(data) | changes).encode())


def test_a_loaded_plan_runs_without_planning(gpu: Stage, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.kernels("shift").calls.clear()
    before, modules = gpu.launches(), gpu.cuda.fake_modules()
    assert load_plans(saved, CPU) == 1
    run = new()
    np.testing.assert_array_equal(run.run(None, X)[0], X["x"] + X["b"])
    assert gpu.launches() == before + 1
    assert not gpu.kernels("shift").calls
    assert gpu.cuda.fake_modules() == modules + 1
    run.run(None, {"x": X["x"][:1], "b": X["b"]})
    assert len(gpu.kernels("shift").calls) == 1, "other shapes are planned"
    assert save_plans(saved, CPU) == 2, "loaded plans are saved again"


def test_no_package_metadata_is_needed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of sources on the path and a bundle have no metadata."""

    def missing(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(Distribution, "from_name", missing)
    assert load_plans(saved, CPU) == 1
    run = new()
    run.run(None, X)
    assert save_plans(saved, CPU) == 1


def test_the_file_that_was_loaded_last_is_asked_first(gpu: Stage, saved: Path) -> None:
    """A file that is written again replaces its earlier plans, and those of older files that have the same plans."""
    good, wrong = saved.read_bytes(), saved.with_name("wrong.zip")

    def twice(data: bytes) -> bytes:
        index = json.loads(data)
        index["plans"][0]["steps"][0]["arguments"][1] = {"kind": "input", "index": 0, "offset": 0}
        return json.dumps(index).encode()

    def result() -> list[list[float]]:
        return new().run(None, X)[0].tolist()  # type: ignore[no-any-return]

    right = (X["x"] + X["b"]).tolist()
    wrong.write_bytes(good)
    rewritten(wrong, INDEX, twice)
    load_plans(wrong, CPU)
    assert result() != right
    load_plans(saved, CPU)
    assert result() == right
    load_plans(wrong, CPU)
    assert result() != right
    wrong.write_bytes(good)
    for _ in range(3):
        load_plans(wrong, CPU)
    assert result() == right
    assert len(planner.plan_files) == 2


def test_a_file_of_another_gpu_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "DEVICE", dataclasses.replace(stand_in.DEVICE, name="other", arch=80))
    with pytest.raises(PlanFileError, match=r"made for stand-in \(sm_90, 132 multip.*\), this GPU is other \(sm_80"):
        load_plans(saved, CPU)
    assert not planner.plan_files


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"onnxfuse": "0.0.1"}, r"written by onnxfuse 0\.0\.1 \(format 5\), this is .*; make it again"),
        ({"format": 99}, r"\(format 99\)"),
        ({"kernels": "0" * 16}, r"made from other kernels than this onnxfuse has; make it again"),
        ({"plans": 3}, r"no plan file, or corrupted: TypeError"),
        ({"device": None}, r"no plan file, or corrupted: TypeError"),
        ({"cubins": []}, r"no plan file, or corrupted: AttributeError"),
        ({"plans": [{"node": {}}]}, r"a plan is malformed: KeyError"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(saved: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanFileError, match=message):
        load_plans(edited(saved, **changes), CPU)
    assert not planner.plan_files


def test_a_corrupted_cubin_is_refused(saved: Path) -> None:
    with pytest.raises(PlanFileError, match=r"shift-\w+\.cubin is corrupted; make the file again"):
        load_plans(rewritten(saved, ".cubin", lambda data: data[:-1] + b"!"), CPU)


@pytest.mark.parametrize("size", [0, 10, 200])
def test_a_truncated_file_is_refused(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    with pytest.raises(PlanFileError, match="no plan file, or corrupted"):
        load_plans(saved, CPU)


# Changes in a zip's central directory: the bit for encryption, and the number of the compression.
@pytest.mark.parametrize("offset, value, error", [(8, 1, "RuntimeError"), (10, 99, "NotImplementedError")])
def test_what_no_zip_reader_reads_is_refused(saved: Path, offset: int, value: int, error: str) -> None:
    data = bytearray(saved.read_bytes())
    data[data.index(b"PK\x01\x02") + offset] = value
    saved.write_bytes(data)
    with pytest.raises(PlanFileError, match=f"no plan file, or corrupted: {error}"):
        load_plans(saved, CPU)


def test_an_index_without_end_is_refused(saved: Path) -> None:
    with pytest.raises(PlanFileError, match="no plan file, or corrupted: RecursionError"):
        load_plans(rewritten(saved, INDEX, lambda data: b"[" * 100_000), CPU)


def test_a_number_that_is_none_is_refused(saved: Path) -> None:
    def change(data: bytes) -> bytes:
        index = json.loads(data)
        index["plans"][0]["steps"][0]["shared"] = float("inf")
        return json.dumps(index).encode()

    with pytest.raises(PlanFileError, match="a plan is malformed: OverflowError"):
        load_plans(rewritten(saved, INDEX, change), CPU)
    assert not planner.plan_files


def test_one_file_is_written_by_many_at_once(saved: Path) -> None:
    run = new()
    run.run(None, X)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: save_plans(saved, CPU), range(64))) == [1] * 64
    assert load_plans(saved, CPU) == 1
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("act", [save_plans, load_plans])
def test_a_provider_without_kernels_is_named(saved: Path, act: Callable[[Path, str], int]) -> None:
    with pytest.raises(UsageError, match=r"kernels run on .*, not on CUDAExecutionProvide; there are no plans"):
        act(saved, "CUDAExecutionProvide")


def test_a_missing_file_and_a_full_folder_are_errors(gpu: Stage, tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="no plan file, or corrupted: FileNotFoundError"):
        load_plans(tmp_path / "none", CPU)
    (tmp_path / "file").touch()
    for parent in "no", "file":
        with pytest.raises(PlanFileError, match="cannot be written"):
            save_plans(tmp_path / parent / "plans", CPU)


def test_sizes_in_a_file_are_checked_when_the_plan_is_used(gpu: Stage, saved: Path) -> None:
    def change(data: bytes) -> bytes:
        index = json.loads(data)
        index["plans"][0]["steps"][0]["arguments"][0]["offset"] = 1 << 40
        return json.dumps(index).encode()

    load_plans(rewritten(saved, INDEX, change), CPU)
    with pytest.raises(Exception, match="a pointer's offset is 1099511627776, required 0 to 24"):
        new().run(None, X)


def test_products_and_tensor_maps_come_back_as_they_were(gpu: Stage, saved_steps: Path) -> None:
    made = planner.plans_in_use()
    assert load_plans(saved_steps, CPU) == 2
    gpu.kernels("product").devices.clear()
    run, unmapped = (InferenceSession(model(graph), providers=[CPU]) for graph in (PRODUCT, UNMAP))
    before = gpu.products()
    np.testing.assert_array_equal(run.run(None, FACTORS)[0], np.full((2, 4), 4, np.float32))
    x = np.arange(8 * 32, dtype=np.float32).reshape(8, 32)
    np.testing.assert_array_equal(unmapped.run(None, {"x": x})[0], x)
    assert gpu.products() == before + 1
    assert not gpu.kernels("product").devices, "nothing is planned"
    assert len(made) == 2
    assert [planned.plan for planned in planner.plans_in_use()] == [planned.plan for planned in made] * 2


CONVOLVE = "g (float[n, 2, h, l] x, float[3, 2, 2, 2] w, float[3] b) => (float[n, 3, p, q] y) { " + node(
    "convolve", "x, w, b", "y", operands="x w bias"
) + " }"  # fmt: skip
IMAGE = {"x": np.ones((1, 2, 3, 3), np.float32), "w": np.ones((3, 2, 2, 2), np.float32), "b": np.ones(3, np.float32)}


@pytest.fixture
def saved_convolution(gpu: Stage, tmp_path: Path) -> Path:
    """Return a file with the plan of a convolution by one of cuDNN's engines."""
    run = InferenceSession(model(CONVOLVE), providers=[CPU])
    run.run(None, IMAGE)
    assert save_plans(tmp_path / "plans.zip", CPU) == 1
    return tmp_path / "plans.zip"


def test_a_convolution_comes_back_with_its_engine(gpu: Stage, saved_convolution: Path) -> None:
    assert load_plans(saved_convolution, CPU) == 1
    gpu.kernels("convolve").devices.clear()
    before = gpu.cudnn.fake_plans()
    run = InferenceSession(model(CONVOLVE), providers=[CPU])
    np.testing.assert_array_equal(run.run(None, IMAGE)[0], np.full((1, 3, 2, 2), 9, np.float32))
    assert gpu.cudnn.fake_plans() == before + 1
    assert not gpu.kernels("convolve").devices, "nothing is planned"
    (step,) = planner.plans_in_use()[-1].plan.steps
    assert isinstance(step, Convolution) and step.engine == (41, 2, 2)


def test_engines_of_another_cudnn_are_refused(saved_convolution: Path) -> None:
    with pytest.raises(PlanFileError, match=r"convolutions were chosen for cuDNN 92000, this is 91900; make it again"):
        load_plans(edited(saved_convolution, cudnn=92000), CPU)
    assert not planner.plan_files


def test_a_malformed_convolution_in_a_file_is_refused(saved_convolution: Path) -> None:
    def change(data: bytes) -> bytes:
        index = json.loads(data)
        del index["plans"][0]["steps"][0]["convolution"]["strides"]
        return json.dumps(index).encode()

    with pytest.raises(PlanFileError, match="a plan is malformed: KeyError: 'strides'"):
        load_plans(rewritten(saved_convolution, INDEX, change), CPU)


def test_plans_of_another_setting_are_not_taken(gpu: Stage, saved_steps: Path) -> None:
    load_plans(saved_steps, CPU)
    kept = next(p for p in planner.plans_in_use() if p.node.fusion == "product")
    (ask,) = planner.plan_files.values()
    assert ask(kept.node, kept.inputs, kept.device) is not None
    assert ask(kept.node, kept.inputs, dataclasses.replace(kept.device, ordinal=1)) is not None
    assert ask(kept.node, kept.inputs, dataclasses.replace(kept.device, tf32=False)) is None


def test_algorithms_of_another_cublaslt_are_refused(saved_steps: Path) -> None:
    with pytest.raises(PlanFileError, match=r"products were chosen for cuBLASLt 120101, this is 120903; make it again"):
        load_plans(edited(saved_steps, cublaslt=120101), CPU)
    assert not planner.plan_files


def test_a_malformed_product_in_a_file_is_refused(saved_steps: Path) -> None:
    def change(data: bytes) -> bytes:
        index = json.loads(data)
        for record in index["plans"]:
            for step in record["steps"]:
                step.get("matmul", {}).pop("x", None)
        return json.dumps(index).encode()

    with pytest.raises(PlanFileError, match="a plan is malformed: KeyError: 'x'"):
        load_plans(rewritten(saved_steps, INDEX, change), CPU)
