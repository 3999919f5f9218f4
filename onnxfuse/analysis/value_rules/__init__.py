"""Value rules: they return the values of small integer tensors, such as sizes in a graph's shape arithmetic."""

from onnxfuse.analysis.rules import ValueRule
from onnxfuse.analysis.value_rules import arithmetic, views

VALUE_RULES: dict[str, ValueRule] = {**views.RULES, **arithmetic.RULES}
