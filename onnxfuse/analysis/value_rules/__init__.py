"""The values of small integer tensors, sizes included: the results of the shape arithmetic in a graph."""

from onnxfuse.analysis.rules import ValueRule
from onnxfuse.analysis.value_rules import arithmetic, views

VALUE_RULES: dict[str, ValueRule] = {**views.RULES, **arithmetic.RULES}
