"""The page about Ultralytics works as it stands, and fused models find what the original finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from documents import ROOT, blocks, run_page

import onnxfuse

ultralytics = pytest.importorskip("ultralytics", reason="needs ultralytics")
PAGE = ROOT / "docs" / "ultralytics.md"
IMAGE = np.random.default_rng(1).integers(0, 256, (480, 640, 3), np.uint8)


@pytest.mark.filterwarnings("ignore")  # of torch's exporter, about itself
def test_the_page_and_the_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = next(block.text for block in blocks(PAGE) if block.title == "export_yolo.py")
    exec(compile(program, "export_yolo.py", "exec"), {})
    run_page(PAGE)

    plain, fused = (ultralytics.YOLO(path, task="detect") for path in ("yolov8n.onnx", "fused.onnx"))
    with onnxfuse.all_sessions():
        found = fused(IMAGE, conf=1e-9)[0].boxes.data
    np.testing.assert_allclose(found, plain(IMAGE, conf=1e-9)[0].boxes.data, rtol=1e-5)
    assert {each.how for each in onnxfuse.explain_session(fused.predictor.model.session)} == {"body"}
    assert fused.names == plain.names
