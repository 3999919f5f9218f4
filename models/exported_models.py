"""Read and write models/exported: a compressed archive for each architecture that export.py exports, and their index.

The variants of an architecture share their random weights, which one archive of them stores once.
"""

from __future__ import annotations

import functools
import io
import json
import lzma
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

EXPORTED = Path(__file__).parent / "exported"
SUFFIX = ".tar.xz"  # behind the name of the architecture: bert.tar.xz
# Most of the content is floats of four bytes: each byte is coded by its position in four, not by the byte before it.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 2, "pb": 2}]


def read_index() -> dict[str, dict[str, Any]]:
    """Return what the index says of each model, by its name, such as bert_sdpa_dynamo_fp16.onnx."""
    models: dict[str, dict[str, Any]] = json.loads((EXPORTED / "index.json").read_text(encoding="utf-8"))["models"]
    return models


def read(name: str) -> bytes:
    """Return the model of this name as export.py wrote it."""
    return variants(read_index()[name]["architecture"])[name]


@functools.lru_cache(maxsize=4)
def variants(architecture: str) -> Mapping[str, bytes]:
    """Return the models of an architecture by name; those of a few architectures are kept, at most 0.6 MB of each."""
    return decompress((EXPORTED / f"{architecture}{SUFFIX}").read_bytes())


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


def compress(models: Mapping[str, bytes]) -> bytes:
    """Return an archive of models by name: the same bytes for the same models, without times and owners."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(models):
            member = tarfile.TarInfo(name)  # of time 0 and user 0
            member.size = len(models[name])
            archive.addfile(member, io.BytesIO(models[name]))
    return lzma.compress(content.getvalue(), check=lzma.CHECK_CRC32, filters=FILTERS)


def decompress(content: bytes) -> dict[str, bytes]:
    """Return the models of an archive by name."""
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(content)), mode="r:") as archive:
        files = ((member.name, archive.extractfile(member)) for member in archive)
        return {name: file.read() for name, file in files if file}
