"""A token of the models of decode.py in PyTorch: layers by torch.compile, and int4 products as gpt-fast has them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from decode import Llama

BLOCK: Final = 32
INNER_K_TILES: Final = 8  # of PyTorch's packed int4 weights
EPSILON: Final = 1e-5
RUNS: Final = 40  # of a round
ROUNDS: Final = 5
PAUSE_SECONDS: Final = 0.5  # before a round


class Linear(torch.nn.Module):
    """A product with random weights: float16; or, with int4, bfloat16 by integers of 4 bits, or of 8 bits."""

    def __init__(self, k: int, n: int, weights: str, bits: int = 4) -> None:
        super().__init__()
        self.weights, self.bits = weights, bits
        if weights == "float16":
            weight = torch.randn((n, k), device="cuda", dtype=torch.float16) / math.sqrt(k)
            scales = torch.ones((), device="cuda", dtype=torch.float16)
        elif bits == 4:
            packed = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
            weight = torch._convert_weight_to_int4pack(packed, INNER_K_TILES)
            scales = torch.rand((k // BLOCK, n, 2), device="cuda", dtype=torch.bfloat16) / (8 * math.sqrt(k))
        else:
            weight = torch.randint(-128, 128, (n, k), device="cuda", dtype=torch.int8)
            scales = torch.rand(n, device="cuda", dtype=torch.bfloat16) / (128 * math.sqrt(k))
        self.register_buffer("weight", weight)
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        if self.weights == "float16":
            return functional.linear(x, self.weight)
        if self.bits == 4:
            return torch._weight_int4pack_mm(x, self.weight, BLOCK, self.scales)
        return functional.linear(x, self.weight.to(x.dtype)) * self.scales


class Layer(torch.nn.Module):
    """A layer, which appends one row to its caches in place."""

    def __init__(self, s: Llama, weights: str, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.s = s
        self.qkv = Linear(s.hidden, (s.heads + 2 * s.kv_heads) * s.size, weights)
        self.o = Linear(s.heads * s.size, s.hidden, weights)
        self.gate_up = Linear(s.hidden, 2 * s.inner, weights)
        self.down = Linear(s.inner, s.hidden, weights)
        for name in "attention_norm", "inner_norm":
            self.register_buffer(name, torch.ones(s.hidden, device="cuda", dtype=dtype))
        for name in "keys", "values":
            self.register_buffer(name, torch.randn((1, s.kv_heads, rows, s.size), device="cuda", dtype=dtype))

    def forward(self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        s = self.s
        normed = functional.rms_norm(x, (s.hidden,), self.attention_norm, EPSILON)
        q, k, v = self.qkv(normed).view(1, 1, -1, s.size).transpose(1, 2).split((s.heads, s.kv_heads, s.kv_heads), 1)
        q, k = (turned(each, cos, sin) for each in (q, k))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        attended = functional.scaled_dot_product_attention(q, self.keys, self.values, mask, enable_gqa=True)
        x = x + self.o(attended.reshape(1, -1))
        gate, up = self.gate_up(functional.rms_norm(x, (s.hidden,), self.inner_norm, EPSILON)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of the last axis."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def fastest_round(run: Callable[[], object]) -> float:
    """Return the least of the rounds' medians, in milliseconds.

    On an H200, rounds in the first second of a session of onnxfuse were up to 30 % slower than later ones.
    """
    rounds = []
    for _ in range(ROUNDS):
        time.sleep(PAUSE_SECONDS)
        times = []
        for _ in range(RUNS):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        rounds.append(statistics.median(times))
    return min(rounds)


def torch_milliseconds(s: Llama, weights: str, past: int, rows: int) -> float:
    """Return the time of one token in a CUDA graph; `weights` is float16 or int4, which has bfloat16 activations."""
    inductor.coordinate_descent_tuning = True
    torch.manual_seed(0)
    dtype = torch.float16 if weights == "float16" else torch.bfloat16
    layers = [Layer(s, weights, rows, dtype) for _ in range(s.layers)]
    head = Linear(s.hidden, s.vocabulary, weights, bits=8)
    embedding = torch.randn((s.vocabulary, s.hidden), device="cuda", dtype=dtype)
    scale = torch.ones(s.hidden, device="cuda", dtype=dtype)
    token, position = torch.full((1,), 7, device="cuda"), torch.full((1,), past, device="cuda")
    cos, sin = (torch.rand((rows, s.size // 2), device="cuda", dtype=dtype) for _ in range(2))
    every = torch.arange(rows, device="cuda")

    def last(x: Tensor) -> Tensor:
        return head(functional.rms_norm(x, (s.hidden,), scale, EPSILON))

    one_layer: Any = torch.compile(Layer.forward, fullgraph=True, dynamic=False)
    logits_of: Any = torch.compile(last, fullgraph=True, dynamic=False)

    def step() -> Tensor:
        x, mask = embedding[token], (every <= position).view(1, 1, 1, rows)
        for layer in layers:
            x = one_layer(layer, x, position, cos[position], sin[position], mask)
        return logits_of(x)

    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return fastest_round(replay)
