"""Operators of PyTorch that have no op, as compositions of those that have one. PyTorch has no such composition itself.

A function returns NotImplemented for arguments that it cannot express; then PyTorch computes the call. An operator and
its derivative are both here, and refuse the same arguments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

OWN: dict[Any, Callable[..., Any]] = {}


def _spells(operator: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        OWN[operator] = function
        return function

    return add


@_spells(aten._efficientzerotensor.default)
def zero_tensor(size: list[int], **kwargs: Any) -> torch.Tensor:
    """Zeros as derivatives in forward mode have them: without memory in eager mode, and on no device when traced."""
    return torch.zeros(size, **kwargs)


# Bags of embeddings --------------------------------------------------------------------------------------------------

# `mode` of nn.EmbeddingBag.
SUM, MEAN, MAX = range(3)


def _bags(indices: torch.Tensor, offsets: torch.Tensor, n_bags: int) -> torch.Tensor:
    """The bag of each index: how many bags start at or before it, less one."""
    n = indices.shape[0]
    starts = offsets[:n_bags]
    marks = torch.zeros(n + 1, dtype=torch.int64, device=indices.device)
    return marks.index_add(0, starts.to(torch.int64), torch.ones_like(starts, dtype=torch.int64)).cumsum(0)[:n] - 1


def _counts(bags: torch.Tensor, kept: torch.Tensor, n_bags: int) -> torch.Tensor:
    """How many indices each bag has, but 1 for an empty bag."""
    return kept.new_zeros(n_bags).index_add(0, bags, kept).clamp_min(1)


def _kept(indices: torch.Tensor, padding_idx: int, like: torch.Tensor) -> torch.Tensor:
    """1 for an index that counts, 0 for padding."""
    return (indices != padding_idx).to(like.dtype)


@_spells(aten._embedding_bag.default)
def _embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    if mode == MAX or scale_grad_by_freq or sparse:
        return NotImplemented
    n_bags = offsets.shape[0] - int(include_last_offset)
    bags, kept = _bags(indices, offsets, n_bags), _kept(indices, padding_idx, weight)
    rows = aten.embedding(weight, indices) * kept[:, None]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    result = weight.new_zeros(n_bags, weight.shape[1]).index_add(0, bags, rows)
    counts = _counts(bags, kept, n_bags)
    if mode == MEAN:
        result = result / counts[:, None]
    return result, bags.to(indices.dtype), counts.to(indices.dtype), offsets.new_zeros(n_bags)


@_spells(aten._embedding_bag_backward.default)
def _embedding_bag_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> Any:
    if mode == MAX or scale_grad_by_freq or sparse:
        return NotImplemented
    bags, kept = _bags(indices, offsets, grad.shape[0]), _kept(indices, padding_idx, grad)
    if mode == MEAN:
        grad = grad / _counts(bags, kept, grad.shape[0])[:, None]
    rows = grad.index_select(0, bags) * kept[:, None]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    return aten.embedding_dense_backward(rows, indices, num_weights, -1, False)


@_spells(aten._embedding_bag_per_sample_weights_backward.default)
def _embedding_bag_per_sample_weights_backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    if mode != SUM:
        return NotImplemented
    rows = grad.index_select(0, _bags(indices, offsets, grad.shape[0]))
    return (rows * aten.embedding(weight, indices)).sum(1) * _kept(indices, padding_idx, grad)


# Weights as a length and a direction ---------------------------------------------------------------------------------


def _others(v: torch.Tensor, dim: int) -> list[int]:
    return [d for d in range(v.dim()) if d != dim % v.dim()]


@_spells(aten._weight_norm_interface.default)
def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> Any:
    if v.dtype != g.dtype:
        return NotImplemented
    norms = (v * v).sum(_others(v, dim), keepdim=True).sqrt()
    return v * (g / norms), norms


@_spells(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(
    grad_w: torch.Tensor, saved_v: torch.Tensor, saved_g: torch.Tensor, saved_norms: torch.Tensor, dim: int
) -> Any:
    if saved_v.dtype != saved_g.dtype:
        return NotImplemented
    along = (grad_w * saved_v).sum(_others(saved_v, dim), keepdim=True)
    grad_v = (grad_w - saved_v * (along / (saved_norms * saved_norms))) * (saved_g / saved_norms)
    return grad_v, along / saved_norms


# Norms of half precision with weights of single precision: autocast casts neither -------------------------------------


@_spells(aten.native_group_norm.default)
def _group_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *rest: Any) -> Any:
    types = {tensor.dtype for tensor in (weight, bias) if tensor is not None}
    if types <= {x.dtype}:
        return NotImplemented
    wide = [None if tensor is None else tensor.float() for tensor in (x, weight, bias)]
    result, mean, rstd = aten.native_group_norm(*wide, *rest)
    return result.to(x.dtype), mean, rstd


@_spells(aten.native_group_norm_backward.default)
def _group_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, *rest: Any
) -> Any:
    if weight is None or weight.dtype == x.dtype:
        return NotImplemented
    wide = (tensor.float() for tensor in (grad, x, mean, rstd, weight))
    dx, dw, db = aten.native_group_norm_backward(*wide, *rest)
    found = ((dx, x.dtype), (dw, weight.dtype), (db, weight.dtype))
    return tuple(None if tensor is None else tensor.to(dtype) for tensor, dtype in found)


# Views by strides ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Block:
    """A view by strides as a block of a row-major tensor in another shape."""

    shape: list[int]  # the other shape
    starts: list[int]
    sizes: list[int]
    order: list[int]  # for each wide dimension of the view, its dimension in `shape`

    @staticmethod
    def of(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> _Block | None:
        """None if `x` is not row-major, or if the view is no block."""
        is_whole = x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()
        wide = [dim for dim, n in enumerate(size) if n > 1]
        if not is_whole or 0 in size or any(stride[dim] == 0 for dim in wide):
            return None
        down = sorted(wide, key=lambda dim: -stride[dim])
        shape, starts, room = [], [], x.numel()
        for step in [*(stride[dim] for dim in down), 1]:
            if room % step:
                return None
            shape.append(room // step)
            starts.append(offset // step)
            offset, room = offset % step, step
        sizes = [*(size[dim] for dim in down), 1]
        if any(start + n > most for start, n, most in zip(starts, sizes, shape, strict=True)):
            return None
        return _Block(shape, starts, sizes, [down.index(dim) for dim in wide])

    def cuts(self) -> list[tuple[int, int, int]]:
        """Dimensions of which the block is a part, with its start and its end."""
        bounds = zip(self.starts, self.sizes, self.shape, strict=True)
        return [(dim, start, start + n) for dim, (start, n, most) in enumerate(bounds) if n < most]


@_spells(aten.as_strided.default)
def _as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    block = _Block.of(x, size, stride, storage_offset or 0)
    if block is None:
        return NotImplemented
    x = x.reshape(block.shape)
    for dim, start, end in block.cuts():
        x = aten.slice.Tensor(x, dim, start, end)
    return x.reshape(block.sizes[:-1]).permute(block.order).reshape(list(size))


@_spells(aten.as_strided_scatter.default)
def _as_strided_scatter(
    x: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    block = _Block.of(x, size, stride, storage_offset or 0)
    if block is None:
        return NotImplemented
    into, back = x.reshape(block.shape), [block.order.index(dim) for dim in range(len(block.order))]
    src = src.reshape([n for n in size if n > 1]).permute(back).reshape(block.sizes)
    return _put(into, src, block.cuts()).reshape(x.shape)


def _put(x: torch.Tensor, src: torch.Tensor, cuts: list[tuple[int, int, int]]) -> torch.Tensor:
    """`x` with `src` in the part that `cuts` say."""
    if not cuts:
        return src
    dim, start, end = cuts[0]
    inner = _put(aten.slice.Tensor(x, dim, start, end), src, cuts[1:])
    return aten.slice_scatter(x, inner, dim, start, end)


# Elements by a mask --------------------------------------------------------------------------------------------------


def _numbers(mask: torch.Tensor) -> torch.Tensor:
    """For each element of a mask, flat, how many elements before it are true."""
    return (mask.reshape(-1).to(torch.int64).cumsum(0) - 1).clamp_min(0)


@_spells(aten.masked_scatter.default)
def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Any:
    if not x.numel() or not source.numel():
        return NotImplemented
    x, mask = torch.broadcast_tensors(x, mask)  # type: ignore[no-untyped-call]
    return torch.where(mask, source.reshape(-1).index_select(0, _numbers(mask)).reshape(x.shape), x)


@_spells(aten.masked_scatter_backward.default)
def _masked_scatter_backward(grad: torch.Tensor, mask: torch.Tensor, sizes: list[int]) -> Any:
    n = math.prod(sizes)
    if not grad.numel() or not n:
        return NotImplemented
    mask = mask.expand_as(grad)
    given = torch.where(mask, grad, 0.0).reshape(-1)
    return grad.new_zeros(n).index_add(0, _numbers(mask), given).reshape(sizes)


@_spells(aten.nan_to_num.default)
def _nan_to_num(
    x: torch.Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Any:
    if not x.is_floating_point():
        return NotImplemented
    limits = torch.finfo(x.dtype)
    x = torch.where(x.isnan(), 0.0 if nan is None else nan, x)
    x = torch.where(x == torch.inf, limits.max if posinf is None else posinf, x)
    return torch.where(x == -torch.inf, limits.min if neginf is None else neginf, x)


# Volumes: sums over the depth of a window of what images give --------------------------------------------------------


def _planes(x: torch.Tensor) -> torch.Tensor:
    """[batch, channels, depth, height, width] as images [batch * depth, channels, height, width]."""
    n, c, depth, height, width = x.shape
    return x.permute(0, 2, 1, 3, 4).reshape(n * depth, c, height, width)


def _volume(x: torch.Tensor, n: int) -> torch.Tensor:
    """Images of `n` volumes as volumes."""
    images, c, height, width = x.shape
    # PyTorch's results are contiguous, and a model may call `view` on them.
    return x.reshape(n, images // n, c, height, width).permute(0, 2, 1, 3, 4).contiguous()


def _is_volume(x: torch.Tensor, transposed: bool) -> bool:
    return x.dim() == 5 and not transposed and x.numel() > 0


def _taps(kernel: int, depth: int, stride: int, dilation: int) -> list[tuple[int, int]]:
    """Start and end, along the padded depth, of what each plane of a window sees."""
    return [(t * dilation, t * dilation + (depth - 1) * stride + 1) for t in range(kernel)]


@_spells(aten.convolution.default)
def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Any:
    if not _is_volume(x, transposed):
        return NotImplemented
    n, kernel = x.shape[0], weight.shape[2]
    padded = aten.constant_pad_nd(x, [0, 0, 0, 0, padding[0], padding[0]])
    depth = (padded.shape[2] - dilation[0] * (kernel - 1) - 1) // stride[0] + 1
    total = None
    for t, (start, end) in enumerate(_taps(kernel, depth, stride[0], dilation[0])):
        planes = _planes(aten.slice.Tensor(padded, 2, start, end, stride[0]))
        part = aten.convolution(
            planes, weight[:, :, t], None, stride[1:], padding[1:], dilation[1:], False, [0, 0], groups
        )
        total = part if total is None else total + part
    assert total is not None, "a window has planes"
    result = _volume(total, n)
    return result if bias is None else result + bias.reshape(-1, 1, 1, 1)


@_spells(aten.convolution_backward.default)
def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> Any:
    if not _is_volume(x, transposed):
        return NotImplemented
    n, kernel, depth = x.shape[0], weight.shape[2], grad.shape[2]
    padded = aten.constant_pad_nd(x, [0, 0, 0, 0, padding[0], padding[0]])
    dy, dx, dws = _planes(grad), None, []
    for t, (start, end) in enumerate(_taps(kernel, depth, stride[0], dilation[0])):
        planes = _planes(aten.slice.Tensor(padded, 2, start, end, stride[0]))
        part, dw, _ = aten.convolution_backward(
            dy,
            planes,
            weight[:, :, t],
            None,
            stride[1:],
            padding[1:],
            dilation[1:],
            False,
            [0, 0],
            groups,
            [output_mask[0], output_mask[1], False],
        )
        dws.append(dw)
        if output_mask[0]:
            part = aten.slice_backward(_volume(part, n), list(padded.shape), 2, start, end, stride[0])
            dx = part if dx is None else dx + part
    if dx is not None:
        dx = aten.slice.Tensor(dx, 2, padding[0], padding[0] + x.shape[2]).contiguous()
    dw = torch.stack(dws, 2) if output_mask[1] else None
    return dx, dw, grad.sum((0, 2, 3, 4)) if output_mask[2] else None


def _triple(values: list[int]) -> list[int]:
    return list(values) * 3 if len(values) == 1 else list(values)


@_spells(aten.max_pool3d_with_indices.default)
def _max_pool3d(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    ceil_mode: bool = False,
) -> Any:
    kernel = _triple(kernel_size)
    strides, pads, steps = _triple(stride or kernel), _triple(padding or [0]), _triple(dilation or [1])
    if x.dim() != 5 or not x.is_floating_point() or ceil_mode or not x.numel():
        return NotImplemented
    n, _, depth, height, width = x.shape
    best, at = aten.max_pool2d_with_indices(_planes(x), kernel[1:], strides[1:], pads[1:], steps[1:])
    planes = torch.arange(depth, device=x.device).reshape(depth, 1, 1) * (height * width)
    best, at = _volume(best, n), _volume(at, n) + planes
    best = aten.constant_pad_nd(best, [0, 0, 0, 0, pads[0], pads[0]], -torch.inf)
    at = aten.constant_pad_nd(at, [0, 0, 0, 0, pads[0], pads[0]], 0)
    depth = (best.shape[2] - steps[0] * (kernel[0] - 1) - 1) // strides[0] + 1
    value = place = None
    for start, end in _taps(kernel[0], depth, strides[0], steps[0]):
        this = aten.slice.Tensor(best, 2, start, end, strides[0])
        here = aten.slice.Tensor(at, 2, start, end, strides[0])
        if value is None or place is None:
            value, place = this, here
        else:
            wins = (this > value) | this.isnan()
            value, place = torch.where(wins, this, value), torch.where(wins, here, place)
    return value, place


@_spells(aten.max_pool3d_with_indices_backward.default)
def _max_pool3d_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    indices: torch.Tensor,
) -> Any:
    if x.dim() != 5 or not x.is_floating_point() or ceil_mode or not x.numel():
        return NotImplemented
    lines = x.shape[0] * x.shape[1]
    into = grad.new_zeros(lines, x[0, 0].numel())
    return into.scatter_add(1, indices.reshape(lines, -1), grad.reshape(lines, -1)).reshape(x.shape)


# Windows of images ---------------------------------------------------------------------------------------------------


def _pair(values: Sequence[int]) -> list[int]:
    return list(values) * 2 if len(values) == 1 else list(values)


@dataclasses.dataclass(frozen=True)
class _Windows:
    """Windows along one dimension of an image."""

    size: int  # of the image
    kernel: int
    stride: int
    padding: int
    count: int

    @staticmethod
    def of(size: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> _Windows:
        count = (size + 2 * padding - kernel + (stride - 1 if ceil_mode else 0)) // stride + 1
        # No window starts behind the image.
        if ceil_mode and (count - 1) * stride >= size + padding:
            count -= 1
        return _Windows(size, kernel, stride, padding, count)

    @property
    def after(self) -> int:
        """Zeros behind the image, such that each window is whole; negative if no window sees the image's end."""
        return (self.count - 1) * self.stride + self.kernel - self.size - self.padding

    def share(self, like: torch.Tensor, include_padding: bool) -> torch.Tensor:
        """For each window, its size over the number of its elements that count."""
        low, high = (-self.padding, self.size + self.padding) if include_padding else (0, self.size)
        start = torch.arange(self.count, device=like.device) * self.stride - self.padding
        n = (start + self.kernel).clamp_max(high) - start.clamp_min(low)
        return self.kernel / n.to(like.dtype)


def _average(
    x: torch.Tensor, kernel_size: list[int], stride: list[int], padding: list[int], ceil_mode: bool
) -> tuple[_Windows, _Windows]:
    kernel = _pair(kernel_size)
    strides, pads = _pair(stride or kernel), _pair(padding or [0])
    down, across = (_Windows.of(x.shape[d - 2], kernel[d], strides[d], pads[d], ceil_mode) for d in range(2))
    return down, across


def _is_average(x: torch.Tensor, padding: list[int], ceil_mode: bool, include: bool, divisor: int | None) -> bool:
    """Whether averages are of windows that have different numbers of elements: the others have an op."""
    is_unequal = ceil_mode or (any(padding or [0]) and not include)
    return x.dim() in (3, 4) and x.numel() > 0 and x.is_floating_point() and is_unequal and divisor is None


def _shares(x: torch.Tensor, down: _Windows, across: _Windows, include: bool) -> torch.Tensor:
    return down.share(x, include)[:, None] * across.share(x, include)


@_spells(aten.avg_pool2d.default)
def _avg_pool2d(
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    if not _is_average(x, padding or [0], ceil_mode, count_include_pad, divisor_override):
        return NotImplemented
    down, across = _average(x, kernel_size, stride or [], padding or [0], ceil_mode)
    whole = aten.constant_pad_nd(x, [across.padding, across.after, down.padding, down.after])
    averages = aten.avg_pool2d(whole, [down.kernel, across.kernel], [down.stride, across.stride])
    return averages * _shares(x, down, across, count_include_pad)


@_spells(aten.avg_pool2d_backward.default)
def _avg_pool2d_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    if not _is_average(x, padding, ceil_mode, count_include_pad, divisor_override):
        return NotImplemented
    down, across = _average(x, kernel_size, stride, padding, ceil_mode)
    pads = [across.padding, across.after, down.padding, down.after]
    whole = aten.constant_pad_nd(x, pads)
    grad = grad * _shares(x, down, across, count_include_pad)
    window = [down.kernel, across.kernel], [down.stride, across.stride], [0, 0], False, True, None
    return aten.constant_pad_nd(aten.avg_pool2d_backward(grad, whole, *window), [-pad for pad in pads])


def _averages(size: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """The matrix [count, size] that averages `count` windows of nearly equal sizes."""
    i, at = torch.arange(count, device=like.device), torch.arange(size, device=like.device)
    start, end = i * size // count, ((i + 1) * size + count - 1) // count
    inside = (at >= start[:, None]) & (at < end[:, None])
    return inside.to(like.dtype) / (end - start).to(like.dtype)[:, None]


def _is_adaptive(x: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Whether windows differ in size: otherwise they have an op."""
    is_equal = all(n and size % n == 0 for n, size in zip(sizes, x.shape[-2:], strict=True))
    return x.dim() in (3, 4) and x.numel() > 0 and 0 not in sizes and not is_equal and x.is_floating_point()


@_spells(aten._adaptive_avg_pool2d.default)
def _adaptive_avg_pool2d(x: torch.Tensor, output_size: Sequence[int]) -> Any:
    if not _is_adaptive(x, output_size):
        return NotImplemented
    down, across = (_averages(size, n, x) for size, n in zip(x.shape[-2:], output_size, strict=True))
    return down @ x @ across.t()


@_spells(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_avg_pool2d_backward(grad: torch.Tensor, x: torch.Tensor) -> Any:
    if not _is_adaptive(x, grad.shape[-2:]):
        return NotImplemented
    down, across = (_averages(size, n, grad) for size, n in zip(x.shape[-2:], grad.shape[-2:], strict=True))
    return down.t() @ grad @ across


# A window with more elements would be too many slices.
MOST_TAPS = 64


def _slices(size: Sequence[int], kernel: list[int], dilation: list[int], padding: list[int], stride: list[int]) -> Any:
    """The start and the end of what each element of a window sees of the padded image, and how often windows fit."""
    counts = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, d, p, s in zip(size, kernel, dilation, padding, stride, strict=True)
    ]
    each = [_taps(k, n, s, d) for k, n, s, d in zip(kernel, counts, stride, dilation, strict=True)]
    return [(*rows, *columns) for rows in each[0] for columns in each[1]], counts


@_spells(aten.im2col.default)
def _im2col(x: torch.Tensor, kernel_size: list[int], dilation: list[int], padding: list[int], stride: list[int]) -> Any:
    kernel, dilation, padding, stride = map(_pair, (kernel_size, dilation, padding, stride))
    if x.dim() != 4 or kernel[0] * kernel[1] > MOST_TAPS or not x.numel():
        return NotImplemented
    whole = aten.constant_pad_nd(x, [padding[1], padding[1], padding[0], padding[0]])
    found = []
    slices, counts = _slices(x.shape[2:], kernel, dilation, padding, stride)
    for top, bottom, left, right in slices:
        rows = aten.slice.Tensor(whole, 2, top, bottom, stride[0])
        found.append(aten.slice.Tensor(rows, 3, left, right, stride[1]))
    n, c = x.shape[:2]
    return torch.stack(found, 2).reshape(n, c * len(slices), counts[0] * counts[1])


@_spells(aten.col2im.default)
def _col2im(
    x: torch.Tensor,
    output_size: list[int],
    kernel_size: list[int],
    dilation: list[int],
    padding: list[int],
    stride: list[int],
) -> Any:
    kernel, dilation, padding, stride = map(_pair, (kernel_size, dilation, padding, stride))
    if x.dim() != 3 or kernel[0] * kernel[1] > MOST_TAPS or not x.numel():
        return NotImplemented
    slices, counts = _slices(output_size, kernel, dilation, padding, stride)
    n, c = x.shape[0], x.shape[1] // len(slices)
    parts = x.reshape(n, c, len(slices), *counts)
    height, width = (size + 2 * pad for size, pad in zip(output_size, padding, strict=True))
    total = None
    for i, (top, bottom, left, right) in enumerate(slices):
        rows = aten.slice_backward(parts[:, :, i], [n, c, counts[0], width], 3, left, right, stride[1])
        part = aten.slice_backward(rows, [n, c, height, width], 2, top, bottom, stride[0])
        total = part if total is None else total + part
    return aten.constant_pad_nd(total, [-padding[1], -padding[1], -padding[0], -padding[0]])
