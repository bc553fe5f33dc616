"""A GPT-2 of transformers learns a sentence. A step is one call, with one budget for all that it keeps."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lighterage

ids = torch.tensor(list(b"To be, or not to be, that is the question. " * 12))[:512].view(4, 128)
config = GPT2Config(vocab_size=128, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
batch = {"input_ids": ids, "labels": ids}
step = lighterage.compile(model, optimizer, example=batch, budget="60%", clip_grad_norm=1.0)
for _ in range(20):
    loss = step(**batch)
    schedule.step()
    print(f"loss {loss.item():.4f}")
print(step)
