"""Ranges of sizes that a user asks for (`--shape ids:1..8x1..512`), and a spread of shapes within them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from onnxfuse.errors import UsageError
from onnxfuse.verify.inputs import Input
from onnxfuse.verify.requested_shapes import split_shapes

MAX_SPREAD: Final = 256  # largest number of combinations of sizes
Range = tuple[int, int]  # the smallest and the largest size; the two are equal if the user gave one number


def parse_ranges(shapes: Sequence[str], inputs: Sequence[Input]) -> dict[str, tuple[Range, ...]]:
    """Parse `input:1..8x1..512` into name and ranges.

    Raises UsageError as `split_shapes` does, and for a range whose first size is larger than its last.
    """
    found = split_shapes(shapes, inputs, r"\d+(\.\.\d+)?", "input:1..8x512")
    return {name: tuple(_range(name, size) for size in sizes) for name, sizes in found.items()}


def _range(name: str, text: str) -> Range:
    low, _, high = text.partition("..")
    if high and int(low) > int(high):
        raise UsageError(f"--shape of input '{name}' has the range {text}; give the least size first")
    return int(low), int(high or low)


def spread(ranges: Mapping[str, Sequence[Range]], inputs: Sequence[Input]) -> list[list[str]]:
    """Return shapes in the form of `--shape`, the largest first, for all combinations of sizes from the ranges.

    The sizes of a range are its ends and the powers of two between them.  Dims of one name have one size.
    Raises UsageError if a named dim has two different ranges, and if there are more than MAX_SPREAD combinations.
    """
    names = {each.name: _dim_names(each) for each in inputs if each.name in ranges}
    sizes = {dim: sorted(_powers(*wanted), reverse=True) for dim, wanted in ranges_of_dims(ranges, inputs).items()}
    combinations = list(itertools.product(*sizes.values()))
    if len(combinations) > MAX_SPREAD:
        found = f"the ranges hold {len(combinations)} combinations of sizes"
        raise UsageError(f"{found}; at most {MAX_SPREAD} are measured, so give narrower ranges")
    at = [dict(zip(sizes, values, strict=True)) for values in combinations]
    return [[f"{name}:{'x'.join(str(each[dim]) for dim in dims)}" for name, dims in names.items()] for each in at]


def ranges_of_dims(ranges: Mapping[str, Sequence[Range]], inputs: Sequence[Input]) -> dict[str, Range]:
    """Return the ranges by the names of dims; static dims and dims without a name are called "input[axis]".

    Raises UsageError if a dim has two different ranges, if a range differs from the size of a static dim, and for an
    input that the model does not have.
    """
    of_dims: dict[str, Range] = {}
    known = {each.name: each for each in inputs}
    for name, given in ranges.items():
        if name not in known:
            raise UsageError(f"the model has no input '{name}'; it has {', '.join(known)}")
        if len(given) != len(known[name].dims):
            raise UsageError(f"input '{name}' has {len(known[name].dims)} dims, --shape gives {len(given)}")
        _check_static(known[name], given)
        for dim, wanted in zip(_dim_names(known[name]), given, strict=True):
            if of_dims.setdefault(dim, wanted) != wanted:
                raise UsageError(f"dim '{dim}' has two ranges; give the same one for all inputs that have it")
    return of_dims


def _check_static(each: Input, given: Sequence[Range]) -> None:
    for axis, (dim, wanted) in enumerate(zip(each.dims, given, strict=True)):
        if isinstance(dim, int) and wanted != (dim, dim):
            found = "..".join(map(str, dict.fromkeys(wanted)))
            raise UsageError(f"input '{each.name}' has {dim} elements along axis {axis}, --shape gives {found}")


def _dim_names(each: Input) -> list[str]:
    return [dim if isinstance(dim, str) else f"{each.name}[{axis}]" for axis, dim in enumerate(each.dims)]


def _powers(low: int, high: int) -> Iterator[int]:
    """Yield `low`, `high` and the powers of two between them, each number once."""
    yield from {low, high, *(1 << i for i in range(high.bit_length()) if low <= 1 << i <= high)}


def is_range(shapes: Sequence[str]) -> bool:
    """Return whether a shape names a range of sizes."""
    return any(".." in text.rpartition(":")[2] for text in shapes)
