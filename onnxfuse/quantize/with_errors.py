"""Measure how far the outputs of a quantized model are from those of the float model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx

from onnxfuse.errors import VerificationError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.quantize.result import WeightError, WeightsResult
from onnxfuse.verify.difference import OutputDifference
from onnxfuse.verify.reference import Progress, run_original


def with_errors(
    quantized: WeightsResult, original: tuple[onnx.ModelProto, Path | None], written: onnx.ModelProto,
    samples: Sequence[Mapping[str, Array]], shapes: Sequence[str], tell: Progress,
) -> WeightsResult:  # fmt: skip
    """Return the facts with the largest errors of the written model's outputs beside the float model.

    samples  sets of inputs; those that a set does not have are drawn
    """
    model, folder = original
    found: dict[str, list[OutputDifference]] = {}
    try:
        for sample in samples:
            reference = run_original(model, folder, sample, tell, shapes, extremes=False)
            tell("run the quantized model")
            session = reference.open(written)
            results = [reference.run(session, each.feeds) for each in reference.runs]
            for name in reference.runs[0].outputs:
                found.setdefault(name, []).append(reference.worst_difference(results, name))
    except VerificationError as error:
        return replace(quantized, note=f"its errors were not measured: {error}")
    except Exception as error:  # any exception of onnxruntime
        return replace(quantized, note=f"its errors were not measured: {first_line(error)}")
    errors = (
        WeightError(name, max(each.max_abs for each in some), max(each.max_rel for each in some))
        for name, some in found.items()
    )
    return replace(quantized, errors=tuple(errors))
