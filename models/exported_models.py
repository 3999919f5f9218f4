"""Read and write models/exported: a compressed file of each model that export.py writes, and their index."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path
from typing import Any

import onnx

EXPORTED = Path(__file__).parent / "exported"
SUFFIX = ".xz"  # behind the name of the model: bert_sdpa_dynamo_fp16.onnx.xz


def read_index() -> dict[str, dict[str, Any]]:
    """Return what the index says of each model, by its name, such as bert_sdpa_dynamo_fp16.onnx."""
    models: dict[str, dict[str, Any]] = json.loads((EXPORTED / "index.json").read_text(encoding="utf-8"))["models"]
    return models


def read(name: str) -> bytes:
    """Return the model of this name as export.py wrote it."""
    return lzma.decompress((EXPORTED / f"{name}{SUFFIX}").read_bytes())


def load_exported(name: str) -> onnx.ModelProto:
    """Return the model of this name."""
    return onnx.load_from_string(read(name))


def unpack(name: str, folder: Path) -> Path:
    """Return the path of the model in this folder; it is written there, in one step, if it is not there yet."""
    path = folder / name
    if not path.exists():
        draft = folder / f"{name}.{os.getpid()}"
        draft.write_bytes(read(name))
        draft.replace(path)
    return path


def compress(content: bytes) -> bytes:
    """Return the same bytes for the same content: the format holds neither a name nor a time."""
    return lzma.compress(content, check=lzma.CHECK_CRC32, preset=9 | lzma.PRESET_EXTREME)
