"""Damage serialized models: bits flipped, cut off, pieces left out or doubled, and parts of two models joined."""

from __future__ import annotations

from random import Random

import onnx

BITS = 8
MAX_FLIPS = 6


def damaged(random: Random, model: onnx.ModelProto) -> bytes:
    """Return the serialized model, damaged in one way."""
    data = bytearray(model.SerializeToString())
    at = random.randrange(len(data))
    way = random.randrange(6)
    if way == 0:
        del data[at:]
    elif way == 1:
        piece = data[at : at + random.randint(1, 40)]
        data[at : at + len(piece)] = random.choice([b"", piece + piece])
    elif way == 2:  # protobuf reads the fields of both: two graphs are merged into one
        part = onnx.ModelProto()
        part.graph.node.extend(random.sample(list(model.graph.node), random.randint(1, len(model.graph.node))))
        data += random.choice([bytes(data), part.SerializeToString()])
    elif way == 3:  # a piece of the model in another place of it
        start = random.randrange(len(data))
        data[at:at] = data[start : start + random.randint(1, 40)]
    else:
        for _ in range(random.randint(1, MAX_FLIPS)):
            data[random.randrange(len(data))] ^= 1 << random.randrange(BITS)
    return bytes(data)
