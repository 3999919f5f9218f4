"""Test the types of attributes of onnxruntime's operators against its schemas, and that other types are refused."""

from __future__ import annotations

import onnx.parser
import pytest
from onnx import AttributeProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

import onnxfuse
from onnxfuse.analysis.shape_inference import SHAPE_RULES
from onnxfuse.errors import ModelError
from onnxfuse.ir.domain import ORT_DOMAIN
from onnxfuse.ir.ort_attributes import required_type
from onnxfuse.spell_out.spell_out import RULES

READ = {name.removeprefix(f"{ORT_DOMAIN}::") for name in (*SHAPE_RULES, *RULES) if name.startswith(ORT_DOMAIN)}


def test_types_are_those_of_onnxruntime() -> None:
    checked = 0
    for schema in get_all_operator_schema():
        for name, attribute in schema.attributes.items() if schema.domain == ORT_DOMAIN else ():
            found, required = required_type(schema.name, name), int(attribute.type)
            assert found == required or (found is None and schema.name not in READ), f"{schema.name}: {name}"
            checked += found is not None
    assert checked > 100 and {"MatMulNBits", "GroupQueryAttention", "FusedConv", "QuickGelu"} <= READ


MODEL = """<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]> g (float[2,8] x) => (y) {
  y = com.microsoft.QuickGelu <alpha = 2.0> (x) }"""


@pytest.mark.parametrize("value", [1, "1", [1.0], helper.make_tensor("t", 1, [], [1.0])])
def test_other_types_are_refused(value: object) -> None:
    model = onnx.parser.parse_model(MODEL)
    model.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("alpha", value))
    kind = AttributeProto.AttributeType.Name(model.graph.node[0].attribute[0].type)
    sentence = f"the QuickGelu node of 'y' has the attribute 'alpha' of type {kind}; QuickGelu requires FLOAT"
    with pytest.raises(ModelError, match=sentence):
        onnxfuse.optimize(model)
