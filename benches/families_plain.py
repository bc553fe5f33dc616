"""Models of PyTorch's own modules for benches/coverage.py, each with its loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from families import CLASSES, ROWS, VOCABULARY, Batch, Case, case, integers, normal
from torch import nn

WIDTH, LENGTH = 32, 16


def symbols() -> Batch:
    """Symbols, and those to predict."""
    return {"x": integers((ROWS, LENGTH)), "y": integers((ROWS, LENGTH), seed=3)}


class Recurrent(nn.Module):
    """A recurrent layer between an embedding and scores."""

    def __init__(self, layer: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens, self.layer, self.scores = nn.Embedding(VOCABULARY, WIDTH), layer, nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss. Both: [batch, sequence]."""
        return F.cross_entropy(self.scores(self.layer(self.tokens(x))[0]).flatten(0, 1), y.flatten())


@case("lstm")
def _() -> Case:
    return Case(Recurrent(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)), symbols())


@case("gru")
def _() -> Case:
    return Case(Recurrent(nn.GRU(WIDTH, WIDTH, 1, batch_first=True)), symbols())


class Translator(nn.Module):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.scores = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.both = nn.Transformer(WIDTH, 4, 1, 1, 64, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss. Both: [batch, sequence]."""
        mask = self.both.generate_square_subsequent_mask(y.shape[1])
        decoded = self.both(self.tokens(x), self.tokens(y), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.scores(decoded).flatten(0, 1), y.flatten())


@case("nn.Transformer")
def _() -> Case:
    return Case(Translator(), symbols())


class Generator(nn.Module):
    """Transposed convolutions make an image, and convolutions judge it."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Sequential(
            nn.ConvTranspose2d(16, 16, 4, 1, 0, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.judged = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(8, 1, 8))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Return the loss. z: [batch, channels, 1, 1]."""
        return F.softplus(-self.judged(self.made(z)).flatten()).mean()


@case("gan-dcgan")
def _() -> Case:
    return Case(Generator(), {"z": normal(4, 16, 1, 1)})


class Classified(nn.Module):
    """Layers that give classes scores."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss. y: [batch]."""
        return F.cross_entropy(self.layers(x), y)


@case("conv3d")
def _() -> Case:
    model = Classified(
        nn.Conv3d(3, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 8, 3),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    return Case(model, {"x": normal(ROWS, 3, 8, 8, 8), "y": torch.tensor([0, 4])})


class Unet(nn.Module):
    """Convolutions down and up again, by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.up, self.last = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 1, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss. x: [batch, 3, size, size]; y: [batch, 1, size, size]."""
        fine = F.relu(self.fine(x))
        coarse = self.up(F.relu(self.down(fine)))
        again = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        return F.binary_cross_entropy_with_logits(self.last(torch.cat([fine, again], 1)), y)


@case("unet-upsample")
def _() -> Case:
    return Case(Unet(), {"x": normal(ROWS, 3, 16, 16), "y": (normal(ROWS, 1, 16, 16, seed=8) > 0).float()})


class Recommender(nn.Module):
    """Bags of embeddings, and products of each pair of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Linear(4, 8)
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss. dense: [batch, 4]; sparse: [batch, 3, 2]; y: [batch]."""
        bags = [bag(sparse[:, i]) for i, bag in enumerate(self.bags)]
        features = torch.stack([self.bottom(dense), *bags], 1)
        i, j = torch.tril_indices(4, 4, -1)
        pairs = torch.bmm(features, features.transpose(1, 2))[:, i, j]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([features[:, 0], pairs], 1)).squeeze(1), y)


@case("dlrm")
def _() -> Case:
    return Case(
        Recommender(),
        {"dense": normal(ROWS, 4), "sparse": integers((ROWS, 3, 2), 0, 50), "y": torch.tensor([0.0, 1.0])},
    )


class Graph(nn.Module):
    """Two layers that add up what the neighbours of each node send."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss. x: [nodes, features]; source, target: [edges]; y: [nodes]."""

        def sent(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(x.shape[0], layer.out_features).index_add(0, target, layer(x)[source])

        return F.cross_entropy(sent(self.second, F.relu(sent(self.first, x))), y)


@case("gcn")
def _() -> Case:
    edges = {"source": integers((30,), 0, 10, seed=5), "target": integers((30,), 0, 10, seed=6)}
    return Case(Graph(), {"x": normal(10, 8), **edges, "y": integers((10,), 0, 4)})
