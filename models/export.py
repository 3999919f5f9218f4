"""Export public architectures with random weights, tiny or in full size, and verify every file that is written.

Needs torch, transformers, onnxscript, onnx and onnxruntime:

    python models/export.py                               # everything, tiny, into the archive in models/exported
    python models/export.py bert 'llama_*_dynamo_fp32'    # some of it
    python models/export.py bert --full --out /data/full  # the public sizes, for benchmarks
"""

from __future__ import annotations

import fnmatch
import json
import logging
import platform
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import onnx
import onnxruntime
import onnxscript
import torch
import transformers
from architecture import Input
from exported_models import ARCHIVE, EXPORTED, INDEX, compress, decompress, draw_parameters, files_of
from exporters import SEED, Job, as_tuple, build_model, export_graph, number_values, strip_traces
from onnxruntime.transformers.float16 import convert_float_to_float16
from table import ARCHITECTURES
from torch import nn

HALF_BY_TORCH, HALF_BY_CONVERTER = "model.half()", "onnxruntime.transformers.float16 on the fp32 export"
# Relative to the largest output. fp16 carries 11 bits, and the graphs round in another order than torch does.
TOLERANCE = {"fp32": 1e-4, "fp16": 3e-2}


@dataclass(frozen=True)
class Result:
    """The result of a job: a verified file and its index entry, and the attempts that failed before it."""

    proto: onnx.ModelProto | None
    entry: dict | None
    invalid: dict[str, str] = field(default_factory=dict)


def verify(job: Job, model: nn.Module, proto: onnx.ModelProto) -> float:
    """Check the file and run it at both sizes.

    Returns the largest absolute difference from torch, relative to the largest output.
    Raises ValueError beyond the tolerance, and whatever onnx and onnxruntime raise for an invalid file.
    """
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    torch.manual_seed(SEED + 1)
    errors = [compare(job, model, session, sizes) for sizes in job.verified_sizes]
    if not max(errors) <= TOLERANCE[job.variant.dtype]:
        raise ValueError(f"relative error {max(errors):.1e}, required {TOLERANCE[job.variant.dtype]:.0e}")
    return max(errors)


def compare(job: Job, model: nn.Module, session: onnxruntime.InferenceSession, sizes: Mapping[str, int]) -> float:
    """Return the largest difference between onnxruntime and torch at these sizes, relative to the largest output."""
    arguments = job.arguments(sizes, job.variant.dtype)
    feeds = {each.name: arguments[each.arg or each.name].numpy() for each in job.inputs}
    with torch.no_grad():
        expected = as_tuple(model(**arguments))
    actual = session.run(None, {each.name: feeds[each.name] for each in session.get_inputs()})
    if [tuple(value.shape) for value in expected] != [value.shape for value in actual]:
        raise ValueError(f"shapes {[value.shape for value in actual]}, required {[v.shape for v in expected]}")
    wanted = [value.double().numpy() for value in expected]
    return max(float(np.abs(a - w).max() / np.abs(w).max()) for a, w in zip(actual, wanted, strict=True))


def export_verified(job: Job) -> Result:
    """Export and verify; if torch writes no valid half-precision file, convert the fp32 export instead."""
    model = build_model(job)
    half = HALF_BY_TORCH if job.variant.dtype == "fp16" else None
    invalid: dict[str, str] = {}
    try:
        return Result(*export_once(job, model, model, half))
    except Exception as error:  # every failure of an exporter or a runtime is a result here
        invalid[half or "as it is"] = first_line(error)
    try:
        if job.variant.exporter == "ts" and half:
            return Result(*export_once(job, model, model.float(), HALF_BY_CONVERTER), invalid)
    except Exception as error:
        invalid[HALF_BY_CONVERTER] = first_line(error)
    return Result(None, None, invalid)


def export_once(job: Job, model: nn.Module, exported: nn.Module, half: str | None) -> tuple[onnx.ModelProto, dict]:
    """Make one attempt; `model` and `exported` are one module, whose present precision decides what is exported."""
    converting = half == HALF_BY_CONVERTER
    proto = export_graph(job, exported, "fp32" if converting else job.variant.dtype)
    if converting:
        proto = convert_float_to_float16(proto)
        proto.graph.ClearField("value_info")  # torch writes none here; the converter adds what onnx infers
        model.half()
    strip_traces(proto)
    if job.variant.numbered_names:
        number_values(proto)
    for key, value in (job.architecture.metadata or {}).items():
        proto.metadata_props.add(key=key, value=value)
    return proto, describe(job, proto, verify(job, model, proto), half)


def first_line(error: Exception) -> str:
    """Return the reason of an error in one line; torch.export hides it in the cause."""
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def describe(job: Job, proto: onnx.ModelProto, error: float, half: str | None) -> dict:
    """Return the index entry of a file: everything needed to feed it and to know how many blocks it holds."""
    variant = job.variant
    opset = next(each.version for each in proto.opset_import if each.domain == "")
    entry = {
        "architecture": job.architecture.name, "exporter": variant.exporter, "opset": opset,
        "attention": variant.attention or None, "dtype": variant.dtype, "half_precision_by": half,
        "batch_norm_kept": variant.keep_batch_norm, "config": dict(job.config),
        "inputs": [describe_input(each, variant.dtype) for each in job.inputs],
        "outputs": [each.name for each in proto.graph.output],
        "verified_sizes": list(job.verified_sizes),
        "max_relative_error": float(f"{error:.2e}"), "bytes": proto.ByteSize(),
    }  # fmt: skip
    return {key: value for key, value in entry.items() if value is not None}


def describe_input(each: Input, dtype: str) -> dict:
    """Return the name, element type, dims, and for integers the inclusive range of values."""
    floats = {"fp32": "float32", "fp16": "float16"}[dtype]
    entry: dict = {"name": each.name, "dtype": "int64" if each.values else floats, "dims": list(each.dims)}
    if each.values:
        entry["range"] = list(each.values)
    if each.prefix_mask:
        entry["prefix_mask"] = True
    return entry


def versions() -> dict[str, str | int]:
    """Return the versions that the files were made with."""
    modules = {each.__name__: each.__version__ for each in (torch, transformers, onnxscript, onnx, onnxruntime)}
    return {"python": platform.python_version(), **modules, "seed": SEED}


def select(names: tuple[str, ...], full: bool) -> Iterator[Job]:
    """Return the jobs whose architecture or file name without .onnx matches one of the names; all without names."""
    for architecture in ARCHITECTURES:
        config = architecture.full if full else architecture.config
        for variant in architecture.variants if config else ():
            known = (architecture.name, variant.file_name(architecture.name).removesuffix(".onnx"))
            if not names or any(fnmatch.fnmatch(each, name) for name in names for each in known):
                yield Job(architecture, variant, config)


def load_index(text: bytes) -> dict:
    """Return the index so far, so that a partial run keeps the other entries."""
    index = json.loads(text)
    return {"made_with": versions(), "models": index.get("models", {}), "invalid": index.get("invalid", {})}


def replace(path: Path, content: bytes) -> None:
    """Write the file in one step: a reader sees the old content or the new."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
        part.write(content)
    Path(part.name).chmod(0o644)
    Path(part.name).replace(path)


def lay_out(index: dict) -> str:
    """Return the index as JSON with one line for every file."""
    parts = []
    for part, entries in index.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries.items())
        parts.append(f' "{part}": {{\n{lines}\n }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def record(job: Job, result: Result, out: Path) -> None:
    """Write a model and its index entry: into the archive, or a model of full size beside the index."""
    archive, index, path = out / ARCHIVE, out / INDEX, out / job.file_name
    if result.proto and job.config is job.architecture.config and job.architecture.redrawn:
        draw_parameters(result.proto)
    model = result.proto.SerializeToString() if result.proto else None
    if job.config is job.architecture.config:
        content = archive.read_bytes() if archive.exists() else None
        entries = updated(load_index(files_of(content)[INDEX] if content else b"{}"), job, result)
        models = (decompress(content) if content else {}) | ({job.file_name: model} if model else {})
        known = {name: each for name, each in models.items() if name in entries["models"]}
        replace(archive, compress(known, lay_out(entries)))
        return
    if model:
        replace(path, model)
    else:
        path.unlink(missing_ok=True)
    replace(index, lay_out(updated(load_index(index.read_bytes() if index.exists() else b"{}"), job, result)).encode())


def updated(index: dict, job: Job, result: Result) -> dict:
    """Return the index with the entry of a result, and without entries that the table no longer has."""
    known = {variant.file_name(each.name) for each in ARCHITECTURES for variant in each.variants}
    for part, content in (("models", result.entry), ("invalid", result.invalid)):
        index[part].pop(job.file_name, None)
        if content:
            index[part][job.file_name] = content
        index[part] = {name: entry for name, entry in sorted(index[part].items()) if name in known}
    return index


@click.command(help=__doc__)
@click.argument("names", nargs=-1, metavar="[NAME ...]")
@click.option("--out", type=click.Path(path_type=Path), default=EXPORTED)
@click.option("--full", is_flag=True, help="Export the public sizes; needs a folder of its own in --out.")
def main(names: tuple[str, ...], out: Path, full: bool) -> None:
    """Export the selected models and keep their index up to date."""
    warnings.filterwarnings("ignore")  # tracing warns about each constant shape
    for logger in ("torch.onnx", "onnxscript", "onnx_ir", "transformers"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    jobs = list(select(names, full))
    if not jobs:
        raise click.UsageError(f"no model is named {' or '.join(names)}; known: {[a.name for a in ARCHITECTURES]}")
    out.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        result = export_verified(job)
        record(job, result, out)
        error = result.entry["max_relative_error"] if result.entry else "no valid file"
        click.echo(f"{job.file_name}  {error}  {result.invalid or ''}")


if __name__ == "__main__":
    main()
