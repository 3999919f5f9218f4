"""Write the tables of the pages from benchmarks/results and docs/decisions: `python docs/site/tables.py`.

A page has a table where a line `<!-- table: NAME -->` stands; the lines from there to `<!-- end of table -->` are
written anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

from gains import three_digits
from results import ROOT, dated, read, result, rows

MARK: Final = re.compile(r"^<!-- table: (\w+) -->\n.*?^<!-- end of table -->$", re.DOTALL | re.MULTILINE)
DECISION: Final = re.compile(
    r"# (?P<title>.+)\n\n(?P<date>\d{4}-\d\d-\d\d)\n\n\*\*What\.\*\* .+?\.\s(?=.*^\*\*Why\.\*\* )",
    re.DOTALL | re.MULTILINE,
)
MODELS: Final = {
    "bert-b8-s512": "BERT-base, batch 8, 512 tokens",
    "bert-b8-s512-tf32": "BERT-base in float32 with TF32, batch 8, 512 tokens",
    "bert-b1-s128": "BERT-base, batch 1, 128 tokens",
    "deberta-b8-s128": "DeBERTa-v3-base, batch 8, 128 tokens",
    "t5-b8-s256": "T5-base encoder, batch 8, 256 tokens",
    "clip-text-b32": "CLIP, text encoder, batch 32",
    "llama-s2048": "Llama, 4 layers, 2048 tokens",
    "llama-s128": "Llama, 4 layers, 128 tokens",
    "llama-decode-4k": "Llama, 4 layers, one token after 4096",
    "qwen2-s1024": "Qwen2, 4 layers, 1024 tokens",
    "gemma2-s1024": "Gemma 2, 4 layers, 1024 tokens",
    "gptj-s1024-eager": "GPT-J, 4 layers, 1024 tokens, eager attention",
    "gpt-neox-s1024": "GPT-NeoX, 4 layers, 1024 tokens",
    "gpt2-b4-s1024": "GPT-2, batch 4, 1024 tokens",
    "gpt2-decode-b8-1000": "GPT-2, batch 8, one token after 1000",
    "whisper-encoder-b4": "Whisper, encoder, batch 4",
    "wav2vec2-b4": "wav2vec 2.0, batch 4",
    "vit-b32": "ViT-B/16, batch 32",
    "vit-b1": "ViT-B/16, batch 1",
    "dinov2-b8": "DINOv2, batch 8",
    "swin-b16": "Swin-T, batch 16",
    "resnet50-b32": "ResNet-50, batch 32",
    "resnet50-b1": "ResNet-50, batch 1",
    "resnet50-b32-tf32": "ResNet-50 in float32 with TF32, batch 32",
    "mobilenetv3-b32": "MobileNetV3-Large, batch 32",
    "efficientnet-b32": "EfficientNet-B0, batch 32",
    "convnext-b16": "ConvNeXt-T, batch 16",
    "densenet-b16": "DenseNet-121, batch 16",
    "detector-b8": "YOLO-like detector, batch 8",
    "detector-b1": "YOLO-like detector, batch 1",
    "small-detector-b8": "smaller YOLO-like detector, batch 8",
    "small-detector-b1": "smaller YOLO-like detector, batch 1",
    "unet-b2": "UNet blocks of Stable Diffusion, batch 2",
    "small-unet-b2": "fewer UNet blocks of Stable Diffusion, batch 2",
    "vae-decoder-b1": "VAE decoder of Stable Diffusion, batch 1",
}
OF_THE_README: Final = (
    "bert-b8-s512", "bert-b1-s128", "llama-s2048", "gpt2-decode-b8-1000", "whisper-encoder-b4", "swin-b16",
    "resnet50-b32", "efficientnet-b32", "small-detector-b8", "deberta-b8-s128",
)  # fmt: skip
# results with peers
WHOLE_MODELS: Final = ("models-h200", "convolutional_models-h200", "whole_models-h200", "slow_models-h200")
TRENDS: Final = (*WHOLE_MODELS, "models-latest-h200")
PEERS: Final = {  # of these results, those that are compared with onnxfuse in a CUDA graph
    "ort": "onnxruntime", "ort-graph": "onnxruntime", "ort-nhwc-graph": "prefer_nhwc",
    "ort-transformers": "its transformers optimizer", "onnxscript": "onnxscript",
    "onnxscript-graph": "onnxscript", "torch-eager": "PyTorch",
    "torch-compile": "torch.compile", "torch-reduce-overhead": "reduce-overhead",
    "torch-channels-last": "channels_last", "torch-static-cache": "static cache",
}  # fmt: skip
ENGINES: Final = {  # as benchmarks/peers.py names them, all of them without a CUDA graph
    "ort": "onnxruntime", "ort-transformers": "its transformers optimizer", "onnxscript": "onnxscript's fusions",
    "torch-eager": "PyTorch", "torch-compile": "torch.compile", "onnxfuse": "onnxfuse",
}  # fmt: skip
PRODUCTS: Final = (
    ([4096, 3072, 768], "bias+gelu"), ([4096, 768, 3072], "bias+residual"), ([4096, 768, 768], "bias+residual"),
    ([2048, 5632, 2048], "gate"), ([8192, 8192, 8192], "bias+gelu"), ([128, 3072, 768], "bias+gelu"),
    ([16, 4096, 4096], "silu"), ([1, 4096, 4096], "silu"), ([1000, 1001, 1003], "bias+gelu"),
)  # fmt: skip
JOINED: Final = (  # what joins what, the result, and its times in one launch and in two
    ("operators after a product", "epilogues-h200", "one_kernel_us", "product_and_region_us"),
    ("operators after a norm", "norm_epilogues-h200", "one_kernel_us", "norm_and_region_us"),
    ("operators after attention", "attention_epilogues-h200", "one_launch_us", "two_launches_us"),
    ("operators before a LayerNorm", "norms_in_regions-h200", "one_launch_us", "two_launches_us"),
)
KERNELS: Final = (
    "layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "softmax", "bias_activation", "gated_activation",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A measurement of a model: milliseconds of onnxfuse and of the fastest peer, and the result."""

    name: str
    ours: float
    source: Path
    other: float | None = None  # where no peer ran
    ratio: float | None = None
    peer: str = ""  # where the result does not name the fastest one


def models() -> list[Model]:
    """Return each model once, by its newest result with peers, in the order of MODELS."""
    found = {model.name: model for path in by_date(WHOLE_MODELS) for model in measurements(path)}
    return sorted(found.values(), key=lambda model: list(MODELS).index(model.name))


def by_date(names: Iterable[str]) -> list[Path]:
    """Return all results of these names, oldest first."""
    return sorted((path for name in names for path in dated(name)), key=date)


def date(path: Path) -> str:
    """Return the date in the name of a result."""
    return path.stem[-10:]


def measurements(path: Path) -> Iterator[Model]:
    """Yield the models that a result has in a CUDA graph."""
    if "results" in read(path):  # as benchmarks/models.py writes it
        times: dict[str, dict[str, float]] = {}
        for row in read(path)["results"]:
            if row.get("agrees"):
                times.setdefault(row["model"], {})[row["peer"]] = row["median_ms"]
        for name, by_peer in times.items():
            if "onnxfuse-graph" in by_peer:
                other, peer = min((by_peer[key], label) for key, label in PEERS.items() if key in by_peer)
                ours = by_peer["onnxfuse-graph"]
                yield Model(name, ours, path, other, ours / other, peer)
    else:
        for row in read(path)["rows"]:
            ours = row.get("onnxfuse_ms", row.get("median_ms"))
            yield Model(row["model"], ours, path, row.get("best_other_ms"), row.get("ratio"))


def whole_models() -> str:
    """Return the table of all models: times, and where, with which versions and when they were measured."""
    lines = [
        [
            MODELS[model.name],
            f"{three_digits(model.other)}{f' ({model.peer})' if model.peer else ''}",
            f"**{three_digits(model.ours)}**", f"{model.ratio:.2f}", measured(model.source),
        ]
        for model in models()
    ]  # fmt: skip
    return grid(["milliseconds a run", "fastest other engine", "onnxfuse", "ratio", "measured"], lines, text=(0, 4))


def measured(source: Path) -> str:
    """Return device, versions and date of a result, with a link to it."""
    device, versions = read(source)["device"]["name"], read(source)["versions"]
    return f"{link(source)}: {device}, onnxruntime {versions['onnxruntime-gpu']}, PyTorch {versions['torch']}"


def link(source: Path) -> str:
    """Return the date of a result, as a link to it."""
    return f"[{date(source)}](../benchmarks/results/{source.name})"


def trends() -> str:
    """Return the times of models that have several results, by the dates of these; ratios are to peers of that run."""
    columns: dict[str, dict[str, str]] = {}
    for path in by_date(TRENDS):
        cells = columns.setdefault(date(path), {})
        for model in measurements(path):
            cells[model.name] = three_digits(model.ours) + (f" ({model.ratio:.2f})" if model.ratio else "")
    lines = [[words, *(cells.get(name, "") for cells in columns.values())] for name, words in MODELS.items()]
    several = [line for line in lines if sum(map(bool, line[1:])) > 1]
    return grid(["milliseconds a run (ratio to the fastest other engine)", *columns], several)


def readme_models() -> str:
    """Return the README's table: some of the models, each by its newest result."""
    chosen = {model.name: model for model in models()}
    lines = [
        [MODELS[name], three_digits(model.other), f"**{three_digits(model.ours)}**", f"{model.ratio:.2f}"]
        for name, model in ((name, chosen[name]) for name in OF_THE_README)
    ]
    return grid(["milliseconds a run", "fastest other engine", "onnxfuse", "ratio"], lines)


def engines() -> str:
    """Return the times of all engines without a CUDA graph; "fails" is an error or a wrong result."""
    cells = {(row["model"], row["peer"]): _engine_cell(row) for row in rows("models-h200", "results")}
    lines = [
        [MODELS[case["name"]], *(cells.get((case["name"], engine), "") for engine in ENGINES)]
        for case in result("models-h200")["cases"]
    ]
    return grid(["milliseconds a run", *ENGINES.values()], lines)


def _engine_cell(row: Mapping[str, Any]) -> str:
    time = row.get("median_ms")
    return three_digits(time) if isinstance(time, float) and row["agrees"] else "fails"


def new_shapes() -> str:
    """Return the times of runs at shapes that a session has not met, and has."""
    parts = result("first_runs-h200")["parts"]
    lines = [
        ["onnxruntime, first visit of a shape", *_spread(parts["visits"]["onnxruntime"]["first_ms"])],
        ["onnxruntime, later visits", *_spread(parts["visits"]["onnxruntime"]["later_ms"])],
        ["onnxfuse, first visit while kernels are compiled", *_spread(parts["unprepared"]["first_ms"])],
        ["onnxruntime, first visit with the bodies of the fused file", *_spread(parts["unprepared"]["body_ms"])],
        ["onnxfuse, first visit", *_spread(parts["visits"]["onnxfuse"]["first_ms"])],
        ["onnxfuse, later visits", *_spread(parts["visits"]["onnxfuse"]["later_ms"])],
    ]
    return grid(["milliseconds", "median", "90 %", "worst"], lines)


def _spread(times: Mapping[str, float]) -> list[str]:
    return [three_digits(times[name]) for name in ("median", "p90", "worst")]


def compiling() -> str:
    """Return the seconds of compiling whole models with an empty cache."""
    found = rows("compile_seconds-h200")
    lines = []
    for model in dict.fromkeys(row["model"] for row in found):
        few, many = (next(row for row in found if (row["model"], row["processors"]) == (model, n)) for n in (2, 16))
        seconds = (few["nvrtc_s"], few["clock_s"], many["clock_s"])
        lines.append([model, str(few["kernels"]), *map(three_digits, seconds)])
    return grid(["seconds", "kernels", "of one processor in NVRTC", "2 processors", "16 processors"], lines)


def starts() -> str:
    """Return the seconds from the start of a process to its first answer."""
    cold = result("first_runs-h200")["parts"]["cold"]["rows"]
    python = [[row["start"], three_digits(row["median_s"])] for row in cold]
    cpp = [
        [f"{row['engine']}{', plan file' if row['engine'] == 'onnxfuse' else ''}, in C++",
         three_digits(row["first_answer_s"])]
        for row in rows("cpp_start-h200")
    ]  # fmt: skip
    return grid(["", "seconds to the first answer"], [*python, *cpp])


def load() -> str:
    """Return the requests per second of threads that share a session, of shapes that were visited before."""
    lines = []
    for name, words in (("serving-h200", ""), ("serving-throughput-h200", ', `aim="throughput"`')):
        by = {
            (row["threads"], row["engine"]): row
            for row in result(name)["parts"]["load"]["rows"]
            if row["shapes"] == "visited"
        }
        for threads in dict.fromkeys(threads for threads, _ in by):
            theirs, ours = by[threads, "onnxruntime"], by[threads, "onnxfuse"]
            lines.append([
                f"{threads}{words}", _rate(theirs), _rate(ours),
                f"{ours['requests_per_s'] / theirs['requests_per_s']:.2f}",
            ])  # fmt: skip
    return grid(["threads", "onnxruntime: requests/s, 99 % ms", "onnxfuse", "throughput"], lines)


def _rate(row: Mapping[str, float]) -> str:
    return f"{row['requests_per_s']:.0f}, {three_digits(row['p99_ms'])}"


def regions_of_models() -> str:
    """Return the times of models with regions and without."""
    lines = [
        [MODELS[row["model"]], three_digits(row["without_regions_ms"]), f"**{three_digits(row['with_regions_ms'])}**",
         f"{row['with_regions_ms'] / row['without_regions_ms']:.3f}"]
        for row in rows("regions-models-h200", "results")
    ]  # fmt: skip
    return grid(["milliseconds a run", "without regions", "with regions", "ratio"], lines)


def generated_kernels() -> str:
    """Return how the generated kernels of regions compare with torch.compile's and with a copy."""
    found = rows("regions-latest-h200")
    lines = []
    for words, drawn in (("regions of real networks", False), ("random regions", True)):
        compared = [
            row["us"] / row["inductor_us"]
            for row in found
            if (row["model"] == "generated") == drawn and "inductor_us" in row
        ]
        lines.append([
            words, str(len(compared)), f"{geometric_mean(compared):.2f}", f"{max(compared):.2f}",
            str(sum(each > 1.1 for each in compared)),
        ])  # fmt: skip
    return grid(["of torch.compile's time", "count", "geometric mean", "largest", "above 1.1"], lines)


def joined() -> str:
    """Return what one launch takes of the time of two, where operators join a fused node."""
    lines = []
    for words, name, one, two in JOINED:
        shares = [row[one] / row[two] for row in rows(name)]
        lines.append([words, str(len(shares)), f"{geometric_mean(shares):.2f}", f"{min(shares):.2f}",
                      f"{max(shares):.2f}", link(dated(name)[-1])])  # fmt: skip
    head = ["one launch, of the time of two", "cases", "geometric mean", "least", "most", "measured"]
    return grid(head, lines, text=(0, 5))


def products() -> str:
    """Return the times of matrix products with what follows them."""
    lines = []
    for shape, epilogue in PRODUCTS:
        (row,) = rows("gemm-h200", shape=shape, dtype="float16", epilogue=epilogue)
        lines.append([f"{_dims(shape)}, {epilogue.replace('+', ', ')}", f"**{three_digits(row['us'])}**",
                      *(_time(row, name) for name in ("bare_us", "eager_us", "onnxruntime_us"))])  # fmt: skip
    head = ["microseconds, M x N x K", "onnxfuse", "the bare product by cuBLASLt", "PyTorch eager", "onnxruntime"]
    return grid(head, lines)


def quantized_products() -> str:
    """Return the times of products with weights of 4 and 8 bits."""
    lines = []
    for row in (*rows("matmul_nbits-h200"), *rows("matmul_nbits_8-h200")):
        fastest = three_digits(min(row["candidates"].values()))
        lines.append([f"{_dims(row['shape'])}, {row['bits']} bits", f"**{fastest}**",
                      *(_time(row, name) for name in ("us", "onnxruntime_us", "torch_us", "float16_us"))])  # fmt: skip
    head = ["microseconds, M x N x K", "onnxfuse, tuned", "its first plan", "onnxruntime", "PyTorch",
            "onnxfuse in float16"]  # fmt: skip
    return grid(head, lines)


def integers() -> str:
    """Return the times of products and convolutions of integers of 8 bits."""
    lines = [
        [_layer(row["shape"])[0], f"**{three_digits(row['best'])}**",
         *(_time(row, each) for each in ("us", "zeros", "best_float16"))]
        for row in (*rows("eight_bits_products-h200"), *rows("eight_bits-h200"))
    ]  # fmt: skip
    head = ["microseconds", "integers, tuned", "their first plan", "with a zero point", "float16, tuned"]
    return grid(head, lines)


def _layer(shape: Sequence[int]) -> tuple[str, int]:
    """Return the name of a product or a convolution, and the number of its multiplications."""
    if len(shape) == 3:
        return _dims(shape), prod(shape)
    batch, c, n, size, taps, stride = shape
    at = f", stride {stride}" if stride > 1 else ""
    return f"{batch}x{c}x{size}x{size}, {n} filters of {taps}x{taps}{at}", (
        batch * n * c * taps**2 * (-(-size // stride)) ** 2
    )


def float8() -> str:
    """Return the times of products and convolutions of float8."""
    lines = [
        [_layer(row["shape"])[0], f"**{three_digits(row['best_float8'])}**",
         *(_time(row, name) for name in ("float8", "best", "best_float16")),
         f"{2e-6 * _layer(row['shape'])[1] / row['best_float8']:.0f}"]
        for row in (*rows("float8-h200"), *rows("eight_bits-h200"))
    ]  # fmt: skip
    head = ["microseconds, M x N x K", "float8, tuned", "its first plan", "integers, tuned", "float16, tuned",
            "TFLOP/s of float8"]  # fmt: skip
    return grid(head, lines)


def decoding() -> str:
    """Return the times of one token."""
    source = dated("decode-h200")[-1]
    lines = [
        [f"{row['model']}, {row['weights']}{', caches of int8' if row.get('cache') == 'int8' else ''}",
         f"**{row['onnxfuse_ms']:.3f}**", f"{row['onnxruntime_ms']:.3f}",
         f"{row['bytes'] / 1e9:.2f}", f"{row['bytes'] / row['onnxfuse_ms'] / 1e9:.2f}", link(source)]
        for row in rows("decode-h200")
    ]  # fmt: skip
    head = ["milliseconds a token", "onnxfuse", "onnxruntime", "GB read", "TB/s", "measured"]
    return grid(head, lines, text=(0, 5))


def tokens_per_second() -> str:
    """Return how many tokens of one sequence a step of the decoder gives in a second."""
    lines = [
        [f"{row['model']}, {row['weights']}", f"{1e3 / row['onnxruntime_ms']:.0f}",
         f"**{1e3 / row['onnxfuse_ms']:.0f}**", f"{row['onnxruntime_ms'] / row['onnxfuse_ms']:.2f}"]
        for row in rows("decode-h200")
        if row.get("cache", "float16") == "float16"
    ]  # fmt: skip
    return grid(["tokens a second", "onnxruntime", "onnxfuse", "ratio"], lines)


def linear_attention() -> str:
    """Return the times of linear attention: of sequences, and of one token after a state."""
    lines = [
        [f"{row['batch']} x {row['tokens']} tokens, {row['heads']} heads"
         + (", GatedDeltaNet" if row["operator"] == "GatedDeltaNet" else ""), f"**{three_digits(row['onnxfuse_us'])}**",
         *(_time(row, name) for name in ("onnxruntime_us", "triton_us", "copy_us"))]
        for row in rows("linear_attention-h200")
    ]  # fmt: skip
    return grid(["microseconds", "onnxfuse", "onnxruntime", "Triton", "a copy of the states"], lines)


def recurrent_layers() -> str:
    """Return the times of LSTM and GRU layers."""
    lines = [
        [f"{row['layer'].upper()} of {row['hidden']} units, {row['dtype']}, {row['steps']} steps, batch {row['batch']}",
         f"**{three_digits(row['onnxfuse_us'])}**", three_digits(min(row["plans_us"].values())),
         *(_time(row, name) for name in ("onnxruntime_us", "torch_us"))]
        for row in rows("recurrent-h200")
    ]  # fmt: skip
    return grid(["microseconds", "onnxfuse", "its fastest plan", "onnxruntime", "PyTorch"], lines)


def scans() -> str:
    """Return the times of Mamba models whose scans are Loops, or unrolled."""
    lines = [
        [f"scans as {'Loops' if row['form'] == 'loop' else 'single steps'}, {row['steps']} steps, batch {row['batch']}",
         str(row["nodes"]), str(row["fused_nodes"]), f"**{three_digits(row['onnxfuse_ms'])}**",
         three_digits(row["onnxruntime_ms"]), f"{row['times']:.0f}"]
        for row in rows("scans-h200")
    ]  # fmt: skip
    return grid(["milliseconds", "nodes", "after fusion", "onnxfuse", "onnxruntime", "ratio"], lines)


def models_in_chunks() -> str:
    """Return the times of two layers of models that compute a recurrence in chunks of tokens."""
    names = {"mamba2": "Mamba-2", "xlstm": "xLSTM"}
    lines = [
        [f"{names[row['model']]}, {row['exporter']}, {row['tokens']} tokens, batch {row['batch']}",
         f"**{three_digits(row['onnxfuse_us'] / 1e3)}**", three_digits(row["onnxruntime_us"] / 1e3),
         f"{row['onnxruntime_us'] / row['onnxfuse_us']:.1f}"]
        for row in rows("chunks-h200")
        if row["what"] == "model"
    ]  # fmt: skip
    return grid(["milliseconds", "onnxfuse", "onnxruntime", "ratio"], lines)


def one_token_of_scans() -> str:
    """Return the times of one token after a state, in layers of recurrent models."""
    names = {"mamba": "Mamba", "mamba2": "Mamba-2", "mlstm": "xLSTM"}
    lines = [
        [f"{names[row['model']]}, {row['dtype']}, batch {row['batch']}", str(len(row["launches"])),
         f"**{three_digits(row['onnxfuse_us'])}**", *(_time(row, name) for name in ("onnxruntime_us", "copy_us"))]
        for row in rows("one_token_of_scans-h200")
    ]  # fmt: skip
    return grid(["microseconds a layer", "launches", "onnxfuse", "onnxruntime", "a copy of its bytes"], lines)


def triton_kernel() -> str:
    """Return the times of the tutorial's model by its kernel in Triton and by others."""
    names = ("onnxruntime_us", "triton_us", "cuda_us", "region_us")
    lines = [[f"{row['rows']:,}", *(_time(row, name) for name in names)] for row in rows("triton_kernel-h200")]
    return grid(["rows", "onnxruntime", "in Triton", "in CUDA", "a generated kernel"], lines)


def optimum() -> str:
    """Return the times of a BERT of Optimum, plain and fused."""
    lines = [
        [f"{row['batch']} x {row['tokens']}", *(_time(row, f"{name}_ms") for name in ("plain", "fused", "float16"))]
        for row in rows("optimum-h200")
    ]
    return grid(["milliseconds, batch x tokens", "plain `ORTModel`", "fused", "fused, float16"], lines)


def timed_pages() -> str:
    """Return the times of models whose reports an H200 timed, and the sums of their nodes'."""
    lines = [
        [row["model"], *(_time(row, name) for name in ("original_ms", "fused_ms")),
         f"{row['before_us'] / 1e3:.3g}", f"{row['after_us'] / 1e3:.3g}"]
        for row in rows("pages-h200")
    ]  # fmt: skip
    return grid(["milliseconds", "original", "fused", "its nodes, each alone", "fused nodes, each alone"], lines)


def attention() -> str:
    """Return the times of attention in float16."""
    lines = [
        [row["name"], f"**{three_digits(min(plan['us'] for plan in row['ours'].values()))}**",
         *(_time(row, name) for name in ("cudnn_us", "flash2_us", "efficient_us"))]
        for row in rows("attention-h200", dtype="float16")
    ]  # fmt: skip
    return grid(["microseconds", "onnxfuse", "cuDNN", "FlashAttention 2", "memory-efficient"], lines)


def attention_forms() -> str:
    """Return the times of forms of attention, beside their operators in onnxruntime."""
    by = {(row["form"], row["size"]): row for row in rows("attention_forms-h200")}
    lines = [
        [form, *(_form(by.get((form, size)), name) for size in (64, 128) for name in ("kernel_us", "body_us"))]
        for form in dict.fromkeys(form for form, _ in by)
    ]
    head = ["microseconds", "heads of 64", "as operators", "heads of 128", "as operators"]
    return grid(head, lines)


def _form(row: Mapping[str, float] | None, name: str) -> str:
    return "" if row is None else f"**{_time(row, name)}**" if name == "kernel_us" else _time(row, name)


def kernels() -> str:
    """Return the times of memory-bound kernels, from memory to memory and in a chain."""
    lines = []
    for fusion in KERNELS:
        large, small = (
            next(row for row in rows("kernels-h200", fusion=fusion, shape=shape, dtype="float16"))
            for shape in ([16384, 4096], [4096, 768])
        )
        lines.append([
            fusion, f"**{_time(large, 'us')}**", _time(large, "copy_us"), _time(large, "inductor_us"),
            f"**{_time(small, 'chain_us')}**", _time(small, "inductor_chain_us"), _time(small, "ort_chain_us"),
        ])  # fmt: skip
    head = ["microseconds", "16384x4096: onnxfuse", "copy", "Inductor",
            "4096x768 in a chain: onnxfuse", "Inductor", "onnxruntime"]  # fmt: skip
    return grid(head, lines)


def convolutions() -> str:
    """Return the times of convolutions with bias, activation and residual."""
    lines = [
        [f"{row['shape']}{', residual' if 'residual' in row['epilogue'] else ''}",
         *(_time(row, name) for name in ("cudnn_us", "fused_us")), f"**{_time(row, 'us')}**",
         f"{row['us'] / row['cudnn_us']:.2f}", _time(row, "copy_us")]
        for row in rows("conv-h200", dtype="float16")
    ]  # fmt: skip
    return grid(["microseconds", "cuDNN, bare", "cuDNN, fused", "onnxfuse", "of bare", "copy"], lines)


def other_gpus() -> str:
    """Return the times of plans for other GPUs on an H200, as geometric means of ratios."""
    found = rows("other_gpus-h200")
    lines = []
    for gpu in dict.fromkeys(row["gpu"] for row in found):
        cells = []
        for kind, name in (
            ("gemm", "body_us"),
            ("gemm", "cublas_us"),
            ("attention", "body_us"),
            ("attention", "flash2_us"),
        ):
            shares = [row["us"] / row[name] for row in found if row["gpu"] == gpu and row["kind"] == kind
                      and "us" in row and name in row]  # fmt: skip
            cells.append(f"{geometric_mean(shares):.2f} ({len(shares)})")
        lines.append([gpu, *cells])
    head = ["geometric mean (cases)", "products, of the operators' time", "of bare cuBLASLt's",
            "attention, of the operators' time", "of FlashAttention 2's"]  # fmt: skip
    return grid(head, lines)


def on_the_cpu() -> str:
    """Return the times of fused files in plain onnxruntime on the CPU, relative to their originals."""
    trained = [row["ratio"] for row in rows("trained-cpu") if "ratio" in row]
    cpu, layout = result("cpu-epyc"), result("layout-cpu")
    lines = [
        ["fused files, beside their originals", _count(cpu["models"]), cpu["geometric_mean"], cpu["largest"]],
        ["trained models, beside their originals", _count(trained), geometric_mean(trained), max(trained)],
        ["channels-last files, beside channels-first ones", _count(layout["models"]), layout["geometric_mean"],
         layout["largest"]],
    ]  # fmt: skip
    cells = [[words, count, f"{mean:.3f}", f"{largest:.3f}"] for words, count, mean, largest in lines]
    return grid(["ratio of times", "models", "geometric mean", "largest"], cells)


def _count(of: Iterable[object]) -> str:
    return str(len(list(of)))


def memory() -> str:
    """Return the peak memory of `optimize`."""
    lines = []
    for name, words in (
        ("memory", "without verification"), ("memory-verify", "with verification"),
        ("memory-packed", "without verification, gate and up weights are split"),
        ("memory-float16", "without verification, to float16"),
    ):  # fmt: skip
        made = result(name)
        peak, alone = (made["peaks"].get(part, {}).get("mb", "") for part in ("optimize", "onnxruntime alone"))
        lines.append([words, f"{made['weights_gb']:.2f}", str(peak), str(alone), link(dated(name)[-1])])
    head = ["", "weights, GB", "peak of `optimize`, MB", "of onnxruntime alone, MB", "measured"]
    return grid(head, lines, text=(0, 4))


def optimizers() -> str:
    """Return the CPU seconds of `optimize` and of other optimizers of files."""
    return _optimizers("tool-cpu", "CPU seconds", "cpu_s")


def idle_optimizers() -> str:
    """Return the seconds of the clock that `optimize` and other optimizers take on idle processors."""
    return _optimizers("tool-idle", "seconds", "wall_s")


def phases() -> str:
    """Return the milliseconds of the stages of `optimize` and of verification."""
    stages = ("Read", "Normalize", "Fuse", "Layout", "Regions", "unverified", "verify")
    lines = []
    for row in rows("phases-cpu"):
        (slowest,) = (name for name in row if name.startswith("pass "))
        milliseconds = (f"{1e3 * row[name]:.1f}" for name in stages)
        last = f"`{slowest.removeprefix('pass ')}`, {1e3 * row[slowest]:.1f}"
        lines.append([f"{row['model']}, {row['nodes']:,} nodes", *milliseconds, last])
    return grid(["milliseconds", *stages[:-2], "all, unverified", "verifying", "slowest pass"], lines, text=(0, 8))


def _optimizers(name: str, head: str, field: str) -> str:
    """Return the seconds in `field` of each model and tool in a result."""
    found = rows(name)
    tools = dict.fromkeys(row["tool"] for row in found)
    lines = []
    for model, nodes in dict.fromkeys((row["model"], row["nodes"]) for row in found):
        of_model = {row["tool"]: row for row in found if (row["model"], row["nodes"]) == (model, nodes)}
        lines.append([f"{model}, {nodes:,} nodes", *(_seconds(of_model.get(tool), field) for tool in tools)])
    return grid([head, *tools], lines)


def _seconds(row: Mapping[str, Any] | None, field: str) -> str:
    """Return a field of a row of optimizers; "" without a row, "failed" for an error, or that it exceeded the limit."""
    if row is None:
        return ""
    if field in row:
        return three_digits(row[field])
    return row["error"] if row["error"].startswith("more than") else "failed"


def decisions() -> str:
    """Return the index of docs/decisions.  Raises ValueError for a page that is not written as a decision."""
    lines = []
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        if path.name != "index.md":
            found = DECISION.match(path.read_text(encoding="utf-8"))
            if found is None:
                raise ValueError(f"{path.name} does not begin with '# title', a date and '**What.** sentence'")
            lines.append([found["date"], f"[{found['title']}]({path.name})"])
    return grid(["date", "decision"], sorted(lines), text=(0, 1))


def grid(head: Sequence[str], lines: Iterable[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    """Return a table of Markdown, whose columns but those of `text` hold numbers."""
    rule = "|".join("---" if column in text else "---:" for column in range(len(head)))
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, *lines]).replace("\n", f"\n|{rule}|\n", 1)


def _time(row: Mapping[str, float], name: str) -> str:
    return three_digits(row[name]) if name in row else ""


def _dims(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    table.__name__: table
    for table in (
        whole_models, trends, readme_models, engines, new_shapes, starts, compiling, load, regions_of_models,
        generated_kernels, joined, products, quantized_products, float8, integers, decoding, tokens_per_second,
        attention, attention_forms, linear_attention, recurrent_layers, scans, models_in_chunks, triton_kernel,
        timed_pages, kernels, convolutions, other_gpus, on_the_cpu, memory, optimizers, idle_optimizers,
        phases, one_token_of_scans, optimum, decisions,
    )
}  # fmt: skip


def filled(text: str) -> str:
    """Return the text of a page with its tables written anew.  Raises KeyError for a table that does not exist."""
    return MARK.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end of table -->", text)


def pages() -> Iterator[Path]:
    """Yield the pages that have tables."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if MARK.search(path.read_text(encoding="utf-8")):
            yield path


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
