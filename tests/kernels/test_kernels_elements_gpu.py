"""Activations, gates, biases and rotary embedding against float64: all dtypes, odd and misaligned sizes, extremes."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_references import PARAMETERS, rotate_complex, rotate_half, rotate_pairs, with_parameters
from kernel_runs import DTYPES, check, normal, rounded, run, small_gpu

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.runtime.plan import Device

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    return small_gpu()


# ---- elements ----------------------------------------------------------------------------------------------------

# A single element; one vector and a rest; narrow vectors; two vectors of a thread and a rest; one vector and no rest;
# many vectors and a rest; no elements.
SIZES = [(1, 1), (3, 5), (8, 100), (33, 1023), (128, 128), (31, 4099), (0, 128)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_over_its_range(device: Device, dtype: str, activation: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 20011), np.linspace(-1e-3, 1e-3, 1001), [-6e4, -300, 300, 6e4, 0.0, -0.0]])
    x = rounded(x.astype(np.float32), dtype)
    (y,) = run("activation", {"x": x}, [dtype], device, **with_parameters(activation))
    with np.errstate(over="ignore"):
        check(y, ACTIVATIONS[activation].formula(x.astype(np.float64), *PARAMETERS.get(activation, (0, 0))), tiny=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_infinity_and_nan(device: Device, activation: str) -> None:
    x = np.array([np.nan, np.inf], dtype=np.float32)
    (y,) = run("activation", {"x": x}, ["float32"], device, **with_parameters(activation))
    with np.errstate(invalid="ignore"):
        expected = ACTIVATIONS[activation].formula(x.astype(np.float64), *PARAMETERS.get(activation, (0.0, 0.0)))
    np.testing.assert_array_equal(y, expected.astype(np.float32))


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_of_any_size(device: Device, dtype: str, shape: tuple[int, int], aligned: bool) -> None:
    x, up, bias = normal(shape, dtype, 1, 2.0), normal(shape, dtype, 2), normal(shape[1:], dtype, 3)
    silu = ACTIVATIONS["silu"].formula
    (y,) = run("activation", {"x": x}, [dtype], device, aligned, activation="silu")
    check(y, silu(x.astype(np.float64), 0, 0), tiny=True)
    (y,) = run("gated_activation", {"gate": x, "up": up}, [dtype], device, aligned, activation="silu")
    check(y, silu(x.astype(np.float64), 0, 0) * up.astype(np.float64), tiny=True)
    (y,) = run("bias_activation", {"x": x, "bias": bias}, [dtype], device, aligned, activation="silu")
    check(y, silu(x.astype(np.float64) + bias.astype(np.float64), 0, 0), tiny=True)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(device: Device, dtype: str, activation: str) -> None:
    gate, up = normal((77, 1024), dtype, 1, 3.0), normal((77, 1024), "float16", 2)
    (y,) = run("gated_activation", {"gate": gate, "up": up}, [dtype], device, activation=activation)
    check(y, ACTIVATIONS[activation].formula(gate.astype(np.float64), 0, 0) * up.astype(np.float64), tiny=True)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize(
    ("shape", "width", "offsets"),
    [
        ((77, 1024), 2048, (0, 1024)),  # the halves of a product, in either order
        ((3, 5, 1024), 2048, (1024, 0)),
        ((77, 1024), 2056, (8, 1032)),
        ((33, 1023), 2049, (1, 1024)),  # nothing is a multiple of a vector
        ((7, 6), 20, (3, 11)),
        ((1, 1), 5, (4, 0)),
        ((0, 64), 128, (0, 64)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_that_are_slices_of_a_product(
    device: Device, dtype: str, shape: tuple[int, ...], width: int, offsets: tuple[int, int], aligned: bool
) -> None:
    both = normal((*shape[:-1], width), dtype, 1, 3.0)
    attributes = {"activation": "silu", "d": shape[-1], "gate_offset": offsets[0], "up_offset": offsets[1]}
    (y,) = run("gated_activation", {"gate": both, "up": both}, [dtype], device, aligned, **attributes)
    gate, up = (both[..., offset : offset + shape[-1]].astype(np.float64) for offset in offsets)
    check(y, ACTIVATIONS["silu"].formula(gate, 0, 0) * up, tiny=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_that_is_a_slice_beside_a_whole_tensor(device: Device, dtype: str) -> None:
    both, up = normal((77, 1500), dtype, 1, 3.0), normal((77, 1000), dtype, 2)
    inputs = {"gate": both, "up": up}
    (y,) = run("gated_activation", inputs, [dtype], device, activation="relu", d=1000, gate_offset=500)
    check(y, ACTIVATIONS["relu"].formula(both[:, 500:].astype(np.float64), 0, 0) * up.astype(np.float64), tiny=True)


# ---- rotary embedding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("table", ["bsd", "b1sd"])
@pytest.mark.parametrize("layout", ["packed", "bshd", "bhsd"])
@pytest.mark.parametrize(
    ("batch", "tables", "rows", "heads", "seq", "size"),
    [
        (2, 1, 5, 3, 5, 6),
        (2, 2, 33, 8, 33, 64),
        (1, 1, 512, 32, 512, 128),
        (3, 1, 7, 5, 7, 20),
        (0, 1, 8, 4, 8, 64),
        (3, 3, 1, 4, 9, 64),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding(
    device: Device, dtype: str, batch: int, tables: int, rows: int, heads: int, seq: int, size: int, layout: str,
    table: str, aligned: bool,
) -> None:  # fmt: skip
    x = normal((batch, heads, seq, size), dtype, 1)
    cos, sin = (normal((tables, rows, size), dtype, seed) for seed in (2, 3))
    by_rows = x.swapaxes(1, 2)
    laid_out = {"bhsd": x, "bshd": by_rows, "packed": by_rows.reshape(batch, seq, heads * size)}[layout]
    shape = (tables, rows, size) if table == "bsd" else (tables, 1, rows, size)
    inputs = {"x": np.ascontiguousarray(laid_out), "cos": cos.reshape(shape), "sin": sin.reshape(shape)}
    (y,) = run("rotary_embedding", inputs, [dtype], device, aligned, layout=layout, table=table)
    angles = (angle.astype(np.float64)[:, None] for angle in (cos, sin))
    check(y, rotate_half(x.astype(np.float64), *angles))


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize(
    ("heads", "size", "rotated", "width", "offset", "pitch"),
    [
        (8, 64, 64, 1536, 512, 64),  # queries, keys and values side by side
        (8, 64, 16, 1536, 64, 192),  # heads of queries, keys and values alternate; a quarter of each is rotated
        (3, 96, 24, 900, 12, 100),
        (3, 10, 4, 101, 1, 31),
        (2, 8, 8, 16, 0, 8),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_of_a_slice(
    device: Device, dtype: str, heads: int, size: int, rotated: int, width: int, offset: int, pitch: int, aligned: bool
) -> None:
    batch, seq = 2, 37
    product = normal((batch, seq, width), dtype, 1)
    cos, sin = (normal((1, seq, rotated), dtype, seed) for seed in (2, 3))
    attributes = {"x_offset": offset, "x_pitch": pitch, "heads": heads, "size": size, "rotated": rotated}
    form = {"layout": "packed", "table": "bsd", "form": "rotate_half" if size == rotated else "rotate_part"}
    inputs = {"x": product, "cos": cos, "sin": sin}
    (y,) = run("rotary_embedding", inputs, [dtype], device, aligned, **attributes, **form)
    columns = offset + pitch * np.arange(heads)[:, None] + np.arange(size)
    expected = product[:, :, columns].astype(np.float64).swapaxes(1, 2)
    angles = (angle.astype(np.float64)[:, None] for angle in (cos, sin))
    expected[..., :rotated] = rotate_half(expected[..., :rotated], *angles)
    check(y, expected)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("table", ["bsd", "b1sd", "bs1d", "sd"])
@pytest.mark.parametrize("order", ["heads_first", "rows_first"])
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (128, 32), (10, 6), (96, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_of_neighbours(
    device: Device, dtype: str, size: int, rotated: int, order: str, table: str, aligned: bool
) -> None:
    batch, heads, seq = 2, 6, 19
    x = normal((batch, seq, heads, size), dtype, 1)
    cos, sin = (normal((1, seq, rotated), dtype, seed) for seed in (2, 3))
    shape = {"b1sd": (1, 1, seq, rotated), "bs1d": (1, seq, 1, rotated), "sd": (seq, rotated)}.get(table, cos.shape)
    form = "rotate_pairs" if size == rotated else "rotate_part_of_pairs"
    options = {"form": form, "layout": "bshd", "table": table, "order": order, "size": size, "rotated": rotated}
    inputs = {"x": x, "cos": cos.reshape(shape), "sin": sin.reshape(shape)}
    (y,) = run("rotary_embedding", inputs, [dtype], device, aligned, **options)
    expected = x.astype(np.float64)
    angles = (angle.astype(np.float64)[:, :, None] for angle in (cos, sin))
    expected[..., :rotated] = rotate_pairs(expected[..., :rotated], *angles)
    check(y, expected if order == "rows_first" else expected.swapaxes(1, 2))


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("table", ["hsd", "bhsd"])
@pytest.mark.parametrize("form", ["rotate_half", "rotate_part", "rotate_pairs", "complex_pairs"])
@pytest.mark.parametrize(
    ("batch", "tables", "heads", "seq", "size"), [(2, 1, 6, 16, 64), (3, 3, 5, 7, 20), (1, 1, 16, 1024, 128)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_by_tables_of_heads(
    device: Device, dtype: str, batch: int, tables: int, heads: int, seq: int, size: int, form: str, table: str,
    kept: int, aligned: bool,
) -> None:  # fmt: skip
    if table == "hsd" and tables > 1:
        return  # tables of heads that all images share
    rotated = {"rotate_part": size // 2, "complex_pairs": size}.get(form, size)
    columns = size // 2 if form == "complex_pairs" else rotated
    x = normal((batch, heads, seq, size), dtype, 1)
    cos, sin = (normal((tables, heads, seq - kept, columns), dtype, seed) for seed in (2, 3))
    shape = cos.shape[1:] if table == "hsd" else cos.shape
    inputs = {"x": x, "cos": cos.reshape(shape), "sin": sin.reshape(shape)}
    options = {"form": form, "layout": "bhsd", "table": table, "size": size, "rotated": rotated, "kept": kept}
    options["first_rows"] = "kept" if kept else "rotated"
    (y,) = run("rotary_embedding", inputs, [dtype], device, aligned, **options)
    expected, c, s = x.astype(np.float64), cos.astype(np.float64), sin.astype(np.float64)
    rows = expected[..., kept:, :]
    if form == "complex_pairs":
        rows[...] = rotate_complex(rows, c, s, form)
    else:
        rotate = rotate_pairs if form == "rotate_pairs" else rotate_half
        rows[..., :rotated] = rotate(rows[..., :rotated], c, s)
    check(y, expected)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("form", ["complex_halves", "complex_pairs", "complex_pairs_to_halves"])
@pytest.mark.parametrize("order", ["heads_first", "rows_first"])
@pytest.mark.parametrize("size", [64, 10, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_of_complex_pairs(
    device: Device, dtype: str, size: int, order: str, form: str, aligned: bool
) -> None:
    batch, heads, seq = 2, 6, 19
    x = normal((batch, seq, heads, size), dtype, 1)
    cos, sin = (normal((1, seq, size // 2), dtype, seed) for seed in (2, 3))
    options = {"form": form, "layout": "bshd", "table": "bsd", "order": order, "size": size}
    (y,) = run("rotary_embedding", {"x": x, "cos": cos, "sin": sin}, [dtype], device, aligned, **options)
    angles = (angle.astype(np.float64)[:, :, None] for angle in (cos, sin))
    expected = rotate_complex(x.astype(np.float64), *angles, form)
    check(y, expected if order == "rows_first" else expected.swapaxes(1, 2))


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (128, 32), (10, 6), (96, 48)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_operator(
    device: Device, dtype: str, packed: bool, size: int, rotated: int, interleaved: int
) -> None:
    batch, heads, seq = 2, 6, 19
    x = normal((batch, heads, seq, size), dtype, 1)
    cos, sin = (normal((batch, seq, rotated // 2), dtype, seed) for seed in (2, 3))
    given = np.ascontiguousarray(x.swapaxes(1, 2)).reshape(batch, seq, heads * size) if packed else x
    options = {"form": "operator", "interleaved": interleaved, "num_heads": heads, "rotary_embedding_dim": rotated}
    (y,) = run("rotary_embedding", {"x": given, "cos": cos, "sin": sin}, [dtype], device, **options)
    expected, c, s = x.astype(np.float64), *(angle.astype(np.float64)[:, None] for angle in (cos, sin))
    first = np.s_[..., 0:rotated:2] if interleaved else np.s_[..., : rotated // 2]
    second = np.s_[..., 1:rotated:2] if interleaved else np.s_[..., rotated // 2 : rotated]
    one, other = expected[first].copy(), expected[second].copy()
    expected[first], expected[second] = one * c - other * s, one * s + other * c
    check(y, expected.swapaxes(1, 2).reshape(batch, seq, heads * size) if packed else expected)


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("angles", ["twice", "once"])
@pytest.mark.parametrize("factor", [None, 1.5])
@pytest.mark.parametrize(("shape", "half"), [((2, 33), 32), ((7,), 5), ((1, 1), 64), ((3, 700), 1), ((0, 4), 8)])
@pytest.mark.parametrize("position", ["int64", "int32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_table(
    device: Device, dtype: str, position: str, shape: tuple[int, ...], half: int, factor: float | None, angles: str,
    aligned: bool,
) -> None:  # fmt: skip
    """Positions are of a long context, or negative; the product is rounded to float32, as the operators round it."""
    positions = np.random.default_rng(1).integers(-300, 200_000, shape).astype(position)
    frequencies = (10_000.0 ** -(np.arange(half) / half)).astype(np.float32)
    options: dict[str, str | float] = {"angles": angles, "sequences": "each" if len(shape) == 2 else "all"}
    options |= {"factor": factor} if factor else {}
    inputs = {"positions": positions, "frequencies": frequencies}
    found = run("rotary_table", inputs, [dtype, dtype], device, aligned, **options)
    products = (positions.reshape(-1, shape[-1])[..., None].astype(np.float32) * frequencies).astype(np.float64)
    both = np.concatenate([products, products], axis=-1) if angles == "twice" else products
    for each, of in zip(found, (np.cos, np.sin), strict=True):
        check(each, of(both) * (factor or 1.0))


def test_a_table_of_a_column_in_two_precisions(device: Device) -> None:
    positions, column = np.arange(9)[None], normal((1, 6, 1), "float32", 2)
    inputs = {"positions": positions, "column": column}
    cos, sin = run("rotary_table", inputs, ["float16", "float32"], device, angles="once")
    angles = (positions[..., None].astype(np.float32) * column.reshape(-1)).astype(np.float64)
    check(cos, np.cos(angles))
    check(sin, np.sin(angles))
