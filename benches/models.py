"""The models of benches/step_time.py: a GPT-2 and a LLaMA of a like size, their exports without weights, and batches.

usage: models.py --out FOLDER    writes gpt2.pt2, llama.pt2 and batches.safetensors there
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples/export"), str(ROOT / "examples/gpt2")]

import llama  # noqa: E402 (the models are files of the repository, not packages)
import model as gpt2  # noqa: E402
from joint import export_joint, save, weightless  # noqa: E402

VOCABULARY, LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = 8192, 12, 384, 6, 256, 8
N_BATCHES = 8


class Blocks(Protocol):
    """A model of equal blocks."""

    blocks: nn.ModuleList


GPT2 = gpt2.Config(VOCABULARY, LAYERS, WIDTH, HEADS, SEQUENCE, BATCH)
LLAMA = llama.Config(VOCABULARY, LAYERS, WIDTH, HEADS, HEADS, 1024, SEQUENCE, BATCH)


def build(name: str) -> nn.Module:
    """The model: `gpt2` or `llama`, with parameters as its classes make them."""
    return gpt2.Gpt2(GPT2) if name == "gpt2" else llama.Llama(LLAMA)


def batches() -> dict[str, torch.Tensor]:
    """`batch.K.input_ids` and `batch.K.labels`: random, so that the files are needed for nothing but their sizes."""
    generator = torch.Generator().manual_seed(0)
    symbols = [torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator) for _ in range(N_BATCHES)]
    rows = {f"batch.{k}.input_ids": rows[:, :-1].contiguous() for k, rows in enumerate(symbols)}
    return rows | {f"batch.{k}.labels": rows[:, 1:].contiguous() for k, rows in enumerate(symbols)}


def weights(name: str) -> dict[str, torch.Tensor]:
    """Initial parameters: matrices normal, gains one, biases zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        parameters = dict(build(name).named_parameters())
        for path, parameter in parameters.items():
            if 2 <= parameter.dim():
                nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                nn.init.constant_(parameter, 0.0 if path.endswith("bias") else 1.0)
    return {path: parameter.detach() for path, parameter in parameters.items()}


def export(name: str, out: Path) -> None:
    """Write the model's loss and gradients as `coarse` ops with fused attention, without weights."""
    with weightless() as mode:
        model = build(name)
    with mode:
        ids, labels = (torch.empty(BATCH, SEQUENCE, dtype=torch.long) for _ in range(2))
    save(export_joint(model, (ids, labels), level="coarse", attention="fused"), out, weights=False, name=name)


def prepare(out: Path, names: tuple[str, ...] = ("gpt2", "llama")) -> None:
    """Write the files of the bench that are not there: NAME.pt2, NAME.safetensors (weights), batches.safetensors."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (out / f"{name}.pt2").exists():
            export(name, out / f"{name}.pt2")
            save_file(weights(name), out / f"{name}.safetensors")
    save_file(batches(), out / "batches.safetensors")


def main() -> None:
    """Read the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    prepare(parser.parse_args().out)


if __name__ == "__main__":
    main()
