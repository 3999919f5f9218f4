"""Time forms of attention beside plain attention of the same sizes, and each beside its body in onnxruntime.

    python benchmarks/attention_forms.py --out results [--only softcap,latent] [--dtypes float16] [--sizes 64,128]

A form is a model of one attention, written in plain operators, of 2 sequences of 2048 rows in 16 heads.  `kernel` and
`body` are the times of its fused attention alone, in a CUDA graph; `fused` and `original` those of the whole model.
`of plain` is the rate in operations of both products a second, relative to plain attention in the same run, and `of
peer` that relative to the form it is compared with: keys and values of different sizes with those of the larger size,
rotated pairs with rotated halves.
"""

from __future__ import annotations

import command_lines

if __name__ == "__main__":
    GIVEN = command_lines.attention_forms(__doc__)  # before the imports, so that --help needs no GPU

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from attention_form_texts import BATCH, FORMS, HEADS, ROWS, Form, form_model
from rows import Rows

from onnxfuse.bench.bench import CUDA_GRAPH, Bench, BenchSettings, bench

PLAIN = "plain"
RUNS = 100  # of each model; a row takes about 3 s, most of it to optimize, compile and start


def measure(form: Form, dtype: str, size: int) -> dict[str, Any]:
    """Return the times of a form in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "form.onnx"
        onnx.save(form_model(form, dtype, size), path)
        found = bench(path, BenchSettings(provider="cuda", runs=RUNS))
    wrong = [f"{each.name}: {each.reason}" for each in found.contenders if each.agrees is False]
    fused = [op for op in found.ops if op.fusion.startswith("attention")]
    if wrong or len(fused) != 1:
        return {"failed": "; ".join(wrong) or f"{len(fused)} attentions are fused: {found.ops_error}"}
    row: dict[str, Any] = {"kernel_us": us(fused[0].kernel), "body_us": us(fused[0].body), "how": fused[0].how}
    row |= {f"{name}_us": time for name, time in whole(found)}
    queries, values = form.sizes(size)
    return row | {"flops": 2.0 * BATCH * HEADS * ROWS * ROWS * (queries + values) * form.share}


def whole(found: Bench) -> Iterator[tuple[str, float | None]]:
    """Yield the name of each model and its time in a CUDA graph."""
    for each in found.contenders:
        if each.times and each.mode == CUDA_GRAPH:
            yield each.name, us(each.times.median)


def us(seconds: float | None) -> float | None:
    """Return microseconds."""
    return None if seconds is None else round(1e6 * seconds, 2)


def relative(row: dict[str, Any], other: dict[str, Any] | None) -> float | None:
    """Return the rate of a row as a part of the other's; None where one was not timed."""
    if not other or not row.get("kernel_us") or not other.get("kernel_us"):
        return None
    return round(row["flops"] / row["kernel_us"] / (other["flops"] / other["kernel_us"]), 3)


def told(row: dict[str, Any]) -> str:
    """Return a row in one line."""
    head = f"{row['form']:22}{row['dtype']:10}{row['size']:5}"
    if "failed" in row:
        return f"{head}  {row['failed']}"
    times = "".join(f"{row.get(name) or '-':>12}" for name in ("kernel_us", "body_us", "fused_us", "original_us"))
    shares = "".join(f"{row[name] or '-':>12}" for name in ("of_plain", "of_peer"))
    return f"{head}{times}{shares}"


def main(given: argparse.Namespace) -> None:
    """Time all forms, or those asked for and what they are compared with."""
    asked = set(filter(None, given.only.split(",")))
    kept = asked | {FORMS[name].peer for name in asked} | ({PLAIN} if asked else set())
    rows = Rows(given.out / "attention_forms.json", ("form", "dtype", "size"), given.add)
    titles = ("kernel us", "body us", "fused us", "original us", "of plain", "of peer")
    print(" " * 37 + "".join(f"{title:>12}" for title in titles))
    for dtype in given.dtypes.split(","):
        for size in map(int, given.sizes.split(",")):
            found: dict[str, dict[str, Any]] = {}
            for form in (each for each in FORMS.values() if not kept or each.name in kept):
                row = {"form": form.name, "dtype": dtype, "size": size, **measure(form, dtype, size)}
                row |= {"of_plain": relative(row, found.get(PLAIN)), "of_peer": relative(row, found.get(form.peer))}
                found[form.name] = row
                print(told(row), flush=True)
                rows.put(row)


if __name__ == "__main__":
    main(GIVEN)
