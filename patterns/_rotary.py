"""The spellings of rotary embedding, which rotary_embedding and attention_with_rotary_embedding share."""

from collections.abc import Callable, Iterable
from typing import Final

from onnxfuse.dsl import Term, choose, op, rearrange, require, size

END: Final = 2**63 - 1  # the end of a Slice that goes on to the end of its axis


def require_cos_batch() -> None:
    """Require that the tables have the batch size of the tensor that they rotate, or 1."""
    require(
        "cos has the batch size {cos_batch}; required {batch} or 1",
        lambda batch, cos_batch: cos_batch is None or cos_batch in (1, batch),
    )


def rotated_rows(x: Term, axes: str, rotate: Callable[[Term, str], dict[str, Term]]) -> dict[str, Term]:
    """Return the forms of a rotation of x, by label; in most forms, the first `kept` rows can stay unrotated.

    `rotate` returns the forms for a tensor and its axes.  Vision transformers leave class tokens and registers
    unrotated: these precede the patches and have no positions.
    """
    names = axes.split()
    at = next(i for i, name in enumerate(names[1:], start=1) if not name.endswith("heads"))
    first = op.Slice(x, starts=[0], ends=[size("kept")], axes=[at], steps=[1])
    rest = op.Slice(x, starts=[size("kept")], ends=[END], axes=[at], steps=[1])
    whole, part = rotate(x, axes), rotate(rest, " ".join((*names[:at], "patches", *names[at + 1 :])))
    in_order = {label: op.Concat(first, part[label], axis=at) for label in whole if label != "complex_pairs_to_halves"}
    return {
        label: choose("first_rows", rotated=term, kept=in_order[label]) if label in in_order else term
        for label, term in whole.items()
    }


def rotated(x: Term, cos: Term, sin: Term, axes: str, *, of_heads: bool = False) -> dict[str, Term]:
    """Return the forms of the rotation x * cos + turned(x) * sin, by label.

    `axes` names the four axes of x; the last one is the elements of a head.  With `of_heads`, each head can have
    tables of its own.  turned(x) replaces each pair of elements (a, b) by (-b, a).

    rotate_half rotates all elements of a head, and pairs the elements of its first half with those of its second half;
    rotate_part rotates only the first `rotated` elements of a head.  rotate_pairs and rotate_part_of_pairs are like
    rotate_half and rotate_part, but a pair is two neighbours.  The forms complex_… multiply pairs as complex numbers:
    tables have a column for each pair.  complex_pairs_to_halves reads pairs of neighbours and returns them as halves.
    """
    require("{rotated} of {size} elements are rotated; required a part of them", _is_part)
    require("there are {size} elements; required {pairs} pairs", lambda size, pairs: pairs is None or 2 * pairs == size)
    require(
        "{rotated} elements are rotated; required {part} pairs",
        lambda rotated, part: part is None or 2 * part == rotated,
    )
    require("pairs have {two} elements; required 2", lambda two: two in (None, 2))
    require(
        "a table has {half} columns; required half of {size}, the size of a head",
        lambda half, size: half is None or 2 * half == size,
    )
    first = op.Slice(x, starts=[0], ends=[size("rotated")], axes=[-1], steps=[1])
    rest = op.Slice(x, starts=[size("rotated")], ends=[END], axes=[-1], steps=[1])
    (leading, whole), part = axes.rsplit(" ", 1), "rotated"

    def by_table(value: Term, turned: Term, count: str) -> Term:
        return value * _per_head(cos, axes, count, of_heads) + turned * _per_head(sin, axes, count, of_heads)

    def complex_product(a: Term, b: Term) -> tuple[Term, Term]:
        real, imaginary = (_per_head(table, axes, "half", of_heads) for table in (cos, sin))
        return a * real - b * imaginary, b * real + a * imaginary

    return {
        "rotate_half": by_table(x, _turned_halves(x, whole), whole),
        "rotate_part": op.Concat(by_table(first, _turned_halves(first, part), part), rest, axis=-1),
        "rotate_pairs": by_table(x, _turned_pairs(x, leading, "pairs"), whole),
        "rotate_part_of_pairs": op.Concat(by_table(first, _turned_pairs(first, leading, "part"), part), rest, axis=-1),
        "complex_halves": op.Concat(*complex_product(*halves(x, whole)), axis=-1),
        "complex_pairs": _stacked(complex_product(*pairs(x)), leading, "half"),
        "complex_pairs_to_halves": op.Concat(*complex_product(*pairs(x)), axis=-1),
    }


def is_sum(rows: object, kept: object, patches: object) -> bool:
    """Return whether kept > 0 and rows = kept + patches; True if one of the three is not a known number."""
    if isinstance(rows, int) and isinstance(kept, int) and isinstance(patches, int):
        return kept > 0 and rows == kept + patches
    return True


def _is_part(rotated: object, size: object) -> bool:
    """Return whether fewer elements are rotated than a head has; for symbolic sizes, whether the two sizes differ."""
    if isinstance(rotated, int) and isinstance(size, int):
        return rotated < size
    return rotated is None or rotated != size


def _turned_halves(x: Term, count: str) -> Term:
    """Return the concatenation (-second half, first half) of the last axis, which has `count` elements."""
    first, second = halves(x, count)
    return op.Concat(-second, first, axis=-1)


def halves(x: Term, count: str) -> tuple[Term, Term]:
    """Return both halves of the last axis, which has `count` elements."""
    half = size(count) // 2
    first = op.Slice(x, starts=[0], ends=[half], axes=[-1], steps=[1])
    return first, op.Slice(x, starts=[half], ends=[END], axes=[-1], steps=[1])


def pairs(x: Term) -> tuple[Term, Term]:
    """Return two tensors: the first and the second elements of all pairs of neighbours on the last axis."""
    first, second = (op.Slice(x, starts=[i], ends=[END], axes=[-1], steps=[2]) for i in (0, 1))
    return first, second


def _turned_pairs(x: Term, leading: str, count: str) -> Term:
    """Replace every pair (first, second) of neighbours by (-second, first); the last axis has `count` pairs.

    `leading` names the axes before the last one.
    """
    first, second = pairs(x)
    return _stacked((-second, first), leading, count)


def _stacked(parts: Iterable[Term], leading: str, count: str) -> Term:
    """Interleave the columns of tensors with `count` columns each, and return the resulting tensor."""
    columns = (rearrange(each, f"{leading} {count} -> {leading} {count} 1") for each in parts)
    return rearrange(op.Concat(*columns, axis=-1), f"{leading} {count} two -> {leading} ({count} two)")


def _per_head(table: Term, axes: str, count: str, of_heads: bool) -> Term:
    """Return a pattern for a table of `count` columns, rearranged to broadcast to a tensor with the axes `axes`.

    With `of_heads`, the pattern also matches tables that have an axis of heads of the same size as the tensor's.
    """
    names = ["cos_batch" if name == "batch" else "1" if name.endswith("heads") else name for name in axes.split()]
    result, rows = " ".join((*names[:-1], count)), next(name for name in names[1:] if name != "1")
    without_batch = result.removeprefix("cos_batch ").removeprefix("1 ")
    layouts = {
        "bsd": rearrange(table, f"cos_batch {rows} {count} -> {result}"),
        "sd": rearrange(table, f"{rows} {count} -> {without_batch}"),
        "b1sd": rearrange(table, f"cos_batch 1 {rows} {count} -> {result}"),
        "bs1d": rearrange(table, f"cos_batch {rows} 1 {count} -> {result}"),
    }
    if of_heads:
        heads, each = f"heads {rows} {count}", " ".join((*axes.split()[1:-1], count))
        layouts |= {
            "bhsd": rearrange(table, f"cos_batch {heads} -> cos_batch {each}"),
            "hsd": rearrange(table, f"{heads} -> {each}"),
        }
    last = "b1sd" if names[1] == "1" else "bs1d"  # tried last, because tables of other layouts match it, too
    return choose("table", **{label: layouts[label] for label in sorted(layouts, key=lambda label: label == last)})
