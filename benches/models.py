"""The models of benches/step_time.py: their exports without weights, initial parameters, and batches.

usage: models.py --out FOLDER [--models NAME ...]    writes NAME.pt2, NAME.safetensors and NAME-batches.safetensors
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "frontends/python/python"), str(ROOT / "examples/gpt2")]

import encoders  # noqa: E402 (the models are files of the repository, not packages)
import llama  # noqa: E402
import mixture  # noqa: E402
import model as gpt2  # noqa: E402
import vision  # noqa: E402
from lighterage.export import export_joint, save, weightless  # noqa: E402

VOCABULARY, LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = 8192, 12, 384, 6, 256, 8
N_BATCHES = 8
# AdamW divides a gradient by its size. So the noise of one ReLU that is on in one program and off in the other, a
# rounding error away from zero, moves the losses of a ResNet apart: by 0.6 % in 8 steps at 1e-3, by 0.03 % at 1e-4.
LEARNING_RATE = 1e-4

GPT2 = gpt2.Config(VOCABULARY, LAYERS, WIDTH, HEADS, SEQUENCE, BATCH)
LLAMA = llama.Config(VOCABULARY, LAYERS, WIDTH, HEADS, HEADS, 1024, SEQUENCE, BATCH)
BERT = encoders.Config(VOCABULARY, 6, WIDTH, HEADS, SEQUENCE, BATCH)
T5 = encoders.Config(VOCABULARY, 3, WIDTH, HEADS, SEQUENCE, BATCH)
IMAGES = vision.Images()
MIXTURE = mixture.MixtureConfig(VOCABULARY, 6, WIDTH, HEADS, HEADS, 192, SEQUENCE, BATCH, experts=32, chosen=4)
NAMES = ("gpt2", "llama", "bert", "vit", "resnet", "t5", "moe")


def build(name: str) -> nn.Module:
    """Return one of NAMES, with the parameters that its classes make."""
    match name:
        case "gpt2":
            return gpt2.Gpt2(GPT2)
        case "llama":
            return llama.Llama(LLAMA)
        case "bert":
            return encoders.Bert(BERT)
        case "t5":
            return encoders.T5(T5)
        case "moe":
            return mixture.Mixture(MIXTURE)
        case "vit":
            return vision.Vit(IMAGES)
        case "resnet":
            return vision.ResNet(IMAGES)
    raise ValueError(name)


def batches(name: str) -> dict[str, torch.Tensor]:
    """`batch.K.NAME` for each of a model's inputs: random, because only their sizes matter."""
    generator = torch.Generator().manual_seed(0)
    if name in ("vit", "resnet"):
        shape = (IMAGES.batch, 3, IMAGES.size, IMAGES.size)
        pixels = {f"batch.{k}.pixels": torch.randn(shape, generator=generator) for k in range(N_BATCHES)}
        labels = torch.randint(IMAGES.classes, (N_BATCHES, IMAGES.batch), generator=generator)
        return pixels | {f"batch.{k}.labels": row.clone() for k, row in enumerate(labels)}
    symbols = [torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator) for _ in range(N_BATCHES)]
    rows = {f"batch.{k}.input_ids": rows[:, :-1].contiguous() for k, rows in enumerate(symbols)}
    return rows | {f"batch.{k}.labels": rows[:, 1:].contiguous() for k, rows in enumerate(symbols)}


def weights(name: str) -> dict[str, torch.Tensor]:
    """Initial parameters: matrices normal, gains one, biases zero. Buffers stay unchanged."""
    generator = torch.Generator().manual_seed(0)
    model = build(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                nn.init.constant_(parameter, 0.0 if path.endswith("bias") else 1.0)
    return {path: tensor.detach() for path, tensor in model.state_dict().items()}


def export(name: str, out: Path) -> None:
    """Write the model's loss and gradients as `coarse` ops with fused attention, without weights."""
    with weightless() as mode:
        model = build(name)
    with mode:
        inputs = {path.split(".")[2]: tensor for path, tensor in batches(name).items() if path.startswith("batch.0.")}
        examples = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in inputs.values())
    save(export_joint(model, examples, level="coarse", attention="fused"), out, weights=False, name=name)


def prepare(out: Path, names: tuple[str, ...] = NAMES) -> None:
    """Write the missing files of the bench."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (out / f"{name}.pt2").exists():
            export(name, out / f"{name}.pt2")
            save_file(weights(name), out / f"{name}.safetensors")
        save_file(batches(name), out / f"{name}-batches.safetensors")


def main() -> None:
    """Read the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    args = parser.parse_args()
    prepare(args.out, tuple(args.models))


if __name__ == "__main__":
    main()
