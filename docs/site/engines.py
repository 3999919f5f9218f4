"""The times of whole models by all tools that were measured beside each other: the table of docs/comparison.md."""

from __future__ import annotations

from typing import Final

from gains import three_digits
from results import result, rows

ENGINES: Final = {  # as benchmarks/peers.py names them, all of them without a CUDA graph
    "ort": "onnxruntime", "ort-transformers": "its transformers optimizer", "onnxscript": "onnxscript's fusions",
    "torch-eager": "PyTorch", "torch-compile": "torch.compile", "onnxfuse": "onnxfuse",
}  # fmt: skip


def engine_table() -> str:
    """Return a table of Markdown with a row for each model: milliseconds, "fails", or nothing for what did not run."""
    cells = {(row["model"], row["peer"]): _cell(row) for row in rows("models-h200", "results")}
    models = [case["name"] for case in result("models-h200")["cases"]]
    lines = ["| model | " + " | ".join(ENGINES.values()) + " |", "|---|" + "---:|" * len(ENGINES)]
    lines += [
        f"| {model} | " + " | ".join(cells.get((model, engine), "") for engine in ENGINES) + " |" for model in models
    ]
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, object]) -> str:
    time = row.get("median_ms")
    return three_digits(time) if isinstance(time, float) and row["agrees"] else "fails"


if __name__ == "__main__":
    print(engine_table(), end="")
