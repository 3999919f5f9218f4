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
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.kernels.region.operators import is_discontinuous
from onnxfuse.kernels.region.program import Operation, parse
from onnxfuse.kernels.region.shapes import Shapes, infer, sizes_of
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.region_operators import COMPARISONS, HALVES, SUMS
from onnxfuse.runtime.plan import FusedNode, TensorSpec

NUMPY = {
    name: np.dtype(name) for name in ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
LISTS = {"Reshape": ("shape",), "Expand": ("shape",), "Unsqueeze": ("axes",), "Squeeze": ("axes",),
         "Slice": ("starts", "ends", "axes", "steps"), "Split": ("sizes",), "Tile": ("repeats",),
         "Pad": ("pads",), **dict.fromkeys(SUMS, ("axes",))}  # fmt: skip
OPSET = 21
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

    def model(self) -> onnx.ModelProto:
        """Return what it means: halves are float32 there, rounded where the kernels round them."""
        return _Model(self).model()

    def expected(self) -> list[np.ndarray]:
        """Return the outputs, as onnxruntime computes them in float32, in each output's own dtype."""
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(self.model().SerializeToString(), options, providers=["CPUExecutionProvider"])
        return self.rounded(session.run(None, {name: _wide(each) for name, each in self.operands.items()}))

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


class _Model:
    """The ONNX model of a program."""

    def __init__(self, program: RegionProgram) -> None:
        self.program, self.nodes, self.count = program, list[onnx.NodeProto](), 0
        self.initializers: list[onnx.TensorProto] = []

    @functools.cached_property
    def shapes(self) -> Shapes:
        """The shapes of all values, by which attributes that are computed from dims are numbers."""
        sizes = Sizes()
        operands = {name: sizes.read(each.shape) for name, each in self.program.operands.items()}
        return infer(parse(self.program.node()), operands, sizes)

    def model(self) -> onnx.ModelProto:
        for op, inputs, outputs, attributes in self.program.ops:
            self._add(Operation(op, tuple(inputs), tuple(outputs), attributes))
        values = {"x": list(self.program.operands), "v": self.program.outputs}
        infos = {
            kind: [helper.make_tensor_value_info(name, self._type(name), None) for name in names]
            for kind, names in values.items()
        }
        for info, each in zip(infos["x"], self.program.operands.values(), strict=True):
            for dim in each.shape:
                info.type.tensor_type.shape.dim.add().dim_value = dim
            if not each.shape:
                info.type.tensor_type.shape.SetInParent()
        graph = helper.make_graph(self.nodes, "region", infos["x"], infos["v"], self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)

    def _type(self, name: str) -> int:
        dtype = self.program.dtypes[name]
        return DTYPE_NUMBERS["float32" if dtype in HALVES else dtype]

    def _constant(self, array: np.ndarray) -> str:
        self.count += 1
        self.initializers.append(numpy_helper.from_array(array, f"c{self.count}"))
        return f"c{self.count}"

    def _node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        self.nodes.append(helper.make_node(op, inputs, outputs, **attributes))

    def _rounded(self, name: str, dtype: str) -> str:
        """Return a value behind Casts to a half precision and back."""
        if dtype not in HALVES:
            return name
        self.count += 1
        self._node("Cast", [name], [f"h{self.count}"], to=DTYPE_NUMBERS[dtype])
        self._node("Cast", [f"h{self.count}"], [f"r{self.count}"], to=TensorProto.FLOAT)
        return f"r{self.count}"

    def _add(self, operation: Operation) -> None:
        op, inputs, attributes = operation.name, list(operation.inputs), dict(operation.attributes)
        target = self.program.dtypes[operation.outputs[0]]
        if op == "Constant":
            self.initializers.append(self._scalar(operation.outputs[0], attributes["value"]))
            return
        if is_discontinuous(operation, target):
            inputs = [self._rounded(name, self.program.dtypes[name]) for name in inputs]
        if op == "Cast":
            name = inputs[0]
            if target in HALVES:
                self.count += 1
                self._node("Cast", [name], [f"f{self.count}"], to=TensorProto.FLOAT)
                name = self._rounded(f"f{self.count}", target)
            self._node("Cast", [name], operation.outputs, to=self._type(operation.outputs[0]))
            return
        if op == "Mod" and self._type(operation.inputs[0]) in (TensorProto.FLOAT, TensorProto.DOUBLE):
            attributes["fmod"] = 1
        if op in LISTS and op not in SUMS:
            inputs = inputs[:1]  # others tell sizes
            given = [self.shapes.of[name] for name in operation.inputs]
            for key in LISTS[op]:
                if any(isinstance(each, list) for each in attributes.get(key, ())):
                    found = sizes_of(operation, key, given, self.shapes.sizes)
                    attributes[key] = [self.shapes.sizes.value(each) for each in found]
        if op == "Slice" and "steps" not in attributes:
            attributes["steps"] = [1] * len(attributes["axes"])
        for key in LISTS.get(op, ()):
            inputs.append(self._constant(np.array(attributes.pop(key), np.int64)))
        if op == "Pad" and attributes.get("mode", "constant") == "constant":
            dtype = helper.tensor_dtype_to_np_dtype(self._type(operation.inputs[0]))
            inputs.append(self._constant(np.array(attributes.pop("value", 0), dtype)))
        attributes.pop("value", None)
        self._node(op, inputs, operation.outputs, **attributes)

    def _scalar(self, name: str, value: Any) -> onnx.TensorProto:
        dtype = helper.tensor_dtype_to_np_dtype(self._type(name))
        return numpy_helper.from_array(np.array(float(value) if isinstance(value, str) else value, dtype), name)


# Relative to each result, and to how large values become on the way: half an ulp of the dtype, and errors in float32.
RELATIVE = {"float16": 1.2e-3, "bfloat16": 9e-3, "float32": 3e-5, "float64": 1e-9}
ABSOLUTE = {"float16": 3e-6, "bfloat16": 3e-6, "float32": 3e-6, "float64": 1e-7}


def check(program: RegionProgram, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Compare results with those of onnxruntime."""
    for own, other, dtype in zip(found, expected, program.output_dtypes(), strict=True):
        assert own.shape == other.shape, f"{own.shape}, required {other.shape}: {program.node()}"
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
