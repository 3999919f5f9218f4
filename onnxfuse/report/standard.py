"""The part of a report about the ONNX operators that replace fused nodes (`--emit standard`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from onnxfuse.printing import escape


@dataclass(frozen=True)
class WrittenAs:
    """The composite ONNX operator that was written for a fused node, or the reason why there is none."""

    fusion: str
    node: str
    where: str
    operators: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class Standard:
    """The operators written in place of the fused nodes, and the opset of the model."""

    opset: int
    written: tuple[WrittenAs, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of nodes by operator."""
        return dict(sorted(Counter(op for one in self.written for op in one.operators).items()))

    def to_json(self) -> dict[str, Any]:
        """Return the counts and reasons as JSON values."""
        written = [{**asdict(one), "operators": list(one.operators)} for one in self.written]
        return {"opset": self.opset, "counts": self.counts, "written": written}


def standard_lines(standard: Standard | None) -> list[str]:
    """Return a line with the ONNX operators written for fused nodes, and lines that say why others have none."""
    if standard is None:
        return []
    listed = ", ".join(f"{count} {op}" for op, count in standard.counts.items())
    reasons = Counter((one.fusion, one.reason) for one in standard.written if one.reason).most_common()
    plain = [f"In plain operators: {count} {fusion}, because {escape(why)}" for (fusion, why), count in reasons]
    return [f"Standard operators, in opset {standard.opset}: {listed or 'none'}", *plain]
