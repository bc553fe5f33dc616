"""Compares the loss of a file that `lighterage export` wrote in ONNX Runtime with Lighterage's.

    lighterage train OUT.onnx --differentiate --batches B --steps 1 --json > step.json
    python tests/data/onnx/check_out.py OUT.onnx B step.json     # onnxruntime and safetensors

B is the safetensors file of batches. With an optimizer or without one, the loss of the first step
is that of the file's values. If the file gives logits, `--loss cross-entropy` is compared.
"""

import json
import sys

import numpy as np
import onnxruntime
from safetensors.numpy import load_file

model, batches, step = sys.argv[1:]
given = {name[8:]: x for name, x in load_file(batches).items() if name.startswith("batch.0.")}
options = onnxruntime.SessionOptions()
options.log_severity_level = 3  # errors
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
(theirs,) = session.run(None, {x.name: given[x.name] for x in session.get_inputs()})
if theirs.ndim > 0:
    logits, labels = theirs.astype("f8"), given["labels"]
    logits -= logits.max(-1, keepdims=True)
    rows = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]
    theirs = rows.mean()
with open(step) as lines:
    ours = json.loads(next(lines))["loss"]
print(f"{model}: {ours:.7f}, ONNX Runtime {float(theirs):.7f}: {abs(ours - float(theirs)):.1e}")
assert abs(ours - theirs) <= 1e-5 * abs(theirs)
