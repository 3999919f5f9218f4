"""Fused models in the classes of Hugging Face Optimum, such as `ORTModelForCausalLM`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from onnxfuse.errors import OnnxfuseError, UsageError
from onnxfuse.ir.plain_files import new_folder
from onnxfuse.ir.read import external_files
from onnxfuse.ir.save import save
from onnxfuse.optimizer import optimize
from onnxfuse.report.report import Report
from onnxfuse.sessions_of_packages import all_sessions

ORTModel = TypeVar("ORTModel")


def optimize_folder(
    folder: str | os.PathLike[str], target: str | os.PathLike[str], **options: Any
) -> dict[str, Report]:
    """Optimize all models of a folder that Optimum exported, and copy its other files, such as configurations.

    folder   the folder, which is not changed
    target   the folder to write, which must not exist
    options  arguments of `onnxfuse.optimize`, for every model, such as dtype="float16"

    Returns the report of each model, by its path in the folder.  Raises UsageError if the folder has no models or the
    target exists, the errors of `onnxfuse.optimize`, and OnnxfuseError if writing fails.
    """
    source, out = Path(folder), Path(target)
    models = sorted(source.rglob("*.onnx"))
    if not models:
        raise UsageError(f"'{source}' is not a folder with ONNX models; `optimum-cli export onnx` writes one")
    if out.exists() or out.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"'{out}' is there already, or in the folder to read; give another folder")
    left_out = {path.resolve() for model in models for path in (model, *external_files(model))}
    reports = {}
    try:
        with new_folder(out) as part:
            for path in (each for each in source.rglob("*") if each.is_file() and each.resolve() not in left_out):
                copy = part / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
            for path in models:
                copy = part / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                model, report = optimize(path, **options)
                save(model, copy, folder=report.folder)
                reports[path.relative_to(source).as_posix()] = report.written(copy)
    except OSError as error:
        raise OnnxfuseError(f"cannot write '{out}': {error.strerror or error}; choose another folder") from error
    return reports


def from_pretrained(
    model_class: type[ORTModel],
    folder: str | os.PathLike[str],
    *,
    provider: str = "CUDAExecutionProvider",
    kernels: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> ORTModel:
    """Open fused models by a class of Optimum; their fused nodes run as kernels if `provider` runs on a GPU.

    folder     the folder, which `optimize_folder` wrote
    kernels    arguments of `onnxfuse.all_sessions`, such as wait=True
    arguments  other arguments of `model_class.from_pretrained`

    Optimum takes no sessions from outside for most classes, so `onnxfuse.all_sessions` opens them.
    `onnxfuse.explain_session(model.session)` says how nodes run.

    Raises the errors of `onnxfuse.InferenceSession` and of Optimum.
    """
    with all_sessions(**(kernels or {})):
        opened: ORTModel = model_class.from_pretrained(  # type: ignore[attr-defined]
            folder, provider=provider, **arguments
        )
    return opened
