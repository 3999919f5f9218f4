"""GroupQueryAttention nodes: their operands, and the results in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from attention_cases import NUMPY as FLOATS
from described import described

from onnxfuse.runtime.plan import FusedNode, TensorSpec

Arrays = dict[str, np.ndarray]
NUMPY = {**FLOATS, "int8": np.dtype(np.int8), "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn)}
SCALES = ("k_scale", "v_scale")
POSITIONS = 600  # rows of the tables of cosines and sines


@dataclass(frozen=True)
class Case:
    """A step of sequences with these total lengths, which have `new` rows each, over caches of `past` rows."""

    lengths: tuple[int, ...]
    new: int = 1
    past: int = 0  # rows of the past caches
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    dtype: str = "float16"
    packed: bool = True
    rotated: int | None = None  # elements of a head that are rotated; None: all, 0: none
    interleaved: bool = False
    positions: bool = False  # position_ids are an operand
    norms: bool = False
    sink: bool = False
    smooth: bool = False
    window: int = -1
    softcap: float = 0.0
    scale: float | None = None
    total: int | None = None  # total_sequence_length; None: the largest length, or the new rows if they are more
    aligned: bool = True
    column: bool = False  # seqlens_k is (batch, 1)
    bias: str = ""  # axes along which attention_bias differs besides queries and keys: "b", "h" or "bh"; "1": none
    cache: str = ""  # dtype of quantized caches; "": caches have the dtype of the queries
    per_channel: bool = False
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def total_length(self) -> int:
        return max(*self.lengths, self.new) if self.total is None else self.total

    @property
    def rows(self) -> int:
        """The rows of the present caches."""
        return max(self.past, self.total_length)

    @property
    def columns(self) -> int:
        return self.size if self.rotated is None else self.rotated

    def attributes(self) -> dict[str, Any]:
        given: dict[str, Any] = {"num_heads": self.heads, "kv_num_heads": self.kv_heads}
        given |= {"do_rotary": 1} if self.columns else {}
        given |= {"rotary_interleaved": 1} if self.interleaved else {}
        given |= {"local_window_size": self.window} if self.window > 0 else {}
        given |= {"smooth_softmax": 1} if self.smooth else {}
        given |= {"softcap": self.softcap} if self.softcap else {}
        given |= {"scale": self.scale} if self.scale is not None else {}
        if self.cache:
            given["kv_cache_bit_width"] = 8
            kind = "PER_CHANNEL" if self.per_channel else "PER_TENSOR"
            given |= dict.fromkeys(("k_quant_type", "v_quant_type"), kind)
        return given | ({"qk_norm_epsilon": 1e-5} if self.norms else {})

    def node(self) -> FusedNode:
        given, cache = {**self.attributes(), "size": self.size}, self.cache or self.dtype
        return FusedNode("group_query_attention", "n", tuple(described(self)), given, (self.dtype, cache, cache))

    def specs(self) -> tuple[TensorSpec, ...]:
        """The inputs as a plan has them: the shape of total_sequence_length is its value."""
        found = []
        for name, (shape, dtype) in described(self).items():
            given = (self.total_length,) if name == "total_sequence_length" else shape
            found.append(TensorSpec(given, dtype, self.aligned))
        return tuple(found)

    def inputs(self) -> Arrays:
        """The operands by name, in order; rows of the past beyond the lengths are NaN, or -1 in int8."""
        random, kind = np.random.default_rng(self.seed), NUMPY[self.dtype]

        def normal(*shape: int) -> np.ndarray:
            return random.standard_normal(shape, dtype=np.float32).astype(kind)

        rows = self.batch, self.new
        widths = [heads * self.size for heads in (self.heads, self.kv_heads, self.kv_heads)]
        parts = [normal(*rows, width) for width in widths]
        found: Arrays = {"query": np.concatenate(parts, -1) if self.packed else parts[0]}
        found["seqlens_k"] = (np.array(self.lengths, np.int32) - 1).reshape((-1, 1) if self.column else -1)
        found["total_sequence_length"] = np.array(self.total_length, np.int32)
        if not self.packed:
            found |= dict(zip(NEW[1:], parts[1:], strict=True))
        if self.past or self.cache:
            for name in PASTS:
                cache = normal(self.batch, self.kv_heads, self.past, self.size)
                if self.cache:
                    cache = (cache * 40).clip(-128, 127).astype(NUMPY[self.cache])
                for b, length in enumerate(self.lengths):
                    cache[b, :, max(0, length - self.new) :] = np.nan if self.cache != "int8" else -1
                found[name] = cache
        if self.columns:
            angles = random.uniform(0, 6, (POSITIONS, self.columns // 2))
            found |= {"cos_cache": np.cos(angles).astype(kind), "sin_cache": np.sin(angles).astype(kind)}
        if self.positions:
            found["position_ids"] = random.integers(0, POSITIONS, rows, np.int64)
        if self.bias:
            axes = (self.batch if "b" in self.bias else 1, self.heads if "h" in self.bias else 1)
            found["attention_bias"] = normal(*axes, self.new, self.total_length)
        if self.sink:
            found["head_sink"] = normal(self.heads)
        if self.norms:
            found |= {name: normal(self.size) for name in ("q_norm_weight", "k_norm_weight")}
        if self.cache:  # a few of the new rows' elements exceed the largest number
            scales = (1, self.kv_heads, 1, self.size) if self.per_channel else (1,)
            low, high = (0.004, 0.008) if self.cache != "int8" else (0.015, 0.03)
            found |= {name: random.uniform(low, high, scales).astype(np.float32) for name in SCALES}
        return found


NEW = ("query", "key", "value")
PASTS = ("past_key", "past_value")


@dataclass(frozen=True)
class Expected:
    """The results of a node in float64; what may have any value is NaN."""

    y: np.ndarray
    sizes: np.ndarray  # as y, but of the absolute values: the roundings of y are relative to these
    presents: tuple[np.ndarray, np.ndarray]

    @property
    def counts(self) -> np.ndarray:
        """Which elements of y have a required value."""
        return np.isfinite(self.y)


def expected(case: Case, inputs: Arrays, written: list[np.ndarray] | None = None) -> Expected:
    """Return the results.  Rotated and normalized rows are rounded once, as the caches hold them.

    With `written`, the present caches that a kernel wrote, the queries attend to the new rows of these: a number of a
    quantized cache is one step off where rounding decides.
    """
    wide = {name: value.astype(np.float64) for name, value in inputs.items()}
    q, k, v = _heads_of(case, wide)
    y = np.full((case.batch, case.new, case.heads, case.size), np.nan)
    sizes = y.copy()
    presents = tuple(np.full((case.batch, case.kv_heads, case.rows, case.size), np.nan) for _ in PASTS)
    for b, length in enumerate(case.lengths):
        valid = min(case.new, length)
        before = length - valid
        places = wide["position_ids"][b].astype(int) if case.positions else before + np.arange(case.new)
        new_q, new_k = (_turned(case, wide, x[b], places, name) for x, name in ((q, "q"), (k, "k")))
        for i, (present, past, new) in enumerate(zip(presents, PASTS, (new_k, v[b]), strict=True)):
            if before:
                present[b, :, :before] = wide[past][b, :, :before]
            rows = _stored(case, inputs, new[:valid].transpose(1, 0, 2), SCALES[i])
            present[b, :, before:length] = rows if written is None else written[i][b, :, before:length]
        for row, head in np.ndindex(valid, case.heads):
            kv = head // (case.heads // case.kv_heads)
            keys, values = (
                present[b, kv] * _scales(case, inputs, name)[kv] for present, name in zip(presents, SCALES, strict=True)
            )
            end = before + row + 1
            begin = max(0, end - case.window) if case.window > 0 else 0
            added = _bias(case, wide, b, head, row)[begin:end] if case.bias else 0.0
            weights = _weights(case, wide, keys[begin:end] @ new_q[row, head], head, added)
            y[b, row, head] = weights @ values[begin:end]
            sizes[b, row, head] = weights @ np.abs(values[begin:end])
    shape = case.batch, case.new, -1
    return Expected(y.reshape(shape), sizes.reshape(shape), presents)


def _scales(case: Case, inputs: Arrays, name: str) -> np.ndarray:
    """Return the scales of a cache as (key heads, 1, size or 1)."""
    if not case.cache:
        return np.ones((case.kv_heads, 1, 1))
    return np.broadcast_to(
        inputs[name].reshape(-1, 1, case.size if case.per_channel else 1), (case.kv_heads, 1, case.size)
    )


def _stored(case: Case, inputs: Arrays, rows: np.ndarray, name: str) -> np.ndarray:
    """Return new rows of a cache, (key heads, rows, size), as its numbers: onnxruntime multiplies by reciprocals."""
    if not case.cache:
        return rows
    found = rows.astype(np.float32) * (np.float32(1) / _scales(case, inputs, name))
    found = found.clip(-128, 127).round() if case.cache == "int8" else found.clip(-448, 448)
    return found.astype(NUMPY[case.cache]).astype(np.float64)


def near(case: Case, present: np.ndarray, rows: np.ndarray) -> bool:
    """Return whether a quantized cache has the expected numbers `rows`; a few may be one step off."""
    known = np.isfinite(rows)
    found, right = present.astype(np.float64)[known], rows[known]
    step = 1.0 if case.cache == "int8" else np.maximum(2.0**-9, np.abs(right) / 8)
    return bool(np.all(np.abs(found - right) <= step) and np.mean(found != right) < 0.01)


def unwritten(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of NaN, or of ones if the dtype has no NaN."""
    return np.full(shape, np.nan if dtype != "int8" else 1, NUMPY[dtype])


def _heads_of(case: Case, wide: Arrays) -> tuple[np.ndarray, ...]:
    counts = case.heads, case.kv_heads, case.kv_heads
    ends = np.cumsum(counts)[:-1] * case.size
    parts = np.split(wide["query"], ends, -1) if case.packed else [wide[name] for name in NEW]
    return tuple(x.reshape(case.batch, case.new, n, case.size) for x, n in zip(parts, counts, strict=True))


def _turned(case: Case, wide: Arrays, x: np.ndarray, places: np.ndarray, name: str) -> np.ndarray:
    """Return rows of heads after norm and rotation, rounded to the dtype."""
    if case.norms:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * wide[f"{name}_norm_weight"]
    if columns := case.columns:
        places = np.minimum(places, POSITIONS - 1)
        cos, sin = (wide[table][places][:, None] for table in ("cos_cache", "sin_cache"))
        one, two = (slice(0, columns, 2), slice(1, columns, 2)) if case.interleaved else (
            slice(0, columns // 2), slice(columns // 2, columns))  # fmt: skip
        turned = x.copy()
        turned[..., one] = x[..., one] * cos - x[..., two] * sin
        turned[..., two] = x[..., two] * cos + x[..., one] * sin
        x = turned
    return x.astype(NUMPY[case.dtype]).astype(np.float64)


def _bias(case: Case, wide: Arrays, b: int, head: int, row: int) -> np.ndarray:
    found: np.ndarray = wide["attention_bias"][b if "b" in case.bias else 0, head if "h" in case.bias else 0, row]
    return found


def _weights(case: Case, wide: Arrays, products: np.ndarray, head: int, bias: np.ndarray | float) -> np.ndarray:
    """Return the softmax of one row, without the weight of its sink."""
    scores = products * (case.size**-0.5 if case.scale is None else case.scale)
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    scores = scores + bias
    sinks = [wide["head_sink"][head]] if case.sink else [0.0] if case.smooth else []
    top = max(scores.max(), *sinks) if sinks else scores.max()
    weights = np.exp(scores - top)
    found: np.ndarray = weights / (weights.sum() + sum(np.exp(sink - top) for sink in sinks))
    return found
