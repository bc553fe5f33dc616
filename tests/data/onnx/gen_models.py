"""Exports five tiny models by torch.onnx and torch.export for tests/tests/onnx_models.rs.

    python tests/data/onnx/gen_models.py      # needs torch, transformers, onnx and onnxscript

For each model it writes two files exported for training (`model.train()`, `optimize=False`, loss in the forward):
NAME.onnx in version 18 of the operators and NAME-24.onnx in version 24. The weights of the second are external data
inside the first, so that each lies on disk once. NAME.pt2 is the same model by torch.export, without weights; those of
NAME.onnx have the same names. `models.safetensors`
has the inputs (`NAME/in/INPUT`), PyTorch's loss (`NAME/loss`), and its losses in 20 steps of AdamW on these inputs
(`NAME/losses`). `resnet` has a symbolic batch, weights in `resnet.weights`, and two losses: `resnet/loss` in training, and `resnet/frozen` with
stored statistics. `gpt2-logits.onnx` is `gpt2` without its loss; it has no weights of its own.
`gpt2-inference.onnx` is what the exporter writes by default of a model with PyTorch's initial weights. Traces of the
stack are removed: they are most of a file.
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


class Experts(nn.Module):
    """Each token goes through the two experts that a router chooses, and predicts the next one."""

    def __init__(self, words=64, width=16, experts=4):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 2 * width))
        self.down = nn.Parameter(torch.empty(experts, 2 * width, width))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids, labels):
        x = self.words(ids)
        y = self.norm(x)
        chances = self.router(y).softmax(-1)
        best, chosen = chances.topk(2, dim=-1)
        shares = torch.zeros_like(chances).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        made = torch.einsum("btd,edh->bteh", y, self.up)
        made = torch.einsum("bteh,ehd->bted", F.silu(made), self.down)
        x = x + (made * shares.unsqueeze(-1)).sum(2)
        first = made.gather(2, chosen[..., :1, None].expand(-1, -1, 1, made.shape[-1])).squeeze(2)
        counts = F.one_hot(chosen, chances.shape[-1]).float().mean((0, 1, 2))
        balance = (counts * chances.mean((0, 1))).sum()
        logits = self.head(x + 0.1 * first)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * balance


class Logits(nn.Module):
    """The forward of a language model without its loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


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
    # PyTorch gives the row of token 0, the padding, no gradient, and no ONNX file says so.
    yield "bert", Loss(BertForSequenceClassification(bert)), (ids.clamp(min=1), torch.tensor([0, 1]))
    yield "resnet", ResNet(), (torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,)))
    yield "moe", Experts(), (ids % 64, torch.where(labels < 0, labels, labels % 64))


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
    """The exported model without what nothing reads, and its parameters and buffers by name."""
    names = ("x" if name == "resnet" else "ids", "labels")
    program = torch.onnx.export(
        model, args, dynamo=True, optimize=optimize, verbose=False, opset_version=opset,
        input_names=list(names[: len(args)]), dynamic_shapes=dynamic,
    )
    path = HERE / "exported.onnx"
    program.save(path)
    exported = strip(onnx.load(path))
    path.unlink()
    (HERE / "exported.onnx.data").unlink(missing_ok=True)
    return exported


def save_without_weights(exported, name, holder):
    """Writes a model whose weights are those inside another file."""
    held = (HERE / holder).read_bytes()
    for tensor in exported.graph.initializer:
        start = held.find(tensor.raw_data) if len(tensor.raw_data) >= 64 else -1
        if start >= 0:
            onnx.external_data_helper.set_external_data(tensor, holder, start, len(tensor.raw_data))
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
    (HERE / f"{name}.onnx").write_bytes(exported.SerializeToString())


def export_forward(name, model, args):
    path = HERE / f"{name}.pt2"
    torch.export.save(torch.export.export(model, args), path)
    with zipfile.ZipFile(path) as archive:
        parts = {part: archive.read(part) for part in archive.namelist()}
    groups = {}
    for key, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(key)
    tied = [keys for keys in groups.values() if len(keys) > 1]
    root = next(iter(parts)).split("/")[0]
    parts[f"{root}/extra/joint_step.json"] = json.dumps({"tied": tied})
    # Buffers and constants stay, parameters and sample inputs go.
    config = f"{root}/data/weights/model_weights_config.json"
    weights = json.loads(parts[config])["config"]
    gone = {f"{root}/data/weights/{weight['path_name']}" for weight in weights.values() if weight["is_param"]}
    kept = {key: weight for key, weight in weights.items() if not weight["is_param"]}
    parts[config] = json.dumps({"config": kept})
    with zipfile.ZipFile(path, "w") as archive:
        for part, data in parts.items():
            if part in gone or "/data/sample_inputs/" in part:
                continue
            if part.endswith("/model.json"):
                program = json.loads(data)
                for node in program["graph_module"]["graph"]["nodes"]:
                    metadata = node["metadata"]
                    node["metadata"] = {k: metadata[k] for k in ("nn_module_stack",) if k in metadata}
                data = json.dumps(program, separators=(",", ":"))
            archive.writestr(zipfile.ZipInfo(part), data)


def save(name, model, args, dynamic):
    """Writes all files of a model."""
    exported = export(name, model, args, dynamic=dynamic)
    holder, outside = f"{name}.onnx", {}
    if name == "resnet":
        holder = "resnet.weights"
        outside = {"save_as_external_data": True, "location": holder, "size_threshold": 256}
        (HERE / holder).unlink(missing_ok=True)
    onnx.save(exported, HERE / f"{name}.onnx", **outside)
    save_without_weights(export(name, model, args, dynamic=dynamic, opset=24), f"{name}-24", holder)
    if name == "gpt2":
        logits = Logits(model.model).train()
        save_without_weights(export(name, logits, args[:1]), "gpt2-logits", holder)
    export_forward(name, model, args)


def save_for_inference(config, args):
    """What users get who know no options: biases of zeros are left out, equal weights are merged."""
    torch.manual_seed(0)
    model = Logits(GPT2LMHeadModel(config)).eval()
    exported = export("gpt2", model, args[:1], optimize=True)
    onnx.save(exported, HERE / "gpt2-inference.onnx")


def main():
    tensors = {}
    for seed, (name, model, args) in enumerate(models()):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
        model.train()
        names = ("x" if name == "resnet" else "ids", "labels")
        for key, value in zip(names, args):
            tensors[f"{name}/in/{key}"] = value
        dynamic = None
        if name == "resnet":
            batch = torch.export.Dim("batch", min=2)
            dynamic = ({0: batch}, {0: batch})
            model.eval()
            tensors["resnet/frozen"] = model(*args).detach()
            model.train()
        save(name, model, args, dynamic)
        tensors[f"{name}/losses"] = trained(model, args)
        tensors[f"{name}/loss"] = model(*args).detach()
        if name == "resnet":
            for key, value in model.named_buffers():
                if "running" in key:
                    tensors[f"resnet/after/{key}"] = value.clone()
        if name == "gpt2":
            save_for_inference(model.model.config, args)
    save_file({k: v.clone() for k, v in tensors.items()}, HERE / "models.safetensors")
    for path in sorted(HERE.iterdir()):
        print(path.name, os.path.getsize(path))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
