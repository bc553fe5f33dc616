"""A GPT-2 of transformers learns a sentence, with half the memory for activations."""

import torch
import transformers

ids = torch.tensor(list(b"To be, or not to be, that is the question. " * 12))[:512].view(4, 128)
config = transformers.GPT2Config(128, 128, 128, 4, 4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
model = transformers.GPT2LMHeadModel(config)
model.compile(backend="lighterage", options={"budget": "50%"})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(20):
    optimizer.zero_grad()
    (loss := model(input_ids=ids, labels=ids).loss).backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
