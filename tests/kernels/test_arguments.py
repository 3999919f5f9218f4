"""Structs that kernels take as arguments: their members lie where C has them."""

from __future__ import annotations

import ctypes

import pytest

from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.tensors import float32, int32, int64, struct
from onnxfuse.runtime.plan import Pointer, Struct
from onnxfuse.testing.emulated_launches import value_of


class Member(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_longlong * 3)]


class Whole(ctypes.Structure):
    _fields_ = [("first", Member), ("rows", ctypes.c_int), ("second", Member), ("scale", ctypes.c_float)]


def test_members_lie_where_c_has_them() -> None:
    first, second = (HeadTensor(Pointer("input", i), i + 30, i + 20, i + 10).argument for i in (1, 2))
    laid_out = value_of(struct(first, *int32(7), second, *float32(0.5)), lambda pointer: 1000 * pointer.index)
    found = Whole.from_buffer_copy(bytes(laid_out))
    assert ctypes.sizeof(laid_out) == ctypes.sizeof(Whole)
    assert (found.first.data, [*found.first.strides]) == (1000, [31, 21, 11])
    assert (found.rows, found.scale) == (7, 0.5)
    assert (found.second.data, [*found.second.strides]) == (2000, [32, 22, 12])


def test_a_member_that_c_would_pad_is_refused() -> None:
    with pytest.raises(ValueError, match="a member of a struct has fields of 32 bits"):
        struct(Struct((*int64(1), *int32(2))), *int32(3))
