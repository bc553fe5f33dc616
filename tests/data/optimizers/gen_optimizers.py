"""Writes optimizers.safetensors: what PyTorch's optimizers make of parameters in 200 steps.

usage: python gen_optimizers.py

The gradient of a parameter p is p * x, where x is new in each step. Lion is not in PyTorch; its reference is the
algorithm of the paper, in PyTorch's operations.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

STEPS = 200
SHAPES = {"a": (6, 10), "b": (9, 4), "c": (7,), "d": (2, 3, 4)}


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


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "lion": lambda p: Lion(p, lr=1e-3, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.1),
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
