"""Kernels from installed packages and from folders: they run, they are part of the digest, and errors name them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from outside import forget, install, site
from stand_in import CPU, Stage, model, node, session, stage

import onnxfuse
from onnxfuse import KernelError, UsageError, explain_session
from onnxfuse.cli import main
from onnxfuse.runtime import environment
from onnxfuse.runtime.environment import kernels_digest
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.kernel_folders import KernelFolder, add_kernels, kernel_folders
from onnxfuse.runtime.loaded_plans import load_plans
from onnxfuse.runtime.nvrtc import identity, kernel_text
from onnxfuse.runtime.plan import Kernel
from onnxfuse.runtime.plan_file import PlanFileError
from onnxfuse.runtime.saved_plans import save_plans

__all__ = ["site"]

# The host of a kernel that tests/native emulates.
HOST = """
from onnxfuse.runtime.plan import Kernel, Launch, Plan, Pointer, Scalar

def supports(node, dtypes, device):
    return None if dtypes == ("float32",) else "twice takes float32"

def candidates(node, inputs, device):
    (x,) = inputs
    arguments = (Pointer("input", 0), Pointer("output", 0), Scalar(x.shape[0], "int64"), Scalar(2.0, "float32"))
    return [Plan((x,), (Launch(Kernel("scale", "scale"), (1, 1, 1), (32, 1, 1), arguments),))]
"""
FAMILY = {"__init__.py": 'FUSIONS = ("twice",)\n', "host.py": HOST, "twice.cu": "// two times\n"}
CALL = node("twice", "x", "y", operands="x")
TWICE = model(f"g (float[n] x) => (float[n] y) {{ {CALL} }}", twice="(x) => (y) { y = Add(x, x) }")
X = {"x": np.float32([1, 2, 3])}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return stage(monkeypatch)


def package(site: Path, name: str, files: dict[str, str], version: str = "1.2") -> None:
    """Install a package that is one family of kernels."""
    module = f"stranger_{name}"
    files = {f"{module}/{path}": text for path, text in files.items()}
    install(site, name, {"onnxfuse.kernels": {name: module}}, files, version)


def family(folder: Path, files: dict[str, str]) -> Path:
    """Write a family in a folder of its own, which is returned."""
    folder.mkdir(parents=True)
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")
    return folder.parent


def runs(how: str, source: bytes = TWICE) -> ort.InferenceSession:
    run = session(source)
    np.testing.assert_array_equal(run.run(None, X)[0], [2, 4, 6])
    assert [each.how for each in explain_session(run)] == [how]
    return run


# --- kernels run ---------------------------------------------------------------------------------------------------


def test_the_kernels_of_a_package_run(site: Path, gpu: Stage) -> None:
    runs("body")
    package(site, "doubling", FAMILY)
    before = gpu.launches()
    runs("kernel")
    assert gpu.launches() == before + 1
    options = ort.SessionOptions()
    (dispatch,) = onnxfuse.register(options, TWICE, providers=[CPU])
    assert dispatch.how == "kernel"
    registered = ort.InferenceSession(TWICE, options, providers=[CPU], enable_fallback=0)
    np.testing.assert_array_equal(registered.run(None, X)[0], [2, 4, 6])
    assert gpu.launches() == before + 2


def test_the_kernels_of_a_folder_run(site: Path, gpu: Stage, tmp_path: Path) -> None:
    """Modules beside the families are found by relative imports, in two folders with families of one name too."""
    (why,) = explain_session(runs("body"))
    assert why.why == "fusion twice has no kernel in onnxfuse, an installed package or an added folder"
    folder = family(tmp_path / "one" / "doubling", {**FAMILY, "host.py": "from ..shared import *\n"})
    (folder / "shared.py").write_text(HOST)
    other = family(tmp_path / "two" / "doubling", {"__init__.py": 'FUSIONS = ("thrice",)', "host.py": HOST})
    assert (add_kernels(folder), add_kernels(other)) == (("twice",), ("thrice",))
    assert add_kernels(folder) == ("twice",), "a folder may be added again"
    runs("kernel")


def test_plans_of_other_kernels_are_refused(site: Path, gpu: Stage, tmp_path: Path) -> None:
    package(site, "doubling", FAMILY)
    run = runs("kernel")
    assert save_plans(tmp_path / "plans.zip", CPU) >= 1
    assert load_plans(tmp_path / "plans.zip", CPU) >= 1
    (site / "stranger_doubling" / "twice.cu").write_text("// twice as much\n")
    environment._digest_of_folders.cache_clear()
    with pytest.raises(PlanFileError, match="made from other kernels than there are here; add the folders"):
        load_plans(tmp_path / "plans.zip", CPU)
    del run


def test_the_digest_covers_files_and_version_wherever_they_are(site: Path, tmp_path: Path) -> None:
    own = kernels_digest()
    package(site, "doubling", FAMILY)
    found = kernels_digest()
    assert found != own
    shutil.rmtree(site / "doubling-1.2.dist-info")
    package(site, "doubling", {}, version="1.3")
    assert kernels_digest() not in (own, found), "another version may bring other modules that the host imports"
    digests = set()
    shutil.rmtree(site / "doubling-1.3.dist-info")
    for name in "here", "there":
        monkey = family(tmp_path / name / "doubling", FAMILY)
        forget()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("onnxfuse.runtime.kernel_folders._added", [])
            add_kernels(monkey)
            digests.add(kernels_digest())
    assert len(digests) == 1 and not digests & {own, found}


# --- sources -------------------------------------------------------------------------------------------------------


def test_a_header_is_first_looked_for_beside_the_file_that_includes_it(site: Path) -> None:
    """So two packages may have headers of one name, and onnxfuse's own files keep including onnxfuse's."""
    for name in "one", "two":
        text = '#include "types.cuh"\n#include "common.cuh"\n#include "elementwise.cuh"\n'
        header = {"types.cuh": f"// types of {name}\n", "common.cuh": f"// shared by {name}\n"}
        start = {"__init__.py": f'FUSIONS = ("stranger_{name}",)\n', "host.py": HOST}
        package(site, name, {**start, f"stranger_{name}.cu": text, **header})
    for name, other in ("one", "two"), ("two", "one"):
        text = kernel_text(Kernel(f"stranger_{name}", "entry"))
        assert f"// types of {name}" in text and f"// shared by {name}" in text and f"by {other}" not in text
        assert "each_element" in text, "onnxfuse's own headers can be included"
    assert "// types of" not in kernel_text(Kernel("activation", "activation"))


def test_a_header_of_another_package_is_not_found(site: Path) -> None:
    package(site, "one", {**FAMILY, "twice.cu": '#include "theirs.cuh"\n'})
    package(site, "two", {"__init__.py": 'FUSIONS = ("other",)', "host.py": HOST, "theirs.cuh": ""})
    with pytest.raises(KernelError, match=r"kernel source theirs\.cuh was not found in .*/stranger_one"):
        kernel_text(Kernel("twice", "twice"))


def test_a_text_is_read_again_only_if_a_file_of_it_changed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many generated kernels include the same headers, whose folders are not listed for each of them."""
    header = {"theirs.cuh": "// first\n", "twice.cu": '#include "theirs.cuh"\n'}
    package(site, "one", {**FAMILY, **header})
    kernels = [Kernel("twice", "twice"), Kernel("made", "made", text='#include "types.cuh"\n// 1\n')]
    known = [identity(kernel) for kernel in kernels]
    assert [each.length for each in known] == [len(kernel_text(kernel)) for kernel in kernels]
    monkeypatch.setattr(KernelFolder, "sources", lambda *_: pytest.fail("the folders are listed again"))
    another = identity(Kernel("made", "made", text='#include "types.cuh"\n// 2\n'))
    assert known == [identity(kernel) for kernel in kernels] and another not in known
    (changed,) = site.rglob("theirs.cuh")
    changed.write_text("// second")
    os.utime(changed, ns=(1, 1))
    assert identity(kernels[0]) != known[0] and identity(kernels[1]) == known[1]


# --- what is broken is named in one line ---------------------------------------------------------------------------

BROKEN = {
    "import": (
        {"__init__.py": "import no_such_module"},
        "does not load: ModuleNotFoundError: No module named 'no_such",
    ),
    "exit": ({"__init__.py": "raise SystemExit('bye')"}, "does not load: SystemExit: bye"),
    "nothing": ({"__init__.py": ""}, "has a family 'stranger_nothing' without FUSIONS, a tuple of the names of the"),
    "text": ({"__init__.py": 'FUSIONS = ("twice")'}, "without FUSIONS, a tuple of the names of the fusions"),
    "file": ({}, "does not load: ModuleNotFoundError: No module named 'stranger_file'"),
    "own": ({"__init__.py": 'FUSIONS = ("softmax",)'}, "has kernels of the fusion 'softmax', and so has onnxfuse; ren"),
    "source": ({**FAMILY, "softmax.cu": ""}, "has a kernel source softmax.cu, and so has onnxfuse; rename it"),
}


@pytest.mark.parametrize(("name", "files", "sentence"), [(name, *each) for name, each in BROKEN.items()])
def test_a_broken_package(site: Path, gpu: Stage, name: str, files: dict[str, str], sentence: str) -> None:
    """Sessions on a GPU and the commands that open some say so; a session elsewhere needs no kernels."""
    package(site, name, files)
    with pytest.raises(KernelError) as caught:
        session(TWICE)
    message = str(caught.value)
    assert message.startswith(f"package {name} 1.2") and sentence in message
    assert message.endswith(f"or remove it with `pip uninstall {name}`")
    done = CliRunner().invoke(main, ["tune", "no_such_model.onnx", "--provider", "cuda"])
    assert (done.exit_code, done.stderr) == (1, f"error: {message}\n")
    with pytest.raises(KernelError, match=r"named 'no_such|bye|FUSIONS|stranger_file|softmax"):
        kernels_digest()


HOSTS = {
    "without a host": (None, "does not load: ModuleNotFoundError: No module named 'stranger_late.host'"),
    "does not import": (
        "import no_such_module",
        "does not load: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "supports nothing": (HOST.replace("supports", "likes"), "has a host stranger_late.host without the function supp"),
    "numbers in the host": (HOST + "NUMBERS = {}\n", "has a host stranger_late.host with NUMBERS; move th"),
    "plans nothing": (HOST.replace("candidates", "plans"), "has a host stranger_late.host without the function cand"),
}


@pytest.mark.parametrize(("host", "sentence"), HOSTS.values(), ids=HOSTS)
def test_a_broken_host(site: Path, gpu: Stage, host: str | None, sentence: str) -> None:
    """A broken host is an error only where a model has a node of its family."""
    package(site, "late", {name: text for name, text in {**FAMILY, "host.py": host}.items() if text is not None})
    assert find_host("softmax") is not None
    with pytest.raises(KernelError) as caught:
        session(TWICE)
    assert str(caught.value).startswith("package late 1.2 has a host stranger_late.host")
    assert sentence in str(caught.value) and "pip uninstall late" in str(caught.value)


def test_two_packages_with_kernels_of_one_fusion_are_both_named(site: Path) -> None:
    package(site, "one", FAMILY)
    package(site, "two", FAMILY)
    sentence = "package two 1.2 has kernels of the fusion 'twice', and so has package one 1.2; rename it, or remove it"
    with pytest.raises(KernelError, match=sentence):
        kernel_folders()


def test_an_entry_point_of_a_plain_module(site: Path) -> None:
    files = {"stranger_plain.py": 'FUSIONS = ("twice",)'}
    install(site, "plain", {"onnxfuse.kernels": {"plain": "stranger_plain"}}, files)
    with pytest.raises(
        KernelError, match=r"package plain 1\.2 offers stranger_plain as a family, which is a Python pa"
    ):
        kernel_folders()


def test_a_folder_without_families(site: Path, tmp_path: Path) -> None:
    folder = family(tmp_path / "mine" / "doubling", FAMILY)
    for wrong, sentence in (
        (tmp_path / "none", "is not a folder; kernels are added from a folder of families"),
        (tmp_path, "holds no family, which is a Python package with __init__.py, host.py and .cu files in one folder"),
        (folder / "doubling", f"; it is a family itself: give '{folder}'"),
    ):
        with pytest.raises(UsageError) as caught:
            add_kernels(wrong)
        assert str(caught.value).startswith(f"'{wrong}' ") and str(caught.value).endswith(sentence)
    done = CliRunner().invoke(main, ["bench", "no_such_model.onnx", "--kernels", str(tmp_path / "none")])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert [each for each in kernel_folders() if each.origin.name != "onnxfuse"] == [], "none of them was added"


def test_a_broken_folder(site: Path, tmp_path: Path) -> None:
    folder = family(tmp_path / "mine" / "doubling", {**FAMILY, "__init__.py": "import no_such_module"})
    with pytest.raises(KernelError) as caught:
        add_kernels(folder)
    assert str(caught.value) == (
        f"folder '{folder}' has a family 'doubling' that does not load: ModuleNotFoundError: No module named "
        "'no_such_module'; repair it, or leave the folder out"
    )
    for name in "one", "two":
        twice = family(tmp_path / "twice" / name, {**FAMILY, "twice.cu": f"// of {name}"})
    with pytest.raises(KernelError, match="has kernels of the fusion 'twice', twice; rename it"):
        add_kernels(twice)
    assert find_host("twice") is None, "neither was added"
