"""Ranges of sizes on the command line, and the shapes within them."""

from __future__ import annotations

import numpy as np
import pytest

from onnxfuse.errors import UsageError
from onnxfuse.verify.inputs import Input
from onnxfuse.verify.shape_ranges import is_range, parse_ranges, ranges_of_dims, spread

IDS = Input("ids", np.dtype("int64"), ("batch", "seq"))
MASK = Input("mask", np.dtype("int64"), ("batch", "seq"))
IMAGE = Input("x", np.dtype("float32"), ("batch", 3, "h", "w"))


def test_sizes_and_ranges_are_read() -> None:
    assert parse_ranges(["ids:1..8x1..512", "mask:4x16"], [IDS, MASK]) == {
        "ids": ((1, 8), (1, 512)),
        "mask": ((4, 4), (16, 16)),
    }
    assert parse_ranges(["1..2x3x64x64..128"], [IMAGE]) == {"x": ((1, 2), (3, 3), (64, 64), (64, 128))}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["ids:1...8x2"], "is not of the form input:1..8x512; the model's inputs: ids:batchxseq"),
        (["ids:8..1x2"], "has the range 8..1; give the least size first"),
        (["ids:1x2", "ids:1x2"], "given twice for input 'ids'"),
        (["1x2"], "is not of the form"),
    ],
)
def test_other_texts_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        parse_ranges(texts, [IDS, MASK])


def test_the_spread_has_powers_of_two_and_the_ends() -> None:
    found = spread(parse_ranges(["ids:1..3x5..20"], [IDS, MASK]), [IDS, MASK])
    sizes = [tuple(map(int, text.removeprefix("ids:").split("x"))) for (text,) in found]
    assert sizes == [(b, s) for b in (3, 2, 1) for s in (20, 16, 8, 5)]


def test_dims_of_one_name_have_one_size() -> None:
    found = spread(parse_ranges(["ids:1..2x4", "mask:1..2x4"], [IDS, MASK]), [IDS, MASK])
    assert found == [["ids:2x4", "mask:2x4"], ["ids:1x4", "mask:1x4"]]
    with pytest.raises(UsageError, match="dim 'batch' has two ranges"):
        spread(parse_ranges(["ids:1..2x4", "mask:1..4x4"], [IDS, MASK]), [IDS, MASK])


def test_too_many_or_too_few_are_refused() -> None:
    with pytest.raises(UsageError, match="hold 3600 combinations"):
        spread({"x": ((1, 1 << 14), (3, 3), (1, 1 << 14), (1, 1 << 15))}, [IMAGE])
    with pytest.raises(UsageError, match="input 'ids' has 2 dims, --shape gives 1"):
        spread({"ids": ((1, 2),)}, [IDS])


@pytest.mark.parametrize(("size", "found"), [("4", "4"), ("3..4", r"3\.\.4")])
def test_another_size_of_a_static_dim_is_refused(size: str, found: str) -> None:
    ranges = parse_ranges([f"1x{size}x8x8"], [IMAGE])
    with pytest.raises(UsageError, match=f"input 'x' has 3 elements along axis 1, --shape gives {found}$"):
        ranges_of_dims(ranges, [IMAGE])
    assert ranges_of_dims(parse_ranges(["1x3x8x8"], [IMAGE]), [IMAGE])["x[1]"] == (3, 3)


def test_a_range_is_told_from_a_size() -> None:
    assert is_range(["ids:1..8x4"]) and not is_range(["ids:8x4", "a..b:3"])
