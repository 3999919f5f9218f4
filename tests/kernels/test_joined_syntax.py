"""Products, norms and attention with programs at random in their epilogue pass NVRTC, of operands in any broadcast."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from architectures import OF_ARCH
from attention_cases import Case
from conv_cases import ConvCase
from joined_cases import (
    Build,
    GroupNormCase,
    JoinedCase,
    NormCase,
    attention_case,
    case,
    conv_case,
    group_norm_case,
    norm_case,
)
from kernel_hosts import host_of
from region_drafts import RegionProgram, describe
from region_random import Draft, Value, binary, cast, quantizer, unary
from sampling import sampled

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")

from region_texts import refused_alone

from onnxfuse.kernels.conv import cudnn
from onnxfuse.kernels.gemm import cublaslt
from onnxfuse.runtime.plan import Device, Kernel, Launch

SEEDS = 10  # programs of each case and device
GPUS = [OF_ARCH[90], OF_ARCH[80]]


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "_is_available", lambda: False)
    monkeypatch.setattr(cudnn, "_is_available", lambda: False)


def random_build(seed: int, shape: tuple[int, ...]) -> Build:
    """Return a program of elementwise operators that reads y and operands of its shape, broadcast or through views."""

    def build(program: RegionProgram, y: str, _: Callable[..., str]) -> list[str]:
        chance = random.Random(seed)
        draft = Draft(chance, program)
        draft.keep(Value(y, shape, program.dtypes[y], 4.0, True))
        for _ in range(chance.choice([2, 4, 6, 9])):
            if chance.random() < 0.3:
                draft.values.insert(0, viewed(draft, shape, draft.values[-1].dtype))
            full = [each for each in draft.values[-3:] if each.shape == shape]
            chance.choice([binary, binary, binary, unary, cast, quantizer])(
                draft, chance.choice(full or draft.values[:1])
            )
        read = {name for each in program.ops for name in each[1]}
        found = [each.name for each in draft.values if each.shape == shape and each.name not in {*read, y}]
        return [*found[-3:], *([y] if chance.random() < 0.2 else [])] or [program.op("Neg", y)]

    return build


def viewed(draft: Draft, shape: tuple[int, ...], dtype: str) -> Value:
    """Return an operand that is read through a view, and broadcasts with a shape."""
    chance, rank = draft.chance, len(shape)
    own = tuple(1 if chance.random() < 0.3 else dim for dim in shape)
    way = chance.choice(["Transpose", "Slice", "Unsqueeze", "Reshape", "Split"])
    if way == "Transpose":
        x = draft.operand(own[::-1], dtype)
        name = draft.program.op(way, x.name, perm=list(range(rank))[::-1])
    elif way == "Slice":
        axis, start = chance.randrange(rank), chance.choice([0, 1, 3])
        x = draft.operand((*own[:axis], 2 * own[axis] + 3, *own[axis + 1 :]), dtype)
        step = chance.choice([1, 2])
        keys = {"axes": [axis], "starts": [start], "ends": [start + step * own[axis]], "steps": [step]}
        name = draft.program.op(way, x.name, **keys)
    elif way == "Unsqueeze":
        axis = chance.randrange(rank)
        own = (*own[:axis], 1, *own[axis + 1 :])
        x = draft.operand((*own[:axis], *own[axis + 1 :]), dtype)
        name = draft.program.op(way, x.name, axes=[axis])
    elif way == "Reshape":
        x = draft.operand((*own, 1), dtype)
        name = draft.program.op(way, x.name, shape=list(own))
    else:
        x = draft.operand((*own[:-1], 2 * own[-1]), dtype)
        name = draft.program.ops_of(way, x.name, count=2, axis=rank - 1, sizes=[own[-1]] * 2)[1]
    return Value(name, own, x.dtype, x.bound, True)


def bases() -> Iterator[JoinedCase]:
    """Yield a case for each kernel that takes programs."""
    yield case("rows", lead=(3,), n=72, k=200)
    yield case("rows", lead=(32, 128), n=768, k=768)
    yield case("rows", lead=(7, 43), n=257, k=129)
    yield case("rows", lead=(300,), n=512, k=512, dtype="float32")
    yield conv_case("rows", ConvCase(2, 64, 128, (14, 14), (3, 3), (), (1, 1, 1, 1)))
    yield conv_case("rows", ConvCase(2, 24, 40, (7, 9), (3, 3), (), (1, 1, 1, 1)))
    yield norm_case("rows", NormCase("layer_norm", (7, 5), 96))
    yield norm_case("rows", NormCase("add_rms_norm", (64,), 4096, "bfloat16", has_sum=True))
    yield group_norm_case("rows", GroupNormCase((2, 9, 9, 64), 8))
    yield attention_case("rows", Case(queries=70, keys=70, heads=4, kv_heads=2, size=64, value_size=64))
    yield attention_case("rows", Case(queries=3, keys=200, heads=4, kv_heads=2, size=40, value_size=40))


@pytest.mark.parametrize(("base", "device"), sampled([(base, gpu) for gpu in GPUS for base in bases()], 5), ids=str)
def test_programs_at_random(base: JoinedCase, device: Device) -> None:
    kernels, programs = dict[str, Kernel](), dict[str, RegionProgram]()
    for seed in range(SEEDS):
        made = replace(base, build=random_build(seed, (*base.lead, base.n))).made()
        node, specs = made.node(), made.specs(aligned=seed % 5 != 4)
        if host_of(node.fusion).supports(node, [spec.dtype for spec in specs], device):
            continue
        plan = host_of(node.fusion).candidates(node, specs, device)[0]
        own = {f"seed {seed}.{i}": step.kernel for i, step in enumerate(plan.steps) if isinstance(step, Launch)}
        kernels |= own
        programs |= dict.fromkeys(own, made.program)
    found = {name: refused_alone(kernel, device.arch) for name, kernel in kernels.items() if kernel.text}
    texts = [f"{name}: {message}\n{describe(programs[name])}" for name, message in found.items() if message]
    assert not texts, f"{len(texts)} of {len(found)} kernels do not compile:\n" + "\n".join(texts[:3])
