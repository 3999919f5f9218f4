"""The fused nodes and shapes that kernels.py measures, each with its formula in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.plan import FusedNode, Plan, TensorSpec

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "int64": torch.int64}
WEIGHTS = ("scale", "bias", "cos", "sin", "table", "table_2", "row")
IDS = {"ids": "table", "ids_2": "table_2"}  # inputs of ids, and the tables that they index
LARGE = [(16384, 4096), (8192, 8192)]
SMALL = [(4096, 768), (512, 65536), (1, 4096), (33, 1023), (128, 128), (4096, 64)]


@dataclass(frozen=True)
class Case:
    """A fused node at a shape, and its formula in PyTorch."""

    fusion: str
    inputs: dict[str, tuple[int, ...]]
    formula: Callable[..., Any]
    dtype: str = "float16"
    outputs: int = 1
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first input, or of the rows that an embedding looks up."""
        first = next(iter(self.inputs.values()))
        return (math.prod(first), self.inputs["table"][1]) if self.embeds else first

    @property
    def embeds(self) -> bool:
        """Whether rows are looked up by ids: no launch can then read what the one before it wrote."""
        return "ids" in self.inputs

    @property
    def name(self) -> str:
        return f"{self.fusion} {self.shape} {self.dtype} {self.attributes}"

    def node(self) -> FusedNode:
        return FusedNode(self.fusion, self.fusion, tuple(self.inputs), self.attributes, (self.dtype,) * self.outputs)

    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(s, self.dtype_of(name), constant=name in WEIGHTS) for name, s in self.inputs.items())

    def dtype_of(self, name: str) -> str:
        return "int64" if name in IDS else self.dtype

    def plans(self) -> list[Plan]:
        """Return the plans of the node, the one that is expected to be fastest first."""
        return find_host(self.fusion).candidates(self.node(), self.specs(), gpu(0))

    def tensors(self) -> list[torch.Tensor]:
        return [
            torch.randint(0, self.inputs[IDS[name]][0], shape, device="cuda")
            if name in IDS
            else random(name, shape, DTYPES[self.dtype])
            for name, shape in self.inputs.items()
        ]

    def moved(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes of inputs and outputs; of a table, only those of the rows that are looked up."""
        whole = sum(t.numel() * t.element_size() for t in tensors)
        for name, table in IDS.items():
            if table in self.inputs:
                (rows, size), looked_up = self.inputs[table], math.prod(self.inputs[name])
                whole -= max(0, rows - looked_up) * size * DTYPES[self.dtype].itemsize
        return whole


def random(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return random values that stay finite when the fusion is applied again and again."""
    if name in ("cos", "sin"):
        angles = torch.linspace(0, 6.28, math.prod(shape), device="cuda").view(shape)
        return (angles.cos() if name == "cos" else angles.sin()).to(dtype)
    draw = torch.rand if name == "up" else torch.randn
    return draw(shape, device="cuda", dtype=dtype)


def add_norm(norm: Callable[..., Any]) -> Callable[..., Any]:
    def formula(x: Any, residual: Any, *weights: Any) -> tuple[Any, Any]:
        total = x + residual
        return norm(total, *weights), total

    return formula


def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], scale, bias, 1e-5)


def rms_norm(x: Any, scale: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * scale


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    heads = x.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)
    first, second = heads.chunk(2, -1)
    return (heads * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).contiguous()


def embedded(ids: Any, table: Any, ids_2: Any, table_2: Any, row: Any, scale: Any, bias: Any) -> Any:
    return layer_norm(F.embedding(ids, table) + F.embedding(ids_2, table_2) + row, scale, bias)


def embedding(ids: Any, table: Any, scale: Any) -> tuple[Any, Any]:
    rows = F.embedding(ids, table)
    return rms_norm(rows, scale), rows


def embedding_cases(dtype: str) -> Iterator[Case]:
    """Yield embeddings: words, positions and types of BERT, and those of a decoder, which also write the residual."""
    d, epsilon = (768,), {"epsilon": 1e-5}
    words = {"ids": (8, 512), "table": (30522, 768)}
    bert = {**words, "ids_2": (1, 512), "table_2": (512, 768), "row": d, "scale": d, "bias": d}
    yield Case("embedding_layer_norm", bert, embedded, dtype, 1, epsilon)
    yield Case("embedding_rms_norm", {**words, "scale": d}, embedding, dtype, 2, epsilon)


def row_cases(x: tuple[int, ...], dtype: str = "float16") -> Iterator[Case]:
    d, epsilon = x[-1:], {"epsilon": 1e-5}
    four = {"x": x, "residual": x, "scale": d, "bias": d}
    three = {"x": x, "residual": x, "scale": d}
    yield Case("layer_norm", {"x": x, "scale": d, "bias": d}, layer_norm, dtype, 1, epsilon)
    yield Case("rms_norm", {"x": x, "scale": d}, rms_norm, dtype, 1, epsilon)
    yield Case("add_layer_norm", four, add_norm(layer_norm), dtype, 2, epsilon)
    yield Case("add_rms_norm", three, add_norm(rms_norm), dtype, 2, epsilon)
    yield Case("softmax", {"x": x}, lambda x: F.softmax(x, -1), dtype)
    gelu, silu, none = ({"activation": name} for name in ("gelu", "silu", "none"))
    yield Case("bias_activation", {"x": x, "bias": d}, lambda x, b: F.gelu(x + b), dtype, 1, gelu)
    yield Case("gated_activation", {"gate": x, "up": x}, lambda g, u: F.silu(g) * u, dtype, 1, silu)
    yield Case("activation", {"x": x}, lambda x: F.silu(x), dtype, 1, silu)
    yield Case("activation", {"x": x}, lambda x: x.clone(), dtype, 1, none)  # a copy, for comparison


def other_cases() -> Iterator[Case]:
    for x in (2, 320, 64, 64), (8, 128, 256, 256), (2, 1280, 16, 16):
        c, options = x[1:2], {"groups": 32, "epsilon": 1e-5, "activation": "silu"}
        inputs = {"x": x, "scale": c, "bias": c}
        yield Case("group_norm", inputs, lambda x, s, b: F.silu(F.group_norm(x, 32, s, b, 1e-5)), "float16", 1, options)
    for x, size in ((1, 2048, 4096), 128), ((8, 4096, 4096), 128), ((1, 128, 2048), 64):
        table = (1, x[1], size)
        yield Case("rotary_embedding", {"x": x, "cos": table, "sin": table}, rotary, "float16", 1, {"layout": "packed"})


def cases(quick: bool) -> Iterator[Case]:
    for shape in [LARGE[0], SMALL[0], SMALL[2]] if quick else [*LARGE, *SMALL]:
        yield from row_cases(shape)
    yield from other_cases()
    for dtype in ["float16"] if quick else ["float16", "bfloat16"]:
        yield from embedding_cases(dtype)
    for shape in [] if quick else LARGE:
        yield from row_cases(shape, "bfloat16")
    if not quick:
        yield from row_cases(LARGE[0], "float32")
