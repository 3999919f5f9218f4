"""Optimize the models of a folder of onnxruntime-genai, and write a folder that genai loads like the original one.

    OUT/genai_config.json       names the library in `session_options` of the models that have kernels
    OUT/<model>.onnx            the fused model
    OUT/libonnxfuse.so          the native library, if the models run on CUDA and a GPU is known
    OUT/libonnxfuse.so.plans    its plan file (compiled kernels), which the library finds next to itself

A second model with kernels has its own library and plan file, libonnxfuse.2.so and libonnxfuse.2.so.plans, because each
session registers the operators of one plan file.  All other files are copied.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import onnx

from onnxfuse.compile.compile_file import Compiled, CompileSettings, compile_file
from onnxfuse.errors import OnnxfuseError, UsageError
from onnxfuse.genai.folder import CONFIG, Folder, NamedModel, copy_others, read_folder
from onnxfuse.ir.domain import is_fused
from onnxfuse.ir.plain_files import new_folder
from onnxfuse.ir.protos import nodes
from onnxfuse.ir.save import save
from onnxfuse.optimizer import optimize
from onnxfuse.quantize.weight_readers import NothingToQuantizeError
from onnxfuse.report.report import Report
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.gpu_kinds import named_gpus
from onnxfuse.runtime.plan_file import PLANS_SUFFIX
from onnxfuse.steps import Progress

OF_ONE_MODEL: Final = ("calibrate", "inputs", "plan", "shapes")  # arguments of `optimize` that fit one model


@dataclass(frozen=True)
class OptimizedModel:
    """A model of a folder that was optimized.

    `compiled` is the result of compiling its kernels.  If it is None, each fused node runs as its body (the ONNX
    function that it calls), and `why_bodies` says why.
    """

    name: str
    report: Report
    compiled: Compiled | None = None
    why_bodies: str = ""

    def moved_to(self, folder: Path) -> OptimizedModel:
        """Return self with the paths of the model and its plan file in the folder."""
        compiled = None if self.compiled is None else replace(self.compiled, path=folder / self.compiled.path.name)
        return replace(self, report=self.report.written(folder / self.name), compiled=compiled)


def optimize_folder(
    folder: str | Path, target: str | Path | None, *, archs: Sequence[str] = (), gpus: Sequence[str] = (),
    overwrite: bool = False, progress: Progress = lambda stage, done, of: None, **options: Any,
) -> tuple[OptimizedModel, ...]:  # fmt: skip
    """Optimize the models of a folder that onnxruntime-genai's builder or Olive wrote.

    folder    the folder with genai_config.json, which is not changed
    target    the folder to write, which onnxruntime_genai loads like the original; None writes nothing
    archs     the compute capabilities to compile kernels for, such as "sm_90"
    gpus      the names of GPUs to compile kernels for; without both, the GPUs of this machine
    overwrite whether an existing `target` is replaced, as a whole, if it is a folder of genai
    progress  called with the stage, the amount of it that is done, and the total amount
    options   arguments of `optimize`, for every model; `calibrate`, `inputs`, `plan` and `shapes` are allowed only if
              the folder has one model; with `weights`, a model without weights to quantize keeps its weights

    Kernels are compiled for the models that run on CUDA; their configuration then names onnxfuse's library.  Returns
    each model's name, report and kernels.  Raises UsageError for a folder without models or without weights to
    quantize, and for a target that exists or contains the folder; ModelError for names that lead outside the folder,
    and for models that `optimize` refuses; OnnxfuseError if writing fails.
    """
    source, out = Path(folder), None if target is None else Path(target)
    found = read_folder(source)
    given = [name for name in OF_ONE_MODEL if options.get(name)]
    if len(found.models) > 1 and given:
        names = ", ".join(f"'{each.name}'" for each in found.models)
        raise UsageError(f"'{source}' has {len(found.models)} models, {names}; {given[0]} is for folders with one")
    if archs or gpus:
        named_gpus(archs, gpus, ())
    if out is None:
        dry = tuple(OptimizedModel(each.name, _fused(found, each, progress, options)[1]) for each in found.models)
        _require_quantized(source, dry)
        return dry
    _check_target(source, out, overwrite)
    try:
        with new_folder(out) as part:
            copy_others(found, part)
            library = _Library(part, CompileSettings(archs, gpus), progress)
            made = [_optimized(found, each, library, options) for each in found.models]
            _require_quantized(source, made)
            found.name_libraries(
                {one.name: one.compiled.path.name.removesuffix(PLANS_SUFFIX) for one in made if one.compiled}
            )
            (part / CONFIG).write_text(json.dumps(found.config, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise OnnxfuseError(f"cannot write '{out}': {error.strerror or error}; choose another folder") from error
    return tuple(each.moved_to(out) for each in made)


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raise UsageError if one of both folders contains the other, or if `target` exists and must not be replaced."""
    first, second = source.resolve(), target.resolve()
    if first.is_relative_to(second) or second.is_relative_to(first):
        raise UsageError(f"'{target}' and '{source}', the folder to read, contain each other; give another folder")
    if not target.parent.is_dir():
        raise UsageError(f"cannot write '{target}': the folder '{target.parent}' does not exist; create it first")
    if target.exists() and not (target.is_dir() and ((target / CONFIG).is_file() or not any(target.iterdir()))):
        raise UsageError(f"'{target}' is not a folder of genai, and is not replaced; give another folder")
    if target.exists() and not overwrite:
        raise UsageError(f"'{target}' is there already; give another folder, or --overwrite to replace it")


@dataclass(frozen=True)
class _Library:
    """The folder to write, and the settings with which kernels are compiled into it."""

    folder: Path
    settings: CompileSettings
    progress: Progress

    def _unused_name(self) -> str:
        """Return a library name that no file in the folder has yet."""
        first, number = native.LIBRARY_NAME, 1
        while (self.folder / (name := first if number == 1 else first.replace(".", f".{number}.", 1))).exists():
            number += 1
        return name

    def add(self, model: NamedModel, file: Path) -> Compiled:
        """Compile a fused model's kernels, and add the native library and the plan file to the folder.

        Raises OnnxfuseError if there are no kernels, for example UsageError if no GPU is known.
        """
        library = native.library_path()
        if library is None:
            raise native.NativeError(f"the native library of onnxfuse is missing; {native.HINT}")
        cuda = model.cuda or {}
        settings = replace(self.settings, options={"use_tf32": cuda["use_tf32"]} if "use_tf32" in cuda else {})
        name = self._unused_name()
        compiled = compile_file(file, self.folder / f"{name}{PLANS_SUFFIX}", settings, self.progress)
        shutil.copyfile(library, self.folder / name)
        return compiled


def _fused(
    folder: Folder, model: NamedModel, progress: Progress, options: dict[str, Any]
) -> tuple[onnx.ModelProto, Report]:
    """Fuse a model of a folder, and return it with its report; a model without weights to quantize keeps its weights.

    Raises NothingToQuantizeError for such a model if it is the only one of the folder.
    """
    try:
        return optimize(folder.file(model), progress=progress, **options)
    except NothingToQuantizeError as error:
        if len(folder.models) == 1:
            raise
        made, report = optimize(folder.file(model), progress=progress, **options | {"weights": None})
        return made, replace(report, weights=error.result)


def _require_quantized(source: Path, made: Sequence[OptimizedModel]) -> None:
    """Raise UsageError if weights were to be quantized, but no weight of any model was."""
    if all(each.report.weights is not None and not each.report.weights.nodes for each in made):
        raise UsageError(f"no model of '{source}' has a MatMul whose weight can be quantized")


def _optimized(folder: Folder, model: NamedModel, library: _Library, options: dict[str, Any]) -> OptimizedModel:
    """Fuse a model of a folder and write it; if it runs on CUDA, also write its library and plan file."""
    file = library.folder / model.name
    file.parent.mkdir(parents=True, exist_ok=True)
    fused, report = _fused(folder, model, library.progress, options)
    save(fused, file, folder=report.folder)
    result = OptimizedModel(model.name, report)
    if model.cuda is None:
        return replace(result, why_bodies="the model does not run on CUDA")
    if model.library:
        return replace(result, why_bodies=f"the configuration names a library of its own, '{model.library}'")
    if not any(map(is_fused, nodes(fused.graph))):  # the report does not count nodes that an earlier run fused
        return replace(result, why_bodies="the model has no fused nodes")
    try:
        return replace(result, compiled=library.add(model, file))
    except OnnxfuseError as error:
        no_kernel = type(error) is OnnxfuseError  # a subclass means a missing GPU, compiler or library
        if (library.settings.archs or library.settings.gpus) and not no_kernel:
            raise
        return replace(result, why_bodies=str(error))
