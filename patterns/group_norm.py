"""GroupNorm of channels-first tensors, and the SiLU that follows it in diffusion models."""

from typing import Any

from onnxfuse.dsl import (
    Term,
    choose,
    either,
    filled,
    fusion,
    given,
    op,
    rearrange,
    require,
    scalar,
    size,
    tensor,
    weight,
    wide,
)
from onnxfuse.patterns._activations import silu

RANKS = 2, 3, 4, 5  # of (n, channels, …)


def of_rank(axes: int, value: Term) -> Term:
    """A spelling that only tensors of that rank have."""
    return given(value, f"x has {axes} axes", lambda rank: rank == axes)


def standardized(rows: Term, axes: list[int], epsilon: Any) -> Term:
    """(rows - mean) / sqrt(var + epsilon)."""
    wide_rows = wide(rows)
    centred = wide_rows - op.ReduceMean(wide_rows, axes=axes)
    return centred / op.Sqrt(op.ReduceMean(centred**2, axes=axes) + epsilon)


def per_channel(value: Term) -> Term:
    """A weight with an axis of size one for each axis of x after the channels."""
    layouts = [(rank, first + "channels" + " 1" * (rank - 2)) for rank in RANKS for first in ("", "1 ")]
    return either(*(of_rank(rank, rearrange(value, f"{axes} -> {axes}")) for rank, axes in layouts))


@fusion(out="n channels ...", casts=True)
def group_norm(
    x=tensor("n channels ..."),
    scale=weight(),
    bias=weight(),
    epsilon=scalar(default=1e-5),
):
    """y = activation((x - mean) / sqrt(var + epsilon) * scale + bias), mean and variance of each group of channels

    Wu and He 2018, arXiv:1803.08494.
    """
    require("{channels} channels make {groups} groups", lambda channels, groups: channels % groups == 0)
    require(
        "{channels} channels make {groups} groups of {size}",
        lambda channels, groups, size: size is None or channels == groups * size,
    )
    rows = rearrange(x, "n (groups size) ... -> n groups (size ...)")
    ones, zeros = filled(1, "groups"), filled(0, "groups")
    normal = either(op.InstanceNormalization(rows, ones, zeros, epsilon=epsilon), standardized(rows, [-1], epsilon))
    split = rearrange(x, "n (groups size) ... -> n groups size ...")
    image = either(
        rearrange(normal, "n groups (size ...) -> n (groups size) ..."),
        op.Reshape(normal, op.Shape(x)),
        *(
            of_rank(rank, rearrange(standardized(split, axes, epsilon), "n groups size ... -> n (groups size) ..."))
            for rank in RANKS[1:]
            if (axes := list(range(2, rank + 1)))
        ),
    )
    operator = op.GroupNormalization(
        x, rearrange(scale, "channels -> channels"), rearrange(bias, "channels -> channels"),
        num_groups=size("groups"), epsilon=epsilon,
    )
    normalized = choose(
        "scale_layout",
        broadcast=per_channel(bias) + per_channel(scale) * image,  # in the order that rules most out soonest
        channels=given(
            operator, "the operator of opset 18, with a scale for each group, is deprecated", lambda opset: opset >= 21
        ),
    )
    return choose("activation", silu=silu(normalized), none=normalized)
