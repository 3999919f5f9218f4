"""Conditions of the recurrent layers of ONNX: LSTM, GRU and RNN, whose fused nodes have the operators as bodies."""

from collections.abc import Sequence
from typing import Final

from onnxfuse.activations import activations_of_recurrence
from onnxfuse.dsl.declaration import require

DIRECTIONS: Final = {"forward": 1, "reverse": 1, "bidirectional": 2}


def require_recurrent_layer(count: int) -> None:
    """Declare the conditions of a layer that has `count` activations in each direction."""
    require(
        "the weights have {directions} directions; required as many as {direction} has",
        lambda direction, directions: DIRECTIONS.get(direction or "forward") == directions,
    )
    require(
        f"the activations are {{activations}}; required {count} that kernels have, the same in each direction",
        lambda activations, activation_alpha, activation_beta, directions: (
            not activations or _are_known(activations, activation_alpha, activation_beta, count, directions)
        ),
    )
    require("clip is {clip}; required more than 0", lambda clip: clip is None or clip > 0)
    require(
        "one dtype of the input, weights, biases and states",
        lambda dtypes: len({dtype for name, dtype in dtypes.items() if name != "sequence_lens"}) == 1,
    )


def _are_known(
    names: Sequence[str], alpha: Sequence[float] | None, beta: Sequence[float] | None, count: int, directions: int
) -> bool:
    """Return whether kernels have the activations.  Names beyond those needed are ignored, as in onnxruntime."""
    found = activations_of_recurrence(names[: count * directions], alpha or (), beta or ())
    return found is not None and len(found) == count * directions and found[:count] == found[-count:]
