"""What bitsandbytes computes, for tests of 8-bit AdamW and NF4, and what it stores.

    PYTHONPATH=FOLDER .venv/bin/python tests/data/quantize/gen_quantize.py

FOLDER contains bitsandbytes 0.49.0 (its wheel from PyPI, unpacked; it needs no GPU). From 0.50 on, its code for
processors searches codes in a coarser table, which its code for GPUs does not.
"""

from pathlib import Path

import bitsandbytes as bnb
import bitsandbytes.functional as F
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def maps() -> None:
    """The three maps, as bits."""
    numbers = {
        "dynamic": F.create_dynamic_map(signed=True),
        "unsigned": F.create_dynamic_map(signed=False),
        "nf4": F.get_4bit_type("nf4", device="cpu"),
    }
    lines = ["# Maps of bitsandbytes, as the bits of f32. tests/data/quantize/gen_quantize.py writes this file."]
    for name, map_ in numbers.items():
        lines.append(" ".join([name, *(f"{x & 0xFFFFFFFF:08x}" for x in map_.view(torch.int32).tolist())]))
    (ROOT / "ops/src/maps.txt").write_text("\n".join(lines) + "\n")


def blocks(x: torch.Tensor, signed: bool) -> dict[str, torch.Tensor]:
    """Codes, the largest magnitude of each block, and the numbers again."""
    codes, state = F.quantize_blockwise(x, code=F.create_dynamic_map(signed), blocksize=256)
    state.code = F.create_dynamic_map(signed)
    return {"x": x, "codes": codes, "largest": state.absmax, "again": F.dequantize_blockwise(codes, state)}


def nf4(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The four tensors of a matrix in NF4, and the numbers again."""
    codes, state = F.quantize_4bit(x, blocksize=64, compress_statistics=True, quant_type="nf4")
    # The search of codes writes into its table.
    state.state2.code = F.create_dynamic_map(signed=True)
    return {
        "x": x,
        "codes": codes.reshape(-1),
        "sizes": state.absmax,
        "largest": state.state2.absmax,
        "offset": state.offset,
        "again": F.dequantize_4bit(codes, state),
    }


def stored() -> dict[str, torch.Tensor]:
    """Modules as files have them, and their numbers."""
    tensors = {}
    for name, kind, nested in (("a", "nf4", True), ("b", "nf4", False), ("c", "fp4", True)):
        layer = bnb.nn.Linear4bit(90, 200, bias=False, quant_type=kind, compress_statistics=nested)
        layer.to("cpu")
        state = layer.weight.quant_state
        if nested:
            state.state2.code = F.create_dynamic_map(signed=True)
        tensors |= {f"{name}.{part}": t.clone() for part, t in layer.state_dict().items()}
        tensors[f"{name}.again"] = F.dequantize_4bit(layer.weight.data, state)
    codes, sizes, _ = F.int8_vectorwise_quant(torch.randn(20, 30).half())
    tensors |= {"d.weight": codes, "d.SCB": sizes, "d.again": codes.float() * (sizes[:, None] * 7.874015718698502e-3)}
    return tensors


def main() -> None:
    torch.manual_seed(0)
    maps()
    # Three blocks, the last one partial: numbers of all sizes.
    spread = torch.randn(700) * 10 ** (-6 * torch.rand(700))
    tensors = {
        "signed": blocks(spread, signed=True),
        "unsigned": blocks(spread.abs(), signed=False),
        # 300 blocks of 64, so two sizes of sizes, and a last block of 44 numbers.
        "nf4.f32": nf4(torch.randn(124, 154)),
        "nf4.bf16": nf4(torch.randn(40, 50).bfloat16()),
    }
    flat = {f"{name}.{part}": t.contiguous() for name, parts in tensors.items() for part, t in parts.items()}
    save_file(flat, HERE / "quantize.safetensors")
    save_file(stored(), HERE / "stored.safetensors")


main()
