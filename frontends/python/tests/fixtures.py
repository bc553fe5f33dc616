"""Write the fixture tests/data/models/dropout-tiny: a GPT-2 of two layers with dropout, at both levels.

usage: fixtures.py [--out tests/data/models]

The fixture has no reference losses: another generator draws other masks. What is checked, before a file is written, is
that with the masks of torch's generator it has the loss and the gradients of eager PyTorch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lighterage.export import Attention, Level, Step, export_joint, run, save
from model import Config, Gpt2
from safetensors.torch import save_file
from torch import nn

ROOT = Path(__file__).parents[3]
CONFIG = Config(vocabulary=61, layers=2, width=32, heads=2, sequence=16, batch=2, dropout=0.1)
FILES: dict[str, tuple[Level, Attention]] = {
    "joint_core.pt2": ("core", "math"),
    "joint_coarse.pt2": ("coarse", "fused"),
}
N_BATCHES = 4
MAX_ERROR = 2e-6


def model(config: Config = CONFIG) -> Gpt2:
    """The model without parameters at special values, such as 0 or 1."""
    torch.manual_seed(0)
    made = Gpt2(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made


def batches(config: Config = CONFIG, count: int = N_BATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random symbols; a label is the symbol after its input."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(config.vocabulary, (count, config.batch, config.sequence + 1), generator=generator)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def drawn_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout as in a core graph: the same masks for the same seed."""
    return x * (torch.rand_like(x) > p) * (1 / (1 - p)) if training else x


def eager(loss_of: nn.Module, args: tuple[Any, ...], seed: int, level: Level) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by PyTorch, with the masks that a graph of `level` draws for the same seed."""
    loss_of.zero_grad()
    torch.manual_seed(seed)
    if level == "core":
        with mock.patch("torch.nn.functional.dropout", drawn_dropout):
            loss = loss_of(*args)
    else:
        loss = loss_of(*args)
    loss.backward()
    gradients = {name: p.grad for name, p in loss_of.named_parameters(remove_duplicate=False) if p.grad is not None}
    return loss.item(), gradients


def error(step: Step, loss_of: nn.Module, args: tuple[Any, ...], seed: int = 0) -> float:
    """The largest difference between graph and eager, relative to the largest entry of the tensor that differs.

    Tensors of rounding noise alone (key biases: softmax ignores a shift) are measured against the largest gradient.
    """
    parameters = dict(loss_of.named_parameters(remove_duplicate=False))
    loss, gradients = eager(loss_of, args, seed, step.info["level"])
    torch.manual_seed(seed)
    buffers = {name: buffer.clone() for name, buffer in loss_of.named_buffers()}
    result = run(step, parameters, buffers, args)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    differences = [abs(result.loss.item() - loss) / max(abs(loss), 1.0)]
    for name, gradient in result.gradients.items():
        scale = max(gradients[name].abs().max().item(), 1e-3 * largest)
        differences.append((gradient - gradients[name]).abs().max().item() / scale)
    return max(differences)


def write_dropout(out: Path) -> None:
    """Export, check and write the fixture."""
    loss_of, data = model(), batches()
    out.mkdir(parents=True, exist_ok=True)
    nodes, errors, info = {}, {}, {}
    for file, (level, attention) in FILES.items():
        step = export_joint(loss_of, data[0], level=level, attention=attention)
        errors[level] = max(error(step, loss_of, batch, seed) for seed, batch in enumerate(data))
        if MAX_ERROR < errors[level]:
            raise RuntimeError(f"{file}: gradients differ from eager by {errors[level]:.1e}")
        save(step, out / file, weights=level == "core", name=out.name)
        nodes[level], info = step.info["nodes"], step.info
    names = ("input_ids", "labels")
    tensors = {f"batch.{k}.{name}": t for k, batch in enumerate(data) for name, t in zip(names, batch, strict=True)}
    save_file(tensors, out / "batches.safetensors")
    (out / "batches.safetensors").chmod(0o644)
    meta = {
        "name": out.name,
        "description": "GPT-2 with dropout behind the embedding, the attention and the MLP; tied head",
        "torch": torch.__version__,
        "inputs": {n: {"shape": list(t.shape), "dtype": str(t.dtype)} for n, t in zip(names, data[0], strict=True)},
        "batches": N_BATCHES,
        "dropout": CONFIG.dropout,
        "parameters": info["parameters_with_gradient"],
        "parameter_count": sum(p.numel() for p in loss_of.parameters()),
        "tied": info["tied"],
        "nodes": nodes,
        "error_graph_vs_eager_same_masks": {level: float(f"{value:.1e}") for level, value in errors.items()},
    }
    (out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def main() -> None:
    """Read the arguments and write the fixture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/data/models")
    args = parser.parse_args()
    torch.set_num_threads(1)
    write_dropout(args.out / "dropout-tiny")


if __name__ == "__main__":
    main()
