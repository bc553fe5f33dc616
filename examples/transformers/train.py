"""A GPT-2 of transformers learns a sentence, with half the memory for activations."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

ids = torch.tensor(list(b"To be, or not to be, that is the question. " * 12))[:512].view(4, 128)
config = GPT2Config(vocab_size=128, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
model = GPT2LMHeadModel(config)
model.compile(backend="lighterage", options={"budget": "50%"})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(20):
    optimizer.zero_grad()
    (loss := model(input_ids=ids, labels=ids).loss).backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
