"""Writes optimizers.safetensors: what PyTorch's optimizers make of parameters in 200 steps.

usage: python gen_optimizers.py    (torch 2.11.0, transformers 5.23.0)

The gradient of a parameter p is p * x, where x is new in each step. Lion is not in PyTorch; its reference is the
algorithm of the paper, in PyTorch's operations. Adafactor of the paper is that of transformers.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.optimization import Adafactor

STEPS = 200
SHAPES = {"a": (6, 10), "b": (9, 4), "c": (7,), "d": (2, 3, 4), "e": (), "f": (2, 2, 3, 2)}


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023, algorithm 2."""

    def __init__(self, parameters, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(parameters, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                first, second = group["betas"]
                update = average.lerp(p.grad, 1 - first).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)


def late(parameters):
    """Adafactor as if it had made 20,000 steps, when steps become smaller; its moments are zeros."""
    optimizer = Adafactor(parameters)
    for p in parameters:
        moments = {"exp_avg_sq": torch.zeros_like(p.data)}
        if p.dim() > 1:
            row, column = p.shape[:-1], p.shape[:-2] + p.shape[-1:]
            moments = {"exp_avg_sq_row": torch.zeros(row), "exp_avg_sq_col": torch.zeros(column)}
        optimizer.state[p] = {"step": 20_000, "RMS": 0, **moments}
    return optimizer


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
    "adafactor-paper": lambda p: Adafactor(p, weight_decay=0.1),
    "adafactor-paper-late": late,
    "adafactor-paper-momentum": lambda p: Adafactor(p, beta1=0.9, weight_decay=0.1),
    "adafactor-paper-warmup": lambda p: Adafactor(p, warmup_init=True),
    "adafactor-paper-fixed": lambda p: Adafactor(
        p, lr=1e-2, relative_step=False, scale_parameter=False, eps=(1e-10, 1e-3), clip_threshold=0.9, decay_rate=-0.7
    ),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-2),
}

torch.manual_seed(0)
start = {name: torch.randn(shape) for name, shape in SHAPES.items()}
inputs = {name: torch.randn(STEPS, *shape) for name, shape in SHAPES.items()}
tensors = {f"start.{name}": value for name, value in start.items()}
tensors |= {f"x.{name}": value for name, value in inputs.items()}
for name, make in OPTIMIZERS.items():
    parameters = {path: torch.nn.Parameter(value.clone()) for path, value in start.items()}
    optimizer = make(list(parameters.values()))
    for step in range(STEPS):
        for path, p in parameters.items():
            p.grad = p.detach() * inputs[path][step]
        optimizer.step()
        if step == 0:
            tensors |= {f"{name}.first.{path}": p.detach().clone() for path, p in parameters.items()}
    tensors |= {f"{name}.{path}": p.detach() for path, p in parameters.items()}
save_file(tensors, Path(__file__).with_name("optimizers.safetensors"))
