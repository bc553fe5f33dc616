"""A whole training step of a live model, compiled: forward, backward and update in one call.

    step = compile(model, optimizer, example=(ids, labels), budget="60%")
    loss = step(ids, labels)

The step owns one block of memory. The model's parameters and buffers and the optimizer's moments become views of it, so
that `model` and `optimizer` stay what they were to the rest of a program: `state_dict`, `torch.save`, evaluation in
eager mode and `param_groups[0]["lr"]` work on the bytes that the step reads and writes.
"""

from __future__ import annotations

import copy
import ctypes
import io
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils import _pytree as pytree

from . import (
    _base,
    _check,
    _device,
    _foreign,
    _kernels,
    _lighterage,
    _limits,
    _micro,
    _openmp,
    _optimizer,
    _profile,
    _scaler,
)
from ._capture import Loss, call_model
from ._compat import alone
from ._guard import Batch, Guard
from ._lighterage import Machine, Plan
from .errors import Error, ShapeError
from .export import Step as Traced
from .export import export_joint, save

logger = logging.getLogger("lighterage")

Example = torch.Tensor | Sequence[Any] | Mapping[str, Any]
Budget = str | int | float | None
# Tensors for losses that are made at a time.
SPARE_LOSSES = 32


@alone
def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | str = "none",
    loss_fn: Loss | None = None,
    *,
    example: Example,
    budget: Budget = None,
    device: str | None = None,
    host: str | None = None,
    kernels: str = "generated",
    planner: str = "auto",
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    micro_batches: int | str = 1,
    reduction: str = "auto",
    precision: str = "f32",
    master: str = "none",
    rounding: str = "nearest",
    base: str = "whole",
    profile: str | PathLike[str] | None = None,
) -> Plan:
    """Plan a training step for a machine, without running it. A weightless model (`export.weightless`) is enough.

    optimizer: of torch or `lighterage.optim`, or the compiler's name of one: `adamw`, `adamw-8bit`, `lion`, `none`, ..
    device: a name of `lighterage.devices()`, the path of a `.toml` file, or a GPU of this machine, such as `cuda`; by
        default what the model is on.
    kernels: as of `compile`. Planning needs no generator, but `plan.profile` needs one for `generated`.
    precision: as of `compile`; with `tf32`, a GPU may round the factors of f32 products to TF32. With `fp16`, the scale
        of the loss has the defaults of torch's GradScaler.
    The others are those of `compile`. Calls that have no kernel are planned, and listed in `plan.unsupported`.

    Raises CaptureError, Infeasible, Error. Unsupported: there is no memory for a tensor, such as a sparse one.
    """
    _limits.check(budget)
    name = optimizer if isinstance(optimizer, str) else _optimizer.kind_of(optimizer).name
    _check_loss(loss_fn)
    place = _place(model, device)
    planning = _Planning(
        model,
        loss_fn,
        _trained_by(optimizer),
        _arguments(example),
        _batches(accumulate),
        {
            "optimizer": name,
            "device": place.device,
            "kernels": kernels,
            "clip_norm": clip_grad_norm,
            "reduction": reduction,
            "precision": precision,
            "master": master,
            "rounding": rounding,
            "base": base,
            "profile": profile,
            **({} if isinstance(optimizer, str) else _groups(optimizer, model)),
            "command": f"lighterage.plan(..., optimizer={name!r}, budget={budget!r}, device={place.device!r})",
        },
        {"budget": budget, "host": host, "planner": planner},
        place.on,
    )
    planned = planning.plan(planning.number(micro_batches))
    _profile.tell(profile, planned)
    return planned


@alone
def compile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Loss | None = None,
    *,
    example: Example,
    budget: Budget = None,
    device: str | None = None,
    host: str | None = None,
    kernels: str = "auto",
    planner: str = "auto",
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    micro_batches: int | str = 1,
    reduction: str = "auto",
    precision: str = "f32",
    scaler: GradScaler | None = None,
    master: str = "none",
    rounding: str = "nearest",
    base: str = "whole",
    profile: str | PathLike[str] | None = None,
    fallback: str = "torch",
    threads: int | None = None,
    seed: int | None = None,
    check: bool = True,
    max_plans: int = 1,
) -> Step:
    """Compile a whole training step: forward, backward, clipping and update, within a budget of memory.

    model: on the CPU or on a GPU of NVIDIA, in the mode (`train()` or `eval()`) in which it is to be trained.
    optimizer: SGD, Adam, AdamW, Adafactor or Muon of torch, one of `lighterage.optim`, or Adafactor of transformers.
        Its options are read before each step.
    loss_fn: `loss_fn(model, *args, **kwargs)` gives a scalar. By default the model returns it, or a result with `loss`.
    example: a batch: a tensor, a tuple of positional arguments, or a dict of keyword arguments. Its shapes and types
        are those of all batches.
    budget: bytes (`"20GiB"`, `4096`), or a share of what keeping everything needs (`"60%"`, `0.6`); by default the
        device's memory. It covers parameters, moments and activations.
    device: what is planned for: by default what the model is on. A name of `lighterage.devices()` or a `.toml` file
        changes the plan, and not what runs it. `cuda`, or `cuda:1`, is a GPU of this machine, which also runs the step
        of a model on the CPU: so the model need not fit into the GPU's memory. Parameters and moments then move to
        where the plan has them, most to the GPU.
    host: the limit of the memory on the other side of the device's link, such as `"64GiB"`.
    kernels: `generated`, `plain`, or `auto`, which generates them if the kernel generator is installed. A GPU needs
        generated ones.
    planner: `auto`, `keep`, `greedy`, `offload` or `protrain`.
    clip_grad_norm: the largest norm over all gradients, as in `torch.nn.utils.clip_grad_norm_`.
    accumulate: how many batches a step takes, one after the other, in the memory of one. Its gradients and its loss are
        those of one batch with all their samples. With more than 1, a step is called with a list of batches that are
        like the example.
    micro_batches: into how many equal parts a step cuts each batch along its first dimension. The parts run one after
        the other, in the memory of one. `auto` takes the number with the fastest plan for the budget.
    reduction: how losses and gradients of several batches or parts are put together. `auto` reads in the loss whether
        it is a mean, a mean over labels that count, or a sum; `mean` and `sum` take theirs, whatever they are.
    precision: `f32`, or `bf16` or `fp16`, which compute as a model in f32 does under `torch.autocast`: parameters,
        gradients and moments stay in f32. For other types, bring a model in them, or autocast in `loss_fn`.
    scaler: of the loss in `fp16`, by default `GradScaler("cpu")`. The step does what its `scale`, `step` and `update`
        do, on the bytes that `get_scale()` and `state_dict()` read. An update that it leaves out is no step of the
        optimizer. `step.scaler` is the scaler.
    master: of parameters in half precision: `none`; `full`, an f32 that is updated and of which the parameter is the
        rounded value; or `split`, for AdamW and bf16, 16 bits that make an f32 of the parameter. They are in
        `optimizer.state` as `master` and `low`.
    rounding: of new values of bf16 parameters without masters: `nearest`, or `stochastic`, to one of the two
        neighbours at random.
    base: how frozen matrices of products are stored: `whole`, or `nf4`, in 4 bits. With `nf4` the model's
        own matrices, whose paths are in `step.base`, get the numbers that the codes stand for. Steps do not read them.
    profile: the file of a profile, whose measured times decide instead of the device's figures. `plan.profile(FILE)`
        writes one on this machine, for the steps that are like that plan's.
    fallback: what computes an operation without a kernel: `torch`, inside of the plan and after one warning, or
        `error`, which raises Unsupported.
    threads: how many share a kernel, by default all that the process may use.
    seed: of dropout and other random operations, by default drawn from torch's generator.
    check: compare one step with eager PyTorch first. The model and the optimizer are left as they were.
    max_plans: for how many shapes of batches the step may have a plan. The first batch of a new shape is compiled when
        it comes, into the memory of the example's plan: nothing is allocated, and nothing is copied when another plan
        runs. So the example should be the largest batch: a larger one gets memory of its own, and parameters and
        moments are copied when its plan runs. Where there are no more plans, a batch of a new shape is a ShapeError.

    Raises CaptureError: the model cannot be traced. Unsupported: there is no memory for a tensor, such as a sparse
    one; an operation has no kernel, and PyTorch may not or cannot compute it; or the optimizer has no counterpart.
    Infeasible: no plan fits. MismatchError: the check failed. Error: everything else.
    """
    _limits.check(budget, threads)
    kind = _optimizer.kind_of(optimizer)
    if not isinstance(max_plans, int) or max_plans < 1:
        raise Error(f"max_plans={max_plans!r}: it is a number of plans, from 1")
    if base != "whole" and max_plans > 1:
        raise Error(f"max_plans={max_plans}: matrices are encoded for one plan; with base={base!r} there is one")
    place = _place(model, device)
    on_gpu = place.gpu is not None and torch.cuda.is_available()
    scaler = _scaler.scaler_of(precision, scaler, "cuda" if on_gpu else "cpu")
    args, kwargs = _arguments(example)
    _check_loss(loss_fn)
    start = time.perf_counter()
    n_batches, trained = _batches(accumulate), _trained_by(optimizer)
    options: dict[str, Any] = {
        "optimizer": kind.name,
        "device": place.device,
        "gpu": place.gpu,
        "kernels": kernels,
        "clip_norm": clip_grad_norm,
        "reduction": reduction,
        "precision": precision,
        "loss_scale": _scaler.numbers_of(scaler),
        "master": master,
        "rounding": rounding,
        "base": base,
        "profile": profile,
        **_groups(optimizer, model),
        "command": f"lighterage.compile(..., budget={budget!r}, device={place.device!r})",
    }

    def planning_of(batch: _micro.Arguments) -> _Planning:
        limits = {"budget": budget, "host": host, "planner": planner}
        return _Planning(model, loss_fn, trained, batch, n_batches, options, limits, place.on)

    planning = planning_of((args, kwargs))
    parts = planning.number(micro_batches)
    traced = planning.traced(parts)
    calls = _foreign.Calls(traced.program.graph, fallback)
    captured = time.perf_counter()
    plan = planning.plan(parts, calls)
    # `alone` is between this function and its caller.
    calls.warn(plan, stacklevel=4)
    _kernels.tell(kernels, plan)
    _openmp.find()
    _profile.tell(profile, plan)
    planned = time.perf_counter()
    machine = plan.load(threads)
    loaded = time.perf_counter()
    times = (captured - start, planned - captured, loaded - planned)
    logger.info(
        "captured %d operations in %.1f s, planned in %.1f s, loaded in %.1f s; %s kernels",
        traced.info["nodes"],
        *times,
        plan.kernels,
    )
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    batch = Batch(model, loss_fn, args, kwargs)
    step = Step(model, optimizer, loss_fn, plan, machine, batch, kind, accumulate, parts, seed, scaler, place)
    # The model's former memory.
    place.give_back()
    matrices = _base.Base(model, machine, keep=check)
    step.base = matrices.paths
    random = calls.is_random or any(kind == "rng" and path != _optimizer.RNG for path, kind in machine.states)
    # A parameter that is rounded at random does not show its gradient.
    shows_gradients = kind.shows_gradients and (rounding == "nearest" or bool(kind.moments))

    def compared(run: _Run, example: Example, traced: Traced) -> _check.Check | None:
        if check and random:
            logger.info("not compared with eager: the step draws random numbers, and its generator is not torch's")
        elif check and accumulate > 1 and plan.loss_kind == "mixed":
            logger.info("not compared with eager: the loss is a mean and a sum, and the batches are equal")
        elif check and not shows_gradients:
            return _check_of_twin(
                model, optimizer, loss_fn, example, clip_grad_norm, accumulate, parts, reduction, fallback, seed
            )
        elif check:
            types = _check.types_of(traced.program.graph)
            half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
            return step._compared(run, *_arguments(example), clip_grad_norm, types, half)
        return None

    try:
        step.check = compared(step._first, example, traced)
    except Exception:
        matrices.restore()
        raise
    matrices.forget()
    step._adopt()

    @alone
    def beside(example: Example) -> _Run | None:
        """The step for a batch of another shape in the memory of this one; none if it needs more."""
        args, kwargs = _arguments(example)
        planning = planning_of((args, kwargs))
        traced = planning.traced(parts)
        calls = _foreign.Calls(traced.program.graph, fallback)
        try:
            other = planning.plan(parts, calls, plan)
            _profile.tell(profile, other)
            loaded = other.load(threads, machine)
        except Error as error:
            logger.warning(
                "this batch gets memory of its own, with copies of parameters and moments; compile with the largest "
                "batch as the example: %s",
                error,
            )
            return None
        run = _Run(other, loaded, Batch(model, loss_fn, args, kwargs), optimizer, accumulate * parts)
        compared(run, example, traced)
        return run

    def again(example: Example) -> Step:
        return compile(
            model,
            optimizer,
            loss_fn,
            example=example,
            budget=budget,
            device=device,
            host=host,
            kernels=kernels,
            planner=planner,
            clip_grad_norm=clip_grad_norm,
            accumulate=accumulate,
            micro_batches=micro_batches,
            reduction=reduction,
            precision=precision,
            scaler=scaler,
            master=master,
            rounding=rounding,
            base=base,
            profile=profile,
            fallback=fallback,
            threads=threads,
            seed=seed,
            check=check,
        )

    step._others = _Others(beside, again, max_plans - 1)
    return step


class Step:
    """A compiled training step. `step(*batch)` runs it and returns the loss. `compile` makes one."""

    plan: Plan
    """What the step needs and takes."""
    check: _check.Check | None
    """How far the first step was from eager PyTorch; None if it was not compared."""
    scaler: GradScaler | None
    """The scaler of the loss, in fp16."""
    base: list[str]
    """The paths of the matrices that the step stores in NF4."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Loss | None,
        plan: Plan,
        machine: Machine,
        batch: Batch,
        kind: _optimizer.Kind,
        accumulate: int,
        micro_batches: int,
        seed: int,
        scaler: GradScaler | None,
        place: _device.Place,
    ) -> None:
        self._place = place
        self.scaler, self.base = scaler, []
        self.plan, self.check, self._turn = plan, None, threading.Lock()
        self._accumulate, self._parts = accumulate, micro_batches
        self._model, self._loss_fn, self._machine, self._batch = model, loss_fn, machine, batch
        self._first = _Run(plan, machine, batch, optimizer, accumulate * micro_batches)
        self._spare: list[torch.Tensor] = []
        parameters = dict(model.named_parameters(remove_duplicate=False))
        tensors = parameters | dict(model.named_buffers(remove_duplicate=False))
        self._states = dict(machine.states)
        held = {path: tensors[path] for path in self._states if path in tensors}
        views = {path: _optimizer.lent(machine, "state", path, tensor) for path, tensor in held.items()}
        self._guard = Guard(model, views)
        self._bound = self._guard.bound
        for path in views:
            machine.written(path)
        self._changed = [bound.tensor for bound in self._bound]
        named = [path.partition(".") for path, kind in self._states.items() if kind == "moment"]
        # Not the states of the optimizer itself, such as the count of steps.
        moments = {path for of, _, path in named if of != "optimizer"}
        trained = {path: parameters[path] for path in parameters if path in self._states and path in moments}
        if not kind.moments:
            given = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained = {p: parameters[p] for p in parameters if p in self._states and id(parameters[p]) in given}
        self._state = _optimizer.State(optimizer, kind, machine, plan.options, trained)
        self._scaler = None if scaler is None else _scaler.Scaler(scaler, machine)
        self._others = _Others(None, None, 0)
        self.reseed(seed)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one step on a batch: forward, backward and update. Returns the loss, a scalar in memory of its own.

        A step that was compiled with `accumulate` above 1 is called with a list of that many batches, each a tensor, a
        tuple of positional arguments or a dict of named ones. The loss is that of all their samples.

        Raises ShapeError: the batch is not like the example. StaleError: the model or the optimizer is not what was
        compiled. Error: a line of the step failed, for example on an index that is out of range; the step cannot run
        again then, and the model has the parameters that the line left.
        """
        run = self._first
        try:
            batches = self._leaves(run, args, kwargs)
        except ShapeError:
            other = self._of_other_shapes(args, kwargs)
            if other is None:
                raise
            if isinstance(other, Step):
                return self._in_other_memory(other, args, kwargs)
            run, batches = other, self._leaves(other, args, kwargs)
        # Threads take turns, from their inputs to their losses.
        with self._turn:
            self._guard.check()
            self._adopt()
            self._state.write_options(run.hyper)
            self._run(run, batches)
            self._state.stepped()
            return self._loss_of_its_own(run)

    def _adopt(self) -> None:
        """Take what the user's optimizer and scaler have."""
        self._state.adopt()
        if self._scaler is not None:
            self._scaler.adopt()

    def _leaves(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[list[Any]]:
        """The leaves of each batch."""
        if (n := self._accumulate) == 1:
            return [run.batch.leaves(args, kwargs)]
        if kwargs or len(args) != 1 or not isinstance(args[0], list):
            raise ShapeError(f"the step accumulates over {n} batches: call it with a list of {n}")
        if len(args[0]) != n:
            raise ShapeError(f"{len(args[0])} batches, and the step accumulates over {n}")
        return [run.batch.leaves(*_forms(batch)) for batch in args[0]]

    def _of_other_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run | Step | None:
        """The step for these shapes; none if there is no such step, and may not be."""
        batches = [(args, kwargs)]
        if self._accumulate > 1:
            if kwargs or not args or not isinstance(args[0], list):
                return None
            batches = list(map(_forms, args[0]))
        # All batches of a step have one shape.
        shapes = {self._batch.sizes(*batch) for batch in batches}
        sizes = shapes.pop() if len(shapes) == 1 and len(batches) == self._accumulate else None
        if sizes is None:
            return None
        args_of_one, kwargs_of_one = batches[0]
        with self._turn:
            return self._others.of(sizes, kwargs_of_one or args_of_one)

    def _in_other_memory(self, other: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        with self._turn:
            # One sequence of random numbers, whichever plan draws them.
            other.set_rng_state(self.rng_state())
            try:
                return other(*args, **kwargs)
            finally:
                self.set_rng_state(other.rng_state())

    def _run(self, run: _Run, batches: list[list[Any]]) -> None:
        leaves = batches[0]
        if len(batches) > 1 or self._parts > 1:
            leaves = [leaf for batch in batches for part in _micro.cut(batch, self._parts) for leaf in part]
        for i, view in run.inputs:
            _feed(view, leaves[i])
        self._place.settle()
        try:
            run.machine.step()
        except Error as error:
            if run.is_stopped:
                raise Error(
                    f"an earlier batch stopped the step, and it runs no more: compile again ({error})"
                ) from error
            # Not if the step cannot run in this process.
            run.is_stopped = str(error).startswith("line ") or error.__cause__ is not None
            raise
        # What the user computed of the former values cannot be differentiated any more, and autograd says so.
        torch.autograd.graph.increment_version(self._changed)

    def _loss_of_its_own(self, run: _Run) -> torch.Tensor:
        """The loss in memory that no step uses."""
        if run.loss.device.type != "cpu":
            return run.loss.clone()
        if not self._spare:
            # Several at a time: after a step, one call of torch takes as long as ten calls in a row.
            with torch.inference_mode(False):
                self._spare = [torch.empty_like(run.loss) for _ in range(SPARE_LOSSES)]
        loss = self._spare.pop()
        ctypes.memmove(loss.data_ptr(), run.loss.data_ptr(), loss.nbytes)
        return loss

    def explain(self, name: str) -> str:
        """Why a tensor is where it is. name: a module such as `layer.3`, a parameter, or a value of the plan.

        Raises Error: there is no such name.
        """
        return self.plan.explain(name)

    def report(self, path: str | Path) -> None:
        """Write a page for the browser that shows the whole plan: memory over time, decisions, other budgets."""
        Path(path).write_text(self.plan.html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    def __repr__(self) -> str:
        return f"Step of {type(self._model).__name__}: {self.plan!r}"

    def reseed(self, seed: int) -> None:
        """Start the random numbers of dropout and the like anew: equal seeds give equal numbers."""
        self._machine.initialise(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        """The state of the random numbers, by path; with the states of model and optimizer, what a checkpoint needs."""
        return {path: self._view(path).clone() for path, kind in self._states.items() if kind == "rng"}

    def set_rng_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with the random numbers of `rng_state()`.

        Raises KeyError: the step has no such state.
        """
        for path, value in state.items():
            self._view(path).copy_(value)

    def _view(self, path: str) -> torch.Tensor:
        return _optimizer.lent(self._machine, "state", path)

    @property
    def measured_peak(self) -> int:
        """Bytes of the device's pool that steps have touched; equal to `plan.peak` after a step."""
        machines = [self._machine, *(run.machine for run in self._others.runs)]
        return max(machine.measured_peak_bytes for machine in machines)

    @property
    def plans(self) -> list[Plan]:
        """The plans in the step's memory: the example's, and those of batches of other shapes that have come."""
        return [self.plan, *(run.plan for run in self._others.runs)]

    # The comparison with eager ---------------------------------------------------------------------------------------

    def _compared(
        self,
        run: _Run,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        clip_norm: float | None,
        types: set[torch.dtype],
        half: torch.dtype | None,
    ) -> _check.Check | None:
        """Run one step and compare it with eager's. Parameters, buffers and moments are left as they were.

        types: of what was traced. half: the step computes as in autocast to this type, and so does eager mode.

        Raises MismatchError: the step is further from eager than rounding explains.
        """
        devices = {bound.tensor.device for bound in self._bound}
        if len(devices) > 1:
            logger.info("not compared with eager: a part of the model is in the host's memory")
            return None
        on = next(iter(devices), torch.device("cpu"))
        args, kwargs = _device.moved((args, kwargs), on)
        eager = _check.Eager(
            self._model,
            self._loss_fn or call_model,
            args,
            kwargs,
            self._state.paths,
            self._accumulate,
            is_sum=self.plan.loss_kind == "sum",
        )
        try:
            with torch.autocast(on.type, half or torch.bfloat16, enabled=half is not None):
                outcome = eager.run().clipped(clip_norm)
        except torch.OutOfMemoryError:
            logger.warning("not compared with eager: eager mode needs more memory of the GPU than the step leaves")
            return None
        finally:
            self._place.give_back()
        types = types | ({half} if half else set())
        probe = self._probe(run, args, kwargs)
        return _check.check(
            probe,
            outcome,
            lambda: eager.exact().clipped(clip_norm),
            lambda seed: eager.nudged(seed).clipped(clip_norm),
            types,
        )

    def _probe(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _check.Outcome:
        """Loss, gradients and buffers of one step, which leaves no trace."""
        kept = {b.path: b.tensor.detach().clone() for b in self._bound if b.is_buffer or self._state.probe_moves}
        random = self.rng_state()
        # Before the first step, moments are zero.
        moved = {} if run is self._first else {p: self._view(p) for p, kind in self._states.items() if kind == "moment"}
        saved = {path: view.clone() for path, view in moved.items()}
        try:
            self._state.write_options(run.hyper, probe=True)
            if self._scaler is not None:
                # As in eager mode, where the loss is not scaled.
                self._scaler.set(1.0)
            self._run(run, [run.batch.leaves(args, kwargs)] * self._accumulate)
            gradients = self._state.gradients(kept)
            buffers = {b.path: b.tensor.detach().clone() for b in self._bound if b.is_buffer}
        finally:
            with torch.no_grad():
                for bound in self._bound:
                    if bound.path in kept:
                        bound.tensor.copy_(kept[bound.path])
            self._state.reset()
            self.set_rng_state(random)
            for path, view in moved.items():
                view.copy_(saved[path])
        return _check.Outcome(run.loss.clone(), gradients, buffers)


def _feed(view: torch.Tensor, leaf: torch.Tensor) -> None:
    """Copy a tensor of a batch into the memory of a step, which has its type.

    Torch shares a copy of many elements among its threads. They then wait for more work without sleep, and take the
    processor from the step.
    """
    if leaf.is_cpu and view.is_cpu and leaf.is_contiguous() and not leaf.is_neg() and not leaf.is_conj():
        ctypes.memmove(view.data_ptr(), leaf.data_ptr(), view.nbytes)
    else:
        view.copy_(leaf)


class _Run:
    """A step for batches of one shape, in memory."""

    def __init__(
        self, plan: Plan, machine: Machine, batch: Batch, optimizer: torch.optim.Optimizer, several: int
    ) -> None:
        """batch: the structure of its batches. several: how many it takes."""
        self.plan, self.machine, self.batch, self.is_stopped = plan, machine, batch, False
        inputs = set(machine.inputs)
        # Each batch of several has inputs of its own.
        suffixes = [f".{k}" for k in range(several)] if several > 1 else [""]
        names = [name + suffix for suffix in suffixes for name in batch.names]
        likes = batch.likes * len(suffixes)
        given = [(i, name, like) for i, (name, like) in enumerate(zip(names, likes, strict=True)) if name in inputs]
        self.inputs = [(i, _optimizer.lent(machine, "input", name, like)) for i, name, like in given]
        self.loss = _optimizer.lent(machine, "output", machine.loss).reshape(())
        self.hyper = _optimizer.Hyper(optimizer, machine)


def _check_of_twin(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Loss | None,
    example: Example,
    clip_grad_norm: float | None,
    accumulate: int,
    micro_batches: int,
    reduction: str,
    fallback: str,
    seed: int,
) -> _check.Check | None:
    """The comparison of a copy of the model with SGD, for an optimizer of which no state shows a gradient.

    Raises MismatchError.
    """
    given = _optimizer.groups_of(optimizer, model)
    twin = copy.deepcopy(model)
    trained = [p for name, p in twin.named_parameters() if name in given]
    return compile(
        twin,
        torch.optim.SGD(trained, lr=0.0),
        loss_fn,
        example=example,
        kernels="auto" if next(twin.parameters()).is_cuda else "plain",
        planner="keep",
        clip_grad_norm=clip_grad_norm,
        accumulate=accumulate,
        micro_batches=micro_batches,
        reduction=reduction,
        fallback=fallback,
        seed=seed,
    ).check


class _Planning:
    """Plans of a step with several numbers of micro-batches."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss | None,
        trainable: Any,
        batch: _micro.Arguments,
        batches: int,
        options: dict[str, Any],
        limits: dict[str, Any],
        on: torch.device,
    ) -> None:
        """batch: an example. batches: how many a step takes. options, limits: of the native `compile`.

        on: where the model was before it had a step.
        """
        self._on = on
        self._model, self._loss_fn, self._trainable, self._batch = model, loss_fn, trainable, batch
        self._batches, self._options, self._limits = batches, options, limits
        # The last number, and what was traced for it.
        self._last: tuple[int, Traced] | None = None

    def traced(self, n: int) -> Traced:
        """The step on the first of `n` micro-batches.

        Raises CaptureError, Unsupported.
        """
        if self._last is None or self._last[0] != n:
            args, kwargs = _micro.first(self._batch, n)
            loss, trainable, on = self._loss_fn, self._trainable, self._on
            traced = export_joint(self._model, args, kwargs, loss=loss, trainable=trainable, on=on)
            _foreign.check(traced.program.graph)
            self._last = n, traced
        return self._last[1]

    def plan(self, n: int, calls: _foreign.Calls | None = None, beside: Plan | None = None) -> Plan:
        """The plan for `n` micro-batches.

        calls: computes what has no kernel, if the step is to run. beside: the plan in whose memory it runs.

        Raises Infeasible, Error, Unsupported.
        """
        plan = self._planned(n, calls=calls, micro_batches=self._batches * n, beside=beside, **self._limits)
        if calls is not None:
            calls.check(plan)
        return plan

    def number(self, given: int | str) -> int:
        """The number of micro-batches.

        Raises Error: the batch cannot be cut. Infeasible.
        """
        if given == "auto":
            # A share is of what the whole batch needs.
            self._limits["budget"] = self._bytes(self._limits["budget"])
        return _micro.number(given, self._batch, lambda n, kept: self._kept(n) if kept else self.plan(n))

    def _bytes(self, budget: Budget) -> Budget:
        share = budget
        if isinstance(budget, str) and budget.strip().endswith("%"):
            try:
                share = float(budget.strip().removesuffix("%")) / 100
            except ValueError:
                return budget  # the compiler says what is wrong with it
        return int(share * self._kept(1).keep_peak) if isinstance(share, float) else budget

    def _kept(self, n: int) -> Plan:
        """The plan of one micro-batch, with all memory that it needs."""
        return self._planned(n, budget=2**63, planner="keep")

    def _planned(self, n: int, **options: Any) -> Plan:
        file = io.BytesIO()
        save(self.traced(n), file, weights=False)
        return _lighterage.compile(file.getvalue(), **self._options, **options)


class _Others:
    """Steps of the same model for batches of other shapes."""

    def __init__(
        self,
        beside: Callable[[Example], _Run | None] | None,
        again: Callable[[Example], Step] | None,
        most: int,
    ) -> None:
        """Those that come later.

        beside: compiles a step for an example into the memory that is there, or says that it is too small.
        again: compiles one with memory of its own. most: how many there may be.
        """
        self._beside, self._again, self._most = beside, again, most
        self._steps: dict[tuple[torch.Size, ...], _Run | Step] = {}

    def of(self, sizes: tuple[torch.Size, ...], example: Example) -> _Run | Step | None:
        """The step for these shapes, compiled at its first batch; none if there are too many."""
        if sizes not in self._steps:
            if self._beside is None or self._again is None or len(self._steps) >= self._most:
                return None
            logger.info("another plan, for %s", ", ".join(str(list(size)) for size in sizes))
            self._steps[sizes] = self._beside(example) or self._again(example)
        return self._steps[sizes]

    @property
    def runs(self) -> list[_Run]:
        """Those in the memory of the first step."""
        return [step for step in self._steps.values() if isinstance(step, _Run)]


def _forms(batch: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and named arguments."""
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})


def _arguments(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example as positional and named arguments. No tensor appears twice: each is an input of its own."""
    leaves, spec = pytree.tree_flatten(_forms(example))
    seen: set[int] = set()
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[i] = leaf.clone() if id(leaf) in seen else leaf
            seen.add(id(leaf))
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs


def _batches(accumulate: int) -> int:
    """Raises Error: it is no number of batches."""
    if not isinstance(accumulate, int) or accumulate < 1:
        raise Error(f"accumulate={accumulate!r}: it is a number of batches, from 1")
    return accumulate


def _trained_by(optimizer: torch.optim.Optimizer | str) -> Any:
    """Whether a parameter is one of the optimizer's."""
    if isinstance(optimizer, str):
        return None
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return lambda parameter: id(parameter) in given


def _groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """What the native `compile` needs to know of an optimizer's groups."""
    return {"groups": _optimizer.groups_of(optimizer, model), "whole_groups": _optimizer.whole_groups(optimizer)}


def _check_loss(loss_fn: Loss | None) -> None:
    if isinstance(loss_fn, nn.Module):
        name = type(loss_fn).__name__
        raise Error(
            f"loss_fn: it is called with the model, so {name}() becomes lambda model, x, y: {name}()(model(x), y)"
        )


def _place(model: nn.Module, device: str | None) -> _device.Place:
    """Where the step of a model runs. Weightless parameters are nowhere."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return _device.Place.of([(name, tensor) for name, tensor in tensors if not tensor.is_meta], device)
