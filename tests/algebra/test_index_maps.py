"""Index maps against NumPy: the element of a view is the element of its source at the place that the map gives."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onnxfuse.algebra.index_maps import Place, inverse, reshaped, sliced, squeezed, transposed, unsqueezed
from onnxfuse.algebra.indices import NOTHING, Index, replaced, variable_index
from onnxfuse.algebra.sizes import Size

OPERATORS = ("Transpose", "Reshape", "Slice", "Unsqueeze", "Squeeze")
SHAPES = st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4).map(tuple)


def place_in(shape: tuple[int, ...]) -> Place:
    return tuple(variable_index(str(axis), size) for axis, size in enumerate(shape))


def number(index: Index, at: tuple[int, ...]) -> Size:
    """Return an index where the variables, which are axes, have these values."""
    found = replaced(index, {str(axis): Index(value) for axis, value in enumerate(at)})
    assert not found.terms
    return found.constant


@given(SHAPES, st.data())
def test_chains_of_views_read_what_numpy_reads(shape: tuple[int, ...], data: st.DataObject) -> None:
    source = view = np.arange(math.prod(shape)).reshape(shape)
    steps = []
    for op in data.draw(st.lists(st.sampled_from(OPERATORS), max_size=4)):
        before, rank = view.shape, view.ndim
        if op == "Transpose":
            perm = tuple(data.draw(st.permutations(range(rank))))
            view = view.transpose(perm)
            steps.append(lambda place, perm=perm: transposed(place, inverse(perm)))
            assert view.shape == transposed(before, perm)
        elif op == "Reshape":
            part = math.gcd(view.size, data.draw(st.sampled_from((2, 3, 4, 6))))
            view = view.reshape((part, -1) if data.draw(st.booleans()) else (-1, part))
            steps.append(lambda place, after=view.shape, before=before: reshaped(place, after, before))
        elif op == "Slice":
            axis, step = data.draw(st.integers(0, rank - 1)), data.draw(st.integers(1, 2))
            start = data.draw(st.integers(0, before[axis] - 1))
            view = view[(slice(None),) * axis + (slice(start, None, step),)]
            steps.append(lambda place, axis=axis, start=start, step=step: sliced(place, {axis: (start, step)}))
        elif op == "Unsqueeze":
            axis = data.draw(st.integers(0, rank))
            view = np.expand_dims(view, axis)
            steps.append(lambda place, axis=axis: squeezed(place, (axis,)))
            assert view.shape == unsqueezed(before, (axis,), 1)
        elif 1 in before and rank > 1:
            axis = before.index(1)
            view = view.squeeze(axis)
            steps.append(lambda place, axis=axis: unsqueezed(place, (axis,), NOTHING))
            assert view.shape == squeezed(before, (axis,))
    place = place_in(view.shape)
    for step in reversed(steps):
        place = step(place)
    for at in np.ndindex(view.shape):
        assert view[at] == source[tuple(number(index, at) for index in place)]
