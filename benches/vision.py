"""Networks on images for benches/models.py: a ResNet-18 and a vision transformer, with the loss of a classification."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Images:
    """Sizes of both networks' inputs."""

    classes: int = 100
    size: int = 128
    batch: int = 8


class Residual(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if (inputs, stride) != (outputs, 1):
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, inputs, height, width]."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    """ResNet-18."""

    def __init__(self, images: Images) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.blocks = nn.ModuleList()
        for inputs, outputs, stride in sizes:
            self.blocks += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
        self.head = nn.Linear(512, images.classes)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss. pixels: [batch, 3, size, size]; labels: [batch]."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(pixels))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Block(nn.Module):
    """A transformer's block without a mask, normalised before each part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, places, width]."""
        batch, places, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, places, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, places, width)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vit(nn.Module):
    """A vision transformer of patches of 16 x 16, with a class token: ViT-S with six blocks."""

    def __init__(self, images: Images, layers: int = 6, width: int = 384, heads: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (images.size // 16) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, images.classes)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss. pixels: [batch, 3, size, size]; labels: [batch]."""
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x[:, 0])), labels)
