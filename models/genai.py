"""Make a small model as onnxruntime-genai's builder writes it, from a Llama with random weights: nothing is downloaded.

Needs torch, transformers, onnx_ir and onnxruntime-genai (made with 2.13.0+cpu, 5.24.0, 1.1.0 and 0.18.0):

    python models/genai.py llama --precision int4 --provider cpu    # a folder that onnxruntime_genai loads
    python models/genai.py --graphs                                 # the graphs in models/exported, without weights

The tokenizer has a token for each byte.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import click
import onnx
import torch
from genai_graphs import GRAPHS, pack
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGES = ("onnxruntime-genai", "transformers", "torch", "onnx-ir", "onnx")
VOCABULARY = 272
SPECIAL = ("<unk>", "<s>", "</s>")
CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


def save_llama(folder: Path) -> None:
    """Save a Llama of random weights and its tokenizer, as transformers does."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<extra{number}>" for number in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[], unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    unknown, begin, end = SPECIAL
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, bos_token=begin, eos_token=end
    ).save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG, initializer_range=0.1)).eval().save_pretrained(folder)


def build(folder: Path, precision: str, provider: str, level: int | None = None) -> None:
    """Write a folder as genai's builder does.  Raises CalledProcessError if the builder fails."""
    with tempfile.TemporaryDirectory() as scratch:
        save_llama(Path(scratch, "llama"))
        words = ["-i", f"{scratch}/llama", "-o", str(folder), "-p", precision, "-e", provider, "-c", f"{scratch}/cache"]
        words += [] if level is None else ["--extra_options", f"accuracy_level={level}"]
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_graphs() -> None:
    """Write the graphs of an int4 and a float16 model, and the versions of the packages that made them."""
    with tempfile.TemporaryDirectory() as scratch:
        found = {}
        for precision in "int4", "fp16":
            build(Path(scratch, precision), precision, "cuda")
            path = Path(scratch, precision, "model.onnx")
            found[f"{precision}.onnx"] = onnx.load(path, load_external_data=False)
        others = {path.name: path.read_bytes() for path in sorted(Path(scratch, "int4").glob("*.json"))}
    index = {"config": CONFIG, "versions": {name: version(name) for name in PACKAGES}}
    GRAPHS.write_bytes(pack(found, index, others))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--precision", type=click.Choice(["int4", "fp16", "fp32", "bf16"]), default="int4", show_default=True)
@click.option("--provider", type=click.Choice(["cpu", "cuda"]), default="cuda", show_default=True)
@click.option("--level", type=int, help="In which precision the CPU multiplies int4: 1 float32, 4 int8.  [default: 4]")
@click.option("--graphs", is_flag=True, help="Write models/exported/genai.tar.xz.")
def main(folder: Path | None, precision: str, provider: str, level: int | None, graphs: bool) -> None:
    """Write FOLDER, a small Llama as onnxruntime-genai's builder writes it."""
    if graphs:
        write_graphs()
    elif folder is None:
        raise click.UsageError("give a folder to write, or --graphs")
    else:
        build(folder, precision, provider, level)


if __name__ == "__main__":
    main()
