"""Operators of onnxruntime with attributes and inputs that they do not allow: they stay, and no step raises."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import onnx
import pytest
from onnx import AttributeProto, helper
from spelled_models import parsed
from test_quantized_rules import EXACT
from test_spelled_rules import IN_NUMPY, IN_ONNXRUNTIME

import onnxfuse
from onnxfuse.ir.domain import ORT_DOMAIN

HEADS = "num_heads = 2, kv_num_heads = 1"
MORE = (
    "(float[2,48] x) => (float[2,6] y) <uint8[6,3,8] w, float[6,3] s, float[6] b> "
    "{ y = com.microsoft.MatMulNBits <K = 48, N = 6, bits = 4, block_size = 16> (x, w, s, , , b) }",
    "(int64[2,3] i) => (float[2,3,32] y) <uint8[10,16] w, float[10,2] s> { y = com.microsoft.GatherBlockQuantized "
    "<bits = 4, block_size = 16, gather_axis = 0, quantize_axis = 1> (w, i, s) }",
    f"(float[b,n,64] q, float[b,1,p,16] c, float[b,1,p,16] d, int32[b] l, int32 t) => (float[b,n,32] y, u, v) "
    f"{{ y, u, v = com.microsoft.GroupQueryAttention <{HEADS}, do_rotary = 0, softcap = 1.0> (q, , , c, d, l, t) }}",
)


def operators() -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield the first model of each operator of onnxruntime."""
    seen = set()
    texts = *MORE, *IN_ONNXRUNTIME.values(), *(text for text, _ in IN_NUMPY.values()), *EXACT.values()
    for model in map(parsed, texts):
        for node in model.graph.node:
            if node.domain == ORT_DOMAIN and node.op_type not in seen:
                seen.add(node.op_type)
                yield node.op_type, model


def changed(model: onnx.ModelProto, op: str) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield the model with one number changed or removed, or one input left out or without its last axis."""
    (number,) = (i for i, node in enumerate(model.graph.node) if node.op_type == op)
    node = model.graph.node[number]
    for i, attribute in enumerate(node.attribute):
        is_int, is_float = (attribute.type == each for each in (AttributeProto.INT, AttributeProto.FLOAT))
        values = (0, -1, 3, 2**40) if is_int else (0.0, -1.0, float("nan")) if is_float else ([],)
        for value in values if attribute.type != AttributeProto.STRING else ():
            made = copy.deepcopy(model)
            new = helper.make_attribute(attribute.name, value, attr_type=attribute.type)
            made.graph.node[number].attribute[i].CopyFrom(new)
            yield f"{attribute.name}={value}", made
        made = copy.deepcopy(model)
        del made.graph.node[number].attribute[i]
        yield f"no {attribute.name}", made
    for i, name in enumerate(node.input):
        made = copy.deepcopy(model)
        made.graph.node[number].input[i] = ""
        yield f"no input {i}", made
        made = copy.deepcopy(model)
        for value in made.graph.input:
            if value.name == name and value.type.tensor_type.shape.dim:
                del value.type.tensor_type.shape.dim[-1]
                yield f"input {i} of a lower rank", made


@pytest.mark.parametrize(("op", "model"), [pytest.param(*each, id=each[0]) for each in operators()])
def test_no_step_raises(op: str, model: onnx.ModelProto) -> None:
    for what, made in changed(model, op):
        try:
            _, report = onnxfuse.optimize(made, verify=False)
        except onnxfuse.OnnxfuseError:
            continue  # refused, with a sentence
        assert not report.left_out, f"{what}: {report.left_out[0]}"


@pytest.mark.parametrize(
    ("old", "new"),
    [("bits = 4", "bits = 0"), ("bits = 4", "bits = 3"), ("block_size = 16", "block_size = 0"), ("K = 48", "K = 96"),
     ("K = 48, ", ""), ("N = 6", "N = 0"), ("num_heads = 2", "num_heads = 0"), ("_heads = 2", "_heads = -2"),
     ("kv_num_heads = 1", "kv_num_heads = 0"), ("num_heads = 2", "num_heads = 1"), ("num_heads = 2, ", ""),
     ("do_rotary = 0", "do_rotary = 3"), ("softcap = 1.0", "softcap = -1.0")],
)  # fmt: skip
def test_what_an_operator_does_not_allow_is_not_fused(old: str, new: str) -> None:
    (text,) = (each for each in (MORE[0], MORE[2]) if old in each)
    assert onnxfuse.optimize(parsed(text), verify=False)[1].fused
    assert not onnxfuse.optimize(parsed(text.replace(old, new, 1)), verify=False)[1].fused
