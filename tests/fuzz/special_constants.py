"""Special values in constants: NaN, infinities, negative zeros, subnormals, the largest numbers, integer extremes."""

from __future__ import annotations

import numpy as np
from drafts import FLOATS, Draft
from draws import with_specials
from onnx import TensorProto, numpy_helper

from onnxfuse.ir.protos import OneNode, nodes

INTEGERS = (TensorProto.INT32, TensorProto.INT64, TensorProto.INT8, TensorProto.UINT8)
MAX_CHANGED = 2  # constants of a graph


def put_special_values(draft: Draft) -> None:
    """Put special values into up to two constants of a draft: floats mostly, and few elements of integers."""
    random = draft.random
    numbers = np.random.default_rng(random.randrange(2**32))
    held = list(draft.weights)
    held += [a.t for n in draft.nodes for a in n.attribute if n.op_type == "Constant" and a.name == "value"]
    every = nodes(OneNode(tuple(draft.nodes)))  # Loops in branches, too, which would not end (seed 1050017576)
    targets = {name for node in every if node.op_type == "Loop" for name in node.input[:1]}  # iterations
    floats = [t for t in held if t.data_type in FLOATS]
    integers = [t for t in held if t.data_type in INTEGERS and t.name not in targets]
    for _ in range(random.randint(0, MAX_CHANGED)):
        chosen = integers if integers and random.random() < 0.1 else floats
        if not chosen:
            return
        tensor = random.choice(chosen)
        array = np.array(numpy_helper.to_array(tensor))
        if tensor.data_type in FLOATS:
            array = with_specials(numbers, array, random.choice([0.1, 0.4, 1.0]))
        elif array.size:
            limits = np.iinfo(array.dtype)
            array.reshape(-1)[random.randrange(array.size)] = random.choice([limits.min, limits.max])
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), tensor.name))
