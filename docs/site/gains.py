"""What was measured of each fusion alone, from benchmarks/results, as tables for the page of fusions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from results import result, rows

SMALL, LARGE = [4096, 768], [16384, 4096]
CHAINED: Final = (  # fusion, shapes and activation of rows of the benchmark of memory-bound kernels
    ("activation", (SMALL, LARGE), "silu"), ("add_layer_norm", (SMALL, LARGE), None),
    ("add_rms_norm", (SMALL, LARGE), None), ("bias_activation", (SMALL, LARGE), "gelu"),
    ("embedding_layer_norm", (SMALL,), None), ("embedding_rms_norm", (SMALL,), None),
    ("gated_activation", (SMALL, LARGE), "silu"), ("group_norm", ([2, 320, 64, 64], [8, 128, 256, 256]), "silu"),
    ("layer_norm", (SMALL, LARGE), None), ("rms_norm", (SMALL, LARGE), None),
    ("rotary_embedding", ([1, 2048, 4096], [8, 4096, 4096]), None), ("softmax", (SMALL, LARGE), None),
)  # fmt: skip
ATTENTIONS: Final = (
    "b8 h12 s512 d64 padding", "b2 h16 s8192 d128 causal", "b1 h12 s128 d64", "b8 h32 kv8 q1 k4096 d128",
    "b8 h32 kv8 q1 k32768 d128",
)  # fmt: skip
CONVOLUTIONS: Final = ("b32 64-64 56 3x3", "b32 64-256 56 1x1", "b8 3-32 640 3x3/2", "b32 480 14 depthwise 3x3")
TRANSPOSED: Final = ("b8 256-128 32 2x2/2 transposed", "b32 512-256 16 4x4/2 transposed")


@dataclass(frozen=True)
class Gain:
    """What one node takes, in microseconds, beside other ways to compute the same; None where one was not measured."""

    what: str
    ours: float
    others: Mapping[str, float | None]


def gains() -> dict[str, list[Gain]]:
    """Return what was measured of each fusion; fusions that were not measured alone are left out."""
    found: dict[str, list[Gain]] = {}
    for fusion, gain in (*_chained(), *_products(), *_attention(), *_convolutions()):
        found.setdefault(fusion, []).append(gain)
    return found


def gain_table(measured: Sequence[Gain]) -> str:
    """Return a table of Markdown with a row for each measurement and a column for each way."""
    names = [name for name in measured[0].others if any(gain.others[name] for gain in measured)]
    head = ["microseconds on an NVIDIA H200, float16", "onnxfuse", *names]
    cells = [head, *(_cells(gain, names) for gain in measured)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|---|" + "---:|" * (1 + len(names)), *lines[1:]])


def _cells(gain: Gain, names: Sequence[str]) -> list[str]:
    return [gain.what, f"**{three_digits(gain.ours)}**", *(_beside(gain, name) for name in names)]


def _beside(gain: Gain, name: str) -> str:
    """Return the time of another way, and how many times as long it takes."""
    time = gain.others[name]
    return "" if time is None else f"{three_digits(time)} ({time / gain.ours:.2f}x)"


def three_digits(value: float) -> str:
    """Return a number with three digits that count, or with all of an integer part that is longer."""
    return f"{value:.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def _chained() -> Iterator[tuple[str, Gain]]:
    for fusion, shapes, activation in CHAINED:
        label = f", {activation}" if activation else ""
        for shape in shapes:
            (row,) = (
                row for row in rows("kernels-h200", fusion=fusion, shape=shape, dtype="float16")
                if row["attributes"].get("activation") == activation
            )  # fmt: skip
            others = {_onnxruntime("kernels-h200"): row.get("ort_chain_us"), "Inductor": row.get("inductor_chain_us")}
            yield fusion, Gain(f"{_dims(shape)}{label}, in a chain", row["chain_us"], others)


def _products() -> Iterator[tuple[str, Gain]]:
    eager = f"PyTorch {result('gemm-h200')['versions']['torch'].partition('+')[0]}"
    for shape in [4096, 3072, 768], [1, 4096, 4096]:
        (row,) = rows("gemm-h200", shape=shape, dtype="float16", epilogue="bias+gelu")
        # onnxruntime was timed in another run, beside onnxfuse
        others = {_onnxruntime("gemm-h200"): row["onnxruntime_us"]}
        yield "gemm_bias_activation", Gain(f"{_dims(shape)}, bias, gelu", row["onnxruntime_beside_us"], others)
    for shape in [2048, 5632, 2048], [16, 4096, 4096]:
        (row,) = rows("gemm-h200", shape=shape, dtype="float16", epilogue="gate")
        yield "gated_gemm", Gain(f"{_dims(shape)}, silu", row["us"], {eager: row["eager_us"]})


def _attention() -> Iterator[tuple[str, Gain]]:
    for name in ATTENTIONS:
        (row,) = rows("attention-h200", name=name, dtype="float16")
        ours = min(plan["us"] for plan in row["ours"].values())
        others = {"cudnn_us": "cuDNN", "flash2_us": "FlashAttention 2", "efficient_us": "memory-efficient"}
        yield "attention", Gain(name, ours, {label: row.get(key) for key, label in others.items()})


def _convolutions() -> Iterator[tuple[str, Gain]]:
    for fusion, shapes in ("conv_bias_activation", CONVOLUTIONS), ("conv_transpose_bias_activation", TRANSPOSED):
        for shape in shapes:
            (row,) = rows("conv-h200", shape=shape, dtype="float16")
            others = {"cuDNN, bare": row["cudnn_us"], "cuDNN, fused": row.get("fused_us")}
            yield fusion, Gain(f"{shape}, {row['epilogue'].replace('+', ', ')}", row["us"], others)


def _onnxruntime(name: str) -> str:
    return f"onnxruntime {result(name)['versions']['onnxruntime']}"


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
