"""Quantizers in regions: their kernels, emulated, equal onnxruntime bit by bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import region_emulation
from architectures import H200
from kernel_hosts import host_of
from onnx import TensorProto, helper, numpy_helper
from region_drafts import NUMPY, RegionProgram
from region_emulation import plan_of, results
from small_tilings import small_tilings

sys.path.append(str(Path(__file__).parents[1] / "regions"))

from region_models import drafted, regions, run

from onnxfuse import optimize
from onnxfuse.ir.dtypes import DTYPE_NUMBERS, LARGEST_FLOAT8, Array
from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Device, Kernel
from onnxfuse.testing.emulated_launches import as_c_plus_plus

# Ties, numbers beside what 8 bits hold, and numbers that no integer is near.
SPECIAL = [np.nan, np.inf, -np.inf, -0.0, 3e38, -3e38, 1e-40, 126.5, 127.5, 128.5, -127.5, -128.5, -129, 254.5, 255.5]
REALS = np.array([*SPECIAL, *(np.arange(-300, 300) / 2), 7], np.float32).reshape(4, 7, 22)
INTEGERS = np.resize([*range(256), 2**31 - 1, -(2**31), 2**24 + 1, 123456789], (4, 7, 22))
SCALES = (1.0, 0.5, 0.1, -0.1, 3e-4)
AXES = (None, 0, 1, 2, -1, -2)
Models = Callable[[int, str], Iterator[tuple[onnx.ModelProto, np.ndarray]]]
DTYPES_OF_OPSETS = ((13, "float32"), (19, "float16"), (21, "float32"), (23, "float16"), (23, "float32"))


def scales_and_zeros(axis: int | None, real: str, integer: str, has_zero: bool, start: int) -> list[np.ndarray]:
    shape = () if axis is None else REALS.shape[axis]
    zeros = np.resize(np.roll([0, 3, 100, 127, 77], start), shape).astype(integer)
    scales = np.resize(np.roll(SCALES, start), shape).astype(real)
    return [scales, zeros if integer != "int32" else np.zeros_like(zeros)][: 1 + has_zero]


def model(op: str, opset: int, x: np.ndarray, parts: Sequence[np.ndarray], axis: int | None) -> onnx.ModelProto:
    """Return a model of a quantizer beside a Neg of the real numbers, because a region has at least two operators."""
    attributes = {} if axis is None else {"axis": axis}
    names = ["scale", "zero"][: len(parts)]
    if op == "QuantizeLinear":
        result = parts[1].dtype.name if len(parts) > 1 else "uint8"
        nodes = [helper.make_node("Neg", ["x"], ["h"]), helper.make_node(op, ["h", *names], ["y"], **attributes)]
    else:
        result = parts[0].dtype.name
        nodes = [helper.make_node(op, ["x", *names], ["h"], **attributes), helper.make_node("Neg", ["h"], ["y"])]
    shape = ["a", "b", "c"]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", DTYPE_NUMBERS[x.dtype.name], shape)],
        [helper.make_tensor_value_info("y", DTYPE_NUMBERS[result], shape)],
        list(map(numpy_helper.from_array, parts, names)),
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def quantizers(opset: int, real: str) -> Iterator[tuple[onnx.ModelProto, np.ndarray]]:
    """Yield models with values for x: all integers' dtypes, axes, zero points or none, and empty tensors."""
    with np.errstate(over="ignore"):
        x = REALS.astype(real)
    for i, (axis, integer, has_zero) in enumerate(itertools.product(AXES, ("int8", "uint8"), (True, False))):
        if has_zero or integer == "uint8":
            parts = scales_and_zeros(axis, real, integer, has_zero, i)
            yield model("QuantizeLinear", opset, x, parts, axis), x
            if axis is None:
                yield model("QuantizeLinear", opset, x, parts, axis), x[:, :0]


def quantizers_of_16_bits(opset: int, real: str) -> Iterator[tuple[onnx.ModelProto, np.ndarray]]:
    """Yield models whose results have 16 bits, and models that dequantize these."""
    edges = [32767.5, 32768.5, -32768.5, 65535.5, 65536, -1, *np.linspace(-70000, 70000, 200)]
    with np.errstate(over="ignore"):
        x = np.resize([*edges, *REALS.ravel()], REALS.shape).astype(real)
    for i, (axis, integer) in enumerate(itertools.product(AXES, ("int16", "uint16"))):
        parts = scales_and_zeros(axis, real, integer, True, i)
        yield model("QuantizeLinear", opset, x, parts, axis), x
        integers = np.resize(np.arange(0, 65536, 31).astype(integer), x.shape)
        yield model("DequantizeLinear", opset, integers, parts, axis), integers


def dequantizers(opset: int, real: str) -> Iterator[tuple[onnx.ModelProto, np.ndarray]]:
    for i, (axis, integer, has_zero) in enumerate(itertools.product(AXES, ("int8", "uint8", "int32"), (True, False))):
        x = INTEGERS.astype(integer)
        yield model("DequantizeLinear", opset, x, scales_and_zeros(axis, real, integer, has_zero, i), axis), x


FLOAT8 = {dtype: np.arange(256, dtype=np.uint8).view(dtype) for dtype in LARGEST_FLOAT8}
BETWEEN = np.arange(-1800, 1800).astype(np.float32) / 2**11
# Ties and the limits of float8 numbers, and all these numbers with some numbers between them.
EDGES = {
    "float8_e4m3fn": [448, 463, 464, 465, 480, -1e9, 2**-10, 1.001 * 2**-10, *BETWEEN * 512],
    "float8_e5m2": [57344, 61439, 61440, -61441, 65504, 2**-17, 1.001 * 2**-17, *BETWEEN * 2**16, *BETWEEN / 2**5],
}


def of_float8(dtype: str) -> np.ndarray:
    numbers = [*SPECIAL, *EDGES[dtype], *BETWEEN, *FLOAT8[dtype].astype(np.float32)]
    return np.resize(numbers, (4, 53, 52)).astype(np.float32)


def quantizers_to_float8(dtype: str, opset: int, real: str) -> Iterator[tuple[onnx.ModelProto, np.ndarray]]:
    with np.errstate(over="ignore"):
        x = of_float8(dtype).astype(real)
    for scale in (*SCALES, *np.array([1e-40, 1e30, 0.0], np.float32)[: 3 if real == "float32" else 0]):
        parts = [np.array(scale, real), np.zeros((), dtype)]
        yield model("QuantizeLinear", opset, x, parts, None), x
    for axis in AXES[1:]:
        scales = np.resize(SCALES, x.shape[axis]).astype(real)
        yield model("QuantizeLinear", opset, x, [scales, np.zeros(scales.shape, dtype)], axis), x


def dequantizers_of_float8(dtype: str, opset: int, real: str) -> Iterator[tuple[onnx.ModelProto, np.ndarray]]:
    x = np.resize(FLOAT8[dtype], (4, 8, 16))
    for has_zero, axis in itertools.product((True, False), AXES):
        scales = np.resize(SCALES, () if axis is None else x.shape[axis]).astype(real)
        parts = [scales, np.zeros(scales.shape, dtype)][: 1 + has_zero]
        yield model("DequantizeLinear", opset, x, parts, axis), x


OF_FLOAT8 = {f"{of.__name__} {dtype}": functools.partial(of, dtype) for dtype in LARGEST_FLOAT8
             for of in (quantizers_to_float8, dequantizers_of_float8)}  # fmt: skip
MODELS: dict[str, Models] = {"quantizers": quantizers, "dequantizers": dequantizers,
                             "quantizers of 16 bits": quantizers_of_16_bits, **OF_FLOAT8}  # fmt: skip
FIRST = {"quantizers of 16 bits": 21, **dict.fromkeys(OF_FLOAT8, 19)}  # the first opsets that have them


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize(("opset", "real"), DTYPES_OF_OPSETS)
def test_kernels_equal_onnxruntime(models: str, opset: int, real: str, tmp_path: Path) -> None:
    if opset < FIRST.get(models, 0):
        pytest.skip(f"ONNX has {models} from opset {FIRST[models]} on")
    expected, programs = [], []
    for original, x in MODELS[models](opset, real):
        fused, _ = optimize(original, only=["region"], verify=False)
        (region,) = regions(fused)
        constants = {each.name: numpy_helper.to_array(each) for each in fused.graph.initializer}
        programs.append(drafted(region, [x if name == "x" else constants[name] for name in region.node.input]))
        expected.append(run(original, {"x": x})["y"])
    assert len(programs) >= 10
    for program, own, wanted in zip(programs, results(programs, H200, tmp_path), expected, strict=True):
        node = program.node()
        dtypes = json.loads(node.text("program", ""))["dtypes"]
        assert host_of("region").supports(node, [dtypes[name] for name in node.operands], H200) is None
        bits = np.uint8 if wanted.dtype.name in LARGEST_FLOAT8 else wanted.dtype  # NaN has a sign
        np.testing.assert_array_equal(own[0].view(bits), wanted.view(bits), err_msg=str(program.node()))


def round_trip(scale: float, dtype: str, integer: str) -> RegionProgram:
    """Return a program that dequantizes integers, moves the numbers, and quantizes them again."""
    program = RegionProgram()
    limits = np.iinfo(integer)
    x = program.operand(np.linspace(limits.min, limits.max, 256).astype(integer).reshape(2, 8, 16))
    how = program.op("Constant", dtype=dtype, value=scale), program.op("Constant", dtype=integer, value=3)
    wide = program.op("DequantizeLinear", x, *how, dtype=dtype)
    moved = program.op("Transpose", program.op("Reshape", wide, shape=[16, 16]), perm=[1, 0])
    again = program.op("QuantizeLinear", moved, *how, dtype=integer, precision="float32")
    program.outputs = [again, program.op("Neg", wide)]
    return program


@pytest.mark.parametrize("integer", ["int8", "uint8", "int16", "uint16"])
def test_integers_are_read_past_quantizers_that_give_them_back(integer: str, tmp_path: Path) -> None:
    """This does not apply to scales that are 0, overflow, or are bfloat16, whose products may be a step off.

    Products of integers of 16 bits may be so in float16, too.
    """
    scales = [(each, "float32") for each in (0.1, -3.0, 1e-20, 1e35, 0.0, 3e38)]
    scales += [(each, "float16") for each in (0.1, 2.0**-24, 1000.0)] + [(0.3, "bfloat16")]
    programs = [round_trip(float(np.asarray(each, NUMPY[dtype])), dtype, integer) for each, dtype in scales]
    for program, own in zip(programs, results(programs, H200, tmp_path), strict=True):
        for one, other in zip(own, program.expected(), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(program.node()))
    kept = ["step_of<" in "".join(step.kernel.text for step in plan_of(program, H200).steps) for program in programs]
    has_16_bits = integer.endswith("16")
    assert kept == [False] * 3 + [has_16_bits] + [True] * 2 + [has_16_bits] * 2 + [True] * 2


def rounding(scale: float, dtype: str, integer: str, also_read: bool) -> RegionProgram:
    """Return a program that rounds real numbers to those that integers represent; the integers are an output, too."""
    program = RegionProgram()
    x = program.operand(np.clip(REALS, -60000, 60000).astype(dtype))
    how = (
        program.op("Constant", dtype=dtype, value=float(NUMPY[dtype].type(scale))),
        program.op("Constant", dtype=integer, value=3),
    )
    stored = program.op("QuantizeLinear", x, *how, dtype=integer, precision=dtype)
    numbers = program.op("Neg", program.op("DequantizeLinear", stored, *how, dtype=dtype))
    program.outputs = [numbers, stored][: 1 + also_read]
    return program


@pytest.mark.parametrize("integer", ["int8", "uint8", "int16"])
def test_numbers_are_rounded_to_steps_without_integers(integer: str, tmp_path: Path) -> None:
    cases = itertools.product((1.0, -0.1, 3e-4), ("float32", "float16"), (False, True))
    programs = [rounding(scale, dtype, integer, also_read) for scale, dtype, also_read in cases]
    for program, own in zip(programs, results(programs, H200, tmp_path), strict=True):
        for one, other in zip(own, program.expected(), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(program.node()))
        (step,) = plan_of(program, H200).steps
        assert ("integer_in<" in step.kernel.text) == (len(program.outputs) == 2)


@pytest.mark.parametrize("direction", ["0.0f", "9.0f"])
def test_quotients_are_exact_if_reciprocals_are_a_unit_off(
    direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's reciprocals may be a unit in the last place off, which matters for numbers just beside ties."""
    exact, off = "float inverse = reciprocal(b);", f"float inverse = std::nextafterf(1.0f / b, {direction});"

    def with_error(text: str) -> str:
        return as_c_plus_plus(text).replace(exact, off)

    assert exact in as_c_plus_plus(kernel_text(Kernel("region", "region", text='#include "region.cuh"\n')))
    monkeypatch.setattr(region_emulation, "as_c_plus_plus", with_error)
    programs = []
    for scale in np.array([1.0312499, 1.0390624, 1.0468751, 1.0546876, 0.1], np.float32):
        program, ties = RegionProgram(), (np.arange(256) + 0.5) * scale
        beside = np.concatenate([ties * (1 + sign * 2.0**-24) for sign in (-1, 0, 1)]).astype(np.float32)
        x = program.operand(np.concatenate([np.nextafter(beside, np.float32(end)) for end in (0, 999)]))
        how = (
            program.op("Constant", dtype="float32", value=float(scale)),
            program.op("Constant", dtype="uint8", value=0),
        )
        program.outputs = [program.op("QuantizeLinear", x, *how, dtype="uint8", precision="float32")]
        programs.append(program)
    for program, (own,) in zip(programs, results(programs, H200, tmp_path), strict=True):
        np.testing.assert_array_equal(own, program.expected()[0], err_msg=str(program.node()))


@pytest.mark.parametrize("step", ["Greater", "Floor", "Cast"])
def test_sums_that_only_select_numbers_leave_these_exact(step: str, tmp_path: Path) -> None:
    """The last bits of a sum are arbitrary, but not those of numbers that it selects, such as ties."""
    program = RegionProgram()
    x = program.operand(np.resize(np.arange(-300, 300) / 2, (4, 150)).astype(np.float32))
    total = program.op("ReduceSum", x, axes=[1], keepdims=1)
    if step == "Greater":
        negative = program.op("Neg", x)
        chosen = program.op("Where", program.op(step, total, total), negative, x, dtype="float32")
    else:
        whole = program.op(step, total, dtype="int64" if step == "Cast" else "")
        whole = program.op("Cast", whole, dtype="float32") if step == "Cast" else whole
        chosen = program.op("Add", x, program.op("Sub", whole, whole))
    how = program.op("Constant", dtype="float32", value=1.0), program.op("Constant", dtype="uint8", value=100)
    program.outputs = [program.op("QuantizeLinear", chosen, *how, dtype="uint8", precision="float32")]
    (own,), *_ = results([program], H200, tmp_path)
    np.testing.assert_array_equal(own, program.expected()[0])


@pytest.mark.parametrize(("integer", "zero"), [("int8", -128), ("uint8", 0), ("uint8", 3), ("int8", 0)])
def test_a_relu_is_left_out_if_the_lowest_integer_is_zero(integer: str, zero: int, tmp_path: Path) -> None:
    programs = []
    for scale in (0.1, -0.1):
        program = RegionProgram()
        how = (
            program.op("Constant", dtype="float32", value=float(np.float32(scale))),
            program.op("Constant", dtype=integer, value=zero),
        )
        positive = program.op("Relu", program.operand(REALS))
        program.outputs = [program.op("QuantizeLinear", positive, *how, dtype=integer, precision="float32")]
        programs.append(program)
    for program, (own,) in zip(programs, results(programs, H200, tmp_path), strict=True):
        np.testing.assert_array_equal(own, program.expected()[0], err_msg=str(program.node()))
    left_out = ["larger<" not in "".join(step.kernel.text for step in plan_of(each, H200).steps) for each in programs]
    assert left_out == [(integer, zero) in (("int8", -128), ("uint8", 0)), False]


def dynamic_quantizers() -> Iterator[Array]:
    """Yield values of one sign and of both, zeros, few and many, of sizes from small to large, and none."""
    random = np.random.default_rng(0)
    for shape in ((3, 5, 7), (1, 1, 1), (2, 64, 33), (2, 1, 0)):
        for size in (1e-30, 0.1, 1.0, 1e6):
            drawn = (random.standard_normal(shape) * size).astype(np.float32)
            yield from (drawn, np.abs(drawn), -np.abs(drawn))
        yield np.zeros(shape, np.float32)


@pytest.mark.parametrize("device", [H200, dataclasses.replace(H200, multiprocessors=2)], ids=["132", "2"])
def test_dynamic_quantizers_equal_onnxruntime(device: Device, tmp_path: Path) -> None:
    """One block reduces all elements, or several do, and their results are merged."""
    expected, programs = [], []
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["a", "b", "c"])
    made = [
        helper.make_tensor_value_info(*each)
        for each in (
            ("y", TensorProto.UINT8, ["a", "b", "c"]),
            ("scale", TensorProto.FLOAT, []),
            ("zero", TensorProto.UINT8, []),
        )
    ]
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "scale", "zero"])
    graph = helper.make_graph([node], "g", [given], made)
    original = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (region,) = regions(optimize(original, only=["region"], verify=False)[0])
    for x in dynamic_quantizers():
        programs.append(drafted(region, [x]))
        expected.append([*run(original, {"x": x}).values()])
    with small_tilings():
        found = results(programs, device, tmp_path)
    for x, own, wanted in zip(dynamic_quantizers(), found, expected, strict=True):
        for one, other in zip(own, wanted, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"{x.shape} {x.ravel()[:3]}")
