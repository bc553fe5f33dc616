"""Writes schedules.txt: the rates that PyTorch's schedulers give.

usage: python schedules.py > schedules.txt

Each line: schedule, steps, warm-up, highest rate, least rate, and the rate of each step from 0.
"""

import warnings

import torch
from torch.optim import lr_scheduler as of

warnings.filterwarnings("ignore")
CASES = [
    ("constant", 20, 0, 1e-3, 0.0),
    ("constant", 200, 30, 0.1, 0.0),
    ("linear", 200, 0, 1e-3, 0.0),
    ("linear", 200, 20, 3e-4, 1e-5),
    ("cosine", 200, 0, 1e-3, 0.0),
    ("cosine", 200, 17, 6e-4, 6e-5),
    ("cosine", 3, 2, 1.0, 0.5),
    ("one-cycle", 200, 0, 1e-2, 0.0),
    ("one-cycle", 37, 0, 0.3, 0.0),
]


def scheduler(optimizer, schedule, steps, warmup, lr, least):
    length = steps - warmup
    match schedule:
        case "constant":
            after = of.LambdaLR(optimizer, lambda step: 1.0)
        case "linear":
            after = of.LinearLR(optimizer, 1.0, least / lr, total_iters=length)
        case "cosine":
            after = of.CosineAnnealingLR(optimizer, length, least)
        case _:
            return of.OneCycleLR(optimizer, lr, total_steps=steps, cycle_momentum=False)
    if not warmup:
        return after
    before = of.LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=warmup)
    return of.SequentialLR(optimizer, [before, after], [warmup])


print(f"# torch {torch.__version__}, schedules.py")
for case in CASES:
    schedule, steps, warmup, lr, least = case
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    rates = scheduler(optimizer, *case)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rates.step() if len(seen) < steps else None
    print(*case, *seen)
