"""LSTM, GRU and RNN nodes: their operands, and their results in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from attention_cases import NUMPY
from described import described
from onnx import helper

from onnxfuse.activations import ACTIVATIONS, activations_of_recurrence
from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.kernels.recurrent.host import GATES, USUAL
from onnxfuse.runtime.plan import FusedNode, TensorSpec

Arrays = dict[str, np.ndarray]
Rounding = Callable[[np.ndarray], np.ndarray]
# The inputs of the operators by the names of operands, in order.
INPUTS = ("x", "w", "r", "bias", "sequence_lens", "initial_h", "initial_c", "peepholes")
WEIGHTS = {"w", "r", "bias", "peepholes"}


ERRORS = {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of results, if nothing before them was rounded
MOST_ERRORS = 4  # as many times the largest error of the operator with rounded products and states


def nearest_tf32(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


@dataclass(frozen=True)
class Case:
    """A layer; `extra` names its optional operands."""

    fusion: str = "lstm"
    steps: int = 5
    batch: int = 2
    inputs: int = 8
    hidden: int = 6
    direction: str = "forward"
    extra: tuple[str, ...] = ("bias",)
    lengths: tuple[int, ...] | None = None
    attributes: tuple[tuple[str, Any], ...] = ()
    outputs: int = 3
    dtype: str = "float32"
    aligned: bool = True
    scale: float = 0.5  # of all values; weights of many columns are smaller
    seed: int = 0

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def count(self) -> int:
        """The number of outputs."""
        return min(self.outputs, 3 if self.fusion == "lstm" else 2)

    def operator_attributes(self) -> dict[str, Any]:
        return {"hidden_size": self.hidden, "direction": self.direction, **dict(self.attributes)}

    def node(self) -> FusedNode:
        given = self.operator_attributes()
        if "activations" in given:
            given["activations"] = " ".join(given["activations"])
        given |= {"hidden": self.hidden, "directions": self.directions}
        return FusedNode(self.fusion, "n", tuple(described(self)), given, (self.dtype,) * self.count)

    def specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(shape, dtype, self.aligned, name in WEIGHTS) for name, (shape, dtype) in described(self).items()
        ]

    def arrays(self) -> Arrays:
        """Return the present operands, in order."""
        random, gates = np.random.default_rng(self.seed), GATES[self.fusion]
        state = (self.directions, self.batch, self.hidden)
        rows = gates * self.hidden
        shapes = {
            "x": (self.steps, self.batch, self.inputs), "w": (self.directions, rows, self.inputs),
            "r": (self.directions, rows, self.hidden), "bias": (self.directions, 2 * rows), "initial_h": state,
            "initial_c": state, "peepholes": (self.directions, 3 * self.hidden),
        }  # fmt: skip
        scales = {name: self.scale / max(1, math.sqrt(shapes[name][-1] / 16)) for name in ("w", "r")}
        drawn = {name: (random.standard_normal(shape) * scales.get(name, self.scale)).astype(NUMPY[self.dtype])
                 for name, shape in shapes.items()}  # fmt: skip
        if self.lengths is not None:
            drawn["sequence_lens"] = np.array(self.lengths, np.int32)
        wanted = {"x", "w", "r", "sequence_lens", *self.extra}
        return {name: drawn[name] for name in INPUTS if name in wanted and name in drawn}

    def model(self) -> onnx.ModelProto:
        """Return a model of the operator."""
        arrays = self.arrays()
        names = [name if name in arrays else "" for name in INPUTS]
        outputs = ["y", "y_h", "y_c"][: self.count]
        infos = [helper.make_tensor_value_info(n, DTYPE_NUMBERS[v.dtype.name], v.shape) for n, v in arrays.items()]
        results = [helper.make_tensor_value_info(name, DTYPE_NUMBERS[self.dtype], None) for name in outputs]
        inputs = names if self.fusion == "lstm" else names[:6]
        node = helper.make_node(self.fusion.upper(), inputs, outputs, **self.operator_attributes())
        graph = helper.make_graph([node], "g", infos, results)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)

    def expect(self) -> list[np.ndarray]:
        """Return the outputs in float64."""
        return self._outputs(np.float64, lambda values: values)

    def usual(self, tf32: bool) -> list[np.ndarray]:
        """Return the outputs in float32, with products of inputs and states rounded to the dtype, or to TF32."""
        rounded = nearest_tf32 if tf32 else lambda values: values.astype(NUMPY[self.dtype]).astype(np.float32)
        return self._outputs(np.float32, rounded)

    def _outputs(self, kind: type, rounded: Rounding) -> list[np.ndarray]:
        arrays = {name: value if name == "sequence_lens" else value.astype(kind)
                  for name, value in self.arrays().items()}  # fmt: skip
        y = np.zeros((self.steps, self.directions, self.batch, self.hidden))
        last = np.zeros((2, self.directions, self.batch, self.hidden))
        for d in range(self.directions):
            own = {name: value[d] for name, value in arrays.items() if name not in ("x", "sequence_lens")}
            for b in range(self.batch):
                length = self.steps if self.lengths is None else self.lengths[b]
                h = own["initial_h"][b] if "initial_h" in own else np.zeros(self.hidden, kind)
                c = own["initial_c"][b] if "initial_c" in own else np.zeros(self.hidden, kind)
                reverse = self.direction == "reverse" or d == 1
                for t in range(length)[:: -1 if reverse else 1]:
                    h, c = self._step(own, arrays["x"][t, b], h, c, rounded)
                    y[t, d, b] = h
                if length:
                    last[:, d, b] = h, c
        return [y, *last][: self.count]

    def check(self, found: Sequence[np.ndarray], right: Sequence[np.ndarray], tf32: bool) -> None:
        """Fail unless the outputs are `right` up to roundings, whose errors grow from step to step."""
        usual = self.usual(tf32 and self.dtype == "float32")
        for values, expected, rounded in zip(found, right, usual, strict=True):
            allowed = ERRORS[self.dtype] * (1 + np.abs(expected)) + MOST_ERRORS * np.abs(rounded - expected).max(
                initial=0
            )
            excess = np.abs(values.astype(np.float64) - expected) - allowed
            assert (excess <= 0).all(), f"{(~(excess <= 0)).sum()} of {excess.size} are wrong by {np.nanmax(excess)}"

    def _step(
        self, own: Arrays, x: np.ndarray, h: np.ndarray, c: np.ndarray, rounded: Rounding
    ) -> tuple[np.ndarray, np.ndarray]:
        given, count = self.operator_attributes(), GATES[self.fusion]
        found = activations_of_recurrence(
            given.get("activations", USUAL[self.fusion]),
            given.get("activation_alpha", ()),
            given.get("activation_beta", ()),
        )
        assert found is not None
        limit = given.get("clip", np.inf)

        def activated(index: int, value: np.ndarray) -> np.ndarray:
            each = found[index]
            return ACTIVATIONS[each.name].formula(value.clip(-limit, limit), each.alpha, each.beta)

        of_w, of_r = np.split(own.get("bias", np.zeros(2 * count * self.hidden, x.dtype)), 2)
        of_x = np.split(rounded(own["w"] @ x) + of_w, count)
        of_h = np.split(own["r"] @ rounded(h) + of_r, count)
        if self.fusion == "lstm":
            p = np.split(own.get("peepholes", np.zeros(3 * self.hidden, x.dtype)), 3)
            i = activated(0, of_x[0] + of_h[0] + p[0] * c)
            f = 1 - i if given.get("input_forget") else activated(0, of_x[2] + of_h[2] + p[2] * c)
            c = f * c + i * activated(1, of_x[3] + of_h[3])
            o = activated(0, of_x[1] + of_h[1] + p[1] * c)
            return o * ACTIVATIONS[found[2].name].formula(c, found[2].alpha, found[2].beta), c
        if self.fusion == "gru":
            z, r = activated(0, of_x[0] + of_h[0]), activated(0, of_x[1] + of_h[1])
            if given.get("linear_before_reset"):
                n = activated(1, of_x[2] + r * of_h[2])
            else:
                n = activated(1, of_x[2] + np.split(own["r"] @ rounded(r * h) + of_r, count)[2])
            return (1 - z) * n + z * h, c
        return activated(0, of_x[0] + of_h[0]), c


STATES = ("bias", "initial_h", "initial_c", "peepholes")


def attributes(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


CASES = {
    "lstm": Case(),
    "no_bias": Case(extra=()),
    "reverse": Case(direction="reverse", lengths=(3, 5), outputs=1),
    "both_directions": Case(direction="bidirectional", extra=STATES, lengths=(0, 4), hidden=17),
    "one_step": Case(steps=1, batch=1, hidden=33, extra=STATES),
    "no_step": Case(steps=0, extra=STATES),
    "many_sequences": Case(batch=21, steps=3, hidden=24),
    "coupled": Case(attributes=attributes(input_forget=1), extra=STATES),
    "clip": Case(attributes=attributes(clip=0.3), extra=STATES, scale=2.0),
    "clip_and_coupled": Case(attributes=attributes(clip=0.3, input_forget=1), scale=2.0),
    "activations": Case(attributes=attributes(activations=["HardSigmoid", "Relu", "Softplus"])),
    "parameters": Case(
        attributes=attributes(
            activations=["Sigmoid", "HardSigmoid", "LeakyRelu"], activation_alpha=[0.3, 0.2], activation_beta=[0.4]
        )
    ),
    "gru": Case("gru", direction="bidirectional", extra=("bias", "initial_h"), lengths=(5, 2)),
    "gru_no_bias": Case("gru", extra=(), hidden=19, outputs=1),
    "gru_linear": Case("gru", extra=("bias", "initial_h"), attributes=attributes(linear_before_reset=1), hidden=40),
    "gru_clip": Case("gru", attributes=attributes(clip=0.3), scale=2.0, hidden=18),
    "gru_linear_clip": Case("gru", attributes=attributes(clip=0.3, linear_before_reset=1), scale=2.0, lengths=(2, 0)),
    "gru_activations": Case("gru", attributes=attributes(activations=["HardSigmoid", "Elu"]), direction="reverse"),
    "rnn": Case("rnn", extra=("bias", "initial_h"), hidden=31),
    "rnn_relu": Case("rnn", direction="bidirectional", attributes=attributes(activations=["Relu", "Relu"])),
    "rnn_clip": Case("rnn", attributes=attributes(clip=0.3), lengths=(3, 1), scale=2.0),
}  # fmt: skip
