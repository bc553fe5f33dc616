"""Compares the loss of a file that `lighterage export` wrote in ONNX Runtime with Lighterage's.

    lighterage train OUT.onnx --differentiate --batches B --steps 1 --json > step.json
    python tests/data/onnx/check_out.py OUT.onnx B step.json     # onnxruntime and safetensors

B is the safetensors file of batches. With an optimizer or without one, the loss of the first step
is that of the file's values.
"""

import json
import sys

import onnxruntime
from safetensors.numpy import load_file

model, batches, step = sys.argv[1:]
inputs = {name[8:]: x for name, x in load_file(batches).items() if name.startswith("batch.0.")}
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
(theirs,) = session.run(None, inputs)
with open(step) as lines:
    ours = json.loads(next(lines))["loss"]
print(f"{model}: {ours:.7f}, ONNX Runtime {float(theirs):.7f}: {abs(ours - float(theirs)):.1e}")
assert abs(ours - theirs) <= 1e-5 * abs(theirs)
