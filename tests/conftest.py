"""The fixtures that several test files share, and the folders that the processes of one test run share."""

from __future__ import annotations

import functools
import gc
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import blas_threads  # noqa: F401
import onnx
import pytest
from exported_models import unpack
from shared_cubins import shared

from onnxfuse.cli.terminal import console
from onnxfuse.kernels.gemm import cublaslt
from onnxfuse.runtime import nvrtc
from onnxfuse.testing import emulated_build
from onnxfuse.verify import own_process

emulated_build.header_folders.append(Path(__file__).parent / "native")


class Case(Protocol):
    """A generated case."""

    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=Case)


class EachCase(Protocol):
    """The type of the fixture `each_case`."""

    def __call__(self, cases: Iterable[T]) -> Iterator[tuple[T, AbstractContextManager[None]]]: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that picks generated cases: they are subtests, which `-k` does not see."""
    parser.addoption("--case", default="", metavar="TEXT", help="of generated cases, run those with TEXT in their id")


def pytest_collection_finish() -> None:
    """Spare each later garbage collection what imports and the collection of tests made, which lives to the end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Spare later collections what the tests of a file leave, too, such as what functions have cached."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def each_case(request: pytest.FixtureRequest, subtests: pytest.Subtests) -> EachCase:
    """Return an iterator over generated cases that runs each one, which has an `id`, as a subtest of its own.

    Cases are generated inside tests, because generating them while pytest collects would take a minute.  The body of
    the loop must use the context manager that comes with each case:

        for case, subtest in each_case(generated):
            with subtest: ...
    """
    wanted = request.config.getoption("--case")

    def chosen(cases: Iterable[T]) -> Iterator[tuple[T, AbstractContextManager[None]]]:
        ran = 0
        for case in cases:
            if wanted in case.id:
                ran += 1
                yield case, subtests.test(case.id)
        if not ran:
            assert wanted, "nothing was generated"
            pytest.skip(f"no case has '{wanted}' in its id")

    return chosen


@pytest.fixture(scope="session", autouse=True)
def no_earlier_measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what was tuned on this machine from deciding what tests find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path_factory.mktemp("measurements")))
        yield


@pytest.fixture(scope="session", autouse=True)
def runs_wait_for_the_compiler() -> Iterator[None]:
    """Let no result depend on the time that a kernel takes to compile; the tests of runs that do not wait say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXFUSE_WAIT", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def models_run_in_this_process() -> Iterator[None]:
    """Start no process for each model that a test verifies; the tests of that process switch it on again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_process, "enabled", False)
        yield


@pytest.fixture
def no_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave cuBLASLt out of plans, also where an earlier test of this process opened a stand-in of it."""
    monkeypatch.setattr(cublaslt, "_is_available", lambda: False)


@pytest.fixture(scope="session", autouse=True)
def terminal() -> Iterator[None]:
    """Print as a terminal of 80 columns without colors would, whatever terminal the tests run in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            patch.delenv(name, raising=False)
        yield


@dataclass(frozen=True)
class Optimized:
    """An exported model, the optimized one, and the report as plain data."""

    original: Path
    path: Path
    report: dict[str, Any]


def folder_of_the_run(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that the processes of one test run share: those of pytest-xdist, or all with one folder set."""
    base = tmp_path_factory.getbasetemp()
    chosen = os.environ.get("ONNXFUSE_TESTS_FOLDER")
    folder = (Path(chosen) if chosen else base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def folder_of_compiled(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder for what is compiled: ONNXFUSE_TESTS_COMPILED outlives the run, because digests name its files.

    A digest is of all that a compiler reads: the text, what it includes, the flags and the compiler's version.
    """
    kept = os.environ.get("ONNXFUSE_TESTS_COMPILED")
    if not kept:
        return folder_of_the_run(tmp_path_factory, name)
    folder = Path(kept, name).resolve()  # tests change the working directory
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def compiled_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a name for what is compiled."""
    return functools.partial(folder_of_compiled, tmp_path_factory)


@pytest.fixture(scope="session", autouse=True)
def shared_machine_code(compiled_folder: Callable[[str], Path]) -> Iterator[None]:
    """Compile each kernel once for each architecture, whichever process of the run wants it first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "_compile", shared(nvrtc._compile, compiled_folder("machine_code")))
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_emulated_kernels(compiled_folder: Callable[[str], Path]) -> Iterator[None]:
    """Compile each emulated kernel once, and its headers, whichever process of the run wants them first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_build, "folder", compiled_folder("emulated"))
        yield


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the path of the exported model of a name, unpacked once for the whole test run."""
    folder = folder_of_the_run(tmp_path_factory, "exported")
    return lambda name: unpack(name, folder)


@pytest.fixture(scope="session")
def optimized(tmp_path_factory: pytest.TempPathFactory, exported: Callable[[str], Path]) -> Callable[[str], Optimized]:
    """Return a function that optimizes the exported model of a name, once for all processes of the test run."""
    folder = folder_of_the_run(tmp_path_factory, "optimized")

    def optimize_once(name: str) -> Optimized:
        path, report = folder / name, folder / f"{name}.json"
        if not report.exists():
            from onnxfuse import optimize

            model, result = optimize(exported(name), verify=False)
            draft = folder / f"{name}.{os.getpid()}"
            onnx.save(model, draft)
            draft.replace(path)
            draft.write_text(json.dumps(result.to_json()), encoding="utf-8")
            draft.replace(report)
        return Optimized(exported(name), path, json.loads(report.read_text(encoding="utf-8")))

    return optimize_once


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function after which commands print as a terminal of so many columns would."""

    def print_columns(count: int) -> None:
        monkeypatch.setenv("COLUMNS", str(count))
        console.cache_clear()

    yield print_columns
    console.cache_clear()
