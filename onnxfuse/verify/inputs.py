"""What a model is verified with: sizes for its dynamic dims and values that mean something, or an .npz file."""

from __future__ import annotations

import ast
import difflib
import math
import operator
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray

from onnxfuse.errors import UsageError, VerificationError
from onnxfuse.model.protos import nodes
from onnxfuse.shapes.dim_text import is_name
from onnxfuse.verify.session import first_line

Array: TypeAlias = NDArray[Any]

# Sizes of the dynamic dims, for dims on axis 0 and for the others; the n-th name takes the n-th number.  The first two
# plans tell all names apart.  The others are for models that need more: a batch of one, equal
# sizes under different names, images.
PLANS = (
    ((2, 7, 13), (5, 3, 9, 11, 4)),
    ((3, 10, 14), (8, 4, 6, 12, 7)),
    ((1,), (5, 3, 9, 11, 4)),
    ((1,), (8, 4, 6, 12, 7)),
    ((2,), (8,)),
    ((1,), (16,)),
    ((2,), (64,)),
    ((1,), (224,)),
)
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv,
}  # fmt: skip
PASSES_ON = {
    "Cast", "Clip", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
COMPARES = {"And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or"}
MASK_TYPES = {1, 9, 10, 11, 16}  # TensorProto: float, bool, float16, double, bfloat16


@dataclass(frozen=True)
class Input:
    """A graph input; each dim is a size, or the name or expression of one."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | str, ...]


def inputs_of(model: onnx.ModelProto) -> list[Input]:
    """The graph inputs that a caller must give."""
    weights = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
    return [_input(value) for value in model.graph.input if value.name not in weights]


def _input(value: onnx.ValueInfoProto) -> Input:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        kind = value.type.WhichOneof("value") or "no type"
        what = "a tensor of unknown rank" if kind == "tensor_type" else f"no tensor but {kind.removesuffix('_type')}"
        raise VerificationError(f"input '{value.name}' is {what}; values can be made for tensors of known rank only")
    if not tensor.elem_type:
        raise VerificationError(f"input '{value.name}' has no element type; no values can be made for it")
    dims: list[int | str] = []
    for axis, dim in enumerate(tensor.shape.dim):
        known = dim.HasField("dim_value") and dim.dim_value >= 0
        name = dim.dim_param.strip() if is_name(dim.dim_param) else f"{value.name}[{axis}]"
        dims.append(dim.dim_value if known else name)
    return Input(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)), tuple(dims))


def load_inputs(path: str | os.PathLike[str], model: onnx.ModelProto) -> dict[str, Array]:
    """Every input of the model from an .npz file.  Raises UsageError where file and model do not fit."""
    arrays, wanted = _read_arrays(path), inputs_of(model)
    for each in wanted:
        if each.name not in arrays:
            raise UsageError(f"'{path}' has no input '{each.name}'{_similar(each.name, list(arrays))}")
        if each.dtype == ml_dtypes.bfloat16 and arrays[each.name].dtype == np.dtype("V2"):  # what npz makes of it
            arrays[each.name] = arrays[each.name].view(ml_dtypes.bfloat16)
    check_inputs(arrays, wanted)
    return arrays


def _read_arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
    try:
        with Path(path).open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise UsageError(f"'{path}' holds one array without a name; write it with np.savez(path, name=array)")
            return {name: content[name] for name in content.files}
    except FileNotFoundError as error:
        raise UsageError(f"'{path}' does not exist; expected an .npz file with one array per model input") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        why = first_line(error)
        raise UsageError(f"'{path}' is no .npz file of plain arrays: {why}; write it with np.savez") from error


def check_inputs(arrays: Mapping[str, Array], wanted: Sequence[Input]) -> None:
    known = {each.name: each for each in wanted}
    for name, value in arrays.items():
        if name not in known:
            raise UsageError(f"the model has no input '{name}'{_similar(name, list(known))}")
        each, shape = known[name], " x ".join(map(str, known[name].dims))
        if value.dtype != each.dtype and not (each.dtype.kind == "O" and value.dtype.kind in "OUS"):
            raise UsageError(f"input '{name}' is {value.dtype}; the model takes {each.dtype}")
        if value.ndim != len(each.dims):
            raise UsageError(f"input '{name}' has {value.ndim} dims; the model takes {len(each.dims)}: {shape}")
        if any(isinstance(want, int) and want != have for want, have in zip(each.dims, value.shape, strict=True)):
            raise UsageError(f"input '{name}' has shape {' x '.join(map(str, value.shape))}; the model takes {shape}")


def _similar(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f". Did you mean '{close[0]}'?" if close else f"; known: {', '.join(known) or 'none'}"


def sizes_to_try(inputs: Sequence[Input], given: Mapping[str, Array]) -> Iterator[dict[str, int]]:
    """Sizes of all dynamic dims, plan by plan, without repeats; given arrays settle theirs."""
    tried: list[dict[str, int]] = []
    for plan in PLANS:
        sizes = _sizes(inputs, plan, given)
        if sizes not in tried:
            tried.append(sizes)
            yield sizes


def generate(
    inputs: Sequence[Input], sizes: Mapping[str, int], roles: Mapping[str, int], given: Mapping[str, Array]
) -> dict[str, Array]:
    """An array for every input: the given one, else seeded values."""
    return {i.name: given[i.name] if i.name in given else _values(i, sizes, inputs, roles) for i in inputs}


def _sizes(inputs: Sequence[Input], plan: Any, given: Mapping[str, Array]) -> dict[str, int]:
    """One size for every name among the dims: from the given arrays, else from the plan."""
    alone = _alone(inputs)
    sizes: dict[str, int] = {}
    for each in inputs:
        if each.name in given:
            pairs = zip(each.dims, given[each.name].shape, strict=True)
            sizes |= {dim: n for dim, n in pairs if isinstance(dim, str) and _expression(dim, alone) is None}
    count: Counter[bool] = Counter()
    for each in inputs:
        for axis, dim in enumerate(each.dims):
            tree = _expression(dim, alone) if isinstance(dim, str) else None
            names = [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)] if tree else [dim]
            for name in names:
                if isinstance(name, str) and name not in sizes:
                    choices = plan[0 if axis == 0 else 1]
                    sizes[name] = choices[count[axis == 0] % len(choices)]
                    count[axis == 0] += 1
    return sizes


def _alone(inputs: Sequence[Input]) -> frozenset[str]:
    return frozenset(d for each in inputs for d in each.dims if isinstance(d, str) and d.isidentifier())


def _expression(dim: str, alone: frozenset[str]) -> ast.expr | None:
    """The arithmetic that a dim's name spells, such as `past + seq` or `2*seq`; None where it is only a name.

    `total_sequence_length` is taken for the sum of `past_sequence_length` and `sequence_length` where both exist.
    """
    past, new = dim.replace("total", "past"), dim.replace("total_", "")
    if "total" in dim and past in alone and new in alone:
        dim = f"{past} + {new}"
    try:
        tree = ast.parse(dim, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if isinstance(tree, ast.Name):
        return None
    for node in ast.walk(tree):
        plain = isinstance(node, ast.Name | ast.expr_context | ast.BinOp | ast.operator)
        if not plain and not (isinstance(node, ast.Constant) and isinstance(node.value, int)):
            return None
        if isinstance(node, ast.operator) and type(node) not in OPERATORS:
            return None
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    ambiguous = any(isinstance(n, ast.Sub | ast.Div) for n in ast.walk(tree))  # `decoder-length` is a name as well
    return None if ambiguous and not names <= alone else tree


def _evaluate(tree: ast.AST, sizes: Mapping[str, int]) -> int:
    match tree:
        case ast.BinOp(left, sign, right):
            return OPERATORS[type(sign)](_evaluate(left, sizes), _evaluate(right, sizes))
        case ast.Name(name):
            return sizes[name]
        case ast.Constant(int(value)):
            return value
    raise AssertionError(ast.dump(tree))


def _shape(each: Input, sizes: Mapping[str, int], alone: frozenset[str]) -> tuple[int, ...]:
    result = []
    for dim in each.dims:
        tree = _expression(dim, alone) if isinstance(dim, str) else None
        result.append(dim if isinstance(dim, int) else max(0, _evaluate(tree, sizes)) if tree else sizes[dim])
    return tuple(result)


def roles_of(model: onnx.ModelProto) -> dict[str, int]:
    """What an integer input is for: the number of rows of the table that it selects from; 0 for a mask."""
    graph = _without_weights(model)
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in nodes(graph):
        tensor = next((a.t for a in node.attribute if a.name == "value" and node.op_type == "Constant"), None)
        if tensor is not None:
            shapes[node.output[0]] = tuple(tensor.dims)
        elif node.op_type in ("Cast", "DequantizeLinear", "Identity") and node.input[0] in shapes:
            shapes[node.output[0]] = shapes[node.input[0]]
        for place, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, place))
    found = {value.name: _role(value.name, readers, shapes) for value in model.graph.input}
    return {name: role for name, role in found.items() if role is not None}


def _role(name: str, readers: Mapping[str, list[tuple[onnx.NodeProto, int]]], shapes: Mapping[str, Any]) -> int | None:
    """Follow the tensor through what only reshapes it."""
    work, seen, rows, mask = [name], {name}, list[int](), False
    while work:
        for node, place in readers.get(work.pop(), ()):
            numbers = {a.name: a.i for a in node.attribute}
            if node.op_type == "Gather" and place == 1:
                table = shapes.get(node.input[0])
                rows += [table[numbers.get("axis", 0)]] if table else []
            elif node.op_type in COMPARES or (node.op_type == "Cast" and numbers["to"] in MASK_TYPES):
                mask = True
            elif (place == 0 and node.op_type in PASSES_ON) or (place > 0 and node.op_type == "Where"):
                work += [o for o in node.output if o not in seen]
                seen.update(node.output)
    return min(rows) if rows else 0 if mask else None


def _without_weights(model: onnx.ModelProto) -> onnx.GraphProto:
    """The graph with its model-local functions inlined, and without initializers, which can be big."""
    if not model.functions:
        return model.graph
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    for field in ("node", "input", "output"):
        getattr(light.graph, field).extend(getattr(model.graph, field))
    return onnx.inliner.inline_local_functions(light).graph


def _values(each: Input, sizes: Mapping[str, int], inputs: Sequence[Input], roles: Mapping[str, int]) -> Array:
    """Seeded values that mean something to the input: a mask, positions, rows of a table, or noise."""
    shape = _shape(each, sizes, _alone(inputs))
    random = np.random.default_rng(zlib.crc32(each.name.encode()))
    name, role = each.name.lower(), roles.get(each.name)
    if each.dtype.kind == "O":
        return np.full(shape, "a", object)
    if "mask" in name or (each.dtype.kind in "iu" and role == 0 and "position" not in name):
        return _mask(shape).astype(each.dtype)
    if each.dtype.kind == "b":
        bits = random.random(shape) < 0.5
        bits.reshape(-1)[:1] = True
        return np.asarray(bits)
    if each.dtype.kind not in "iu":
        return np.asarray(random.standard_normal(shape)).astype(each.dtype)
    if "position" in name:
        places = np.arange(shape[-1] if shape else 1) % (role or 2**31)
        return np.broadcast_to(places if shape else places[0], shape).astype(each.dtype)
    return np.asarray(random.integers(0, role or 2, shape)).astype(each.dtype)


def _mask(shape: tuple[int, ...]) -> Array:
    """Each row keeps a prefix of another length, never none of it, and never all of it where it has two elements."""
    if not shape or shape[-1] < 2:
        return np.ones(shape, bool)
    last = shape[-1]
    kept = last - 1 - np.arange(math.prod(shape[:-1])) % max(1, last // 2)
    return np.asarray(np.arange(last) < kept[:, None]).reshape(shape)
