"""Test on exported public architectures that every block is fused and that onnxruntime computes the same.

At its top the file does not import onnxfuse: run as a program, it compares models in a process without it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

sys.path.append(str(Path(__file__).parent.parent / "models"))  # pytest adds it; this file runs as a program too
from exported_models import load_exported, read_index

INDEX = read_index()


# --- what is in a model, from its config ---------------------------------------------------------------------------

Config = Mapping[str, Any]
Formulas = Mapping[str, Callable[[Config], int]]
Counts = dict[str, int]


def of(architecture: Formulas, config: Config) -> Counts:
    """Return the counts that the formulas give for a config, without zeros."""
    return {name: count for name, formula in sorted(architecture.items()) if (count := formula(config))}


# A layer reads its residual stream twice: two norms a layer follow an Add, which the product before them fuses.  One
# more norm follows the embeddings or the last layer; a norm that follows the embeddings is fused with them.
POST_NORM = PRE_NORM = {
    "layer_norm": lambda c: 2 * c["layers"] + 1,
    "attention": lambda c: c["layers"],
}
RESIDUALS = {"gemm_bias_activation": lambda c: 2 * c["layers"]}  # output and down, without biases
DECODER: Formulas = RESIDUALS | {
    "rms_norm": lambda c: 2 * c["layers"] + 1,
    "attention_with_rotary_embedding": lambda c: c["layers"],  # includes norms of queries and keys
    "rotary_table": lambda c: 1,
}
PROJECTIONS = {"parallel_gemm": lambda c: c["layers"]}  # query, key and value, which read one value
LLAMA = DECODER | PROJECTIONS | {"gated_gemm": lambda c: c["layers"]}
CACHED = {
    "attention_with_cache": lambda c: c["layers"],
    "rotary_embedding": lambda c: 2 * c["layers"],  # queries, and keys on their way to the cache
}
THREE_LINEARS = 3  # output, and two of the feed-forward network
FOUR_LINEARS = 4  # and query, key and value, which are one in the model


def residual_blocks(c: Config) -> int:
    """Return how many residual blocks a UNet has: a level one down and two up, and two in the middle."""
    return 3 * len(c["widths"]) + 2


def transformers(c: Config) -> int:
    """Return how many transformers a UNet has: one behind each block of a level, and one in the middle."""
    return 3 * len(c["widths"]) + 1


def decoder_blocks(c: Config) -> int:
    """Return how many residual blocks the decoder of an autoencoder has."""
    return len(c["widths"]) * c["depth"] + 2


def changes(c: Config) -> int:
    """Return how many levels have other channels than the level before."""
    return sum(a != b for a, b in pairwise(c["widths"]))


FUSED: Mapping[str, Formulas] = {
    "bert": POST_NORM | PROJECTIONS | {"gemm_bias_activation": lambda c: THREE_LINEARS * c["layers"] + 1},  # the pooler
    "deberta": PROJECTIONS
    | {
        "layer_norm": POST_NORM["layer_norm"],
        "disentangled_attention": POST_NORM["attention"],
        "gemm_bias_activation": lambda c: THREE_LINEARS * c["layers"],
    },
    "gpt2": PRE_NORM | {"gemm_bias_activation": lambda c: FOUR_LINEARS * c["layers"]},
    # and patches and the pooler
    "vit": PRE_NORM | PROJECTIONS | {"gemm_bias_activation": lambda c: THREE_LINEARS * c["layers"] + 2},
    "llama": LLAMA,
    "resnet50": {
        "conv_bias_activation": lambda c: 1 + 3 * sum(c["depths"]),  # the stem, and three in a bottleneck
        "gemm_bias_activation": lambda c: 1,  # the classifier
    },
    "mobilenetv3": {
        # first and last; 10 expansions, 11 depthwise, 9 squeeze-excitations of two, 6 projections with a residual
        "conv_bias_activation": lambda c: 2 + 10 + 11 + 2 * 9 + 6,
        "gemm_bias_activation": lambda c: 2,
    },
    "mamba": {
        "rms_norm": lambda c: c["layers"] + 1,
        "conv_bias_activation": lambda c: c["layers"],
        "scan": lambda c: c["layers"],
        "gemm_bias_activation": lambda c: c["layers"],  # a residual
    },
    "mamba2": {
        "rms_norm": lambda c: c["layers"] + 1,
        "conv_bias_activation": lambda c: c["layers"],
        "linear_attention": lambda c: c["layers"],
        "parallel_gemm": lambda c: c["layers"],  # of the columns that the convolution reads, and of the others
        "gemm_bias_activation": lambda c: c["layers"],  # a residual
    },
    "qwen3_next": {
        "rms_norm": lambda c: 2 * c["layers"] + 1 + c["layers"],  # the last ones in linear attention
        "conv_bias_activation": lambda c: c["layers"],
        "linear_attention": lambda c: c["layers"],
        "parallel_gemm": lambda c: c["layers"],
        "gated_gemm": lambda c: c["layers"],
        "gemm_bias_activation": lambda c: 2 * c["layers"],  # residuals
    },
    "llama_kvcache": {name: n for name, n in LLAMA.items() if name != "attention_with_rotary_embedding"} | CACHED,
    "gemma": LLAMA,
    "phi3": DECODER | {"gated_gemm": lambda c: c["layers"]},  # of the halves of one weight
    "qwen3": LLAMA,
    "t5_encoder": {
        "rms_norm": LLAMA["rms_norm"],
        "attention": lambda c: c["layers"],
        "parallel_gemm": lambda c: c["layers"],
        "gemm_bias_activation": lambda c: RESIDUALS["gemm_bias_activation"](c) + c["layers"],  # a Relu
    },
    "gpt_neox": {
        # attention and feed-forward network read one sum, through two norms: one of them takes the Add in
        "add_layer_norm": lambda c: c["layers"],
        "layer_norm": lambda c: c["layers"] + 1,
        "attention_with_rotary_embedding": lambda c: c["layers"],
        "gemm_bias_activation": lambda c: FOUR_LINEARS * c["layers"],
    },
    "clip_text": PRE_NORM | PROJECTIONS | {"gemm_bias_activation": lambda c: THREE_LINEARS * c["layers"]},
    "transformer_encoder": {
        "layer_norm": lambda c: 2 * c["layers"],
        "attention": lambda c: c["layers"],
        "gemm_bias_activation": lambda c: FOUR_LINEARS * c["layers"],
    },
    "swin": {
        # Two a block, one for each embedding or patch merging, and the last.  The product after attention cannot add
        # the residual, because windows are rearranged in between, unless one window is the whole map.
        "add_layer_norm": lambda c: sum(c["depths"]) - c["depths"][-1],
        "layer_norm": lambda c: sum(c["depths"]) + c["depths"][-1] + len(c["depths"]) + 1,
        "attention": lambda c: sum(c["depths"]),
        "parallel_gemm": lambda c: sum(c["depths"]),
        "gemm_bias_activation": lambda c: THREE_LINEARS * sum(c["depths"]) + 1,  # patches
    },
    "convnext": {
        "layer_norm": lambda c: 1 + sum(c["depths"]) + (len(c["depths"]) - 1) + 1,  # stem, blocks, downsampling, end
        "gemm_bias_activation": lambda c: 2 * sum(c["depths"]),
    },
    "efficientnet": {
        # first and last; 15 expansions, 16 depthwise, 16 squeeze-excitations of two, 9 projections with a residual, and
        # the first projection, because tiny widths are rounded up to the same
        "conv_bias_activation": lambda c: 2 + 15 + 16 + 2 * 16 + 10,
        "gemm_bias_activation": lambda c: 1,
    },
    "densenet": {
        "conv_bias_activation": lambda c: 1 + sum(c["depths"]),  # the stem, and the first convolution of a layer
        "batch_norm_activation": lambda c: sum(c["depths"]) + len(c["depths"]),  # layers, transitions, the last
        "gemm_bias_activation": lambda c: 1,
    },
    "detector": {
        # Five that halve the image, two of the pooling, two on the way down, four in front of the last of each of three
        # heads; two in a block, of which the way up and down has four, and two in each of its bottlenecks.
        "conv_bias_activation": lambda c: 5 + 2 + 2 + 3 * 4
        + 2 * (len(c["depths"]) + sum(c["depths"])) + 4 * 2 * (1 + c["depths"][-1]),
    },
    "unet": {
        "attention": lambda c: 2 * transformers(c),
        "layer_norm": lambda c: 3 * transformers(c),
        "group_norm": lambda c: 2 * residual_blocks(c) + transformers(c) + 1,
        "conv_bias_activation": residual_blocks,  # the second convolution, which adds the residual
        "gated_gemm": transformers,
        "gemm_bias_activation": lambda c: 5 * transformers(c) + 2,  # and the embedding of the time step
        # query, key and value of self-attention; by threes the keys and values of the prompt, and projected times
        "parallel_gemm": lambda c: transformers(c)
        + math.ceil(2 * transformers(c) / 3) + math.ceil(residual_blocks(c) / 3),
    },
    "vae_decoder": {
        "attention": lambda c: 1,
        "group_norm": lambda c: 2 * decoder_blocks(c) + 2,
        "conv_bias_activation": decoder_blocks,
        "gemm_bias_activation": lambda c: 1,
        "parallel_gemm": lambda c: 1,
    },
    "whisper_encoder": PRE_NORM | PROJECTIONS | {
        "conv_bias_activation": lambda c: 2,
        "gemm_bias_activation": lambda c: THREE_LINEARS * c["layers"],
    },
}  # fmt: skip

# Products and convolutions that no bias, activation or residual follows, so that nothing is fused.
PLAIN: Mapping[str, Formulas] = {
    "bert": {},
    "deberta": {},
    "gpt2": {"MatMul": lambda c: 1},  # logits
    "vit": {},
    "llama": {"MatMul": lambda c: 1},  # logits
    "resnet50": {"Conv": lambda c: len(c["depths"])},  # the shortcuts
    "mobilenetv3": {"Conv": lambda c: 11 - 6},  # projections without a residual
    "mamba": {"MatMul": lambda c: 3 * c["layers"]},  # into a layer, and of what selects
    "mamba2": {},
    "qwen3_next": {},
    "t5_encoder": {},
    "gpt_neox": {"MatMul": lambda c: 1},  # logits
    "clip_text": {},
    "transformer_encoder": {},
    "swin": {"MatMul": lambda c: len(c["depths"]) - 1},  # merging patches
    "convnext": {"Conv": lambda c: 1 + sum(c["depths"]) + len(c["depths"]) - 1},  # stem, depthwise, downsampling
    "efficientnet": {"Conv": lambda c: 16 - 10},
    "densenet": {"Conv": lambda c: sum(c["depths"]) + len(c["depths"]) - 1},  # second of layers, transitions
    "detector": {"Conv": lambda c: 2 * 3 + 1},  # the last of the heads, and the mean over bins
    "unet": {
        # the first of each block, first, last, between levels, and where a block changes the channels, as all do that
        # read a Concat
        "Conv": lambda c: residual_blocks(c) + 2 + 2 * (len(c["widths"]) - 1) + 2 * len(c["widths"]) + changes(c),
        "MatMul": transformers,  # the query of cross-attention
    },
    "vae_decoder": {
        "Conv": lambda c: decoder_blocks(c) + 2 + len(c["widths"]) - 1 + changes(c),
    },
    "whisper_encoder": {},
}
LIKE_LLAMA = {"llama_kvcache", "gemma", "qwen3"}
PLAIN = PLAIN | dict.fromkeys(LIKE_LLAMA, PLAIN["llama"]) | {"phi3": {"MatMul": lambda c: c["layers"] + 1}}

# Nodes that the layout pass makes of operators around the convolutions; it makes such nodes of plain
# convolutions as well.
CHANNELS_LAST: Mapping[str, Formulas] = {
    "resnet50": {"max_pool": lambda c: 1, "global_average_pool": lambda c: 1},
    "mobilenetv3": {"global_average_pool": lambda c: 1, "squeeze_excite": lambda c: 9},
    "convnext": {"global_average_pool": lambda c: 1},  # in front of the last norm
    "efficientnet": {"global_average_pool": lambda c: 1, "squeeze_excite": lambda c: 16},
    "densenet": {
        "max_pool": lambda c: 1,
        "average_pool": lambda c: len(c["depths"]) - 1,
        "global_average_pool": lambda c: 1,
    },
    "detector": {
        "max_pool": lambda c: 3,
        "resize": lambda c: 2,
        "split": lambda c: len(c["depths"]) + 4,  # of a block
        "concat": lambda c: len(c["depths"]) + 4 + 1 + 4,  # of a block, of the pooling, in front of four blocks
    },
    "unet": {
        "resize": lambda c: len(c["widths"]) - 1,
        "concat": lambda c: 2 * len(c["widths"]),  # in front of the two blocks of a level up
    },
    "vae_decoder": {"resize": lambda c: len(c["widths"]) - 1},
}

# Residuals that a norm adds, because the product before it cannot.
ADDED_BY_NORMS: Mapping[str, Callable[[Config], int]] = {
    # The product after attention works on rows, but the residual has three axes.
    "transformer_encoder_dynamo_fp32.onnx": lambda c: c["layers"],
    "llama_sdpa_ts_fp16.onnx": lambda c: 2,  # the converter has put the first Add and the last into float32
}  # fmt: skip

# What is part of a region: norms behind class tokens and positions, around windows and merged patches, and behind a
# Transpose or Casts that the exporter has put in front, and Concats next to Slices that divide channels.
IN_REGIONS: Mapping[str, Mapping[str, int]] = {
    "vit": {"layer_norm": 1},
    "swin_eager_dynamo_fp32.onnx": {"layer_norm": 2, "add_layer_norm": 2},
    "transformer_encoder_dynamo_fp32.onnx": {"add_layer_norm": 2},
    "detector_ts11_bn_fp32.onnx": {"concat": 8},
    "llama_sdpa_ts_fp16.onnx": {"rms_norm": 1},
}

LESS_FUSED: Mapping[str, Collection[str]] = {
    "detector_ts11_bn_fp32.onnx": {"split"},  # this exporter divides channels by Slices
}

EMBEDDINGS = {
    *("mamba2", "qwen3_next", "mamba", "bert", "deberta", "gpt2", "llama", "llama_kvcache", "gemma", "phi3", "qwen3"),
    *("t5_encoder", "gpt_neox", "clip_text"),
}
# Norms of float16 that have joined the product that alone reads their result, which may have been a bare MatMul.
NORMS_IN_PRODUCTS = {
    **{f"llama_{form}_fp16.onnx": 4 for form in ("eager_dynamo", "eager_ts", "kvcache_sdpa_dynamo", "sdpa_dynamo")},
    "t5_encoder_eager_dynamo_fp16.onnx": 3,
}
LEFT_EMBEDDINGS = {"llama_sdpa_ts_fp16.onnx"}  # the converter has put Casts behind them


def expected(name: str) -> tuple[Counts, Counts]:
    """Return the expected fused nodes of a model by fusion, and the unfused products and convolutions by operator."""
    architecture, config = INDEX[name]["architecture"], INDEX[name]["config"]
    fused, plain = Counter(of(FUSED[architecture], config)), Counter(of(PLAIN[architecture], config))
    norm = "rms_norm" if "rms_norm" in fused else "layer_norm"
    if architecture in EMBEDDINGS and name not in LEFT_EMBEDDINGS:
        fused += Counter({f"embedding_{norm}": 1})
        fused -= Counter({norm: 1})
    if (count := ADDED_BY_NORMS.get(name, lambda c: 0)(config)) > 0:
        fused += Counter({f"add_{norm}": count})
        fused -= Counter({norm: count})
        if norm == "rms_norm":  # of products without biases nothing is left to fuse
            fused -= Counter(gemm_bias_activation=count)
            plain += Counter(MatMul=count)
    if architecture in CHANNELS_LAST:
        fused += Counter(of(CHANNELS_LAST[architecture], config)) + Counter(conv_bias_activation=plain.pop("Conv", 0))
        fused -= Counter(conv_bias_activation=2 * fused["squeeze_excite"])  # which are in that node
    fused -= Counter(IN_REGIONS.get(name, IN_REGIONS.get(architecture, {})))
    for fusion in LESS_FUSED.get(name, ()):
        del fused[fusion]
    if name in NORMS_IN_PRODUCTS:
        fused += Counter(gemm_bias_activation=plain.pop("MatMul", 0))
        fused -= Counter({norm: NORMS_IN_PRODUCTS[name]})
    return dict(fused), dict(plain)


# Operators that occur only inside fused blocks in all these architectures.
FAMILIES = {
    "attention": {"Softmax", "IsNaN", "Attention"},
    "norms": {"LayerNormalization", "RMSNormalization", "Pow", "Sqrt", "Reciprocal"},
    "rotary embedding": {"RotaryEmbedding", "Neg"},
    "activations": {"Relu", "Gelu", "Erf", "Tanh", "Sigmoid", "HardSwish", "HardSigmoid", "Swish", "Clip"},
    "biased linears": {"Gemm"},
    "batch norm": {"BatchNormalization"},
}
ALONE: Mapping[str, Collection[str]] = {  # what stands alone, and no kernel computes faster
    "detector": {"Softmax", "Sigmoid"},  # over an axis that is not the last one; of scores
}


@pytest.mark.parametrize("name", INDEX)
def test_every_block_is_fused(name: str, optimized: Callable[[str], Any]) -> None:
    counts = optimized(name).report["counts"]
    assert {fusion: count for fusion, count in counts.items() if fusion != "region"} == expected(name)[0]


@pytest.mark.parametrize("name", INDEX)
def test_nothing_of_the_families_is_left(name: str, optimized: Callable[[str], Any]) -> None:
    graph = onnx.load(optimized(name).path).graph
    left = Counter(node.op_type for node in graph.node if node.domain == "")
    alone = ALONE.get(INDEX[name]["architecture"], ())
    found = {family: sorted((ops & left.keys()).difference(alone)) for family, ops in FAMILIES.items()}
    assert {family: ops for family, ops in found.items() if ops} == {}
    products = {op: count for op, count in sorted(left.items()) if op in ("Conv", "ConvTranspose", "MatMul")}
    assert products == expected(name)[1]
    assert biases(graph) == []


def biases(graph: onnx.GraphProto) -> list[str]:
    """Return the names of the Adds of a constant to a product."""
    constants = {t.name for t in graph.initializer} | {n.output[0] for n in graph.node if n.op_type == "Constant"}
    products = {n.output[0] for n in graph.node if n.op_type in ("MatMul", "Conv", "Gemm")}
    return [n.name for n in graph.node if n.op_type == "Add" and constants & set(n.input) and products & set(n.input)]


@pytest.mark.parametrize("name", [name for name in INDEX if name.startswith(("resnet50", "mobilenetv3"))])
def test_residuals_of_convolutions_are_fused(name: str, optimized: Callable[[str], Any]) -> None:
    result = optimized(name)
    assert [node.name for node in onnx.load(result.path).graph.node if node.op_type == "Add"] == []
    before = Counter(node.op_type for node in onnx.load(result.original).graph.node)
    folded = Counter(each["what"] for each in result.report["folded"])
    assert folded["batch_norm"] == before["BatchNormalization"]
    assert bool(before["BatchNormalization"]) == INDEX[name]["batch_norm_kept"]


# --- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INDEX)
def test_the_file_is_valid(name: str, optimized: Callable[[str], Any]) -> None:
    onnx.checker.check_model(onnx.load(optimized(name).path), full_check=True)


@pytest.mark.parametrize("name", INDEX)
def test_what_surrounds_the_nodes_is_kept(name: str, optimized: Callable[[str], Any]) -> None:
    result = optimized(name)
    before, after = onnx.load(result.original), onnx.load(result.path)
    assert list(after.graph.input) == list(before.graph.input)  # names, types, sizes and dim_params
    assert list(after.graph.output) == list(before.graph.output)
    for field in ("metadata_props", "producer_name", "producer_version", "domain", "model_version", "doc_string"):
        assert getattr(after, field) == getattr(before, field), field
    assert after.graph.name == before.graph.name
    opsets = {each.domain: each.version for each in after.opset_import}
    assert opsets.pop("onnxfuse") == 1
    assert opsets == {each.domain: each.version for each in before.opset_import}


@pytest.mark.parametrize("name", INDEX)
def test_optimizing_again_changes_nothing(name: str, optimized: Callable[[str], Any]) -> None:
    from onnxfuse import optimize

    once = onnx.load(optimized(name).path)
    twice, report = optimize(once, verify=False)
    assert (report.counts, report.folded) == ({}, ())
    assert twice == once


# --- its values ----------------------------------------------------------------------------------------------------

TOLERANCES = {"fp32": 1e-5, "fp16": 2e-3}  # relative to the largest output, as the project promises


REQUIRED = "bert", "gpt2", "vit", "llama", "resnet50", "mobilenetv3"
OTHERS = sorted({entry["architecture"] for entry in INDEX.values()} - {*REQUIRED})
GROUPS = {**{name: (name,) for name in REQUIRED}, "others": OTHERS[::2], "more others": OTHERS[1::2]}


@pytest.mark.parametrize("group", GROUPS)
def test_plain_onnxruntime_computes_the_same(group: str, optimized: Callable[[str], Any]) -> None:
    names = [n for n, entry in INDEX.items() if entry["architecture"] in GROUPS[group]]
    errors = errors_without_onnxfuse([optimized(name).path for name in names])
    assert {name: len(found["errors"]) for name, found in errors.items()} == dict.fromkeys(names, 2)
    assert {name: found for name, found in errors.items() if max(found["errors"]) > tolerance(name, found)} == {}


def tolerance(name: str, found: Mapping[str, list[float]]) -> float:
    """Return the promised tolerance, or twice the original's own error in half precision if that is larger."""
    return max(TOLERANCES[INDEX[name]["dtype"]], *(2 * error for error in found["own"]))


def errors_without_onnxfuse(paths: Iterable[Path]) -> dict[str, dict[str, list[float]]]:
    """Return the errors of optimized models by file, measured in a process without onnxfuse; `compare` returns each."""
    command = [sys.executable, __file__, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


EMPTY = (
    "bert_sdpa_dynamo_fp32.onnx", "llama_eager_dynamo_fp32.onnx", "llama_kvcache_sdpa_dynamo_fp32.onnx",
    "gemma_sdpa_dynamo_fp32.onnx", "qwen3_sdpa_dynamo_fp32.onnx",
)  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_a_batch_may_be_empty(name: str, optimized: Callable[[str], Any]) -> None:
    sizes = {**INDEX[name]["verified_sizes"][0], "batch": 0}
    feeds = draw(INDEX[name]["inputs"], sizes)
    expected, actual = (
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)
        for path in (optimized(name).original, optimized(name).path)
    )
    assert 0 in expected[0].shape
    assert [(each.shape, each.dtype) for each in actual] == [(each.shape, each.dtype) for each in expected]


SMALL = (
    "bert_sdpa_ts_fp32.onnx", "llama_sdpa_dynamo_fp32.onnx", "resnet50_dynamo_bn_fp32.onnx", "gpt2_eager_ts_fp32.onnx",
)  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_evaluator_computes_the_same(name: str, optimized: Callable[[str], Any]) -> None:
    result, sizes = optimized(name), INDEX[name]["verified_sizes"][0]
    feeds = draw(INDEX[name]["inputs"], sizes)
    expected = ReferenceEvaluator(str(result.original)).run(None, feeds)
    actual = ReferenceEvaluator(str(result.path)).run(None, feeds)
    assert max(map(relative_error, expected, actual)) <= TOLERANCES["fp32"]


def draw(inputs: Iterable[Mapping[str, Any]], sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return seeded inputs that the index describes."""
    feeds = {}
    for each in inputs:
        name, shape = each["name"], [d if isinstance(d, int) else size_of(d, sizes) for d in each["dims"]]
        random = np.random.default_rng(zlib.crc32(f"{name}{shape}".encode()))
        if each.get("prefix_mask"):  # every row but the first is padded on the right
            kept = random.integers(1, shape[-1] + 1, (*shape[:-1], 1))
            kept.flat[:1] = shape[-1]
            value = np.arange(shape[-1]) < kept
        elif "range" in each:
            value = random.integers(each["range"][0], each["range"][1] + 1, shape)
        else:
            value = random.standard_normal(shape)
        feeds[name] = value.astype(each["dtype"])
    return feeds


def size_of(dim: str, sizes: Mapping[str, int]) -> int:
    """Return the size of a dim, which is a name or a sum such as `past + seq`."""
    return sum(sizes[name] for name in dim.split(" + "))


def relative_error(expected: np.ndarray, actual: np.ndarray) -> float:
    """Return the largest difference relative to the largest value; infinity if shapes or non-finite values differ."""
    if expected.shape != actual.shape or not np.array_equal(np.isfinite(expected), np.isfinite(actual)):
        return math.inf
    want, have = (np.nan_to_num(value.astype(np.float64)) for value in (expected, actual))
    return float(np.abs(want - have).max(initial=0) / (np.abs(want).max(initial=0) or 1))


def compare(path: Path) -> dict[str, list[float]]:
    """Return for each size the largest error of the outputs, and the original's own in half precision, else 0.

    In half precision it is the smaller of the errors against the original and against the original computed in
    float32: onnxruntime inserts other Casts into another graph, which alone moves outputs by 1.8e-3.  The original's
    own error is against the latter.
    """
    entry, original = INDEX[path.name], load_exported(path.name)
    names = [output.name for output in original.graph.output]
    actual, expected, exact = path.read_bytes(), original.SerializeToString(), None
    sessions = [session(actual), session(expected)]
    if entry["dtype"] == "fp16":
        exact = session(in_float32(original).SerializeToString())
    errors, own = [], []
    for sizes in entry["verified_sizes"]:
        feeds = draw(entry["inputs"], sizes)
        have, want = (run(each, names, feeds) for each in sessions)
        best = run(exact, names, as_float32(feeds)) if exact else want
        found = zip(have, want, best, strict=True)
        errors.append(max(min(relative_error(w, h), relative_error(b, h)) for h, w, b in found))
        own.append(max(map(relative_error, best, want)))
    return {"errors": errors, "own": own}


def session(model: bytes) -> onnxruntime.InferenceSession:
    """Return a session as someone without onnxfuse creates it."""
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, names: list[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the named outputs."""
    return session.run(names, {each.name: feeds[each.name] for each in session.get_inputs()})


def as_float32(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float32) if value.dtype == np.float16 else value for name, value in feeds.items()}


def in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace float16 by float32 everywhere in a model, and return it."""
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for tensor in tensors(model.graph):
        if tensor.data_type == TensorProto.FLOAT16:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
    del model.graph.value_info[:]
    return model


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))


if __name__ == "__main__":
    found = {Path(path).name: compare(Path(path)) for path in sys.argv[1:]}
    assert "onnxfuse" not in sys.modules
    print(json.dumps(found))
