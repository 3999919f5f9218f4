"""Installed packages add fusions; the package in examples/package works as its README says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result
from conftest import EachCase
from outside import EXAMPLE, KERNELS, PATTERNS, example_model, install, install_example, site
from spellings import spellings
from test_docs import commands
from test_spellings import assert_one_node_that_computes_the_same

from onnxfuse import KernelError, PatternError, optimize
from onnxfuse.cli import main
from onnxfuse.dsl import catalogue
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.kernel_folders import add_kernels, kernel_folders

__all__ = ["site"]

ROOT = Path(__file__).parent.parent
FUSION = """
from onnxfuse import Term, fusion, op, tensor

@fusion(out="...")
def {name}(x: Term = tensor("...")) -> Term:
    \"\"\"y = sqrt(relu(x))\"\"\"
    return op.Sqrt(op.Relu(x))
"""
MODEL = """<ir_version: 8, opset_import: ["" : 20]>
g (float[n,4] x) => (float[n,4] y) { a = Relu (x) y = Sqrt (a) }"""


def add(site: Path, package: str, module: str, text: str) -> None:
    install(site, package, {"onnxfuse.patterns": {module: module}}, {f"{module}.py": text})


def names() -> set[str]:
    return {fusion.name for fusion in catalogue.with_folders(())}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


# --- fusions of installed packages ---------------------------------------------------------------------------------


def test_a_package_adds_a_fusion(site: Path) -> None:
    own = names()
    add(site, "root-of-relu", "stranger_root", FUSION.format(name="root_of_relu"))
    assert names() - own == {"root_of_relu"}
    _, report = optimize(onnx.parser.parse_model(MODEL))
    assert (report.counts, report.verified.status) == ({"root_of_relu": 1}, "verified")
    assert "root_of_relu" in run("list").stdout
    assert "return op.Sqrt(op.Relu(x))" in run("show", "root_of_relu").stdout
    assert re.search(r"^root-of-relu +1\.2 \(adds fusions or kernels\)$", run("env").stdout, re.MULTILINE)


def test_a_folder_of_the_user_replaces_a_fusion_of_a_package(site: Path, tmp_path: Path) -> None:
    add(site, "root-of-relu", "stranger_root", FUSION.format(name="root_of_relu"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "root.py").write_text(FUSION.format(name="root_of_relu").replace("sqrt(", "the root of "))
    (found,) = (each for each in catalogue.with_folders([tmp_path / "mine"]) if each.name == "root_of_relu")
    assert found.doc == "y = the root of relu(x))"


BROKEN = {
    "does_not_import": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "exits": ("raise SystemExit('bye')", "SystemExit: bye"),
    "is_wrong": (FUSION.replace("tensor(", "(").format(name="wrong"), "parameter 'x' needs a default: tensor()"),
    "is_empty": ("x = 1", "its module stranger_is_empty declares no fusion; decorate a function with"),
    "is_taken": (FUSION.format(name="layer_norm"), "declares a fusion 'layer_norm', and so does onnxfuse; rename it"),
}


@pytest.mark.parametrize(("module", "text", "sentence"), [(f"stranger_{k}", *v) for k, v in BROKEN.items()])
def test_a_broken_package_is_named_in_one_line(site: Path, module: str, text: str, sentence: str) -> None:
    add(site, "stranger", module, text)
    with pytest.raises(PatternError) as caught:
        catalogue.with_folders(())
    message = str(caught.value)
    assert message.startswith("package stranger 1.2") and sentence in message
    assert message.endswith("remove it with `pip uninstall stranger`") and "\n" not in message
    listed = run("list")
    assert (listed.exit_code, listed.stderr) == (1, f"error: {message}\n")


def test_two_packages_that_declare_one_fusion_are_both_named(site: Path) -> None:
    for each in "one", "two":
        add(site, each, f"stranger_{each}", FUSION.format(name="root_of_relu"))
    with pytest.raises(PatternError, match=r"package two 1\.2 declares .*'root_of_relu', and so does package one 1\.2"):
        catalogue.with_folders(())


def test_an_entry_point_that_is_no_module(site: Path) -> None:
    files = {"stranger_value.py": FUSION.format(name="root_of_relu")}
    install(site, "value", {"onnxfuse.patterns": {"root": "stranger_value:root_of_relu"}}, files)
    sentence = "stranger_value:root_of_relu, its entry point 'root' of onnxfuse.patterns, is not a module"
    with pytest.raises(PatternError, match=sentence):
        catalogue.with_folders(())


# --- the example ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of a process for which pip has installed the package of examples/package."""
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("installing a package needs the packages of .[dev]")
    target, source = tmp_path_factory.mktemp("site-packages"), tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(EXAMPLE, source)  # building writes beside the sources
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", target, source], check=True)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (target, ROOT)))}


def test_the_example_passes_its_own_tests(example: dict[str, str], tmp_path: Path) -> None:
    """They optimize a model, verify it, compile the kernel for every architecture and run it where there is a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", EXAMPLE, EXAMPLE]
    done = subprocess.run(command, env=example, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and re.search(r"^\d\d passed", done.stdout, re.MULTILINE), done.stdout + done.stderr


@pytest.mark.parametrize("page", [EXAMPLE / "README.md", ROOT / "docs" / "packages.md"], ids=lambda page: page.name)
def test_the_commands_of_its_pages_work_as_written(page: Path, example: dict[str, str], tmp_path: Path) -> None:
    """Those that name its folders where it is not installed."""
    (tmp_path / "onnxfuse_snake").symlink_to(EXAMPLE / "onnxfuse_snake")
    subprocess.run([sys.executable, EXAMPLE / "vocoder.py", "vocoder.onnx"], cwd=tmp_path, check=True)
    shown = commands(page.read_text(encoding="utf-8"))
    assert shown
    for words in shown:
        environment = {**example, "PYTHONPATH": str(ROOT)} if "--patterns" in words else example
        command = [sys.executable, "-m", "onnxfuse", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        errors = [line for line in done.stderr.splitlines() if not re.match(r"\d+ s: ", line)]  # of progress, if slow
        assert (done.returncode, errors) == (0, []), done.stdout + done.stderr
        assert "snake" in done.stdout


def test_the_python_example_of_its_page_runs(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "packages.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "onnxfuse_snake").symlink_to(EXAMPLE / "onnxfuse_snake")
    onnx.save(example_model(), tmp_path / "vocoder.onnx")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(text.replace("CUDAExecutionProvider", "CPUExecutionProvider"), names)
    assert names["report"].counts["snake"] == 2
    assert find_host("snake") is not None


def test_the_fusion_of_the_example_is_found_in_every_spelling(site: Path, each_case: EachCase) -> None:
    install_example(site)
    (snake,) = (fusion for fusion in catalogue.installed() if fusion.name == "snake")
    for spelling, subtest in each_case(spellings(snake).written):
        with subtest:
            assert_one_node_that_computes_the_same(spelling)


def test_the_fusion_of_the_example_is_part_of_channels_last_regions(site: Path) -> None:
    install_example(site)
    for layout, expected in ("auto", "nhwc"), ("nchw", "nchw"):
        model, report = optimize(example_model(), layout=layout)
        assert (report.counts["snake"], report.verified.status) == (2, "verified")
        attributes = [{each.name: each.s.decode() for each in node.attribute} for node in model.graph.node]
        layouts = [each.get("layout", "nchw") for each in attributes if each.get("fusion") == "snake"]
        assert layouts == [expected] * 2


def test_the_folders_of_the_example_need_no_installation() -> None:
    assert "snake" not in {fusion.name for fusion in catalogue.with_folders(())}
    assert "snake" in {fusion.name for fusion in catalogue.with_folders([PATTERNS])}


def test_a_package_that_is_installed_in_place_may_be_added_as_a_folder(site: Path) -> None:
    install_example(site)
    assert add_kernels(site / "onnxfuse_snake" / "kernels") == ("snake",)
    assert len([each for each in kernel_folders() if each.origin.name != "onnxfuse"]) == 1
    with pytest.raises(KernelError, match=r"has kernels of the fusion 'snake', and so has folder '.*site-packages/"):
        add_kernels(KERNELS)


def test_bench_and_tune_take_both_folders(site: Path, tmp_path: Path) -> None:
    """On the CPU `bench` runs bodies, and `tune` says in one line that there is nothing to tune."""
    path = tmp_path / "vocoder.onnx"
    onnx.save(example_model(), path)
    options = ["--patterns", str(PATTERNS), "--kernels", str(KERNELS), "--shape", "mel:1x20x8", "--provider", "cpu"]
    result = tmp_path / "bench.json"
    done = CliRunner().invoke(main, ["bench", str(path), *options, "--runs", "2", "--no-ops", "--json", str(result)])
    assert done.exit_code == 0 and json.loads(result.read_text())["fused"]["snake"] == 2, done.output
    assert find_host("snake") is not None
    done = CliRunner().invoke(main, ["tune", str(path), *options])
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
