"""Test that onnxruntime_genai generates the same tokens from a folder before and after `onnxfuse optimize`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import ROOT

import onnxfuse

for package in "onnxruntime_genai", "torch", "transformers", "onnx_ir":
    pytest.importorskip(package, reason="needs the packages of .[genai]")

TOKENS = 1000
PROMPTS = ([1, 17, 40, 200, 9], [1, 250, 31])


def generator(folder: Path, tokens: list[int], count: int) -> Any:
    """Return a generator of `count` tokens that has read these tokens."""
    import onnxruntime_genai as genai

    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    length = len(tokens) + count
    parameters.set_search_options(do_sample=False, max_length=length, min_length=length)
    result = genai.Generator(model, parameters)
    result.append_tokens(np.array([tokens], np.int32))
    return result


def generated(folder: Path, prompt: list[int]) -> list[int]:
    """Return the prompt and the tokens that follow, the most likely one each time."""
    source = generator(folder, prompt, TOKENS)
    while not source.is_done():
        source.generate_next_token()
    return [int(token) for token in source.get_sequence(0)]


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
    for prompt in PROMPTS:
        pairs = enumerate(
            zip(before := generated(folder, prompt), after := generated(tmp_path / "b", prompt), strict=True)
        )
        end = next((i for i, (old, new) in pairs if old != new), None)
        if end is not None:
            logits = generator(folder, before[:end], 1).get_output("logits")[0, -1]
            assert logits[before[end]] - logits[after[end]] <= 0.01 * logits.std(), "no tie"


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
