"""The facts about the model and the run that a report shows in addition to the fusions."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.ir.file_bytes import weight_bytes
from onnxfuse.report.outline import Rewritten
from onnxfuse.version import __version__


@dataclass(frozen=True)
class FusionNote:
    """The formula of a fusion, in one line, and the file and line of its pattern."""

    formula: str
    source: str


@dataclass(frozen=True)
class Facts:
    """The model's name and producer, the bytes of its weights, versions of packages, the time, and the graphs.

    `graphs` are the main graph and the bodies of its If, Loop and Scan nodes, before and after.  `why_not` maps
    the labels of unfused nodes to the reason why they are not fused.
    """

    name: str
    producer: str
    weights_before: int
    weights_after: int
    at: datetime
    versions: Mapping[str, str]
    fusions: Mapping[str, FusionNote] = field(default_factory=dict)
    why_not: Mapping[str, str] = field(default_factory=dict)
    graphs: tuple[Rewritten, ...] = ()


def gather_facts(
    original: onnx.ModelProto,
    written: onnx.ModelProto,
    path: str | None,
    fusions: Iterable[Fusion],
    graphs: Iterable[Rewritten],
    why_not: Mapping[str, str],
) -> Facts:
    """Return the facts about a run that fused `original`; the present time becomes the time of the run."""
    name = Path(path).name if path else original.graph.name
    producer = " ".join(filter(None, (original.producer_name, original.producer_version)))
    notes = {one.name: _note(one) for one in fusions}
    now = datetime.now(UTC).replace(microsecond=0)
    return Facts(
        name, producer, weight_bytes(original), weight_bytes(written), now, _versions(),
        notes, why_not, tuple(graphs),
    )  # fmt: skip


@functools.cache
def _note(fusion: Fusion) -> FusionNote:
    return FusionNote(fusion.doc.partition("\n")[0], str(fusion.span))


@functools.cache
def _versions() -> Mapping[str, str]:
    """Return the versions of onnxfuse, and of the installed packages that it works with."""
    found = {"onnxfuse": __version__}
    for package in "onnx", "onnxruntime", "onnxruntime-gpu":
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
