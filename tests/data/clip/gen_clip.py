"""Writes clip.safetensors: AdamW with torch.nn.utils.clip_grad_norm_ on a stack of linear layers (made with PyTorch 2.11, CPU).

The batches `batch.K.x`, `batch.K.t`; the parameters before, `start.PATH`, and after, `end.PATH`; each step's `losses` and
`norms` before clipping. Batches grow, so that some norms are below the bound and some above. Run it again after a change:
`python gen_clip.py`.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, WIDTH, BATCH, STEPS, BOUND = 3, 8, 4, 12, 1.0

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
tensors = {f"start.{path}": p.detach().clone() for path, p in model.named_parameters()}
losses, norms = [], []
for step in range(STEPS):
    x, t = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH) * (0.1 + step)
    tensors |= {f"batch.{step}.x": x, f"batch.{step}.t": t}
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), t)
    loss.backward()
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND))
    optimizer.step()
    losses.append(loss.detach())
tensors |= {f"end.{path}": p.detach().clone() for path, p in model.named_parameters()}
tensors |= {"losses": torch.stack(losses), "norms": torch.stack(norms)}
save_file(tensors, Path(__file__).with_name("clip.safetensors"))
print("norms", [round(norm.item(), 3) for norm in norms])
