"""Functions of torch's that look at the values of tensors: they train as in eager mode, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lighterage as lt

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch computes")

SEQUENCE, WIDTH = 5, 8
CAUSAL = nn.Transformer.generate_square_subsequent_mask(SEQUENCE)
COUNTS, TWICE = torch.tensor([1, 2, 0, 3, 1, 1]), torch.tensor([2])
X = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))
Y = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
WORDS = torch.randn(2, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(2))
# 12 positions of 4 sequences.
SOUND = torch.randn(12, 4, WIDTH, generator=torch.Generator().manual_seed(3))
TARGETS = torch.tensor([[1, 2, 2], [3, 1, 4], [4, 4, 4], [2, 3, 1]])
LENGTHS = torch.tensor([12, 10, 11, 9]), torch.tensor([3, 1, 3, 2])

Function = Callable[..., torch.Tensor]


def transformer() -> nn.Module:
    return nn.Transformer(WIDTH, 2, 1, 1, 16, dropout=0.0, batch_first=True)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True), 2)


class Masked(nn.Module):
    """An encoder whose mask is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()
        self.register_buffer("mask", CAUSAL.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, mask=self.mask)


def square(function: Function) -> Function:
    return lambda *given: function(*given).square().mean()


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def ctc(**options: Any) -> Function:
    return lambda m, x, y, *lengths: F.ctc_loss(m(x).log_softmax(-1), y, *lengths, **options).sum()


# The model, the loss and the batch.
CASES: dict[str, tuple[Callable[[], nn.Module], Function, tuple[Any, ...]]] = {
    "mask of a closure": (
        transformer,
        square(lambda m, x, y: m(x, y, tgt_mask=CAUSAL)),
        (WORDS, WORDS.flip(0)),
    ),
    "mask that forward makes": (
        encoder,
        square(lambda m, x: m(x, mask=nn.Transformer.generate_square_subsequent_mask(x.size(1)))),
        (WORDS,),
    ),
    "mask that is a buffer": (Masked, square(lambda m, x: m(x)), (WORDS,)),
    "mask that is an input": (
        transformer,
        square(lambda m, x, y, mask: m(x, y, tgt_mask=mask)),
        (WORDS, WORDS.flip(0), CAUSAL),
    ),
    "mask beside padding": (
        encoder,
        square(lambda m, x, padding: m(x, mask=CAUSAL < 0, src_key_padding_mask=padding)),
        (WORDS, torch.arange(SEQUENCE) >= torch.tensor([[5], [3]])),
    ),
    "hint": (encoder, square(lambda m, x: m(x, mask=CAUSAL, is_causal=True)), (WORDS,)),
    "ctc with lists": (linear, lambda m, x, y: ctc()(m, x, y, [12] * 4, [3] * 4), (SOUND, TARGETS)),
    "ctc with lists in the batch": (linear, ctc(), (SOUND, TARGETS, [12, 12, 9, 12], [3, 2, 3, 1])),
    "ctc with tensors": (linear, ctc(reduction="none", blank=5), (SOUND, TARGETS, *LENGTHS)),
    "ctc that is infinite": (
        linear,
        ctc(reduction="sum", zero_infinity=True),
        (SOUND, TARGETS, torch.tensor([12, 2, 4, 12]), torch.tensor([3, 3, 3, 0])),
    ),
    "ctc of one sequence": (linear, ctc(), (SOUND[:, 0], TARGETS[0], torch.tensor(12), torch.tensor(3))),
    "ctc of targets in a row": (linear, ctc(), (SOUND, TARGETS.flatten()[:9], *LENGTHS)),
    "variances": (linear, lambda m, x, y: F.gaussian_nll_loss(m(x), y, F.softplus(m(y)), full=True), (X, Y)),
    "quantiles": (
        linear,
        square(lambda m, x: m(x).quantile(0.3, 1) + torch.quantile(m(x), torch.tensor([0.2, 0.9]), 1).sum(0)),
        (X,),
    ),
    "quantiles beside nan": (
        linear,
        square(lambda m, x: torch.where(x > 1, torch.nan, m(x)).nanquantile(0.6, dim=0, interpolation="midpoint")),
        (X,),
    ),
    "covariance": (linear, square(lambda m, x: torch.cov(m(x)) + m(x)[0].cov()), (X,)),
    "covariance with weights": (
        linear,
        square(
            lambda m, x, y: (
                m(x).T.cov(fweights=COUNTS, aweights=y.abs())
                + m(x).T.cov(correction=0, fweights=COUNTS)
                + m(x).T.cov(aweights=y.abs())
            )
        ),
        (X, Y[:, 0]),
    ),
    "correlation": (linear, square(lambda m, x, y: m(x).T.corrcoef() - torch.corrcoef(m(y).T)), (X, Y)),
    "correlation of complex numbers": (
        linear,
        square(lambda m, x: torch.view_as_real(torch.complex(m(x), x).corrcoef())),
        (X,),
    ),
    "mean over all batches": (
        lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH, momentum=None), nn.Tanh(), linear()),
        square(lambda m, x: m(x)),
        (X,),
    ),
    "adaptive softmax": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 20, [5, 10], div_value=2.0),
        lambda m, x, y: m(x, y).loss,
        (X, torch.tensor([0, 19, 7, 4, 12, 5])),
    ),
    "adaptive softmax of one row": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 20, [5, 10], div_value=2.0, head_bias=True),
        lambda m, x, y: -m(x, y).output,
        (X[0], torch.tensor(7)),
    ),
    "elements by a mask": (
        linear,
        lambda m, x: torch.masked_select(input=m(x), mask=x[:, :1] > 0).sum() + m(x).masked_select(x > 1).exp().sum(),
        (X,),
    ),
    "rows as often as a constant says": (
        linear,
        square(lambda m, x: m(x).repeat_interleave(COUNTS, 0) + m(x)[torch.repeat_interleave(COUNTS)]),
        (X,),
    ),
    "elements as often as a constant says": (
        linear,
        square(lambda m, x: torch.repeat_interleave(m(x), TWICE)),
        (X,),
    ),
    "rows as often as an input says": (
        linear,
        square(lambda m, x, counts: torch.repeat_interleave(m(x), counts, dim=0, output_size=8)),
        (X, COUNTS),
    ),
    "rows as often as a number says": (linear, square(lambda m, x: m(x).repeat_interleave(2, dim=0)), (X,)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_eagers(case: str) -> None:
    make, loss_of, batch = CASES[case]
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference)]
    step = lt.compile(model, optimizers[0], loss_of, example=batch, kernels="plain")
    assert step.check is not None
    for _ in range(3):
        optimizers[1].zero_grad()
        loss = loss_of(reference, *batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        torch.testing.assert_close(step(*batch), loss.detach())
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_lengths_of_ctc_are_those_of_the_batch() -> None:
    torch.manual_seed(0)
    model, loss_of = linear(), ctc()
    step = lt.compile(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_of, example=(SOUND, TARGETS, *LENGTHS))
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        sizes = [torch.randint(*ends, (4,), generator=generator) for ends in ((6, 13), (1, 4))]
        expected = loss_of(model, SOUND, TARGETS, *sizes).detach()
        torch.testing.assert_close(step(SOUND, TARGETS, *sizes), expected)


def test_ctc_of_half_precision_is_in_single_precision() -> None:
    def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *lengths: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ctc()(model, x, y, *lengths)

    model = linear()
    step = lt.compile(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_of, example=(SOUND, TARGETS, *LENGTHS))
    assert step.check is not None
    assert step(SOUND, TARGETS, *LENGTHS).dtype == torch.float32


def test_a_variance_that_is_negative_is_not_refused() -> None:
    """As in a distribution: eager mode looks at values for this error alone."""
    model = linear()
    step = lt.compile(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda m, x, variance: F.gaussian_nll_loss(m(x), x, variance),
        example=(X, X.exp()),
    )
    assert step(X, -X.exp()).isfinite()


def packed(model: nn.Module, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(model(rows)[0], batch_first=True)[0].square().mean()


REFUSED: dict[str, tuple[Callable[[], nn.Module], Function, tuple[Any, ...], str]] = {
    "packed sequences": (
        lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
        packed,
        (WORDS, torch.tensor([3, 5])),
        r"pack_padded_sequence: .*the padded sequences",
    ),
    "rows as often as an input says": (
        linear,
        square(lambda m, x, counts: m(x).repeat_interleave(counts, 0)),
        (X, COUNTS),
        "repeat_interleave: .*`output_size=`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_values_is_refused_by_name(case: str) -> None:
    make, loss_of, batch, message = REFUSED[case]
    model = make()
    with pytest.raises(lt.CaptureError, match=f"in the model: {message}"):
        lt.compile(model, torch.optim.SGD(model.parameters()), loss_of, example=batch)


def patched() -> list[Any]:
    layers = nn.BatchNorm1d, nn.AdaptiveLogSoftmaxWithLoss
    return [nn.modules.transformer._detect_is_causal_mask, *(layer.forward for layer in layers)]


def test_functions_of_torch_are_as_before() -> None:
    before, model = patched(), linear()
    lt.compile(model, torch.optim.SGD(model.parameters()), square(lambda m, x: m(x)), example=(X,))
    assert patched() == before
    with pytest.raises(ValueError, match="negative"):
        F.gaussian_nll_loss(X, Y, -Y.exp())
