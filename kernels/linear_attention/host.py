"""The plans of linear attention, and of causal convolutions: see linear_attention.cuh and causal_conv_with_state.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels.linear_attention import causal_conv
from onnxfuse.kernels.linear_attention.problem import LinearAttention, heads_of, problem_of, unsupported
from onnxfuse.kernels.multiprocessor import MMA_ARCH
from onnxfuse.kernels.tensors import ABSENT, ITEM_BYTES, STORAGE, VECTOR_BYTES, Defines, float32, int32
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, NoAlias, Plan, Pointer, Struct, TensorSpec
from onnxfuse.runtime.symint import for_later_plans

CHUNK: Final = 64  # tokens
TOKEN_PITCH: Final = 2 * CHUNK + 16  # bytes of rows in shared memory that have an element for each token of a chunk
MIN_CHUNKED: Final = 16  # tokens from which chunks are used
MAX_CHUNKED_SIZE: Final = 128  # largest number of rows of a state that a warp keeps in registers with its products
MAX_SIZE: Final = 2048
MAX_VALUES: Final = 64  # elements of a state that a thread keeps, if possible
STAGED_BYTES: Final = 32768  # maximum bytes of tokens in shared memory, unless two tokens have more
MAX_TOKENS: Final = 16
TOKEN_WARPS: Final = 2
CHUNK_THREADS: Final = 128
PART: Final = 64  # tokens of a part of a sequence that is split
MIN_PARTS: Final = 3  # from which an H200 took less time than without them: 62 and 56 us for two, 90 and 212 for 8
STATE_THREADS: Final = 256
MAX_PRODUCT_COLUMNS: Final = 64  # of a state in a block of linear_attention_products.cu
PRODUCT_THREADS: Final = 256
STEP: Final = 32  # tokens that linear_attention_tf32.cu computes at once
MAX_STEP_COLUMNS: Final = 32  # of a state in a block of linear_attention_tf32.cu
STEP_THREADS: Final = 128  # with 256, an H200 took 119 us in place of 102 for eight sequences of Mamba-2
SCHEDULERS: Final = 4  # of a multiprocessor
COPYING: Final = 128  # threads of linear_attention_sequence.cu that copy
MIN_STAGES: Final = 2  # of shared memory; a third one hides more of the time of copies
MAX_WARPS: Final = 4  # warps per block of linear_attention_sequence.cu


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    if node.fusion == "causal_conv_with_state":
        return causal_conv.unsupported(node, input_dtypes)
    refusal = unsupported(node, input_dtypes)
    if refusal is None and (size := heads_of(node)[-2]) > MAX_SIZE:
        refusal = f"{node.fusion}: states have {size} rows; the kernels take up to {MAX_SIZE}"
    return refusal


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if node.fusion == "causal_conv_with_state":
        return causal_conv.candidates(node, inputs, device)
    problem = problem_of(node, inputs)
    if 0 in (problem.present if problem.has_present else problem.y).shape:
        return [Plan(problem.outputs, ())]
    tokens = [_by_tokens(problem, device)]
    if problem.length >= MIN_CHUNKED and not problem.beta and _has_steps(problem, device):
        with for_later_plans(problem.batch, problem.length):
            steps = _by_steps(problem, device)
            parts = [_by_parts(problem, device)] if problem.length >= 2 * PART else []
        is_fast = problem.length < MIN_PARTS * PART or _step_blocks(problem) > device.multiprocessors
        return [steps, *parts, *tokens] if is_fast else [*parts, steps, *tokens]
    if problem.length >= 2 * PART and not problem.beta:
        is_small = problem.batch * _blocks(problem) * TOKEN_WARPS < SCHEDULERS * device.multiprocessors
        is_fast = _has_products(problem, device) or (is_small and problem.length >= MIN_PARTS * PART)
        tokens.insert(0 if is_fast else 1, _by_parts(problem, device))
    if not _is_chunkable(problem, device) or problem.length < MIN_CHUNKED:
        return tokens
    widths = _widths(problem, device)
    with for_later_plans(problem.batch, problem.length):
        return [*(_by_chunks(problem, warps, device) for warps in widths), *tokens]


def _plan(problem: LinearAttention, steps: tuple[Launch, ...], scratch: tuple[int, ...], same_start: bool) -> Plan:
    past = problem.node.input_index("past_state")
    aliases = (NoAlias(past, 1, same_start=same_start),) if past is not None and problem.has_present else ()
    return Plan(problem.outputs, steps, scratch, aliases)


# --- token after token -----------------------------------------------------------------------------------------------


def _lanes(problem: LinearAttention) -> tuple[int, int, int]:
    """Return how many lanes share the columns of a state, how many columns a thread has, and the warps of a block.

    A warp reads whole columns of a few tokens' state where it is stored by column: an H200 took 3.4 us in place of 4.6
    for 32 states of 128 x 128, 69 in place of 72 for 2048, and more than twice as long for states stored by row.
    """
    if problem.by_column and problem.length < MIN_CHUNKED and -(-problem.size // 32) * 4 <= MAX_VALUES:
        return 32, 4, 4
    return next(
        (lanes, columns, TOKEN_WARPS)
        for lanes, columns in ((8, 4), (16, 4), (32, 4), (32, 2), (32, 1))
        if -(-problem.size // lanes) * columns <= MAX_VALUES or columns == 1
    )


def _blocks(problem: LinearAttention) -> int:
    """Return the number of blocks for one sequence, or for a part of it."""
    lanes, columns, warps = _lanes(problem)
    return problem.state_heads * -(-problem.value_size // (32 // lanes * columns * warps))


def _by_tokens(problem: LinearAttention, device: Device) -> Plan:
    operands = Struct((*problem.operands, *problem.states.fields, ABSENT))
    launch = _tokens(problem, device, operands, problem.length, 1, {})
    return _plan(problem, (launch,), (), same_start=True)


def _by_parts(problem: LinearAttention, device: Device) -> Plan:
    """Return a plan for sequences of at least two parts, without the delta rule: see linear_attention_parts.cu."""
    parts = -(-problem.length // PART)
    between, decays = Pointer("scratch", 0), Pointer("scratch", 1)
    past, present, y = problem.states.fields
    state = problem.size * problem.value_size
    states = problem.batch * parts * problem.state_heads
    scratch = (4 * states * state, 4 * states * (problem.size if problem.decay == 2 else 1))
    first = Struct((*problem.operands, ABSENT, between, y, decays))
    last = Struct((*problem.operands, between, ABSENT, y, ABSENT))
    launch = _products if _has_products(problem, device) else _tokens_of_parts
    names = "T", "GATE_T", "STATE_T", "STATES_BY_COLUMN", "STATE_HEADS", "K_HEADS", "DECAY", "PAST", "PRESENT"
    own = {name: problem.defines[name] for name in names}
    defines: Defines = {
        **own, "STATE": state, "COLUMNS": problem.value_size, "PART": PART, "THREADS": STATE_THREADS
    }  # fmt: skip
    combine = Launch(
        Kernel("linear_attention_parts", "linear_attention_parts", defines),
        (problem.batch * problem.state_heads * -(-state // STATE_THREADS), 1, 1), (STATE_THREADS, 1, 1),
        (Struct(problem.operands), past, present, between, decays, *int32(problem.length, parts)), pdl=device.has_pdl,
    )  # fmt: skip
    steps = (launch(problem, device, first, parts, False), combine, launch(problem, device, last, parts, True))
    return _plan(problem, steps, scratch, same_start=True)


def _tokens_of_parts(
    problem: LinearAttention, device: Device, operands: Struct, parts: int, with_results: bool
) -> Launch:
    """Return the launch for the parts' own states or, after they were combined, for the results."""
    of_results: Defines = {"PAST": 1, "PRESENT": 0, "RESULTS": 1} if with_results else {"PAST": 0, "RESULTS": 0}
    between: Defines = {"STATE_T": STORAGE["float32"], "STATES_BY_COLUMN": 0, **of_results}
    return _tokens(problem, device, operands, PART, parts, between)


def _tokens(
    problem: LinearAttention, device: Device, operands: Struct, tokens_of_a_part: int, parts: int, own: Defines
) -> Launch:
    """Return a launch of linear_attention_tokens.cu, with `own` macros in place of the problem's."""
    lanes, columns, warps = _lanes(problem)
    tile = 32 // lanes * columns * warps
    macros: Defines = {"RESULTS": 1, **problem.defines, **own}
    items = ITEM_BYTES[problem.dtype], 4 if own else ITEM_BYTES[problem.state_dtype]
    width = _width(problem, VECTOR_BYTES // max(items), problem.value_size, columns)
    state_width, gate = width, ITEM_BYTES[problem.gate_dtype]
    if macros["STATES_BY_COLUMN"]:  # a thread has runs of four rows: see RUN in linear_attention_tokens.cu
        has_runs = problem.size % (4 * lanes) == 0 == tile % (4 * gate // items[0])
        state_width = _width(problem, 4, problem.size, 4 if has_runs else 1)
    step = _width(problem, VECTOR_BYTES // items[0], problem.size, problem.value_size, tile)
    heads = problem.heads // problem.state_heads if macros["RESULTS"] else 0
    decays = problem.size * gate if problem.decay == 2 else 0
    rows = -(-(problem.size * (1 + heads) + tile) * items[0] // gate) * gate
    token = -(-(rows + decays) // 16) * 16 + 8  # bytes
    if token > device.shared_per_block:
        raise ValueError(
            f"{problem.node.label}: a token takes {token} bytes of shared memory; {device.name} has "
            f"{device.shared_per_block}"
        )
    buffers = 1 + (2 * token <= device.shared_per_block)
    tokens = max(1, min(MAX_TOKENS, STAGED_BYTES // (buffers * token)))
    defines: Defines = {
        **macros, "LANES": lanes, "COLUMNS": columns, "WIDTH": width, "STATE_WIDTH": state_width, "STEP": step,
        "WARPS": warps, "TOKENS": tokens, "BUFFERS": buffers,
    }  # fmt: skip
    return Launch(
        Kernel("linear_attention_tokens", "linear_attention_tokens", defines),
        (problem.batch * parts * _blocks(problem), 1, 1), (32 * warps, 1, 1),
        (operands, *int32(problem.length, tokens_of_a_part, parts), *float32(problem.scale)), buffers * tokens * token,
        pdl=device.has_pdl,
    )  # fmt: skip


def _width(problem: LinearAttention, widest: int, *extents: int) -> int:
    """Return the most elements of an aligned access, a power of two that divides all extents."""
    return math.gcd(widest, *extents) if problem.aligned else 1


# --- parts in float32 on tensor cores ---------------------------------------------------------------------------------


def _has_products(problem: LinearAttention, device: Device) -> bool:
    return (
        device.arch >= MMA_ARCH
        and problem.dtype == "float32"
        and problem.aligned
        and problem.decay < 2
        and problem.size % 16 == problem.value_size % 16 == 0
        and _product_bytes(problem, True) <= device.shared_per_block
    )


def _product_columns(problem: LinearAttention) -> int:
    return math.gcd(problem.value_size, MAX_PRODUCT_COLUMNS)


def _product_bytes(problem: LinearAttention, with_results: bool) -> int:
    values, keys = _product_columns(problem) + 8, problem.size + (4 if with_results else 8)
    state, scores = problem.size * values, PART * (keys + PART + 4)
    tiles = max(state, PART * keys) + scores if with_results else PART * keys
    return 4 * (tiles + PART * values) + 20 * PART


def _products(problem: LinearAttention, device: Device, operands: Struct, parts: int, with_results: bool) -> Launch:
    """Return the launch that `_tokens_of_parts` returns, by linear_attention_products.cu."""
    columns = _product_columns(problem)
    names = "SIZE", "VALUE_SIZE", "STATE_HEADS", "Q_HEADS", "K_HEADS", "HEADS", "DECAY", "PRESENT"
    own = {name: problem.defines[name] for name in names}
    defines: Defines = {
        **own, "COLUMNS": columns, "RESULTS": int(with_results), "PART": PART, "THREADS": PRODUCT_THREADS,
        "TF32": int(device.tf32),
    }  # fmt: skip
    heads = problem.heads if with_results else problem.state_heads
    return Launch(
        Kernel("linear_attention_products", "linear_attention_products", defines),
        (problem.batch * parts * heads * (problem.value_size // columns), 1, 1), (PRODUCT_THREADS, 1, 1),
        (operands, *int32(problem.length, parts), *float32(problem.scale)), _product_bytes(problem, with_results),
        pdl=device.has_pdl,
    )  # fmt: skip


def _has_steps(problem: LinearAttention, device: Device) -> bool:
    has_room = _step_bytes(problem, 2) <= device.shared_per_block
    return device.tf32 and problem.state_dtype == "float32" and _has_products(problem, device) and has_room


def _step_blocks(problem: LinearAttention) -> int:
    return problem.batch * problem.heads * (problem.value_size // _step_columns(problem))


def _step_columns(problem: LinearAttention) -> int:
    return math.gcd(problem.value_size, MAX_STEP_COLUMNS)


def _step_bytes(problem: LinearAttention, stages: int) -> int:
    columns = _step_columns(problem)
    return 4 * (stages * STEP * (2 * problem.size + columns + 17) + problem.size * (columns + 8) + STEP * (STEP + 7))


def _by_steps(problem: LinearAttention, device: Device) -> Plan:
    """Return a plan in which a block goes along a sequence with columns of a state: see linear_attention_tf32.cu."""
    columns = _step_columns(problem)
    stages = 1 if _step_blocks(problem) > device.multiprocessors else 2  # with one, more blocks share a multiprocessor
    names = (
        "SIZE",
        "VALUE_SIZE",
        "STATE_HEADS",
        "Q_HEADS",
        "K_HEADS",
        "HEADS",
        "DECAY",
        "PAST",
        "PRESENT",
        "STATES_BY_COLUMN",
    )
    own = {name: problem.defines[name] for name in names}
    defines: Defines = {
        **own, "COLUMNS": columns, "PART": STEP, "THREADS": STEP_THREADS, "TF32": 1, "STAGES": stages,
    }  # fmt: skip
    past, present, y = problem.states.fields
    launch = Launch(
        Kernel("linear_attention_tf32", "linear_attention_tf32", defines), (_step_blocks(problem), 1, 1),
        (STEP_THREADS, 1, 1),
        (Struct((*problem.operands, past, present, y, ABSENT)), *int32(problem.length), *float32(problem.scale)),
        _step_bytes(problem, stages), pdl=device.has_pdl,
    )  # fmt: skip
    return _plan(problem, (launch,), (), same_start=problem.heads == problem.state_heads)


# --- chunks ----------------------------------------------------------------------------------------------------------


def _is_chunkable(problem: LinearAttention, device: Device) -> bool:
    return (
        device.arch >= MMA_ARCH
        and problem.dtype != "float32"
        and problem.aligned
        and problem.decay < 2
        and problem.size % 16 == problem.value_size % 16 == 0
        and problem.size <= MAX_CHUNKED_SIZE
        and max(_chunk_bytes(problem), _sequence_bytes(problem, 1, MIN_STAGES)) <= device.shared_per_block
    )


def _widths(problem: LinearAttention, device: Device) -> list[int]:
    """Return the numbers of warps per block of the sequential pass, the expected fastest first.

    A block with more warps reads the chunks of a head for more columns of its state at once.
    """
    fitting = [
        warps
        for warps in (1, 2, MAX_WARPS)
        if problem.value_size % (16 * warps) == 0
        and _sequence_bytes(problem, warps, MIN_STAGES) <= device.shared_per_block
    ]
    blocks = problem.batch * problem.heads * problem.value_size // 16
    wide = [warps for warps in fitting[1:] if blocks // warps >= device.multiprocessors * warps * 3 // 16]
    best = wide[-1] if wide else fitting[0]
    return [best, *(warps for warps in fitting if warps != best)]


def _chunk_bytes(problem: LinearAttention) -> int:
    tile, inverse = CHUNK * (2 * problem.size + 16), 2 * CHUNK * TOKEN_PITCH
    both = max(tile, inverse) + CHUNK * 68 * 4 if problem.beta else tile
    return tile + CHUNK * (2 * problem.value_size + 16) + both + 3 * CHUNK * 4


def _sequence_bytes(problem: LinearAttention, warps: int, stages: int) -> int:
    tiles = 2 * CHUNK * (2 * problem.size + 16) + (CHUNK + 16 * warps) * TOKEN_PITCH + 2 * CHUNK * 8
    weights = problem.size * TOKEN_PITCH if problem.beta else 0
    return stages * (tiles + weights) + 2 * warps * 32 * (problem.size + CHUNK)


def _by_chunks(problem: LinearAttention, warps: int, device: Device) -> Plan:
    chunks = -(-problem.length // CHUNK)
    stages = MIN_STAGES + (_sequence_bytes(problem, warps, MIN_STAGES + 1) <= device.shared_per_block)
    states, results = problem.batch * problem.state_heads * chunks, problem.batch * problem.heads * chunks
    item = ITEM_BYTES[problem.dtype]
    weights = states * CHUNK * problem.size * item if problem.beta else 16
    scratch = (
        states * CHUNK * problem.value_size * item, weights, results * CHUNK * CHUNK * item, states * CHUNK * 8,
    )  # fmt: skip
    between = Struct(tuple(Pointer("scratch", i) for i in range(4)))
    operands = Struct(problem.operands)
    first = Launch(
        Kernel("linear_attention_chunks", "linear_attention_chunks", problem.defines), (results, 1, 1),
        (CHUNK_THREADS, 1, 1), (operands, between, *int32(problem.length, chunks)), _chunk_bytes(problem),
        pdl=device.has_pdl,
    )  # fmt: skip
    defines: Defines = {**problem.defines, "WARPS": warps, "STAGES": stages}
    blocks = problem.batch * problem.heads * (problem.value_size // (16 * warps))
    second = Launch(
        Kernel("linear_attention_sequence", "linear_attention_sequence", defines), (blocks, 1, 1),
        (COPYING + 64 * warps, 1, 1),
        (operands, between, problem.states, *int32(problem.length, chunks), *float32(problem.scale)),
        _sequence_bytes(problem, warps, stages), pdl=device.has_pdl,
    )  # fmt: skip
    return _plan(problem, (first, second), scratch, same_start=problem.heads == problem.state_heads)
