"""Measure how far the outputs of quantized models are from those of the float model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import onnx

from onnxfuse.errors import VerificationError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.quantize.result import BesideReference, OutputError, WeightsResult
from onnxfuse.verify.difference import OutputDifference
from onnxfuse.verify.extent import WITHOUT_EXTREMES
from onnxfuse.verify.reference import Progress, run_original

Stored: TypeAlias = tuple[onnx.ModelProto, Path | None]  # a model, and the folder of its external data


def with_errors(
    quantized: WeightsResult, original: Stored, written: onnx.ModelProto, samples: Sequence[Mapping[str, Array]],
    shapes: Sequence[str], tell: Progress,
) -> WeightsResult:  # fmt: skip
    """Return `quantized` with the largest errors of the written model's outputs against the float model.

    samples  sets of inputs; inputs that a set lacks are random
    """
    found = _errors(original, [(written, original[1])], samples, shapes, tell)
    if isinstance(found, str):
        return replace(quantized, note=f"its errors were not measured: {found}")
    return replace(quantized, errors=found[0])


def beside_reference(
    name: str, reference: Stored, models: tuple[Stored, Stored], given: Mapping[str, Array], shapes: Sequence[str],
    tell: Progress,
) -> BesideReference:  # fmt: skip
    """Return the errors of a quantized model, as given and after optimization, against the outputs of a float model.

    given  some of the inputs; the others are random
    """
    found = _errors(reference, models, [given], shapes, tell)
    if isinstance(found, str):
        return BesideReference(name, note=f"not compared with the reference: {found}")
    before, after = found
    return BesideReference(name, before, after)


def _errors(
    reference: Stored, models: Sequence[Stored], samples: Sequence[Mapping[str, Array]], shapes: Sequence[str],
    tell: Progress,
) -> list[tuple[OutputError, ...]] | str:  # fmt: skip
    """Return the largest errors of each model's outputs against the reference, or why none were measured."""
    found: list[dict[str, list[OutputDifference]]] = [{} for _ in models]
    try:
        for sample in samples:
            float_model = run_original(*reference, sample, tell, shapes, extent=WITHOUT_EXTREMES)
            tell("run the quantized model")
            for (model, folder), differences in zip(models, found, strict=True):
                session = replace(float_model, folder=folder).open(model)
                results = [float_model.run(session, each.feeds) for each in float_model.runs]
                for name in float_model.runs[0].outputs:
                    differences.setdefault(name, []).append(float_model.worst_difference(results, name))
    except VerificationError as error:
        return str(error)
    except Exception as error:  # any exception of onnxruntime
        return first_line(error)
    return [
        tuple(
            OutputError(name, max(each.max_abs for each in some), max(each.max_rel for each in some))
            for name, some in differences.items()
        )
        for differences in found
    ]
