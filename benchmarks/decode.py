"""Time one token of language models as onnxruntime-genai's builder writes them, beside onnxruntime and PyTorch.

    python benchmarks/decode.py --out FILE [--only llama-1b,llama-8b] [--weights float16,int4] [--past 1024]
                                [--cache float16,int8] [--greedy] [--no-pytorch]

Weights are random.  In the file, all layers share the bytes of one layer; in memory, each layer has its own.  With
int4, products have blocks of 32, and lm_head has int8.  Caches of int8 have one scale, which onnxruntime's fastest
kernel requires.  Past and present caches are one buffer, as genai binds them, and all engines run in a CUDA graph.
PyTorch's layers are compiled, and have float16 caches (decode_torch.py).  `bytes` counts the weights and caches that a
token reads.  With `--greedy`, the models end in an ArgMax, and their output is the next token.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click
import numpy as np
import onnx
import onnxruntime as ort
import torch
from decode_torch import fastest_round, torch_milliseconds
from onnx import TensorProto, helper
from rows import Rows

import onnxfuse
from onnxfuse.session import InferenceSession, explain_session

BLOCK: Final = 32
SPARE_ROWS: Final = 128  # of a cache after the past
CACHE_SCALE: Final = 0.03  # of caches of int8
MICROSOFT: Final = "com.microsoft"


@dataclass(frozen=True)
class Llama:
    """The sizes of a model."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    size: int
    vocabulary: int = 128256


MODELS: Final = {
    "llama-1b": Llama(16, 2048, 8192, 32, 8, 64),
    "llama-8b": Llama(32, 4096, 14336, 32, 8, 128),
}


class Builder:
    """The graph of a decoder with a key-value cache, whose weights lie in a file beside it."""

    def __init__(self, sizes: Llama, weights: str, folder: Path, cache: str, greedy: bool) -> None:
        """Open the file of weights; `weights` is float16 or int4, and `cache` float16 or int8."""
        self.sizes, self.weights, self.folder, self.cache, self.greedy = sizes, weights, folder, cache, greedy
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.read_bytes = 0  # of weights that a token reads
        self._random = np.random.default_rng(0)
        self._places: dict[str, int] = {}  # offsets in the file
        self._data = (folder / "weights.bin").open("wb")

    def constant(self, name: str, dtype: int, shape: tuple[int, ...], scale: float = 1.0, is_read: bool = True) -> str:
        """Write random numbers up to `scale`, or random bytes; return their name."""
        count = math.prod(shape)
        some = self._random.standard_normal(min(count, 1 << 20)).astype(np.float16) * np.float16(scale)
        if dtype == TensorProto.UINT8:
            some = self._random.integers(0, 256, min(count, 1 << 20), dtype=np.uint8)
        part = re.sub(r"^layer\d+\.", "", name)
        if part not in self._places:
            self._places[part] = self._data.tell()
            whole, rest = divmod(count, some.size)
            for piece in (*[some] * whole, some[:rest]):
                self._data.write(piece)
        place = {"location": "weights.bin", "offset": self._places[part], "length": count * some.itemsize}
        tensor = TensorProto(name=name, data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
        entries = ((key, str(value)) for key, value in place.items())
        tensor.external_data.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in entries)
        self.constants.append(tensor)
        self.read_bytes += count * some.itemsize if is_read else 0
        return name

    def add(self, op: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        """Add a node of one output; return its name."""
        self.nodes.append(helper.make_node(op, inputs, [output], output, domain=domain, **attributes))
        return output

    def product(self, x: str, name: str, k: int, n: int, bits: int = 4) -> str:
        """Return x times a weight of n columns."""
        if self.weights == "float16":
            weight = self.constant(f"{name}.weight", TensorProto.FLOAT16, (k, n), 1 / math.sqrt(k))
            return self.add("MatMul", [x, weight], f"{name}.y")
        packed = self.constant(f"{name}.q", TensorProto.UINT8, (n, k // BLOCK, BLOCK * bits // 8))
        scales = self.constant(f"{name}.scales", TensorProto.FLOAT16, (n, k // BLOCK), 2 / 2**bits / math.sqrt(k))
        given = {"K": k, "N": n, "bits": bits, "block_size": BLOCK}
        return self.add("MatMulNBits", [x, packed, scales], f"{name}.y", MICROSOFT, **given)

    def norm(self, name: str, x: str, residual: str = "") -> tuple[str, str]:
        """Return an RMSNorm of x, or of x + residual, and the sum."""
        scale = self.constant(f"{name}.scale", TensorProto.FLOAT16, (self.sizes.hidden,))
        if not residual:
            return self.add("SimplifiedLayerNormalization", [x, scale], f"{name}.y", epsilon=1e-5, axis=-1), x
        outputs = [f"{name}.y", "", "", f"{name}.sum"]
        self.nodes.append(
            helper.make_node("SkipSimplifiedLayerNormalization", [x, residual, scale], outputs, name, domain=MICROSOFT,
                             epsilon=1e-5)
        )  # fmt: skip
        return outputs[0], outputs[3]

    def layer(self, i: int, x: str, residual: str) -> tuple[str, str]:
        """Return the result of a layer's last product, and the residual that it is added to."""
        s, name = self.sizes, f"layer{i}"
        normed, total = self.norm(f"{name}.attention_norm", x, residual)
        packed = self.product(normed, f"{name}.qkv", s.hidden, (s.heads + 2 * s.kv_heads) * s.size)
        outputs = [f"{name}.attention", f"present.{i}.key", f"present.{i}.value"]
        inputs = [packed, "", "", f"past.{i}.key", f"past.{i}.value", "seqlens_k", "total_length", "cos", "sin"]
        given: dict[str, Any] = {}
        if self.cache == "int8":
            inputs += ["", "", "", "cache_scale", "cache_scale"]
            given = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
        self.nodes.append(
            helper.make_node("GroupQueryAttention", inputs, outputs, outputs[0], domain=MICROSOFT, num_heads=s.heads,
                             kv_num_heads=s.kv_heads, scale=1 / math.sqrt(s.size), do_rotary=1, **given)
        )  # fmt: skip
        attended = self.product(outputs[0], f"{name}.o", s.heads * s.size, s.hidden)
        normed, total = self.norm(f"{name}.inner_norm", total, attended)
        gate = self.product(normed, f"{name}.gate", s.hidden, s.inner)
        up = self.product(normed, f"{name}.up", s.hidden, s.inner)
        silu = self.add("Mul", [gate, self.add("Sigmoid", [gate], f"{name}.sigmoid")], f"{name}.silu")
        inner = self.add("Mul", [silu, up], f"{name}.inner")
        return self.product(inner, f"{name}.down", s.inner, s.hidden), total

    def model(self, rows: int) -> Path:
        """Write a model whose caches have so many rows; return its path."""
        s = self.sizes
        numbers = {"one": np.array([1], np.int64), "position": np.array(1, np.int64)}
        numbers |= {"cache_scale": np.array([CACHE_SCALE], np.float32)} if self.cache == "int8" else {}
        self.constants += [onnx.numpy_helper.from_array(value, name) for name, value in numbers.items()]
        for table in "cos", "sin":
            self.constant(table, TensorProto.FLOAT16, (rows, s.size // 2), is_read=False)
        self.add("ReduceSum", ["attention_mask", "one"], "counted", keepdims=0)
        self.add("Sub", ["counted", "one"], "last")
        self.add("Cast", ["last"], "seqlens_k", to=TensorProto.INT32)
        self.add("Gather", [self.add("Shape", ["attention_mask"], "mask_shape"), "position"], "total")
        self.add("Cast", ["total"], "total_length", to=TensorProto.INT32)
        table = self.constant("embedding", TensorProto.FLOAT16, (s.vocabulary, s.hidden), is_read=False)
        x, residual = self.add("Gather", [table, "input_ids"], "x"), ""
        for i in range(s.layers):
            x, residual = self.layer(i, residual, x) if residual else self.layer(i, x, "")
        normed, _ = self.norm("final_norm", residual, x)
        logits = self.product(normed, "lm_head", s.hidden, s.vocabulary, bits=8)
        self.nodes[-1].output[0] = "logits"
        assert logits == "lm_head.y"
        if self.greedy:
            self.add("ArgMax", ["logits"], "token", axis=-1, keepdims=0)
        self._data.close()
        return self._write(rows)

    def _write(self, rows: int) -> Path:
        s, half = self.sizes, TensorProto.FLOAT16
        cache = ["batch", s.kv_heads, rows, s.size]
        cached = TensorProto.INT8 if self.cache == "int8" else half
        given = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"]),
                 helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"])]  # fmt: skip
        results = [helper.make_tensor_value_info("logits", half, ["batch", "new", s.vocabulary])]
        if self.greedy:
            results = [helper.make_tensor_value_info("token", TensorProto.INT64, ["batch", "new"])]
        for i in range(s.layers):
            for part in "key", "value":
                given.append(helper.make_tensor_value_info(f"past.{i}.{part}", cached, cache))
                results.append(helper.make_tensor_value_info(f"present.{i}.{part}", cached, cache))
        graph = helper.make_graph(self.nodes, "decoder", given, results, self.constants)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        path = self.folder / "model.onnx"
        path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())
        return path


def milliseconds(path: Path, of: Builder, past: int, rows: int, is_fused: bool) -> tuple[float, np.ndarray, str]:
    """Return the time of one token, its logits or the next token, and how fused nodes run."""
    sizes = of.sizes
    options = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})]
    session = (InferenceSession if is_fused else ort.InferenceSession)(str(path), providers=options)
    binding, held = session.io_binding(), []

    def bind(name: str, tensor: torch.Tensor, dtype: Any, is_input: bool = True) -> None:
        held.append(tensor)
        (binding.bind_input if is_input else binding.bind_output)(
            name, "cuda", 0, dtype, list(tensor.shape), tensor.data_ptr()
        )

    torch.manual_seed(0)
    bind("input_ids", torch.full((1, 1), 7, device="cuda"), np.int64)
    bind("attention_mask", torch.ones((1, past + 1), device="cuda", dtype=torch.int64), np.int64)
    for i in range(sizes.layers):
        for part in "key", "value":
            cache = torch.randn((1, sizes.kv_heads, rows, sizes.size), device="cuda", dtype=torch.float16)
            if of.cache == "int8":
                cache = (cache / CACHE_SCALE).round().clamp(-128, 127).to(torch.int8)
            bind(f"past.{i}.{part}", cache, np.dtype(of.cache))
            bind(f"present.{i}.{part}", cache, np.dtype(of.cache), is_input=False)
    result = torch.zeros((1, 1, sizes.vocabulary), device="cuda", dtype=torch.float16)
    if of.greedy:
        result = torch.zeros((1, 1), device="cuda", dtype=torch.int64)
    bind("token" if of.greedy else "logits", result, np.int64 if of.greedy else np.float16, is_input=False)
    torch.cuda.synchronize()
    for _ in range(4):
        session.run_with_iobinding(binding)
    fastest = fastest_round(lambda: session.run_with_iobinding(binding))
    torch.cuda.synchronize()
    ways = ""
    if is_fused:
        found = [f"{each.fusion} {each.how}" for each in explain_session(session)]
        ways = ", ".join(f"{found.count(way)} {way}" for way in dict.fromkeys(found))
    return fastest, result.double().cpu().numpy(), ways


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON file to write.")
@click.option("--only", default=",".join(MODELS), help="Names of models, separated by commas.")
@click.option("--weights", default="float16,int4", help="float16, int4 or both.")
@click.option("--past", default=1024, help="Tokens in the caches.")
@click.option("--cache", default="float16", help="float16, int8 or both.")
@click.option("--greedy", is_flag=True, help="Let the models end in an ArgMax in place of logits.")
@click.option("--pytorch/--no-pytorch", default=True, help="Whether to time PyTorch, which takes the longest.")
def main(out: Path, only: str, weights: str, past: int, cache: str, greedy: bool, pytorch: bool) -> None:
    """Time one token of each model with onnxruntime, PyTorch and onnxfuse."""
    ort.preload_dlls()
    rows = Rows(out, ("model", "weights", "past", "cache", "greedy"))
    for name, kind, cached in itertools.product(only.split(","), weights.split(","), cache.split(",")):
        with TemporaryDirectory() as folder:
            sizes, capacity = MODELS[name], past + SPARE_ROWS
            builder = Builder(sizes, kind, Path(folder), cached, greedy)
            path = builder.model(capacity)
            fused, _ = onnxfuse.optimize(path, verify=False)
            (Path(folder) / "fused.onnx").write_bytes(fused.SerializeToString())  # its weights stay in their file
            plain, right, _ = milliseconds(path, builder, past, capacity, is_fused=False)
            own, found, ways = milliseconds(Path(folder) / "fused.onnx", builder, past, capacity, is_fused=True)
        in_torch = torch_milliseconds(sizes, kind, past, capacity) if pytorch else None
        caches = 2 * np.dtype(cached).itemsize * sizes.layers * sizes.kv_heads * past * sizes.size
        read = builder.read_bytes + caches
        error = float(np.abs(found - right).max() / max(1e-30, np.abs(right).max()))
        label = f"{name} {kind}, caches of {cached}{', greedy' * greedy}"
        others = f"onnxruntime {plain:.3f}{f', PyTorch {in_torch:.3f}' if in_torch else ''}"
        print(f"{label}: onnxfuse {own:.3f} ms, {others}, {read / own / 1e9:.2f} TB/s; error {error:.1e}; {ways}",
              flush=True)  # fmt: skip
        rows.put({"model": name, "weights": kind, "past": past, "cache": cached, "greedy": greedy, "onnxfuse_ms": own,
                  "onnxruntime_ms": plain, "torch_ms": in_torch, "bytes": read, "error": error})  # fmt: skip
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
