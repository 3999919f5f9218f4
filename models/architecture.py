"""The types of the table of architectures: graph inputs, variants of exports, and architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

Config = Mapping[str, int | list[int]]
Builder = Callable[[Config, str], nn.Module]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class Input:
    """One graph input: integers lie in `values` (both ends included), floats are drawn from a normal distribution."""

    name: str
    dims: tuple[str | int, ...]
    values: tuple[int, int] | None = None
    prefix_mask: bool = False  # 1s followed by 0s along the last axis; the first element is always 1
    arg: str = ""  # the parameter of forward(), where it is not the name

    def shape(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the dims as numbers; a symbolic dim is a name or a sum of names ("past + seq")."""
        return [d if isinstance(d, int) else sum(sizes[part] for part in d.split(" + ")) for d in self.dims]

    def draw(self, sizes: Mapping[str, int], dtype: torch.dtype) -> torch.Tensor:
        """Return a valid random tensor of this input."""
        shape = self.shape(sizes)
        if self.prefix_mask:
            kept = torch.randint(1, shape[-1] + 1, (*shape[:-1], 1))
            kept.view(-1)[0] = shape[-1]
            return (torch.arange(shape[-1]) < kept).to(torch.int64)
        if self.values:
            return torch.randint(self.values[0], self.values[1] + 1, shape)
        return torch.randn(shape).to(dtype)


@dataclass(frozen=True)
class Variant:
    """One way to export an architecture; `tag` names it in the file name, after the attention implementation."""

    tag: str
    exporter: str  # "dynamo" or "ts"
    opset: int | None  # None: the exporter's default
    attention: str = ""
    dtype: str = "fp32"
    keep_batch_norm: bool = False
    numbered_names: bool = False  # short names, as in files of older torch releases
    only_batch: int = 0  # the only batch size that onnxruntime runs; 0: it runs all

    def file_name(self, architecture: str) -> str:
        """`bert_sdpa_dynamo_fp16.onnx`; models without attention have no attention in their name."""
        return "_".join(part for part in (architecture, self.attention, self.tag, self.dtype) if part) + ".onnx"


@dataclass(frozen=True)
class Architecture:
    """One architecture: `config` is the tiny size, `full` the size of the public model where it can be exported too."""

    name: str
    build: Builder
    inputs: Callable[[Config], tuple[Input, ...]]
    outputs: tuple[tuple[str, tuple[str, ...]], ...]  # name and leading symbolic dims, as the exporter is told them
    config: Config
    variants: tuple[Variant, ...]
    sizes: tuple[Mapping[str, int], Mapping[str, int]] = ({"batch": 2, "seq": 7}, {"batch": 3, "seq": 12})
    full: Config | None = None
    calibrated: bool = False  # in public sizes, running statistics are those of random inputs
    gain: float = 1.0  # factor of random weights; outputs of deep gated networks hardly depend on inputs without it
    redrawn: bool = True  # whether reading the archive draws the parameters; False if bfloat16 needs these
    metadata: Mapping[str, str] | None = None
