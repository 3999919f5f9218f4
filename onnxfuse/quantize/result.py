"""The parts of a report about quantized weights, and about errors relative to the float model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import onnx

from onnxfuse.printing import Line, bytes_text, counted, escape, finite

MAX_ERRORS_SHOWN: Final = 5  # maximum number of outputs in the terminal; those with the largest errors are shown


@dataclass(frozen=True)
class OutputError:
    """The largest distance of an output from the float model's output: absolute, and relative to its largest value.

    Both are infinite where NaN or infinite values appear.
    """

    name: str
    max_abs: float
    max_rel: float


@dataclass(frozen=True)
class StayingWeights:
    """Nodes of one operator whose weights are not quantized, all for the same reason."""

    op: str
    reason: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class WeightsResult:
    """The facts about quantized weights: how many nodes have them, which nodes keep their weights, and the errors.

    `block_size` is 0 for weights with one scale per channel.  `activations` is the dtype to which the tensors that
    these nodes read are quantized; "" for floats.  `bytes_before` and `bytes_after` count the bytes of the weights that
    were quantized.  If no errors were measured, `errors` is empty, and `note` says why; otherwise `note` can say on
    which inputs they were measured.
    """

    dtype: str
    block_size: int
    nodes: int
    stays: tuple[StayingWeights, ...]
    bytes_before: int
    bytes_after: int
    errors: tuple[OutputError, ...] = ()
    note: str = ""
    activations: str = ""

    @property
    def products(self) -> str:
        """A text with the number of products with quantized weights, and the bytes before and after."""
        if not self.nodes:
            return f"none in {self.dtype}, because no MatMul has a weight that can be quantized"
        size = f"{bytes_text(self.bytes_before)} -> {bytes_text(self.bytes_after)}"
        if self.activations:
            nodes = counted(self.nodes, "product or convolution", "products and convolutions")
            return f"{nodes} in {self.dtype}, one scale per channel, {size}; they read {self.activations}"
        return f"{counted(self.nodes, 'product')} in {self.dtype}, blocks of {self.block_size}, {size}"

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values; an infinite error, which JSON cannot write, becomes None."""
        return {**asdict(self), "errors": _json_errors(self.errors)}


@dataclass(frozen=True)
class BesideReference:
    """The errors of a quantized model against a float model: of the model as given, and of the optimized model.

    Where nothing was measured, both are empty, and `note` says why.
    """

    name: str  # name of the float model
    before: tuple[OutputError, ...] = ()
    after: tuple[OutputError, ...] = ()
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the errors as JSON values; an infinite error, which JSON cannot write, becomes None."""
        errors = {"before": _json_errors(self.before), "after": _json_errors(self.after)}
        return {"name": self.name, **errors, "note": self.note}


def _json_errors(errors: Iterable[OutputError]) -> list[dict[str, Any]]:
    return [{key: finite(value) for key, value in asdict(each).items()} for each in errors]


@dataclass(frozen=True)
class QuantizedModel:
    """A model with quantized weights, and the facts about them; all other weights are unchanged."""

    model: onnx.ModelProto
    result: WeightsResult


def weights_lines(weights: WeightsResult | None) -> Iterator[Line]:
    """Yield the lines of a report about quantized weights; none for a model whose weights were not quantized."""
    if weights is None:
        return
    yield Line(f"Weights: {weights.products}")
    for one in weights.stays:
        first, *more = one.nodes
        what = (
            f"{len(one.nodes)} {one.op} stay, first '{escape(first)}'" if more else f"{one.op} '{escape(first)}' stays"
        )
        yield Line(f"{what}: {escape(one.reason)}", "  ", 4)
    worst = sorted(weights.errors, key=lambda each: -each.max_rel)
    for each in worst[:MAX_ERRORS_SHOWN]:
        error = f"by {each.max_abs:.2g} at most, {each.max_rel:.1e} of its largest value"
        yield Line(f"'{escape(each.name)}' is off from the float model {error}", "  ", 4)
    if rest := worst[MAX_ERRORS_SHOWN:]:
        yield Line(
            f"{counted(len(rest), 'more output')} by at most {rest[0].max_rel:.1e} of the largest value", "  ", 4
        )
    if weights.note:
        yield Line(escape(weights.note), "  ", 4)


def reference_lines(beside: BesideReference | None) -> Iterator[Line]:
    """Yield the lines of a report about the errors against a float model; none if no float model was given."""
    if beside is None:
        return
    yield Line(f"Beside '{escape(beside.name)}', off by this share of the largest value, as it came and optimized")
    before = {each.name: each.max_rel for each in beside.before}
    worst = sorted(beside.after, key=lambda each: -each.max_rel)
    for each in worst[:MAX_ERRORS_SHOWN]:
        yield Line(f"'{escape(each.name)}': {before[each.name]:.1e} and {each.max_rel:.1e}", "  ", 4)
    if rest := worst[MAX_ERRORS_SHOWN:]:
        yield Line(f"{counted(len(rest), 'more output')}: at most {rest[0].max_rel:.1e} optimized", "  ", 4)
    if beside.note:
        yield Line(escape(beside.note), "  ", 4)
