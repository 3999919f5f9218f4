"""The programs of benchmarks/ and models/, as far as a machine without a GPU and without PyTorch can tell."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from other_gpus import OTHER_GPUS

from onnxfuse.runtime.plan import Kernel, Launch, Plan

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").iterdir())
PROGRAMS = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("models/*.py"), ROOT / "tests" / "sanitize.py"])
WITH_OPTIONS = (
    "attention",
    "attention_forms",
    "compile_seconds",
    "conv",
    "cpp_start",
    "cpu",
    "gates",
    "gemm",
    "host_seconds",
    "kernels",
    "memory",
    "model_kernels",
    "models",
    "other_gpus",
    "regions",
    "serving",
    "tilings",
    "tool",
)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_help_needs_no_gpu(name: str) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_is_imported_from_onnxfuse_exists(path: Path) -> None:
    lacking = []
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("onnxfuse"):
            module = str(statement.module)
            lacking += [f"{module}.{each.name}" for each in statement.names if not has(module, each.name)]
    assert not lacking, f"{path.name} imports what does not exist: {', '.join(lacking)}"


def test_the_benchmark_of_other_gpus_has_those_of_the_tests() -> None:
    text = (ROOT / "benchmarks" / "other_gpus.py").read_text(encoding="utf-8")
    for each in OTHER_GPUS:
        assert f'Device("{each.name}", {each.arch}, {each.multiprocessors}, {each.shared_per_block})' in text
    assert text.count('": Device("') == len(OTHER_GPUS)


def benchmark(name: str) -> ModuleType:
    """Return a module of benchmarks/, whose folder is not among those that modules are imported from."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_of_a_result_is_a_line() -> None:
    rows = ({"us": 1.23456789, "shape": (1, 2)}, {"us": math.inf, "shape": [3], "best": "a"})
    result = {"versions": {"cuda": "13.0"}, "rows": rows, "models": {"a": {"n": [1]}}}
    module = benchmark("result_text")
    text = module.result_text(result)
    assert text.splitlines() == [
        "{",
        '"versions": {"cuda":"13.0"},',
        '"rows": {"columns": ["us","shape","best"], "rows": [',
        "[1.2346,[1,2],null],",
        '["inf",[3],"a"]',
        "]},",
        '"models": {',
        '"a":{"n":[1]}',
        "}",
        "}",
    ]
    rows = [{"us": 1.2346, "shape": [1, 2]}, {"us": "inf", "shape": [3], "best": "a"}]
    assert module.read_result(text) == {**result, "rows": rows}


def test_named_objects_of_equal_keys_are_a_table() -> None:
    result = {"models": {"a": {"ms": 1, "runs": 2}, "b": {"runs": 4, "ms": None}}, "others": {"a": {"x": 1}, "b": {}}}
    module = benchmark("result_text")
    text = module.result_text(result)
    assert text.splitlines() == [
        "{",
        '"models": {"columns": ["ms","runs"], "rows": {',
        '"a":[1,2],',
        '"b":[null,4]',
        "}},",
        '"others": {',
        '"a":{"x":1},',
        '"b":{}',
        "}",
        "}",
    ]
    assert module.read_result(text) == result


def test_tables_within_a_result_are_written_by_their_columns() -> None:
    visits = [{"batch": 1, "at": [{"ms": 0.5}, {}]}, {"batch": 2}]
    result = {"parts": {"visits": {"date": "today", "visits": visits}}, "pairs": [[{"a": 1}], []], "empty": []}
    module = benchmark("result_text")
    text = module.result_text(result)
    assert text.splitlines() == [
        "{",
        '"parts": {',
        '"visits":{"date":"today","visits":{"columns":["batch","at"],"rows":'
        '[[1,{"columns":["ms"],"rows":[[0.5],[null]]}],[2,null]]}}',
        "},",
        '"pairs": [{"columns":["a"],"rows":[[1]]},[]],',
        '"empty": []',
        "}",
    ]
    assert module.read_result(text) == result


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_is_laid_out_as_benchmarks_write_it(path: Path) -> None:
    text, module = path.read_text(encoding="utf-8"), benchmark("result_text")
    assert text == module.result_text(module.read_result(text))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_page_names_a_result(path: Path) -> None:
    """A result that no page links to is deleted; git keeps it."""
    pages = (page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert any(f"benchmarks/results/{path.name})" in page for page in pages)


def test_a_plan_is_named_by_the_macros_in_which_plans_differ() -> None:
    kernels = [Kernel("softmax", "softmax", {"T": "f16", "THREADS": threads}) for threads in (128, 256)]
    launches = [Launch(kernel, (1, 1, 1), (128, 1, 1), ()) for kernel in kernels]
    plans = [Plan((), (launch,)) for launch in launches] + [Plan((), (launches[0], launches[0]))]
    assert benchmark("plan_names").names_of(plans) == [
        "0: softmax THREADS=128",
        "1: softmax THREADS=256",
        "2: softmax THREADS=128, softmax THREADS=128",
    ]


def has(module: str, name: str) -> bool:
    """Return whether a module exists and has an attribute or a submodule of this name."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ImportError:
        return False
