"""Original against optimized: the same inputs through plain onnxruntime on the CPU, and an error for every output."""

from __future__ import annotations

import ast
import ctypes
import difflib
import math
import operator
import os
import re
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray

from onnxfuse import files
from onnxfuse.errors import UsageError, VerificationError

Array: TypeAlias = NDArray[Any]
Source: TypeAlias = str | os.PathLike[str] | onnx.ModelProto
Progress: TypeAlias = Callable[[str], None]

# The largest error of an output, relative to the largest finite magnitude that the original has in it.
TOLERANCES: Mapping[str, float] = {
    "float64": 1e-12,  # 2^-53 = 1.1e-16: sums of some thousand terms in another order; no fusion touches doubles
    "float32": 1e-5,  # 2^-24 = 6e-8: some hundred roundings in another order
    "complex128": 1e-12,  # as float64
    "complex64": 1e-5,  # as float32
    "float16": 2e-3,  # 2^-11 = 4.9e-4: four roundings; a fused op rounds once where its nodes rounded each time
    "bfloat16": 1.6e-2,  # 2^-8 = 3.9e-3: four roundings, as for float16
}  # every other dtype is exact: integers, booleans and strings have no roundings

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
ROUNDS = 2
UNNAMED = ("", "?", "None", "-1")
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv,
}  # fmt: skip
PASSES_ON = {
    "Cast", "Clip", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze",
}  # fmt: skip
COMPARES = {"And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or"}
DRAWS = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
MASK_TYPES = {1, 9, 10, 11, 16}  # TensorProto: float, bool, float16, double, bfloat16
GIVE_INPUTS = "give inputs that the model accepts: --input x.npz"


@dataclass(frozen=True)
class OutputError:
    """The error of one output, the worst of all rounds; `max_rel` is relative to the output's largest magnitude."""

    name: str
    max_abs: float
    max_rel: float
    tolerance: float
    passed: bool
    reason: str


@dataclass(frozen=True)
class Verification:
    """Whether the outputs agree (None: nothing could be compared), and the sizes of the dynamic dims, per round."""

    passed: bool | None
    outputs: tuple[OutputError, ...]
    reason: str
    sizes: tuple[dict[str, int], ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; an infinite error, which JSON cannot write, is None."""
        rows = [
            {key: _finite(getattr(o, key)) for key in ("name", "max_abs", "max_rel", "tolerance")} for o in self.outputs
        ]
        return {"passed": self.passed, "reason": self.reason, "outputs": rows}


@dataclass(frozen=True)
class _Round:
    sizes: dict[str, int]
    feeds: dict[str, Array]
    outputs: dict[str, Any]


@dataclass(frozen=True)
class _Input:
    """A graph input; each dim is a size, or the name or expression of one."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | str, ...]


def compare(
    original: Source, optimized: Source, *, inputs: Mapping[str, Array] | None = None, folder: Path | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Run both models at two sizes of every dynamic dim and compare their outputs.

    `inputs` replaces generated ones.  `folder` is where the external data of a ModelProto lies; for `optimized` it is
    by default the folder of `original`.  Raises UsageError for `inputs` that the model does not have, ModelError where
    `original` cannot be read.
    """
    say = progress or (lambda line: None)
    try:
        before, folder = _open(original, folder)
        rounds = _run_original(before, folder, inputs or {}, say)
    except VerificationError as error:
        return Verification(None, (), str(error), ())
    sizes = tuple(r.sizes for r in rounds)
    try:
        say("run the optimized model")
        after, after_folder = _open(optimized, folder)
        session = _session(after, after_folder)
        results = [_run(session, r.feeds) for r in rounds]
    except Exception as error:  # whatever onnxruntime or the file system raises is the finding
        return Verification(False, (), f"the optimized model does not run: {_line(error)}", sizes)
    pairs = list(zip(rounds, results, strict=True))
    errors = tuple(_worst(_difference(n, r.outputs[n], x.get(n)) for r, x in pairs) for n in rounds[0].outputs)
    failed = next((e for e in errors if not e.passed), None)
    return Verification(failed is None, errors, failed.reason if failed else "", sizes)


def first_difference(
    original: Source, optimized: Source, names: Sequence[str], *, inputs: Mapping[str, Array] | None = None,
    folder: Path | None = None,
) -> str | None:
    """The first of the intermediate tensors `names` (in execution order, of both models) that differs; None: none.

    Raises VerificationError where one of the models does not run.
    """
    before, folder = _open(original, folder)
    after, after_folder = _open(optimized, folder)
    both = {o for n in before.graph.node for o in n.output} & {o for n in after.graph.node for o in n.output}
    wanted = [name for name in names if name in both]
    rounds = _run_original(_with_outputs(before, wanted), folder, inputs or {}, lambda line: None)
    try:
        session = _session(_with_outputs(after, wanted), after_folder)
        results = [_run(session, r.feeds) for r in rounds]
    except Exception as error:
        raise VerificationError(f"the optimized model does not run: {_line(error)}") from error
    pairs = list(zip(rounds, results, strict=True))
    return next((n for n in wanted if not all(_difference(n, r.outputs[n], x[n]).passed for r, x in pairs)), None)


def load_inputs(path: str | os.PathLike[str], model: onnx.ModelProto) -> dict[str, Array]:
    """Every input of the model from an .npz file.  Raises UsageError where file and model do not fit."""
    arrays, wanted = _read_arrays(path), _inputs(model)
    for each in wanted:
        if each.name not in arrays:
            raise UsageError(f"'{path}' has no input '{each.name}'{_similar(each.name, list(arrays))}")
        if each.dtype == ml_dtypes.bfloat16 and arrays[each.name].dtype == np.dtype("V2"):  # what npz makes of it
            arrays[each.name] = arrays[each.name].view(ml_dtypes.bfloat16)
    _check_inputs(arrays, wanted)
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
        raise UsageError(f"'{path}' is no .npz file of plain arrays: {_line(error)}; write it with np.savez") from error


def _check_inputs(arrays: Mapping[str, Array], wanted: Sequence[_Input]) -> None:
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


def _open(source: Source, folder: Path | None) -> tuple[onnx.ModelProto, Path | None]:
    return (source, folder) if isinstance(source, onnx.ModelProto) else files.load(source)


def _with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    present = {o.name for o in model.graph.output}
    result.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in present)
    return result


def _run_original(
    model: onnx.ModelProto, folder: Path | None, given: Mapping[str, Array], say: Progress
) -> list[_Round]:
    """Inputs and outputs at the first plans that run: two of them where dims are dynamic.

    Raises VerificationError where none runs.
    """
    inputs = _inputs(model)
    _check_inputs(given, inputs)
    session = _session_of_original(model, folder)
    roles = _roles(model)
    rounds: list[_Round] = []
    failures: list[str] = []
    tried: list[dict[str, int]] = []
    for plan in PLANS:
        sizes = _sizes(inputs, plan, given)
        if sizes in tried or len(rounds) == ROUNDS:
            continue
        tried.append(sizes)
        say("run the original" + "".join(f", {k}={v}" for k, v in sizes.items()))
        try:
            feeds = {i.name: given[i.name] if i.name in given else _values(i, sizes, inputs, roles) for i in inputs}
            rounds.append(_Round(sizes, feeds, _run(session, feeds)))
        except Exception as error:
            failures.append(_line(error))
    if not rounds:
        which = "the given" if given else "generated"
        raise VerificationError(f"the original does not run on {which} inputs ({failures[0]}); {GIVE_INPUTS}")
    return rounds


def _session_of_original(model: onnx.ModelProto, folder: Path | None) -> Any:
    random = next((n for n in _nodes(model.graph) if n.op_type in DRAWS and not n.domain), None)
    if random and not any(a.name == "seed" for a in random.attribute):
        raise VerificationError(f"{random.op_type} node '{random.name}' draws random numbers: no two runs are the same")
    try:
        return _session(model, folder)
    except VerificationError:
        raise
    except Exception as error:
        raise VerificationError(f"onnxruntime cannot run the original on the CPU: {_line(error)}") from error


def _session(model: onnx.ModelProto, folder: Path | None) -> Any:
    """A CPU session; weights are read from `folder` in place, and only a model over 2 GiB is written to a file."""
    try:
        import onnxruntime
    except ImportError as error:
        raise VerificationError(
            "onnxruntime is not installed, so nothing was compared; "
            f"pip install 'onnxfuse[cpu]' or pip install 'onnxfuse[cuda]' ({_line(error)})"
        ) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what fails is raised as well; 3 would print it a second time
    providers, content = ["CPUExecutionProvider"], files.serialize(model)
    if content is None:
        with tempfile.TemporaryDirectory() as scratch:
            files.save(model, path := Path(scratch, "model.onnx"), folder=folder)
            return onnxruntime.InferenceSession(str(path), options, providers=providers)
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return onnxruntime.InferenceSession(content, options, providers=providers)


def _run(session: Any, feeds: Mapping[str, Array]) -> dict[str, Any]:
    """The outputs by name.  onnxruntime has no bfloat16 arrays, so these travel as OrtValue."""
    names = [o.name for o in session.get_outputs()]
    feeds = {i.name: feeds[i.name] for i in session.get_inputs()}
    if not any("bfloat16" in each.type for each in (*session.get_inputs(), *session.get_outputs())):
        return dict(zip(names, session.run(names, feeds), strict=True))
    values = session.run_with_ort_values(names, {name: _to_ort(value) for name, value in feeds.items()})
    return {name: _from_ort(value) for name, value in zip(names, values, strict=True)}


def _to_ort(array: Array) -> Any:
    from onnxruntime import OrtValue

    if array.dtype != ml_dtypes.bfloat16:
        return OrtValue.ortvalue_from_numpy(array)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)


def _from_ort(value: Any) -> Any:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    if 0 in value.shape():
        return np.empty(value.shape(), ml_dtypes.bfloat16)
    memory = (ctypes.c_uint16 * math.prod(value.shape())).from_address(value.data_ptr())
    return np.frombuffer(memory, ml_dtypes.bfloat16).reshape(value.shape()).copy()


def _difference(name: str, expected: Any, actual: Any) -> OutputError:
    """The error of one value against the tolerance of its dtype; sequences element by element, maps exactly."""
    if not isinstance(expected, np.ndarray):
        return _difference_of_objects(name, expected, actual)
    tolerance = TOLERANCES.get(str(expected.dtype), 0.0)
    max_abs, max_rel, reason = _measure(expected, actual, tolerance)
    return OutputError(name, max_abs, max_rel, tolerance, not reason, reason and f"output '{name}' {reason}")


def _measure(expected: Array, actual: Any, tolerance: float) -> tuple[float, float, str]:
    """Largest absolute and relative error, and what is wrong, if anything."""
    if not isinstance(actual, np.ndarray):
        return math.inf, math.inf, "is missing" if actual is None else "is no tensor any more"
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return math.inf, math.inf, f"is {_type(actual)}; the original has {_type(expected)}"
    wrong = 0 if tolerance else int((expected != actual).sum())
    if wrong:
        reason = f"differs in {wrong} of {expected.size} elements; {expected.dtype} has to be equal"
        return math.inf, math.inf, reason
    if not tolerance:
        return 0.0, 0.0, ""
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    want, have = expected.astype(wide), actual.astype(wide)
    for kind, places in (("NaN", np.isnan(want) != np.isnan(have)), ("infinite values", _infinities(want, have))):
        if places.any():
            return math.inf, math.inf, f"differs in {kind} at {int(places.sum())} of {want.size} places"
    finite = np.isfinite(want)
    scale = float(np.abs(want[finite]).max(initial=0.0)) or 1.0
    max_abs = float(np.abs(want[finite] - have[finite]).max(initial=0.0))
    text = f"is off by {max_abs / scale:.1e} of its largest value; {expected.dtype} allows {tolerance:.1e}"
    return max_abs, max_abs / scale, text if max_abs / scale > tolerance else ""


def _infinities(want: Array, have: Array) -> Array:
    """Where one is infinite and the other is not, or has the other sign."""
    return np.asarray((np.isinf(want) | np.isinf(have)) & ~np.isnan(want) & ~np.isnan(have) & (want != have))


def _difference_of_objects(name: str, expected: Any, actual: Any) -> OutputError:
    if not isinstance(expected, list) or any(not isinstance(e, np.ndarray) for e in expected):
        same = type(expected) is type(actual) and expected == actual
        size = 0.0 if same else math.inf
        return OutputError(name, size, size, 0.0, same, "" if same else f"output '{name}' differs; a map is exact")
    if not isinstance(actual, list) or len(actual) != len(expected):
        text = f"output '{name}' is no sequence of {len(expected)} tensors, as it is in the original"
        return OutputError(name, math.inf, math.inf, 0.0, False, text)
    found = [_difference(name, e, a) for e, a in zip(expected, actual, strict=True)]
    return _worst(found) if found else OutputError(name, 0.0, 0.0, 0.0, True, "")


def _worst(errors: Iterable[OutputError]) -> OutputError:
    return max(errors, key=lambda e: (not e.passed, e.max_rel))


def _type(array: Array) -> str:
    return f"{array.dtype} of shape {' x '.join(map(str, array.shape)) or '()'}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(error: BaseException) -> str:
    """The first line of what an exception says, without onnxruntime's error class and C++ source position."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    line = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)
    return re.sub(r"/\S+\.(h|cc):\d+ .*?\) (?=\w)", "", line)[:300]


# Generated inputs: dims, then what an integer means, then values.


def _inputs(model: onnx.ModelProto) -> list[_Input]:
    """The graph inputs that a caller must give."""
    weights = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
    return [_input(value) for value in model.graph.input if value.name not in weights]


def _input(value: onnx.ValueInfoProto) -> _Input:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        kind = value.type.WhichOneof("value") or "no type"
        what = "a tensor of unknown rank" if kind == "tensor_type" else f"no tensor but {kind.removesuffix('_type')}"
        raise VerificationError(f"input '{value.name}' is {what}; values can be made for tensors of known rank only")
    dims: list[int | str] = []
    for axis, dim in enumerate(tensor.shape.dim):
        unnamed = dim.dim_param.strip() in UNNAMED
        known = dim.HasField("dim_value") and dim.dim_value >= 0
        dims.append(dim.dim_value if known else f"{value.name}[{axis}]" if unnamed else dim.dim_param.strip())
    return _Input(value.name, np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)), tuple(dims))


def _sizes(inputs: Sequence[_Input], plan: Any, given: Mapping[str, Array]) -> dict[str, int]:
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


def _alone(inputs: Sequence[_Input]) -> frozenset[str]:
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


def _shape(each: _Input, sizes: Mapping[str, int], alone: frozenset[str]) -> tuple[int, ...]:
    result = []
    for dim in each.dims:
        tree = _expression(dim, alone) if isinstance(dim, str) else None
        result.append(dim if isinstance(dim, int) else max(0, _evaluate(tree, sizes)) if tree else sizes[dim])
    return tuple(result)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of its subgraphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _nodes(inner)


def _roles(model: onnx.ModelProto) -> dict[str, int]:
    """What an integer input is for: the number of rows of the table that it selects from; 0 for a mask."""
    nodes = list(_nodes(_without_weights(model)))
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in nodes:
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


def _values(each: _Input, sizes: Mapping[str, int], inputs: Sequence[_Input], roles: Mapping[str, int]) -> Array:
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
