"""GPUs by name and compute capability, as `onnxfuse compile` takes them."""

from __future__ import annotations

import dataclasses

import pytest

from onnxfuse.errors import UsageError
from onnxfuse.runtime.gpu_kinds import KNOWN_GPUS, gpu_kind, named_gpus, nearest_kinds, plans_alike
from onnxfuse.runtime.plan import NO_GPU, Device

HERE = Device("NVIDIA H100 PCIe", 90, 114, 232448, ordinal=0)


def names(*arguments: list[str], present: tuple[Device, ...] = ()) -> list[str]:
    return [each.name for each in named_gpus(*arguments, present)]


def test_a_capability_stands_for_its_usual_gpu() -> None:
    assert names(["sm_90", "sm_80", "sm_90"], []) == ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]
    assert not any(each.is_here for each in named_gpus(["sm_75", "sm_120"], [], ()))


def test_a_gpu_of_this_machine_is_preferred() -> None:
    (found,) = named_gpus(["sm_90"], [], [HERE])
    assert found is HERE and found.is_here
    assert named_gpus([], ["h100 pcie"], [HERE])[0] is HERE
    assert names(["sm_80"], [], present=(HERE,)) == ["NVIDIA A100-SXM4-80GB"]


def test_words_of_a_name_may_be_left_out() -> None:
    assert names([], ["H200", "nvidia l40"]) == ["NVIDIA H200", "NVIDIA L40"]
    assert names([], ["a100"]) == ["NVIDIA A100-SXM4-80GB"], "hosts plan the same for all of them"
    assert names(["sm_90"], ["H100 NVL", "T4"]) == ["NVIDIA H100 NVL", "Tesla T4"], "the capability is there"
    with pytest.raises(UsageError, match="there are several GPUs of the name 'H100'; known are NVIDIA H100 80GB"):
        named_gpus([], ["H100"], ())
    with pytest.raises(UsageError, match=r"no GPU is known of the name 'H2000'; known are .*NVIDIA H200"):
        named_gpus([], ["H2000"], ())


@pytest.mark.parametrize(
    "arch, message",
    [
        ("90", "'90' is not a compute capability; give it as in --arch sm_90"),
        ("sm_90a", "'sm_90a' is not a compute capability"),
        ("sm_70", "no GPU of compute capability sm_70 is known; known are sm_75, sm_80, sm_86, sm_89, sm_90"),
    ],
)
def test_a_capability_that_is_not_known_is_refused(arch: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        named_gpus([arch], [], ())


def test_the_table_has_every_gpu_once() -> None:
    assert len({each.name for each in KNOWN_GPUS}) == len(KNOWN_GPUS)
    assert {each.ordinal for each in KNOWN_GPUS} == {NO_GPU}


def test_the_most_similar_kind_comes_first() -> None:
    kinds = [dataclasses.replace(HERE, **facts) for facts in (
        {"multiprocessors": 132}, {"multiprocessors": 16}, {"arch": 80}, {"name": "other"}, {}
    )]  # fmt: skip
    found = nearest_kinds(kinds, gpu_kind(HERE))
    assert found == [kinds[4], kinds[3], kinds[0], kinds[1]]
    assert [plans_alike(kind, gpu_kind(HERE)) for kind in found] == [True, True, False, False]
