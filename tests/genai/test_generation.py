"""Test that onnxruntime_genai generates the same tokens from a folder before and after `onnxfuse optimize`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import ROOT
from generation import PROMPTS, TOKENS, check_same_until_tie, generated

import onnxfuse

for package in "onnxruntime_genai", "torch", "transformers", "onnx_ir":
    pytest.importorskip(package, reason="needs the packages of .[genai]")


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a folder for the CPU, as genai's builder does."""

    def build(*options: str) -> Path:
        command = [sys.executable, ROOT / "models" / "genai.py", tmp_path / "a", "--provider", "cpu", *options]
        subprocess.run(command, check=True, capture_output=True)
        return tmp_path / "a"

    return build


@pytest.mark.parametrize("options", ["--precision fp32", "--precision int4 --level 1"])
def test_the_same_tokens_are_generated(options: str, built: Callable[..., Path], tmp_path: Path) -> None:
    folder = built(*options.split())
    (one,) = onnxfuse.optimize_folder(folder, tmp_path / "b")
    assert one.report.fused and one.report.verified.status == "verified"
    for prompt in PROMPTS:
        tokens = generated(folder, prompt)
        assert len(tokens) == len(prompt) + TOKENS and len(set(tokens)) > 20
        assert generated(tmp_path / "b", prompt) == tokens


def test_int8_activations_give_the_same_tokens_until_the_first_tie(built: Callable[..., Path], tmp_path: Path) -> None:
    """A rounding error of float32 may move an activation to the next integer, so that the logits move by 1 %."""
    folder = built("--precision", "int4", "--level", "4")
    onnxfuse.optimize_folder(folder, tmp_path / "b")
    check_same_until_tie(folder, tmp_path / "b", tie=0.01)


def test_text_goes_in_and_comes_out(built: Callable[..., Path], tmp_path: Path) -> None:
    """The tokenizer's files are copied."""
    import onnxruntime_genai as genai

    onnxfuse.optimize_folder(built(), tmp_path / "b", verify=False)
    tokenizer = genai.Tokenizer(genai.Model(str(tmp_path / "b")))
    tokens = tokenizer.encode("Some text.")
    assert len(tokens) == 10 and tokenizer.decode(tokens) == "Some text."


def test_the_example_measures_folders(built: Callable[..., Path], tmp_path: Path) -> None:
    onnxfuse.optimize_folder(folder := built("--precision", "fp32"), tmp_path / "b", verify=False)
    words = [sys.executable, ROOT / "examples" / "genai_tokens.py", folder, tmp_path / "b", "--rounds", "1"]
    done = subprocess.run([*words, "--prompt", "20", "--tokens", "9"], check=True, capture_output=True, text=True)
    *lines, last = done.stdout.splitlines()
    assert (
        all(re.fullmatch(r".*/[ab]: \d+ prompt tokens/s, [\d.]+ tokens/s", line) for line in lines) and len(lines) == 2
    )
    assert last == "the first 9 of 9 tokens are the same"
