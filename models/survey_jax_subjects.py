"""Models of JAX for the survey: layers of flax.nnx, flax.linen and Equinox, and attentions written by hand.

Needs jax==0.10.2, flax==0.12.8, equinox==0.13.8 and jax2onnx==0.17.1.  Structures are counted by the layers that a
model is built of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import metadata
from typing import Any, Final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import onnx
from flax import linen, nnx
from jax2onnx import to_onnx

WIDTH, HEADS, SIZE, WORDS, ROWS = 32, 4, 8, 50, 6
Array = Any
SEED = 0


class Attention(nnx.Module):
    """Attention that is written by hand: grouped queries, rotary embedding, a causal mask, a softmax."""

    def __init__(self, rngs: nnx.Rngs, kv_heads: int = HEADS, rotary: str = "", einsum: bool = True) -> None:
        self.kv_heads, self.rotary, self.einsum = kv_heads, rotary, einsum
        self.q, self.out = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(2))
        self.k, self.v = (nnx.Linear(WIDTH, kv_heads * SIZE, use_bias=False, rngs=rngs) for _ in range(2))

    def __call__(self, x: Array) -> Array:
        """Return the attention of (batch, rows, width) to itself."""
        batch, rows, _ = x.shape
        q = self.q(x).reshape(batch, rows, HEADS, SIZE)
        k, v = (each(x).reshape(batch, rows, self.kv_heads, SIZE) for each in (self.k, self.v))
        if self.rotary:
            q, k = (rotated(each, self.rotary) for each in (q, k))
        k, v = (jnp.repeat(each, HEADS // self.kv_heads, axis=2) for each in (k, v))
        causal = jnp.tril(jnp.ones((rows, rows), bool))
        if self.einsum:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * SIZE**-0.5
            weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        else:
            q, k, v = (each.transpose(0, 2, 1, 3) for each in (q, k, v))
            scores = jnp.where(causal, q @ k.swapaxes(-1, -2) / jnp.sqrt(SIZE), jnp.finfo(jnp.float32).min)
            y = (jax.nn.softmax(scores, axis=-1) @ v).transpose(0, 2, 1, 3)
        return self.out(y.reshape(batch, rows, WIDTH))


def rotated(x: Array, kind: str) -> Array:
    """Return (batch, rows, heads, size) rotated by its row: by halves, or by pairs."""
    angles = jnp.arange(x.shape[1])[:, None] / 1e4 ** (jnp.arange(0, SIZE, 2) / SIZE)
    cos, sin = jnp.cos(angles)[None, :, None, :], jnp.sin(angles)[None, :, None, :]
    if kind == "halves":
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


class Block(nnx.Module):
    """A block of a transformer: an attention and an MLP, each after a norm."""

    def __init__(self, attention: Any, norm: Callable[..., Any], rngs: nnx.Rngs, gate: bool = False) -> None:
        self.attention, self.norms = attention, nnx.List([norm(WIDTH, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(WIDTH, 48, rngs=rngs), nnx.Linear(48, WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, 48, rngs=rngs) if gate else None

    def __call__(self, x: Array, **masks: Array) -> Array:
        """Return a tensor as large as x."""
        x = x + self.attention(self.norms[0](x), **masks)
        y = self.norms[1](x)
        hidden = jax.nn.silu(self.gate(y)) * self.up(y) if self.gate else jax.nn.gelu(self.up(y))
        return x + self.down(hidden)


def nnx_blocks(make: Callable[[nnx.Rngs], Any], norm: Any = nnx.LayerNorm, gate: bool = False) -> Callable[..., Array]:
    """Two blocks of attentions that `make` builds, after an embedding, and a norm."""
    rngs = nnx.Rngs(SEED)
    embedding = nnx.Embed(WORDS, WIDTH, rngs=rngs)
    blocks, last = [Block(make(rngs), norm, rngs, gate) for _ in range(2)], norm(WIDTH, rngs=rngs)

    def model(ids: Array, **masks: Array) -> Array:
        x = embedding(ids)
        for block in blocks:
            x = block(x, **masks)
        return last(x)

    return model


def multi_head(rngs: nnx.Rngs) -> nnx.Module:
    """nnx.MultiHeadAttention without a cache."""
    return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)


def nnx_encoder() -> Callable[..., Array]:
    return nnx_blocks(multi_head)


def nnx_causal() -> Callable[..., Array]:
    model = nnx_blocks(multi_head)
    return lambda ids: model(ids, mask=nnx.make_causal_mask(ids))


def nnx_padded() -> Callable[..., Array]:
    model = nnx_blocks(multi_head, nnx.RMSNorm)
    return lambda ids: model(ids, mask=nnx.make_attention_mask(ids > 0, ids > 0))


def nnx_causal_padded() -> Callable[..., Array]:
    model = nnx_blocks(multi_head)
    return lambda ids: model(
        ids, mask=nnx.combine_masks(nnx.make_attention_mask(ids > 0, ids > 0), nnx.make_causal_mask(ids))
    )


def by_hand(**options: Any) -> Callable[[], Callable[..., Array]]:
    return lambda: nnx_blocks(lambda rngs: Attention(rngs, **options), nnx.RMSNorm, gate=True)


def dot_product(kv_heads: int = HEADS, causal: bool = True) -> Callable[[], Callable[..., Array]]:
    """jax.nn.dot_product_attention of projections."""

    class Projected(Attention):
        def __call__(self, x: Array) -> Array:
            batch, rows, _ = x.shape
            q = self.q(x).reshape(batch, rows, HEADS, SIZE)
            k, v = (each(x).reshape(batch, rows, kv_heads, SIZE) for each in (self.k, self.v))
            return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(batch, rows, WIDTH))

    return lambda: nnx_blocks(lambda rngs: Projected(rngs, kv_heads))


class LinenBlock(linen.Module):
    """A block of flax.linen."""

    norm: Any = linen.LayerNorm

    @linen.compact
    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Return a tensor as large as x."""
        x = x + linen.MultiHeadDotProductAttention(HEADS)(self.norm()(x), mask=mask)
        return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(48)(self.norm()(x))))


class LinenModel(linen.Module):
    """Two blocks of flax.linen after an embedding."""

    norm: Any = linen.LayerNorm
    causal: bool = False

    @linen.compact
    def __call__(self, ids: Array) -> Array:
        """Return (batch, rows, width) of (batch, rows)."""
        x = linen.Embed(WORDS, WIDTH)(ids)
        mask = linen.make_causal_mask(ids) if self.causal else None
        for _ in range(2):
            x = LinenBlock(self.norm)(x, mask)
        return self.norm()(x)


class LinenImages(linen.Module):
    """Convolutions of flax.linen with norms and activations."""

    @linen.compact
    def __call__(self, x: Array) -> Array:
        """Return (batch, classes) of (batch, height, width, 3)."""
        x = linen.relu(linen.BatchNorm(use_running_average=True)(linen.Conv(16, (3, 3), strides=(2, 2))(x)))
        y = linen.silu(linen.GroupNorm(4)(linen.Conv(16, (3, 3))(x)))
        x = linen.relu(x + linen.Conv(16, (1, 1))(y))
        y = linen.LayerNorm()(linen.Conv(16, (7, 7), feature_group_count=16)(x))
        x = x + linen.Dense(16)(linen.gelu(linen.Dense(32)(y)))
        return linen.Dense(10)(x.mean((1, 2)))


def linen_model(module: linen.Module, example: Array) -> Callable[[], Callable[..., Array]]:
    def build() -> Callable[..., Array]:
        parameters = module.init(jax.random.PRNGKey(SEED), example)
        return lambda x: module.apply(parameters, x)

    return build


def equinox_blocks(norm: Any = eqx.nn.LayerNorm) -> Any:
    """Two blocks of Equinox' layers, mapped over the batch."""

    def build() -> Callable[..., Array]:
        keys = iter(jax.random.split(jax.random.PRNGKey(SEED), 8))
        attentions = [eqx.nn.MultiheadAttention(HEADS, WIDTH, key=next(keys)) for _ in range(2)]
        norms = [norm(WIDTH) for _ in range(5)]
        ups = [eqx.nn.Linear(WIDTH, 48, key=next(keys)) for _ in range(2)]
        downs = [eqx.nn.Linear(48, WIDTH, key=next(keys)) for _ in range(2)]

        def model(x: Array) -> Array:
            for i in range(2):
                y = jax.vmap(norms[2 * i])(x)
                x = x + attentions[i](y, y, y)
                y = jax.nn.gelu(jax.vmap(ups[i])(jax.vmap(norms[2 * i + 1])(x)))
                x = x + jax.vmap(downs[i])(y)
            return jax.vmap(norms[4])(x)

        return jax.vmap(model)

    return build


def activation(name: str) -> Callable[[], Callable[..., Array]]:
    """An activation of jax.nn after a product."""

    def build() -> Callable[..., Array]:
        product, function = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(SEED)), getattr(jax.nn, name)
        return lambda x: function(product(x))

    return build


class Grouped(Attention):
    """Attention of Gemma: one Einsum for the queries of all heads that share a key head, and limited scores."""

    def __call__(self, x: Array) -> Array:
        """Return the attention of (batch, rows, width) to itself."""
        batch, rows, _ = x.shape
        q = self.q(x).reshape(batch, rows, self.kv_heads, HEADS // self.kv_heads, SIZE)
        k, v = (each(x).reshape(batch, rows, self.kv_heads, SIZE) for each in (self.k, self.v))
        scores = jnp.tanh(jnp.einsum("btkgh,bskh->bkgts", q, k) * SIZE**-0.5 / 50.0) * 50.0
        scores = jnp.where(jnp.tril(jnp.ones((rows, rows), bool)), scores, -2.3819763e38)
        y = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores, axis=-1), v)
        return self.out(y.reshape(batch, rows, WIDTH))


def vision_transformer() -> Callable[..., Array]:
    """Patches by a convolution, a class token, blocks, and a head that reads the class token."""
    rngs = nnx.Rngs(SEED)
    patches, head = nnx.Conv(3, WIDTH, (4, 4), strides=(4, 4), rngs=rngs), nnx.Linear(WIDTH, 10, rngs=rngs)
    blocks, last = [Block(multi_head(rngs), nnx.LayerNorm, rngs) for _ in range(2)], nnx.LayerNorm(WIDTH, rngs=rngs)
    token, places = jnp.full((1, 1, WIDTH), 0.3), jax.random.normal(jax.random.PRNGKey(SEED), (1, 17, WIDTH))

    def model(image: Array) -> Array:
        x = patches(image).reshape(image.shape[0], -1, WIDTH)
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, WIDTH)), x], axis=1) + places
        for block in blocks:
            x = block(x)
        return head(last(x)[:, 0])

    return model


IDS, IMAGE, FLOATS = (("B", ROWS), jnp.int32), (("B", 16, 16, 3), jnp.float32), (("B", ROWS, WIDTH), jnp.float32)
ACTIVATIONS = (
    "relu", "relu6", "gelu", "silu", "elu", "leaky_relu", "selu", "celu", "hard_silu", "hard_sigmoid", "mish",
    "softplus", "tanh", "sigmoid", "log_sigmoid", "squareplus",
)  # fmt: skip
BLOCKS = {"attention": 2, "norms": 5, "activations": 2}
BIASED, GATED, UNGATED = {**BLOCKS, "biased products": 12}, {**BLOCKS, "biased products": 6}, {
    **BLOCKS, "biased products": 4}  # fmt: skip
TURNED = {"rotary": 4}
Subject = tuple[Callable[[], Callable[..., Array]], tuple[Any, Any], dict[str, int]]
EXAMPLE = np.ones((1, ROWS), np.int32)
SUBJECTS: Final[dict[str, Subject]] = {
    "nnx_encoder": (nnx_encoder, IDS, BIASED), "nnx_causal": (nnx_causal, IDS, BIASED),
    "nnx_padded": (nnx_padded, IDS, BIASED), "nnx_causal_padded": (nnx_causal_padded, IDS, BIASED),
    "causal_einsum": (by_hand(), IDS, GATED), "causal_matmul": (by_hand(einsum=False), IDS, GATED),
    "grouped_queries": (by_hand(kv_heads=2), IDS, GATED),
    "grouped_queries_matmul": (by_hand(kv_heads=2, einsum=False), IDS, GATED),
    "llama": (by_hand(kv_heads=2, rotary="halves"), IDS, GATED | TURNED),
    "rotary_pairs": (by_hand(rotary="pairs"), IDS, GATED | TURNED),
    "rotary_matmul": (by_hand(rotary="halves", einsum=False), IDS, GATED | TURNED),
    "dot_product_attention": (dot_product(causal=False), IDS, UNGATED),
    "dot_product_attention_causal": (dot_product(), IDS, UNGATED),
    "dot_product_attention_grouped": (dot_product(kv_heads=2), IDS, UNGATED),
    "gemma": (lambda: nnx_blocks(lambda rngs: Grouped(rngs, 2), nnx.RMSNorm, gate=True), IDS, GATED),
    "vision_transformer": (vision_transformer, IMAGE, {**BLOCKS, "biased products": 13}),
    **{name: (activation(name), FLOATS, {"activations": 1, "biased products": 1}) for name in ACTIVATIONS},
    "linen_encoder": (linen_model(LinenModel(), EXAMPLE), IDS, BIASED),
    "linen_causal": (linen_model(LinenModel(causal=True), EXAMPLE), IDS, BIASED),
    "linen_rms_norm": (linen_model(LinenModel(linen.RMSNorm), EXAMPLE), IDS, BIASED),
    "linen_images": (linen_model(LinenImages(), np.ones((1, 16, 16, 3), np.float32)), IMAGE,
                     {"norms": 2, "activations": 4, "biased products": 3}),
    "equinox_encoder": (equinox_blocks(), FLOATS, UNGATED),
    "equinox_rms_norm": (equinox_blocks(eqx.nn.RMSNorm), FLOATS, UNGATED),
}  # fmt: skip


def export(subject: Subject, path: str) -> Counter[str]:
    """Export a model.  Returns how many of each structure its layers compute.

    Biases of new layers are zeros, which onnxfuse drops; here they are drawn.
    """
    build, (shape, dtype), counts = subject
    model, random = to_onnx(build(), [jax.ShapeDtypeStruct(shape, dtype)]), np.random.default_rng(SEED)
    for each in model.graph.initializer:
        value = onnx.numpy_helper.to_array(each)
        if value.dtype == np.float32 and value.ndim == 1 and not value.any():
            each.CopyFrom(onnx.numpy_helper.from_array(random.normal(0, 0.1, value.shape).astype("f4"), each.name))
    onnx.save(model, path)
    return Counter(counts)


def exporter() -> str:
    """Return the name of the exports' kind."""
    return "jax2onnx"


def versions() -> dict[str, str]:
    """Return the versions that the exports depend on."""
    return {name: metadata.version(name) for name in ("jax", "flax", "equinox", "jax2onnx")}
