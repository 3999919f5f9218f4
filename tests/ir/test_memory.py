"""Test that optimizing holds neither external weights in memory nor a changed weight twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from weight_files import HEAD, external, model

from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import is_constant
from onnxfuse.ir.serde import read_graph, write_model

SMALL, LARGE = 2**26, 2**29  # bytes of weights
OPTIMIZE = """
import resource, sys
from pathlib import Path
from onnxfuse import optimize
from onnxfuse.ir.save import save
for source in map(Path, sys.argv[1:]):
    save(optimize(source, verify=False)[0], source.with_name("out.onnx"), folder=source.parent)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the size of the memory has another unit")
def test_external_weights_are_not_held(tmp_path: Path) -> None:
    """Eight times the weights take hardly more memory."""
    for size in (SMALL, LARGE):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "in.onnx").write_bytes(external("w.bin", size // 4).SerializeToString())
        with (folder / "w.bin").open("wb") as file:
            file.truncate(size)
    paths = [str(tmp_path / str(size) / "in.onnx") for size in (SMALL, LARGE)]
    command = [sys.executable, "-W", "ignore", "-c", OPTIMIZE, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    before, after = (1024 * int(line) for line in done.stdout.split())
    assert after - before < (LARGE - SMALL) / 8
    (data,) = (tmp_path / str(LARGE)).glob("out.onnx.*.data")
    assert data.stat().st_size == LARGE


def test_a_new_constant_is_held_once_when_it_is_written() -> None:
    """Then it refers to the message in the model, and has the same value."""
    graph = read_graph(model(f"{HEAD} g (float[n] x) => (float[n] y) {{ y = Add(x, x) }}"))
    value = np.arange(2**19, dtype=np.float32)
    constant = graph.constant("large", value)
    graph.nodes[0].inputs[1] = constant
    written = write_model(graph)
    assert is_constant(constant)
    np.testing.assert_array_equal(constant_value(graph, constant), value)
    written.graph.initializer[0].raw_data = (value + 1).tobytes()
    np.testing.assert_array_equal(constant_value(graph, constant), value + 1)
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(write_model(graph).graph.initializer[0]), value + 1)
