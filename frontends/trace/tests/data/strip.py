"""Removes from a PyTorch memory snapshot what does not concern the allocator: times, and all frames except a forward's,
backward's or optimizer's. Usage: strip.py IN.pickle OUT.pickle. training.pickle is a step of a small GPT, forward and
backward, on Windows with PyTorch 2."""

import pickle
import sys

KINDS = [("torch/optim/", "filename"), ("backward", "name"), ("forward", "name")]
FRAMES = {word: [{"name": word, "filename": "torch/optim/x.py" if "/" in word else "x.py", "line": 1}] for word, _ in KINDS}
NONE: list = []


def frames(entry):
    for word, key in KINDS:
        if any(word in frame[key].replace("\\", "/") for frame in entry["frames"]):
            return FRAMES[word]
    return NONE


with open(sys.argv[1], "rb") as file:
    snapshot = pickle.load(file)
keys = [sys.intern(key) for key in ("action", "addr", "size", "stream")]
traces = [
    [{key: entry[key] for key in keys} | {"frames": frames(entry)} for entry in trace] for trace in snapshot["device_traces"]
]
for segment in snapshot["segments"]:
    segment.pop("frames", None)
    for block in segment["blocks"]:
        block.pop("frames", None)
with open(sys.argv[2], "wb") as file:
    pickle.dump({"segments": snapshot["segments"], "device_traces": traces}, file, protocol=4)
