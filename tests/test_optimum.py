"""Fused models in Optimum's classes: the page, a decoder with its cache, and a model of three files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, blocks, run_page

from onnxfuse import UsageError

models = pytest.importorskip("optimum.onnxruntime", reason="needs optimum-onnx, torch and transformers")
from onnxfuse.optimum import from_pretrained, optimize_folder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's exporter, about itself
CPU = "CPUExecutionProvider"
SMALL = {"vocab_size": 20, "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_the_page_works_as_it_stands() -> None:
    page = ROOT / "docs" / "optimum.md"
    program = next(block.text for block in blocks(page) if block.title == "export_bert.py")
    exec(compile(program, "export_bert.py", "exec"), {})
    run_page(page)


def generated(model_class: Any, given: Any) -> None:
    """Export a model, fuse it, and generate the same tokens by both."""
    import torch

    given.save_pretrained("given")
    model_class.from_pretrained("given", export=True).save_pretrained("exported")
    reports = optimize_folder("exported", "fused")
    assert all(each.verified.status == "verified" for each in reports.values())
    opened = from_pretrained(model_class, "fused", provider=CPU, kernels={"wait": True})
    words, limit = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 6, "do_sample": False}
    plain = model_class.from_pretrained("exported")
    assert opened.generate(words, **limit).tolist() == plain.generate(words, **limit).tolist()


def test_a_decoder_generates_the_same_tokens() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SMALL, intermediate_size=128, num_key_value_heads=2)
    generated(models.ORTModelForCausalLM, LlamaForCausalLM(config))


def test_a_model_of_three_files_generates_the_same_tokens() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=20, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    generated(models.ORTModelForSeq2SeqLM, T5ForConditionalGeneration(config))


def test_folders_that_are_refused() -> None:
    Path("empty").mkdir()
    with pytest.raises(UsageError, match="'empty' is not a folder with ONNX models"):
        optimize_folder("empty", "fused")
    Path("empty/model.onnx").touch()
    with pytest.raises(UsageError, match="give another folder"):
        optimize_folder("empty", "empty/fused")
