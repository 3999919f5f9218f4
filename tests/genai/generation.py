"""Generate tokens from folders by onnxruntime_genai, the most likely token each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

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


def check_same_until_tie(before: Path, after: Path, tie: float) -> None:
    """Fail unless two folders generate the same tokens up to one whose logits differ by less than `tie` deviations."""
    for prompt in PROMPTS:
        old, new = generated(before, prompt), generated(after, prompt)
        end = next((i for i, (one, other) in enumerate(zip(old, new, strict=True)) if one != other), None)
        if end is not None:
            logits = generator(before, old[:end], 1).get_output("logits")[0, -1].astype(np.float64)
            assert logits[old[end]] - logits[new[end]] <= tie * logits.std(), f"no tie at token {end}"
