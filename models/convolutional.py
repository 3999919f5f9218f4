"""Convolutional networks in plain torch.nn, from classifiers to the halves of a latent diffusion model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from architecture import Config
from torch import nn

BATCH_NORM_EPSILON = 0.001


def conv(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, act: type[nn.Module] | None = None, groups: int = 1
) -> list[nn.Module]:
    """Convolution without bias, BatchNormalization and the activation, if any."""
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)]
    layers.append(nn.BatchNorm2d(outputs, eps=BATCH_NORM_EPSILON))
    return layers + ([act()] if act else [])


def scaled(channels: int, config: Config) -> int:
    """Channels times `width_percent`, rounded up to an even number."""
    return -(-channels * config["width_percent"] // 200) * 2


# --- MobileNetV3 and EfficientNet ------------------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    """Channel gate: x * gate(conv(act(conv(mean(x)))))."""

    def __init__(self, channels: int, squeezed: int, act: type[nn.Module], gate: type[nn.Module]) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            act(),
            nn.Conv2d(squeezed, channels, 1),
            gate(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] to the same."""
        return self.gate(x) * x


class InvertedResidual(nn.Module):
    """Expand, depthwise convolution, squeeze-excite, project; added to its input where the shapes agree."""

    def __init__(
        self,
        inputs: int,
        wide: int,
        outputs: int,
        kernel: int,
        stride: int,
        act: type[nn.Module],
        squeeze: SqueezeExcite | None,
    ) -> None:
        super().__init__()
        layers = conv(inputs, wide, 1, 1, act) if wide != inputs else []
        layers += conv(wide, wide, kernel, stride, act, groups=wide)
        layers += [squeeze] if squeeze else []
        self.block = nn.Sequential(*layers, *conv(wide, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        return x + self.block(x) if self.residual else self.block(x)


# Howard et al. 2019 (arXiv 1905.02244), tables 1 and 2: kernel, expanded and output channels, squeeze-excite,
# activation, stride.
MOBILENET_V3_LARGE = (
    (3, 16, 16, False, nn.ReLU, 1),
    (3, 64, 24, False, nn.ReLU, 2),
    (3, 72, 24, False, nn.ReLU, 1),
    (5, 72, 40, True, nn.ReLU, 2),
    (5, 120, 40, True, nn.ReLU, 1),
    (5, 120, 40, True, nn.ReLU, 1),
    (3, 240, 80, False, nn.Hardswish, 2),
    (3, 200, 80, False, nn.Hardswish, 1),
    (3, 184, 80, False, nn.Hardswish, 1),
    (3, 184, 80, False, nn.Hardswish, 1),
    (3, 480, 112, True, nn.Hardswish, 1),
    (3, 672, 112, True, nn.Hardswish, 1),
    (5, 672, 160, True, nn.Hardswish, 2),
    (5, 960, 160, True, nn.Hardswish, 1),
    (5, 960, 160, True, nn.Hardswish, 1),
)
MOBILENET_V3_SMALL = (
    (3, 16, 16, True, nn.ReLU, 2),
    (3, 72, 24, False, nn.ReLU, 2),
    (3, 88, 24, False, nn.ReLU, 1),
    (5, 96, 40, True, nn.Hardswish, 2),
    (5, 240, 40, True, nn.Hardswish, 1),
    (5, 240, 40, True, nn.Hardswish, 1),
    (5, 120, 48, True, nn.Hardswish, 1),
    (5, 144, 48, True, nn.Hardswish, 1),
    (5, 288, 96, True, nn.Hardswish, 2),
    (5, 576, 96, True, nn.Hardswish, 1),
    (5, 576, 96, True, nn.Hardswish, 1),
)


def mobilenet_v3(config: Config, _attention: str) -> nn.Module:
    """MobileNetV3-Small, its channels scaled to `width_percent`."""
    return _mobilenet_v3(MOBILENET_V3_SMALL, 1024, config)


def mobilenet_v3_large(config: Config, _attention: str) -> nn.Module:
    """MobileNetV3-Large, its channels scaled to `width_percent`."""
    return _mobilenet_v3(MOBILENET_V3_LARGE, 1280, config)


def _mobilenet_v3(rows: Sequence[tuple], hidden: int, config: Config) -> nn.Module:
    layers, inputs = conv(3, scaled(16, config), 3, 2, nn.Hardswish), scaled(16, config)
    for kernel, expanded, outputs, gated, act, stride in rows:
        wide, outputs = scaled(expanded, config), scaled(outputs, config)
        squeezed = scaled(-(-expanded // 32) * 8, config)  # a quarter, rounded up to a multiple of 8
        squeeze = SqueezeExcite(wide, squeezed, nn.ReLU, nn.Hardsigmoid) if gated else None
        layers.append(InvertedResidual(inputs, wide, outputs, kernel, stride, act, squeeze))
        inputs = outputs
    last = scaled(rows[-1][1], config)
    layers += [*conv(inputs, last, 1, 1, nn.Hardswish), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Linear(last, scaled(hidden, config)), nn.Hardswish(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(scaled(hidden, config), config["classes"]))


# Tan and Le 2019 (arXiv 1905.11946), table 1: expansion, kernel, stride, output channels, layers.
EFFICIENTNET_B0 = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


def efficientnet(config: Config, _attention: str) -> nn.Module:
    """EfficientNet-B0 with symmetric padding, its channels scaled to `width_percent`."""
    layers, inputs = conv(3, scaled(32, config), 3, 2, nn.SiLU), scaled(32, config)
    for expansion, kernel, stride, outputs, repeats in EFFICIENTNET_B0:
        for number in range(repeats):
            wide = inputs * expansion
            squeeze = SqueezeExcite(wide, max(1, inputs // 4), nn.SiLU, nn.Sigmoid)
            step = stride if number == 0 else 1
            layers.append(InvertedResidual(inputs, wide, scaled(outputs, config), kernel, step, nn.SiLU, squeeze))
            inputs = scaled(outputs, config)
    last = scaled(1280, config)
    layers += [*conv(inputs, last, 1, 1, nn.SiLU), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(last, config["classes"]))


# --- DenseNet --------------------------------------------------------------------------------------------------------


class DenseLayer(nn.Module):
    """BatchNormalization, ReLU and convolution of 1x1, then of 3x3, on the outputs of all layers before."""

    def __init__(self, inputs: int, wide: int, growth: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, wide, 1, bias=False))
        self.second = nn.Sequential(nn.BatchNorm2d(wide), nn.ReLU(), nn.Conv2d(wide, growth, 3, padding=1, bias=False))

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        """Feature maps of one size to `growth` more channels."""
        return self.second(self.first(torch.cat(features, 1)))


class DenseBlock(nn.Module):
    """Layers that each read what the block reads and what all layers before them wrote."""

    def __init__(self, inputs: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(inputs + i * growth, 4 * growth, growth) for i in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, inputs, height, width] to [batch, inputs + layers * growth, height, width]."""
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def densenet(config: Config, _attention: str) -> nn.Module:
    """DenseNet (Huang et al. 2016, arXiv 1608.06993); depths 6, 12, 24, 16 and growth 32 are DenseNet-121."""
    channels = 2 * config["growth"]
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    for number, depth in enumerate(config["depths"]):
        if number:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
            layers.append(nn.AvgPool2d(2))
            channels //= 2
        layers.append(DenseBlock(channels, depth, config["growth"]))
        channels += depth * config["growth"]
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(channels, config["classes"]))


# --- a detector ------------------------------------------------------------------------------------------------------


def silu(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """The detector's convolution, with BatchNormalization and SiLU."""
    return nn.Sequential(*conv(inputs, outputs, kernel, stride, nn.SiLU))


class Bottleneck(nn.Module):
    """Two convolutions of 3x3; added to their input in the backbone."""

    def __init__(self, channels: int, residual: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(silu(channels, channels), silu(channels, channels))
        self.residual = residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] to the same."""
        return x + self.block(x) if self.residual else self.block(x)


class CrossStagePartial(nn.Module):
    """Two halves of a convolution's channels: one goes through bottlenecks, and all results are concatenated."""

    def __init__(self, inputs: int, outputs: int, depth: int, residual: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.split = silu(inputs, outputs, 1)
        self.bottlenecks = nn.ModuleList(Bottleneck(half, residual) for _ in range(depth))
        self.merge = silu((2 + depth) * half, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, inputs, height, width] to [batch, outputs, height, width]."""
        parts = list(self.split(x).chunk(2, 1))
        for bottleneck in self.bottlenecks:
            parts.append(bottleneck(parts[-1]))
        return self.merge(torch.cat(parts, 1))


class PyramidPooling(nn.Module):
    """Max pools over windows of 5, 9 and 13, by three of 5 in a row."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow, self.merge = silu(channels, channels // 2, 1), silu(2 * channels, channels, 1)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] to the same."""
        maps = [self.narrow(x)]
        for _ in range(3):
            maps.append(self.pool(maps[-1]))
        return self.merge(torch.cat(maps, 1))


class Head(nn.Module):
    """Boxes and class scores at every pixel of three maps; the distance to each side is a mean over `bins`."""

    def __init__(self, inputs: Sequence[int], classes: int, bins: int, image: int) -> None:
        super().__init__()
        box, score = 4 * bins, max(inputs[0], min(classes, 100))
        self.bins, self.classes = bins, classes
        self.boxes = nn.ModuleList(
            nn.Sequential(silu(each, box), silu(box, box), nn.Conv2d(box, 4 * bins, 1)) for each in inputs
        )
        self.scores = nn.ModuleList(
            nn.Sequential(silu(each, score), silu(score, score), nn.Conv2d(score, classes, 1)) for each in inputs
        )
        sides = [image // 8, image // 16, image // 32]
        grids = [torch.stack(torch.meshgrid(*[torch.arange(s) + 0.5] * 2, indexing="xy")).flatten(1) for s in sides]
        self.register_buffer("centres", torch.cat(grids, 1))
        self.register_buffer("pitch", torch.cat([torch.full((1, s * s), image / s) for s in sides], 1))
        self.register_buffer("distances", torch.arange(float(bins)).view(1, bins, 1, 1))

    def forward(self, maps: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps [batch, channels, height, width] to boxes [batch, 4, pixels] and scores [batch, classes, pixels]."""
        boxes = torch.cat([head(x).flatten(2) for head, x in zip(self.boxes, maps, strict=True)], 2)
        scores = torch.cat([head(x).flatten(2) for head, x in zip(self.scores, maps, strict=True)], 2)
        bins = boxes.view(-1, 4, self.bins, boxes.shape[2]).transpose(1, 2).softmax(1)
        first, second = F.conv2d(bins, self.distances).squeeze(1).chunk(2, 1)
        low, high = self.centres - first, self.centres + second
        return torch.cat([(low + high) / 2, high - low], 1) * self.pitch, scores.sigmoid()


class Detector(nn.Module):
    """A YOLO-like detector: a backbone of cross stage partial blocks, a pyramid up and down, and anchor-free heads."""

    def __init__(self, widths: Sequence[int], depths: Sequence[int], classes: int, bins: int, image: int) -> None:
        super().__init__()
        stages, inputs = [silu(3, widths[0], 3, 2)], widths[0]
        for width, depth in zip(widths[1:], depths, strict=True):
            stages.append(nn.Sequential(silu(inputs, width, 3, 2), CrossStagePartial(width, width, depth, True)))
            inputs = width
        self.stages, self.pooling = nn.ModuleList(stages), PyramidPooling(inputs)
        small, middle, large = widths[-3:]
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.up_middle = CrossStagePartial(large + middle, middle, depths[-1], False)
        self.up_small = CrossStagePartial(middle + small, small, depths[-1], False)
        self.down_small, self.down_middle = silu(small, small, 3, 2), silu(middle, middle, 3, 2)
        self.out_middle = CrossStagePartial(small + middle, middle, depths[-1], False)
        self.out_large = CrossStagePartial(middle + large, large, depths[-1], False)
        self.head = Head((small, middle, large), classes, bins, image)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [batch, 3, side, side] to boxes [batch, 4, pixels] and scores [batch, classes, pixels]."""
        maps = [pixel_values]
        for stage in self.stages:
            maps.append(stage(maps[-1]))
        small, middle, large = maps[-3], maps[-2], self.pooling(maps[-1])
        middle = self.up_middle(torch.cat([self.up(large), middle], 1))
        small = self.up_small(torch.cat([self.up(middle), small], 1))
        middle = self.out_middle(torch.cat([self.down_small(small), middle], 1))
        large = self.out_large(torch.cat([self.down_middle(middle), large], 1))
        return self.head((small, middle, large))


def detector(config: Config, _attention: str) -> nn.Module:
    """The YOLO-like detector; its public size has the widths and depths of YOLOv8s."""
    return Detector(config["widths"], config["depths"], config["classes"], config["bins"], config["image"])


# --- latent diffusion ------------------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """GroupNorm, SiLU and convolution, twice; the embedding of the time step, where there is one, in between."""

    def __init__(self, inputs: int, outputs: int, groups: int, time: int = 0) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inputs, 1e-5), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outputs, 1e-5), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs) if time else None
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """[batch, inputs, height, width] and [batch, time] to [batch, outputs, height, width]."""
        y = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None:
            y = y + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class Attention(nn.Module):
    """Multi-head attention of rows of `channels` to the rows of a context."""

    def __init__(self, channels: int, context: int, head_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = nn.Linear(channels, channels, bias)
        self.key, self.value = nn.Linear(context, channels, bias), nn.Linear(context, channels, bias)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """[batch, rows, channels] and [batch, keys, context] to [batch, rows, channels]."""
        heads = (
            each.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for each in (self.query(x), self.key(context), self.value(context))
        )
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class GatedGelu(nn.Module):
    """A feed-forward network whose hidden rows are x * gelu(gate)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(channels, 8 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, rows, channels] to the same."""
        x, gate = self.up(x).chunk(2, -1)
        return self.down(x * F.gelu(gate))


class SpatialTransformer(nn.Module):
    """GroupNorm, then self-attention, cross-attention and a feed-forward network over the pixels of a map."""

    def __init__(self, channels: int, context: int, head_dim: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, 1e-6)
        self.read, self.write = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))
        self.self_attention = Attention(channels, channels, head_dim)
        self.cross_attention = Attention(channels, context, head_dim)
        self.feed_forward = GatedGelu(channels)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] and [batch, words, context] to [batch, channels, height, width]."""
        batch, channels, height, width = x.shape
        rows = self.read(self.norm(x).permute(0, 2, 3, 1).reshape(batch, height * width, channels))
        normed = self.norm1(rows)
        rows = rows + self.self_attention(normed, normed)
        rows = rows + self.cross_attention(self.norm2(rows), context)
        rows = rows + self.feed_forward(self.norm3(rows))
        return x + self.write(rows).reshape(batch, height, width, channels).permute(0, 3, 1, 2)


class Upsample(nn.Module):
    """Twice the size by nearest neighbours, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] to [batch, channels, 2 height, 2 width]."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class UNet(nn.Module):
    """Stable Diffusion's blocks: a level has one residual block and transformer on the way down, two on the way up."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        widths, groups, time = config["widths"], config["groups"], 4 * config["widths"][0]

        def transformer(channels: int) -> SpatialTransformer:
            return SpatialTransformer(channels, config["context"], config["head_dim"], groups)

        self.time = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(config["latents"], widths[0], 3, padding=1)
        self.down, self.up, skips, inputs = nn.ModuleList(), nn.ModuleList(), [widths[0]], widths[0]
        for level, width in enumerate(widths):
            down = nn.ModuleDict({"block": ResidualBlock(inputs, width, groups, time), "attend": transformer(width)})
            skips, inputs = [*skips, width], width
            if level < len(widths) - 1:
                down["next"] = nn.Conv2d(width, width, 3, 2, 1)
                skips.append(width)
            self.down.append(down)
        self.middle = nn.ModuleList([ResidualBlock(inputs, inputs, groups, time) for _ in range(2)])
        self.attend = transformer(inputs)
        for level, width in reversed(list(enumerate(widths))):
            for number in range(2):
                block = ResidualBlock(inputs + skips.pop(), width, groups, time)
                up = nn.ModuleDict({"block": block, "attend": transformer(width)})
                if number == 1 and level:
                    up["next"] = Upsample(width)
                self.up.append(up)
                inputs = width
        self.norm, self.last = nn.GroupNorm(groups, inputs, 1e-5), nn.Conv2d(inputs, config["latents"], 3, padding=1)

    def forward(self, sample: torch.Tensor, time: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Latents, sinusoids [batch, widths[0]] of the time step and [batch, words, context] to the noise."""
        time, x = self.time(time), self.first(sample)
        skips = [x]
        for level in self.down:
            x = level["attend"](level["block"](x, time), context)
            skips.append(x)
            if "next" in level:
                x = level["next"](x)
                skips.append(x)
        x = self.middle[1](self.attend(self.middle[0](x, time), context), time)
        for level in self.up:
            x = level["attend"](level["block"](torch.cat([x, skips.pop()], 1), time), context)
            x = level["next"](x) if "next" in level else x
        return self.last(F.silu(self.norm(x)))


def unet(config: Config, _attention: str) -> nn.Module:
    """The UNet of Stable Diffusion 2 with two levels, and one block a level less than there."""
    return UNet(config)


class PixelAttention(nn.Module):
    """Self-attention with one head over the pixels of a map."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(groups, channels, 1e-6), Attention(channels, channels, channels, True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] to the same."""
        rows = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(rows, rows).transpose(1, 2).unflatten(2, x.shape[2:])


def vae_decoder(config: Config, _attention: str) -> nn.Module:
    """The decoder of Stable Diffusion's autoencoder: three residual blocks a level, levels of growing size."""
    widths, groups = config["widths"], config["groups"]
    inputs = widths[0]
    layers: list[nn.Module] = [nn.Conv2d(config["latents"], inputs, 3, padding=1)]
    layers += [ResidualBlock(inputs, inputs, groups), PixelAttention(inputs, groups)]
    layers.append(ResidualBlock(inputs, inputs, groups))
    for level, width in enumerate(widths):
        for number in range(config["depth"]):
            layers.append(ResidualBlock(width if number else inputs, width, groups))
        layers += [Upsample(width)] if level < len(widths) - 1 else []
        inputs = width
    layers += [nn.GroupNorm(groups, inputs, 1e-6), nn.SiLU(), nn.Conv2d(inputs, 3, 3, padding=1)]
    return nn.Sequential(*layers)
