"""`.ci/commit_subjects` names the subjects of commits that are too long or no imperative, and only of newer commits."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / ".ci" / "commit_subjects"


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("commit_subjects", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("commit_subjects", loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "subject",
    ["Fix strided Slice in bodies below opset 10", "Verify: run the reference without optimizations", "Process masks"],
)
def test_an_imperative_of_at_most_72_characters_is_fine(checker: ModuleType, subject: str) -> None:
    assert checker.fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("Fix " + 69 * "x", "has 73 characters; at most 72 are allowed"),
        ("Fix the Resize.", "ends with a period"),
        ("Verify: ran the reference as it is, which fixed NaN", None),
        ("Fixed the Resize", "begins with 'Fixed', which is not an imperative"),
        ("Regions: tests of masks", "begins with 'tests', which is not an imperative"),
        ("Let vectors have a tail", "begins with 'Let', which does not say what is done"),
        ("Verify: ", "says nothing"),
    ],
)
def test_other_subjects_are_named_with_the_reason(checker: ModuleType, subject: str, why: str | None) -> None:
    """A verb in the past that does not end in -ed is not found."""
    assert checker.fault(subject) == why


def test_a_clone_without_the_first_commit_checks_newer_ones(tmp_path: Path) -> None:
    def git(*arguments: str, date: str = "2026-11-30T00:00:00Z") -> None:
        environment = os.environ | {"GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date}
        who = ["-c", "user.name=x", "-c", "user.email=x"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, env=environment, check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "--message", "Long ago this was allowed.", date="2026-11-20T00:00:00Z")
    git("commit", "--allow-empty", "--message", "Fix the Resize")
    assert subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, check=False).returncode == 0
    git("commit", "--allow-empty", "--message", "Fixes the Pad")
    found = subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stdout.endswith("'Fixes the Pad' begins with 'Fixes', which is not an imperative\n")
