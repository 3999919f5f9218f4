"""The page about Whisper works as it stands, and fused models generate the tokens of the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from documents import ROOT, blocks, run_page

optimum = pytest.importorskip("optimum.onnxruntime", reason="needs optimum-onnx, torch and transformers")
onnx_asr = pytest.importorskip("onnx_asr", reason="needs onnx-asr")

PAGE = ROOT / "docs" / "whisper.md"
SOUND = np.random.default_rng(1).standard_normal(16000).astype(np.float32)


@pytest.mark.filterwarnings("ignore")  # of torch's exporter, about itself
def test_the_page_and_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from onnxfuse.optimum import from_pretrained, optimize_folder

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    program = next(block.text for block in blocks(PAGE) if block.title == "export_whisper.py")
    exec(compile(program, "export_whisper.py", "exec"), {})
    run_page(PAGE)

    optimize_folder("whisper_onnx", "half", dtype="float16")
    plain = optimum.ORTModelForSpeechSeq2Seq.from_pretrained("whisper_onnx")
    features = torch.randn(2, 80, 3000)
    for folder in "whisper_fused", "half":
        model = from_pretrained(optimum.ORTModelForSpeechSeq2Seq, folder, provider="CPUExecutionProvider")
        for more in {"num_beams": 1}, {"num_beams": 3}:
            limits = {"max_new_tokens": 12, "do_sample": False, **more}
            assert torch.equal(model.generate(features, **limits), plain.generate(features, **limits))
    plain, fused = (onnx_asr.load_model("whisper", folder) for folder in ("whisper_onnx", "whisper_fused"))
    assert fused.recognize(SOUND, language="en") == plain.recognize(SOUND, language="en")
