"""Shape rules: they return the shapes of an operator's outputs from its input shapes; one file per operator family."""

from onnxfuse.analysis.rules import ShapeRule
from onnxfuse.analysis.shape_rules import (
    attention,
    elementwise,
    fills,
    products,
    recurrences,
    reductions,
    slices,
    views,
    windows,
)

SHAPE_RULES: dict[str, ShapeRule] = {
    **elementwise.RULES,
    **fills.RULES,
    **products.RULES,
    **reductions.RULES,
    **views.RULES,
    **slices.RULES,
    **windows.RULES,
    **attention.RULES,
    **recurrences.RULES,
}
