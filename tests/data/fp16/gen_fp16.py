"""Writes fp16.safetensors: 500 steps of a tiny model in PyTorch, with autocast to float16 and `torch.amp.GradScaler`.

usage: python gen_fp16.py

Each number of a step is a sum of at most two products, so it has one value, whatever the order. The rate is a power of
two. Some batches are large: their gradients are infinite in float16. `step.ir` is the same model.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

STEPS = 500


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.second(torch.relu(self.first(x))).float(), y)


torch.manual_seed(3)
model = Products()
x, y = torch.randn(STEPS, 2, 2), torch.randn(STEPS, 2, 2)
x[[k for k in range(STEPS) if k % 37 == 11 or k % 101 in (60, 61)]] *= 3e4
tensors = {"x": x, "y": y}
tensors |= {f"start.{name}": p.detach().clone() for name, p in model.named_parameters()}
optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-7)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=13)
scales, weights = [], []
for k in range(STEPS):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(x[k], y[k])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
    weights.append(torch.stack([p.detach().clone() for p in model.parameters()]))
tensors |= {"scale": torch.tensor(scales), "weights": torch.stack(weights)}
save_file(tensors, Path(__file__).with_name("fp16.safetensors"))
