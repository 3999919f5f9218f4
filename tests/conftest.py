"""What several test files share: the exported models, and each of them optimized once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest

EXPORTED = Path(__file__).parent.parent / "models" / "exported"


@pytest.fixture(scope="session", autouse=True)
def no_verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was tuned on this machine must not decide what tests find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path_factory.mktemp("verdicts")))
        yield


@dataclass(frozen=True)
class Optimized:
    """An exported model, what optimizing made of it, and the report as plain data."""

    original: Path
    path: Path
    report: dict[str, Any]


@pytest.fixture(scope="session")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Optimized]:
    """Optimizes models/exported/<name>; the processes of one test run share the results."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "optimized"
    folder.mkdir(exist_ok=True)

    def optimize_once(name: str) -> Optimized:
        path, report = folder / name, folder / f"{name}.json"
        if not report.exists():
            from onnxfuse import optimize

            model, result = optimize(EXPORTED / name, verify=False)
            onnx.save(model, path)
            draft = folder / f"{name}.{os.getpid()}"
            draft.write_text(json.dumps(result.to_json()), encoding="utf-8")
            draft.replace(report)
        return Optimized(EXPORTED / name, path, json.loads(report.read_text(encoding="utf-8")))

    return optimize_once
