"""The page about RapidOCR works as it stands, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import ROOT, run_page

pytest.importorskip("rapidocr", reason="needs rapidocr")


@pytest.mark.filterwarnings("ignore")  # of RapidOCR's packages
def test_the_page_works_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(ROOT / "docs" / "rapidocr.md") == []
