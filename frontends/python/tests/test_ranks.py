"""Models that several processes train: PyTorch divides them, and the backend plans what each process computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lighterage as lt

# What the program of every rank begins with. `losses` trains a model and returns the loss of each step.
COMMON = """
import copy, sys, torch, lighterage
from lighterage.backend import backend
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
)
rank, folder, ranks = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
mesh = init_device_mesh("cpu", (ranks,))

class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))
    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

class Mlp(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size, bias=False)
    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.attention, self.mlp = Attention(size), Mlp(size)
        self.first, self.second = nn.RMSNorm(size), nn.RMSNorm(size)
    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(48, 32), nn.RMSNorm(32), nn.Linear(32, 48, bias=False)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

OPTIONS = {"strict": True, "kernels": "plain"}

def losses(model, seed, steps=4, backwards=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        for i in range(backwards):
            if backwards > 1:
                model.set_requires_gradient_sync(i + 1 == backwards)
            tokens = torch.randint(48, (2, 8), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
            loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found

def equal(found, expected, tolerance=1e-5):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance)
"""


def run(program: str, folder: Path, ranks: int = 2) -> None:
    """Run a program in several processes, each of which reaches its end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(lt.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    text = f'{COMMON}\n{program}\ndistributed.destroy_process_group()\nprint("end")\n'
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", text, str(rank), str(folder), str(ranks)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            said, failed = process.communicate(timeout=300)
            # Gloo of some releases talks.
            assert (process.returncode, said.splitlines()[-1:]) == (0, ["end"]), failed
    finally:
        # The others wait for a rank that failed.
        for process in processes:
            process.kill()


def test_replicas_are_planned_inside_and_outside(tmp_path: Path) -> None:
    """Two processes average their gradients as in eager mode."""
    program = """
parallel = nn.parallel.DistributedDataParallel
found = []
for outside in (None, False, True):
    model = Net()
    if outside is None:
        call = parallel(model)
    elif outside:
        call = parallel(torch.compile(model, backend=backend, options=OPTIONS))
    else:
        call = torch.compile(parallel(model), backend=backend, options=OPTIONS)
    found.append(losses(call, rank))
for ours in found[1:]:
    equal(ours, found[0])
stats = lighterage.stats()
# One plan serves both models.
assert (stats.graphs, stats.eager_graphs, stats.eager_frames, stats.backwards) == (1, 0, 0, 8), stats
"""
    run(program, tmp_path)


SHARDED = """
def sharded(when, options=OPTIONS, **policy):
    model = Net()
    for block in model.blocks:
        if when == "before":
            block.compile(backend=backend, options=options)
        fully_shard(block, mesh=mesh, **policy)
        if when == "after":
            block.compile(backend=backend, options=options)
    return fully_shard(model, mesh=mesh, **policy)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_sharded_blocks_are_planned(when: str, tmp_path: Path) -> None:
    """Parameters are freed after the forward of a block, and gathered again for its backward, at other addresses."""
    program = f"""
for budget in (None, "60%"):
    lighterage.reset()
    torch._dynamo.reset()
    equal(losses(sharded("{when}", {{**OPTIONS, "budget": budget}}), rank), losses(sharded(None), rank))
    stats = lighterage.stats()
    # One plan serves all blocks, and each block has a machine for all steps.
    assert (stats.graphs, stats.eager_graphs, stats.forwards, stats.arenas) == (1, 0, 8, 2), stats
"""
    run(SHARDED + program, tmp_path)


def test_sharded_blocks_may_keep_their_parameters_and_sum_gradients_up(tmp_path: Path) -> None:
    program = """
kept = {"reshard_after_forward": False}
equal(losses(sharded("after", **kept), rank), losses(sharded(None, **kept), rank))
half = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
equal(losses(sharded("after", **half), rank), losses(sharded(None, **half), rank), 3e-2)
equal(losses(sharded("after"), rank, backwards=2), losses(sharded(None), rank, backwards=2))
assert lighterage.stats().eager_graphs == 0
"""
    run(SHARDED + program, tmp_path)


def test_sharded_blocks_of_other_kinds(tmp_path: Path) -> None:
    program = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

def checkpointed(plan):
    model = Net()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
        if plan:
            model.blocks[i].compile(backend=backend, options=OPTIONS)
        fully_shard(model.blocks[i], mesh=mesh)
    return fully_shard(model, mesh=mesh)

def wrapped(plan):
    model = Net()
    for block in model.blocks:
        if plan:
            block.compile(backend=backend, options=OPTIONS)
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True}
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)

for make in (checkpointed, wrapped):
    equal(losses(make(True), rank), losses(make(False), rank))
stats = lighterage.stats()
assert stats.eager_graphs == 0 and stats.backwards == 16, stats
"""
    run(program, tmp_path)


TENSORS = """
def divided(plan, sequence=False, last=None):
    model = Net()
    for block in model.blocks:
        columns, rows = ("attention.q", "attention.k", "attention.v", "mlp.up"), ("attention.o", "mlp.down")
        out = {"output_layouts": Shard(1)} if sequence else {}
        parts = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel(**out) for name in rows}}
        if sequence:
            whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            parts |= {name: PrepareModuleInput(**whole) for name in ("attention", "mlp")}
            parts |= {"first": SequenceParallel(), "second": SequenceParallel()}
        parallelize_module(block, last or mesh, parts)
        if plan == "blocks":
            block.compile(backend=backend, options=OPTIONS)
    if sequence:
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"embed": embed, "norm": SequenceParallel(), "head": head})
    return torch.compile(model, backend=backend, options=OPTIONS) if plan == "model" else model
"""


@pytest.mark.parametrize("plan", ["model", "blocks"])
def test_tensors_that_are_divided_over_ranks(plan: str, tmp_path: Path) -> None:
    """Collectives are calls of the graph. Their results are complete when kernels read them."""
    program = f"""
for sequence in (False, True):
    equal(losses(divided("{plan}", sequence), 0), losses(divided(None, sequence), 0))
stats = lighterage.stats()
assert stats.eager_graphs == stats.eager_frames == 0 and stats.externs > 8, stats
assert all("wait_tensor" not in operator for plan in stats.plans for operator, *_ in plan.externs)
"""
    run(TENSORS + program, tmp_path)


def test_divided_tensors_are_sharded(tmp_path: Path) -> None:
    program = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
def both(plan):
    model = divided(plan, last=mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])
equal(losses(both("blocks"), rank // 2), losses(both(None), rank // 2))
assert lighterage.stats().eager_graphs == 0
"""
    run(TENSORS + program, tmp_path, ranks=4)


def test_losses_gather_what_other_ranks_compute(tmp_path: Path) -> None:
    """As contrastive losses do, with derivatives through the collective or without."""
    program = """
from torch.distributed import _functional_collectives as collectives

class Contrast(nn.Module):
    def __init__(self, derived):
        super().__init__()
        torch.manual_seed(0)
        self.derived, self.layer = derived, nn.Linear(16, 8)
    def forward(self, x):
        y = torch.tanh(self.layer(x))
        if self.derived:
            every = collectives.all_gather_tensor_autograd(y, 0, distributed.group.WORLD)
        else:
            every = y.new_empty(ranks * len(y), 8)
            distributed.all_gather_into_tensor(every, y.detach())
        mean = y.detach().mean(0)
        distributed.all_reduce(mean)
        return (y @ every.t()).logsumexp(1).mean() + ((y - mean) ** 2).mean()

def functional(self, x):
    y = torch.tanh(self.layer(x))
    every = collectives.all_gather_tensor_autograd(y, 0, distributed.group.WORLD)
    mean = collectives.all_reduce(y.detach().mean(0), "avg", distributed.group.WORLD)
    return (y @ every.t()).logsumexp(1).mean() + ((y - mean) ** 2).mean()

x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank))
for derived in (True, False):
    found = []
    for plan in (False, True):
        model = Contrast(derived)
        loss = (torch.compile(model, backend=backend, options=OPTIONS) if plan else model)(x)
        loss.backward()
        found.append([loss.item(), *model.layer.weight.grad.flatten().tolist()])
    equal(found[1], found[0])
assert lighterage.stats().eager_graphs == lighterage.stats().eager_frames == 0

def step():
    model = Contrast(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return lighterage.compile(model, optimizer, lambda model, x: model(x), example=x, kernels="plain")

# Whole steps have functional collectives, which change no operand.
try:
    step()
except lighterage.Unsupported as error:
    assert "c10d.allreduce_" in str(error) and "_functional_collectives" in str(error), error
else:
    raise AssertionError("it should have been refused")
Contrast.forward = functional
equal(step()(x).item(), Contrast(True)(x).item())
"""
    run(program, tmp_path)


def test_stages_of_a_pipeline_are_planned(tmp_path: Path) -> None:
    """Several forwards wait for their backwards."""
    program = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

class Stage(nn.Module):
    def __init__(self, model, rank):
        super().__init__()
        self.block, self.rank = model.blocks[rank], rank
        self.ends = nn.ModuleList([model.embed] if rank == 0 else [model.norm, model.head])
    def forward(self, x):
        if self.rank == 0:
            return self.block(self.ends[0](x))
        return self.ends[1](self.ends[0](self.block(x)))

def trained(plan):
    model = Stage(Net(), rank)
    if plan:
        model.compile(backend=backend, options=OPTIONS)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    of = lambda y, labels: nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten())
    schedule = Schedule1F1B(stage, 4, loss_fn=of)
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Generator().manual_seed(0)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        tokens, each = torch.randint(48, (8, 8), generator=generator), []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens.roll(-1, 1), losses=each)
        found += [loss.item() for loss in each]
        optimizer.step()
    return found

equal(trained(True), trained(False))
stats = lighterage.stats()
# The second stage runs a forward and its backward in turn.
assert (stats.eager_graphs, stats.backwards, stats.waiting) == (0, 12, 0), stats
"""
    run(program, tmp_path)


def test_whole_steps_are_refused_by_name(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = torch.randn(6, 8)
        for wrap, why in (
            (nn.parallel.DistributedDataParallel, "the model: .* as DistributedDataParallel would"),
            (
                lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
                "as FullyShardedDataParallel would",
            ),
            (lambda model: fully_shard(model, mesh=mesh), "the model: .* as FSDPModule would"),
            (
                lambda model: parallelize_module(model, mesh, {"0": ColwiseParallel()}),
                "0.weight: .* as a DTensor would",
            ),
        ):
            model: Any = wrap(nn.Sequential(nn.Linear(8, 4)))
            optimizer = torch.optim.SGD(model.parameters())
            with pytest.raises(lt.CaptureError, match=why):
                lt.compile(model, optimizer, lambda model, x: model(x).square().mean(), example=x)
    finally:
        torch.distributed.destroy_process_group()
