"""Symbolic sizes: they compute what integers compute, and equal expressions are equal objects."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from onnxfuse.algebra.bounds import (
    is_nonnegative,
    lower_bound,
    maximum,
    minimum,
    solved,
    substituted,
    upper_bound,
    without_min_constants,
)
from onnxfuse.algebra.size_parser import parse_size
from onnxfuse.algebra.sizes import (
    MAX_DEGREE,
    MAX_TERMS,
    MAX_TEXT,
    Dim,
    Size,
    divide,
    evaluate,
    is_known,
    product,
    symbol,
    symbols,
)

NAMES = ("batch", "past", "seq")
VALUES = st.fixed_dictionaries({name: st.integers(1, 9) for name in NAMES})
LEAVES = st.one_of(st.integers(-4, 9), st.sampled_from(NAMES).map(symbol))
OPERATORS: dict[str, Callable[..., Size]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "Max": maximum, "Min": minimum,
}  # fmt: skip
NUMBERS: dict[str, Callable[..., int]] = {**OPERATORS, "Max": max, "Min": min}  # type: ignore[dict-item]

Tree = int | Dim | tuple  # type: ignore[type-arg]
POLYNOMIALS = st.recursive(LEAVES, lambda t: st.tuples(st.sampled_from("+-*"), t, t), max_leaves=8)
EXPRESSIONS = st.recursive(LEAVES, lambda t: st.tuples(st.sampled_from(sorted(OPERATORS)), t, t), max_leaves=8)


def build(tree: Tree) -> Size:
    """Return the tree as a size.  A divisor is a positive number or a symbol: no other size is surely positive."""
    if not isinstance(tree, tuple):
        return tree
    op, left, right = tree
    if op in ("//", "%"):
        assume(isinstance(right, Dim) or (isinstance(right, int) and right > 0))
    return OPERATORS[op](build(left), build(right))


def compute(tree: Tree, values: dict[str, int]) -> int:
    if not isinstance(tree, tuple):
        return evaluate(tree, values)
    return NUMBERS[tree[0]](compute(tree[1], values), compute(tree[2], values))


@given(EXPRESSIONS, VALUES)
def test_arithmetic_agrees_with_integers(tree: Tree, values: dict[str, int]) -> None:
    assert evaluate(build(tree), values) == compute(tree, values)


@given(EXPRESSIONS)
def test_the_text_of_a_size_parses_to_the_same_size(tree: Tree) -> None:
    size = build(tree)
    assert parse_size(str(size)) == size


@given(EXPRESSIONS, VALUES)
def test_bounds_hold(tree: Tree, values: dict[str, int]) -> None:
    size = build(tree)
    low, high = lower_bound(size), upper_bound(size)
    assert low is None or low <= evaluate(size, values)
    assert high is None or evaluate(size, values) <= high


@given(EXPRESSIONS, VALUES)
@example(("-", ("-", symbol("seq"), ("*", 2, ("//", symbol("seq"), 2))), 1), {"batch": 1, "past": 1, "seq": 2})
def test_a_size_that_is_proved_not_to_be_negative_is_not(tree: Tree, values: dict[str, int]) -> None:
    size = build(tree)
    assert not is_nonnegative(size) or evaluate(size, values) >= 0


def test_a_dim_less_one_is_not_negative_and_an_expression_that_is_too_large_may_be() -> None:
    seq = symbol("seq")
    assert is_nonnegative(seq - 1) and is_nonnegative(seq * symbol("batch") - seq) and not is_nonnegative(seq - 2)
    too_large = seq * -(2**62) * 4
    assert not is_known(too_large) and not is_nonnegative(too_large)


@given(POLYNOMIALS, POLYNOMIALS, POLYNOMIALS)
def test_equal_polynomials_are_equal_objects(a: Tree, b: Tree, c: Tree) -> None:
    x, y, z = build(a), build(b), build(c)
    left, right = x * (y + z), z * x + y * x
    assert left == right and hash(left) == hash(right) and str(left) == str(right)
    assert isinstance(left - right, int) and left - right == 0


@given(POLYNOMIALS, POLYNOMIALS)
def test_division_is_exact_or_refused(a: Tree, b: Tree) -> None:
    x, y = build(a), build(b)
    assume(y != 0)
    assert divide(x * y, y) == x
    quotient = divide(x, y)
    assert quotient is None or quotient * y == x


batch, past, seq = map(symbol, NAMES)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("batch", "batch"),
        ("seq + past", "past + seq"),
        ("((batch*seq)//batch)", "seq"),
        ("s77", "s77"),
        ("past_sequence_length + 1", "past_sequence_length + 1"),
        ("2*s0", "2*s0"),
        ("s0*2 - s0", "s0"),
        ("s0**2", "s0*s0"),
        ("(4*s)//4", "s"),
        ("(a*b + 2*b)//b", "a + 2"),
        ("(2*a*b)//(4*b)", "a//2"),
        ("(s + 1)//2", "(s + 1)//2"),
        ("(s + 5)//2", "(s + 1)//2 + 2"),
        ("((s + 1)//2 + 1)//2", "(s + 3)//4"),
        ("(2*s + 1)//2", "s"),
        ("(4*s + 5)%4", "1"),
        ("(6 - s%6)%6", "(5*(s%6))%6"),
        ("2*(s//2)", "2*(s//2)"),
        ("Max(1, s0)", "Max(1, s0)"),
        ("max(s0, s0 + past)", "past + s0"),
        ("Min(512, Min(s, 64))", "Min(64, s)"),
        ("FloorDiv(s, 2)", "s//2"),
        ("batch-size", "batch-size"),
        ("batch - 1", "batch - 1"),
        ("?12 + 1", "?12 + 1"),
        ("7", "7"),
        ("(s0 + 1)**2 - 2**3", "s0*s0 + 2*s0 - 7"),
    ],
)
def test_expressions_are_parsed(text: str, shown: str) -> None:
    assert str(parse_size(text)) == shown


@pytest.mark.parametrize("text", ["a b", "1if", "2d", "s0/2", "floor(s0)", "a//0", "input:0", "(", "s +", "Mod(3)"])
def test_a_text_that_is_no_expression_is_one_symbol(text: str) -> None:
    assert parse_size(text) == symbol(text)


@pytest.mark.parametrize("text", ["s**99999999", "2**99999999", "((a + b + c + d)**4)**8"])
def test_a_power_too_large_to_multiply_out_is_one_symbol(text: str) -> None:
    assert parse_size(text) == symbol(text)


def test_constants_are_plain_integers() -> None:
    assert type(seq - seq + 3) is int
    assert type((2 * seq) // seq) is int
    assert product([2, 3]) == 6 and product([]) == 1


def test_unknown_parts_are_found_inside_other_symbols() -> None:
    assert is_known((seq + 1) // 2) and is_known(3)
    assert not is_known((symbol("?3") + 1) // 2 * batch)
    assert set(symbols(minimum(512, past + seq) * batch)) == {"batch", "past", "seq"}


def test_polynomial_quotients() -> None:
    assert divide(batch * (past + seq) * 64, 8 * (past + seq)) == 8 * batch
    assert divide(batch * seq, past) is None
    assert divide(seq, 0) is None


def test_without_min_constants() -> None:
    assert without_min_constants(minimum(512, seq)) == seq
    assert without_min_constants(minimum(512, past + seq) - minimum(512, past)) == seq
    assert without_min_constants(maximum(0, minimum(512, past + seq) - minimum(512, past))) == seq
    assert without_min_constants((seq + 1) // 2) == (seq + 1) // 2


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("h//2 - 2*(h//4)", 0, 1),  # what is padded to where an image was halved and doubled
        ("h - 2*(h//2)", 0, 1),
        ("h - 4*((h + 3)//4)", -3, 0),
        ("(h//2 - 2*(h//4))//2", 0, 0),
        ("h//4//2 - h//8", 0, 0),
        ("h//3 - h//4", 0, None),
        ("h//2 - w//2", None, None),
    ],
)
def test_bounds_of_quotients(text: str, low: int | None, high: int | None) -> None:
    assert (lower_bound(parse_size(text)), upper_bound(parse_size(text))) == (low, high)


def test_sizes_with_numbers_in_place_of_symbols() -> None:
    size = maximum(seq // 4, past) + 3 * batch * seq
    assert substituted(size, {"seq": 9}) == maximum(2, past) + 27 * batch
    assert substituted(size, {"seq//4": 5}) == maximum(5, past) + 3 * batch * seq
    assert substituted(size, {"seq": 8, "past": 1, "batch": 2}) == 50
    assert substituted(batch % past, {"past": 0}) == batch % past, "a remainder that no number has"


def test_the_symbol_that_makes_a_size_a_number() -> None:
    assert solved(2 * seq + 4, 64) == ("seq", 30)
    assert solved(seq // 4, 64) == ("seq//4", 64)
    for size, number in ((2 * seq + 4, 63), (seq + past, 64), (batch * seq, 64), (seq + 64, 64), (64, 64)):
        assert solved(size, number) is None


def test_a_symbol_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="past"):
        evaluate(past + seq, {"seq": 2})
    with pytest.raises(ZeroDivisionError):
        seq // 0


# --- bounds of the polynomials themselves ---------------------------------------------------------------------------

MANY = [symbol(f"s{i}") for i in range(30)]
LARGE = st.recursive(
    st.one_of(st.integers(-(10**6), 10**6), st.sampled_from(MANY)),
    lambda t: st.tuples(st.sampled_from(sorted(OPERATORS)), t, t),
    max_leaves=200,
)


def size_of(size: Size) -> tuple[int, int, int]:
    """Return the degree, the number of terms and the longest name of a size."""
    terms = size.terms if isinstance(size, Dim) else ()
    names = [name for monomial, _ in terms for name in monomial]
    return max((len(m) for m, _ in terms), default=0), len(terms), max(map(len, names), default=0)


@settings(deadline=2000)
@given(LARGE, st.lists(st.sampled_from(sorted(OPERATORS)), max_size=30))
def test_sizes_and_their_bounds_take_bounded_time(tree: Tree, operators: list[str]) -> None:
    """Each operation doubles the expression, as a chain of nodes of a model does."""
    size = build(tree)
    for op in operators:
        if isinstance(size, int) and abs(size) >= 2**63:  # no tensor has so many elements
            break
        size = OPERATORS[op](size, size * size + MANY[0]) if op in ("//", "%") else OPERATORS[op](size * size, size + 1)
        degree, terms, longest = size_of(size)
        assert degree <= MAX_DEGREE and terms <= MAX_TERMS and longest <= MAX_TEXT
        lower_bound(size), upper_bound(size), divide(size, size + MANY[1]), str(size)


def test_expressions_of_numbers_that_are_too_large_have_no_bounds() -> None:
    """A Slice to the lowest integer has such an end, and was taken to leave no fewer rows than it has in front."""
    end = maximum(0, symbol("n") - (2**63 - 1))
    assert lower_bound(end - 2) == -2
    assert lower_bound(symbol("n") - 2**63 - 1) is None


def test_coefficients_of_any_length_are_unknown_sizes() -> None:
    """Python refuses to print an integer of 5,000 digits."""
    size = symbol("a") * 10**5000
    assert not is_known(size) and size == symbol("a") * 10**5000 and size != symbol("a") * (10**5000 + 1)


@given(LARGE, st.integers(1, 9))
def test_large_expressions_are_right_or_unknown(tree: Tree, value: int) -> None:
    size = build(tree)
    if is_known(size):
        assert evaluate(size, {str(name): value for name in MANY}) == compute(tree, {str(n): value for n in MANY})


@pytest.mark.parametrize("count", [7, 24, 400])
def test_products_of_sums_are_unknown_sizes_and_equal_ones_are_equal(count: int) -> None:
    sums = [symbol(f"a{i}") + symbol(f"b{i}") for i in range(count)]
    found, again = product(sums), product(reversed(sums))
    assert not is_known(found) and str(found).startswith("?")
    assert count > 7 or (found == again and found != product(sums[1:]))


def test_sums_of_minima_have_bounds_in_bounded_time() -> None:
    """Each `Min` can be replaced by either operand, which makes 2**60 cases."""
    low = lower_bound(product([1]) - sum((minimum(MANY[i % 30], symbol(f"t{i}") + i) for i in range(60)), 0))
    assert low is None


@pytest.mark.parametrize(
    "text",
    ["*".join(f"(a{i}+b{i})" for i in range(24)), "+".join("a" * 3000), "+".join(f"a{i}" for i in range(3000)),
     "(" * 3000 + "a" + ")" * 3000, "max(" + ",".join(f"a{i}" for i in range(900)) + ")", "*".join("a" * 3000),
     "-" * 3000 + "a", "9" * 5000 + "*a"],
    ids=["product", "equal_terms", "terms", "parentheses", "max", "power", "signs", "digits"],
)  # fmt: skip
def test_a_long_name_of_a_dimension_is_a_known_size(text: str) -> None:
    size = parse_size(text)
    assert is_known(size) and size == parse_size(text)
    assert size_of(size)[0] <= MAX_DEGREE and size_of(size)[1] <= MAX_TERMS
    lower_bound(size), upper_bound(size * size)
