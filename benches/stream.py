"""Stream tokens through a training run, and compare the process's memory at its start and its end.

usage: PYTHONPATH=frontends/python/python stream.py [--tokens 50000000] [--batch 32] [--sequence 1024]

The tokens are drawn and shuffled; the model is an embedding, a layer and a head. The resident memory is read from
/proc five times a second. Prints Markdown.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
from lighterage.export import export_joint, save
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
FILES = ROOT / "target/bench"
LIGHTERAGE = ROOT / "target/release/lighterage"
VOCABULARY = 512


class Tiny(nn.Module):
    """The loss of the next token, from the token before alone."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, width), nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss."""
        h = torch.relu(self.layer(self.embed(input_ids)))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def resident(process: subprocess.Popen[bytes]) -> int:
    """Bytes of a process in memory; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def main() -> None:
    """Read the arguments, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 50_000_000, "batch": 32, "sequence": 1024, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()

    FILES.mkdir(parents=True, exist_ok=True)
    model, tokens = FILES / "tiny.pt2", FILES / "drawn.bin"
    ids = torch.zeros(args.batch, args.sequence, dtype=torch.long)
    save(export_joint(Tiny(), (ids, ids.clone()), level="coarse"), model, name="tiny")
    np.random.default_rng(0).integers(VOCABULARY, size=args.tokens, dtype=np.uint16).tofile(tokens)
    steps = (args.tokens - 1) // (args.batch * args.sequence)
    data = ["--tokens", str(tokens), "--token-labels", "next", "--shuffle-data", "--steps", str(steps)]
    options = [*data, "--optimizer", "adamw", "--threads", str(args.threads), "--json"]
    start = time.perf_counter()
    with (FILES / "stream.jsonl").open("wb") as out, (FILES / "stream.log").open("wb") as log:
        process = subprocess.Popen([str(LIGHTERAGE), "train", str(model), *options], stdout=out, stderr=log)
        found = []
        while process.poll() is None:
            found.append(resident(process))
            time.sleep(0.2)
    if process.returncode != 0:
        raise SystemExit((FILES / "stream.log").read_text())
    seconds = time.perf_counter() - start
    # Compiling and the first steps are not counted: memory is touched there for the first time.
    steady = [rss for rss in found if rss][len(found) // 10 :]
    tenth = max(len(steady) // 10, 1)
    first, last = (sum(part) / len(part) / 1e6 for part in (steady[:tenth], steady[-tenth:]))
    print(
        f"{steps} steps of {args.batch} x {args.sequence} tokens in {seconds:.0f} s, {args.tokens * 2 / 1e6:.0f} MB\n"
    )
    print("| resident at the start | at the end | lowest | highest |\n|---|---|---|---|")
    print(f"| {first:.1f} MB | {last:.1f} MB | {min(steady) / 1e6:.1f} MB | {max(steady) / 1e6:.1f} MB |")


if __name__ == "__main__":
    main()
