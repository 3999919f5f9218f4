"""Convert T5-base and Phi-2 in their public sizes, with activations beyond float16's range, and measure the errors.

    python benchmarks/half_outliers.py --out benchmarks/results/half-outliers.json [--layers 32] [--only t5-base]

torch exports both in float32, with weights that are random and scaled as trained ones are:

- T5-base's encoder, 12 layers of 768: the outputs of feed-forward blocks are large in four channels, so that the
  residuals behind them reach millions, as those of trained T5 models exceed 65,504 (transformers, issues 5651 and
  9295).  In one model two blocks are so, the third and the ninth, and in another all twelve;
- Phi-2, `--layers` of its 32 layers of 2,560: in two of 32 heads, products of a query and a key exceed 65,504 before
  they are scaled, as in the trained model (transformers, pull request 28163), and three channels of the residuals are
  constants of thousands.

The scales of norms are divided by what these channels make of the others, as training does; else outputs would show
the large channels alone.  Told are what half_errors.py tells, and by operator the largest numbers that those of the
original write, where these exceed float16's.  Inputs are drawn token ids.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import onnx
from half_errors import VERSIONS, measured, version_of
from model_cases import from_models, job_of
from result_text import result_text

from onnxfuse.fuse_model import StageTimer
from onnxfuse.half.precision import FLOAT16
from onnxfuse.half.ranges import MASKED
from onnxfuse.halving import Halving, request

PHI_2 = {"hidden": 2560, "intermediate": 10240, "heads": 32, "vocab": 51200, "positions": 2048}
MAX_BYTES_OF_OTHERS = 2**30  # of weights: other converters serialize the model, which cannot exceed 2 GiB


def main() -> None:
    """Export, convert and measure, print a line for each model, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32, help="of Phi-2: 0.3 GB of weights each, and 1 GB besides")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--dtypes", default="float16")
    parser.add_argument("--folder", type=Path, help="where the exports are kept  [default: a temporary one]")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    cases: dict[str, Callable[[], tuple[Any, Any]]] = {
        "t5-base-encoder-two-blocks": lambda: t5_base((2, 8)),
        "t5-base-encoder-all-blocks": lambda: t5_base(range(12)),
        f"phi-2-{given.layers}-layers": lambda: phi_2(given.layers),
    }
    rows: dict[str, Any] = {}
    head = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": version_of((*VERSIONS, "torch", "transformers")),
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, build in cases.items():
            if given.only not in name:
                continue
            path = (given.folder or Path(scratch)) / f"{name}.onnx"
            if not path.exists():
                export(*build(), path)
            weights = path.with_suffix(".onnx.data").stat().st_size
            found = measured(path, given.dtypes.split(","), weights <= MAX_BYTES_OF_OTHERS)
            rows[name] = {"weight_bytes": weights, "largest": largest(path), **found}
            print(name, rows[name], flush=True)
            given.out.write_text(result_text({**head, "models": rows}), encoding="utf-8")


def largest(path: Path) -> dict[str, float]:
    """Return the largest magnitudes that operators write in a run, by operator, where float16 has no place for them."""
    wanted = request("float16", "float32", None)
    assert wanted is not None
    model = onnx.load(path, load_external_data=False)
    halving = Halving(model, path.parent, wanted, [], None, (), StageTimer(lambda *_: None), False)
    found: dict[str, float] = {}
    for node in halving.plain.model.graph.node:
        for name in node.output:
            seen = halving.ranges[name].magnitude if name in halving.ranges else 0.0
            if FLOAT16.largest < seen < MASKED:
                found[node.op_type] = max(seen, found.get(node.op_type, 0.0))
    return found


def export(job: Any, model: Any, path: Path) -> None:
    """Export a module through dynamo; its weights lie in a file beside the model's."""
    torch = sys.modules["torch"]
    axes = {each.name: {k: dim for k, dim in enumerate(each.dims) if isinstance(dim, str)} for each in job.inputs}
    program = torch.onnx.export(
        model,
        kwargs=job.arguments({"batch": 2, "seq": 16}, "fp32"),
        dynamo=True,
        dynamic_shapes=axes,
        input_names=[each.name for each in job.inputs],
        output_names=[name for name, _ in job.architecture.outputs],
        verbose=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(str(path), external_data=True)


def t5_base(blocks: Collection[int]) -> tuple[Any, Any]:
    """Return the job and the module of T5-base's encoder, of which some feed-forward blocks have large outputs."""
    job = job_of("t5_encoder", "fp32")
    model = from_models("exporters").build_model(job)
    channels = [17, 133, 300, 511]
    for i, block in enumerate(model.encoder.block):
        weight = block.layer[1].DenseReluDense.wo.weight.data
        weight *= 300
        if i in blocks:  # behind ReLU, such a sum has the same sign for all tokens
            weight[channels] = weight[channels].abs() * 500
    balance_norms(job, model, "T5LayerNorm", "variance_epsilon")
    return job, model


def phi_2(layers: int) -> tuple[Any, Any]:
    """Return the job and the module of Phi-2."""
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}
    architecture = from_models("table").decoder(
        "phi_2", "PhiForCausalLM", "PhiConfig", {}, rope_parameters=rotary, hidden_act="gelu_new"
    )
    variant = from_models("architecture").Variant("dynamo", "dynamo", None, "eager", "fp32")
    exporters = from_models("exporters")
    job = exporters.Job(architecture, variant, PHI_2 | {"layers": layers})
    model = exporters.build_model(job)
    width = PHI_2["hidden"] // PHI_2["heads"]
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            for head in (5, 21):
                projection.weight.data[head * width : (head + 1) * width] *= 50  # queries and keys of some hundreds
    model.model.layers[0].mlp.fc2.bias.data[[41, 1023, 2047]] = 3000.0
    balance_norms(job, model, "LayerNorm", "eps")
    return job, model


def balance_norms(job: Any, model: Any, kind: str, epsilon: str) -> None:
    """Divide the scales of norms by the root mean square that each channel has behind them, in the order they run."""
    torch = sys.modules["torch"]

    def balance(norm: Any, given: tuple[Any, ...]) -> None:
        x = given[0]
        if kind == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + getattr(norm, epsilon))
        norm.weight.data /= x.square().mean((0, 1)).sqrt()

    norms = [each for each in model.modules() if type(each).__name__ == kind]
    hooks = [norm.register_forward_pre_hook(balance) for norm in norms]
    with torch.no_grad():
        model(**job.arguments({"batch": 2, "seq": 16}, "fp32"))
    for hook in hooks:
        hook.remove()


if __name__ == "__main__":
    main()
