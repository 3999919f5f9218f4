"""Survey how much of Keras' own exports is fused: build models of its layers, export, optimize, count, write the page.

Needs keras with a backend and its exporter (tensorflow and tf2onnx, or torch and onnxscript) to export, and onnxfuse to
measure, which may be another environment:

    KERAS_BACKEND=tensorflow python models/survey_keras.py --cache DIR --export   # once for each backend
    KERAS_BACKEND=torch python models/survey_keras.py --cache DIR --export
    python models/survey_keras.py --cache DIR   # measures what the cache has, and writes its section of the page
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).parent.parent
SEED = 0
ATTENTIONS = ("MultiHeadAttention", "GroupedQueryAttention", "Attention")
NORMS = ("LayerNormalization", "RMSNormalization", "GroupNormalization")
ACTIVATIONS = ("Activation", "ReLU", "LeakyReLU", "ELU", "PReLU")
WITH_ACTIVATION = ("Activation", "Dense", "Conv1D", "Conv2D", "SeparableConv2D", "DepthwiseConv2D")
Model = Any  # keras.Model


def counted(model: Model) -> Counter[str]:
    """Return how many of each structure the layers of a model compute."""
    counts = Counter(attention=0, rotary=0, norms=0, activations=0)
    for layer in model._flatten_layers(include_self=False, recursive=True):
        name, activation = type(layer).__name__, getattr(getattr(layer, "activation", None), "__name__", "linear")
        counts["attention"] += name in ATTENTIONS
        counts["norms"] += name in NORMS
        has_activation = name in WITH_ACTIVATION and activation not in ("linear", "softmax")
        counts["activations"] += has_activation or (name in ACTIVATIONS and name != "Activation")
        counts["biased products"] += name in ("Dense", "EinsumDense") and layer.bias is not None
    return counts


def randomise(model: Model) -> None:
    """Draw the weights of a model, so that none is 0 or 1 and merged with others."""
    random = np.random.default_rng(SEED)
    for weight in model.weights:
        if "seed" not in weight.path:
            around_one = any(name in weight.path for name in ("gamma", "scale", "variance"))
            drawn = random.uniform(0.5, 1.5, weight.shape) if around_one else random.normal(0, 0.2, weight.shape)
            weight.assign(drawn.astype(weight.dtype))


def export(cache: Path) -> None:
    """Export all models with the backend at hand, each with a record of its structures or of the error."""
    import keras
    from survey_keras_subjects import SUBJECTS

    for build in SUBJECTS:
        stem = cache / f"{build.__name__}.{keras.backend.backend()}"
        model = build()
        randomise(model)
        model([np.zeros([size or 6 for size in each.shape], each.dtype) for each in model.inputs])
        content: dict[str, object] = {"keras": keras.__version__}
        try:
            model.export(f"{stem}.onnx", format="onnx", verbose=False)
            content["counts"] = counted(model)
        except Exception as error:  # every failure of an exporter is a result here
            content["error"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:160]
        Path(f"{stem}.json").write_text(json.dumps(content))
        click.echo(f"{stem.name}: {content.get('counts') or content['error']}")


def measured(cache: Path) -> dict:
    """Return the results of the exports in a cache."""
    from survey_fused import measure

    import onnxfuse

    entries, made_with = [], {"onnxfuse": onnxfuse.__version__}
    for record in sorted(cache.glob("*.json")):
        name, _, backend = record.stem.rpartition(".")
        content = json.loads(record.read_text())
        made_with["keras"] = content["keras"]
        entry = {"architecture": f"keras/{name}", "exporter": backend, "attention": "default"}
        if "error" in content:
            entries.append(entry | {"error": content["error"]})
        else:
            entries.append(entry | measure(record.with_suffix(".onnx"), content["counts"], verify=True))
        click.echo(entries[-1])
    return {"made_with": made_with, "exports": entries}


@click.command(help=__doc__)
@click.option("--cache", type=click.Path(path_type=Path), required=True, help="The folder of exports.")
@click.option("--export", "exports", is_flag=True, help="Export with the backend at hand.")
@click.option("--device", default="cpu", help="What the machine is called in the name of the results.")
def main(cache: Path, exports: bool, device: str) -> None:
    """Export, or measure and write the section of the page."""
    cache.mkdir(parents=True, exist_ok=True)
    if exports:
        export(cache)
        return
    import sys

    sys.path.append(str(ROOT / "benchmarks"))
    from result_text import result_text
    from survey_fused import merged, stored
    from survey_page import KERAS, keras_section, with_section

    result = measured(cache)
    path = ROOT / "benchmarks" / "results" / f"coverage-keras-{device}-{time.strftime('%Y-%m-%d')}.json"
    kept = {**result, "exports": merged(stored(entry) for entry in result["exports"])}
    path.write_text(result_text(kept), encoding="utf-8")
    page = ROOT / "docs" / "coverage.md"
    text = with_section(page.read_text(encoding="utf-8"), KERAS, keras_section(result, path.name))
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
