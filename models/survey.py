"""Survey how much of public architectures is fused: export them with random weights, optimize, count, write the page.

Needs torch, transformers, timm, torchvision, diffusers, onnxscript and onnxfuse:

    python models/survey.py --cache /data/survey                    # everything; writes docs/coverage.md
    python models/survey.py --cache /data/survey 'transformers/gpt*'  # some of it; prints, and writes nothing
    python models/survey.py --cache /data/survey-4.40.2 --older       # with an older transformers; writes its section
    python models/survey.py --cache /data/packages --packages         # x-transformers and vit-pytorch; their section

Exports and the counts of torch are made once and kept in the cache; delete a file there to make it again.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import platform
import re
import sys
import time
import traceback
import warnings
from importlib import metadata
from pathlib import Path

import click
import onnx
import onnxruntime
import onnxscript
import torch
import transformers
from architecture import Architecture, Variant
from exporters import SEED, Job, build_model, export_graph, strip_traces
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_errors
from survey_counts import count_structures
from survey_fused import measure, merged, stored, told
from survey_package_subjects import PACKAGES
from survey_page import FRAMEWORK_SECTIONS, OLDER, framework_section, older_section, page, sections, with_section
from survey_subjects import SUBJECTS, declare_torchvision_operators

import onnxfuse

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from result_text import result_text  # noqa: E402 - which benchmarks share

PAGE, RESULTS = ROOT / "docs" / "coverage.md", ROOT / "benchmarks" / "results"
VERIFIED_EVERY = 8  # of the exports, one in so many is also verified
PATHS = re.compile(r"(\[ONNXRuntimeError\] : \d+ : )|(/\S+/)")
ORT_ERRORS = (
    onnxruntime_errors.Fail, onnxruntime_errors.InvalidArgument, onnxruntime_errors.InvalidGraph,
    onnxruntime_errors.RuntimeException,
)  # fmt: skip
OPTIONS_OF_RELEASE_5 = frozenset({"llama31", "llama_yarn", "phi3_longrope"})  # older ones ignore rope_parameters


def export(architecture: Architecture, variant: Variant, cache: Path) -> dict:
    """Return the record of an export, which is made at the first call: its file and torch's counts, or the error."""
    name = f"{architecture.name.replace('/', '_')}_{variant.attention or 'default'}_{variant.tag}"
    record, path = cache / f"{name}.json", cache / f"{name}.onnx"
    if not record.exists():
        start = time.perf_counter()
        try:
            content = {"counts": export_to(path, architecture, variant), "file": path.name}
        except Exception as error:  # every failure of an exporter is a result here
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            lines = str(cause).strip().splitlines() or [""]
            content = {"error": f"{type(cause).__name__}: {lines[0]}"[:160], "trace": traceback.format_exc()[-4000:]}
        record.write_text(json.dumps(content | {"seconds": round(time.perf_counter() - start, 1)}))
    return json.loads(record.read_text())


def export_to(path: Path, architecture: Architecture, variant: Variant) -> dict[str, int]:
    """Write an export to a path.  Returns how many of each structure a run of the module computes."""
    job = Job(architecture, variant, architecture.config)
    model = build_model(job)
    torch.manual_seed(SEED)
    arguments = job.arguments(architecture.sizes[0], variant.dtype)
    counts = count_structures(model, lambda: model(**arguments))
    proto = export_graph(job, model, variant.dtype)
    strip_traces(proto)
    onnx.save(proto, path)
    return counts


def broken(path: Path, job: Job) -> str | None:
    """Return why onnxruntime runs an export at no size of the architecture; None where it does.

    None also where a kernel of onnxruntime's CPU provider is missing: that says nothing about the graph.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    reason = None
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        read = {each.name for each in session.get_inputs()}
        for sizes in job.architecture.sizes:
            torch.manual_seed(SEED)
            drawn = {each.name: each.draw(sizes, torch.float32).numpy() for each in job.inputs if each.name in read}
            try:
                session.run(None, drawn)
            except ORT_ERRORS as error:
                reason = str(error)
            else:
                return None  # one size is enough: exporters may write the other sizes as constants
    except onnxruntime_errors.NotImplemented:
        return None
    except ORT_ERRORS as error:
        reason = str(error)
    return f"onnxruntime does not run it: {' '.join(PATHS.sub('', reason or '').split())}"[:110]


def survey(architecture: Architecture, variant: Variant, cache: Path, verify: bool) -> dict:
    """Return the entry of one export in the results."""
    made = export(architecture, variant, cache)
    attention = variant.attention or "default"
    entry = {"architecture": architecture.name, "exporter": variant.exporter, "attention": attention}
    if "error" in made:
        return entry | {"error": made["error"]}
    if reason := broken(cache / made["file"], Job(architecture, variant, architecture.config)):
        return entry | {"error": reason}
    try:
        return entry | measure(cache / made["file"], made["counts"], verify)
    except onnxfuse.OnnxfuseError as error:
        return entry | {"error": f"onnxfuse: {type(error).__name__}: {error}"[:300]}


def write(result: dict, device: str, kind: str) -> None:
    """Write the page, or its section of this kind, and the results; the kind is "", "older" or "packages".

    Results have a line for all exports of an architecture that are equal.
    """
    infix = {"older": f"transformers-{transformers.__version__}-", "packages": "packages-"}.get(kind, "")
    path = RESULTS / f"coverage-{infix}{device}-{time.strftime('%Y-%m-%d')}.json"
    exports = merged(stored(entry) for entry in result["exports"])
    path.write_text(result_text({**result, "exports": exports}), encoding="utf-8")
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if kind == "packages":
        text = with_section(before, FRAMEWORK_SECTIONS[kind][0], framework_section(kind, result, path.name))
    elif kind:
        text = with_section(before, OLDER, older_section(result, path.name))
    else:
        text = page(result, path.name)
        for heading, section in sections(before).items():
            text = with_section(text, heading, section)
    PAGE.write_text(text, encoding="utf-8")


def is_in_release(architecture: Architecture) -> bool:
    """Return whether the installed transformers has an architecture, which it builds when it is first asked for."""
    library, _, name = architecture.name.partition("/")
    if library != "transformers" or name in OPTIONS_OF_RELEASE_5:
        return False
    try:
        architecture.build(architecture.config, "")
    except AttributeError as error:
        return "module transformers has no attribute" not in str(error)
    except Exception:  # a failure of the library's, which the export will meet again
        return True
    return True


def versions(packages: bool) -> dict[str, str]:
    """Return the versions that the exports depend on."""
    if packages:
        found = {name: metadata.version(name) for name in ("torch", "onnxscript", "x-transformers", "vit-pytorch")}
        return found | {"onnxfuse": onnxfuse.__version__}
    names = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    return names | {"onnxscript": onnxscript.__version__, "onnx": onnx.__version__, "onnxfuse": onnxfuse.__version__}


@click.command(help=__doc__)
@click.argument("names", nargs=-1, metavar="[NAME ...]")
@click.option("--cache", type=click.Path(path_type=Path), required=True, help="The folder of exports.")
@click.option("--device", default="cpu", help="What the machine is called in the name of the results.")
@click.option("--older", is_flag=True, help="Survey what an older transformers has of it, and write that section.")
@click.option("--packages", is_flag=True, help="Survey x-transformers and vit-pytorch, and write their section.")
def main(names: tuple[str, ...], cache: Path, device: str, older: bool, packages: bool) -> None:
    """Survey the selected architectures."""
    warnings.filterwarnings("ignore")  # tracing warns about each constant shape
    for logger in ("torch.onnx", "onnxscript", "onnx_ir", "transformers", "diffusers", "timm"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    declare_torchvision_operators()
    cache.mkdir(parents=True, exist_ok=True)
    subjects = PACKAGES if packages else SUBJECTS
    chosen = [each for each in subjects if not names or any(fnmatch.fnmatch(each.name, name) for name in names)]
    chosen = [each for each in chosen if not older or is_in_release(each)]
    jobs = [(architecture, variant) for architecture in chosen for variant in architecture.variants]
    entries = []
    for number, (architecture, variant) in enumerate(jobs):
        entries.append(survey(architecture, variant, cache, verify=packages or number % VERIFIED_EVERY == 0))
        click.echo(told(entries[-1]))
    if not names:
        write(
            {"made_with": versions(packages), "exports": entries}, device, "older" if older else "packages" * packages
        )


if __name__ == "__main__":
    main()
