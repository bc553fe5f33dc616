"""Tensors whose number of rows depends on data, such as the tokens of an expert, in memory of a fixed size.

`nonzero`, `torch.where(mask)` and `x[mask]` have as many rows as a mask has true elements. A plan is made before there
is a mask. So each such number, a symbol of the trace, gets a bound: what the model states by
`torch._check(rows.size(0) <= N)`, or the number of elements of the mask. Indices are filled up with 0, so the rows
after the last one, the filling, are computed from row 0 like any other. They change no result, because they are zeros
wherever rows are added up: in products over rows, in sums and means, in `index_add`. There they are replaced by zeros,
unless they are known to be zeros. In losses of classes their labels are those that are ignored. Gradients of rows are
zeros in the filling from the start, and what is linear in them stays zero. What divides by the number of rows divides
by a tensor that counts them.

What an operation does with rows is known for those in the tables below. Others are refused.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from .errors import CaptureError

aten = torch.ops.aten

# Each row of the result is made of the same row of the operands, unless `dim` is the one of rows.
ALONG_DIM = {
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten._softmax,
    aten._softmax_backward_data,
    aten.amax,
    aten.amin,
    aten.argmax,
    aten.argmin,
    aten.cat,
    aten.cumsum,
    aten.gather,
    aten.logsumexp,
    aten.max,
    aten.mean,
    aten.min,
    aten.scatter,
    aten.select,
    aten.slice,
    aten.split,
    aten.split_with_sizes,
    aten.squeeze,
    aten.stack,
    aten.sum,
    aten.topk,
    aten.unbind,
    aten.unsqueeze,
}
# The same for every dimension.
EACH_ROW = {
    aten._to_copy,
    aten._unsafe_view,
    aten.alias,
    aten.clone,
    aten.detach,
    aten.empty_like,
    aten.expand,
    aten.full_like,
    aten.lift_fresh_copy,
    aten.masked_fill_,
    aten.native_dropout,
    aten.native_dropout_backward,
    aten.ones_like,
    aten.permute,
    aten.reshape,
    aten.t,
    aten.transpose,
    aten.view,
    aten.zeros_like,
}
# May read a number of rows: as a size, or to count rows.
READS_SIZES = {
    aten._unsafe_view,
    aten.arange,
    aten.empty,
    aten.expand,
    aten.full,
    aten.new_empty,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
    aten.ones,
    aten.reshape,
    aten.view,
    aten.zeros,
}
# Normalisation over last dimensions.
NORMS = {aten.native_layer_norm, aten.native_layer_norm_backward, aten._fused_rms_norm, aten._fused_rms_norm_backward}
DIVISIONS = {aten.div, aten.div_}
# Losses of each element, and their derivatives, with a `reduction`.
LOSSES = {
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
}
NONE, MEAN, SUM = range(3)
# Zero where the first operand is.
KEEPS_ZEROS = {
    aten._softmax_backward_data,
    aten._to_copy,
    aten.alias,
    aten.clone,
    aten.detach,
    aten.div,
    aten.expand,
    aten.gelu,
    aten.native_layer_norm_backward,
    aten._fused_rms_norm_backward,
    aten.neg,
    aten.permute,
    aten.relu,
    aten.reshape,
    aten.select,
    aten.silu,
    aten.slice,
    aten.squeeze,
    aten.sum,
    aten.t,
    aten.tanh,
    aten.transpose,
    aten._unsafe_view,
    aten.unbind,
    aten.unsqueeze,
    aten.view,
}
ZEROS = {aten.new_zeros, aten.zeros, aten.zeros_like}
# Operations on symbols that only state facts.
FACTS = {aten._assert_scalar, aten._assert_tensor_metadata, aten.sym_constrain_range, aten.sym_constrain_range_for_size}


def is_ragged(graph: fx.Graph) -> bool:
    """Whether the size of a tensor depends on data."""
    return any(_symbols(value) for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val")))


def _symbols(value: Any) -> set[Any]:
    """The numbers that depend on data, in the shape of a tensor or in a size."""
    if isinstance(value, torch.Tensor):
        return set().union(*(free_unbacked_symbols(size) for size in value.shape))
    return set(free_unbacked_symbols(value)) if isinstance(value, torch.SymInt) else set()


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A number of rows with its bound. `indices`: for each dimension of the mask, those of its true elements."""

    bound: int
    holds: torch.Tensor  # for each row up to the bound, whether it is one
    indices: tuple[torch.Tensor, ...]


class Filled(fx.Interpreter):
    """Runs a traced step with tensors of fixed sizes in the place of those whose sizes depend on data."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._rows: dict[Any, _Rows] = {}
        self._zeros: set[fx.Node] = set()  # nodes with zeros in the filling
        self._masks: dict[fx.Node, _Rows] = {}

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node.

        Raises CaptureError: the number of rows is more than the size of a tensor here.
        """
        with traceback.set_current_meta(n):
            if n.op != "call_function" or not (_reads_rows(n) or _makes_rows(n)):
                return super().run_node(n)
            value = self._run(n)
            self._check(n, value)
            return value

    def _run(self, n: fx.Node) -> Any:
        target: Any = getattr(n.target, "overloadpacket", n.target)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if target is aten.sym_size:
            (symbol,) = _symbols(n.meta["val"])
            return self._rows[symbol].bound
        if target in FACTS or not any(isinstance(v, torch.Tensor) for v in pytree.tree_leaves(n.meta.get("val"))):
            return self._number(n, target)
        if target is aten.nonzero:
            rows = self._found(n, n.args[0], args[0])
            self._zeros.add(n)
            return torch.stack(rows.indices, 1)
        special = {
            aten.addmm: self._product,
            aten.mm: self._product,
            aten.bmm: self._product,
            aten.index: self._gathered,
            aten.index_select: self._gathered,
            aten.embedding: self._gathered,
            aten.index_add: self._added,
            aten.index_put: self._added,
            aten.embedding_dense_backward: self._added,
            aten.nll_loss_forward: self._labelled,
            aten.nll_loss_backward: self._labelled,
        }.get(target)
        if special is not None:
            return special(n, target, list(args), kwargs)
        if target in LOSSES:
            return self._loss(n, target, list(args), kwargs)
        if target is aten.mean and (mean := self._mean(n, list(args), kwargs)) is not None:
            return mean
        if target in DIVISIONS and (number := _multiple(n.args[1])) is not None:
            self._note(n, n.args[0] in self._zeros)
            return target(args[0], self._counted(*number, args[0].dtype))
        return self._by_row(n, target, list(args), kwargs)

    def _number(self, n: fx.Node, target: Any) -> None:
        """What is computed from numbers of rows, if nothing reads it."""
        if target not in FACTS and not all(_is_fact(user) or _divides(user, n) for user in n.users):
            raise self._refused(n, "their number is computed with")

    # What makes rows --------------------------------------------------------------------------------------------------

    def _found(self, n: fx.Node, mask_of: Any, mask: torch.Tensor) -> _Rows:
        """The true elements of a mask, in their order."""
        if mask_of not in self._masks:
            symbol = self._symbol(n)
            bound, device = int(min(_limit(n, symbol), mask.numel())), mask.device
            true = (mask.reshape(-1) != 0).to(torch.int64)
            after = torch.cumsum(true, 0)
            # True elements go to their places, and all others to a place that is dropped.
            place = torch.where((true != 0) & (after <= bound), after - 1, bound)
            room = torch.zeros(bound + 1, dtype=torch.int64, device=device)
            indices = []
            for dim, size in enumerate(mask.shape):
                shape = [size if d == dim else 1 for d in range(mask.dim())]
                index = torch.arange(size, device=device).reshape(shape).expand(mask.shape).reshape(-1)
                indices.append(room.scatter(0, place, index)[:bound])
            holds = torch.arange(bound, device=device) < after[-1:]
            self._masks[mask_of] = self._rows[symbol] = _Rows(bound, holds, tuple(indices))
        return self._masks[mask_of]

    def _gathered(self, n: fx.Node, target: Any, args: list[Any], kwargs: Any) -> Any:
        """Rows of a tensor by indices. Those of a gradient are zeros in the filling."""
        if _rows_of(n.args[0]):
            raise self._refused(n, "it reads them in another order")
        if target is aten.index:
            args[1] = self._indices(n, args[1])
        value = n.target(*args, **kwargs)  # type: ignore[operator]
        if (n.meta.get("custom") or {}).get("phase") != "bwd":
            return value
        self._zeros.add(n)
        return self._cleared(value, _rows_of(n))

    def _indices(self, n: fx.Node, given: Any) -> list[Any]:
        """Indices of dimensions, with a mask replaced by the places of its true elements."""
        of = n.args[1]
        assert isinstance(of, (list, tuple)), "indices are a list"
        found: list[Any] = []
        for index, node in zip(given, of, strict=True):
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                found.extend(self._found(n, node, index).indices)
            else:
                found.append(index)
        return found

    # What adds rows up ------------------------------------------------------------------------------------------------

    def _added(self, n: fx.Node, target: Any, args: list[Any], kwargs: Any) -> Any:
        """Rows that are added to those of another tensor."""
        if target is aten.index_put:
            args[1] = self._indices(n, args[1])
            if not (len(args) > 3 and args[3]) and not kwargs.get("accumulate"):
                raise self._refused(n, "it replaces rows; index_add and index_put with accumulate=True add to them")
        if _rows_of(n):
            raise self._refused(n, "it reads them in another order")
        at = {aten.index_add: 3, aten.index_put: 2}.get(target, 0)
        if n.args[at] not in self._zeros:
            # A value without rows is one for all of them.
            args[at] = self._cleared(args[at], _rows_of(n.args[at]) or {0: self._symbol(n)})
        return n.target(*args, **kwargs)  # type: ignore[operator]

    def _symbol(self, n: fx.Node) -> Any:
        """The number of rows of a call that has or reads one."""
        values = [n.meta.get("val"), *_values((n.args, n.kwargs))]
        return next(iter(set().union(*(_symbols(leaf) for leaf in pytree.tree_leaves(values)))))

    def _product(self, n: fx.Node, target: Any, args: list[Any], kwargs: Any) -> Any:
        """A product of matrices, over rows or of rows."""
        first = 1 if target is aten.addmm else 0
        left, right = n.args[first : first + 2]
        if over := _rows_of(left).get(_dims(left) - 1):
            # Zeros in one factor are enough.
            if left not in self._zeros and right not in self._zeros:
                args[first] = self._cleared(args[first], {_dims(left) - 1: over})
        elif target is not aten.addmm:
            self._note(n, any(node in self._zeros for node in (left, right)))
        return n.target(*args, **kwargs)  # type: ignore[operator]

    def _mean(self, n: fx.Node, args: list[Any], kwargs: Any) -> Any:
        """A mean over rows: their sum and their number. None if it is not over rows."""
        of, dims = n.args[0], _reduced(n)
        rows = {dim: symbol for dim, symbol in _rows_of(of).items() if dim in dims}
        if not rows:
            return None
        value = args[0] if of in self._zeros else self._cleared(args[0], rows)
        keeps = bool(args[2] if len(args) > 2 else kwargs.get("keepdim"))
        total = value.sum(sorted(dims), keepdim=keeps, dtype=kwargs.get("dtype"))
        for dim in dims:
            total = total / (self._counted(rows[dim], 1, total.dtype) if dim in rows else value.shape[dim])
        return total

    def _loss(self, n: fx.Node, target: Any, args: list[Any], kwargs: Any) -> Any:
        """A loss of each element, which is then reduced without the filling, or its derivative."""
        is_backward = target.__name__.endswith("_backward")
        arguments = n.target._schema.arguments  # type: ignore[union-attr]
        (at,) = (i for i, argument in enumerate(arguments) if argument.name == "reduction")
        args += [kwargs.get(argument.name, argument.default_value) for argument in arguments[len(args) :]]
        reduction, args[at] = args[at], NONE
        of = 1 if is_backward else 0
        rows, shape = _rows_of(n.args[of]), args[of].shape
        if not rows:
            raise self._refused(n, "what it does with each is not known")

        def mean(value: torch.Tensor) -> torch.Tensor:
            for dim, size in enumerate(shape):
                value = value / (self._counted(rows[dim], 1, value.dtype) if dim in rows else size)
            return value

        if is_backward and reduction != NONE:
            args[0] = (mean(args[0]) if reduction == MEAN else args[0]).expand(shape)
        value = self._cleared(n.target(*args), rows)  # type: ignore[operator]
        self._note(n, has_zeros=True)
        if is_backward or reduction == NONE:
            return value
        return mean(value.sum()) if reduction == MEAN else value.sum()

    def _counted(self, symbol: Any, factor: int, dtype: torch.dtype) -> torch.Tensor:
        """A multiple of a number of rows."""
        return self._rows[symbol].holds.sum().to(dtype) * factor

    def _labelled(self, n: fx.Node, target: Any, args: list[Any], kwargs: Any) -> Any:
        """A loss of classes, or its derivative: the labels of the filling are those that are ignored."""
        is_backward = target is aten.nll_loss_backward
        at = 2 if is_backward else 1
        labels = n.args[at]
        holds = self._rows[_rows_of(labels)[0]].holds if 0 in _rows_of(labels) else None
        if holds is None or kwargs:
            raise self._refused(n, "what it does with each is not known")
        args[at] = torch.where(holds, args[at], args[at + 3])
        if is_backward:
            self._zeros.add(n)
        return n.target(*args)  # type: ignore[operator]

    # What keeps rows apart --------------------------------------------------------------------------------------------

    def _by_row(self, n: fx.Node, target: Any, args: list[Any], kwargs: Any) -> Any:
        ragged = [node for node in n.all_input_nodes if _rows_of(node)]
        is_pointwise = torch.Tag.pointwise in getattr(n.target, "tags", ())
        if target not in READS_SIZES and any(
            isinstance(node.meta.get("val"), torch.SymInt) for node in n.all_input_nodes
        ):
            raise self._refused(n, "their number is computed with")
        if target in ALONG_DIM:
            self._along(n, target, args, kwargs, ragged)
        elif target in NORMS:
            self._norm(n, args)
        elif not (is_pointwise or target in EACH_ROW | READS_SIZES or target is operator.getitem):
            raise self._refused(n, "what it does with each is not known")
        self._note(n, self._has_zeros(n, target, ragged))
        if target is aten.masked_fill_:
            # It changes its operand.
            self._zeros.discard(n.args[0])
        return n.target(*args, **kwargs)  # type: ignore[operator]

    def _norm(self, n: fx.Node, args: list[Any]) -> None:
        is_backward = "backward" in str(n.target)
        normal = n.args[2 if is_backward else 1]
        if any(_dims(n.args[0]) - len(normal) <= dim for dim in _rows_of(n.args[0])):  # type: ignore[arg-type]
            raise self._refused(n, "it reads all of them, and would read the filling too")
        # The gradients of its weights are sums over rows.
        if is_backward and n.args[0] not in self._zeros:
            args[0] = self._cleared(args[0], _rows_of(n.args[0]))
            self._zeros.add(n)

    def _along(self, n: fx.Node, target: Any, args: list[Any], kwargs: Any, ragged: list[fx.Node]) -> None:
        """Refuse an operation along rows, except a sum, which gets zeros in the filling."""
        adds = target in (aten.stack, aten.unsqueeze)
        (holder, *_) = ragged
        dims = None
        for at, argument in enumerate(n.target._schema.arguments):  # type: ignore[union-attr]
            if argument.name in ("dim", "dims"):
                dims = args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
        listed = [dims] if isinstance(dims, int) else list(dims or range(_dims(holder)))
        over = set() if adds else {dim % _dims(holder) for dim in listed}
        rows = {dim: symbol for node in ragged for dim, symbol in _rows_of(node).items() if dim in over}
        if rows and target is not aten.sum:
            raise self._refused(n, "it reads all of them, and would read the filling too")
        if rows and holder not in self._zeros:
            args[0] = self._cleared(args[0], rows)

    def _has_zeros(self, n: fx.Node, target: Any, ragged: list[fx.Node]) -> bool:
        """Whether the result is known to be zero in the filling."""
        first = n.args[0] if n.args else None
        if target is operator.getitem or target in KEEPS_ZEROS or str(target).endswith("_backward"):
            return first in self._zeros
        if target is aten.mul:
            return any(node in self._zeros for node in ragged)
        if target in (aten.add, aten.sub):
            return all(node in self._zeros for node in n.args[:2])
        if target is aten.cat:
            return all(node in self._zeros for node in n.all_input_nodes)
        return target in ZEROS

    def _note(self, n: fx.Node, has_zeros: bool) -> None:
        if has_zeros and _rows_of(n):
            self._zeros.add(n)

    def _cleared(self, value: torch.Tensor, rows: dict[int, Any]) -> torch.Tensor:
        """The value with zeros in the filling."""
        for dim, symbol in rows.items():
            shape = [-1 if d == dim else 1 for d in range(value.dim())]
            value = torch.where(self._rows[symbol].holds.reshape(shape), value, torch.zeros_like(value))
        return value

    def _check(self, n: fx.Node, value: Any) -> None:
        """Sizes are those of the trace, with bounds for numbers of rows."""
        traced = pytree.tree_leaves(n.meta.get("val"))
        for now, then in zip(pytree.tree_leaves(value), traced, strict=False):
            if not isinstance(now, torch.Tensor):
                continue
            for size, symbolic in zip(now.shape, then.shape, strict=True):
                symbols = free_unbacked_symbols(symbolic)
                is_plain = not isinstance(symbolic, torch.SymInt) or isinstance(
                    symbolic.node.expr, sympy.Symbol | sympy.Integer
                )
                if not is_plain or size != (self._rows[symbols.pop()].bound if symbols else symbolic):
                    raise self._refused(n, "their number is computed with")

    def _refused(self, n: fx.Node, why: str) -> CaptureError:
        path = (n.meta.get("custom") or {}).get("path", "")
        return CaptureError(
            f"in {path or 'the model'}: {n.target} gets rows whose number depends on the values of tensors (nonzero, "
            f"torch.where, x[mask]), and {why}. A plan has a fixed number of rows. Multiplying by a mask does without "
            f"such rows"
        )


def _values(args: Any) -> list[Any]:
    return [node.meta.get("val") for node in pytree.tree_leaves(args) if isinstance(node, fx.Node)]


def _rows_of(node: Any) -> dict[int, Any]:
    """The dimensions of a node's tensor whose sizes depend on data, with their symbols."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        value = leaves[0] if leaves else None
    if value is None:
        return {}
    return {dim: next(iter(s)) for dim, size in enumerate(value.shape) if (s := free_unbacked_symbols(size))}


def _dims(node: Any) -> int:
    return len(node.meta["val"].shape)


def _reads_rows(n: fx.Node) -> bool:
    return any(_symbols(leaf) for value in _values((n.args, n.kwargs)) for leaf in pytree.tree_leaves(value))


def _makes_rows(n: fx.Node) -> bool:
    return any(_symbols(leaf) for leaf in pytree.tree_leaves(n.meta.get("val")))


def _is_fact(n: fx.Node) -> bool:
    return getattr(n.target, "overloadpacket", n.target) in FACTS


def _reduced(n: fx.Node) -> set[int]:
    """The dimensions over which a mean is taken."""
    dims = n.args[1] if len(n.args) > 1 else n.kwargs.get("dim")
    listed = [dims] if isinstance(dims, int) else list(dims or range(_dims(n.args[0])))  # type: ignore[arg-type]
    return {dim % _dims(n.args[0]) for dim in listed}


def _multiple(number: Any) -> tuple[Any, int] | None:
    """A size as a symbol and a factor; None if it is no multiple of a number of rows."""
    value = number.meta.get("val") if isinstance(number, fx.Node) else None
    if not isinstance(value, torch.SymInt):
        return None
    factor, rest = value.node.expr.as_coeff_Mul()
    return (rest, int(factor)) if rest in _symbols(value) and factor.is_Integer else None


def _divides(user: fx.Node, number: fx.Node) -> bool:
    """Whether a call divides a tensor by a size, and does nothing else with it."""
    target = getattr(user.target, "overloadpacket", user.target)
    if target is operator.mul:
        return all(_is_fact(other) or _divides(other, user) for other in user.users)
    return target in DIVISIONS and user.args[1] is number and _multiple(number) is not None


def _limit(n: fx.Node, symbol: Any) -> float:
    """The largest number of rows that the model states; infinite, if it states none."""
    values = pytree.tree_leaves([n.meta.get("val"), *_values((n.args, n.kwargs))])
    shapes: list[Any] = [leaf.shape for leaf in values if isinstance(leaf, torch.Tensor)]
    environment = next(size.node.shape_env for shape in shapes for size in shape if isinstance(size, torch.SymInt))
    upper = environment.var_to_range[symbol].upper
    return int(upper) if isinstance(upper, sympy.Integer) else math.inf
