"""The plans of recurrent layers: the products of all inputs with W, then all steps in the launch of recurrent.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.activations import Activated, activations_of_recurrence
from onnxfuse.kernels.concat_plans import chained
from onnxfuse.kernels.gemm import host as gemm
from onnxfuse.kernels.multiprocessor import MMA_ARCH
from onnxfuse.kernels.tensors import (
    ABSENT,
    ITEM_BYTES,
    STORAGE,
    Defines,
    float32,
    int32,
    required_spec,
    shaped_pointer,
    unsupported_bfloat16,
    unsupported_dtype,
    vector_width,
)
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Kernel, Launch, Plan, Pointer, Struct, TensorSpec, Value
from onnxfuse.runtime.symint import estimate, minimum

GATES: Final = {"lstm": 4, "gru": 3, "rnn": 1}
USUAL: Final = {"lstm": ("Sigmoid", "Tanh", "Tanh"), "gru": ("Sigmoid", "Tanh"), "rnn": ("Tanh",)}
CLUSTER_ARCH: Final = 90  # the lowest compute capability with thread block clusters
# Only GPUs with more shared memory in a block than this run clusters of 16 blocks.  A cluster runs within one of eight
# GPCs.  From this many multiprocessors on, one GPC has 16.  On others, such as an H20 with 78, launches can fail.
LARGE_CLUSTER_BYTES: Final = 200 << 10
LARGE_CLUSTER_MULTIPROCESSORS: Final = 8 * 14 + 1  # GPCs have even numbers of them
# Clusters that an H200 runs at once, by their blocks, with one block a multiprocessor.
CLUSTERS_AT_ONCE: Final = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}
PART_BYTES: Final = 64  # bytes of a row of weights in one part, as in recurrent.cu
TILE: Final = 16  # rows of a tile
INBOXES_BYTES: Final = 32
REGISTERS: Final = {512: 128, 256: 240}  # of a thread, by the threads of a block
# Registers of a thread for all but weights, products and units, by mma (True) and by FMA: enough to spill none.
OTHER_REGISTERS: Final = {True: 36, False: 46}
COLUMNS: Final = {True: (8, 16, 32), False: (1, 2, 4, 8)}  # sequences of a cluster, by mma and by FMA
MAX_PLANS: Final = 4
# Estimated clocks, fitted to times of an H200.
MMA_CLOCKS: Final = 8  # of a quarter of a multiprocessor for one mma
STORED_CLOCKS: Final = 0.8  # for each clock of loading weights from shared memory, which mma partly hides
FMA_CLOCKS: Final = 150  # to add up the sums of lanes
EXCHANGE_CLOCKS: Final = {1: 670, 2: 500, 4: 560, 8: 660, 16: 740}  # of a step of any size, by its blocks
WORD_CLOCKS: Final = 0.5  # to send one word of states to all blocks
UNITS_CLOCKS: Final = 200  # from the sums to the states of 128 units, 32 for each quarter of a multiprocessor


@dataclass(frozen=True)
class Layer:
    """The sizes and the form of a layer."""

    steps: int
    batch: int
    inputs: int
    hidden: int
    directions: int
    gates: int
    dtype: str
    reset_first: bool  # a GRU whose reset gate multiplies the state before the weights

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of the states after a step."""
        return self.directions, self.batch, self.hidden

    @property
    def parts(self) -> int:
        """The parts of a row of weights."""
        return -(-self.hidden * ITEM_BYTES[self.dtype] // PART_BYTES)


@dataclass(frozen=True)
class Config:
    """How the weights of a direction are divided among the blocks, warps and threads of a cluster."""

    cluster: int  # blocks
    units: int  # of the state, in a block
    columns: int  # sequences
    warps: int
    split: int  # warps that share tiles
    tiles: int  # of a warp
    steps: int  # parts of a warp
    held: int  # parts in registers
    shared: int  # bytes
    mma: bool

    def clocks(self, layer: Layer) -> float:
        """Return the estimated clocks of a step of a cluster."""
        stored = self.warps * self.tiles * (self.steps - self.held) * 8
        if self.mma:
            mmas = self.warps // 4 * self.tiles * self.steps * 2 * (self.columns // 8)
            products = mmas * MMA_CLOCKS + stored * STORED_CLOCKS
        else:
            products = max(self.warps * self.steps * self.columns * max(4, 2 * self.tiles), stored) + FMA_CLOCKS
        rows = minimum(self.columns, layer.batch)
        words = estimate(rows) * layer.hidden * ITEM_BYTES[layer.dtype] / 4 if self.cluster > 1 else 0
        units = estimate(-(-self.units * rows // 128))
        clocks: float = products + units * UNITS_CLOCKS + EXCHANGE_CLOCKS[self.cluster] + words * WORD_CLOCKS
        return clocks


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    floats = [(name, dtype) for name, dtype in zip(node.operands, input_dtypes, strict=True) if name != "sequence_lens"]
    rest = FusedNode(node.fusion, node.name, tuple(n for n, _ in floats), node.attributes, node.output_dtypes)
    dtype, hidden = input_dtypes[0], node.integer("hidden", 0)
    if why := unsupported_dtype(rest, [each for _, each in floats]) or unsupported_bfloat16(node, "x", dtype, device):
        return why
    layer = Layer(1, 1, 1, hidden, node.integer("directions", 1), GATES[node.fusion], dtype, _resets_first(node))
    if hidden < 1 or not configs(layer, device):
        bytes_of = layer.gates * hidden * hidden * ITEM_BYTES[dtype] >> 10
        return f"{node.fusion}: no kernel keeps the {bytes_of} KiB of recurrent weights of {hidden} units on chip"
    return None


def lengths(node: FusedNode, outputs: Sequence[TensorSpec]) -> dict[str, int]:
    """Return the largest values of operands that hold lengths, by name; `outputs` are the outputs of a plan."""
    return {"sequence_lens": outputs[0].shape[0]} if "sequence_lens" in node.operands else {}


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    layer = layer_of(node, inputs)
    x, w = required_spec(node, inputs, "x"), required_spec(node, inputs, "w")
    shapes = [(layer.steps, *layer.state), layer.state, layer.state]
    outputs = tuple(
        TensorSpec(shape, dtype, x.aligned) for shape, dtype in zip(shapes, node.output_dtypes, strict=False)
    )
    if layer.batch == 0:
        return [Plan(outputs, ())]
    columns = layer.directions * layer.gates * layer.hidden
    product = FusedNode("gemm_bias_activation", node.name, ("x", "w"), {"weight_layout": "nk"}, (layer.dtype,))
    matrix = TensorSpec((columns, layer.inputs), w.dtype, w.aligned, w.constant)
    first = gemm.candidates(product, [x, matrix], device)[0]
    others = [i for i, name in enumerate(node.operands) if name not in ("x", "w")]
    return [
        chained(first, Plan(outputs, (steps_of(node, inputs, layer, config, device),)),
                [node.operands.index("x"), node.operands.index("w")], [None, *others])
        for config in ranked(layer, device)
    ]  # fmt: skip


def layer_of(node: FusedNode, inputs: Sequence[TensorSpec]) -> Layer:
    """Return the layer of a node.  Raises ValueError if shapes do not fit."""
    x, w, r = (required_spec(node, inputs, name) for name in ("x", "w", "r"))
    if len(x.shape) != 3 or len(w.shape) != 3 or len(r.shape) != 3:
        raise ValueError(
            f"{node.label}: x, w and r have {len(x.shape)}, {len(w.shape)}, {len(r.shape)} axes; required 3"
        )
    (steps, batch, size), (directions, rows, hidden), gates = x.shape, r.shape, GATES[node.fusion]
    if rows != gates * hidden or w.shape != (directions, rows, size):
        found = f"w has shape {list(w.shape)}, r {list(r.shape)}, x {list(x.shape)}"
        raise ValueError(f"{node.label}: {found}; required (directions, {gates} hidden, inputs) and (..., hidden)")
    expected = {
        "bias": (directions, 2 * rows), "peepholes": (directions, 3 * hidden), "sequence_lens": (batch,),
        "initial_h": (directions, batch, hidden), "initial_c": (directions, batch, hidden),
    }  # fmt: skip
    for name, shape in expected.items():
        shaped_pointer(node, inputs, name, shape)
    return Layer(steps, batch, size, hidden, directions, gates, x.dtype, _resets_first(node))


def _resets_first(node: FusedNode) -> bool:
    return node.fusion == "gru" and not node.integer("linear_before_reset", 0)


# ---- how the weights are divided -----------------------------------------------------------------------------------


def configs(layer: Layer, device: Device) -> list[Config]:
    """Return all ways to run a layer on a device, whatever the batch is."""
    is_float32 = layer.dtype == "float32"
    kinds = [False, True] if is_float32 and device.tf32 and device.arch >= MMA_ARCH else [not is_float32]
    large = device.shared_per_block > LARGE_CLUSTER_BYTES and device.multiprocessors >= LARGE_CLUSTER_MULTIPROCESSORS
    clusters = (1, 2, 4, 8, *((16,) if large else ())) if device.arch >= CLUSTER_ARCH else (1,)
    found = [
        _config(layer, cluster, columns, threads, mma, device)
        for mma in kinds for cluster in clusters for columns in COLUMNS[mma] for threads in REGISTERS
        if cluster == 1 or cluster * TILE <= 2 * layer.hidden
    ]  # fmt: skip
    return [each for each in found if each]


def _config(layer: Layer, cluster: int, columns: int, threads: int, mma: bool, device: Device) -> Config | None:
    """Return how a cluster divides the weights; None if they do not fit on chip."""
    multiple = TILE if layer.reset_first else 2
    units = -(-layer.hidden // (cluster * multiple)) * multiple
    rows, warps = -(-layer.gates * units // TILE), threads // 32

    def of(split: int) -> tuple[int, int]:
        return -(-rows // (warps // split)), -(-layer.parts // split)

    splits = [split for split in (1, 2, 4, 8, 16) if split <= min(warps, layer.parts)]
    split = min(splits, key=lambda each: (math.prod(of(each)), each))
    tiles, steps = of(split)
    of_products = (max(tiles, 4 if tiles * columns == 8 else 1) + 1) * columns // 2 if mma else 4 * tiles * columns
    taken = OTHER_REGISTERS[mma] + -(-units * columns // threads) * (layer.gates + 3) + of_products
    fitting = max(0, REGISTERS[threads] - taken) // (8 * tiles)
    held = steps if fitting >= steps else max(0, fitting - 1)  # one part is on its way from shared memory
    row = PART_BYTES * split * steps
    pitch = row + (0 if row % 128 else PART_BYTES)
    biases = 4 if layer.gates == 3 else layer.gates
    sums = 4 * (split * columns * (TILE * rows + 4) + (biases + 3) * units)
    memory = INBOXES_BYTES + (3 if layer.reset_first else 2) * columns * pitch + sums
    shared = -(-memory // 16) * 16 + warps * tiles * (steps - held) * 1024
    if shared > device.shared_per_block or tiles * max(1, columns // 8) > 16:
        return None
    return Config(cluster, units, columns, warps, split, tiles, steps, held, shared, mma)


def ranked(layer: Layer, device: Device) -> list[Config]:
    """Return the ways to run a layer that are worth timing, the expected fastest first."""
    best = dict[tuple[int, bool], Config]()

    def clocks(config: Config) -> float:
        """Return the estimated clocks of a step, times the rounds in which all clusters run."""
        share = CLUSTERS_AT_ONCE[1] * layer.directions
        at_once = max(1, CLUSTERS_AT_ONCE[config.cluster] * device.multiprocessors // share)
        rounds: float = estimate(-(-layer.batch // (config.columns * at_once)))
        return config.clocks(layer) * rounds

    for config in configs(layer, device):
        kind = config.cluster, config.mma
        if kind not in best or clocks(config) < clocks(best[kind]):
            best[kind] = config
    return sorted(best.values(), key=clocks)[:MAX_PLANS]


# ---- the launch ----------------------------------------------------------------------------------------------------


def steps_of(node: FusedNode, inputs: Sequence[TensorSpec], layer: Layer, config: Config, device: Device) -> Launch:
    """Return the launch of all steps.  Its input 0 is the product of x and w; the node's other operands follow."""
    names = [name for name in node.operands if name not in ("x", "w")]

    def pointer(name: str) -> Value:
        return Pointer("input", 1 + names.index(name)) if name in names else ABSENT

    r = required_spec(node, inputs, "r")
    defines: Defines = {
        "T": STORAGE[layer.dtype], "PRECISE": int(layer.dtype == "float32"), "GATES": layer.gates,
        "HIDDEN": layer.hidden, "DIRECTIONS": layer.directions,
        "REVERSED": int(node.text("direction", "forward") == "reverse"), "CLUSTER": config.cluster,
        "UNITS": config.units, "BATCH": config.columns, "WARPS": config.warps, "SPLIT": config.split,
        "TILES": config.tiles, "STEPS": config.steps, "HELD": config.held, "WIDTH": vector_width([r], layer.hidden),
        "WEIGHTS_CONSTANT": int(r.constant), "BY_MMA": int(config.mma), "RESET_FIRST": int(layer.reset_first),
        "COUPLED": int(node.integer("input_forget", 0) != 0), "CLIP": int("clip" in node.attributes),
        "HAS_BIAS": int("bias" in names), "HAS_PEEPHOLES": int("peepholes" in names),
        "HAS_LENGTHS": int("sequence_lens" in names), "HAS_H": int("initial_h" in names),
        "HAS_C": int("initial_c" in names), **_activations(node),
    }  # fmt: skip
    operands = Struct((Pointer("input", 0), *map(pointer, ("r", "bias", "peepholes", "initial_h", "initial_c",
                                                           "sequence_lens"))))  # fmt: skip
    results = Struct(tuple(Pointer("output", i) if i < len(node.output_dtypes) else ABSENT for i in range(3)))
    slices = -(-layer.batch // config.columns)
    arguments: tuple[Argument, ...] = (
        operands, results, *int32(layer.steps, layer.batch, slices), *float32(node.number("clip", math.inf)),
    )  # fmt: skip
    grid, block = (slices * layer.directions * config.cluster, 1, 1), (32 * config.warps, 1, 1)
    kernel = Kernel("recurrent", "recurrent", defines)
    return Launch(kernel, grid, block, arguments, config.shared, config.cluster, pdl=device.has_pdl)


def _activations(node: FusedNode) -> Defines:
    """Return the macros of the activations of one direction.  Raises ValueError for one that no kernel has."""
    usual = USUAL[node.fusion]
    names = node.text("activations", " ".join(usual)).split()
    alpha, beta = (_numbers(node, f"activation_{each}") for each in ("alpha", "beta"))
    found = activations_of_recurrence(names[: len(usual)], alpha, beta)
    if found is None:
        raise ValueError(f"{node.label}: activations are {names}; no kernel has one of them")
    macros: Defines = {}
    of_direction = [*found, *(Activated("none", 0, 0) for _ in range(3 - len(usual)))]
    for i, each in enumerate(of_direction, 1):
        macros |= {
            f"ACTIVATION_{i}": each.name,
            f"ALPHA_{i}": f"{float(each.alpha)}f",
            f"BETA_{i}": f"{float(each.beta)}f",
        }
    return macros


def _numbers(node: FusedNode, attribute: str) -> list[float]:
    found = node.attributes.get(attribute)
    return [float(number) for number in found] if isinstance(found, list) else []
