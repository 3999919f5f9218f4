"""Make inputs of the shapes that a user asks for (`--shape ids:8x512`); `verify.inputs` chooses all other sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import onnx

from onnxfuse.errors import UsageError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.verify.input_uses import bound_uses, integer_uses
from onnxfuse.verify.inputs import (
    Input,
    check_inputs,
    edge_sizes,
    generate_inputs,
    input_dtypes,
    model_inputs,
    sizes_to_try,
    with_ranks,
)
from onnxfuse.verify.required_sizes import Required, required_sizes

GIVE_INPUTS = "give inputs or sizes that the model accepts: --input x.npz, --shape input:8x512"


@dataclass(frozen=True)
class Draw:
    """Sizes of the dynamic dims, and the function that makes inputs of these sizes."""

    sizes: dict[str, int]
    make: Callable[[], dict[str, Array]]


@dataclass(frozen=True)
class Draws:
    """The sets of sizes at which a model may run: its inputs, those arrays that are known, and how inputs are made."""

    required: Required
    known: Mapping[str, Array]
    make: Callable[[Mapping[str, int]], dict[str, Array]]

    def usual(self, preferred: Mapping[str, int] | None = None) -> Iterator[Draw]:
        """Yield sets of sizes, in the order of `sizes_to_try`; dims that are not known have other sizes in each."""
        for sizes in sizes_to_try(self.required.inputs, self.known, self.required.steps, preferred):
            yield Draw(sizes, partial(self.make, sizes))

    def at_edges(self, usual: Mapping[str, int]) -> Iterator[Draw]:
        """Yield draws with sizes 0 and 1 in dims that are not known; other sizes are as in `usual`."""
        for sizes in edge_sizes(self.required.inputs, self.known, usual, self.required.steps):
            yield Draw(sizes, partial(self.make, sizes))


def draws(model: onnx.ModelProto, shapes: Sequence[str], given: Mapping[str, Array]) -> Draws:
    """Return the draws of a model's inputs, which have the requested shapes and those of the given arrays.

    Raises UsageError for shapes that the model does not accept or that do not fit into memory.
    """
    model = with_known_ranks(model, shapes, given)
    required = required_sizes(model, model_inputs(model))
    wanted = required.inputs
    check_inputs(given, wanted)
    requested = parse_shapes(shapes, wanted)
    dtypes = {each.name: each.dtype for each in wanted}
    with _usage_error_for_sizes():
        empty = {name: np.broadcast_to(np.zeros((), dtypes.get(name, "f4")), dims) for name, dims in requested.items()}
    check_inputs(empty, wanted)
    if requested:  # without requested shapes, arrays that seem inconsistent are passed: they could fit the model
        _check_names(requested | {name: value.shape for name, value in given.items()}, wanted)
    uses = bound_uses(model) | integer_uses(model)
    return Draws(required, {**empty, **given}, lambda sizes: generate_inputs(wanted, sizes, uses, given, requested))


def with_known_ranks(
    model: onnx.ModelProto, shapes: Sequence[str], given: Mapping[str, Array] | None = None
) -> onnx.ModelProto:
    """Return the model, or a copy in which inputs of unknown rank have the rank of a given array or requested shape."""
    names = list(input_dtypes(model))
    texts = [text if ":" in text or len(names) != 1 else f"{names[0]}:{text}" for text in shapes]
    ranks = {name: dims.count("x") + 1 for name, _, dims in (text.rpartition(":") for text in texts)}
    return with_ranks(model, ranks | {name: value.ndim for name, value in (given or {}).items()})


def feeds_to_try(
    model: onnx.ModelProto,
    shapes: Sequence[str],
    given: Mapping[str, Array],
    preferred: Mapping[str, int] | None = None,
) -> Iterator[dict[str, Array]]:
    """Yield inputs of the requested shapes; dims that `shapes` leave open have `preferred` sizes, then others.

    Raises UsageError for shapes that the model does not accept or that do not fit into memory.
    """
    wanted = model_inputs(with_known_ranks(model, shapes, given))
    _check_names({name: value.shape for name, value in given.items()}, wanted)
    for draw in draws(model, shapes, given).usual(preferred):
        with _usage_error_for_sizes():
            feeds = draw.make()
        yield feeds


@contextmanager
def _usage_error_for_sizes() -> Iterator[None]:
    """Convert errors that sizes cause in the `with` block, such as a lack of memory, to UsageError."""
    try:
        yield
    except (ArithmeticError, MemoryError, ValueError) as error:
        what = f"inputs of these sizes cannot be made: {first_line(error)}"
        raise UsageError(f"{what}; give others: --shape input:8x512") from error


def describe_failures(failures: Sequence[tuple[Mapping[str, int], str]], given: bool) -> str:
    """Return a text about the sizes at which a model does not run, with the first and the last error."""
    (_, first), (sizes, last) = failures[0], failures[-1]
    which = "the given" if given else "generated"
    tried = ""
    if len(failures) > 1:
        at = ", ".join(f"{name}={size}" for name, size in sizes.items())
        tried = f" and at {len(failures) - 1} other sizes, at last {at}" + (f" ({last})" if last != first else "")
    return f"the original does not run on {which} inputs ({first}){tried}; {GIVE_INPUTS}"


def feeds_of_known_sizes(
    model: onnx.ModelProto, shapes: Sequence[str], given: Mapping[str, Array], how: str
) -> dict[str, Array]:
    """Return inputs of these shapes.  Raises UsageError if a dynamic dim gets no size; `how` says how to give one."""
    first, *others = islice(feeds_to_try(model, shapes, given), 2)
    for other in others:
        for name, value in first.items():
            if value.shape != other[name].shape:
                raise UsageError(f"input '{name}' has dynamic dims; tuning needs their sizes: give {how}")
    return first


def describe_feeds(feeds: Mapping[str, Array]) -> dict[str, str]:
    """Return shape and dtype of every input by name, such as "8x512 int64"."""
    return {name: f"{'x'.join(map(str, value.shape)) or '()'} {value.dtype}" for name, value in feeds.items()}


def parse_shapes(shapes: Sequence[str], inputs: Sequence[Input]) -> dict[str, tuple[int, ...]]:
    """Parse `input:8x512` into name and sizes.  Raises UsageError as `split_shapes` does."""
    found = split_shapes(shapes, inputs, r"\d+", "input:8x512")
    return {name: tuple(map(int, sizes)) for name, sizes in found.items()}


def split_shapes(shapes: Sequence[str], inputs: Sequence[Input], size: str, example: str) -> dict[str, tuple[str, ...]]:
    """Split `input:8x512` into name and sizes.  The name may be left out if the model has one input.

    size     the regular expression of one size
    example  an example of such a text, for the error message

    Raises UsageError for a text of another form, and for an input that is named twice.
    """
    result: dict[str, tuple[str, ...]] = {}
    for text in shapes:
        name, colon, dims = text.rpartition(":")
        name = inputs[0].name if not colon and len(inputs) == 1 else name
        if not name or not re.fullmatch(f"{size}(x{size})*", dims):
            known = ", ".join(f"{each.name}:{'x'.join(map(str, each.dims))}" for each in inputs)
            raise UsageError(f"--shape '{text}' is not of the form {example}; the model's inputs: {known}")
        if name in result:
            raise UsageError(f"--shape is given twice for input '{name}'; give one of them")
        result[name] = tuple(dims.split("x"))
    return result


def _check_names(shapes: Mapping[str, Sequence[int]], inputs: Sequence[Input]) -> None:
    """Raise UsageError if a named dim has two different sizes."""
    found: dict[str, tuple[int, str]] = {}
    for each in inputs:
        for dim, size in zip(each.dims, shapes.get(each.name, ()), strict=False):
            if isinstance(dim, str) and found.setdefault(dim, (size, each.name))[0] != size:
                other, where = found[dim]
                raise UsageError(f"dim '{dim}' is {other} in input '{where}' and {size} in '{each.name}'; "
                                 "give the same size")  # fmt: skip
