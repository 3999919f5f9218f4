"""The options of the benchmarks of kernels, apart from these so that --help needs neither PyTorch nor a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the one option that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the results")
    return made


def add_earlier(made: argparse.ArgumentParser) -> None:
    """Let new results join a file of earlier ones."""
    made.add_argument("--add", type=Path, metavar="FILE", help="earlier results, which new ones join or replace")


def attention(description: str | None) -> argparse.Namespace:
    """Return what the command line of attention.py asks for."""
    made = parser(description)
    made.add_argument("--only", default="", help="kinds, separated by commas: prefill, short, bias, decode")
    made.add_argument("--dtypes", default="float16", help="separated by commas")
    made.add_argument("--onnxruntime", action="store_true", help="also MultiHeadAttention")
    add_earlier(made)
    return made.parse_args()


def attention_forms(description: str | None) -> argparse.Namespace:
    """Return what the command line of attention_forms.py asks for."""
    made = parser(description)
    made.add_argument("--only", default="", help="forms, such as softcap, separated by commas")
    made.add_argument("--dtypes", default="float16", help="separated by commas")
    made.add_argument("--sizes", default="64,128", help="elements of a head of keys, separated by commas")
    add_earlier(made)
    return made.parse_args()


def conv(description: str | None) -> argparse.Namespace:
    """Return what the command line of conv.py asks for."""
    made = parser(description)
    made.add_argument("--only", default="", help="parts of shapes' names, such as '64-64 56', separated by commas")
    made.add_argument("--dtypes", default="float16", help="separated by commas")
    made.add_argument("--activation", default="relu", choices=("relu", "silu", "none"), help="of the fused nodes")
    made.add_argument("--quick", action="store_true", help="three replays, and one epilogue a shape")
    add_earlier(made)
    return made.parse_args()


def gemm(description: str | None) -> argparse.Namespace:
    """Return what the command line of gemm.py asks for."""
    made = parser(description)
    made.add_argument("--only", default="", help="shapes MxNxK, separated by commas")
    made.add_argument("--dtypes", default="float16,bfloat16", help="separated by commas")
    made.add_argument("--epilogues", default="", help="separated by commas; all without it")
    made.add_argument("--eager", action="store_true", help="time PyTorch's eager mode too")
    made.add_argument("--inductor", action="store_true", help="and torch.compile, which takes seconds a case")
    made.add_argument("--onnxruntime", action="store_true", help="and onnxruntime")
    add_earlier(made)
    return made.parse_args()


def kernels(description: str | None) -> argparse.Namespace:
    """Return what the command line of kernels.py asks for."""
    made = parser(description)
    made.add_argument("--quick", action="store_true", help="three shapes, fp16")
    made.add_argument("--only", default="", help="fusions, separated by commas")
    made.add_argument("--shapes", default="", help="of the first input, such as 4096x768, separated by commas")
    made.add_argument("--dtypes", default="", help="such as float16, separated by commas")
    made.add_argument("--without", default="", help="peers, separated by commas")
    made.add_argument("--processes", type=int, default=8, help="that prepare cases; only one measures at a time")
    made.add_argument("--prepare", type=float, default=600, metavar="SECONDS", help="to prepare cases side by side")
    add_earlier(made)
    return made.parse_args()


def other_gpus(description: str | None) -> argparse.Namespace:
    """Return what the command line of other_gpus.py asks for."""
    made = parser(description)
    made.add_argument("--gpus", default="", help="such as T4, separated by commas; all without it")
    made.add_argument("--only", default="", help="gemm or attention; both without it")
    add_earlier(made)
    return made.parse_args()


def regions(description: str | None) -> argparse.Namespace:
    """Return what the command line of regions.py asks for."""
    made = parser(description)
    made.add_argument("--results", type=Path, metavar="FILE", help="where the results go  [default: OUT/regions.json]")
    made.add_argument("--only", default="", help="names, such as 'token shift' or 'seed 7', separated by commas")
    made.add_argument("--generated", type=int, default=200, metavar="N", help="programs at random")
    made.add_argument("--random-from", type=int, default=0, metavar="N", help="without the first N of these")
    made.add_argument("--named", action=argparse.BooleanOptionalAction, default=True, help="regions of real networks")
    made.add_argument("--quick", action="store_true", help="three replays")
    made.add_argument("--processes", type=int, default=16, help="that compile, and then time in turn")
    made.add_argument("--max-autotune", action="store_true", help="Inductor tries more tilings, for minutes")
    made.add_argument("--check-cpu", action="store_true", help="compare PyTorch's programs with onnxruntime, no GPU")
    add_earlier(made)
    return made.parse_args()


def tilings(description: str | None) -> argparse.Namespace:
    """Return what the command line of tilings.py asks for."""
    made = parser(description)
    made.add_argument("--only", default="layer_norm,add_rms_norm,softmax,bias_activation,gated_activation",
                      help="fusions, separated by commas")  # fmt: skip
    made.add_argument("--shapes", default="16384x4096,8192x8192,4096x768,512x65536", help="separated by commas")
    return made.parse_args()
