"""A small residual network for images in plain torch: what `scripts/vision.py` trains.

The layout of He et al. (arXiv:1512.03385, Sec. 4.2) for small images: a 3 x 3 convolution, then
three stages of n blocks with 1, 2 and 4 times the width, the later two begun at half the
resolution, then the mean over the image and a linear head. Depth is 6 n + 2. A shortcut that
changes shape is a 1 x 1 convolution.

A block is a layer to dsx (`blocks.3`); the first convolution goes with the first block, the head
with the last.

Invariant: the same config and seed give the same weights on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Literal["batch", "group"]
_GROUPS = 8


@dataclass(frozen=True)
class ResNetConfig:
    """The shape of a model."""

    blocks_per_stage: int = 1
    width: int = 16
    num_classes: int = 10
    channels: int = 1
    norm: Norm = "batch"
    """Batch norm, whose statistics are each cluster's own, or group norm, which has none."""

    def __post_init__(self) -> None:
        for name in ("blocks_per_stage", "width", "num_classes", "channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.norm not in ("batch", "group"):
            raise ValueError(f"norm={self.norm!r} must be one of batch, group")
        if self.norm == "group" and self.width % _GROUPS:
            raise ValueError(
                f"width={self.width} must be a multiple of {_GROUPS}, the groups of norm='group'; "
                f"try {-(-self.width // _GROUPS) * _GROUPS}"
            )


class Block(nn.Module):
    """Two 3 x 3 convolutions with norms, around which a shortcut leads."""

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = make_norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = make_norm(norm, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, channels, h, w]` to `[batch, width, h / stride, w / stride]`."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A classifier of images."""

    def __init__(self, config: ResNetConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        width, count = config.width, config.blocks_per_stage
        self.stem = nn.Conv2d(config.channels, width, 3, padding=1, bias=False)
        self.stem_norm = make_norm(config.norm, width)
        widths = [width * 2**stage for stage in range(3) for _ in range(count)]
        strides = [2 if stage and not block else 1 for stage in range(3) for block in range(count)]
        self.blocks = nn.ModuleList(
            Block(before, own, stride, config.norm)
            for before, own, stride in zip([width, *widths], widths, strides, strict=False)
        )
        self.head = nn.Linear(widths[-1], config.num_classes)
        self.initialize_weights_(seed)

    @torch.no_grad()
    def initialize_weights_(self, seed: int) -> None:
        """Draw convolutions and head from N(0, 2 / fan in) (arXiv:1502.01852), biases 0."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                fan_in = parameter[0].numel()
                parameter.normal_(0.0, (2 / fan_in) ** 0.5, generator=generator)
        self.head.bias.zero_()

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return logits `[batch, classes]`, or given labels the mean cross entropy in nats.

        `images` are fp32 `[batch, channels, h, w]`, `labels` int64 `[batch]`.
        """
        x = F.relu(self.stem_norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean(dim=(2, 3)))
        return logits if labels is None else F.cross_entropy(logits, labels)


def make_norm(norm: Norm, width: int) -> nn.Module:
    """Return the norm over `width` channels."""
    return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(_GROUPS, width)
