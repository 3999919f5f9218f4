"""Programs of regions for tests: built step by step, and as ONNX models that onnxruntime runs on a CPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from onnxfuse.algebra.operators import COMPARISONS
from onnxfuse.ir.dtypes import DTYPE_NUMBERS, LARGEST_FLOAT8
from onnxfuse.kernels.region.program import Operation
from onnxfuse.kernels.region.shapes import sizes_of
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.region_operators import HALVES, QUANTIZERS, SUMS
from onnxfuse.runtime.plan import FusedNode, TensorSpec

NUMPY = {
    name: np.dtype(name)
    for name in ("float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "bool")
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16), **{dtype: np.dtype(dtype) for dtype in LARGEST_FLOAT8}}
LISTS = {"Reshape": ("shape",), "Expand": ("shape",), "Unsqueeze": ("axes",), "Squeeze": ("axes",),
         "Slice": ("starts", "ends", "axes", "steps"), "Split": ("sizes",), "Tile": ("repeats",),
         "Pad": ("pads",), **dict.fromkeys(SUMS, ("axes",))}  # fmt: skip
OPSET = 21
STEPS = (  # operators that are not continuous
    "Floor", "Ceil", "Round", "Sign", "Mod", "IsNaN", "IsInf", "Equal", "Less", "LessOrEqual", "Greater",
    "GreaterOrEqual", "ArgMax", "ArgMin", "QuantizeLinear",
)  # fmt: skip
FLOATS = ("float32", "float16", "bfloat16")


@dataclass
class RegionProgram:
    """A program with the shapes and the values of its operands."""

    ops: list[list[Any]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)
    operands: dict[str, np.ndarray] = field(default_factory=dict)
    dynamic: tuple[int, ...] = ()  # sizes that are dynamic dims wherever they appear
    scale: float = 4.0  # how large values become on the way

    def operand(self, array: np.ndarray) -> str:
        """Add an operand; return its name."""
        name = f"x{len(self.operands)}"
        self.operands[name] = np.asarray(array)
        self.dtypes[name] = array.dtype.name
        return name

    def op(self, op: str, *inputs: str, dtype: str = "", **attributes: Any) -> str:
        """Add an operator of one output, which has the first input's dtype unless another is given."""
        return self.ops_of(op, *inputs, count=1, dtype=dtype, **attributes)[0]

    def ops_of(self, op: str, *inputs: str, count: int, dtype: str = "", **attributes: Any) -> list[str]:
        """Add an operator of several outputs."""
        first = sum(len(each[2]) for each in self.ops)
        outputs = [f"v{first + i}" for i in range(count)]
        self.ops.append([op, list(inputs), outputs, attributes])
        if op in COMPARISONS and not dtype:
            dtype = "bool"
        self.dtypes |= dict.fromkeys(outputs, dtype or self.dtypes[inputs[0]])
        return outputs

    def node(self) -> FusedNode:
        content = {"ops": self.ops, "outputs": self.outputs, "dtypes": self.dtypes}
        attributes = {"program": json.dumps(content, separators=(",", ":"))}
        return FusedNode("region", "n", tuple(self.operands), attributes, self.output_dtypes())

    def output_dtypes(self) -> tuple[str, ...]:
        return tuple(self.dtypes[name] for name in self.outputs)

    def specs(self, aligned: bool = True) -> list[TensorSpec]:
        return [TensorSpec(each.shape, each.dtype.name, aligned) for each in self.operands.values()]

    def expected(self) -> list[np.ndarray]:
        """Return the outputs, each in its own dtype: onnxruntime runs the operators one by one, in float32.

        Values of 16 bits on which a result depends that is not continuous are rounded to their dtype.
        """
        dtypes, halves = self.dtypes, {name for name in self.read_by_steps() if self.dtypes[name] in HALVES}
        values = {name: _wide(array) for name, array in self.operands.items()}
        values |= {name: _as(dtypes[name], values[name]) for name in halves & values.keys()}
        for op, inputs, outputs, attributes in self.ops:
            operation = Operation(op, tuple(inputs), tuple(outputs), attributes)
            found = _results(operation, [values[name] for name in inputs], dtypes[outputs[0]])
            values |= {
                name: _as(dtypes[name], each) if name in halves else each
                for name, each in zip(outputs, found, strict=True)
            }
        return self.rounded([values[name] for name in self.outputs])

    def read_by_steps(self) -> set[str]:
        """Return the values on which results depend that are not continuous."""
        found = set[str]()
        for op, inputs, outputs, _ in reversed(self.ops):
            is_cut = op == "Cast" and self.dtypes[outputs[0]] not in (*FLOATS, "float64")
            if op in STEPS or is_cut or found & set(outputs):
                found |= set(inputs)
        return found

    def rounded(self, results: Sequence[Any]) -> list[np.ndarray]:
        pairs = zip(results, self.output_dtypes(), strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            return [np.asarray(each).astype(NUMPY[dtype]) for each, dtype in pairs]


Made = tuple[str, RegionProgram]


def numbers(shape: Sequence[int], dtype: str = "float32", seed: int = 0, low: int = -12, high: int = 12) -> np.ndarray:
    """Return multiples of a quarter, or integers."""
    found = np.random.default_rng(seed).integers(low, high, shape, endpoint=True)
    return (found / 4).astype(NUMPY[dtype]) if dtype.startswith(("float", "bfloat")) else found.astype(NUMPY[dtype])


def made(name: str, arrays: Sequence[np.ndarray], build: Callable[..., str | Sequence[str]],
         dynamic: tuple[int, ...] = ()) -> Made:  # fmt: skip
    """Return a program: `build` takes it and the names of its operands, and returns those of its outputs."""
    program = RegionProgram(dynamic=dynamic)
    given = [program.operand(each) for each in arrays]
    found = build(program, *given)
    program.outputs = [found] if isinstance(found, str) else list(found)
    return name, program


def one(name: str, op: str, *arrays: np.ndarray, dtype: str = "", dynamic: tuple[int, ...] = (),
        **attributes: object) -> Made:  # fmt: skip
    """Return a program of one operator."""
    return made(name, arrays, lambda p, *names: p.op(op, *names, dtype=dtype, **attributes), dynamic)


def _wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float32) if array.dtype.name in HALVES else array


def _as(dtype: str, array: np.ndarray) -> np.ndarray:
    """Return floats as a dtype holds them, in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.asarray(array, np.float32).astype(NUMPY[dtype]), np.float32)


def _results(operation: Operation, given: Sequence[np.ndarray], target: str) -> list[np.ndarray]:
    """Return the results of one operator of which the first one has the dtype `target`."""
    op, attributes = operation.name, {k: v for k, v in operation.attributes.items() if k != "may_be_empty"}
    if op in QUANTIZERS:
        return [_quantizer(operation, *given, target)]
    if op == "Constant":
        value = attributes["value"]
        return [np.array(float(value) if isinstance(value, str) else value, _held(target))]
    if op == "Cast":
        if target in HALVES:
            return [_as(target, given[0])]
        attributes["to"] = DTYPE_NUMBERS[target]
    if op == "Mod" and given[0].dtype.kind == "f":
        attributes["fmod"] = 1
    if op in LISTS and op not in SUMS:
        attributes |= _numbers(operation, given)
        given = given[:1]  # others tell sizes
    if op == "Slice" and "steps" not in attributes:
        attributes["steps"] = [1] * len(attributes["axes"])
    given = [*given, *(np.array(attributes.pop(key), np.int64) for key in LISTS.get(op, ()))]
    if op == "Pad" and attributes.get("mode", "constant") == "constant":
        given.append(np.array(attributes.pop("value", 0), given[0].dtype))
    attributes.pop("value", None)
    inputs = [f"i{number}" for number in range(len(given))]
    node = helper.make_node(op, inputs, operation.outputs, **attributes)
    return _session(node.SerializeToString(), tuple(each.dtype.name for each in given), target).run(
        None, dict(zip(inputs, given, strict=True))
    )


def _quantizer(operation: Operation, x: np.ndarray, scale: np.ndarray, zero: np.ndarray, target: str) -> np.ndarray:
    """Return what ONNX defines, for scales that broadcast.

    As in onnxruntime, NaN gives the lowest integer or, for float8, NaN.
    """
    with np.errstate(all="ignore"):
        if x.dtype.name in LARGEST_FLOAT8:
            return np.asarray(x.astype(np.float32) * scale)
        if operation.name == "DequantizeLinear":
            return np.asarray((x.astype(np.int64) - zero).astype(np.float32) * scale)
        quotient = _as(operation.attributes["precision"], x / scale)
    if largest := LARGEST_FLOAT8.get(target):
        return np.asarray(np.clip(quotient, -largest, largest).astype(NUMPY[target]))
    limits = np.iinfo(target)
    shifted = np.clip(np.rint(quotient), limits.min - float(limits.max), limits.max - float(limits.min)) + zero
    return np.asarray(np.clip(np.nan_to_num(shifted, nan=limits.min), limits.min, limits.max).astype(target))


def _numbers(operation: Operation, given: Sequence[np.ndarray]) -> dict[str, list[int]]:
    """Return the attributes that are lists of sizes, of which expressions over dims are numbers here."""
    sizes = Sizes()
    shapes = [sizes.read(each.shape) for each in given]
    return {
        key: [sizes.value(each) for each in sizes_of(operation, key, shapes, sizes)]
        for key in LISTS[operation.name]
        if key in operation.attributes
    }


@functools.lru_cache(maxsize=4096)
def _session(node: bytes, dtypes: Sequence[str], target: str) -> ort.InferenceSession:
    """Return a session of one operator whose inputs have these dtypes."""
    parsed = onnx.NodeProto.FromString(node)
    inputs = [
        helper.make_tensor_value_info(name, DTYPE_NUMBERS[dtype], None)
        for name, dtype in zip(parsed.input, dtypes, strict=True)
    ]
    outputs = [helper.make_tensor_value_info(name, DTYPE_NUMBERS[_held(target).name], None) for name in parsed.output]
    graph = helper.make_graph([parsed], "operator", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _held(dtype: str) -> np.dtype[Any]:
    """Return in what onnxruntime computes values of a dtype."""
    return NUMPY["float32" if dtype in HALVES else dtype]


# Relative to each result, and to how large values become on the way: half an ulp of the dtype, and errors in float32.
RELATIVE = {"float16": 1.2e-3, "bfloat16": 9e-3, "float32": 3e-5, "float64": 1e-9}
ABSOLUTE = {"float16": 3e-6, "bfloat16": 3e-6, "float32": 3e-6, "float64": 1e-7}


def check(program: RegionProgram, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Compare results with those of onnxruntime."""
    for own, other, dtype in zip(found, expected, program.output_dtypes(), strict=True):
        assert own.shape == other.shape, f"{own.shape}, required {other.shape}: {program.node()}"
        if dtype in LARGEST_FLOAT8:  # GPUs drop the sign of NaN
            own, other = own.astype(np.float32), other.astype(np.float32)
        if dtype not in RELATIVE:
            np.testing.assert_array_equal(own, other, err_msg=describe(program))
            continue
        wide, required = own.astype(np.float64), other.astype(np.float64)
        absolute = ABSOLUTE[dtype] * program.scale + 1e-7
        np.testing.assert_allclose(wide, required, RELATIVE[dtype], absolute, err_msg=describe(program))


def describe(program: RegionProgram) -> str:
    """Return a program and its shapes, for messages."""
    shapes = {name: (each.dtype.name, each.shape) for name, each in program.operands.items()}
    return f"{shapes} dynamic {program.dynamic}\n" + "\n".join(map(str, program.ops)) + f"\n-> {program.outputs}"
