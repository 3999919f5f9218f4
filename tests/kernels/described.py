"""The shapes and dtypes of operands, without the numbers: these take longer to draw than plans to make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

Descriptions = Mapping[str, tuple[tuple[int, ...], str]]
_known: dict[tuple[type, str], Descriptions] = {}


def described(case: Any) -> Descriptions:
    """Return the shape and the dtype of each operand of a case, by name; its `arrays` or `inputs` draw them."""
    key = type(case), repr(case)
    if key not in _known:
        with ones():
            arrays = case.arrays() if hasattr(case, "arrays") else case.inputs()
        _known[key] = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
    return _known[key]


@contextmanager
def ones() -> Iterator[None]:
    """Return a context in which NumPy's generators of random numbers give ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np.random, "default_rng", lambda seed: Ones())
        yield


class Ones:
    """A generator that draws nothing."""

    def standard_normal(self, shape: Any = (), dtype: Any = np.float64) -> np.ndarray:
        return np.ones(shape, dtype)

    def random(self, shape: Any = ()) -> np.ndarray:
        return np.ones(shape)

    def permutation(self, count: int) -> np.ndarray:
        return np.arange(count)

    def uniform(self, low: float, high: float, shape: Any = ()) -> np.ndarray:
        return np.ones(shape)

    def integers(self, low: int, high: int, shape: Any = (), dtype: Any = np.int64) -> np.ndarray:
        return np.ones(shape, dtype)
