"""The golden record: optimizing each file of models/exported gives the same counts, nodes, folds and results as before.

`python tests/golden.py` rewrites the record where a change alters it on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from golden import read, record
from test_models import INDEX

GOLDEN: dict[str, dict[str, Any]] = read()
ADVICE = "if that is on purpose, run `python tests/golden.py` and commit the difference of tests/golden.json"

# Of the largest value of an output.  Another CPU sums float32 in another order, which moves results as much as another
# graph does: test_models.py allows two graphs 1e-5 on one CPU, and ten times that leaves room for other vector widths.
# Where a CPU has float16 arithmetic, onnxruntime rounds after every operator; elsewhere it computes in float32 between
# Casts.  Where these are placed moves outputs by 1.8e-3 (test_models.py), and five times that is allowed.
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2}


def test_the_record_has_every_model() -> None:
    assert sorted(GOLDEN) == sorted(INDEX), ADVICE


@pytest.mark.parametrize("name", INDEX)
def test_optimizing_gives_what_it_gave(name: str, optimized: Callable[[str], Any]) -> None:
    result = optimized(name)
    found, wanted = record(name, onnx.load(result.path), result.report), GOLDEN[name]
    for field in ("nodes", "counts", "folded"):
        assert found[field] == wanted[field], f"{field} of {name} differ from the record; {ADVICE}"
    assert found["results"].keys() == wanted["results"].keys(), ADVICE
    for output, expected in wanted["results"].items():
        assert_same(f"{name}: {output}", found["results"][output], expected, TOLERANCE[INDEX[name]["dtype"]])


def assert_same(where: str, found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Fail if two summaries of an output differ by more than the tolerance, relative to the largest value."""
    assert (found["shape"], found["dtype"]) == (expected["shape"], expected["dtype"]), f"{where}; {ADVICE}"
    assert expected["largest"] > 0, f"{where} is zero everywhere, so that comparing it says nothing"
    allowed = tolerance * expected["largest"]
    message = f"{where} differs from the record; {ADVICE}"
    np.testing.assert_allclose(found["samples"], expected["samples"], rtol=0, atol=allowed, err_msg=message)
    np.testing.assert_allclose(found["largest"], expected["largest"], rtol=0, atol=allowed, err_msg=message)
    np.testing.assert_allclose(found["norm"], expected["norm"], rtol=tolerance, atol=0, err_msg=message)
