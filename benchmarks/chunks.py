"""Time two layers of Mamba-2, and the linear attention in them, or of xLSTM, next to onnxruntime.

    python benchmarks/chunks.py --out FILE --exports FOLDER [--model xlstm] [--dtypes float32,float16]

Needs torch, transformers and onnxscript.  Layers of 768 channels, those of mamba2-130m or of xLSTM with four heads, are
exported on their slow path, once for each length and exporter, in processes of their own, unless the folder has the
file.  Rows of `model` are whole models.  Rows of `scan` are the linear attention of a layer of Mamba-2, which
onnxruntime computes as the model has it.  Inputs and outputs stay on
the GPU.  Engines run in turns; a time is the median of runs, each of which is waited for.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper
from rows import Rows

import onnxfuse
from onnxfuse.session import InferenceSession, explain_session

LENGTHS: Final = (512, 2048)
BATCHES: Final = (1, 8)
EXPORTERS: Final = ("dynamo", "torchscript")
SECONDS: Final = 0.6  # of runs of each engine
HEADS, SIZE, VALUE_SIZE = 24, 128, 64


def export(kind: str, exporter: str, length: int, path: str) -> None:
    """Export two layers; TorchScript would write Mamba-2's negative axes into a Transpose, which is invalid ONNX."""
    import torch
    import transformers

    permute = torch.Tensor.permute
    if exporter == "torchscript":
        torch.Tensor.permute = lambda x, *perm: permute(x, *(i % x.dim() for i in perm))  # type: ignore[method-assign]
    torch.manual_seed(0)
    if kind == "xlstm":
        xlstm = transformers.xLSTMConfig(
            hidden_size=768, num_heads=4, num_blocks=2, num_hidden_layers=2, vocab_size=512
        )
        model = transformers.xLSTMModel(xlstm).eval()
    else:
        mamba2 = transformers.Mamba2Config(
            hidden_size=768, num_heads=HEADS, head_dim=VALUE_SIZE, n_groups=1, state_size=SIZE, num_hidden_layers=2,
            vocab_size=512,
        )  # fmt: skip
        model = transformers.Mamba2Model(mamba2).eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, use_cache=False).last_hidden_state

    ids, named = torch.zeros(2, length, dtype=torch.int64), {"input_names": ["ids"], "output_names": ["y"]}
    if exporter == "dynamo":
        torch.onnx.export(
            Hidden(), (ids,), path, dynamo=True, dynamic_shapes={"ids": {0: "batch"}}, external_data=False, **named
        )
    else:
        axes = {"ids": {0: "batch"}}
        torch.onnx.export(Hidden(), (ids,), path, dynamo=False, dynamic_axes=axes, opset_version=17, **named)


class Bound:
    """A session whose inputs and outputs stay on the GPU."""

    def __init__(self, session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> None:
        """Bind inputs; onnxruntime allocates outputs."""
        self.session, self.binding = session, session.io_binding()
        self.kept = {name: ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0) for name, value in feeds.items()}
        for name, value in self.kept.items():
            self.binding.bind_ortvalue_input(name, value)
        for output in session.get_outputs():
            self.binding.bind_output(output.name, "cuda")
        for _ in range(3):
            self.run()

    def run(self) -> None:
        """Run once, and wait."""
        self.session.run_with_iobinding(self.binding)

    def result(self) -> np.ndarray:
        """Return the first output as float32."""
        return self.binding.copy_outputs_to_cpu()[0].astype(np.float32)


def plain(model: onnx.ModelProto) -> ort.InferenceSession:
    """Open a session of onnxruntime alone."""
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), settings, providers=["CUDAExecutionProvider"])


def fused(model: onnx.ModelProto) -> InferenceSession:
    """Open a session with kernels."""
    return InferenceSession(model.SerializeToString(), providers=["CUDAExecutionProvider"], wait=True)


def measured(row: dict[str, Any], own: Bound, other: Bound) -> dict[str, Any]:
    """Time two sessions in turns."""
    times: list[list[float]] = [[], []]
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times[1]) < 5:
        for each, found in zip((own, other), times, strict=True):
            start = time.perf_counter()
            each.run()
            found.append(time.perf_counter() - start)
    a, b = own.result(), other.result()
    row["difference"] = float(f"{np.abs(a - b).max() / np.abs(b).max():.2g}")
    for name, found in zip(("onnxfuse_us", "onnxruntime_us"), times, strict=True):
        row[name] = round(statistics.median(found) * 1e6, 1)
    row["faster"] = round(row["onnxruntime_us"] / row["onnxfuse_us"], 2)
    return row


def scan_of(optimized: onnx.ModelProto, batch: int, length: int, dtype: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return the first linear attention as a model, and operands for it."""
    node = next(each for each in optimized.graph.node if each.op_type.startswith("linear_attention"))
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    kinds = {info.name: info.type.tensor_type for info in [*optimized.graph.value_info, *optimized.graph.input]}
    rng, feeds, inputs = np.random.default_rng(0), {}, []
    for name, role in zip(node.input, attributes["operands"].decode().split(), strict=True):
        shape = [batch, length, *(dim.dim_value for dim in kinds[name].shape.dim[2:])]
        value = -0.1 * rng.random(shape) if role == "decay" else rng.standard_normal(shape) / 8
        feeds[name] = value.astype(dtype)
        inputs.append(helper.make_tensor_value_info(name, kinds[name].elem_type, ["batch", *shape[1:]]))
    output = helper.make_tensor_value_info(node.output[0], kinds[node.input[0]].elem_type, None)
    model = onnx.ModelProto()
    model.CopyFrom(optimized)
    model.graph.CopyFrom(helper.make_graph([node], "scan", inputs, [output]))
    return model, feeds


def rows_of(rows: Rows, kind: str, exporter: str, length: int, path: Path, dtype: str) -> None:
    """Measure the models of one export."""
    original = onnx.load(path)
    optimized, report = onnxfuse.optimize(original, dtype=None if dtype == "float32" else dtype, verify=False)
    fusion = "scan" if kind == "xlstm" else "linear_attention"
    assert report.counts[fusion] == 2, report.counts
    reference = original if dtype == "float32" else onnxfuse.unfuse(optimized, verify=False)[0]
    for batch in BATCHES:
        row = {"model": kind, "exporter": exporter, "tokens": length, "batch": batch, "dtype": dtype}
        ids = {original.graph.input[0].name: np.random.default_rng(1).integers(0, 512, (batch, length))}
        timed = [("model", optimized, reference, ids)]
        if kind == "mamba2":
            scan, operands = scan_of(optimized, batch, length, dtype)
            timed.append(("scan", scan, scan, operands))
        for what, model, other, feeds in timed:
            session = fused(model)
            how = {each.fusion: each.how for each in explain_session(session)}
            found = measured({"what": what, **row}, Bound(session, feeds), Bound(plain(other), feeds))
            print({**found, "how": how.get(fusion)}, flush=True)
            rows.put(found)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON file to write.")
@click.option("--exports", type=click.Path(path_type=Path), required=True, help="The folder of exports.")
@click.option("--model", "kind", type=click.Choice(["mamba2", "xlstm"]), default="mamba2")
@click.option("--dtypes", default="float32,float16", help="The dtypes of models.")
@click.option("--exporters", default=",".join(EXPORTERS), help="The exporters of torch.")
@click.option("--export", "exported", type=(str, int, str), help="Only export: the exporter, the length, the file.")
def main(
    out: Path, exports: Path, kind: str, dtypes: str, exporters: str, exported: tuple[str, int, str] | None
) -> None:
    """Measure all rows."""
    if exported is not None:
        export(kind, *exported)
        return
    ort.preload_dlls()
    jobs = [(exporter, length) for exporter in exporters.split(",") for length in LENGTHS]
    paths = {job: exports / f"{kind}{job[0]}{job[1]}.onnx" for job in jobs}
    command = [sys.executable, __file__, "--out", str(out), "--exports", str(exports), "--model", kind, "--export"]
    running = {job: subprocess.Popen([*command, *map(str, (*job, path))])
               for job, path in paths.items() if not path.exists()}  # fmt: skip
    rows = Rows(out, ("what", "model", "exporter", "tokens", "batch", "dtype"))
    for job, path in paths.items():
        if job in running and running[job].wait():
            print(f"{job}: the export failed", flush=True)
            continue
        for dtype in dtypes.split(","):
            rows_of(rows, kind, *job, path, dtype)


if __name__ == "__main__":
    main()
