"""Test how values are moved by one unit in the last place."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.verify.noise import move_by_one_ulp


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_values_move_by_one_unit_and_the_numbers_of_masks_stay(dtype: type) -> None:
    lowest = ml_dtypes.finfo(dtype).min
    value = np.array([1.0, -1.0, 0.0, lowest, -np.inf, np.nan] * 16, dtype)
    moved = move_by_one_ulp("x", value)
    changed = moved != value
    assert changed.reshape(16, 6).sum(0).tolist() == [16, 16, 16, 0, 0, 16]
    assert {np.sign(float(a) - float(b)) for a, b in zip(moved[::6], value[::6], strict=True)} == {-1.0, 1.0}
    assert np.abs(moved[::6].astype(float) - 1).max() <= ml_dtypes.finfo(dtype).eps
    assert (move_by_one_ulp("x", value, draw=1)[::6] != moved[::6]).any(), "another draw has other directions"


def test_integers_stay() -> None:
    assert (move_by_one_ulp("x", np.arange(4)) == np.arange(4)).all()
