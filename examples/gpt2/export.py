"""Write gpt2.pt2: the loss and the gradients of the example's model, without weights.

usage: export.py [--out gpt2.pt2] [--level coarse] [--attention fused]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lighterage.export import export_joint, save, weightless
from model import Config, Gpt2

HERE = Path(__file__).parent


def main() -> None:
    """Read the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "gpt2.pt2")
    parser.add_argument("--level", choices=["core", "coarse"], default="coarse")
    parser.add_argument("--attention", choices=["math", "fused"], default="fused")
    args = parser.parse_args()
    config = Config()
    with weightless() as mode:
        model = Gpt2(config)
    with mode:
        ids, labels = (torch.empty(config.batch, config.sequence, dtype=torch.long) for _ in range(2))
    step = export_joint(model, (ids, labels), level=args.level, attention=args.attention)
    save(step, args.out, weights=False, name="gpt2")


if __name__ == "__main__":
    main()
