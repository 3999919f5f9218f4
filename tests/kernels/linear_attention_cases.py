"""Nodes of linear attention and of causal convolutions: their operands, and the results in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from described import described

from onnxfuse.runtime.plan import FusedNode, Launch, Plan, TensorSpec

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A linear attention; `k_heads` None: as many as of queries or, if they are fewer, of states."""

    length: int
    batch: int = 1
    heads: int = 2  # of queries
    state_heads: int = 2
    k_heads: int | None = None
    size: int = 16
    value_size: int = 16
    rule: str = "gated_delta"
    dtype: str = "float32"
    state_dtype: str = ""  # "": as the others
    past: bool = True
    row_decays: bool = False
    one_beta: bool = False
    scale: float = 0.0
    aligned: bool = True
    present: bool = True  # whether the last state is an output
    by_head: bool = False  # whether operands and results have an axis of heads
    lowest: float = 0.3  # decays are at least minus this; below -100, some are minus infinity
    extreme: str = ""  # a key of EXTREMES
    net: str = ""  # of gated_delta_net: "batch" if sequences have an axis, "tokens" if not

    @property
    def key_heads(self) -> int:
        return min(self.heads, self.state_heads) if self.k_heads is None else self.k_heads

    def inputs(self, seed: int = 0) -> Arrays:
        rng = np.random.default_rng(seed)
        rows, kind = (self.batch, self.length), NUMPY[self.dtype]

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal((*rows, *shape))

        keys = normal(self.key_heads, self.size)
        keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
        found = {
            "query": normal(self.heads * self.size),
            "key": keys.reshape(*rows, self.key_heads * self.size),
            "value": normal(self.state_heads * self.value_size),
        }
        if self.past:
            shape = self.batch, self.state_heads, self.size, self.value_size
            found["past_state"] = rng.standard_normal(shape).astype(NUMPY[self.state_dtype or self.dtype])
        if "gated" in self.rule:
            decays = self.state_heads * (self.size if self.row_decays else 1)
            found["decay"] = -self.lowest * rng.random((*rows, decays)) ** 2
            if self.lowest > 100:
                found["decay"][rng.random((*rows, decays)) < 0.2] = -np.inf
        if "delta" in self.rule:
            found["beta"] = rng.random((*rows, 1 if self.one_beta else self.state_heads))
        made = {name: x if name == "past_state" else x.astype(kind) for name, x in found.items()}
        if self.extreme:
            EXTREMES[self.extreme](made)
        by_head = self.by_head or self.net
        heads = {"query": self.heads, "key": self.key_heads, "value": self.state_heads} if by_head else {}
        made |= {name: made[name].reshape(*rows, count, -1) for name, count in heads.items()}
        return self._of_net(made) if self.net else made

    def _of_net(self, made: Arrays) -> Arrays:
        """Return operands as gated_delta_net has them: transposed states, and decays and rates of float32."""
        found = {name: x.astype(np.float32) if name in ("decay", "beta") else x for name, x in made.items()}
        found["past_state"] = made["past_state"].astype(np.float32).swapaxes(2, 3).copy()
        if self.row_decays:
            found["decay"] = found["decay"].reshape(*found["key"].shape[:2], self.state_heads, self.size)
        if self.net == "tokens":
            found = {name: x if name == "past_state" else x.reshape(-1, *x.shape[2:]) for name, x in found.items()}
        return found

    def attributes(self) -> dict[str, Any]:
        return {
            "q_num_heads": self.heads, "kv_num_heads": self.state_heads, "update_rule": self.rule, "scale": self.scale,
        }  # fmt: skip

    def node(self) -> FusedNode:
        inputs = described(self)
        if self.net:
            sizes = {
                "heads": self.heads,
                "size": self.size,
                "kv_heads": self.state_heads,
                "value_size": self.value_size,
            }
            ranks = {"output_ranks": [len(inputs["query"][0]), 4], "batch": self.batch}
            said = {"update_rule": self.rule, "scale": self.scale} | ranks
            return FusedNode("gated_delta_net", "node", tuple(inputs), sizes | said, (self.dtype, "float32"))
        attributes = self.attributes() | {
            "width": self.heads * self.size, "key_width": self.key_heads * self.size,
            "value_width": self.state_heads * self.value_size, "results_by_head": int(self.by_head),
        }  # fmt: skip
        for operand, name in ("decay", "decays"), ("beta", "rates"):
            if operand in inputs:
                attributes[name] = inputs[operand][0][2]
        dtypes = (self.dtype, self.state_dtype or self.dtype)[: 1 + self.present]
        return FusedNode("linear_attention", "node", tuple(inputs), attributes, dtypes)

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(*each, self.aligned) for each in described(self).values()]


def _place(inputs: Arrays) -> np.ndarray:
    """Return the place of each token of a sequence in its part or chunk."""
    return np.arange(inputs["key"].shape[1])[:, None] % 64


def _products_overflow(inputs: Arrays) -> None:
    """The product of a part's decays overflows while the state is 0."""
    place = _place(inputs)
    inputs["decay"][:] = np.where(place == 63, -np.inf, np.where(place < 50, 2, inputs["decay"]))
    inputs["key"][:] = np.where((place < 50) | (place == 63), 0, inputs["key"])


def _products_underflow(inputs: Arrays) -> None:
    """The product of a part's decays leaves the range of fp32 and returns, while a large state does not."""
    place = _place(inputs)
    inputs["decay"][:] = np.where(place < 25, -4, np.where(place < 50, 4, 0))
    inputs["key"][:] = np.where(place < 50, 0, inputs["key"])
    inputs["past_state"] *= 1e10


def _parts_overflow(inputs: Arrays) -> None:
    """What the tokens of a part add to a state overflows, but the state does not, which begins with the opposite."""
    token = np.arange(inputs["key"].shape[1])[:, None]
    inputs["key"][:] = np.where(token % 64 < 2, 1, 0)
    largest = 2e4 if inputs["value"].dtype == np.float16 else 2e38
    inputs["value"][:] = np.where(token // 64 % 2, -largest, largest)
    inputs["past_state"][:] = -largest
    inputs["query"][:] *= 1e-3


def _scores_overflow(inputs: Arrays) -> None:
    """Products of queries and keys overflow, but states and results do not."""
    if inputs["key"].dtype == np.float32:
        inputs["key"] *= 1e20
        inputs["query"] *= 1e20
        inputs["value"] *= 1e-30


def _states_overflow_in_half_precision(inputs: Arrays) -> None:
    """States are beyond the range of float16, and results are not."""
    inputs["past_state"] *= 1e6
    inputs["query"] *= 1e-3


EXTREMES = {
    "products overflow": _products_overflow,
    "products underflow": _products_underflow,
    "parts overflow": _parts_overflow,
    "scores overflow": _scores_overflow,
    "states overflow": _states_overflow_in_half_precision,
}


def expected(case: Case, inputs: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Return the results and the state after the last token, computed token after token in float64."""
    wide = {name: x.astype(np.float64) for name, x in inputs.items()}
    rows, heads = (case.batch, case.length), max(case.heads, case.state_heads)
    q = wide["query"].reshape(*rows, case.heads, case.size).repeat(heads // case.heads, axis=2)
    k = wide["key"].reshape(*rows, case.key_heads, case.size).repeat(case.state_heads // case.key_heads, axis=2)
    v = wide["value"].reshape(*rows, case.state_heads, case.value_size)
    state = wide.get("past_state", np.zeros((case.batch, case.state_heads, case.size, case.value_size))).copy()
    if case.net:
        wide |= {name: x.reshape(*rows, -1) for name, x in wide.items() if name in ("decay", "beta")}
        state = state.swapaxes(2, 3).copy()
    y = np.zeros((*rows, heads, case.value_size))
    for t in range(case.length):
        if "decay" in wide:
            decays = np.exp(wide["decay"][:, t])
            state *= decays.reshape(case.batch, case.state_heads, case.size if case.row_decays else 1, 1)
        added = v[:, t]
        if "beta" in wide:
            added = wide["beta"][:, t, :, None] * (added - np.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state += k[:, t, ..., None] * added[:, :, None, :]
        y[:, t] = np.einsum("bhkv,bhk->bhv", state.repeat(heads // case.state_heads, axis=1), q[:, t])
    y *= case.scale or case.size**-0.5
    if case.net:
        return y.reshape(*inputs["value"].shape[:-2], heads, case.value_size), state.swapaxes(2, 3)
    return y if case.by_head else y.reshape(*rows, heads * case.value_size), state


# Relative to the largest result of a case. In chunks, computed operands of products are rounded too.
SLACK = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2.5e-2}
SLACK_IN_TF32 = 1.5e-3


def slack_of(plan: Plan, dtype: str) -> float:
    """Return the largest error of a plan's results."""
    in_tf32 = any(isinstance(step, Launch) and step.kernel.defines.get("TF32") for step in plan.steps)
    return SLACK_IN_TF32 if in_tf32 else SLACK[dtype]


def check(case: Case, inputs: Arrays, plan: Plan | None, *outputs: np.ndarray) -> None:
    """Compare the results of a plan or of onnxruntime, and the states unless the case has none, with float64."""
    slack = slack_of(plan, case.dtype) if plan else SLACK[case.dtype]
    assert len(outputs) == 1 + case.present
    for found, right in zip(outputs, expected(case, inputs), strict=False):
        assert found.shape == right.shape
        assert np.isfinite(found.astype(np.float64)).all()
        if found.size:
            error = np.abs(found.astype(np.float64) - right).max() / max(1e-30, np.abs(right).max())
            assert error <= slack, f"{case}: {error}"


TOKENS = {
    "one_token": Case(1, batch=2),
    "one_token_of_half_precision": Case(1, batch=2, dtype="float16", size=32, value_size=40),
    "several_tokens": Case(37, size=24, value_size=20),
    "no_past": Case(5, past=False, size=20, value_size=3),
    "no_tokens": Case(0, batch=2),
    "no_sequences": Case(70, batch=0),
    "linear": Case(7, rule="linear", size=10, value_size=6, scale=0.7),
    "gated": Case(7, rule="gated"),
    "gated_by_rows": Case(7, rule="gated", row_decays=True, size=24, state_dtype="float32", dtype="bfloat16"),
    "delta": Case(7, rule="delta", one_beta=True),
    "gated_delta_by_rows": Case(21, row_decays=True, one_beta=True, size=12),
    "groups": Case(9, heads=6, state_heads=2),
    "fewer_queries": Case(9, heads=2, state_heads=6, batch=3),
    "one_key": Case(9, heads=4, state_heads=4, k_heads=1, value_size=18, dtype="float16"),
    "wide": Case(3, size=200, value_size=70),
    "very_wide": Case(2, size=600, value_size=5, heads=1, state_heads=1),
    "misaligned": Case(4, aligned=False, dtype="float16"),
    "underflow": Case(40, lowest=3000.0),
    "past_without_present": Case(4, dtype="float16", present=False),
    "chunks_of_a_model": Case(9, rule="gated", heads=1, state_heads=4, past=False, present=False, by_head=True),
    "net_of_one_token": Case(1, batch=3, heads=1, size=64, value_size=24, net="batch"),
    "net_of_several_tokens": Case(7, state_heads=4, size=20, net="tokens"),
    "net_of_row_decays": Case(9, batch=2, row_decays=True, size=32, value_size=8, net="batch"),
    "large_net_of_row_decays": Case(3, row_decays=True, size=640, heads=1, state_heads=1, net="batch"),
    "net_by_delta": Case(5, rule="delta", net="batch"),
    "misaligned_net": Case(4, aligned=False, size=32, net="batch", dtype="float16"),
}

CHUNKS = {
    "one_chunk": Case(64),
    "part_of_a_chunk": Case(33, size=32, value_size=48),
    "two_chunks": Case(127, size=48, value_size=32, batch=2),
    "three_chunks": Case(150, heads=1, state_heads=1, size=64),
    "linear": Case(70, rule="linear", scale=0.7, size=32),
    "gated": Case(130, rule="gated", past=False, state_dtype="float32"),
    "delta": Case(70, rule="delta", one_beta=True),
    "groups": Case(70, heads=4, state_heads=2),
    "fewer_queries": Case(70, heads=1, state_heads=3, batch=2),
    "fewer_keys": Case(65, heads=4, state_heads=4, k_heads=2, value_size=64),
    "underflow": Case(140, lowest=3000.0),
    "past_without_present": Case(70, present=False),
    "chunks_of_a_model": Case(70, rule="gated", heads=1, state_heads=4, past=False, present=False, by_head=True),
    "strong_decays": Case(140, lowest=60.0),
    "large": Case(100, size=128, value_size=128, heads=1, state_heads=1, state_dtype="float32"),
    "products_overflow": Case(182, past=False, extreme="products overflow", heads=4, value_size=32),
    "products_underflow": Case(130, rule="gated", extreme="products underflow", state_dtype="float32", scale=1e-8),
    "states_overflow": Case(70, extreme="states overflow", state_dtype="float32", one_beta=True, size=48),
    "net": Case(70, heads=1, state_heads=2, size=32, value_size=48, net="tokens"),
    "net_by_tokens": Case(70, extreme="states overflow", state_dtype="float32", size=48, net="batch"),
}

# Sequences that are split into parts of 64 tokens.
PARTS = {
    "two_parts": Case(128, rule="gated", batch=2, state_dtype="float32"),
    "parts_of_rows": Case(145, rule="gated", row_decays=True, size=24, value_size=20, heads=1, lowest=3.0),
    "parts_without_decays": Case(200, rule="linear", size=32, past=False),
    "parts_of_a_model": Case(600, rule="gated", heads=1, state_heads=4, past=False, present=False, by_head=True),
    "past_without_present": Case(600, rule="linear", dtype="float16", present=False),
    "strong_decays": Case(140, rule="gated", lowest=3000.0, size=32, value_size=8, heads=4),
    "products_overflow": Case(182, rule="gated", past=False, extreme="products overflow", heads=4),
    "products_of_rows_underflow": Case(
        130, rule="gated", row_decays=True, extreme="products underflow", state_dtype="float32", scale=1e-8
    ),
    "parts_overflow": Case(200, rule="linear", extreme="parts overflow", state_dtype="float32", scale=1.0),
    "parts_of_groups": Case(
        129, rule="gated", batch=2, heads=6, state_heads=3, k_heads=1, size=48, value_size=80, lowest=20.0
    ),
    "scores_overflow": Case(130, rule="gated", extreme="scores overflow", past=False),
    "parts_of_a_net": Case(145, rule="gated", batch=2, net="batch", size=32, value_size=24),
    "parts_of_odd_rows": Case(145, rule="gated", net="batch", size=33, row_decays=True, dtype="float16"),
}

# Float32 sequences: a block computes some columns of the values, 32 tokens at a time.
STEPS = {
    "part_of_a_step": Case(17, rule="gated", value_size=32),
    "several_steps": Case(100, rule="gated", size=128, value_size=32, batch=2, heads=4, k_heads=1),
    "steps_without_present": Case(64, rule="linear", present=False, size=32, value_size=96),
    "steps_underflow": Case(70, rule="gated", lowest=3000.0, value_size=64, state_heads=1, past=False),
    "steps_of_a_net": Case(40, rule="gated", batch=2, net="batch", value_size=32),
}


@dataclass(frozen=True)
class Conv:
    """A causal convolution."""

    length: int
    size: int = 4
    batch: int = 2
    channels: int = 5
    dtype: str = "float32"
    bias: bool = True
    past: bool = True
    activation: str = "silu"
    aligned: bool = True

    def inputs(self, seed: int = 0) -> Arrays:
        rng = np.random.default_rng(seed)
        shapes: dict[str, tuple[int, ...]] = {
            "x": (self.batch, self.channels, self.length), "weight": (self.channels, 1, self.size),
        }  # fmt: skip
        if self.bias:
            shapes["bias"] = (self.channels,)
        if self.past:
            shapes["past_state"] = (self.batch, self.channels, self.size - 1)
        return {name: rng.standard_normal(shape).astype(NUMPY[self.dtype]) for name, shape in shapes.items()}

    def node(self) -> FusedNode:
        attributes = {"size": self.size, "activation": self.activation}
        return FusedNode("causal_conv_with_state", "node", tuple(self.inputs()), attributes, (self.dtype,) * 2)

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(x.shape, x.dtype.name, self.aligned) for x in self.inputs().values()]


def check_conv(case: Conv, inputs: Arrays, y: np.ndarray, state: np.ndarray) -> None:
    """Compare results with float64; states are copies."""
    before = inputs.get("past_state", np.zeros((case.batch, case.channels, case.size - 1), NUMPY[case.dtype]))
    z = np.concatenate([before, inputs["x"]], axis=2)
    wide, weight = z.astype(np.float64), inputs["weight"].astype(np.float64)
    right = sum(weight[:, 0, i, None] * wide[:, :, i : i + case.length] for i in range(case.size))
    right = right + (inputs["bias"].astype(np.float64)[:, None] if case.bias else 0)
    if case.activation != "none":
        right = right / (1 + np.exp(-right))
    np.testing.assert_allclose(y.astype(np.float64), right, rtol=2 * SLACK[case.dtype], atol=1e-5)
    np.testing.assert_array_equal(state, z[:, :, z.shape[2] - case.size + 1 :])


CONVS = {
    "one_column": Conv(1),
    "no_columns": Conv(0),
    "no_sequences": Conv(9, batch=0),
    "fewer_columns_than_the_state": Conv(2, bias=False),
    "odd": Conv(37, activation="none", dtype="float16"),
    "no_past": Conv(24, past=False, dtype="bfloat16"),
    "long_filter": Conv(40, size=12),
    "filter_of_one": Conv(9, size=1),
    "misaligned": Conv(16, aligned=False, dtype="float16", activation="swish"),
}
