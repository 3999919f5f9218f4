"""GroupNorm and InstanceNorm of channels-first tensors, and the SiLU that follows a GroupNorm in diffusion models."""

from onnxfuse.dsl import (
    Term,
    choose,
    either,
    float32,
    full,
    fusion,
    op,
    rearrange,
    require,
    scalar,
    size,
    stored,
    tensor,
    weight,
    when,
)
from onnxfuse.patterns._activations import silu

RANKS = 2, 3, 4, 5  # ranks of x, which is (n, channels, …)


def of_rank(axes: int, value: Term) -> Term:
    """Return `value` as a term that matches only if the fusion's x has `axes` axes."""
    return when(value, f"x has {axes} axes", lambda rank: rank == axes)


def standardized(rows: Term, axes: list[int], epsilon: Term) -> Term:
    """Return (rows - mean) / sqrt(var + epsilon) over the given axes."""
    rows32 = float32(rows)
    centred = rows32 - op.ReduceMean(rows32, axes=axes)
    return centred / op.Sqrt(op.ReduceMean(centred**2, axes=axes) + epsilon)


def standardized_groups(x: Term, epsilon: Term) -> Term:
    """Return x with each group of channels normalized to mean 0 and variance 1."""
    rows = rearrange(x, "n (groups size) ... -> n groups (size ...)")
    ones, zeros = full(1, "groups"), full(0, "groups")
    normalized_rows = either(
        op.InstanceNormalization(rows, ones, zeros, epsilon=epsilon), standardized(rows, [-1], epsilon)
    )
    split = rearrange(x, "n (groups size) ... -> n groups size ...")
    return either(
        rearrange(normalized_rows, "n groups (size ...) -> n (groups size) ..."),
        op.Reshape(normalized_rows, op.Shape(x)),
        *(
            of_rank(rank, rearrange(standardized(split, axes, epsilon), "n groups size ... -> n (groups size) ..."))
            for rank in RANKS[1:]
            if (axes := list(range(2, rank + 1)))
        ),
    )


def per_channel(value: Term, to: str = "") -> Term:
    """Return a weight per channel, in a shape that broadcasts to x; with `to`, it is rearranged to these axes."""
    layouts = [(rank, first + "channels" + " 1" * (rank - 2)) for rank in RANKS for first in ("", "1 ")]
    return either(*(of_rank(rank, rearrange(value, f"{axes} -> {to or axes}")) for rank, axes in layouts))


@fusion(out="n channels ...", casts=True, channels_last=["x"], epilogue=True)
def group_norm(
    x: Term = tensor("n channels ..."),
    scale: Term = weight(),
    bias: Term = weight(),
    epsilon: Term = scalar(if_absent=1e-5),
) -> Term:
    """y = activation((x - mean) / sqrt(var + epsilon) * scale + bias), with the mean and var of each group of channels

    Wu and He 2018, arXiv:1803.08494.  An InstanceNorm (Ulyanov et al. 2016, arXiv:1607.08022) has as many groups as
    channels.
    """
    require(
        "there are {channels} channels; required a multiple of {groups} groups",
        lambda channels, groups: groups and channels % groups == 0,
    )
    require(
        "there are {channels} channels; required {groups} groups of {size}",
        lambda channels, groups, size: size is None or channels == groups * size,
    )
    require(
        "an InstanceNorm has as many groups as channels",
        lambda scale_layout, channels, groups: "instances" not in scale_layout or channels == groups,
    )
    spatial = standardized_groups(x, epsilon)

    def group_operator(scale: Term, bias: Term) -> Term:
        node = op.GroupNormalization(x, scale, bias, num_groups=size("groups"), epsilon=epsilon)
        sentence = "the operator of opset 18, with a scale for each group, is deprecated"
        return when(node, sentence, lambda opset: opset >= 21)

    instances = rearrange(x, "n groups ... -> n groups ...")

    def instance_operator(scale: Term, bias: Term) -> Term:
        node = op.InstanceNormalization(instances, scale, bias, epsilon=epsilon)
        return when(node, "x has spatial axes", lambda rank: rank > 2)

    instance = either(
        instance_operator(full(1, "channels"), full(0, "channels")),
        *(of_rank(rank, standardized(instances, list(range(2, rank)), epsilon)) for rank in RANKS[1:]),
    )
    by_channel = rearrange(scale, "channels -> channels"), rearrange(bias, "channels -> channels")
    reshaped = per_channel(scale, "channels"), per_channel(bias, "channels")
    broadcast_scale, broadcast_bias = per_channel(scale), per_channel(bias)
    normalized = choose(
        "scale_layout",
        broadcast=stored(
            broadcast_bias + broadcast_scale * spatial,  # the bias is matched first, because most other Adds fail there
            standard=group_operator(*reshaped),
        ),
        channels=group_operator(*by_channel),
        instances=instance_operator(*by_channel),
        broadcast_instances=stored(
            broadcast_bias + broadcast_scale * instance,
            ort=instance_operator(*reshaped),
            standard=instance_operator(*reshaped),
        ),
    )
    return choose("activation", silu=silu(normalized), none=normalized)
