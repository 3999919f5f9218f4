"""Graphs of images: convolutions, pools, resizes, norms, residuals and gates, as layouts and opsets treat them."""

from __future__ import annotations

from random import Random

import numpy as np
from drafts import Draft, Unavailable, Value
from onnx import TensorProto, helper
from random_graphs import NEWEST, OLDEST, Writer, finish

MAX_CHANNELS = 16
FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16


def image_graph(random: Random) -> Draft:
    """Return a graph over an image of two or three axes of space, rarely one."""
    draft = Draft(random, random.randint(OLDEST, NEWEST))
    dtype = random.choices([FLOAT, FLOAT16], [8, 1])[0]
    draft.sizes |= {"height": random.choice([4, 5, 6, 8]), "width": random.choice([4, 6, 7])}
    space = random.choice([["height", "width"], [6, 6], [4, 8], [4, 8], [7, 5], ["height"], [8], [4, 4, 4]])
    image = draft.input(dtype, [random.choice(["batch", 1, 2]), random.choice([1, 2, 3, 4, 8]), *space])
    return finish(Images(draft, [image]), random.randint(2, 12))


class Images(Writer):
    """Writes nodes that read images, and others beside them."""

    @property
    def steps(self) -> list:
        of_images = [self.conv, self.conv, self.conv, self.conv_transpose, self.pool, self.global_pool, self.resize,
                     self.batch_norm, self.instance_norm, self.residual, self.join, self.gate, self.pad, self.clip,
                     self.depth_to_space, self.prelu, self.group_norm]  # fmt: skip
        return [*of_images, *of_images, self.unary, self.binary, self.view, self.reduce, self.softmax, self.split,
                self.slice, self.concat, self.where, self.cast]  # fmt: skip

    def image(self) -> Value:
        """Return a value that may be an image, a late one mostly.  Raises Unavailable where there is none."""
        found = [v for v in self.values if len(v.shape) >= 3 and v.dtype in (FLOAT, FLOAT16) and 0 not in v.shape[1:]]
        if not found:
            raise Unavailable
        return self.random.choice(found[-3:] if self.random.random() < 0.8 else found)

    def weights(self, shape: tuple[int, ...], dtype: int, positive: bool = False) -> str:
        numbers = np.random.default_rng(self.random.randrange(2**32)).standard_normal(shape) * 0.5
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        return self.draft.constant((np.abs(numbers) + 0.1 if positive else numbers).astype(kind))

    def _window(self, x: Value, most: int = 3) -> tuple[dict, tuple[int, ...]]:
        """Return kernel_shape, strides, pads and dilations, and the sizes of the result."""
        random, space = self.random, x.shape[2:]
        kernel = [random.randint(1, min(most, size)) for size in space]
        strides = [random.choice([1, 1, 2]) for _ in space]
        before, after = ([random.choice([0, 0, (k - 1) // 2, k - 1]) for k in kernel] for _ in range(2))
        found = {"kernel_shape": kernel, "strides": strides, "pads": [*before, *after]}
        if random.random() < 0.15:
            found.pop("pads")
            found["auto_pad"] = random.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
            if found["auto_pad"] == "VALID":
                sizes = [(n - k) // s + 1 for n, k, s in zip(space, kernel, strides, strict=True)]
            else:
                sizes = [-(-n // s) for n, s in zip(space, strides, strict=True)]
        else:
            sizes = [
                (n + a + b - k) // s + 1 for n, a, b, k, s in zip(space, before, after, kernel, strides, strict=True)
            ]
        return found, tuple(sizes)

    def conv(self) -> None:
        """Write a convolution, perhaps in groups, with a norm or an activation behind it."""
        x, random = self.image(), self.random
        groups = random.choice([1, 1, 1, x.shape[1], 2 if x.shape[1] % 2 == 0 else 1])
        channels = min(MAX_CHANNELS, groups * random.choice([1, 2, 4]))
        channels -= channels % groups
        if not channels:
            raise Unavailable
        window, space = self._window(x)
        weight = self.weights((channels, x.shape[1] // groups, *window["kernel_shape"]), x.dtype)
        bias = [self.weights((channels,), x.dtype)] if random.random() < 0.6 else []
        name = self.draft.node("Conv", [x.name, weight, *bias], group=groups, **window)
        result = self.add(name, x.dtype, (x.shape[0], channels, *space))
        if random.random() < 0.4:
            self.add(
                self.draft.node(random.choice(["Relu", "Sigmoid", "Tanh", "LeakyRelu"]), [name]), x.dtype, result.shape
            )

    def conv_transpose(self) -> None:
        x, random = self.image(), self.random
        kernel, stride = [random.choice([1, 2, 3]) for _ in x.shape[2:]], random.choice([1, 2])
        channels = random.choice([1, 2, 4])
        weight = self.weights((x.shape[1], channels, *kernel), x.dtype)
        name = self.draft.node("ConvTranspose", [x.name, weight], kernel_shape=kernel, strides=[stride] * len(kernel))
        space = [(n - 1) * stride + k for n, k in zip(x.shape[2:], kernel, strict=True)]
        self.add(name, x.dtype, (x.shape[0], channels, *space))

    def pool(self) -> None:
        x = self.image()
        window, space = self._window(x)
        if "pads" in window:  # which are smaller than the kernel
            window["pads"] = [0] * len(window["pads"])
            space = tuple(
                (n - k) // s + 1 for n, k, s in zip(x.shape[2:], window["kernel_shape"], window["strides"], strict=True)
            )
        op = self.random.choice(["MaxPool", "AveragePool", "LpPool"])
        self.add(self.draft.node(op, [x.name], **window), x.dtype, (*x.shape[:2], *space))

    def global_pool(self) -> None:
        x = self.image()
        op = self.random.choice(["GlobalAveragePool", "GlobalMaxPool"])
        self.add(self.draft.node(op, [x.name]), x.dtype, (*x.shape[:2], *(1 for _ in x.shape[2:])))

    def resize(self) -> None:
        """Write a Resize or an Upsample, as its opset has it."""
        x, random, draft = self.image(), self.random, self.draft
        scales = [1.0, 1.0, *(random.choice([1.0, 2.0, 2.0, 1.5, 0.5]) for _ in x.shape[2:])]
        shape = tuple(int(n * s) for n, s in zip(x.shape, scales, strict=True))
        mode, constant = random.choice(["nearest", "linear"]), draft.constant(np.array(scales, np.float32))
        if 0 in shape[2:]:
            raise Unavailable
        if draft.opset < 9:
            name = draft.node("Upsample", [x.name], mode=mode, scales=scales)
        elif draft.opset < 10:
            name = draft.node("Upsample", [x.name, constant], mode=mode)
        elif draft.opset < 11:
            name = draft.node("Resize", [x.name, constant], mode=mode)
        else:
            ways = ["asymmetric", "half_pixel", "align_corners", "pytorch_half_pixel"]
            how = {"mode": mode, "coordinate_transformation_mode": random.choice(ways)}
            if mode == "nearest":
                how["nearest_mode"] = random.choice(["floor", "round_prefer_floor", "ceil"])
            empty = draft.constant(np.zeros(0, np.float32)) if draft.opset < 13 else ""
            if random.random() < 0.4:
                unused = draft.constant(np.zeros(0, np.float32)) if draft.opset < 13 else ""
                name = draft.node("Resize", [x.name, empty, unused, draft.integers(*shape)], **how)
            else:
                name = draft.node("Resize", [x.name, empty, constant], **how)
        self.add(name, x.dtype, shape)

    def batch_norm(self) -> None:
        x = self.image()
        names = [self.weights((x.shape[1],), x.dtype, i == 3) for i in range(4)]
        self.add(self.draft.node("BatchNormalization", [x.name, *names], epsilon=1e-3), x.dtype, x.shape)

    def instance_norm(self) -> None:
        x = self.image()
        names = [self.weights((x.shape[1],), x.dtype) for _ in range(2)]
        self.add(self.draft.node("InstanceNormalization", [x.name, *names], epsilon=1e-3), x.dtype, x.shape)

    def group_norm(self) -> None:
        x, groups = self.image(), self.random.choice([1, 2])
        if self.draft.opset < 18 or x.shape[1] % groups:
            raise Unavailable
        count = groups if self.draft.opset < 21 else x.shape[1]
        names = [self.weights((count,), x.dtype) for _ in range(2)]
        self.add(self.draft.node("GroupNormalization", [x.name, *names], num_groups=groups), x.dtype, x.shape)

    def residual(self) -> None:
        x = self.image()
        alike = [v for v in self.values if (v.dtype, v.shape) == (x.dtype, x.shape)]
        op = self.random.choice(["Add", "Mul", "Sub", "Sum", "Max"])
        self.add(self.draft.node(op, [x.name, self.random.choice(alike).name]), x.dtype, x.shape)

    def join(self) -> None:
        x = self.image()
        alike = [
            v for v in self.values if v.dtype == x.dtype and (v.shape[:1], v.shape[2:]) == (x.shape[:1], x.shape[2:])
        ]
        chosen = [x, *self.random.choices(alike, k=self.random.randint(1, 2))]
        shape = (x.shape[0], sum(v.shape[1] for v in chosen), *x.shape[2:])
        self.add(self.draft.node("Concat", [v.name for v in chosen], axis=1), x.dtype, shape)

    def gate(self) -> None:
        """Scale the channels by what a pool of them gives."""
        x = self.image()
        pooled = self.draft.node("GlobalAveragePool", [x.name])
        ones = (1,) * len(x.shape[2:])
        weight = self.weights((x.shape[1], x.shape[1], *ones), x.dtype)
        gate = self.draft.node("Sigmoid", [self.draft.node("Conv", [pooled, weight])])
        self.add(self.draft.node("Mul", [x.name, gate]), x.dtype, x.shape)

    def pad(self) -> None:
        x, random = self.image(), self.random
        before, after = ([0, 0, *(random.randint(0, 2) for _ in x.shape[2:])] for _ in range(2))
        mode = random.choice(["constant", "constant", "edge", "reflect"])
        if self.draft.opset < 11:
            name = self.draft.node("Pad", [x.name], pads=[*before, *after], mode=mode)
        else:
            name = self.draft.node("Pad", [x.name, self.draft.integers(*before, *after)], mode=mode)
        self.add(name, x.dtype, tuple(map(sum, zip(x.shape, before, after, strict=True))))

    def clip(self) -> None:
        x = self.image()
        low, high = self.random.choice([(0.0, 6.0), (-1.0, 1.0), (0.0, 1.0)])
        if self.draft.opset < 11:
            name = self.draft.node("Clip", [x.name], min=low, max=high)
        else:
            kind = helper.tensor_dtype_to_np_dtype(x.dtype)
            name = self.draft.node("Clip", [x.name, *(self.draft.constant(np.array(n, kind)) for n in (low, high))])
        self.add(name, x.dtype, x.shape)

    def prelu(self) -> None:
        x = self.image()
        slope = self.weights((x.shape[1], *(1 for _ in x.shape[2:])), x.dtype)
        self.add(self.draft.node("PRelu", [x.name, slope]), x.dtype, x.shape)

    def depth_to_space(self) -> None:
        x = self.image()
        if len(x.shape) != 4 or x.shape[1] % 4:
            raise Unavailable
        name = self.draft.node("DepthToSpace", [x.name], blocksize=2)
        self.add(name, x.dtype, (x.shape[0], x.shape[1] // 4, x.shape[2] * 2, x.shape[3] * 2))
