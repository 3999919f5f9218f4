"""Nodes whose kernels start early, one for each way to run."""

from __future__ import annotations

import json
from typing import Any

from attention_cases import Case
from cache_cases import CachedCase, cached
from group_query_cases import Case as GroupQueryCase
from linear_attention_cases import Case as LinearCase
from linear_attention_cases import Conv

from onnxfuse.ir.domain import PROLOGUE
from onnxfuse.runtime.plan import FusedNode, TensorSpec

D = 768
WEIGHTS = {"frequencies", "w", "w_2", "w_3", "r", "up", "scale", "bias", "bias_2", "mean", "var", "table", "table_2",
           "scales", "up_scales", "scales_2", "norm_scale"}  # fmt: skip
X, W, SQUARE = (300, D), (D,), (D, D)
NORMALIZED = {"x": (3, D), "norm_residual": (3, D), "norm_scale": W}
NORM = {"fusion": "add_rms_norm", "operands": ["x", "residual", "scale"], "attributes": {}, "dtypes": ["float16"] * 2}
SELECTION = {
    "ops": [["ArgMax", ["x0"], ["v0"], {"axis": 1, "keepdims": 0, "select_last_index": 0}]], "outputs": ["v0"],
    "dtypes": {"x0": "float16", "v0": "int64"},
}  # fmt: skip
NODES: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Any], int]] = {
    "layer_norm": ("layer_norm", {"x": X, "scale": W, "bias": W}, {"epsilon": 1e-5}, 1),
    "rms_norm of few long rows": ("rms_norm", {"x": (3, 40000), "scale": (40000,)}, {"epsilon": 1e-5}, 1),
    "add_layer_norm": ("add_layer_norm", {"x": X, "residual": X, "scale": W, "bias": W}, {"epsilon": 1e-5}, 2),
    "add_rms_norm": ("add_rms_norm", {"x": X, "residual": X, "scale": W}, {"epsilon": 1e-5}, 2),
    "embedding_layer_norm": (
        "embedding_layer_norm",
        {"ids": (3, 100), "table": (50, D), "ids_2": (100,), "table_2": (20, D), "scale": W, "bias": W},
        {"epsilon": 1e-5}, 2,
    ),
    "embedding_rms_norm": (
        "embedding_rms_norm", {"ids": (300,), "table": (50, D), "scale": W}, {"epsilon": 1e-5}, 1,
    ),
    "softmax": ("softmax", {"x": X}, {}, 1),
    "activation": ("activation", {"x": X}, {"activation": "gelu"}, 1),
    "bias_activation": ("bias_activation", {"x": X, "bias": W}, {"activation": "relu"}, 1),
    "gated_activation": ("gated_activation", {"gate": X, "up": X}, {"activation": "silu"}, 1),
    "group_norm": (
        "group_norm", {"x": (2, 16, 64, 64), "scale": (16,), "bias": (16,)},
        {"groups": 4, "epsilon": 1e-5, "activation": "none"}, 1,
    ),
    **{
        f"channels-last {fusion}": (fusion, {"x": (2, 64, 64, 80), **more}, {"layout": "nhwc", **attributes}, 1)
        for fusion, more, attributes in (
            ("group_norm", {"scale": (80,), "bias": (80,)}, {"groups": 8, "epsilon": 1e-5, "activation": "none"}),
            ("max_pool", {}, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
            ("average_pool", {}, {"kernel_shape": [2, 2], "strides": [2, 2]}),
            ("global_average_pool", {}, {}),
            ("global_max_pool", {}, {}),
            ("channel_scale", {"gate": (2, 1, 1, 80), "residual": (2, 64, 64, 80)}, {"activation": "relu"}),
            ("depth_to_space", {}, {"blocksize": 2, "mode": "CRD"}),
            ("space_to_depth", {}, {"blocksize": 2}),
            ("resize", {}, {"scales": [1.0, 2.0, 2.0, 1.0], "mode": "linear"}),
            ("batch_norm_activation", dict.fromkeys(("scale", "bias", "mean", "var"), (80,)), {"activation": "relu"}),
        )
    },
    **{
        f"transposed convolution, {kind}": (
            "conv_transpose_bias_activation", {"x": (2, 32, 32, 48), "w": w, "bias": (48,)},
            {"layout": "nhwc", "activation": "relu", "strides": [2, 2], **attributes}, 1,
        )
        for kind, w, attributes in (
            ("phases", (48, 4, 4, 48), {"pads": [1, 1, 1, 1]}),
            ("one product", (48, 2, 2, 48), {}),
            ("depthwise", (4, 4, 1, 48), {"pads": [1, 1, 1, 1], "w_layout": "hwoi", "group": 48}),
        )
    },
    "convolution of a gated image": (
        "conv_bias_activation", {"x": (2, 32, 32, 96), "w": (24, 1, 1, 96), "bias": (24,), "gate": (2, 1, 1, 96)},
        {"layout": "nhwc", "activation": "none"}, 1,
    ),
    "gate of an image": (
        "squeeze_excite",
        {"x": (2, 32, 32, 96), "w": (8, 1, 1, 96), "bias": (8,), "w_2": (96, 1, 1, 8), "bias_2": (96,)},
        {"layout": "nhwc", "activation": "silu", "activation_2": "sigmoid"}, 1,
    ),
    "channels-last concat": (
        "concat", {"x_0": (2, 64, 64, 80), "x_1": (2, 64, 64, 16), "x_2": (2, 64, 64, 40)},
        {"layout": "nhwc", "axis": -1}, 1,
    ),
    "channels-last split": ("split", {"x": (2, 64, 64, 80)}, {"layout": "nhwc", "axis": -1, "split": [16, 24, 40]}, 3),
    "rotary_embedding": (
        "rotary_embedding", {"x": (2, 12, 64, 64), "cos": (1, 64, 64), "sin": (1, 64, 64)},
        {"layout": "bhsd", "table": "bsd"}, 1,
    ),
    "rotary_table": ("rotary_table", {"positions": (2, 300), "frequencies": (32,)}, {"angles": "twice"}, 2),
    **{
        f"gemm of {m} rows": (
            "gemm_bias_activation", {"x": (m, D), "w": SQUARE, "bias": W, "residual": (m, D)},
            {"weight_layout": "kn", "activation": "relu"}, 1,
        )
        for m in (1, 8, 48, 300)
    },
    "gemm of odd rows": (
        "gemm_bias_activation", {"x": (300, 767), "w": (767, 769), "bias": (769,), "residual": (300, 769)},
        {"weight_layout": "kn", "activation": "relu"}, 1,
    ),
    "gated_gemm": (
        "gated_gemm", {"x": X, "w": SQUARE, "up": SQUARE}, {"weight_layout": "kn", "activation": "silu"}, 1,
    ),
    **{
        f"quantized product of {m} rows, {layout}": (
            "matmul_nbits", {"x": (m, D), "w": w, "scales": (D, 24) if layout != "kn" else (24, D), "bias": W},
            {"weight_layout": layout, "k": D, "n": D, "block_size": 32}, 1,
        )
        for m in (1, 48, 300)
        for layout, w in (("nbits", (D, 24, 16)), ("nk", SQUARE), ("kn", SQUARE))
    },
    "quantized product of odd rows": (
        "matmul_nbits", {"x": (3, 60), "w": (50, 2, 16), "scales": (50, 2)}, {"k": 60, "n": 50, "block_size": 32}, 1,
    ),
    "quantized gate": (
        "gated_matmul_nbits",
        {"x": (4, D), "w": (D, 24, 16), "scales": (D, 24), "up": (D, 24, 16), "up_scales": (D, 24)},
        {"k": D, "n": D, "block_size": 32, "activation": "silu"}, 1,
    ),
    "product of a norm": (
        "gemm_bias_activation", {**NORMALIZED, "w": SQUARE}, {"activation": "relu", PROLOGUE: json.dumps(NORM)}, 2,
    ),
    "quantized product of a norm": (
        "matmul_nbits", {**NORMALIZED, "w": (D, 24, 16), "scales": (D, 24)},
        {"k": D, "n": D, "block_size": 32, PROLOGUE: json.dumps(NORM)}, 2,
    ),
    "product whose rows end in an ArgMax": (
        "gemm_bias_activation", {"x": (3, D), "w": SQUARE, "bias": W}, {"program": json.dumps(SELECTION)}, 1,
    ),
    "two quantized products": (
        "parallel_matmul_nbits",
        {"x": (4, D), "w": (D, 24, 16), "scales": (D, 24), "w_2": (64, 24, 16), "scales_2": (64, 24)},
        {"k": D, "n": D, "n_2": 64, "block_size": 32}, 2,
    ),
    **{
        f"recurrent layer, {fusion}": (
            fusion, {"x": (20, 3, 64), "w": (1, gates * 128, 64), "r": (1, gates * 128, 128), "bias": (1, gates * 256)},
            {"hidden": 128, "directions": 1}, outputs,
        )
        for fusion, gates, outputs in (("lstm", 4, 3), ("gru", 3, 2))
    },
    **{
        f"product of integers for each head, {order}": (
            "quantized_matmul", {"x": (2, 160, 4, 64), "x_scale": (), "w": shape, "w_scale": ()},
            {"w_order": order}, 1,
        )
        for order, shape in (("nk", (2, 100, 4, 64)), ("kn", (2, 64, 4, 48)))
    },
    "parallel_gemm": ("parallel_gemm", {"x": X, "w": SQUARE, "bias": W, "w_2": SQUARE, "w_3": SQUARE}, {}, 3),
}  # fmt: skip
ATTENTION: dict[str, Case | CachedCase | GroupQueryCase | LinearCase | Conv] = {
    "attention": Case(2, 4, 4, 160, 160, mask="additive"),
    "attention in TF32": Case(2, 4, 4, 170, 170, dtype="float32"),
    "causal attention": Case(1, 4, 2, 128, 128, operator=True, causal=True),
    "attention of one query": Case(2, 4, 4, 1, 500),
    "attention of narrow heads": Case(2, 4, 4, 70, 70, 40, 40),
    "attention under a boolean mask": Case(2, 4, 4, 70, 70, 40, 40, mask="boolean"),
    "attention with a cache": cached(400, 1, batch=2, heads=4, kv_heads=4),
    "one token of group_query_attention": GroupQueryCase((300, 20), past=400),
    "a prompt of group_query_attention": GroupQueryCase((170, 20), new=170, past=400),
    "one token of quantized caches": GroupQueryCase((300, 20), past=400, cache="int8"),
    "a prompt of quantized caches": GroupQueryCase((170, 20), new=170, past=400, cache="int8", per_channel=True),
    "one token of linear_attention": LinearCase(1, dtype="float16"),
    "chunks of linear_attention": LinearCase(150, dtype="float16", size=32, value_size=32),
    "linear_attention in TF32": LinearCase(100, rule="gated"),
    "parts of linear_attention in TF32": LinearCase(200, rule="gated"),
    "a causal convolution": Conv(40, dtype="float16"),
}


def specs_of(case: Case | CachedCase | GroupQueryCase | LinearCase | Conv) -> list[TensorSpec]:
    """Return the inputs of a case as a plan has them."""
    if isinstance(case, GroupQueryCase | LinearCase | Conv):
        return [*case.specs()]
    return [TensorSpec(array.shape, array.dtype.name) for array in case.inputs().values()]


def node_of(name: str, constants: bool) -> tuple[FusedNode, list[TensorSpec]]:
    """One of NODES and its inputs, whose weights are the model's `constants` or are computed."""
    fusion, shapes, attributes, outputs = NODES[name]
    kept = WEIGHTS if constants and fusion != "gated_activation" else set()
    dtypes = {"ids": "int64", "ids_2": "int64", "positions": "int64"}
    dtypes |= dict.fromkeys(("w", "w_2", "up"), "uint8") if "nbits" in fusion else {}
    dtypes |= dict.fromkeys(("x", "w"), "int8") if fusion == "quantized_matmul" else {}
    inputs = [TensorSpec(s, dtypes.get(operand, "float16"), constant=operand in kept) for operand, s in shapes.items()]
    dtype = "int64" if "ArgMax" in attributes.get("program", "") else "float16"
    return FusedNode(fusion, "n", tuple(shapes), attributes, (dtype,) * outputs), inputs
