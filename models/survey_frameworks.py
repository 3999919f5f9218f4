"""Survey how much of other frameworks' own exports is fused: build their models, export, optimize, count, write pages.

A framework is keras, keras_hub, jax or paddle.  `models/survey_<framework>_subjects.py` has its models and says what it
needs.  Exports are made with the framework at hand, and measured with onnxfuse, which may be another environment:

    KERAS_BACKEND=tensorflow python models/survey_frameworks.py keras --cache DIR --export   # once for each backend
    KERAS_BACKEND=torch python models/survey_frameworks.py keras --cache DIR --export
    python models/survey_frameworks.py keras --cache DIR   # measures what the cache has, and writes its section
"""

from __future__ import annotations

import fnmatch
import importlib
import json
import time
from collections import Counter
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
FRAMEWORKS = ("keras", "keras_hub", "jax", "paddle")


def export(framework: str, cache: Path, names: tuple[str, ...]) -> None:
    """Export the models of a framework, each with a record of its structures or of the error."""
    subjects = importlib.import_module(f"survey_{framework}_subjects")
    for name, build in subjects.SUBJECTS.items():
        if names and not any(fnmatch.fnmatch(name, each) for each in names):
            continue
        stem = cache / f"{name}.{subjects.exporter()}"
        content: dict[str, object] = {"made_with": subjects.versions()}
        try:
            content["counts"] = subjects.export(build, f"{stem}.onnx")
        except Exception as error:  # every failure of an exporter is a result here
            content["error"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]
        Path(f"{stem}.json").write_text(json.dumps(content))
        click.echo(f"{stem.name}: {content.get('counts') or content['error']}")


def measured_or_error(path: Path, counts: Counter[str]) -> dict:
    """Return the measures of an export, or why onnxfuse does not read it."""
    from survey_fused import measure

    import onnxfuse

    try:
        return measure(path, counts, verify=True)
    except onnxfuse.OnnxfuseError as error:
        return {"error": f"onnxfuse: {type(error).__name__}: {str(error).replace(str(path.parent), '')}"[:160]}


def measured(framework: str, cache: Path, names: tuple[str, ...]) -> dict:
    """Return the results of the exports in a cache."""
    from survey_fused import told

    import onnxfuse

    entries, made_with = [], {"onnxfuse": onnxfuse.__version__}
    for record in sorted(cache.glob("*.json")):
        name, _, exporter = record.stem.rpartition(".")
        if names and not any(fnmatch.fnmatch(name, each) for each in names):
            continue
        content = json.loads(record.read_text())
        made_with |= content["made_with"]
        entry = {"architecture": f"{framework}/{name}", "exporter": exporter, "attention": "default"}
        if "error" in content:
            entries.append(entry | {"error": content["error"]})
        else:
            entries.append(entry | measured_or_error(record.with_suffix(".onnx"), Counter(content["counts"])))
        click.echo(told(entries[-1]))
    return {"made_with": made_with, "exports": entries}


@click.command(help=__doc__)
@click.argument("framework", type=click.Choice(FRAMEWORKS))
@click.argument("names", nargs=-1, metavar="[NAME ...]")
@click.option("--cache", type=click.Path(path_type=Path), required=True, help="The folder of exports.")
@click.option("--export", "exports", is_flag=True, help="Export with the framework at hand.")
@click.option("--device", default="cpu", help="What the machine is called in the name of the results.")
def main(framework: str, names: tuple[str, ...], cache: Path, exports: bool, device: str) -> None:
    """Export, or measure and write the section of the page, unless only models of some names are measured."""
    cache.mkdir(parents=True, exist_ok=True)
    if exports:
        export(framework, cache, names)
        return
    result = measured(framework, cache, names)
    if names:
        return
    import sys

    sys.path.append(str(ROOT / "benchmarks"))
    from result_text import result_text
    from survey_fused import merged, stored
    from survey_page import FRAMEWORK_SECTIONS, framework_section, with_section

    path = ROOT / "benchmarks" / "results" / f"coverage-{framework}-{device}-{time.strftime('%Y-%m-%d')}.json"
    kept = {**result, "exports": merged(stored(entry) for entry in result["exports"])}
    path.write_text(result_text(kept), encoding="utf-8")
    page = ROOT / "docs" / "coverage.md"
    section = framework_section(framework, result, path.name)
    text = with_section(page.read_text(encoding="utf-8"), FRAMEWORK_SECTIONS[framework][0], section)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
