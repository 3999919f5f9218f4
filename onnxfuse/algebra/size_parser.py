"""The parser for expressions in the names of dimensions that exporters write: `past + seq`, `(batch*seq)//batch`."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from onnxfuse.algebra.bounds import maximum, minimum
from onnxfuse.algebra.sizes import UNKNOWN, Size, floor_divide, is_known, modulo, product, symbol

MAX_EXPONENT = 8  # largest exponent of a power that is multiplied out


def is_name(text: str) -> bool:
    """Return whether a `dim_param` names a size.  A number ("-1", "0") is not a name: it stands for any size."""
    return text.strip() not in ("", "?", "None") and not isinstance(parse_size(text), int)


@functools.lru_cache(maxsize=4096)
def parse_size(text: str) -> Size:
    """Return the size that a `dim_param` describes; a text that is not an expression becomes a symbol of that name."""
    tokens = [match.lastgroup and match[0].strip() for match in _TOKEN.finditer(text)]
    try:
        rest = [token for token in tokens if token is not None]
        size = _parse_sum(rest)
        # An expression beyond the limits of sizes.py becomes a symbol that is named by its text.
        is_too_large = UNKNOWN not in text and not is_known(size)
        return symbol(text.strip()) if rest or None in tokens or is_too_large else size
    except (ValueError, IndexError, ZeroDivisionError, RecursionError):
        return symbol(text.strip())


# "batch-size" is one name: exporters write a minus sign with spaces around it.  A character that no group matches is an
# error.
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?![\w.]))|(?P<name>[A-Za-z_?][\w.?]*(?:-[A-Za-z_][\w.]*)*)|(?P<sign>\*\*|//|[-+*%(),]))\s*|."
)
_FUNCTIONS: dict[str, Callable[..., Size]] = {
    "max": maximum,
    "min": minimum,
    "floordiv": floor_divide,
    "mod": modulo,
    "pythonmod": modulo,
}


def _parse_sum(tokens: list[str]) -> Size:
    size = _parse_product(tokens)
    while tokens and tokens[0] in ("+", "-"):
        sign = 1 if tokens.pop(0) == "+" else -1
        size = size + _parse_product(tokens) * sign
    return size


def _parse_product(tokens: list[str]) -> Size:
    size = _parse_power(tokens)
    while tokens and tokens[0] in ("*", "//", "%"):
        operator, other = tokens.pop(0), _parse_power(tokens)
        size = size * other if operator == "*" else size // other if operator == "//" else size % other
    return size


def _parse_power(tokens: list[str]) -> Size:
    if tokens[0] == "-":
        tokens.pop(0)
        return _parse_power(tokens) * -1
    size = _parse_operand(tokens)
    if tokens and tokens[0] == "**":
        tokens.pop(0)
        exponent = int(tokens.pop(0))
        if exponent > MAX_EXPONENT:
            raise ValueError(f"the power {exponent} is too large to be multiplied out")
        return product([size] * exponent)
    return size


def _parse_operand(tokens: list[str]) -> Size:
    token = tokens.pop(0)
    if token == "(":
        return _parse_arguments(tokens, 1)[0]
    if token.isdigit():
        return int(token)
    if tokens and tokens[0] == "(":
        tokens.pop(0)
        function = _FUNCTIONS.get(token.lower())
        if function is None:
            raise ValueError(f"no function {token}")
        arguments = _parse_arguments(tokens)
        if function in (floor_divide, modulo) and len(arguments) != 2:
            raise ValueError(f"{token} takes two arguments")
        return function(*arguments)
    if not (token[0].isalpha() or token[0] in "_?"):
        raise ValueError(f"unexpected {token}")
    return symbol(token)


def _parse_arguments(tokens: list[str], max_count: int = 1000) -> list[Size]:
    arguments = [_parse_sum(tokens)]
    while tokens[0] == "," and len(arguments) < max_count:
        tokens.pop(0)
        arguments.append(_parse_sum(tokens))
    if tokens.pop(0) != ")":
        raise ValueError("missing )")
    return arguments
