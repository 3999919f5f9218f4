"""Choose the inputs on which a model is verified: sizes of its dims and plausible values, or arrays of an .npz file."""

from __future__ import annotations

import difflib
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from onnxfuse.algebra.size_parser import is_name, parse_size
from onnxfuse.algebra.sizes import Size, evaluate, symbol, symbols
from onnxfuse.errors import UsageError, VerificationError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.plain_files import require_plain
from onnxfuse.verify.input_uses import Use

# Sizes of the dynamic dims, on axis 0 and on the other axes; the n-th dim name gets the n-th number.  The first two
# lines give all names different sizes.  The other lines are for models that need a batch of one, equal sizes under
# different names, or the size of an image.
DIM_SIZES = (
    ((2, 7, 13), (5, 3, 9, 11, 4)),
    ((3, 10, 14), (8, 4, 6, 12, 7)),
    ((1,), (5, 3, 9, 11, 4)),
    ((1,), (8, 4, 6, 12, 7)),
    ((2,), (8,)),
    ((1,), (16,)),
    ((2,), (64,)),
    ((1,), (224,)),
    ((1,), (448,)),
    ((1,), (1024,)),
)
# Sizes to try after DIM_SIZES if a float input of at most three axes could hold audio.  The 1 is for the batch size of
# another input, such as the state of a recurrent network.
AUDIO_SIZES = tuple(((1,), (2**n, 1)) for n in range(8, 16))
MAX_DIMS_AT_EDGES = 4  # dims set to 0 or 1 one at a time: a decoder's batch, length, cache length and one more
MAX_ELEMENTS_DRAWN = 2**22  # elements per input: an image of 1024 x 1024 in colors, or minutes of audio
SLASH = r"(?<!/)/(?!/)"  # a single slash, which some exporters write for the integer division //
# Words in the names of inputs that hold lengths, and of inputs that hold the size of an image.
LENGTH_WORDS = frozenset({"len", "lens", "length", "lengths", "seqlen", "seqlens"})
SIZE_WORDS = frozenset({"shape", "size", "sizes"})
# Values of inputs that are bounds of a Clip.  A third of the random floats lies outside of them.
BOUNDS = {"low": -1, "high": 1}
SMALL_SIZE = 2  # the value of an input that holds a size about which nothing else is known


@dataclass(frozen=True)
class Input:
    """A graph input; each dim is a size, or the name or expression of a size."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | str, ...]


def model_inputs(model: onnx.ModelProto) -> list[Input]:
    """Return the graph inputs that a caller must pass.  Raises VerificationError if one has no known rank or dtype."""
    return [_input(value) for value in _passed(model)]


def with_ranks(model: onnx.ModelProto, ranks: Mapping[str, int]) -> onnx.ModelProto:
    """Return the model, or a copy in which inputs of unknown rank have `ranks[name]` unnamed dims.

    Every size is allowed for these dims.
    """
    if not any(value.name in ranks and _is_unranked(value) for value in model.graph.input):
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for value in result.graph.input:
        if value.name in ranks and _is_unranked(value):
            shape = value.type.tensor_type.shape
            shape.SetInParent()  # sets the field even if `shape` has no dims, as for a scalar
            for _ in range(ranks[value.name]):
                shape.dim.add()
    return result


def _is_unranked(value: onnx.ValueInfoProto) -> bool:
    return value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape")


def input_dtypes(model: onnx.ModelProto) -> dict[str, np.dtype[Any]]:
    """Return, by name, the dtypes of the tensors that a caller must pass, including tensors of unknown rank."""
    values = ((value.name, value.type.tensor_type.elem_type) for value in _passed(model))
    return {name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype)) for name, dtype in values if dtype}


def _passed(model: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    weights = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
    return (value for value in model.graph.input if value.name not in weights)


def _input(value: onnx.ValueInfoProto) -> Input:
    tensor, kind = value.type.tensor_type, value.type.WhichOneof("value") or "no type"
    if kind != "tensor_type":
        found = f"input '{value.name}' is not a tensor but of type {kind.removesuffix('_type')}"
        raise VerificationError(f"{found}; values can be made for tensors only")
    if _is_unranked(value):
        found = f"input '{value.name}' is a tensor of unknown rank"
        raise VerificationError(f"{found}; give its values or its shape: --input x.npz, --shape {value.name}:8x512")
    if not tensor.elem_type:
        raise VerificationError(f"input '{value.name}' has no element type; no values can be made for it")
    dims: list[int | str] = []
    for axis, dim in enumerate(tensor.shape.dim):
        known = dim.HasField("dim_value") and dim.dim_value >= 0
        name = dim.dim_param.strip() if is_name(dim.dim_param) else f"{value.name}[{axis}]"
        dims.append(dim.dim_value if known else name)
    return Input(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)), tuple(dims))


def load_inputs(path: str | os.PathLike[str], model: onnx.ModelProto) -> dict[str, Array]:
    """Return every input of the model from an .npz file.  Raises UsageError if the file does not fit the model."""
    arrays = _named_arrays(f"'{path}'", _read_arrays(path), model)
    check_inputs(arrays, _inputs_like(arrays, model))
    return arrays


def load_samples(
    source: str | os.PathLike[str] | Mapping[str, Array], model: onnx.ModelProto
) -> list[dict[str, Array]]:
    """Return the samples (sets of inputs) from an .npz file, or from a mapping of input names to arrays.

    Each array has one more axis than its input: the first axis, which counts samples.  If an array lacks this axis, all
    arrays together are one sample.  The array of an input of unknown rank is assumed to have this axis.  Raises
    UsageError if the arrays do not fit the model.
    """
    given, where = (source, "the data") if isinstance(source, Mapping) else (_read_arrays(source), f"'{source}'")
    arrays = _named_arrays(where, given, model)
    wanted = _inputs_like(arrays, model, 1)
    _check_names(arrays, wanted)
    if not wanted or any(arrays[each.name].ndim != len(each.dims) + 1 for each in wanted):
        check_inputs(arrays, _inputs_like(given, model))
        return [arrays]
    counts = {name: len(value) for name, value in arrays.items()}
    if len({*counts.values()}) > 1 or 0 in counts.values():
        found = ", ".join(f"{count} for '{name}'" for name, count in counts.items())
        raise UsageError(f"{where} needs the same number of samples, at least 1, for each input; found {found}")
    samples = [{name: value[i, ...] for name, value in arrays.items()} for i in range(max(counts.values()))]
    check_inputs(samples[0], wanted)
    return samples


def _inputs_like(arrays: Mapping[str, Array], model: onnx.ModelProto, more: int = 0) -> list[Input]:
    """Return the inputs of a model; an input of unknown rank gets the rank of its array minus `more`."""
    return model_inputs(with_ranks(model, {name: max(0, value.ndim - more) for name, value in arrays.items()}))


def _named_arrays(where: str, arrays: Mapping[str, Array], model: onnx.ModelProto) -> dict[str, Array]:
    """Return the arrays, with raw bfloat16 bytes cast to bfloat16.  Raises UsageError if an input has no array."""
    found = dict(arrays)
    for name, dtype in input_dtypes(model).items():
        if name not in found:
            raise UsageError(f"{where} has no input '{name}'{_similar(name, list(found))}")
        if dtype == ml_dtypes.bfloat16 and found[name].dtype == np.dtype("V2"):  # an .npz file stores bfloat16 as bytes
            found[name] = found[name].view(ml_dtypes.bfloat16)
    return found


def _read_arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
    try:
        require_plain(Path(path))
        with Path(path).open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise UsageError(f"'{path}' holds one array without a name; write it with np.savez(path, name=array)")
            return {name: content[name] for name in content.files}
    except FileNotFoundError as error:
        raise UsageError(f"'{path}' does not exist; expected an .npz file with one array per model input") from error
    except UsageError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise many types, such as MemoryError for too large a shape
        why = first_line(error)
        raise UsageError(f"'{path}' is no .npz file of plain arrays: {why}; write it with np.savez") from error


def check_inputs(arrays: Mapping[str, Array], wanted: Sequence[Input]) -> None:
    """Raise UsageError unless each array has the name, dtype and shape of one of the model's inputs."""
    _check_names(arrays, wanted)
    known = {each.name: each for each in wanted}
    for name, value in arrays.items():
        each, shape = known[name], " x ".join(map(str, known[name].dims))
        if value.dtype != each.dtype and not (each.dtype.kind == "O" and value.dtype.kind in "OUS"):
            raise UsageError(f"input '{name}' is {value.dtype}; the model takes {each.dtype}")
        if value.ndim != len(each.dims):
            raise UsageError(f"input '{name}' has {value.ndim} dims; the model takes {len(each.dims)}: {shape}")
        if any(isinstance(want, int) and want != have for want, have in zip(each.dims, value.shape, strict=True)):
            raise UsageError(f"input '{name}' has shape {' x '.join(map(str, value.shape))}; the model takes {shape}")


def _check_names(arrays: Mapping[str, Array], wanted: Sequence[Input]) -> None:
    """Raise UsageError unless each array has the name of one of the model's inputs."""
    known = [each.name for each in wanted]
    for name in arrays:
        if name not in known:
            raise UsageError(f"the model has no input '{name}'{_similar(name, known)}")


def _similar(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f". Did you mean '{close[0]}'?" if close else f"; known: {', '.join(known) or 'none'}"


def sizes_to_try(
    inputs: Sequence[Input],
    given: Mapping[str, Array],
    steps: Sequence[Mapping[str, int]] = (),
    preferred: Mapping[str, int] | None = None,
) -> Iterator[dict[str, int]]:
    """Yield sets of sizes of all dynamic dims: `preferred` ones by name, then those of DIM_SIZES, in their order.

    Dims of given arrays keep their sizes.  After the first set, sets for which an input would be too big are left out.
    Last come the sets of `step_sizes`.
    """
    if preferred:
        zeros, ones = _zeros_and_ones(inputs, given)
        free = {name: size for name, size in preferred.items() if zeros.get(name) != ones.get(name)}
        yield {**_choose_sizes(inputs, DIM_SIZES[0], given), **free}
    names = _single_names(inputs)
    audio = any(
        each.dtype.kind == "f" and len(each.dims) <= 3 and any(isinstance(dim, str) for dim in each.dims[-2:])
        for each in inputs
    )
    tried: list[dict[str, int]] = []
    for choices in (*DIM_SIZES, *(AUDIO_SIZES if audio else ())):
        sizes = _choose_sizes(inputs, choices, given)
        drawn = (each for each in inputs if each.name not in given)
        if sizes not in tried and not (tried and any(_is_big(each, sizes, names) for each in drawn)):
            tried.append(sizes)
            yield sizes
    yield from step_sizes(inputs, given, steps)


def step_sizes(
    inputs: Sequence[Input], given: Mapping[str, Array], steps: Sequence[Mapping[str, int]]
) -> Iterator[dict[str, int]]:
    """Yield the sets in `steps`, with sizes from DIM_SIZES for all other dims.

    Sets that name a dim whose size a given array fixes are left out.
    """
    zeros, ones = _zeros_and_ones(inputs, given)
    for choices, step in zip(DIM_SIZES, steps, strict=False):
        if all(zeros.get(name) != ones.get(name) for name in step):
            yield {**_choose_sizes(inputs, choices, given), **step}


def _zeros_and_ones(inputs: Sequence[Input], given: Mapping[str, Array]) -> Iterator[dict[str, int]]:
    """Yield two sets of sizes: all dims that no given array fixes are 0 in the first, and 1 in the second."""
    return (_choose_sizes(inputs, ((size,), (size,)), given) for size in (0, 1))


def edge_sizes(
    inputs: Sequence[Input],
    given: Mapping[str, Array],
    usual: Mapping[str, int],
    steps: Sequence[Mapping[str, int]] = (),
) -> Iterator[dict[str, int]]:
    """Yield sets of dim sizes with 1 or 0 in all free dims, then in one free dim while the others have `usual` sizes.

    A dim is free if no given array fixes its size.  Only the first MAX_DIMS_AT_EDGES free dims are set one by one.
    Last come the sets of `step_sizes`.
    """
    zeros, ones = _zeros_and_ones(inputs, given)
    free = [name for name in usual if zeros[name] != ones[name]]
    if not free:
        return
    yield ones
    yield zeros
    for name in free[:MAX_DIMS_AT_EDGES] if len(free) > 1 else ():
        yield from ({**usual, name: size} for size in (1, 0))
    yield from step_sizes(inputs, given, steps)


def _is_big(each: Input, sizes: Mapping[str, int], single_names: frozenset[str]) -> bool:
    try:
        return math.prod(_shape(each, sizes, single_names)) > MAX_ELEMENTS_DRAWN
    except ArithmeticError:  # the error comes again, and is reported, when the input is made
        return False


def generate_inputs(
    inputs: Sequence[Input],
    sizes: Mapping[str, int],
    uses: Mapping[str, Use],
    given: Mapping[str, Array],
    requested: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Array]:
    """Return an array for every input: the given array, else random values of the requested shape or of `sizes`."""
    names = _single_names(inputs)
    known = {**(requested or {}), **{name: array.shape for name, array in given.items()}}
    shapes = {i.name: known[i.name] if i.name in known else _shape(i, sizes, names) for i in inputs}
    return {i.name: given[i.name] if i.name in given else _generate_input(i, inputs, shapes, uses) for i in inputs}


def _choose_sizes(
    inputs: Sequence[Input], choices: tuple[tuple[int, ...], tuple[int, ...]], given: Mapping[str, Array]
) -> dict[str, int]:
    """Return a size for every named dim: from given arrays, else from `choices` (for axis 0, for all other axes)."""
    single_names = _single_names(inputs)
    sizes: dict[str, int] = {}
    for each in inputs:
        if each.name in given:
            pairs = zip(each.dims, given[each.name].shape, strict=True)
            named = ((dim, size) for dim, size in pairs if isinstance(dim, str))
            sizes |= {dim: size for dim, size in named if _parsed(dim, single_names) == symbol(dim)}
    count: Counter[bool] = Counter()
    for each in inputs:
        alone = len(each.dims) == 1 and each.dtype.kind == "f"  # the axis counts audio samples, not batch elements
        for axis, dim in enumerate(each.dims):
            for name in symbols(_parsed(dim, single_names)):
                if name not in sizes:
                    batch = axis == 0 and not (alone and choices[0] == (1,))
                    numbers = choices[0 if batch else 1]
                    sizes[name] = numbers[count[batch] % len(numbers)]
                    count[batch] += 1
    return sizes


def _single_names(inputs: Sequence[Input]) -> frozenset[str]:
    """Return the dims that are a single name, not an expression."""
    return frozenset(d for each in inputs for d in each.dims if isinstance(d, str) and d.isidentifier())


def _parsed(dim: int | str, single_names: frozenset[str]) -> Size:
    """Parse a dim: a name becomes a symbol, and `past + seq` or `2*seq` becomes an expression over symbols.

    `total_sequence_length` is parsed as `past_sequence_length + sequence_length` if both names exist.
    """
    if isinstance(dim, int):
        return dim
    past, new = dim.replace("total", "past"), dim.replace("total_", "")
    if "total" in dim and past in single_names and new in single_names:
        dim = f"{past} + {new}"
    if not single_names.issuperset(re.findall(r"[A-Za-z_]\w*", dim)) and re.search(f"-|{SLASH}", dim):
        return symbol(dim)  # such as `decoder-length`, which is one name and not a difference
    return parse_size(re.sub(SLASH, "//", dim).replace("-", " - "))


def _shape(each: Input, sizes: Mapping[str, int], single_names: frozenset[str]) -> tuple[int, ...]:
    return tuple(max(0, evaluate(_parsed(dim, single_names), sizes)) for dim in each.dims)


def _generate_input(
    each: Input, inputs: Sequence[Input], shapes: Mapping[str, tuple[int, ...]], uses: Mapping[str, Use]
) -> Array:
    """Return random values that suit the input's name or use: a mask, lengths, indices of a table, noise and so on."""
    shape, use = shapes[each.name], uses.get(each.name)
    if each.dtype.kind == "O":
        return np.full(shape, "a", object)
    kind = use.kind if use else ""
    words = _words(each)
    if kind == "ones":
        return np.ones(shape, each.dtype)
    if use and kind == "keys":
        return np.full(shape, use.number + sum(shapes[name][axis] for name, axis in use.axes)).astype(each.dtype)
    if is_mask(each, uses):
        return _prefix_mask(shape).astype(each.dtype)
    if use and kind == "equal":
        return np.full(shape, use.number).astype(each.dtype)
    numeric = each.dtype.kind in "iuf" and kind != "row" and "position" not in each.name.lower()
    if numeric and _is_length(each, use):
        lengths = _lengths(shape, _counted_size(each, inputs, shapes), "cu" in words)
        # Lengths of a float dtype are fractions of the longest length.
        return (lengths / max(1, lengths.max(initial=1)) if each.dtype.kind == "f" else lengths).astype(each.dtype)
    if numeric and words & SIZE_WORDS and shape and shape[-1] == 2:
        return np.broadcast_to(_size_of_image(inputs, shapes), shape).astype(each.dtype)
    if words >= {"scale", "factor"}:
        return np.ones(shape, each.dtype)
    if kind == "size":
        return np.full(shape, SMALL_SIZE).astype(each.dtype)
    if kind in BOUNDS and each.dtype.kind != "b":
        return np.full(shape, max(BOUNDS[kind], 0) if each.dtype.kind == "u" else BOUNDS[kind]).astype(each.dtype)
    return _noise(each, shape, use.number if use and kind == "row" else 0)


def is_mask(each: Input, uses: Mapping[str, Use]) -> bool:
    """Return whether an input's name or use says that it is a mask."""
    use, name = uses.get(each.name), each.name.lower()
    if use is not None and use.kind == "ones":
        return False
    is_used = use is not None and use.kind == "mask" and not _is_length(each, use) and "position" not in name
    return "mask" in name or is_used


def _is_length(each: Input, use: Use | None) -> bool:
    return (use is not None and use.kind == "length") or not _words(each).isdisjoint(LENGTH_WORDS)


def _words(each: Input) -> set[str]:
    return set(re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", each.name).lower()))


def _lengths(shape: tuple[int, ...], longest: int, cumulative: bool) -> Array:
    """Return positive lengths from `longest` down; if `cumulative`, offsets that increase from 0 to `longest`."""
    count = math.prod(shape)
    if cumulative:
        return np.linspace(0, longest, count).round().reshape(shape)
    return np.asarray(longest - np.arange(count) % max(1, (longest + 1) // 2)).reshape(shape)


def _counted_size(each: Input, inputs: Sequence[Input], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the largest value for an input of lengths, such as `audio_lens`: the size of an axis of another input.

    The other input is the one whose name contains `audio`; if there is none, the first input whose axis 0 has the size
    of the lengths' axis 0; else the first input of several axes.  Of its axes after axis 0, the longest dynamic axis is
    chosen, or the longest static axis if none is dynamic.
    """
    words = sorted(LENGTH_WORDS, key=len, reverse=True)
    stem = re.sub(f"_?({'|'.join(words)})(?![a-z])", "", each.name.lower())
    wide = [other for other in inputs if other.name != each.name and len(other.dims) > 1]
    named = [other for other in wide if stem and stem in other.name.lower()]
    same_rows = [other for other in wide if shapes[other.name][:1] == shapes[each.name][:1]]
    for other in (*named, *same_rows, *wide):
        axes = list(zip(other.dims, shapes[other.name], strict=True))[1:]
        dynamic = [size for dim, size in axes if isinstance(dim, str)]
        return max(1, *(dynamic or [size for _, size in axes]))
    return SMALL_SIZE


def _size_of_image(inputs: Sequence[Input], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return height and width of the first input with four axes, which is assumed to hold images.

    The layout is channels-last if the last axis has a static size and axis 1 a dynamic one, else channels-first.
    """
    for each in inputs:
        if len(each.dims) == 4:
            channels_last = isinstance(each.dims[3], int) and not isinstance(each.dims[1], int)
            return shapes[each.name][1:3] if channels_last else shapes[each.name][2:]
    return SMALL_SIZE, SMALL_SIZE


def _noise(each: Input, shape: tuple[int, ...], rows: int) -> Array:
    """Return 0, 1, 2, ... if the input's name contains "position", else random values.

    These are flags, floats of the normal distribution, or integers below `rows` (below 2 if `rows` is 0).  But 8-bit
    integers that do not index rows are assumed to be quantized numbers, and have all values of the dtype.
    """
    random = np.random.default_rng(zlib.crc32(each.name.encode()))
    if each.dtype.kind == "b":
        bits = random.random(shape) < 0.5
        bits.reshape(-1)[:1] = True
        return np.asarray(bits)
    if each.dtype.kind not in "iu":
        return np.asarray(random.standard_normal(shape)).astype(each.dtype)
    if "position" in each.name.lower():
        positions = np.arange(shape[-1] if shape else 1) % (rows or 2**31)
        return np.broadcast_to(positions if shape else positions[0], shape).astype(each.dtype)
    if each.dtype.itemsize == 1 and not rows:
        limits = np.iinfo(each.dtype)
        return np.asarray(random.integers(limits.min, limits.max, shape, each.dtype, endpoint=True))
    return np.asarray(random.integers(0, rows or 2, shape)).astype(each.dtype)


def _prefix_mask(shape: tuple[int, ...]) -> Array:
    """Return a mask whose rows keep prefixes of different lengths.

    Each row keeps at least its first element, and masks the last one if it has several.
    """
    if not shape or shape[-1] < 2:
        return np.ones(shape, bool)
    last = shape[-1]
    kept = last - 1 - np.arange(math.prod(shape[:-1])) % max(1, last // 2)
    return np.asarray(np.arange(last) < kept[:, None]).reshape(shape)
