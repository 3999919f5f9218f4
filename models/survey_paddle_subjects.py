"""Models of Paddle for the survey: its transformers, its vision models in tiny sizes, and decoders written by hand.

Needs paddlepaddle==3.3.1 and paddle2onnx==2.1.0.  Structures are counted by the layers that a run calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any, Final

import paddle
from paddle import nn
from paddle.nn import functional as F
from paddle.static import InputSpec
from paddle.vision import models

WIDTH, HEADS, SIZE, WORDS, SEED = 32, 4, 8, 50, 0
ACTIVATIONS = (
    "ReLU", "ReLU6", "GELU", "Silu", "Swish", "Hardswish", "Hardsigmoid", "LeakyReLU", "Sigmoid", "Tanh", "PReLU",
)  # fmt: skip
OF_FUNCTIONS = ("TransformerEncoderLayer", "TransformerDecoderLayer", "GatedMLP")  # each calls one activation
NORMS = ("LayerNorm", "GroupNorm", "RMSNorm")
Tensor = Any


class RMSNorm(nn.Layer):
    """A norm that is written by hand, as in PaddleNLP."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([WIDTH], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x^2) + 1e-6) * weight."""
        variance = x.astype("float32").pow(2).mean(-1, keepdim=True)
        return paddle.rsqrt(variance + 1e-6) * x * self.weight


class Rotary(nn.Layer):
    """A rotation of halves or of pairs."""

    def __init__(self, pairs: bool) -> None:
        super().__init__()
        self.pairs = pairs

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, rows, heads, size) rotated by its row."""
        angles = paddle.arange(x.shape[1], dtype="float32").unsqueeze(-1) / 1e4 ** (paddle.arange(0, SIZE, 2) / SIZE)
        if self.pairs:
            angles = paddle.stack([angles, angles], axis=-1).reshape([-1, SIZE])
            turned = paddle.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(paddle.shape(x))
        else:
            angles = paddle.concat([angles, angles], axis=-1)
            turned = paddle.concat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], axis=-1)
        return x * angles.cos().unsqueeze([0, 2]) + turned * angles.sin().unsqueeze([0, 2])


class CausalAttention(nn.Layer):
    """Attention of PaddleNLP's Llama: grouped queries, a rotary embedding and a causal mask."""

    def __init__(self, kv_heads: int, pairs: bool) -> None:
        super().__init__()
        self.kv_heads, self.rotary = kv_heads, Rotary(pairs)
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias_attr=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, kv_heads * SIZE, bias_attr=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention of (batch, rows, width) to itself."""
        q = self.rotary(self.q(x).reshape([0, 0, HEADS, SIZE])).transpose([0, 2, 1, 3])
        k = self.rotary(self.k(x).reshape([0, 0, self.kv_heads, SIZE]))
        k = repeated(k, HEADS // self.kv_heads).transpose([0, 2, 1, 3])
        v = self.v(x).reshape([0, 0, self.kv_heads, SIZE])
        v = repeated(v, HEADS // self.kv_heads).transpose([0, 2, 1, 3])
        scores = paddle.matmul(q / SIZE**0.5, k, transpose_y=True)
        mask = paddle.tril(paddle.ones([x.shape[1], x.shape[1]], dtype="bool"))
        scores = scores + paddle.where(mask, paddle.to_tensor(0.0), paddle.to_tensor(-1e4))
        y = paddle.matmul(F.softmax(scores, axis=-1), v).transpose([0, 2, 1, 3])
        return self.out(y.reshape([0, 0, WIDTH]))


def repeated(x: Tensor, repeats: int) -> Tensor:
    """Return (batch, rows, heads, size) with each head repeated."""
    return paddle.tile(x.unsqueeze(-2), [1, 1, 1, repeats, 1]).reshape([0, 0, HEADS, SIZE]) if repeats > 1 else x


class GatedMLP(nn.Layer):
    """silu(gate(x)) * up(x), projected back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 48, bias_attr=False) for _ in range(2))
        self.down = nn.Linear(48, WIDTH, bias_attr=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor as large as x."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Layer):
    """Two layers of a decoder."""

    def __init__(self, kv_heads: int = HEADS, pairs: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attentions = nn.LayerList([CausalAttention(kv_heads, pairs) for _ in range(2)])
        self.mlps, self.norms = (
            nn.LayerList([GatedMLP() for _ in range(2)]),
            nn.LayerList([RMSNorm() for _ in range(5)]),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return (batch, rows, width) of (batch, rows)."""
        x = self.embedding(ids)
        for i in range(2):
            x = x + self.attentions[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return self.norms[4](x)


class VisionTransformer(nn.Layer):
    """Patches by a convolution, Paddle's own encoder, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.encoder, self.head = nn.Conv2D(3, WIDTH, 8, stride=8), encoder(True), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, classes) of (batch, 3, height, width)."""
        return self.head(self.encoder(self.patches(x).flatten(2).transpose([0, 2, 1])).mean(1))


def encoder(norm_first: bool, activation: str = "gelu") -> nn.Layer:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, activation=activation, normalize_before=norm_first)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH) if norm_first else None)


def seq2seq() -> nn.Layer:
    return nn.Transformer(WIDTH, HEADS, 2, 2, 48)


IMAGE = (InputSpec([None, 3, 64, 64], "float32", "x"),)
FLOATS, IDS = (InputSpec([None, None, WIDTH], "float32", "x"),), (InputSpec([None, None], "int64", "ids"),)
PAIR = (*FLOATS, InputSpec([None, None, WIDTH], "float32", "memory"))
Subject = tuple[Callable[[], nn.Layer], tuple[InputSpec, ...]]
SUBJECTS: Final[dict[str, Subject]] = {
    "encoder": (lambda: encoder(False), FLOATS), "encoder_norm_first": (lambda: encoder(True), FLOATS),
    "encoder_relu": (lambda: encoder(False, "relu"), FLOATS), "transformer": (seq2seq, PAIR),
    "llama": (lambda: Decoder(), IDS), "grouped_queries": (lambda: Decoder(2), IDS),
    "rotary_pairs": (lambda: Decoder(pairs=True), IDS), "vision_transformer": (VisionTransformer, IMAGE),
    "resnet18": (lambda: models.resnet18(num_classes=10), IMAGE),
    "mobilenet_v1": (lambda: models.mobilenet_v1(scale=0.25, num_classes=10), IMAGE),
    "mobilenet_v2": (lambda: models.mobilenet_v2(scale=0.25, num_classes=10), IMAGE),
    "mobilenet_v3_small": (lambda: models.mobilenet_v3_small(scale=0.5, num_classes=10), IMAGE),
    "shufflenet_v2": (lambda: models.shufflenet_v2_x0_25(num_classes=10), IMAGE),
    "shufflenet_v2_swish": (lambda: models.shufflenet_v2_swish(num_classes=10), IMAGE),
    "squeezenet1_1": (lambda: models.squeezenet1_1(num_classes=10), IMAGE),
}  # fmt: skip


def export(subject: Subject, path: str) -> Counter[str]:
    """Export a model.  Returns how many of each structure a run computes, by the calls of layers."""
    build, inputs = subject
    paddle.seed(SEED)
    model = build()
    model.eval()
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.set_value(paddle.uniform(parameter.shape, min=0.5, max=1.5))
    counts: Counter[str] = Counter()
    hooks = [each.register_forward_pre_hook(lambda each, _: count(each, counts)) for each in model.sublayers(True)]
    model(*(paddle.ones([size if size > 0 else 6 for size in each.shape], each.dtype) for each in inputs))
    for hook in hooks:
        hook.remove()
    paddle.onnx.export(model, path.removesuffix(".onnx"), input_spec=list(inputs), opset_version=17)
    return counts


def count(layer: nn.Layer, counts: Counter[str]) -> None:
    """Count one call of a layer."""
    name = type(layer).__name__
    counts["attention"] += name.endswith("Attention")
    counts["rotary"] += name == "Rotary"
    counts["norms"] += name in NORMS
    counts["activations"] += name in ACTIVATIONS or name in OF_FUNCTIONS
    counts["biased products"] += name == "Linear" and layer.bias is not None


def exporter() -> str:
    """Return the name of the exports' kind."""
    return "paddle2onnx"


def versions() -> dict[str, str]:
    """Return the versions that the exports depend on."""
    return {name: metadata.version(name) for name in ("paddlepaddle", "paddle2onnx")}
