"""Compare folded constants with onnxruntime's results for the nodes that they replaced."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import onnx

from onnxfuse.errors import VerificationError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.extract import extract
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.difference import compare_output
from onnxfuse.verify.own_process import OnnxruntimeFailure
from onnxfuse.verify.parts import UnfusedGraph

MAX_BYTES_COMPARED: Final = 64 * 2**20  # limit for all compared constants together; the smallest come first


def wrong_constants(
    original: onnx.ModelProto, folder: Path | None, unfused: UnfusedGraph, feeds: Mapping[str, Array]
) -> dict[str, str]:
    """Return the names of the folded constants that differ from the original's results, each with a sentence.

    `feeds` are inputs on which the original runs: shape arithmetic can depend on them.  Raises VerificationError if the
    nodes that were folded do not run.
    """
    producers = {name: node for node in original.graph.node for name in node.output if name}
    folded = {name: unfused.constants[name] for name in producers if name in unfused.constants}
    names = [name for name in folded if producers[name].op_type != "Constant"]
    values: dict[str, Array] = {}
    left = MAX_BYTES_COMPARED
    for name in sorted(names, key=lambda name: int(np.prod(folded[name].shape, dtype=np.int64))):
        value = unfused.constant(name)
        left -= value.nbytes
        if left < 0:
            break
        values[name] = value
    if not values:
        return {}
    model = extract(original, list(values))
    outer = [value.name for value in model.graph.input if value.name in unfused.graph.outer_constants]
    model.graph.initializer.extend(unfused.initializer(name) for name in outer)
    try:
        expected = run(open_session(model, folder, optimize=False), feeds)
    except OnnxruntimeFailure as error:
        raise VerificationError(f"the nodes that were folded do not run: {first_line(error)}") from error
    found = {name: compare_output(name, expected[name], value) for name, value in values.items()}
    return {
        name: f"onnxruntime computes another value: {one.reason.removeprefix('output ')}"
        for name, one in found.items()
        if not one.passed
    }
