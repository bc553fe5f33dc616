"""Time convolutions, their gradients, batch norm and pooling, alternately with PyTorch's (oneDNN), in one run.

usage: convolution.py [--threads 2] [--rounds 3] [--repeats 10] [--shapes NAME ...] [--what forward input weight both]
       [--dtype bf16]

A figure is the fastest run, with operands that are in no cache, as in a training step. Prints a table in Markdown:
milliseconds of ours, and in brackets the ratio to PyTorch's of the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from products import DTYPES, EVICTED_BYTES, best
from step_time import machine

ROOT = Path(__file__).parents[1]
# Image; output channels, kernel, stride, padding, dilation, groups.
SHAPES = {
    "resnet stem 7x7/2": "8,3,128,128:64,7,2,3,1,1",
    "resnet 3x3, 64": "8,64,32,32:64,3,1,1,1,1",
    "resnet 3x3/2, 128": "8,64,32,32:128,3,2,1,1,1",
    "resnet 3x3, 128": "8,128,16,16:128,3,1,1,1,1",
    "resnet 1x1/2, 128": "8,64,32,32:128,1,2,0,1,1",
    "resnet 3x3, 256": "8,256,8,8:256,3,1,1,1,1",
    "resnet 3x3, 512": "8,512,4,4:512,3,1,1,1,1",
    "batch 4, 3x3, 512": "4,512,4,4:512,3,1,1,1,1",
    "batch 4, 3x3, 512, 2x2": "4,512,2,2:512,3,1,1,1,1",
    "batch 4, 3x3/2, 512": "4,256,4,4:512,3,2,1,1,1",
    "batch 4, 1x1 up, 4x4": "4,1024,4,4:2048,1,1,0,1,1",
    "batch 4, 1x1/2, 512": "4,1024,4,4:512,1,2,0,1,1",
    "squeeze and excite": "16,1152,1,1:48,1,1,0,1,1",
    "resnet50 1x1 up": "8,64,56,56:256,1,1,0,1,1",
    "resnet50 1x1 down": "8,1024,14,14:256,1,1,0,1,1",
    "odd 3x3": "4,48,37,29:80,3,1,1,1,1",
    "batch 1, 3x3": "1,128,56,56:128,3,1,1,1,1",
    "vit patches": "8,3,128,128:384,16,16,0,1,1",
    "convnext depthwise 7x7": "8,96,32,32:96,7,1,3,1,96",
    "mobilenet depthwise 3x3": "8,144,28,28:144,3,1,1,1,144",
    "mobilenet depthwise 3x3/2": "8,144,28,28:144,3,2,1,1,144",
    "depthwise 3x3, 6x6": "16,256,6,6:256,3,1,1,1,256",
    "depthwise 3x3/2, 48x48": "16,64,48,48:64,3,2,1,1,64",
    "depthwise 3x3, 112x112": "16,32,112,112:32,3,1,1,1,32",
    "depthwise 5x5, 14x14": "16,240,14,14:240,5,1,2,1,240",
    "depthwise 7x7, 12x12": "8,96,12,12:96,7,1,3,1,96",
    "mamba depthwise 4": "8,512,1024:512,4,1,3,1,512",
    "resnext 3x3, 32 groups": "8,128,28,28:128,3,1,1,1,32",
    "deeplab dilated 3x3": "2,256,33,33:256,3,1,12,12,1",
    "whisper stem 1": "4,80,1000:384,3,1,1,1,1",
    "whisper stem 2": "4,384,1000:384,3,2,1,1,1",
    "wav2vec 10/5": "2,1,16000:512,10,5,0,1,1",
    "wav2vec positions": "2,768,200:768,128,1,64,1,16",
    "unet 3x3, 32": "2,32,128,128:32,3,1,1,1,1",
    "densenet 3x3": "16,64,32,32:16,3,1,1,1,1",
    "3x3, 4 groups": "16,64,32,32:64,3,1,1,1,4",
    "mobilenet stem 3x3/2": "16,3,96,96:32,3,2,1,1,1",
    "transposed 4x4/2": "16,3,64,64:32,4,2,1,1,1",
    "vgg stem 3x3": "8,3,64,64:64,3,1,1,1,1",
    "mobilenet 1x1 up": "8,24,56,56:96,1,1,0,1,1",
    "mobilenet 1x1 up, 48x48": "16,16,48,48:64,1,1,0,1,1",
    "mobilenet 1x1 down, 24x24": "16,96,24,24:24,1,1,0,1,1",
    "mobilenet 1x1 up, 6x6": "16,64,6,6:256,1,1,0,1,1",
    "audio 1": "4,64,2048:64,1,1,0,1,1",
    "video 3x3 of a frame": "16,16,32,32:32,3,1,1,1,1",
}
OTHERS = {
    "norm, 64": "norm:8,64,64,64:64,1,1,0,1,1",
    "norm backward, 64": "norm_bwd:8,64,64,64:64,1,1,0,1,1",
    "norm, 64, 48x48": "norm:16,64,48,48:64,1,1,0,1,1",
    "norm backward, 64, 48x48": "norm_bwd:16,64,48,48:64,1,1,0,1,1",
    "norm, 96, 24x24": "norm:16,96,24,24:96,1,1,0,1,1",
    "norm backward, 96, 24x24": "norm_bwd:16,96,24,24:96,1,1,0,1,1",
    "norm of rows": "norm:2048,256:256,1,1,0,1,1",
    "norm of rows backward": "norm_bwd:2048,256:256,1,1,0,1,1",
    "norm, 512": "norm:8,512,4,4:512,1,1,0,1,1",
    "norm backward, 512": "norm_bwd:8,512,4,4:512,1,1,0,1,1",
    "sum of channels, 64": "sum:8,64,64,64:64,1,1,0,1,1",
    "sum of rows' channels": "sum:2048,256:256,1,1,0,1,1",
    "max pool 3x3/2": "pool:8,64,64,64:64,3,2,1,1,1",
    "max pool backward": "pool_bwd:8,64,64,64:64,3,2,1,1,1",
}
WHAT = ["forward", "input", "weight", "both"]


def peer(case: str, dtype: torch.dtype) -> Callable[[], object]:
    """The function that PyTorch runs."""
    what, image, window = case.split(":")
    shape = [int(n) for n in image.split(",")]
    o, k, stride, padding, dilation, groups = (int(n) for n in window.split(","))
    x, n = torch.randn(shape, dtype=dtype), len(shape) - 2
    if what == "norm":
        statistics = [torch.randn(shape[1]) for _ in range(4)]
        weight, bias, mean, variance = statistics
        return lambda: torch.native_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5)
    if what == "norm_bwd":
        w, mean, rstd = (torch.randn(shape[1]) for _ in range(3))
        dy = torch.randn(shape)
        backward = torch.ops.aten.native_batch_norm_backward
        return lambda: backward(dy, x, w, None, None, mean, rstd, True, 1e-5, [True, True, True])
    if what == "sum":
        return lambda: x.sum([d for d in range(len(shape)) if d != 1], keepdim=True)
    if what == "pool":
        return lambda: F.max_pool2d(x, k, stride, padding, dilation, return_indices=True)
    if what == "pool_bwd":
        y, index = F.max_pool2d(x, k, stride, padding, dilation, return_indices=True)
        dy = torch.randn_like(y)
        backward = torch.ops.aten.max_pool2d_with_indices_backward
        pair = [[number] * n for number in (k, stride, padding, dilation)]
        return lambda: backward(dy, x, *pair, False, index)
    w = torch.randn(o, shape[1] // groups, *[k] * n, dtype=dtype)
    options = ([stride] * n, [padding] * n, [dilation] * n, False, [0] * n, groups)
    if what == "forward":
        return lambda: torch.ops.aten.convolution(x, w, None, *options)
    dy = torch.randn_like(torch.ops.aten.convolution(x, w, None, *options))
    mask = [what != "weight", what != "input", False]
    return lambda: torch.ops.aten.convolution_backward(dy, x, w, None, *options, mask)


def ours(case: str, threads: int, repeats: int, dtype: str) -> float:
    """The fastest run of our kernel, ms."""
    bench = ["cargo", "bench", "-q", "-p", "lighterage-runtime", "--bench", "convolution", "--"]
    result = subprocess.run(
        [*bench, str(threads), str(repeats), case, f"--{dtype}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(bench)}\nfailed with {result.returncode}:\n{result.stderr}")
    return float(json.loads(result.stdout)["ms"])


def cell(case: str, args: argparse.Namespace, other: torch.Tensor) -> str:
    """Time ours and PyTorch's, in turns."""
    run, pairs = peer(case, DTYPES[args.dtype]), []
    for _ in range(args.rounds):
        pairs.append((ours(case, args.threads, args.repeats, args.dtype), best(run, args.repeats, other)))
    kernel, torchs = (min(times) for times in zip(*pairs, strict=True))
    return f"{kernel:.2f} ({kernel / torchs:.2f})"


def main() -> None:
    """Read the arguments, measure, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, *OTHERS], choices=[*SHAPES, *OTHERS])
    parser.add_argument("--what", nargs="+", default=WHAT, choices=WHAT)
    parser.add_argument("--dtype", choices=DTYPES, default="f32", help="of convolutions")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    other = torch.zeros(EVICTED_BYTES, dtype=torch.uint8)
    print(f"{machine()}; fastest of {args.rounds} x {args.repeats} runs, {args.threads} threads", end="; ")
    print(f"PyTorch {torch.__version__}\n\n| | {' | '.join(args.what)} |\n|---{'|---' * len(args.what)}|")
    for name in args.shapes:
        if name in SHAPES:
            cells = [cell(f"{what}:{SHAPES[name]}", args, other) for what in args.what]
        else:
            cells = [cell(OTHERS[name], argparse.Namespace(**vars(args) | {"dtype": "f32"}), other)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
