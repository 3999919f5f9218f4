"""Models of Keras' layers for the survey: one or two layers each, with as many heads and inputs as spellings need.

Needs keras==3.15.1 with a backend and its exporter: tensorflow==2.21.0 and tf2onnx==1.17.0, or torch==2.13.0 and
onnxscript==0.7.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import keras
from keras import layers
from survey_keras_counts import export

WIDTH, HEADS, SIZE, WORDS = 32, 4, 8, 50
Model = Any  # keras.Model or a symbolic tensor


def words() -> tuple[Model, Model]:
    ids = keras.Input((None,), dtype="int32", name="ids")
    return ids, layers.Embedding(WORDS, WIDTH)(ids)


def image(size: int = 16, channels: int = 3) -> Model:
    return keras.Input((size, size, channels))


def block(x: Model, norm: Callable[..., Model] = layers.LayerNormalization, **masks: object) -> Model:
    normed = norm()(x)
    x = layers.Add()([x, layers.MultiHeadAttention(HEADS, SIZE)(normed, normed, **masks)])
    hidden = layers.Dense(2 * WIDTH, activation="gelu")(norm()(x))
    return layers.Add()([x, layers.Dense(WIDTH)(hidden)])


def encoder() -> Model:
    x = keras.Input((None, WIDTH))
    return keras.Model(x, layers.LayerNormalization()(block(block(x))))


def encoder_of_two_inputs() -> Model:
    ids, x = words()
    kept = keras.Input((None,), dtype="bool", name="kept")
    mask = layers.Lambda(lambda t: t[:, None, :], output_shape=lambda s: (s[0], 1, s[1]))(kept)
    return keras.Model([ids, kept], block(block(x, attention_mask=mask), attention_mask=mask))


def decoder() -> Model:
    ids, x = words()
    hidden = layers.LayerNormalization()(block(block(x, use_causal_mask=True), use_causal_mask=True))
    return keras.Model(ids, layers.Dense(WORDS)(hidden))


def cross_attention() -> Model:
    x, memory = keras.Input((None, WIDTH), name="x"), keras.Input((None, WIDTH), name="memory")
    y = block(x, use_causal_mask=True)
    return keras.Model([x, memory], y + layers.MultiHeadAttention(HEADS, SIZE)(layers.LayerNormalization()(y), memory))


def mask_of_zeros() -> Model:
    ids = keras.Input((None,), dtype="int32")
    return keras.Model(ids, block(layers.Embedding(WORDS, WIDTH, mask_zero=True)(ids)))


def rms_norm() -> Model:
    x = keras.Input((None, WIDTH))
    return keras.Model(x, block(x, layers.RMSNormalization))


def grouped_queries(causal: bool = False) -> Model:
    x = keras.Input((None, WIDTH))
    return keras.Model(x, x + layers.GroupQueryAttention(SIZE, HEADS, 2)(x, x, use_causal_mask=causal))


def dot_attention() -> Model:
    q, v = keras.Input((None, WIDTH), name="q"), keras.Input((None, WIDTH), name="v")
    return keras.Model([q, v], layers.Attention(use_scale=True)([q, v]))


def group_norm() -> Model:
    x = image()
    y = layers.Activation("silu")(layers.GroupNormalization(4)(layers.Conv2D(16, 3, padding="same")(x)))
    return keras.Model(x, layers.GroupNormalization(4)(layers.Conv2D(16, 3, padding="same")(y)))


def layer_norm_of_images() -> Model:
    x = image()
    y = layers.LayerNormalization()(layers.Conv2D(16, 4, strides=4)(x))
    y = layers.LayerNormalization()(layers.DepthwiseConv2D(3, padding="same")(y))
    return keras.Model(x, layers.Conv2D(16, 1)(layers.Conv2D(WIDTH, 1, activation="gelu")(y)))


def vision_transformer() -> Model:
    x = image(32)
    patches = layers.Reshape((16, WIDTH))(layers.Conv2D(WIDTH, 8, strides=8)(x))
    return keras.Model(x, layers.Dense(10)(layers.GlobalAveragePooling1D()(block(block(patches)))))


def separable_convolution() -> Model:
    x = image()
    y = layers.ReLU(6)(layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same", use_bias=False)(x)))
    y = layers.BatchNormalization()(layers.SeparableConv2D(16, 3, padding="same")(y))
    return keras.Model(x, layers.LeakyReLU()(y))


def squeeze_and_excite() -> Model:
    x = image(channels=16)
    gate = layers.Conv2D(4, 1, activation="swish")(layers.GlobalAveragePooling2D(keepdims=True)(x))
    return keras.Model(x, x * layers.Conv2D(16, 1, activation="sigmoid")(gate))


def convolution_of_rows() -> Model:
    x = keras.Input((None, WIDTH))
    y = layers.Conv1D(WIDTH, 3, padding="same", activation="relu")(x)
    return keras.Model(x, layers.Conv1D(WIDTH, 3, padding="causal")(y))


def causal_grouped_queries() -> Model:
    return grouped_queries(causal=True)


def exporter() -> str:
    """Return the name of the exports' kind: the backend."""
    return keras.backend.backend()


def versions() -> dict[str, str]:
    """Return the versions that the exports depend on."""
    return {"keras": keras.__version__}


SUBJECTS: Final[dict[str, Callable[[], Model]]] = {build.__name__: build for build in (
    encoder, encoder_of_two_inputs, decoder, cross_attention, mask_of_zeros, rms_norm, grouped_queries,
    causal_grouped_queries, dot_attention, group_norm, layer_norm_of_images, vision_transformer, separable_convolution,
    squeeze_and_excite, convolution_of_rows,
)}  # fmt: skip
__all__ = ["SUBJECTS", "export", "exporter", "versions"]
