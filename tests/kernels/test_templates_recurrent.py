"""Plan templates of recurrent layers: any number of steps and sequences, by few kernels."""

from __future__ import annotations

import random

import pytest
from architectures import A100, H200
from recurrent_cases import STATES, Case
from sampling import sampled
from template_checks import check_template, with_dynamic_dims

from onnxfuse.runtime.plan import Device

pytestmark = pytest.mark.usefixtures("no_cublaslt")
MAX_KERNELS = 40  # of products of inputs, and of clusters of different sizes
STEPS, BATCH = 771, 773  # equal to no other size
CASES = [
    Case(fusion, STEPS, BATCH, 64, hidden, direction, STATES, dtype="float16")
    for fusion, hidden, direction in (("lstm", 128, "forward"), ("lstm", 512, "bidirectional"), ("gru", 100, "reverse"))
]


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize("case", sampled(CASES, 3), ids=lambda case: f"{case.fusion}-{case.hidden}")
def test_templates_say_what_their_host_says(case: Case, device: Device) -> None:
    if device is A100 and case.hidden > 128:
        pytest.skip("weights need the memory of several blocks")

    def sizes(seed: int) -> list[int]:
        chance = random.Random(seed)
        return [int(500 ** chance.random()), int(300 ** chance.random())]

    inputs = with_dynamic_dims(case.specs(), STEPS, BATCH)
    check_template(case.node(), inputs, device, max_kernels=MAX_KERNELS, sizes=sizes)
