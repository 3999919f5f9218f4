"""Random networks of images: convolutions among operators that have a channels-last form, and some that have none.

python tests/layout/random_images.py 1 2000        # seeds from 1 to 1999
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
import onnx
from layout_models import assert_same, converted
from onnx import TensorProto, helper, numpy_helper

Size = tuple[int, ...]  # channels, then one to three spatial axes
SPATIAL = {1: (20,), 2: (6, 8), 3: (4, 6, 2)}  # sizes of the input, by the number of its spatial axes


@dataclass
class Network:
    """The nodes and weights of a model, and the sizes of its images."""

    random: np.random.Generator
    opset: int
    axes: int  # spatial ones
    sizes: dict[str, Size] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def add(self, op: str, inputs: list[str], size: Size | None, **attributes: object) -> str:
        """Append a node, whose output is an image of `size`."""
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"{op}_{len(self.nodes)}", **attributes))
        if size:
            self.sizes[output] = size
        return output

    def constant(self, value: object, dtype: type = np.float32) -> str:
        """Append an initializer."""
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def draw(self, *shape: int) -> str:
        """Append a random initializer, whose products keep the size of their inputs."""
        scale = np.sqrt(max(1, np.prod(shape[1:], initial=1)))
        return self.constant(self.random.standard_normal(shape) / scale)

    def one_of(self, *options: object) -> object:
        """Return one of the options."""
        return options[self.random.integers(len(options))]

    def image(self) -> str:
        """Return an image, one of the latest."""
        names = list(self.sizes)[-5:]
        return names[self.random.integers(len(names))]

    def like(self, size: Size) -> str | None:
        """Return another image of the same size."""
        names = [name for name, other in self.sizes.items() if other == size]
        return names[self.random.integers(len(names))] if names else None

    def step(self) -> None:
        """Append one thing."""
        steps = (
            self.conv, self.conv, self.conv, self.unary, self.binary, self.broadcast, self.pool, self.resize, self.join,
            self.part, self.pad, self.gate, self.soft, self.turned, self.mean, self.blocks, self.residual, self.normal,
            self.up,
        )  # fmt: skip
        steps[self.random.integers(len(steps))]()

    def conv(self) -> None:
        """A convolution, of groups or depthwise or of one pixel."""
        x = self.image()
        c, *spatial = self.sizes[x]
        kernel, stride = int(self.one_of(1, 3)), int(self.one_of(1, 1, 2))
        group = int(self.one_of(1, 1, c, 2 if c % 2 == 0 else 1))
        m = group * int(self.random.integers(1, 9)) if group < c else c
        pad = kernel // 2
        weights = self.draw(m, c // group, *[kernel] * self.axes)
        inputs = [x, weights, *([self.draw(m)] if self.random.random() < 0.5 else [])]
        size = m, *((each + 2 * pad - kernel) // stride + 1 for each in spatial)
        axes = self.axes
        y = self.add("Conv", inputs, size, group=group, strides=[stride] * axes, pads=[pad] * 2 * axes)
        if self.random.random() < 0.5:
            self.add(str(self.one_of("Relu", "Sigmoid", "HardSigmoid", "Tanh")), [y], size)

    def residual(self) -> None:
        """A convolution that is added to its input, before or after an activation."""
        x = self.image()
        c = self.sizes[x][0]
        y = self.add("Conv", [x, self.draw(c, c, *[3] * self.axes)], self.sizes[x], pads=[1] * 2 * self.axes)
        if self.random.random() < 0.5:
            y = self.add("Relu", [y], self.sizes[x])
        y = self.add("Add", [x, y] if self.random.random() < 0.5 else [y, x], self.sizes[x])
        if self.random.random() < 0.5:
            self.add("Relu", [y], self.sizes[x])

    def up(self) -> None:
        """A transposed convolution, of groups or depthwise, with an activation or without."""
        x = self.image()
        c, *spatial = self.sizes[x]
        if np.prod(spatial) > 200:
            return
        kernel, stride, pad, added = [(2, 2, 0, 0), (4, 2, 1, 0), (3, 2, 1, 1), (3, 1, 1, 0)][self.random.integers(4)]
        group = int(self.one_of(1, 1, c))
        m = group * int(self.random.integers(1, 9)) if group < c else c
        weights = self.draw(c, m // group, *[kernel] * self.axes)
        inputs = [x, weights, *([self.draw(m)] if self.random.random() < 0.5 else [])]
        size, axes = (m, *(each * stride for each in spatial)), self.axes
        window = {"strides": [stride] * axes, "pads": [pad] * 2 * axes, "output_padding": [added] * axes}
        y = self.add("ConvTranspose", inputs, size, group=group, **window)
        if self.random.random() < 0.5:
            self.add(str(self.one_of("Relu", "Sigmoid", "Tanh")), [y], size)

    def normal(self) -> None:
        """A BatchNormalization."""
        x = self.image()
        c = self.sizes[x][0]
        variance = self.constant(self.random.uniform(0.5, 2, c))
        self.add("BatchNormalization", [x, self.draw(c), self.draw(c), self.draw(c), variance], self.sizes[x])

    def unary(self) -> None:
        """An operator of one image."""
        x = self.image()
        self.add(str(self.one_of("Abs", "Tanh", "Sigmoid", "Neg", "Identity", "Erf", "Softplus")), [x], self.sizes[x])

    def binary(self) -> None:
        """An operator of two images."""
        x = self.image()
        other = self.like(self.sizes[x]) or x
        self.add(str(self.one_of("Add", "Sub", "Mul", "Max")), [x, other], self.sizes[x])

    def broadcast(self) -> None:
        """An operator of an image and a constant, or of an image and one pixel or one channel."""
        x = self.image()
        c, *spatial = self.sizes[x]
        ones, first, last = [1] * self.axes, spatial[:1], spatial[-1:]
        shape = self.one_of(
            (), (1,), last, (*first, *ones[1:]), spatial, (c, *ones), (1, c, *ones), (1, 1, *first, *ones[1:])
        )
        other = self.draw(*shape) if self.random.random() < 0.8 else self.like((c, *ones)) or self.like((1, *spatial))
        inputs = [x, other or self.draw(1)]
        self.add(str(self.one_of("Add", "Mul", "Sub", "Min")), inputs[:: int(self.one_of(1, -1))], self.sizes[x])

    def pool(self) -> None:
        """A pool of windows, or of the whole image."""
        x = self.image()
        if self.random.random() < 0.3:
            op = str(self.one_of("GlobalAveragePool", "GlobalMaxPool"))
            self.add(op, [x], (self.sizes[x][0], *[1] * self.axes))
            return
        op = str(self.one_of("MaxPool", "AveragePool"))
        self.add(op, [x], self.sizes[x], kernel_shape=[3] * self.axes, pads=[1] * 2 * self.axes)

    def mean(self) -> None:
        """A reduction, with the axes kept."""
        x = self.image()
        c, *spatial = self.sizes[x]
        everywhere = list(range(2, self.axes + 2)), (c, *[1] * self.axes)
        axes, size = [everywhere, ([1], (1, *spatial)), ([-1], (c, *spatial[:-1], 1))][self.random.integers(3)]
        op = str(self.one_of("ReduceMean", "ReduceMax"))
        if self.opset >= 18:
            self.add(op, [x, self.constant(axes, np.int64)], size)
        else:
            self.add(op, [x], size, axes=axes)

    def resize(self) -> None:
        """A larger image."""
        x = self.image()
        c, *spatial = self.sizes[x]
        if np.prod(spatial) > 200:
            return
        mode = {"mode": "linear"} if self.random.random() < 0.5 else {"mode": "nearest", "nearest_mode": "floor"}
        scales, where = self.constant([1, 1, *[2] * self.axes]), str(self.one_of("asymmetric", "half_pixel"))
        size = c, *(2 * each for each in spatial)
        self.add("Resize", [x, self.constant([]), scales], size, coordinate_transformation_mode=where, **mode)

    def join(self) -> None:
        """Images of one size, one behind the other along an axis."""
        x = self.image()
        other, rank = self.like(self.sizes[x]) or x, self.axes + 2
        axis = int(self.random.integers(1, rank)) - int(self.one_of(0, rank))
        size = list(self.sizes[x])
        size[axis % rank - 1] *= 2
        if np.prod(size) < 4000:
            self.add("Concat", [x, other], tuple(size), axis=axis)

    def part(self) -> None:
        """A Slice."""
        x = self.image()
        size, rank = list(self.sizes[x]), self.axes + 2
        axis = int(self.random.integers(1, rank))
        if size[axis - 1] < 2:
            return
        end = int(self.random.integers(1, size[axis - 1]))
        size[axis - 1] = end
        numbers = ([0], [end], [axis - int(self.one_of(0, rank))])
        self.add("Slice", [x, *(self.constant(each, np.int64) for each in numbers)], tuple(size))

    def pad(self) -> None:
        """A Pad of the first and the last spatial axis."""
        x = self.image()
        pads = np.zeros((2, self.axes + 2), np.int64)
        pads[:, 2] += 1, 2
        pads[1, -1] += 1
        c, *spatial = self.sizes[x]
        size = c, *(each + more for each, more in zip(spatial, pads.sum(0)[2:].tolist(), strict=True))
        self.add("Pad", [x, self.constant(pads.reshape(-1), np.int64)], size)

    def gate(self) -> None:
        """A squeeze-and-excite block, maybe with a residual and an activation behind it."""
        x, ones = self.image(), [1] * self.axes
        c = self.sizes[x][0]
        m = self.add("GlobalAveragePool", [x], (c, *ones))
        y = self.add("Relu", [self.add("Conv", [m, self.draw(4, c, *ones)], (4, *ones))], (4, *ones))
        g = self.add("Sigmoid", [self.add("Conv", [y, self.draw(c, 4, *ones)], (c, *ones))], (c, *ones))
        y = self.add("Mul", [x, g][:: int(self.one_of(1, -1))], self.sizes[x])
        if self.random.random() < 0.5:
            y = self.add("Add", [y, self.like(self.sizes[x]) or x][:: int(self.one_of(1, -1))], self.sizes[x])
        if self.random.random() < 0.5:
            self.add(str(self.one_of("Relu", "Tanh")), [y], self.sizes[x])

    def soft(self) -> None:
        """A Softmax along any axis."""
        x = self.image()
        self.add("Softmax", [x], self.sizes[x], axis=int(self.one_of(1, 2, -1, -2)))

    def turned(self) -> None:
        """Transposes around an operator of the channels, as in a ConvNeXt."""
        x = self.image()
        c = self.sizes[x][0]
        last = self.axes + 1
        rows = self.add("Transpose", [x], None, perm=[0, *range(2, last + 1), 1])
        made = self.add("Add", [self.add("MatMul", [rows, self.draw(c, c)], None), self.draw(c)], None)
        self.add("Transpose", [made], self.sizes[x], perm=[0, last, *range(1, last)])

    def blocks(self) -> None:
        """An operator of blocks of pixels, or one that has no channels-last form."""
        x = self.image()
        c, *spatial = self.sizes[x]
        if self.axes == 2 and c % 4 == 0 and self.random.random() < 0.5:
            mode = str(self.one_of("DCR", "CRD"))
            self.add("DepthToSpace", [x], (c // 4, 2 * spatial[0], 2 * spatial[1]), blocksize=2, mode=mode)
        elif self.axes == 2 and spatial[0] % 2 == spatial[1] % 2 == 0:
            self.add("SpaceToDepth", [x], (4 * c, spatial[0] // 2, spatial[1] // 2), blocksize=2)
        else:
            self.add("CumSum", [x, self.constant(1, np.int64)], self.sizes[x])


def random_network(seed: int, axes: int) -> onnx.ModelProto:
    """Return a model whose batch, and sometimes spatial axes, are dynamic; they have the sizes of SPATIAL."""
    random = np.random.default_rng(seed)
    opset = int(random.choice([13, 17, 18, 20, 21, 22]))
    c = int(random.choice([3, 5, 8]))
    network = Network(random, opset, axes, {"x": (c, *SPATIAL[axes])})
    network.conv()
    for _ in range(int(random.integers(3, 14))):
        network.step()
    dims = ["n", c, *("dhw"[-axes:] if random.random() < 0.3 else SPATIAL[axes])]
    read = {name for node in network.nodes for name in node.input}
    outputs = [node.output[0] for node in network.nodes if node.output[0] not in read]
    outputs += [name for name in network.sizes if name in read and name != "x" and random.random() < 0.05]
    graph = helper.make_graph(
        network.nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * (axes + 2)) for name in outputs],
        network.weights,
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", opset)])


def check(seed: int, axes: int) -> int:
    """Compare a model with its channels-last form; return how many nodes of that are channels-last."""
    model = random_network(seed, axes)
    result = converted(model)
    sizes = dict(zip("dhw"[-axes:], SPATIAL[axes], strict=True))
    assert_same(model, result.model, tolerance=1e-4, n=2, **sizes)
    return result.layout.nodes


if __name__ == "__main__":
    found = 0
    for each in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            found += check(each, each % 3 + 1)
        except Exception as error:
            print(f"seed {each}: {type(error).__name__}: {str(error)[:600]}", flush=True)
    print(f"{found} nodes channels-last")
