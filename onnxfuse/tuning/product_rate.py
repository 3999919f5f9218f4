"""Measure how fast onnxruntime multiplies large matrices on a device: the flat part of a roofline."""

from __future__ import annotations

import functools
from typing import Final

import ml_dtypes
import numpy as np
from onnx import helper

from onnxfuse.tuning.bound_session import Provider, bind, start_session
from onnxfuse.tuning.timing import interleaved

SIZE: Final = {"cpu": 512, "cuda": 8192}  # of the square matrices; a larger product does not reach a higher rate
REPEATS: Final = 9
DTYPES: Final = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@functools.cache
def product_rate(provider: Provider, dtype: str) -> float | None:
    """Return the FLOP/s of a product of two large matrices of an ONNX dtype, such as "float16".

    Float32 is multiplied as onnxruntime does by default: on CUDA in TF32.  Returns None for other dtypes than floats of
    16 and 32 bits, and where onnxruntime has no such product.
    """
    if dtype not in DTYPES:
        return None
    size, element = SIZE[provider], int(helper.np_dtype_to_tensor_dtype(np.dtype(DTYPES[dtype])))
    a, b, c = (helper.make_tensor_value_info(name, element, [size, size]) for name in "abc")
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", [a, b], [c])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    random = np.random.default_rng(0).normal(size=1000)  # equal values would cost less power, and run faster
    matrix = np.resize(random, (size, size)).astype(DTYPES[dtype])
    try:
        bound = bind(start_session(model, None, provider), {"a": matrix, "b": matrix}, provider).warm_up()
    except Exception:  # onnxruntime's errors have no common class
        return None
    return 2 * size**3 / interleaved([bound.run], REPEATS)[0].median
