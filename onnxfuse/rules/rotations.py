"""Write rotations of pairs (both halves of a head, or adjacent elements) in the two forms that patterns match.

For the first elements a and the second elements b of all pairs in x, the two forms are `x * cos + turned(x) * sin`,
where turned(x) joins -b and a, and the product of complex numbers `a cos - b sin, b cos + a sin`.
"""

from __future__ import annotations

from typing import Final

from onnx import TensorProto

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import attribute, choose, either, float32, known, op, rearrange, shared, tensor, when
from onnxfuse.patterns._rotary import halves, pairs

HEADS: Final = "batch heads rows size"
PART: Final = "batch heads rows pairs"  # shape of the first (or the second) elements of all pairs
TABLE: Final = "batch? heads? rows? size"
HALF_TABLE: Final = "batch? heads? rows? pairs"
ROWS: Final = "1 rows size"
MIDDLE: Final = "heads 1 size"  # a table (rows, 1, size), for an x that is not yet transposed: axis "heads" holds rows
HAS_THREE_AXES: Final = (
    "a table has three axes",
    lambda cos_axes, sin_axes: {cos_axes, sin_axes} != {"plain"},
)
AXES_ARE_INPUTS: Final = "the axes of Squeeze and Unsqueeze must be inputs", lambda opset: opset >= 13
OF_ONE: Final = "a and b must be slices of one tensor", lambda a, b, are_slices_of_one: are_slices_of_one(a, b)
OF_X: Final = "a and b must be slices of x", lambda x, a, b, are_slices_of_one: are_slices_of_one(a, b, of=x)
TWO: Final = "{size} elements are {pairs} pairs", lambda size, pairs: pairs is None or 2 * pairs == size


def _table(name: str, plain: Term, rows: Term, middle: Term) -> tuple[Term, Term]:
    """Return a table of a rotation, and the same table as patterns match it; the choice `<name>_axes` names its shape.

    A table (1, rows, size) loses its first axis.  A table (rows, 1, size) gets an axis for the batch; its axis of size
    1 is the axis of heads, because such a table is multiplied before heads are transposed.
    """
    axes = f"{name}_axes"
    return (
        choose(axes, rows=rows, middle=middle, plain=plain),
        choose(axes, rows=op.Squeeze(rows, axes=[0]), middle=op.Unsqueeze(middle, axes=[0]), plain=plain),
    )


def _by_halves(a: Term, b: Term) -> Term:
    return op.Concat(a, b, axis=-1)


def _by_columns(a: Term, b: Term) -> Term:
    return op.Concat(op.Unsqueeze(a, axes=[-1]), op.Unsqueeze(b, axes=[-1]), axis=-1)


def _by_pairs(a: Term, b: Term) -> Term:
    return rearrange(_by_columns(a, b), f"{PART} 2 -> batch heads rows (pairs 2)")


def _joined(a: Term, b: Term) -> Term:
    """Return the tensor whose pairs have their first elements in a and their second elements in b."""
    return choose("pairs_are", halves=_by_halves(a, b), neighbours=_by_pairs(a, b))


@rewrite(example={"x": (2, 5, 4), "axes": [1]})
def negated_table(x: Term = tensor(), axes: Term = attribute()) -> Rules:
    """The negation of a table moves before its Unsqueeze, so that both tables of a rotation have the same views."""
    require("the axes must be known", lambda axes: axes is not None)
    require("it must be added to tables of heads", lambda rank: rank == 4)
    yield -shared(op.Unsqueeze(x, axes=axes)), op.Unsqueeze(-x, axes=axes)


@rewrite(out="batch heads rows whole")
def negated_half(a: Term = tensor(PART), b: Term = tensor(PART)) -> Rules:
    """A multiplication of half of a head by -1, as Paddle writes it, becomes a Neg."""
    require(*AXES_ARE_INPUTS)
    require(*OF_ONE)
    yield _by_halves(op.Mul(b, -1.0), a), _by_halves(-b, a)
    yield _by_halves(b, op.Mul(a, -1.0)), _by_halves(b, -a)


@rewrite(out=f"{PART} 2")
def negated_column(a: Term = tensor(PART), b: Term = tensor(PART)) -> Rules:
    """A multiplication of one element of each pair of neighbours by -1, as Paddle writes it, becomes a Neg."""
    require(*AXES_ARE_INPUTS)
    require(*OF_ONE)
    yield _by_columns(op.Mul(b, -1.0), a), _by_columns(-b, a)
    yield _by_columns(b, op.Mul(a, -1.0)), _by_columns(b, -a)


@rewrite(out="batch heads rows whole")
def stacked_halves(a: Term = tensor(PART), b: Term = tensor(PART)) -> Rules:
    """Two halves that are stacked as rows and then reshaped to one row, as in KerasHub, are concatenated instead."""
    require(*AXES_ARE_INPUTS)
    stacked = op.Concat(op.Unsqueeze(a, axes=[-2]), op.Unsqueeze(b, axes=[-2]), axis=-2)
    yield rearrange(stacked, "batch heads rows 2 pairs -> batch heads rows (2 pairs)"), _by_halves(a, b)


@rewrite(out="batch heads rows whole")
def signed_table(
    a: Term = tensor(PART), b: Term = tensor(PART), first: Term = tensor(HALF_TABLE), second: Term = tensor(HALF_TABLE)
) -> Rules:
    """Where the swapped halves of x (torch.roll) are multiplied by half-negated sines, half of x is negated instead."""
    require(*AXES_ARE_INPUTS)
    require(*OF_ONE)
    require("the sines must be tables", lambda a, first, second, is_table: is_table(first, a) and is_table(second, a))
    yield (
        op.Mul(_by_halves(b, a), shared(_by_halves(-first, second))),
        op.Mul(_by_halves(-b, a), _by_halves(first, second)),
    )


# --- x * cos + turned(x) * sin -------------------------------------------------------------------------------------


@rewrite(out=HEADS)
def cast_before_turned(x: Term = tensor(HEADS)) -> Rules:
    """A Cast to float32 of turned(x), which has pairs (-b, a) in place of (a, b), becomes a Cast of x."""
    require(*AXES_ARE_INPUTS)
    require(*TWO)
    require("x must not be wider", lambda dtypes: dtypes["x"] in ("float32", "float16", "bfloat16"))
    wide = float32(x)
    for joined, (a, b), (wide_a, wide_b) in (
        (_by_halves, halves(x, "size"), halves(wide, "size")),
        (_by_pairs, pairs(x), pairs(wide)),
    ):
        yield op.Cast(joined(-b, a), to=TensorProto.FLOAT), joined(-wide_b, wide_a)
        yield op.Cast(joined(b, -a), to=TensorProto.FLOAT), joined(wide_b, -wide_a)


@rewrite(out=HEADS)
def table_of_turned(
    turned: Term = tensor(HEADS),
    a: Term = tensor(PART),
    b: Term = tensor(PART),
    sin: Term = tensor(TABLE),
    factor: Term = tensor(TABLE),
    rest: Term = tensor(HEADS),
) -> Rules:
    """Every form of the second product of a rotation is written as `+ turned(x) * table`, where turned(x) is `-b, a`.

    If a model joins `b, -a` instead, or subtracts the product, the table is negated.  If a model multiplies turned(x)
    by two tables, the tables are multiplied with each other first.
    """
    require(*AXES_ARE_INPUTS)
    require(*TWO)
    require(*OF_ONE)
    require("sin must be a table", lambda turned, sin, is_table: is_table(sin, turned))
    require("factor must be a table", lambda turned, factor, is_table: factor is None or is_table(factor, turned))
    forward, back, written = known(turned, _joined(-b, a)), known(turned, _joined(b, -a)), _joined(-b, a)
    scaled = op.Mul(sin, factor)
    yield op.Mul(back, sin), written * -sin
    yield op.Mul(op.Mul(forward, sin), factor), written * scaled
    yield op.Mul(op.Mul(back, sin), factor), written * -scaled
    yield op.Sub(rest, op.Mul(forward, sin)), rest + written * -sin
    yield op.Sub(rest, op.Mul(op.Mul(forward, sin), factor)), rest + written * -scaled
    yield op.Sub(rest, op.Mul(back, sin)), rest + written * sin
    yield op.Sub(rest, op.Mul(op.Mul(back, sin), factor)), rest + written * scaled


@rewrite(out=HEADS)
def table_of_x(
    across: Term = tensor(HEADS),
    x: Term = tensor(HEADS),
    a: Term = tensor(PART),
    b: Term = tensor(PART),
    sin: Term = tensor(TABLE),
    cos: Term = tensor(TABLE),
    scale: Term = tensor(TABLE),
    more: Term = tensor(TABLE, optional=True),
) -> Rules:
    """If x is multiplied by several tables, such as cos and the scale of xPos, the tables are multiplied first."""
    require(*AXES_ARE_INPUTS)
    require(*TWO)
    require(*OF_X)
    require("cos must be a table", lambda x, cos, is_table: is_table(cos, x))
    require("scale must be a table", lambda x, scale, is_table: is_table(scale, x))
    require("more must be a table", lambda x, more, is_table: more is None or is_table(more, x))
    rotated, product = known(across, op.Mul(_joined(-b, a), sin)), either(op.Mul(x, more), x)
    yield op.Add(op.Mul(op.Mul(product, cos), scale), rotated), op.Mul(product, op.Mul(cos, scale)) + rotated


@rewrite(out=HEADS)
def tables_of_three_axes(
    x: Term = tensor(HEADS),
    a: Term = tensor(PART),
    b: Term = tensor(PART),
    cos: Term = tensor(TABLE, optional=True),
    sin: Term = tensor(TABLE, optional=True),
    cos_rows: Term = tensor(ROWS, optional=True),
    sin_rows: Term = tensor(ROWS, optional=True),
    cos_middle: Term = tensor(MIDDLE, optional=True),
    sin_middle: Term = tensor(MIDDLE, optional=True),
) -> Rules:
    """Tables of three axes get the two or four axes that patterns match: see `_table`."""
    require(*AXES_ARE_INPUTS)
    require(*TWO)
    require(*OF_X)
    turned, (cos_found, cos_written) = _joined(-b, a), _table("cos", cos, cos_rows, cos_middle)
    sin_found, sin_written = _table("sin", sin, sin_rows, sin_middle)
    found = op.Add(op.Mul(cos_found, x), op.Mul(sin_found, turned))
    yield when(found, *HAS_THREE_AXES), x * cos_written + turned * sin_written


# --- a cos - b sin, b cos + a sin ----------------------------------------------------------------------------------


def _complex_product(a: Term, b: Term, cos: Term, sin: Term) -> tuple[Term, Term]:
    return a * cos - b * sin, b * cos + a * sin


def _spellings(total: Term, factor: Term, table: Term) -> tuple[list[Term], list[Term]]:
    """Return the spellings of `total + factor * table` and of `total - factor * table`, the usual ones first."""
    product = factor * table
    negated = (-product, shared(-factor) * table, factor * shared(-table))
    added = [total + product, *(op.Sub(total, each) for each in negated)]
    return added, [op.Sub(total, product), *(total + each for each in negated), -op.Sub(product, total)]


def _rotation(a: Term, b: Term, cos: Term, sin: Term) -> tuple[Term, Term]:
    """Return both parts of a complex product in any spelling; the label `back` stands for the opposite sign of sin."""
    added, subtracted = _spellings(a * cos, b, sin)
    real = choose("real", usual=subtracted[0], odd=either(*subtracted[1:]), back=either(*added))
    added, subtracted = _spellings(b * cos, a, sin)
    return real, choose("imaginary", usual=added[0], odd=either(*added[1:]), back=either(*subtracted))


def _written(a: Term, b: Term, cos: Term, sin: Term) -> tuple[Term, Term]:
    """Return both parts of the complex product that `_rotation` found, in the spelling that patterns match."""
    return _complex_product(a, b, cos, choose("real", usual=sin, odd=sin, back=-sin))


def _is_rotation(real: str, imaginary: str) -> bool:
    return (real == "back") == (imaginary == "back")


def _entries(cos: Term, sin: Term) -> Term:
    """Return the entries of rotation matrices, by rows, on a new last axis."""
    return op.Concat(*(op.Unsqueeze(each, axes=[-1]) for each in (cos, -sin, sin, cos)), axis=-1)


@rewrite(out=f"{PART} 2")
def product_of_matrices(
    a: Term = tensor(f"{PART} 1"),
    b: Term = tensor(f"{PART} 1"),
    cos: Term = tensor("tables rows pairs", optional=True),
    sin: Term = tensor("tables rows pairs", optional=True),
    cos_1: Term = tensor("tables rows pairs_1", optional=True),
    sin_1: Term = tensor("tables rows pairs_1", optional=True),
    cos_2: Term = tensor("tables rows pairs_2", optional=True),
    sin_2: Term = tensor("tables rows pairs_2", optional=True),
    cos_3: Term = tensor("tables rows pairs_3", optional=True),
    sin_3: Term = tensor("tables rows pairs_3", optional=True),
) -> Rules:
    """Products of pairs with matrices ((cos, -sin), (sin, cos)), as in Flux, become products of complex numbers.

    In Flux, tokens have three positions, and the matrices of the three are concatenated along the axis of pairs.
    """
    require(*AXES_ARE_INPUTS)
    require(*OF_ONE)
    require("matrices are 2 x 2, not {to} x {of}", lambda to, of: to == of == 2)
    require("{tables} tables serve {batch} batch elements", lambda tables, batch: tables in (1, batch))
    require(
        "{pairs} pairs are {pairs_1}, {pairs_2} and {pairs_3} pairs",
        lambda pairs, pairs_1, pairs_2, pairs_3: pairs_1 is None or pairs == pairs_1 + pairs_2 + pairs_3,
    )
    whole = rearrange(_entries(cos, sin), "tables rows pairs (to of) -> tables 1 rows pairs to of")
    thirds = zip((cos_1, cos_2, cos_3), (sin_1, sin_2, sin_3), "123", strict=True)
    parts = (
        rearrange(_entries(x, y), f"tables rows pairs_{i} (to of) -> tables rows pairs_{i} to of") for x, y, i in thirds
    )
    joined = op.Unsqueeze(op.Concat(*parts, axis=-3), axes=[1])
    tables = (op.Concat(*each, axis=-1) for each in ((cos_1, cos_2, cos_3), (sin_1, sin_2, sin_3)))
    for matrices, rows in ((whole, (cos, sin)), (joined, tables)):
        first, second = (shared(op.Gather(shared(matrices), indices=i, axis=-1)) for i in (0, 1))
        found = op.Add(op.Mul(first, a), op.Mul(second, b))
        columns = (op.Squeeze(each, axes=[-1]) for each in (a, b))
        yield found, _by_columns(*_complex_product(*columns, *(op.Unsqueeze(each, axes=[1]) for each in rows)))


@rewrite(out="batch heads rows whole")
def sum_of_joined(
    a: Term = tensor(PART),
    b: Term = tensor(PART),
    cos: Term = tensor(HALF_TABLE),
    sin: Term = tensor(HALF_TABLE),
) -> Rules:
    """A Concat of products with cos plus a Concat of products with sin becomes a Concat of two sums."""
    require(*AXES_ARE_INPUTS)
    require(*OF_ONE)
    require("cos and sin must be tables", lambda a, cos, sin, is_table: is_table(cos, a) and is_table(sin, a))
    negated = either(-op.Mul(b, sin), op.Mul(-b, sin))
    found = _by_halves(op.Mul(a, cos), op.Mul(b, cos)) + _by_halves(negated, op.Mul(a, sin))
    yield found, _by_halves(*_complex_product(a, b, cos, sin))


@rewrite(out="batch heads rows whole")
def joined_rotation(
    rest: Term = tensor("batch heads rows others"),
    a: Term = tensor(PART),
    b: Term = tensor(PART),
    cos: Term = tensor(HALF_TABLE),
    sin: Term = tensor(HALF_TABLE),
) -> Rules:
    """Where a Concat joins an unrotated part and both halves of a rotation, the halves get a Concat of their own."""
    require(*AXES_ARE_INPUTS)
    found = when(op.Concat(rest, *_rotation(a, b, cos, sin), axis=-1), "the halves are a rotation", _is_rotation)
    yield found, op.Concat(rest, _by_halves(*_written(a, b, cos, sin)), axis=-1)


@rewrite(out=f"{PART} 2")
def complex_columns(
    a: Term = tensor(f"{PART} 1"),
    b: Term = tensor(f"{PART} 1"),
    cos: Term = tensor(f"{HALF_TABLE} 1"),
    sin: Term = tensor(f"{HALF_TABLE} 1"),
) -> Rules:
    """Where all tensors of a rotation have a last axis of size 1, this axis is added after the products instead."""
    require(*AXES_ARE_INPUTS)
    require(*OF_ONE)
    require("cos and sin must be tables", lambda a, cos, sin, is_table: is_table(cos, a) and is_table(sin, a))
    found = when(_by_halves(*_rotation(a, b, cos, sin)), "the columns are a rotation", _is_rotation)
    yield found, _by_columns(*_written(*(op.Squeeze(each, axes=[-1]) for each in (a, b, cos, sin))))


@rewrite(out="batch heads rows whole")
def complex_in_one_form(
    a: Term = tensor(PART),
    b: Term = tensor(PART),
    cos: Term = tensor(HALF_TABLE, optional=True),
    sin: Term = tensor(HALF_TABLE, optional=True),
    cos_rows: Term = tensor("1 rows pairs", optional=True),
    sin_rows: Term = tensor("1 rows pairs", optional=True),
    cos_middle: Term = tensor("heads 1 pairs", optional=True),
    sin_middle: Term = tensor("heads 1 pairs", optional=True),
) -> Rules:
    """A product of complex numbers in another spelling, or with the other sign of the sines, becomes the usual one."""
    require(*AXES_ARE_INPUTS)
    require(*OF_ONE)
    require("cos must be a table", lambda a, cos, is_table: cos is None or is_table(cos, a))
    require("sin must be a table", lambda a, sin, is_table: sin is None or is_table(sin, a))
    cos_found, cos_written = _table("cos", cos, cos_rows, cos_middle)
    sin_found, sin_written = _table("sin", sin, sin_rows, sin_middle)
    other = when(
        _joined(*_rotation(a, b, cos_found, sin_found)),
        "it is a rotation in another form",
        lambda real, imaginary, cos_axes, sin_axes: (
            _is_rotation(real, imaginary) and {real, imaginary, cos_axes, sin_axes} != {"usual", "plain"}
        ),
    )
    yield other, _joined(*_written(a, b, cos_written, sin_written))


ROTATIONS: Final[tuple[Rewrite, ...]] = (
    *stacked_halves, *signed_table, *negated_table, *negated_half, *negated_column, *cast_before_turned,
    *table_of_turned, *table_of_x, *tables_of_three_axes, *product_of_matrices, *sum_of_joined, *joined_rotation,
    *complex_columns, *complex_in_one_form,
)  # fmt: skip
