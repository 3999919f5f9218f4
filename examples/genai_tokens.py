"""Measure folders of onnxruntime-genai in turns: prompt tokens a second, and tokens a second after the prompt.

    pip install onnxruntime-genai-cuda
    onnxfuse optimize llama llama_fused --arch sm_90
    python examples/genai_tokens.py llama llama_fused --prompt 1024 --tokens 256

The prompt is of random tokens, and the most likely token follows each time, so that all folders have the same work.
The last line says whether they gave the same tokens: where two tokens are nearly as likely, rounding decides.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai


@dataclass
class Engine:
    """A folder that is loaded, and what was measured so far."""

    folder: Path
    model: genai.Model
    prompt_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def run(self, prompt: list[int], count: int) -> None:
        """Generate `count` tokens after the prompt, and record the seconds."""
        parameters = genai.GeneratorParams(self.model)
        length = len(prompt) + count
        parameters.set_search_options(do_sample=False, max_length=length, min_length=length)
        generator = genai.Generator(self.model, parameters)
        started = time.perf_counter()
        generator.append_tokens(np.array([prompt], np.int32))
        generator.generate_next_token()
        self.prompt_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        self.token_s.append((time.perf_counter() - started) / (count - 1))
        self.tokens = [int(token) for token in generator.get_sequence(0)][len(prompt) :]


def main() -> None:
    """Load all folders, run them in turns, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens that follow, at least 2")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each folder, after one that is not counted")
    words = parser.parse_args()
    config = json.loads((words.folders[0] / "genai_config.json").read_text())
    prompt = np.random.default_rng(0).integers(3, config["model"]["vocab_size"], words.prompt).tolist()
    engines = [Engine(folder, genai.Model(str(folder))) for folder in words.folders]
    for _ in range(1 + words.rounds):
        for engine in engines:
            engine.run(prompt, words.tokens)
    for engine in engines:
        prompt_s, token_s = (statistics.median(each[1:]) for each in (engine.prompt_s, engine.token_s))
        print(f"{engine.folder}: {words.prompt / prompt_s:.0f} prompt tokens/s, {1 / token_s:.1f} tokens/s")
    generated = zip(*(engine.tokens for engine in engines), strict=True)
    agreed = next((number for number, tokens in enumerate(generated) if len(set(tokens)) > 1), words.tokens)
    print(f"the first {agreed} of {words.tokens} tokens are the same")


if __name__ == "__main__":
    main()
