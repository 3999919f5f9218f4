"""Inputs whose sizes the user gives, and verification's choice of the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import numpy as np
import onnx

from onnxfuse.errors import UsageError
from onnxfuse.verify.inputs import Array, Input, check_inputs, generate, inputs_of, roles_of, sizes_to_try
from onnxfuse.verify.session import first_line


def feeds_to_try(
    model: onnx.ModelProto, shapes: Sequence[str], given: Mapping[str, Array]
) -> Iterator[dict[str, Array]]:
    """Inputs of these shapes, plan by plan.  Raises UsageError for shapes that model or memory do not take."""
    wanted = inputs_of(model)
    check_inputs(given, wanted)
    asked = parse_shapes(shapes, wanted)
    dtypes = {each.name: each.dtype for each in wanted}
    with _possible_sizes():
        empty = {name: np.broadcast_to(np.zeros((), dtypes.get(name, "f4")), dims) for name, dims in asked.items()}
    check_inputs(empty, wanted)
    _check_names(asked | {name: value.shape for name, value in given.items()}, wanted)
    fixed = [replace(each, dims=asked.get(each.name, each.dims)) for each in wanted]
    roles = roles_of(model)
    for sizes in sizes_to_try(wanted, {**empty, **given}):
        with _possible_sizes():
            feeds = generate(fixed, sizes, roles, given)
        yield feeds


@contextmanager
def _possible_sizes() -> Iterator[None]:
    """What is said of sizes that cannot be computed, or that numpy or the memory cannot hold, as a UsageError."""
    try:
        yield
    except (ArithmeticError, MemoryError, ValueError) as error:
        what = f"inputs of these sizes cannot be made: {first_line(error)}"
        raise UsageError(f"{what}; give others: --shape input:8x512") from error


def feeds_of_known_sizes(
    model: onnx.ModelProto, shapes: Sequence[str], given: Mapping[str, Array], how: str
) -> dict[str, Array]:
    """Inputs of these shapes.  Raises UsageError where they leave a dynamic dim open; `how` says how to give it."""
    first, *others = islice(feeds_to_try(model, shapes, given), 2)
    for other in others:
        for name, value in first.items():
            if value.shape != other[name].shape:
                raise UsageError(f"input '{name}' has dynamic dims; tuning needs their sizes: give {how}")
    return first


def described(feeds: Mapping[str, Array]) -> dict[str, str]:
    """Shape and dtype by name: "8x512 int64"."""
    return {name: f"{'x'.join(map(str, value.shape)) or '()'} {value.dtype}" for name, value in feeds.items()}


def parse_shapes(shapes: Sequence[str], inputs: Sequence[Input]) -> dict[str, tuple[int, ...]]:
    """`input:8x512` as name and dims.  The name may be left out where the model has one input."""
    result: dict[str, tuple[int, ...]] = {}
    for text in shapes:
        name, colon, dims = text.rpartition(":")
        name = inputs[0].name if not colon and len(inputs) == 1 else name
        if not name or not re.fullmatch(r"\d+(x\d+)*", dims):
            known = ", ".join(f"{each.name}:{'x'.join(map(str, each.dims))}" for each in inputs)
            raise UsageError(f"--shape '{text}' is not of the form input:8x512; the model's inputs: {known}")
        if name in result:
            raise UsageError(f"--shape is given twice for input '{name}'; give one of them")
        result[name] = tuple(map(int, dims.split("x")))
    return result


def _check_names(shapes: Mapping[str, Sequence[int]], inputs: Sequence[Input]) -> None:
    """A dim has one size, wherever its name stands."""
    found: dict[str, tuple[int, str]] = {}
    for each in inputs:
        for dim, size in zip(each.dims, shapes.get(each.name, ()), strict=False):
            if isinstance(dim, str) and found.setdefault(dim, (size, each.name))[0] != size:
                other, where = found[dim]
                raise UsageError(f"dim '{dim}' is {other} in input '{where}' and {size} in '{each.name}'; "
                                 "give the same size")  # fmt: skip
