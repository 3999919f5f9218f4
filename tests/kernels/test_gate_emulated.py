"""Gates of channels on a CPU, by the kernels' own sources: in front of products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from architectures import H200
from conv_cases import ConvCase
from conv_mma_emulation import check_emulated
from gate_cases import gated_convs
from sampling import sampled

from onnxfuse.kernels.conv import matrix
from onnxfuse.kernels.gemm import mma

EVERY = 9  # of the cases, in a plain run of the tests


@pytest.mark.parametrize(("index", "case"), sampled(enumerate(gated_convs()), EVERY), ids=str)
def test_products_of_gated_images(index: int, case: ConvCase, tmp_path: Path) -> None:
    gemm, device = matrix.as_gemm(case.problem()), replace(H200, tf32=case.tf32)
    way = mma.implementation(gemm, mma.GATE_CONFIGS[index % len(mma.GATE_CONFIGS)], device)
    check_emulated(case, way, device, exact=False, at_once=index % 2 == 1, folder=tmp_path)


@pytest.mark.parametrize("config", sampled(mma.GATE_CONFIGS, len(mma.GATE_CONFIGS)), ids=lambda config: config.name)
def test_every_tile(config: mma.MmaConfig, tmp_path: Path) -> None:
    case = ConvCase(3, 80, 72, (7, 13), (1, 1), extra=("bias", "gate"))
    way = mma.implementation(matrix.as_gemm(case.problem()), config, H200)
    check_emulated(case, way, H200, exact=False, at_once=False, folder=tmp_path)
