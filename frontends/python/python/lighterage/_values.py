"""Functions of torch's that look at the values of tensors, traced in ways that do not.

A plan is made before there are values. Some functions look at them only to refuse bad ones, and some have another way
to the same result. The others are refused, with what to do instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.nn.modules import adaptive, transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

aten = torch.ops.aten

# Functions that look at values only to refuse some: the operator that looks, and what it finds where there are none to
# refuse.
CHECKS: dict[Any, tuple[Any, bool]] = {
    F.gaussian_nll_loss: (aten._local_scalar_dense.default, False),
    torch.quantile: (aten.equal.default, True),
    torch.Tensor.quantile: (aten.equal.default, True),
    torch.nanquantile: (aten.equal.default, True),
    torch.Tensor.nanquantile: (aten.equal.default, True),
}


class Refusal(Exception):  # noqa: N818
    """What a function of torch's needs values for, and what to do instead."""


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Trace without a look at values, where a function of torch's has such a way."""
    with (
        _Functions(),
        # Its checks look at values, and its results do not depend on them.
        mock.patch.object(Distribution, "_validate_args", False),
        mock.patch.object(transformer, "_detect_is_causal_mask", _is_causal),
        mock.patch.object(_BatchNorm, "forward", _batch_norm),
        mock.patch.object(nn.AdaptiveLogSoftmaxWithLoss, "forward", _adaptive),
    ):
        yield


class _Functions(TorchFunctionMode):
    """Calls other functions in the place of some."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CHECKS:
            with _Passed(*CHECKS[func]):
                return func(*args, **(kwargs or {}))
        return INSTEAD.get(func, func)(*args, **(kwargs or {}))


class _Passed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A check that finds nothing to refuse."""

    def __init__(self, operator: Any, answer: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator, self.answer = operator, answer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.answer if func is self.operator else func(*args, **(kwargs or {}))


# Layers --------------------------------------------------------------------------------------------------------------


def _is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether attention may skip the mask: only if the caller says so. Applying it is right for every mask."""
    return is_causal is True


def _batch_norm(
    self: Any, input: torch.Tensor, _forward: Callable[..., torch.Tensor] = _BatchNorm.forward
) -> torch.Tensor:
    """Batch norm. Without a momentum, its buffers are means over all batches, and torch reads how many there were."""
    if self.momentum is not None or not self.training or self.num_batches_tracked is None:
        return _forward(self, input)
    self._check_input_dim(input)
    # A momentum of 1 replaces them by those of the batch.
    mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    result = F.batch_norm(input, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    self.num_batches_tracked.add_(1)
    for kept, new in ((self.running_mean, mean), (self.running_var, var)):
        kept.add_((new - kept) / self.num_batches_tracked)
    return result


def _adaptive(self: Any, input_: torch.Tensor, target_: torch.Tensor) -> Any:
    """Adaptive softmax of each row in every cluster. torch computes a cluster for the rows with a target in it."""
    if target_.dim() > 1 or input_.dim() != target_.dim() + 1:
        raise Refusal("AdaptiveLogSoftmaxWithLoss takes rows with a target each, or one row with its target")
    rows = self.log_prob(input_.reshape(-1, self.in_features))
    output = rows.gather(1, target_.reshape(-1, 1)).reshape(target_.shape)
    return adaptive._ASMoutput(output, (-output).mean())


# Covariance ----------------------------------------------------------------------------------------------------------

# PyTorch's functions look whether weights are negative, and warn where there are too few observations.


def _cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = input if input.dim() > 1 else input.reshape(1, -1)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    total: Any
    freedom: Any
    if weights is None:
        weighted, total = rows, rows.shape[1]
        freedom = max(total - correction, 0)
    else:
        weighted, total = rows * weights, weights.sum()
        less = correction if aweights is None else correction * (weights * aweights).sum() / total
        freedom = (total - less).clamp(min=0)
    mean = (weighted.sum(1) / total).unsqueeze(1)
    rows = rows - mean
    return ((rows @ (rows if weights is None else rows * weights).mH) / freedom).squeeze()


def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    found = _cov(input)
    if found.dim() == 0:
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviation[:, None] / deviation
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)


# Numbers of rows that depend on data ---------------------------------------------------------------------------------


def _masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    input, mask = torch.broadcast_tensors(input, mask)  # type: ignore[no-untyped-call]
    return input[mask]


def _repeat_interleave(
    input: torch.Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> torch.Tensor:
    counts = input if repeats is None else repeats
    if output_size is not None or not isinstance(counts, torch.Tensor):
        given = (input,) if repeats is None else (input, repeats, dim)
        return torch.repeat_interleave(*given, output_size=output_size)
    if isinstance(counts, FakeTensor):
        raise Refusal(
            "repeat_interleave: how many rows it returns depends on the values of `repeats`, and a plan has a fixed "
            "number of rows. Say how many: `output_size=`"
        )
    # A constant of the step.
    with _disable_current_modes():
        if repeats is not None:
            counts = counts.expand(input.numel() if dim is None else input.shape[dim])
        index = torch.repeat_interleave(counts)
    if repeats is None:
        return index
    return input.flatten().index_select(0, index) if dim is None else input.index_select(dim, index)


def _packed(*_: Any) -> Any:
    raise Refusal(
        "pack_padded_sequence: the sizes of what it returns depend on the values of the lengths, and a plan has fixed "
        "sizes. Give the layer the padded sequences, and multiply what comes after an end by zero: "
        "`torch.arange(n) < lengths[:, None]`. A layer that reads backwards meets the padding first, so reverse the "
        "sequences themselves for it"
    )


# Connectionist temporal classification -------------------------------------------------------------------------------

# PyTorch's operator also returns probabilities for its derivative, and their size depends on the longest target. Here
# the derivative computes them again.


@torch.library.custom_op("lighterage::ctc_loss", mutates_args=())
def _ctc(
    x: torch.Tensor,
    targets: torch.Tensor,
    lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    finite: bool,
) -> torch.Tensor:
    """The loss of each sequence."""
    return aten._ctc_loss(x, targets, lengths, target_lengths, blank, finite)[0]


@torch.library.custom_op("lighterage::ctc_loss_backward", mutates_args=())
def _ctc_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    targets: torch.Tensor,
    lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    finite: bool,
) -> torch.Tensor:
    """The gradient of `x`."""
    given = (x, targets, lengths, target_lengths)
    return aten._ctc_loss_backward(grad, *given, *aten._ctc_loss(*given, blank, finite), blank, finite)


@_ctc.register_fake
def _(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape[1])


@_ctc_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _ctc_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _ctc_derivative(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return (_ctc_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 5)


_ctc.register_autograd(_ctc_derivative, setup_context=_ctc_setup)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    is_one = log_probs.dim() == 2
    x = log_probs.unsqueeze(1) if is_one else log_probs
    if x.dtype in (torch.float16, torch.bfloat16):
        # PyTorch's operator takes no half precision, and autocast does the same.
        x = x.float()
    lengths, sizes = (torch.as_tensor(given, device=x.device).reshape(-1) for given in (input_lengths, target_lengths))
    loss = _ctc(x, targets, lengths, sizes, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == torch.inf, 0.0, loss)
    if reduction == "mean":
        return (loss / sizes.clamp_min(1).to(loss.dtype)).mean()
    if reduction == "sum":
        return loss.sum()
    return loss.squeeze(0) if is_one else loss


INSTEAD: dict[Any, Callable[..., Any]] = {
    F.ctc_loss: _ctc_loss,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    torch.masked_select: _masked_select,
    torch.Tensor.masked_select: _masked_select,
    torch.repeat_interleave: _repeat_interleave,
    torch.Tensor.repeat_interleave: _repeat_interleave,
    torch._VF._pack_padded_sequence: _packed,
}
