"""Writes forwards of `torch.export.export`, without a backward, and the losses of eager training.

Usage: gen_forward.py   (torch 2.11.0; writes beside itself)

`lm.pt2` returns logits: a causal model with tied embeddings, a padding row, attention by
`scaled_dot_product_attention`, a frozen parameter, and a part without gradients. `cnn.pt2` returns its loss:
convolutions, a batch norm that writes its running statistics, and a ReLU in place. `edges.pt2` has functions of numbers
where a formula for them has no derivative. `activations.pt2` has torch's activations at many places, ends and bounds
among them. `images.pt2` resizes, pads and pools images and rows in many ways. `recurrent.pt2` has recurrent layers. `losses.pt2` adds
losses, and functions of several tensors. `complexes.pt2` has complex numbers, `functions.pt2` functions that torch composes of others.
`ends.pt2` has functions where their slope is
infinite or jumps, and its `.safetensors` file their gradients. `writes.pt2` writes into views, at indices and under masks. `detached.pt2` detaches a value that depends on its parameters.
The `.safetensors` files have the batches (`batch.K.INPUT`), the losses of AdamW with its defaults, one for each step
(`losses`), and each parameter and buffer after the last step (`after.PATH`).
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

BATCH, TOKENS, WORDS, WIDTH, HEADS = 3, 8, 23, 16, 2
IMAGE, CLASSES = 8, 5
STEPS, BATCHES = 10, 3
PADDING, IGNORED = 0, -100


class Language(nn.Module):
    """One block of a causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.norm1, self.norm2, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))
        # A bias of keys has the gradient 0, so AdamW would follow its rounding errors.
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.out.bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [batch, tokens]."""
        with torch.no_grad():
            wave = torch.cos(torch.arange(TOKENS, dtype=torch.float32))[:, None] * 0.1 + 1
        x = self.words(ids) * wave + self.places(torch.arange(TOKENS))
        q, k, v = self.qkv(self.norm1(x)).view(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
        x = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return self.head(self.last(x))


class Images(nn.Module):
    """A small network for images, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        # The norm takes out a bias of the convolution before it.
        self.first, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 6, 3, stride=2, bias=False), nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [batch, 3, height, width]; label: [batch]."""
        x = F.max_pool2d(F.relu(self.norm(self.first(x)), inplace=True), 2)
        logits = self.head(self.second(x).mean((2, 3)))
        return F.cross_entropy(logits, label), logits


class Detached(nn.Module):
    """The mean counts as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 2]."""
        y = self.layer(x)
        return (y * y.mean().detach()).sum()


class Edges(nn.Module):
    """log1p near 0, where its argument disappears beside 1, and expm1 where tanh is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Parameter(torch.tensor([0.0, 1e-10, -1e-9, 0.3, -0.5]))
        self.large = nn.Parameter(torch.tensor([18.0, 25.0, -30.0, 0.0, 0.2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [5]."""
        return (torch.log1p(self.near) * x).sum() + (torch.expm1(self.large) * x).mean().log1p()


class Activations(nn.Module):
    """Each activation of a row of its own."""

    FUNCTIONS = (
        F.celu,
        F.elu,
        lambda x: F.elu(x, 1.7),
        lambda x: F.glu(x, 0).repeat(2),
        F.hardshrink,
        F.hardsigmoid,
        F.hardswish,
        F.hardtanh,
        F.leaky_relu,
        F.logsigmoid,
        F.mish,
        F.relu6,
        F.selu,
        F.softplus,
        lambda x: F.softplus(x, 2.0, 3.0),
        F.softshrink,
        F.softsign,
        F.tanhshrink,
        lambda x: F.threshold(x, 0.5, -0.25),
        torch.sinh,
        torch.cosh,
        torch.asinh,
        lambda x: torch.tan(x / 8),
        lambda x: torch.asin(x / 9),
        lambda x: torch.acos(x / 9),
        lambda x: torch.atanh(x / 9),
    )
    PLACES = (0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, -6.0, 8.0, -8.0, 0.1)

    def __init__(self) -> None:
        super().__init__()
        rows = len(self.FUNCTIONS)
        self.places = nn.Parameter(torch.tensor(self.PLACES).repeat(rows, 1))
        self.act = nn.PReLU(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, places]."""
        rows = [f(row) for f, row in zip(self.FUNCTIONS, self.places.unbind())]
        loss = (torch.stack(rows) * x).mean()
        return loss + self.act(x[:2, :3]).sum()


class Resized(nn.Module):
    """Images and rows through padding, pooling, convolutions and other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Conv2d(3, 4, 4, padding="same", dilation=(1, 2), bias=False)
        self.up = nn.ConvTranspose2d(4, 8, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.mirror = nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")
        self.row = nn.ConvTranspose1d(3, 4, 3, stride=2)
        self.reduce = nn.Conv1d(4, 2, 2, padding="valid", padding_mode="zeros")
        self.weight = nn.Parameter(torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [batch, 3, height, width]."""
        y = F.instance_norm(self.same(x))
        y = F.avg_pool2d(y, 3, 2, 1, ceil_mode=True, count_include_pad=False)
        y = F.pixel_shuffle(self.up(y), 2)
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        y = F.interpolate(y, size=(9, 13), mode="bilinear", align_corners=False)
        y = self.mirror(y)
        y = F.interpolate(y, size=(12, 7), mode="bicubic") + F.interpolate(
            y, size=(12, 7), mode="bilinear", align_corners=True
        )
        y = F.interpolate(y, size=(5, 10), mode="nearest")
        y = F.adaptive_avg_pool2d(F.pad(y, (1, 2, 0, 1), mode="replicate"), (3, 5))
        y = F.adaptive_max_pool2d(F.pad(y, (1, 0, 1, 0), mode="circular"), (2, 3))
        y = self.row(y.flatten(2))
        y = F.max_pool1d(y, 3, 2, 1) + F.avg_pool1d(y, 3, 2, 1)
        y = F.interpolate(self.reduce(y), scale_factor=1.5, mode="linear")
        y = F.rms_norm(F.pad(y, (0, 1)), (10,), self.weight)
        return (F.adaptive_avg_pool1d(y, 4) ** 2).mean() + F.pixel_unshuffle(x, 2)[0].mean()


class Recurrent(nn.Module):
    """Layers of each kind of cell."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(8, 5, batch_first=True)
        self.rnn = nn.RNN(5, 3, nonlinearity="relu", bias=False)
        self.start = nn.Parameter(torch.full((1, 2, 5), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [time, batch, 3]."""
        y, (h, c) = self.lstm(x)
        z, last = self.gru(y.transpose(0, 1), self.start)
        w, end = self.rnn(z.transpose(0, 1))
        return (w * w).mean() + h.tanh().mean() + c.sin().mean() + last.mean() + end.mean()


class Losses(nn.Module):
    """Losses, and functions of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        self.bags = nn.ModuleList(nn.EmbeddingBag(7, 3, mode=mode) for mode in ("sum", "mean"))
        self.register_buffer("pos", torch.full((6,), 1.5))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """x: [5, 4]; ids: [5, 2]; t: [5, 6], from 0 to 1."""
        y = self.layer(x)
        classes = ids.sum(1) % 6
        losses = [
            F.smooth_l1_loss(y, t, beta=0.5),
            F.huber_loss(y, t, delta=0.7, reduction="sum"),
            F.l1_loss(y, t),
            F.binary_cross_entropy(y.sigmoid(), t),
            F.binary_cross_entropy_with_logits(y, t, pos_weight=self.pos, reduction="none").sum(),
            F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
            F.kl_div(y.log_softmax(-1), t.log_softmax(-1), log_target=True),
            F.soft_margin_loss(y, t - 0.5),
            F.cross_entropy(y, torch.where(classes == 0, -100, classes), label_smoothing=0.2),
        ]
        a, b = self.bags[0](ids), self.bags[1](ids)
        losses.append(torch.einsum("bi,bj,ij->", a, b, y[:3, :3]))
        losses.append(F.cosine_similarity(a, b).mean() + (b * (1 - torch.tanh(a).square())).mean())
        once = F.one_hot(classes, 6).float().repeat_interleave(2, 1).unfold(1, 4, 3).movedim(0, 2)
        losses.append((once @ y).mean())
        losses.append(torch.cdist(y, y).mean() + F.triplet_margin_loss(y, t, t.flip(0), swap=True))
        losses.append(F.normalize(torch.where(classes[:, None] < 3, y, 0.0), dim=-1).square().mean())
        z = y.index_fill(0, ids[0, :1] % 5, 0.5).index_copy(1, classes[:1], y[:, :1] * 2)
        losses.append(torch.addmv(y[:, 0], z, y[0]).square().mean())
        return torch.stack(losses).sum()


class Complexes(nn.Module):
    """Complex numbers: rotated features, filters of spectra, a state space, angles and lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.decay = nn.Parameter(torch.complex(-torch.rand(4), torch.randn(4)))
        self.matrix = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        angles = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.3, 0.1, 0.03]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [3, 6, 8]."""
        y = self.layer(x)
        turned = torch.view_as_complex(y.float().reshape(3, 6, -1, 2)) * self.turns[: x.shape[1]].view(1, 6, 4)
        losses = [torch.view_as_real(turned).flatten(2).square().mean(1).sum()]
        spectrum = torch.fft.rfft2(y, norm="ortho")
        kept = F.pad(torch.view_as_real(spectrum[:, :3, :5] * self.filter), (0, 0, 0, 0, 0, 3))
        losses.append(torch.fft.irfft2(torch.view_as_complex(kept.contiguous()), s=(6, 8), norm="ortho").square().mean())
        losses.append(torch.fft.fft(turned, dim=1).real.abs().mean() + torch.fft.ifftn(turned).imag.square().sum())
        states = torch.exp(self.decay[:, None] * torch.arange(6.0)) / (self.decay[:, None] + 2)
        losses.append((torch.einsum("ij,jt->it", self.matrix, states).real * y[0].mean()).square().mean())
        losses.append((turned @ self.matrix).abs().mean() + torch.where(x > 0, spectrum[:, :, :1], 0 * turned[:, :, :1]).abs().sum())
        losses.append(turned.angle().square().mean() + (turned.conj() * turned).real.mean() + turned.log().imag.mean())
        losses.append(torch.atan2(y, x).mean() + (1j * turned - 0.5 + y[..., :4]).imag.pow(3).mean())
        return torch.stack(losses).sum()


class Functions(nn.Module):
    """Functions that torch composes of others, as `torch.export` leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def elements(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x: [4, 6]."""
        p, other = x.abs() + 0.5, x.flip(0) * 0.7
        yield torch.frac(x * 3) + torch.fmod(x, 0.7) + torch.remainder(x, 0.6) + torch.remainder(x, other)
        yield torch.floor_divide(x.detach(), 0.4) * x + torch.div(x, 0.3, rounding_mode="trunc") * x
        yield torch.hypot(x, p) + torch.logaddexp(x, other) + torch.logaddexp2(x, other)
        yield torch.xlogy(x, p) + torch.special.xlog1py(x, p) + torch.special.entr(x.sigmoid())
        yield torch.logit(x.sigmoid()) + torch.logit(x, eps=0.1) + torch.special.expit(x) + torch.sinc(x)
        yield torch.deg2rad(x) + torch.rad2deg(x) + torch.copysign(x, other) + torch.ldexp(x, torch.tensor(2))
        yield torch.float_power(p, 1.5).float() + torch.fmax(x, other) + torch.fmin(x, other) + torch.nan_to_num(torch.where(x > 0.5, torch.inf, x), posinf=3.0)
        yield x * torch.isclose(x, x) + x * torch.isin(torch.arange(6), torch.tensor([1, 4])) + x.clip(-0.5, 0.5)
        yield x * torch.bucketize(x, torch.tensor([-0.5, 0.0, 0.5])) + x * torch.signbit(x) + torch.positive(x)
        yield x * torch.searchsorted(torch.tensor([-0.5, 0.0]), x, right=True) * torch.linspace(-1, 1, 6)
        yield x * torch.logspace(0, 1, 6) + x * torch.heaviside(x.detach(), torch.ones(1))
        yield x * torch.count_nonzero(x > 0, 1)[:, None] + torch.atan2(x, other)

    def shapes(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x: [4, 6]."""
        yield torch.diagonal(x, -1) * x.diag()[:3] + torch.diagonal(x[None].expand(3, 4, 6), 2, 1, 2)[0, :3]
        yield torch.diag_embed(x, 1, 0, 2).square() + torch.diag(x[0], -1).sum() + torch.trace(x)
        yield torch.block_diag(x, x[:2], x[0]) * torch.kron(torch.ones(2, 3), x[:1, :1]).sum()
        yield torch.diagonal_scatter(x, x[0, :4] * 2) + torch.diagonal_scatter(x, x[1, :3], 3)
        yield torch.tile(x, (2, 1, 2)) + torch.cat([x.fliplr(), x.flipud()], 1) * torch.rot90(x).reshape(6, 4).sum()
        yield torch.rot90(x, -1) * torch.rot90(x, 3) + torch.rot90(x, 2).t()
        yield torch.hstack([x, x]) * torch.column_stack([x, x[:, 0], x[:, :5]]) + torch.vstack([x, x[0]]).sum()
        yield torch.dstack([x, x])[..., 1] + torch.atleast_3d(x)[..., 0] + x.ravel().moveaxis(0, 0).reshape(4, 6)
        yield torch.hsplit(x, 3)[1] + torch.vsplit(x, [1, 3])[1].sum() + torch.tensor_split(x, 4, 1)[2][:, :1]
        yield torch.meshgrid(x[0], x[1], indexing="ij")[0] * torch.meshgrid(x[0], x[1], indexing="xy")[0]
        yield torch.take(x, torch.tensor([5, 0, 23])) + x.put(torch.tensor([3]), torch.tensor([1.5]))[0, :3]
        yield x.masked_scatter(x > 0, x.t() * 3) + F.channel_shuffle(x.reshape(1, 4, 2, 3), 2).reshape(4, 6)
        yield F.unfold(x[None, None], 2, 2, 1, 2) * F.unfold(x.reshape(1, 2, 3, 4), (2, 1), 1, 0, 1).sum()
        yield F.fold(x[None], (3, 4), (2, 2)) + F.fold(x.reshape(4, 6), (4, 3), (2, 2), padding=1, stride=2).sum()
        yield F.max_unpool1d(*F.max_pool1d(x[None], 2, return_indices=True), 2)
        values, places = F.adaptive_max_pool2d(x[None], (3, 4), return_indices=True)
        yield values + x.flatten()[places] + F.adaptive_max_pool1d(x[None], 4)[:, :3]

    def sums(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x: [4, 6]."""
        yield torch.prod(x, 1) + torch.prod(x[:, :3]) + torch.cumprod(x, 1).sum(1) + torch.logcumsumexp(x, 1)[:, 3]
        yield torch.nansum(x, 1) + torch.nanmean(torch.where(x > 1, torch.nan, x), 1) + torch.dist(x, x.flip(0))
        yield torch.linalg.matrix_norm(x) + torch.aminmax(x.detach(), dim=1)[0] * x[:, 0] + torch.aminmax(x.detach())[1] * x[0, 0] + torch.median(x)
        yield torch.kthvalue(x, 2, 1)[0] + torch.median(x, 1)[0] + torch.msort(x)[1, :4] + torch.argsort(x, 1)[:, 0] * x[:, 0]
        yield torch.addbmm(x[:, :4], x[None], x.t()[None], alpha=2) + torch.ger(x[:, 0], x[1, :4]) + torch.inner(x, x)
        yield torch.addr(x, x[:, 0], x[0], beta=0.5) + torch.tensordot(x, x, dims=([1], [1])).sum()
        yield torch.linalg.multi_dot([x, x.t(), x]) + torch.linalg.matrix_power(x[:, :4], 3).sum()
        yield F.bilinear(x, x, torch.kron(torch.ones(2, 6, 1), x[0]), torch.ones(2)) + x[:, :2]
        yield torch.linalg.cross(x[:, :3], x[:, 3:])
        yield x.scatter_reduce(1, torch.zeros(4, 6, dtype=torch.long), x * 2, "mean")
        yield x.scatter_reduce(0, torch.ones(4, 6, dtype=torch.long), x * 2, "mean", include_self=False)
        yield F.poisson_nll_loss(x, x.abs()) + F.hinge_embedding_loss(x, x.detach().sign())
        yield F.cosine_embedding_loss(x, x.flip(0), torch.tensor([1, -1, 1, -1]))
        yield F.multi_margin_loss(x, torch.tensor([0, 1, 2, 3])) + F.margin_ranking_loss(x[0], x[1], torch.ones(6))
        theta = torch.tensor([[[0.9, 0.1, 0.05], [-0.1, 0.8, 0.02]]]) * x[0, 0]
        image = x.reshape(1, 2, 3, 4)
        for align in (False, True):
            grid = F.affine_grid(theta, [1, 2, 3, 5], align_corners=align)
            yield F.grid_sample(image, grid, align_corners=align)
            yield F.grid_sample(image, 1.5 * grid, "bilinear", "border", align_corners=align)
        yield F.grid_sample(image, grid.detach() * 1.1, "nearest", align_corners=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [4, 6]."""
        y = self.weight * x
        values = [*self.elements(y), *self.shapes(y), *self.sums(y)]
        return torch.stack([value.float().square().mean().log1p() for value in values]).sum()


class Writes(nn.Module):
    """Writes into views of an activation and of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """x: [3, 4]; at: [2]."""
        y = self.layer(x)
        row, flat = y[2], y.view(-1)
        y[:, 0] = 0
        flat.add_(1.0)
        y[1:, 2:4] = y[1:, 2:4] * 3
        y[0, 1].mul_(2)
        columns = y.transpose(0, 1)
        columns[2].masked_fill_(columns[2] > 2, -1.0)
        columns.view(2, 2, 3)[1, 0].sub_(0.25)
        y.index_put_((at,), row * 0.5, accumulate=True)
        y[y > 4] = 0.5
        y.diagonal(1).mul_(0.5)
        y.swapaxes(0, 1)[1].add_(0.125)
        y.movedim(1, 0).diagonal(-1)[:2].sub_(0.5)
        y.ravel()[3].add_(row[0])
        y.view(3, 2, 2).diagonal(0, 1, 2).mul_(1.5)
        F.dropout(y, 0.5, False)[1].add_(0.25)
        u = torch.zeros(3, 4)
        u[:, 1] = y[:, 1]
        u[at] += y[at]
        u.T[3].copy_(row.exp()[:3])
        u.unsqueeze(0)[0, ::2, 1:3].relu_()
        with torch.no_grad():
            self.kept[0].lerp_(y[0], 0.5)
        return (y * u).mean() + (row * flat[:4]).mean() + (self.kept * y).mean()


class Ends(nn.Module):
    """Functions where their slope is infinite, jumps, or is lost in a formula."""

    PLACES = (
        (torch.asin, (1.0, -1.0, 0.5)),
        (torch.acos, (1.0, -1.0, 0.5)),
        (torch.atanh, (1.0, -1.0, 0.5)),
        (torch.acosh, (1.0, 2.0)),
        (torch.asinh, (0.0, -2.0)),
        (F.softplus, (0.0, 60.0, -60.0, 18.0, -18.0)),
        (F.logsigmoid, (0.0, 60.0, -60.0)),
        (F.relu6, (0.0, 6.0, 3.0)),
        (F.hardtanh, (-1.0, 1.0, 0.0)),
        (F.hardswish, (-3.0, 3.0, 0.0)),
        (torch.linalg.vector_norm, (0.0, 0.0)),
        (lambda x: x.norm(), (3.0, -4.0)),
        (lambda x: F.margin_ranking_loss(x[:2], x[2:], torch.ones(2)), (1.0, 2.0, 1.0, 0.5)),
        (lambda x: F.hinge_embedding_loss(x, -torch.ones(3)), (1.0, 0.5, 2.0)),
        (lambda x: F.cosine_embedding_loss(x[None, :2], x[None, 2:], -torch.ones(1)), (1.0, 0.0, 0.0, 2.0)),
        (lambda x: torch.fmax(x[:2], x[2:]) + torch.fmin(x[:2], x[2:]) * 3, (1.0, 2.0, 1.0, 3.0)),
        (lambda x: torch.atan2(x[:2], x[2:]), (0.0, 1.0, 0.0, 0.0)),
        (lambda x: torch.view_as_real(torch.sgn(torch.complex(x[:2], x[2:]))), (0.0, 3.0, 0.0, 4.0)),
        (lambda x: torch.hypot(x[:2], x[2:]) * 1e-30, (3e30, 1.0, 4e30, 0.0)),
        (lambda x: torch.complex(x[:3], x[3:]).abs(), (3e30, 0.0, 3e-30, 4e30, 0.0, 4e-30)),
        (lambda x: (1 / torch.complex(x[:2], x[2:])).real, (3e-15, 2.0, 4e-15, 0.0)),
        (lambda x: torch.remainder(x, 0.1) + torch.fmod(x, float("inf")), (1.0, 0.3, 2.0, -1.0)),
    )

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.ParameterList(torch.tensor(places) for _, places in self.PLACES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [1]."""
        rows = [f(places).sum() for (f, _), places in zip(self.PLACES, self.places)]
        return (torch.stack(rows) * x).sum()


def write_gradients(name: str, model: nn.Module, x: torch.Tensor) -> None:
    """Export a model with the gradients of its result (`grad.PATH`)."""
    here = Path(__file__).parent
    torch.export.save(torch.export.export(model, (x,)), here / f"{name}.pt2")
    strip(here / f"{name}.pt2")
    model(x).backward()
    gradients = {f"grad.{path}": p.grad for path, p in model.named_parameters() if p.grad is not None}
    save_file({"x": x, **gradients}, here / f"{name}.safetensors")


def strip(path: Path) -> None:
    """Remove the traces of the stack, which are most of a file."""
    with zipfile.ZipFile(path) as archive:
        parts = {part: archive.read(part) for part in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for part, data in parts.items():
            if part.endswith("/model.json"):
                program = json.loads(data)
                for node in program["graph_module"]["graph"]["nodes"]:
                    node["metadata"] = {}
                data = json.dumps(program, separators=(",", ":")).encode()
            archive.writestr(zipfile.ZipInfo(part), data)


def write(name: str, model: nn.Module, batches: list[dict[str, torch.Tensor]], n_inputs: int, loss) -> None:
    """Export a model and train it; `loss` computes it from the forward's results and a batch."""
    here = Path(__file__).parent
    model.train()
    inputs = tuple(batches[0].values())[:n_inputs]
    torch.export.save(torch.export.export(model, inputs), here / f"{name}.pt2")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        batch = batches[step % BATCHES]
        value = loss(model(*tuple(batch.values())[:n_inputs]), batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    tensors = {f"batch.{i}.{key}": x for i, batch in enumerate(batches) for key, x in batch.items()}
    tensors["losses"] = torch.stack(losses)
    after = {path: torch.view_as_real(x) if x.is_complex() else x for path, x in model.state_dict().items()}
    tensors |= {f"after.{path}": x.detach().clone() for path, x in after.items()}
    save_file(tensors, here / f"{name}.safetensors")


def language_batch() -> dict[str, torch.Tensor]:
    """Ids with some padding, which does not count."""
    ids = torch.randint(1, WORDS, (BATCH, TOKENS))
    ids[1, 5:] = PADDING
    labels = torch.where(ids == PADDING, IGNORED, ids)
    return {"ids": ids, "labels": labels}


def next_word(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each position predicts the next word."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), batch["labels"][:, 1:].reshape(-1))


PARTS = (
    ("activations", Activations, lambda: {"x": torch.randn(len(Activations.FUNCTIONS), len(Activations.PLACES))}),
    ("images", Resized, lambda: {"x": torch.randn(2, 3, 8, 6)}),
    ("recurrent", Recurrent, lambda: {"x": torch.randn(5, 2, 3)}),
    (
        "losses",
        Losses,
        lambda: {"x": torch.randn(5, 4), "ids": torch.randint(7, (5, 2)), "t": torch.rand(5, 6)},
    ),
    ("writes", Writes, lambda: {"x": torch.randn(3, 4), "at": torch.tensor([0, 2])}),
    ("complexes", Complexes, lambda: {"x": torch.randn(3, 6, 8)}),
    ("functions", Functions, lambda: {"x": torch.rand(4, 6) + 0.5}),
)


def main() -> None:
    """Write all models."""
    torch.manual_seed(1)
    write("lm", Language(), [language_batch() for _ in range(BATCHES)], 1, next_word)
    images = [
        {"x": torch.randn(BATCH, 3, IMAGE, IMAGE), "label": torch.randint(CLASSES, (BATCH,))} for _ in range(BATCHES)
    ]
    write("cnn", Images(), images, 2, lambda results, _: results[0])
    numbers = [{"x": torch.rand(5) + 0.5} for _ in range(BATCHES)]
    write("edges", Edges(), numbers, 1, lambda result, _: result)
    for seed, (name, model, batch) in enumerate(PARTS):
        torch.manual_seed(seed)
        write(name, model(), [batch() for _ in range(BATCHES)], len(batch()), lambda result, _: result)
        strip(Path(__file__).with_name(f"{name}.pt2"))
    write_gradients("ends", Ends(), torch.ones(1))
    torch.export.save(torch.export.export(Detached(), (torch.ones(3, 2),)), Path(__file__).with_name("detached.pt2"))


if __name__ == "__main__":
    main()
