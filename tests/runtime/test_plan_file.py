"""Loaded templates run without planning, on the GPUs that a file is for; test_plan_file_faults.py has other files."""

from __future__ import annotations

import dataclasses
import gc
import logging
import struct
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

import stand_in
from plan_files import X, changed, edited, gpu, new, other_gpu, saved
from stand_in import CPU, Stage, node

from onnxfuse.runtime.loaded_plans import load_plans
from onnxfuse.runtime.loaded_templates import GivenTemplate, PreparedTemplate
from onnxfuse.runtime.plan import Plan, TensorSpec
from onnxfuse.runtime.plan_file import PlanFileError, SavedTemplate, read_plan_file, write_plan_file
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.saved_plans import save_plans
from onnxfuse.runtime.template_words import read_template

__all__ = ["gpu", "saved"]


def in_use() -> list[PreparedTemplate | GivenTemplate]:
    return planner.templates_in_use()


# --- use --------------------------------------------------------------------------------------------------------------


def test_a_loaded_template_runs_without_planning(gpu: Stage, saved: Path) -> None:
    gpu.kernels("shift").calls.clear()
    before, modules = gpu.launches(), gpu.cuda.fake_modules()
    assert load_plans(saved, CPU) == 1
    run = new()
    np.testing.assert_array_equal(run.run(None, X)[0], X["x"] + X["b"])
    np.testing.assert_array_equal(run.run(None, {**X, "x": X["x"][:1]})[0], X["x"][:1] + X["b"])
    assert gpu.launches() == before + 2
    assert not gpu.kernels("shift").calls
    assert gpu.cuda.fake_modules() == modules + 1, "all its kernels have the same machine code here"
    odd = {"x": np.ones((2, 1021), np.float32), "b": np.ones(1021, np.float32)}
    np.testing.assert_array_equal(run.run(None, odd)[0], odd["x"] + odd["b"])
    assert gpu.kernels("shift").calls, "sizes for which the template has no plan are planned"


def test_loaded_templates_are_saved_again(gpu: Stage, saved: Path) -> None:
    first = saved.read_bytes()
    load_plans(saved, CPU)
    run = new()
    run.run(None, X)
    (given,) = in_use()
    assert isinstance(given, GivenTemplate)
    assert save_plans(saved.with_name("again"), CPU) == 1
    assert saved.with_name("again").read_bytes() == first
    load_plans(saved.with_name("again"), CPU)
    del run, given
    gc.collect()
    planner.plan_files.pop(next(iter(planner.plan_files)))
    np.testing.assert_array_equal(new().run(None, X)[0], X["x"] + X["b"])


def test_of_templates_of_one_node_the_file_has_the_one_that_knows_most(gpu: Stage, saved: Path) -> None:
    load_plans(saved, CPU)
    runs = [new(), new(tune="never")]
    for run in runs:
        run.run(None, X)
    runs[0].run(None, {"x": np.ones((2, 1021), np.float32), "b": np.ones(1021, np.float32)})
    own = [each for each in in_use() if isinstance(each, PreparedTemplate)]
    assert (len(in_use()), len(own)) == (3, 1)
    assert save_plans(saved, CPU) == 1
    assert len(read_plan_file(saved).templates[0].words.variants) == len(own[0].template.variants)


def test_sessions_on_all_gpus_of_a_kind_have_one_template_in_the_file(gpu: Stage, saved: Path) -> None:
    """A loaded one is for every ordinal, and its kernels are loaded on each GPU."""
    load_plans(saved, CPU)
    before = gpu.cuda.fake_modules()
    (source,) = planner.plan_files.values()
    (template,) = [each for each in new_and_run() if isinstance(each, GivenTemplate)]
    device = template.situation.device
    found = [
        source.find(dataclasses.replace(template.situation, device=dataclasses.replace(device, ordinal=i)), pattern())
        for i in (0, 1, 1)
    ]
    assert found[0] is template and found[1] is found[2] is not None
    found[1].data()
    assert gpu.cuda.fake_modules() - before == 2
    assert source.find(dataclasses.replace(template.situation, provider="CUDAExecutionProvider"), pattern()) is None


def new_and_run() -> list[PreparedTemplate | GivenTemplate]:
    """Return the templates of a session that has run."""
    kept.append(new())
    kept[-1].run(None, X)
    return in_use()


kept: list[ort.InferenceSession] = []


@pytest.fixture(autouse=True)
def sessions_end() -> Iterator[None]:
    yield
    kept.clear()


def pattern(constant: bool = False) -> tuple[TensorSpec, ...]:
    return TensorSpec((-1, -2), "float32"), TensorSpec((-2,), "float32", constant=constant)


def test_no_package_metadata_is_needed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of sources on the path and a bundle have no metadata."""

    def missing(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(Distribution, "from_name", missing)
    assert load_plans(saved, CPU) == 1
    run = new()
    run.run(None, X)
    assert save_plans(saved, CPU) == 1


def test_the_file_that_was_loaded_last_is_asked_first(gpu: Stage, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is written again replaces its earlier templates, and those of older files for the same nodes."""
    good, wrong = saved.read_bytes(), saved.with_name("wrong")
    with monkeypatch.context() as patch:
        patch.setattr(gpu.kernels("shift"), "candidates", twice(gpu.kernels("shift").candidates))
        planner._prepared.clear()
        run = new()
        run.run(None, X)
        assert save_plans(wrong, CPU) == 1
        del run
    planner._prepared.clear()

    def result() -> list[list[float]]:
        return new().run(None, X)[0].tolist()  # type: ignore[no-any-return]

    right = (X["x"] + X["b"]).tolist()
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


def twice(candidates: Callable[..., list[Plan]]) -> Callable[..., list[Plan]]:
    """Return a host's function whose plans add x to itself."""

    def wrong(*arguments: Any) -> list[Plan]:
        (plan,) = candidates(*arguments)
        (step,) = plan.steps
        first, _, *others = step.arguments
        return [dataclasses.replace(plan, steps=(dataclasses.replace(step, arguments=(first, first, *others)),))]

    return wrong


def test_a_file_that_has_not_changed_is_read_once(gpu: Stage, saved: Path) -> None:
    load_plans(saved, CPU)
    (first,) = planner.plan_files.values()
    load_plans(saved, CPU)
    assert list(planner.plan_files.values()) == [first]
    edited(saved)
    load_plans(saved, CPU)
    assert list(planner.plan_files.values()) != [first]


def test_templates_of_another_setting_are_not_taken(gpu: Stage, saved: Path) -> None:
    load_plans(saved, CPU)
    (source,) = planner.plan_files.values()
    (template,) = new_and_run()
    situation = template.situation

    def found(**changes: Any) -> bool:
        device = dataclasses.replace(situation.device, **changes)
        return source.find(dataclasses.replace(situation, device=device), pattern()) is not None

    assert found() and found(ordinal=1)
    assert not found(tf32=False)
    other = dataclasses.replace(situation.node, attributes={"d": 3})
    assert source.find(dataclasses.replace(situation, node=other), pattern()) is None
    assert source.find(situation, [TensorSpec((2, 3), "float32"), TensorSpec((4,), "float32")]) is None


def test_a_template_also_takes_inputs_of_which_more_is_known(saved: Path) -> None:
    """A template takes constant inputs where it requires none, but not the reverse, because kernels rely on it."""
    words = read_plan_file(saved).templates[0].words
    x, b = pattern()
    constant = (x, dataclasses.replace(b, constant=True))
    narrower = words.for_inputs(constant)
    assert narrower is not None and narrower.inputs == constant
    assert read_template(narrower.data()) == narrower
    assert narrower.for_inputs(pattern()) is None
    assert words.for_inputs((dataclasses.replace(x, aligned=False), b)) is None
    assert words.for_inputs((x,)) is words.for_inputs((x, TensorSpec((3, 3), "float32"))) is None
    assert words.for_inputs((TensorSpec((2, 3), "float32"), TensorSpec((3,), "float32"))) == words
    assert words.for_inputs((TensorSpec((2, 3), "float32"), TensorSpec((4,), "float32"))) is None


# --- measurements -----------------------------------------------------------------------------------------------------


def tuned_at(path: Path, sizes: tuple[int, int]) -> Path:
    """Return the file with a variant that was measured at these sizes, in front of the others."""

    def change(each: SavedTemplate) -> SavedTemplate:
        first = next(variant for variant in each.words.variants if variant.hints[1] == sizes[1])
        words = list(struct.unpack(f"<{len(first.data) // 8}q", first.data))
        words[:3] = [*sizes, 1]
        data = struct.pack(f"<{len(words)}q", *words)
        tuned = dataclasses.replace(first, hints=sizes, tuned=True, data=data)
        return dataclasses.replace(each, words=dataclasses.replace(each.words, variants=(tuned, *each.words.variants)))

    return changed(path, change)


def test_sessions_that_ignore_measurements_get_no_variants_that_were_measured(gpu: Stage, saved: Path) -> None:
    load_plans(tuned_at(saved, (64, 3)), CPU)
    (given,) = [each for each in new_and_run() if isinstance(each, GivenTemplate)]
    assert given.words.tuned_sizes == {(64, 3)}
    (source,) = planner.plan_files.values()
    never = source.find(dataclasses.replace(given.situation, verdicts=False), pattern())
    assert never is not None and not never.words.tuned_sizes
    assert len(never.words.variants) == len(given.words.variants) - 1
    assert never.saved.words.tuned_sizes == {(64, 3)}, "what is saved again"


class Measured:
    """Says that nodes were measured at these sizes."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        self.sizes = sizes

    def inputs_measured(self, *_: Any) -> list[tuple[TensorSpec, ...]]:
        return [(TensorSpec((n, d), "float32"), TensorSpec((d,), "float32")) for n, d in self.sizes]

    def choose(self, *_: Any) -> None:
        return None


def test_nodes_that_were_measured_after_the_file_was_made_are_planned(
    gpu: Stage, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_plans(tuned_at(saved, (64, 3)), CPU)
    for sizes, is_given in (((64, 3),), True), (((64, 3), (128, 3)), False), ((), True):
        monkeypatch.setattr(planner, "verdicts", Measured(*sizes))
        (template,) = new_and_run()
        assert isinstance(template, GivenTemplate) is is_given
        kept.clear()
        gc.collect()


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_a_file_of_another_gpu_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_gpu(monkeypatch, name="other", arch=80)
    with pytest.raises(PlanFileError, match=r"made for stand-in \(sm_90, 132 multip.*\), this GPU is other \(sm_80"):
        load_plans(saved, CPU)
    assert not planner.plan_files


@pytest.mark.parametrize(
    "facts, level", [({}, None), ({"name": "H100"}, "INFO"), ({"multiprocessors": 114}, "WARNING")]
)
def test_other_gpus_of_the_capability_run_its_plans(
    gpu: Stage,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    facts: dict[str, Any],
    level: str | None,
) -> None:
    other_gpu(monkeypatch, **facts)
    with caplog.at_level(logging.INFO, "onnxfuse"):
        assert load_plans(saved, CPU) == 1
    said = [each.levelname for each in caplog.records if "its plans are right" in each.getMessage()]
    assert said == ([level] if level else [])
    gpu.kernels("shift").calls.clear()
    np.testing.assert_array_equal(new().run(None, X)[0], X["x"] + X["b"])
    assert not gpu.kernels("shift").calls


def test_gpus_that_lack_what_launches_take_are_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def larger(**facts: int) -> None:
        changed(saved, lambda each: dataclasses.replace(
            each, kernels=tuple(dataclasses.replace(kernel, **facts) for kernel in each.kernels)
        ))  # fmt: skip

    larger(shared=200_000)
    with monkeypatch.context() as patch:
        other_gpu(patch, shared_per_block=101376)
        with pytest.raises(PlanFileError, match="blocks need 200000 bytes of shared memory, this GPU allows 101376"):
            load_plans(saved, CPU)
    larger(cluster=16)
    assert load_plans(saved, CPU) == 1, "the GPU that it was made for"
    other_gpu(monkeypatch, multiprocessors=16)
    with pytest.raises(PlanFileError, match="clusters have 16 blocks, other kinds of GPUs may allow 8 only"):
        load_plans(saved, CPU)


def test_of_several_gpus_the_most_similar_counts(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are in one file, and what is for others stays in it."""
    here = stand_in.DEVICE
    kinds = [dataclasses.replace(here, **facts) for facts in (
        {"arch": 80, "name": "A100"}, {"multiprocessors": 114, "name": "PCIe"}, {"multiprocessors": 16, "name": "slice"}
    )]  # fmt: skip
    file = read_plan_file(saved)
    templates = [dataclasses.replace(each, device=kind) for kind in kinds for each in file.templates]
    write_plan_file(saved, dataclasses.replace(file, templates=templates))
    assert read_plan_file(saved).devices == kinds
    for facts, name in ({}, "PCIe"), ({"multiprocessors": 20}, "slice"), (vars(kinds[0]), "A100"):
        with monkeypatch.context() as patch:
            other_gpu(patch, **facts)
            assert load_plans(saved, CPU) == 1
            (template,) = [each for each in new_and_run() if isinstance(each, GivenTemplate)]
            assert template.saved.device.name == name
            kept.clear()
            gc.collect()


# --- libraries and tensor maps ----------------------------------------------------------------------------------------

PRODUCT = "g (float[m, k] x, float[k, n] w, float[n] b) => (float[m, n] y) { " + node(
    "product", "x, w, b", "y", operands="x w bias"
) + " }"  # fmt: skip
UNMAP = "g (float[n, d] x) => (float[n, d] y) { " + node("unmap", "x", "y", operands="x") + " }"
FACTORS = {"x": np.ones((2, 3), np.float32), "w": np.ones((3, 4), np.float32), "b": np.ones(4, np.float32)}
FAKE_ALGORITHM = (0xA160, 1024, 0, 0, 0, 0, 0, 1 << 63)


@pytest.fixture
def saved_steps(gpu: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with the templates of a product by an algorithm of cuBLASLt, and of a tensor map."""
    product = gpu.kernels("product")
    good = product.candidates

    def candidates(*arguments: Any) -> list[Plan]:
        (made,) = good(*arguments)
        return [dataclasses.replace(made, steps=(dataclasses.replace(made.steps[0], algorithm=FAKE_ALGORITHM),))]

    with monkeypatch.context() as patch:
        patch.setattr(product, "candidates", candidates)
        runs = [new(graph) for graph in (PRODUCT, UNMAP)]
        runs[0].run(None, FACTORS)
        runs[1].run(None, {"x": np.ones((8, 32), np.float32)})
        assert save_plans(tmp_path / "plans", CPU) == 2
    return tmp_path / "plans"


def test_products_and_tensor_maps_come_back_as_they_were(gpu: Stage, saved_steps: Path) -> None:
    assert read_plan_file(saved_steps).versions["cublaslt"] == 120903
    assert load_plans(saved_steps, CPU) == 2
    gpu.kernels("product").devices.clear()
    run, unmapped = (new(graph) for graph in (PRODUCT, UNMAP))
    before = gpu.products()
    np.testing.assert_array_equal(run.run(None, FACTORS)[0], np.full((2, 4), 4, np.float32))
    x = np.arange(8 * 32, dtype=np.float32).reshape(8, 32)
    np.testing.assert_array_equal(unmapped.run(None, {"x": x})[0], x)
    assert gpu.products() == before + 1
    assert not gpu.kernels("product").devices, "nothing is planned"
    libraries = [each.saved.libraries for each in in_use() if isinstance(each, GivenTemplate)]
    assert sorted(libraries, key=len) == [{}, {"cublaslt": True}]


def test_algorithms_are_for_one_kind_of_gpu(gpu: Stage, saved_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_gpu(monkeypatch, name="other")
    assert load_plans(saved_steps, CPU) == 1
    planner._prepared.clear()
    gpu.kernels("product").devices.clear()
    np.testing.assert_array_equal(new(PRODUCT).run(None, FACTORS)[0], np.full((2, 4), 4, np.float32))
    assert gpu.kernels("product").devices


def test_products_without_an_algorithm_are_for_every_version(gpu: Stage, tmp_path: Path) -> None:
    run = new(PRODUCT)
    run.run(None, FACTORS)
    assert save_plans(tmp_path / "plans", CPU) == 1
    file = read_plan_file(tmp_path / "plans")
    assert (file.versions["cublaslt"], file.templates[0].libraries) == (None, {"cublaslt": False})


CONVOLVE = "g (float[1, 2, 3, 3] x, float[3, 2, 2, 2] w, float[3] b) => (float[1, 3, 2, 2] y) { " + node(
    "convolve", "x, w, b", "y", operands="x w bias"
) + " }"  # fmt: skip
IMAGE = {"x": np.ones((1, 2, 3, 3), np.float32), "w": np.ones((3, 2, 2, 2), np.float32), "b": np.ones(3, np.float32)}


def test_a_convolution_comes_back_with_its_engine(gpu: Stage, tmp_path: Path) -> None:
    run = new(CONVOLVE)
    run.run(None, IMAGE)
    assert save_plans(tmp_path / "plans", CPU) == 1
    assert read_plan_file(tmp_path / "plans").versions["cudnn"] == 91900
    del run
    assert load_plans(tmp_path / "plans", CPU) == 1
    gpu.kernels("convolve").devices.clear()
    before = gpu.cudnn.fake_plans()
    run = new(CONVOLVE)
    np.testing.assert_array_equal(run.run(None, IMAGE)[0], np.full((1, 3, 2, 2), 9, np.float32))
    assert gpu.cudnn.fake_plans() == before + 1
    assert not gpu.kernels("convolve").devices, "nothing is planned"
    (template,) = in_use()
    assert isinstance(template, GivenTemplate) and template.saved.libraries == {"cudnn": True}
