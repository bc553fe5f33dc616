"""Write the batches that the example trains on: windows of text.txt, byte by byte.

usage: data.py [--out batches.safetensors] [--batches 40] [--seed 0]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from model import Config
from safetensors.numpy import save_file

HERE = Path(__file__).parent


def windows(text: bytes, sequence: int, count: int, seed: int) -> np.ndarray:
    """`count` different windows of `sequence` + 1 bytes in random order: [count, sequence + 1], i64."""
    starts = np.arange(0, len(text) - sequence, sequence)
    if len(starts) < count:
        raise ValueError(f"{len(text)} bytes hold {len(starts)} windows of {sequence}; {count} are wanted")
    chosen = np.random.default_rng(seed).permutation(starts)[:count]
    symbols = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    return np.stack([symbols[start : start + sequence + 1] for start in chosen])


def batches(text: bytes, config: Config, count: int, seed: int) -> dict[str, np.ndarray]:
    """`batch.K.input_ids` and `batch.K.labels`, [batch, sequence], i64; a label is the byte after its input."""
    rows = windows(text, config.sequence, count * config.batch, seed).reshape(count, config.batch, -1)
    return {
        f"batch.{k}.{name}": np.ascontiguousarray(part)
        for k in range(count)
        for name, part in (("input_ids", rows[k, :, :-1]), ("labels", rows[k, :, 1:]))
    }


def main() -> None:
    """Read the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "batches.safetensors")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    save_file(batches((HERE / "text.txt").read_bytes(), Config(), args.batches, args.seed), args.out)


if __name__ == "__main__":
    main()
