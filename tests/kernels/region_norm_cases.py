"""Norms in the region of what precedes them, or of what moves their rows: programs, and what they are in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from region_drafts import Made, RegionProgram, made, numbers
from region_speed_cases import layer_norm

WINDOWS = (2, 2, 2, 3, 3)  # images of 2 x 2 windows of 3 x 3
PERM = (0, 1, 3, 2, 4, 5)


@dataclass(frozen=True)
class NormInRegion:
    """A program of operands, whose outputs are a norm and what it is of; `reference` gives the latter in float64."""

    name: str
    operands: tuple[np.ndarray, ...]
    build: Callable[..., tuple[str, str]]  # of a program and operands, the value that is normed and the norm
    reference: Callable[..., np.ndarray]
    gives_both: bool = True
    dynamic: tuple[int, ...] = ()

    def made(self) -> Made:
        """Return the program."""

        def outputs(program: RegionProgram, *names: str) -> list[str]:
            value, norm = self.build(program, *names)
            return [norm, value] if self.gives_both else [norm]

        return made(self.name, self.operands, outputs, self.dynamic)

    def expected(self) -> list[np.ndarray]:
        """Return the outputs in float64; the norm has no weights, and an epsilon of a quarter."""
        value = self.reference(*(each.astype(np.float64) if each.dtype.kind in "fV" else each
                                 for each in self.operands))  # fmt: skip
        centred = value - value.mean(-1, keepdims=True)
        norm = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.25)
        return [norm, value] if self.gives_both else [norm]


def _tokens(p: RegionProgram, first: str, tokens: str, places: str) -> tuple[str, str]:
    value = p.op("Add", p.op("Concat", first, tokens, axis=1), places)
    return value, layer_norm(p, value, [2])


def _put_back(p: RegionProgram, windows: str, residual: str) -> tuple[str, str]:
    split = p.op("Reshape", windows, shape=[*WINDOWS, 24])
    rows = p.op("Reshape", p.op("Transpose", split, perm=list(PERM)), shape=[2, 36, 24])
    value = p.op("Add", rows, residual)
    return value, layer_norm(p, value, [2])


def _moved(p: RegionProgram, x: str) -> tuple[str, str]:
    split = p.op("Reshape", x, shape=[2, 2, 3, 2, 3, 40])
    value = p.op("Reshape", p.op("Transpose", split, perm=list(PERM)), shape=[8, 9, 40])
    return value, layer_norm(p, value, [2])


def _rows_of_a_table(p: RegionProgram, at: str, table: str, places: str) -> tuple[str, str]:
    value = p.op("Add", p.op("Gather", table, at, axis=0), places)
    return value, layer_norm(p, value, [2])


def _masked(p: RegionProgram, x: str, mask: str) -> tuple[str, str]:
    value = p.op("Where", mask, x, p.op("Constant", dtype="float16", value=0), dtype="float16")
    return value, layer_norm(p, value, [2])


def cases() -> Iterator[NormInRegion]:
    """Yield the cases."""
    tokens = numbers((2, 1, 40), "float16", 1), numbers((2, 5, 40), "float16", 2), numbers((6, 40), "float16", 3)
    for dynamic in ((), (2,)):
        d = ", dynamic" if dynamic else ""
        yield NormInRegion(f"norm of class tokens and positions{d}", tokens, _tokens,
                           lambda a, b, c: np.concatenate([a, b], 1) + c, dynamic=dynamic)  # fmt: skip
    back = numbers((8, 9, 24), "bfloat16", 1), numbers((2, 36, 24), "bfloat16", 2)
    yield NormInRegion("norm of windows that are put back, and a residual", back, _put_back, lambda windows, residual: (
        windows.reshape(*WINDOWS, 24).transpose(PERM).reshape(2, 36, 24) + residual))  # fmt: skip
    yield NormInRegion("norm of moved rows", (numbers((2, 36, 40), "float32", 1),), _moved, lambda x: (
        x.reshape(2, 2, 3, 2, 3, 40).transpose(PERM).reshape(8, 9, 40)), gives_both=False)  # fmt: skip
    at, table = np.random.default_rng(1).integers(-9, 9, (2, 5)), numbers((9, 264), "float16", 1)
    yield NormInRegion("norm of rows of a table", (at, table, numbers((5, 264), "float16", 2)), _rows_of_a_table,
                       lambda at, table, places: table[at] + places, dynamic=(5,))  # fmt: skip
    masked = numbers((2, 5, 72), "float16", 1), numbers((2, 5, 1), "int64", 2) > 0
    yield NormInRegion("norm of masked rows", masked, _masked, lambda x, mask: np.where(mask, x, 0), gives_both=False)


def norms() -> Iterator[Made]:
    """Yield the programs by name."""
    yield from (case.made() for case in cases())
