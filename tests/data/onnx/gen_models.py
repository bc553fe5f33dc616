"""Exports four tiny models by torch.onnx for tests/tests/onnx_models.rs.

    python tests/data/onnx/gen_models.py      # needs torch, transformers, onnx and onnxscript

For each model it writes NAME.onnx, exported for training (`model.train()`, `optimize=False`, loss
in the forward, opset 18), and to `models.safetensors` the inputs (`NAME/in/INPUT`) and PyTorch's
loss (`NAME/loss`), and its losses in 20 steps of AdamW on these inputs (`NAME/losses`). The language models are exported twice more: to
opset 24 (`NAME-24.onnx`), and by torch.export (`NAME.pt2`). `resnet` has a symbolic
batch and external data, and two losses: `resnet/loss` in training, and `resnet/frozen` with stored
statistics. `gpt2-inference.onnx` is what the exporter writes by default. Traces of the stack are
removed: they are most of a file.
"""

import json
import logging
import os
import warnings
import zipfile
from pathlib import Path

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import onnx
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
KEPT = ("pkg.torch.onnx.name_scopes", "pkg.torch.export.graph_signature.InputSpec.kind")
torch.set_num_threads(1)


class Loss(nn.Module):
    """A model whose forward gives the loss."""

    def __init__(self, model, **options):
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, ids, labels):
        return self.model(ids, labels=labels, **self.options).loss


class ResNet(nn.Module):
    """Two convolutions with batch normalisation, one beside a shortcut."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x, labels):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(x + self.bn2(self.conv2(x)))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return F.cross_entropy(self.fc(x), labels)


def models():
    sizes = {"vocab_size": 96, "attn_implementation": "sdpa"}
    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    gpt2 = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, **sizes
    )
    llama = LlamaConfig(
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, **width, **sizes
    )
    bert = BertConfig(
        num_attention_heads=2, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **width, **sizes
    )
    ids, labels = torch.randint(0, 96, (2, 16)), torch.randint(0, 96, (2, 16))
    labels[0, :4] = -100
    yield "gpt2", Loss(GPT2LMHeadModel(gpt2), use_cache=False), (ids, labels)
    yield "llama", Loss(LlamaForCausalLM(llama), use_cache=False), (ids, labels)
    yield "bert", Loss(BertForSequenceClassification(bert)), (ids, torch.tensor([0, 1]))
    yield "resnet", ResNet(), (torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,)))


def trained(model, args, steps=20):
    """The losses of steps of AdamW on one batch. The model is left as it was."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model.load_state_dict(before)
    return torch.stack(losses)


def strip(model):
    """Removes what nothing reads."""
    graph = model.graph
    for item in [*graph.node, *graph.input, *graph.output, *graph.value_info, model, graph]:
        kept = [p for p in item.metadata_props if p.key in KEPT]
        del item.metadata_props[:]
        item.metadata_props.extend(kept)
        item.ClearField("doc_string")
    return model


def export(name, model, args, optimize=False, dynamic=None, opset=18):
    program = torch.onnx.export(
        model, args, dynamo=True, optimize=optimize, verbose=False, opset_version=opset,
        input_names=[f"x{i}" if name == "resnet" else n for i, n in enumerate(("ids", "labels"))],
        dynamic_shapes=dynamic,
    )
    path = HERE / f"{name}.onnx"
    program.save(path)
    exported = strip(onnx.load(path))
    outside = {"save_as_external_data": True, "location": "resnet.weights", "size_threshold": 256}
    if name == "resnet":
        (HERE / "resnet.weights").unlink(missing_ok=True)
    onnx.save(exported, path, **(outside if name == "resnet" else {}))


def export_forward(name, model, args):
    path = HERE / f"{name}.pt2"
    torch.export.save(torch.export.export(model, args), path)
    with zipfile.ZipFile(path) as archive:
        parts = {part: archive.read(part) for part in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for part, data in parts.items():
            if part.endswith("/model.json"):
                program = json.loads(data)
                for node in program["graph_module"]["graph"]["nodes"]:
                    metadata = node["metadata"]
                    node["metadata"] = {k: metadata[k] for k in ("nn_module_stack",) if k in metadata}
                data = json.dumps(program, separators=(",", ":"))
            archive.writestr(zipfile.ZipInfo(part), data)


def main():
    tensors = {}
    for seed, (name, model, args) in enumerate(models()):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        model.train()
        names = ("x0", "x1") if name == "resnet" else ("ids", "labels")
        for key, value in zip(names, args):
            tensors[f"{name}/in/{key}"] = value
        dynamic = None
        if name == "resnet":
            batch = torch.export.Dim("batch", min=2)
            dynamic = ({0: batch}, {0: batch})
            model.eval()
            tensors["resnet/frozen"] = model(*args).detach()
            model.train()
        export(name, model, args, dynamic=dynamic)
        if name != "resnet":
            export(f"{name}-24", model, args, opset=24)
            export_forward(name, model, args)
        tensors[f"{name}/losses"] = trained(model, args)
        tensors[f"{name}/loss"] = model(*args).detach()
        if name == "resnet":
            for key, value in model.named_buffers():
                if "running" in key:
                    tensors[f"resnet/after/{key}"] = value.clone()
        if name == "gpt2":
            export("gpt2-inference", model.eval(), args, optimize=True)
    save_file({k: v.clone() for k, v in tensors.items()}, HERE / "models.safetensors")
    for path in sorted(HERE.iterdir()):
        print(path.name, os.path.getsize(path))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
