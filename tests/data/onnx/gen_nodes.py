"""Packs the node tests of the onnx package for tests/tests/onnx_nodes.rs.

    python tests/data/onnx/gen_nodes.py          # needs onnx 1.23 and ml_dtypes

Writes `nodes.safetensors.gz`. For each case it has the model (`CASE/model`), its inputs
(`CASE/in/NAME`) and the expected outputs (`CASE/out/NAME`); the metadata has the order of the
cases, and the reasons why a case cannot be packed. Inputs that only give shapes, axes or options
become initializers, because the door must know them when it reads the file. Models of older
versions are converted to version 13. Bytes depend on the onnx version alone.
"""

import gzip
import json
import struct
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter
from onnx.backend.test.case.node import collect_testcases

HERE = Path(__file__).parent

NAMES = {
    TensorProto.BOOL: "BOOL",
    TensorProto.UINT8: "U8",
    TensorProto.INT8: "I8",
    TensorProto.INT16: "I16",
    TensorProto.INT32: "I32",
    TensorProto.INT64: "I64",
    TensorProto.FLOAT16: "F16",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT: "F32",
    TensorProto.DOUBLE: "F64",
    TensorProto.FLOAT8E4M3FN: "F8_E4M3",
    TensorProto.FLOAT8E5M2: "F8_E5M2",
}

# Inputs, by position, that must be known when the file is read.
KNOWN = {
    "AffineGrid": [1],
    "BlackmanWindow": [0],
    "CenterCropPad": [1],
    "Col2Im": [1, 2],
    "ConstantOfShape": [0],
    "CumProd": [1],
    "CumSum": [1],
    "DFT": [1, 2],
    "Dropout": [1, 2],
    "Expand": [1],
    "HammingWindow": [0],
    "HannWindow": [0],
    "Loop": [0, 1],
    "MaxUnpool": [2],
    "OneHot": [1],
    "If": [0],
    "Pad": [1, 2, 3],
    "Range": [0, 1, 2],
    "ReduceL1": [1],
    "ReduceL2": [1],
    "ReduceLogSum": [1],
    "ReduceLogSumExp": [1],
    "ReduceMax": [1],
    "ReduceMean": [1],
    "ReduceMin": [1],
    "ReduceProd": [1],
    "ReduceSum": [1],
    "ReduceSumSquare": [1],
    "Reshape": [1],
    "Resize": [1, 2, 3],
    "ReverseSequence": [1],
    "Slice": [1, 2, 3, 4],
    "Split": [1],
    "SplitToSequence": [1],
    "STFT": [1, 3],
    "Squeeze": [1],
    "Tile": [1],
    "TopK": [1],
    "Trilu": [1],
    "Unsqueeze": [1],
    "Upsample": [1],
}


def array(value, name):
    """A value of a data set as a TensorProto."""
    if isinstance(value, TensorProto):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return numpy_helper.from_array(np.asarray(value), name)
    return None


def known(graph):
    """The names of inputs at positions that must be known."""
    names = set()
    for node in graph.node:
        for i in KNOWN.get(node.op_type, []):
            if i < len(node.input):
                names.add(node.input[i])
    return names


def is_random(case):
    """True for random numbers, also dropout in training that keeps less than everything."""
    if any(node.op_type.startswith("Random") for node in case.model.graph.node):
        return True
    nodes = [node for node in case.model.graph.node if node.op_type == "Dropout"]
    if not nodes:
        return False
    given = dict(zip([i.name for i in case.model.graph.input], case.data_sets[0][0]))
    values = [given.get(name) for name in nodes[0].input[1:]]
    values += [None] * (2 - len(values))
    ratio = 0.5 if values[0] is None else float(np.asarray(values[0]).reshape(-1)[0])
    return ratio > 0 and values[1] is not None and bool(np.asarray(values[1]).reshape(-1)[0])


def pack(case, baked, tensors):
    """Adds a case. Returns the reason why it cannot be packed, or None."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for info in list(model.graph.input) + list(model.graph.output):
        if not info.type.HasField("tensor_type"):
            return "a sequence or an optional value"
        if info.type.tensor_type.elem_type not in NAMES:
            name = TensorProto.DataType.Name(info.type.tensor_type.elem_type).lower()
            return f"the element type {name}"
    if is_random(case):
        return "random numbers"
    versions = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if versions and versions[0] < 13:
        if versions[0] < 9 and any(node.op_type == "Scan" for node in model.graph.node):
            return f"opset {versions[0]}, in which Scan has batches; onnx converts it to a wrong one"
        try:
            model = version_converter.convert_version(model, 13)
        except Exception:
            return f"opset {versions[0]}, which onnx cannot convert to 13"
    inputs, outputs = case.data_sets[0]
    inputs = [array(x, i.name) for x, i in zip(inputs, model.graph.input)]
    outputs = [array(x, o.name) for x, o in zip(outputs, model.graph.output)]
    if any(x is None for x in inputs + outputs):
        return "a value that is no tensor"
    if any(x.data_type not in NAMES for x in inputs + outputs):
        return "an element type without a counterpart"

    mine = {}
    fed = []
    for info, value in zip(list(model.graph.input), inputs):
        if info.name in baked:
            constant = model.graph.initializer.add()
            constant.CopyFrom(value)
            constant.name = info.name
            model.graph.input.remove(info)
            continue
        shape = info.type.tensor_type.shape
        del shape.dim[:]
        for size in value.dims:
            shape.dim.add().dim_value = size
        fed.append((info.name, value))
    del model.graph.value_info[:]
    for output, value in zip(model.graph.output, outputs):
        output.type.tensor_type.ClearField("shape")
    for node in model.graph.node:
        node.ClearField("doc_string")
    model.ClearField("producer_name")
    bytes_ = model.SerializeToString(deterministic=True)
    mine["model"] = ("U8", [len(bytes_)], bytes_)
    for kind, pairs in (("in", fed), ("out", zip([o.name for o in model.graph.output], outputs))):
        for name, value in pairs:
            data = np.ascontiguousarray(numpy_helper.to_array(value)).tobytes()
            mine[f"{kind}/{name}"] = (NAMES[value.data_type], list(value.dims), data)
    if sum(len(data) for _, _, data in mine.values()) > 1 << 18:
        return "more than 256 kB of data"
    for key, tensor in mine.items():
        tensors[f"{case.name}/{key}"] = tensor
    return None


def main():
    cases = sorted(collect_testcases(None), key=lambda case: case.name)
    baked = {case.name: known(case.model.graph) for case in cases}
    tensors, reasons = {}, {}
    for case in cases:
        names = set(baked[case.name])
        plain = case.name.split("_expanded")[0]
        if plain in baked and plain != case.name:
            # An expanded case has the inputs of its plain one.
            names |= baked[plain]
        reason = pack(case, names, tensors)
        if reason:
            reasons[case.name] = reason
    header = {
        "__metadata__": {
            "onnx": onnx.__version__,
            "cases": " ".join(case.name for case in cases),
            "reasons": json.dumps(reasons, sort_keys=True),
        }
    }
    start, blob = 0, []
    for name, (dtype, shape, data) in tensors.items():
        end = start + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        blob.append(data)
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = struct.pack("<Q", len(text)) + text + b"".join(blob)
    packed = gzip.compress(whole, 9, mtime=0)
    (HERE / "nodes.safetensors.gz").write_bytes(packed)
    print(f"{len(cases)} cases, {len(reasons)} not packed, {len(whole)} bytes, {len(packed)} packed")


if __name__ == "__main__":
    main()
