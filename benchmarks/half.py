"""Time models that `--dtype float16` converted beside natively exported ones and those of other converters, on a GPU.

    python benchmarks/half.py --out DIR [--only bert-*] [--seconds 0.6] [--ways native,converted] [--processes 12]

Every model is exported in float32 and in float16 (model_cases.py; into DIR/onnx, once), and every way makes its model
of those, both in processes side by side before anything is timed.  All ways of a model are opened, run in CUDA graphs,
and are timed in turns, so that all find the GPU as warm.  A model that cannot be captured as a graph runs without one,
and its `graph` is 0.  `ratio` is a time relative to that of the native export.  Errors are those of the worst output
against the float32 export in onnxruntime without TF32, |out - reference| / |reference|.  Nodes are those of the model
that runs.  Results: DIR/half.json, after each model.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import gc
import importlib
import itertools
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import onnx
from model_cases import Case, at_sizes, export
from peers import EXACT, GRAPH, Sampled, relative_error, sampled
from result_text import result_text

from onnxfuse import optimize
from onnxfuse.bench.machine import device, versions
from onnxfuse.errors import first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.session import InferenceSession
from onnxfuse.tuning.bound_session import WARM_UP_RUNS, BoundSession, bind, start_session
from onnxfuse.tuning.timing import interleaved, runs_within
from onnxfuse.verify.input_uses import integer_uses
from onnxfuse.verify.inputs import generate_inputs, model_inputs, sizes_to_try

CASES = (
    Case("unet-b2", "unet", {"batch": 2}, fixed=True),
    Case("bert-b8-s512", "bert", {"batch": 8, "seq": 512}),
    Case("vit-b32", "vit", {"batch": 32}),
    Case("whisper-encoder-b4", "whisper_encoder", {"batch": 4}),
    Case("llama-s2048", "llama", {"batch": 1, "seq": 2048}),
    Case("resnet50-b32", "resnet50", {"batch": 32}),
)
OTHERS = {"onnxconverter_common": "onnxconverter_common.float16", "onnxruntime": "onnxruntime.transformers.float16"}
MAX_MESSAGE = 160  # characters of an error that are written
Make = Callable[[onnx.ModelProto, onnx.ModelProto], onnx.ModelProto]  # of the exports in float32 and in float16


def converted_by(module: str) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    """Return another converter, which converts inputs and outputs too."""

    def convert(model: onnx.ModelProto) -> onnx.ModelProto:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        result: onnx.ModelProto = importlib.import_module(module).convert_float_to_float16(copy, keep_io_types=False)
        return result

    return convert


def fused(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """Return the model that onnxfuse makes."""
    return optimize(model, verify=False, **options)[0]


WAYS: dict[str, tuple[bool, Make]] = {  # whether onnxfuse's kernels run it, and what makes it
    "native": (True, lambda wide, half: fused(half)),
    "converted": (True, lambda wide, half: fused(wide, dtype="float16", io="half")),
    "converted-float32-io": (True, lambda wide, half: fused(wide, dtype="float16")),
    "converted-bfloat16": (True, lambda wide, half: fused(wide, dtype="bfloat16", io="half")),
    "float32": (True, lambda wide, half: fused(wide)),
    "ort-native": (False, lambda wide, half: half),
} | {
    name: way
    for tool, module in OTHERS.items()
    for name, way in (
        (f"ort-{tool}", (False, lambda wide, half, module=module: converted_by(module)(wide))),
        (f"fused-{tool}", (True, lambda wide, half, module=module: fused(converted_by(module)(wide)))),
    )
}  # type: ignore[dict-item]


def main() -> None:
    """Measure what the command line asks for, print a line for each result, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported models and the results")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="MODEL", help="names or patterns of models")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated names of ways")
    parser.add_argument("--seconds", type=float, default=0.6, help="of timed runs of each way")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that export and convert side by side")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    given.out.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    head = {"date": date, "device": device("cuda"),
            "versions": versions(("torch", "transformers", "onnxconverter-common"))}  # fmt: skip
    rows: list[dict[str, Any]] = []
    cases = [case for case in CASES if any(fnmatch.fnmatch(case.name, each) for each in given.only)]
    ways = given.ways.split(",")
    failed = prepare(cases, ways, given.out / "onnx", given.processes)
    for case in cases:
        begin = time.monotonic()
        for row in measured(case, given.out / "onnx", ways, failed, given.seconds):
            rows.append(row)
            print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        print(f"{case.name}: {time.monotonic() - begin:.0f} s", flush=True)
        (given.out / "half.json").write_text(result_text({**head, "results": rows}), encoding="utf-8")


# --- models ----------------------------------------------------------------------------------------------------------


def prepare(cases: list[Case], ways: list[str], folder: Path, processes: int) -> dict[tuple[str, str], str]:
    """Write the models of all ways; return what went wrong by the names of case and way."""
    begin = time.monotonic()
    spawn = multiprocessing.get_context("spawn")  # torch draws weights on the GPU, which forked processes cannot use
    with ProcessPoolExecutor(processes, spawn) as pool:
        exports = list(itertools.product(cases, ("fp32", "fp16")))
        list(pool.map(write_export, *zip(*exports, strict=True), itertools.repeat(folder)))
        print(f"{len(exports)} exports: {time.monotonic() - begin:.0f} s", flush=True)
        pairs = list(itertools.product(cases, ways))
        messages = list(pool.map(write_way, *zip(*pairs, strict=True), itertools.repeat(folder)))
        print(f"and {len(pairs)} models of them: {time.monotonic() - begin:.0f} s", flush=True)
    return {(case.name, way): why for (case, way), why in zip(pairs, messages, strict=True) if why}


def exported(case: Case, dtype: str) -> Case:
    """Return the case whose file is the export in a dtype."""
    return Case(case.name, case.architecture, case.sizes, fixed=case.fixed, dtype=dtype)


def write_export(case: Case, dtype: str, folder: Path) -> None:
    """Export the case's architecture in a dtype, unless it is there."""
    one = exported(case, dtype)
    if not (path := folder / one.file_name).exists():
        export(one, path)


def read_export(case: Case, dtype: str, folder: Path) -> onnx.ModelProto:
    """Return the export in a dtype, at the case's sizes if these are fixed."""
    model = onnx.load(folder / exported(case, dtype).file_name)
    return at_sizes(model, feeds_of(case, model)) if case.fixed else model


def path_of(case: Case, way: str, folder: Path) -> Path:
    """Return the file of the model that a way makes."""
    return folder / f"{case.name}-{way}.onnx"


def write_way(case: Case, way: str, folder: Path) -> str:
    """Write the model that a way makes, and return what went wrong."""
    warnings.filterwarnings("ignore")
    try:
        _, make = WAYS[way]
        model = make(read_export(case, "fp32", folder), read_export(case, "fp16", folder))
        path_of(case, way, folder).write_bytes(model.SerializeToString())
    except Exception as error:
        return described(error)
    return ""


def described(error: Exception) -> str:
    """Return the beginning of a message."""
    return f"{type(error).__name__}: {first_line(error)}"[:MAX_MESSAGE]


# --- times -----------------------------------------------------------------------------------------------------------


def measured(
    case: Case, folder: Path, ways: list[str], failed: Mapping[tuple[str, str], str], seconds: float
) -> list[dict[str, Any]]:
    """Return the result of each way, all of which run in turns; a way that fails has its error in place of times."""
    wide = read_export(case, "fp32", folder)
    feeds = feeds_of(case, wide)
    expected = reference(wide, feeds)
    shapes = {name: shape for name, (shape, _) in expected.items()}
    rows: list[dict[str, Any]] = []
    ready: list[tuple[dict[str, Any], BoundSession]] = []
    for way in ways:
        row: dict[str, Any] = {"model": case.name, "way": way}
        rows.append(row)
        if why := failed.get((case.name, way)):
            row["failed"] = why
            continue
        try:
            model = onnx.load(path_of(case, way, folder))
            row["nodes"] = len(model.graph.node)
            row["graph"], bound = warm(model, WAYS[way][0], in_dtypes_of(model, feeds), shapes)
            row["error"] = relative_error(expected, bound.outputs())
            ready.append((row, bound))
        except Exception as error:
            row["failed"] = described(error)
    time_in_turns(ready, seconds)
    del ready
    gc.collect()
    native = next((row.get("median_ms") for row in rows if row["way"] == "native"), None)
    return [{**row, "ratio": row["median_ms"] / native} if native and "median_ms" in row else row for row in rows]


def warm(
    model: onnx.ModelProto, kernels: bool, feeds: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, BoundSession]:
    """Return whether the model runs in a CUDA graph, and its session after some runs."""
    for options in (GRAPH, {}):
        try:
            session = start_session(
                model, None, "cuda", partial(InferenceSession, wait=True) if kernels else None, options=options
            )
            bound = bind(session, feeds, "cuda", shapes)
            for _ in range(WARM_UP_RUNS):
                bound.run()
            return int(options is GRAPH), bound
        except Exception:
            if options is not GRAPH:
                raise
    raise AssertionError("the loop returns or raises")


def time_in_turns(ready: list[tuple[dict[str, Any], BoundSession]], seconds: float) -> None:
    """Write the milliseconds of runs into the rows."""
    if not ready:
        return
    runs = [bound.run for _, bound in ready]

    def one_of_each() -> None:
        for run in runs:
            run()

    count = runs_within(seconds * len(runs), one_of_each, least=20)
    for (row, _), times in zip(ready, interleaved(runs, count), strict=True):
        row |= times.to_json()


def feeds_of(case: Case, model: onnx.ModelProto) -> dict[str, Array]:
    """Return inputs at the sizes of a case."""
    inputs = model_inputs(model)
    sizes = {**next(sizes_to_try(inputs, {})), **case.sizes}
    return generate_inputs(inputs, sizes, integer_uses(model), {})


def in_dtypes_of(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs in the dtypes that a model takes."""
    dtypes = {each.name: each.dtype for each in model_inputs(model)}
    return {name: np.asarray(value).astype(dtypes[name]) for name, value in feeds.items()}


def reference(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Sampled]:
    """Return the outputs of the float32 export, without TF32."""
    bound = bind(start_session(model, None, "cuda", options=EXACT), feeds, "cuda")
    bound.run()
    return sampled(bound.outputs())


if __name__ == "__main__":
    main()
