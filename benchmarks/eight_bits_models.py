"""Time a ResNet-50, a BERT-base and a detector in 8 bits, beside float16 and onnxruntime, at a few sizes.

    python benchmarks/eight_bits_models.py make FOLDER
    python benchmarks/eight_bits_models.py time FOLDER --out results/eight_bits_networks.json

`make` writes the networks, with random weights, in these forms, and compiles their kernels for the timed sizes; torch
exports the detector:

    float16        by `--dtype float16`
    int8, float8   by `--dtype int8` or `float8`, and by `--dtype float16` for what is left in floats
    qdq, dynamic   by onnxruntime's quantize_static and quantize_dynamic, as they come, and fused

`time` runs what `make` wrote, in onnxfuse with a CUDA graph; qdq and dynamic also in onnxruntime alone.  A time is the
median of rounds in which all forms of a network take turns.  `error` is the largest distance of the last output from
float16's, relative to its largest number.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, version_converter

import onnxfuse

SIZES: Final = {"resnet50": (32, 128), "bert": (8,), "detector": (8,)}
FORMS: Final = {
    "resnet50": ("float16", "int8", "float8", "qdq"),
    "bert": ("float16", "int8", "float8", "qdq", "dynamic"),
    "detector": ("float16", "int8", "qdq"),
}
IMAGE, TOKENS, HIDDEN, HEADS, LAYERS = 224, 512, 768, 12, 12
BLOCKS, WIDTHS = (3, 4, 6, 3), (64, 128, 256, 512)
ROUNDS, ROUND_SECONDS = 5, 0.04


class Network:
    """A network in float32 of opset 21, whose weights are random."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(0)

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def weight(self, *shape: int, fan_in: int) -> str:
        return self.constant(self.random.standard_normal(shape, np.float32) / fan_in**0.5)

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name

    def model(self, inputs: Mapping[str, list[Any]], y: str, shape: list[Any]) -> onnx.ModelProto:
        given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in inputs.items()]
        result = helper.make_tensor_value_info(y, TensorProto.FLOAT, shape)
        graph = helper.make_graph(self.nodes, "network", given, [result], self.tensors)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        return onnx.shape_inference.infer_shapes(made)


def resnet50() -> onnx.ModelProto:
    """Return a ResNet-50 whose normalizations are folded."""
    net = Network()

    def conv(x: str, c: int, m: int, taps: int, stride: int = 1) -> str:
        w, bias = net.weight(m, c, taps, taps, fan_in=c * taps**2), net.weight(m, fan_in=100)
        return net.node("Conv", x, w, bias, strides=[stride] * 2, pads=[taps // 2] * 4)

    x, c = net.node("MaxPool", net.node("Relu", conv("x", 3, 64, 7, 2)), kernel_shape=[3, 3], strides=[2, 2],
                    pads=[1] * 4), 64  # fmt: skip
    for stage, (count, width) in enumerate(zip(BLOCKS, WIDTHS, strict=True)):
        for block in range(count):
            stride = 2 if stage and not block else 1
            first = net.node("Relu", conv(x, c, width, 1))
            second = net.node("Relu", conv(first, width, width, 3, stride))
            beside = x if block else conv(x, c, 4 * width, 1, stride)
            x, c = net.node("Relu", net.node("Add", conv(second, width, 4 * width, 1), beside)), 4 * width
    flat = net.node("Flatten", net.node("GlobalAveragePool", x))
    y = net.node("Gemm", flat, net.weight(c, 1000, fan_in=c), net.weight(1000, fan_in=100))
    return net.model({"x": ["batch", 3, IMAGE, IMAGE]}, y, ["batch", 1000])


def bert() -> onnx.ModelProto:
    """Return the layers of a BERT-base, without embeddings."""
    net = Network()
    split, merged = net.constant([0, 0, HEADS, HIDDEN // HEADS], np.int64), net.constant([0, 0, HIDDEN], np.int64)
    root = net.constant((HIDDEN / HEADS) ** 0.5)

    def linear(x: str, k: int, n: int) -> str:
        return net.node("Add", net.node("MatMul", x, net.weight(k, n, fan_in=k)), net.weight(n, fan_in=100))

    def norm(x: str) -> str:
        return net.node("LayerNormalization", x, net.constant(np.ones(HIDDEN)), net.weight(HIDDEN, fan_in=100), axis=-1)

    def heads(x: str, perm: list[int]) -> str:
        return net.node("Transpose", net.node("Reshape", linear(x, HIDDEN, HIDDEN), split), perm=perm)

    x = "x"
    for _ in range(LAYERS):
        q, k, v = (heads(x, perm) for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
        scores = net.node("Add", net.node("Div", net.node("MatMul", q, k), root), "mask")
        context = net.node("MatMul", net.node("Softmax", scores, axis=-1), v)
        rows = net.node("Reshape", net.node("Transpose", context, perm=[0, 2, 1, 3]), merged)
        x = norm(net.node("Add", linear(rows, HIDDEN, HIDDEN), x))
        wide = net.node("Gelu", linear(x, HIDDEN, 4 * HIDDEN))
        x = norm(net.node("Add", linear(wide, 4 * HIDDEN, HIDDEN), x))
    return net.model({"x": ["batch", "seq", HIDDEN], "mask": ["batch", 1, 1, "seq"]}, x, ["batch", "seq", HIDDEN])


def detector() -> onnx.ModelProto:
    """Return the YOLO-like detector of models/, in its public size."""
    cases = importlib.import_module("model_cases")
    exporters, job = cases.from_models("exporters"), cases.job_of("detector", "fp32")
    proto = exporters.export_graph(job, exporters.build_model(job), "fp32")
    exporters.strip_traces(proto)
    return onnx.shape_inference.infer_shapes(version_converter.convert_version(proto, 21))


NETWORKS: Final = {"resnet50": resnet50, "bert": bert, "detector": detector}


def feeds(network: str, batch: int, tokens: int = TOKENS) -> dict[str, np.ndarray]:
    """Return inputs in float32, the same for every form."""
    random = np.random.default_rng(1)
    if network != "bert":
        name, side = ("x", IMAGE) if network == "resnet50" else ("pixel_values", 640)
        return {name: random.standard_normal((batch, 3, side, side), np.float32)}
    return {"x": random.standard_normal((batch, tokens, HIDDEN), np.float32),
            "mask": np.zeros((batch, 1, 1, tokens), np.float32)}  # fmt: skip


def make(folder: Path, network: str, form: str) -> None:
    """Write a network in a form, and compile its kernels for the timed sizes."""
    start, model, sample = time.time(), NETWORKS[network](), feeds(network, 1, 64)
    name, first = next(iter(feeds(network, SIZES[network][0]).items()))
    sizes = [f"{name}:{'x'.join(map(str, first.shape))}"]
    path = folder / f"{network}-{form}.onnx"
    if form in ("qdq", "dynamic"):
        model = quantized(model, form, path.with_suffix(".float.onnx"), sample)
        onnx.save(model, path.with_suffix(".ort.onnx"))
        model, _ = onnxfuse.optimize(model, verify=False)
    else:
        if form != "float16":
            given = {name: value[None] for name, value in sample.items()}
            model, report = onnxfuse.optimize(model, dtype=form, calibrate=given, shapes=sizes, verify=False)  # type: ignore[arg-type]
            print(form, [(each.op, each.reason, len(each.nodes)) for each in report.weights.stays])  # type: ignore[union-attr]
        model, _ = onnxfuse.optimize(model, dtype="float16", io="half", verify=False)
    onnx.save(model, path)
    made = time.time() - start
    if "CUDAExecutionProvider" in ort.get_available_providers():
        for batch in SIZES[network]:
            Bound(path, True, feeds(network, batch))
    seconds = f"made in {made:.0f} s, compiled in {time.time() - start - made:.0f} s"
    print(f"{path.name}: {len(model.graph.node)} nodes, {seconds}", flush=True)


def quantized(model: onnx.ModelProto, form: str, path: Path, sample: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Quantize a model by onnxruntime, by its defaults but for uint8 activations and scales of channels."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left: Iterator[Any] = iter([sample])

        def get_next(self) -> Any:
            return next(self.left, None)

    onnx.save(model, path)
    if form == "dynamic":
        quantization.quantize_dynamic(path, path, weight_type=quantization.QuantType.QInt8)
    else:
        quantization.quantize_static(path, path, Reader(), activation_type=quantization.QuantType.QUInt8,
                                     weight_type=quantization.QuantType.QInt8, per_channel=True)  # fmt: skip
    return onnx.load(path)


def opened(path: Path, fused: bool) -> ort.InferenceSession:
    ort.preload_dlls()
    settings, options = ort.SessionOptions(), {"enable_cuda_graph": "1"} if fused else {}
    settings.log_severity_level = 3
    kind = onnxfuse.InferenceSession if fused else ort.InferenceSession
    more: dict[str, Any] = {"wait": True} if fused else {}
    return kind(str(path), settings, providers=[("CUDAExecutionProvider", options)], **more)


class Bound:
    """A session with inputs and an output on the GPU, after its first runs."""

    def __init__(self, path: Path, fused: bool, inputs: Mapping[str, np.ndarray]) -> None:
        self.session = opened(path, fused)
        self.binding = self.session.io_binding()
        self.values = []
        for each in self.session.get_inputs():
            value = inputs[each.name].astype(np.float16 if "float16" in each.type else np.float32)
            self.values.append(ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0))
            self.binding.bind_ortvalue_input(each.name, self.values[-1])
        self.outs = []
        batch, tokens = (*self.values[0].shape(), TOKENS)[:2]
        for each in self.session.get_outputs():
            shape = [batch if not i else size if isinstance(size, int) else tokens for i, size in enumerate(each.shape)]
            kind = np.float16 if "float16" in each.type else np.float32
            self.outs.append(ort.OrtValue.ortvalue_from_shape_and_type(shape, kind, "cuda", 0))
            self.binding.bind_ortvalue_output(each.name, self.outs[-1])
        self.milliseconds(3)
        self.count = max(2, min(200, int(1e3 * ROUND_SECONDS / self.milliseconds(2))))

    def milliseconds(self, count: int) -> float:
        """Return the milliseconds of one of `count` runs."""
        self.binding.synchronize_inputs()
        begin = time.perf_counter()
        for _ in range(count):
            self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()
        return 1e3 * (time.perf_counter() - begin) / count


def time_all(folder: Path, out: Path, only: str) -> None:
    """Time all forms that there are, and write the results."""
    rows_of = importlib.import_module("rows").Rows(out, ["network", "form", "engine", "batch"])
    for network, batch in ((network, batch) for network, sizes in SIZES.items() for batch in sizes):
        inputs, ready = feeds(network, batch), dict[tuple[str, str], Bound]()
        for path in sorted(folder.glob(f"{network}-*.onnx")):
            form, engine = path.stem.removesuffix(".ort").split("-")[1], "onnxruntime" * path.stem.endswith(".ort")
            if path.stem.endswith(".float") or not path.stem.startswith(only):
                continue
            begin = time.perf_counter()
            ready[form, engine or "onnxfuse"] = Bound(path, not engine, inputs)
            print(f"{path.name}: opened in {time.perf_counter() - begin:.0f} s", flush=True)
        times = [{key: one.milliseconds(one.count) for key, one in ready.items()} for _ in range(ROUNDS)]
        results = {key: one.outs[-1].numpy().astype(np.float32) for key, one in ready.items()}
        exact = results.get(("float16", "onnxfuse"))
        for (form, engine), y in results.items():
            row: dict[str, Any] = {"network": network, "form": form, "engine": engine, "batch": batch,
                                   "ms": statistics.median(each[form, engine] for each in times)}  # fmt: skip
            if exact is not None:
                row["error"] = float(np.abs(y - exact).max() / np.abs(exact).max())
            rows_of.put(row)
            print(*(f"{value:.3f}" if isinstance(value, float) else value for value in row.values()), flush=True)


def main() -> None:
    """Make the models, or time them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("step", choices=("make", "time"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("eight_bits_networks.json"))
    parser.add_argument("--only", default="", help="a network, or a network and a form: bert-int8")
    given = parser.parse_args()
    if given.step == "time":
        time_all(given.folder, given.out, given.only)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    works = [(network, form) for network, forms in FORMS.items() for form in forms]
    processes = [spawn.Process(target=make, args=(given.folder, *work)) for work in works
                 if f"{work[0]}-{work[1]}".startswith(given.only)]  # fmt: skip
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
