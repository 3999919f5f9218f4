"""Count what a Keras model computes when it runs, and export it by Keras' own exporters."""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

SEED = 0
NORM = re.compile(r"(Layer|RMS|Rms|Group|QK|Roformer)_?Norm")
ROTARY = re.compile(r"_?apply_(rope|rotary)\w*")
ACTIVATIONS = ("relu", "relu6", "leaky_relu", "elu", "gelu", "silu", "hard_silu", "sigmoid", "tanh")
Model = Any  # keras.Model


def randomise(model: Model) -> None:
    """Draw the weights of a model, so that none is 0 or 1 and merged with others."""
    random = np.random.default_rng(SEED)
    for weight in model.weights:
        if "seed" not in weight.path and "float" in weight.dtype:
            around_one = any(name in weight.path for name in ("gamma", "scale", "variance"))
            drawn = random.uniform(0.5, 1.5, weight.shape) if around_one else random.normal(0, 0.2, weight.shape)
            weight.assign(drawn.astype(weight.dtype))


def export(build: Callable[[], Model], path: str) -> Counter[str]:
    """Export a model.  Returns how many of each structure a run computes, by the calls of layers and functions."""
    keras.backend.clear_session()
    model = build()
    randomise(model)
    zeros = {each.name: np.zeros([size or 6 for size in each.shape], each.dtype) for each in model.inputs}
    counts: Counter[str] = Counter()
    with counted(counts):
        model(zeros if isinstance(model.input, dict) else list(zeros.values()))
    model.export(path, format="onnx", verbose=False)
    return counts


@contextmanager
def counted(counts: Counter[str]) -> Iterator[None]:
    """Count calls of norms, activations, rotations, softmaxes of scores and biased products until the end."""
    replaced: list[tuple[Any, str, Any]] = []
    inside: Counter[str] = Counter()

    def replace(owner: Any, name: str, structure: str, number: Callable[..., int]) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            inside[structure] += (found := number(*args, **given)) > 0
            try:
                result = function(*args, **given)
            finally:
                inside[structure] -= found > 0
            several = len(result) if structure == "rotary" and isinstance(result, tuple) else 1
            counts[structure] += found * several * (not inside[structure])
            return result

        replaced.append((owner, name, function))
        setattr(owner, name, call)

    functions = keras.src.backend.nn
    replace(keras.layers.Layer, "__call__", "norms", lambda layer, *_, **__: bool(NORM.search(type(layer).__name__)))
    replace(keras.layers.Layer, "__call__", "biased products", lambda layer, *_, **__: is_biased_product(layer))
    replace(functions, "softmax", "attention", lambda x, *_, **__: len(x.shape) > 3)
    replace(functions, "dot_product_attention", "attention", lambda *_, **__: 1)
    replace(keras.layers.Attention, "__call__", "attention", lambda *_, **__: 1)
    for name in ACTIVATIONS:
        replace(functions, name, "activations", lambda *_, **__: 1)
    for owner, name in rotations():
        replace(owner, name, "rotary", lambda *_, **__: 1)
    try:
        yield
    finally:
        for owner, name, function in reversed(replaced):
            setattr(owner, name, function)


def is_biased_product(layer: Any) -> bool:
    """Return whether a layer multiplies with a weight and adds a bias."""
    name = type(layer).__name__
    return (name == "Dense" and layer.use_bias) or (name == "EinsumDense" and layer.bias_axes is not None)


def rotations() -> Iterator[tuple[Any, str]]:
    """Yield the functions and methods of KerasHub that apply a rotary embedding, with what has them."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("keras_hub.src.") and module is not None:
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == module_name:
                    yield from ((value, each) for each in vars(value) if ROTARY.fullmatch(each))
                elif ROTARY.fullmatch(name) and callable(value):
                    yield module, name
