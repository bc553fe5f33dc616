"""The exporter: gradients equal eager PyTorch's, and the file says where each operation comes from."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fixtures import CONFIG, MAX_ERROR, batches, error, model
from lighterage.errors import CaptureError
from lighterage.export import Attention, Level, Step, export_joint, run, save, weightless
from model import Config, Gpt2
from torch import nn

FORMS: list[tuple[Level, Attention]] = [
    ("core", "math"),
    ("core", "fused"),
    ("coarse", "math"),
    ("coarse", "fused"),
]
FLASH = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default"
FLASH_BACKWARD = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


class Regression(nn.Module):
    """The mean square of a body's output; the shortest loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


class Attend(nn.Module):
    """Only attention, over [2, 2, 8, 4] made from [2, 8, 8]."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.qkv, self.options = nn.Linear(8, 24), options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def made(body: nn.Module, *shape: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    for parameter in body.parameters():
        nn.init.normal_(parameter, std=0.5)
    return Regression(body), (torch.randn(*shape),)


def ops(step: Step) -> list[str]:
    return [f"torch.ops.{node.target}" for node in step.program.graph.nodes if node.op == "call_function"]


def saved(step: Step, path: Path, **options: Any) -> dict[str, Any]:
    save(step, path, **options)
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read(f"{path.stem}/models/model.json"))


@pytest.mark.parametrize(("level", "attention"), FORMS)
def test_gpt2_equals_eager(level: Level, attention: Attention) -> None:
    config = Config(**{**vars(CONFIG), "dropout": 0.0})
    loss_of, args = model(config), batches(config)[0]
    step = export_joint(loss_of, args, level=level, attention=attention)
    assert set(step.info["parameters_with_gradient"]) == dict(loss_of.named_parameters()).keys()
    assert error(step, loss_of, args) <= MAX_ERROR


@pytest.mark.parametrize(("level", "attention"), FORMS)
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"attn_mask": torch.ones(8, 8).tril() > 0},
        {"attn_mask": torch.linspace(-2, 2, 64).view(8, 8)},
        {"scale": 0.3},
    ],
    ids=["causal", "bool-mask", "added-mask", "scale"],
)
def test_attention_equals_eager(level: Level, attention: Attention, options: dict[str, Any]) -> None:
    loss_of, args = made(Attend(**options), 2, 8, 8)
    step = export_joint(loss_of, args, level=level, attention=attention)
    assert (FLASH in ops(step)) == (FLASH_BACKWARD in ops(step)) == (attention == "fused")
    assert error(step, loss_of, args) <= MAX_ERROR


def test_causal_attention_has_no_mask_operand(tmp_path: Path) -> None:
    loss_of, args = made(Attend(is_causal=True), 2, 8, 8)
    program = saved(export_joint(loss_of, args), tmp_path / "causal.pt2")
    (backward,) = [node for node in program["graph_module"]["graph"]["nodes"] if node["target"] == FLASH_BACKWARD]
    named = {operand["name"]: operand["arg"] for operand in backward["inputs"]}
    assert named["is_causal"] == {"as_bool": True}
    assert "attn_mask" not in named


class Tied(nn.Module):
    """One weight under two names, and parameters that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused, self.frozen = nn.Linear(8, 8), nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(ids) * self.frozen), ids)


@pytest.mark.parametrize("level", ["core", "coarse"])
def test_tied_weight_has_one_gradient_the_sum(level: Level) -> None:
    torch.manual_seed(0)
    loss_of, args = Tied(), (torch.arange(5),)
    step = export_joint(loss_of, args, level=level)
    assert step.info["tied"] == [["embed.weight", "head.weight"]]
    assert step.info["parameters_with_gradient"] == ["embed.weight"]
    assert error(step, loss_of, args) <= MAX_ERROR


def test_unused_parameters_are_named_and_have_no_gradient() -> None:
    step = export_joint(Tied(), (torch.arange(5),))
    assert step.info["dropped_parameters"] == ["unused.weight", "unused.bias"]


def test_weights_of_a_file_are_the_models_and_ties_share_one_payload(tmp_path: Path) -> None:
    loss_of, path = Tied(), tmp_path / "tied.pt2"
    saved(export_joint(loss_of, (torch.arange(5),)), path)
    with zipfile.ZipFile(path) as archive:
        table = json.loads(archive.read("tied/data/weights/model_weights_config.json"))["config"]
        raw = archive.read(f"tied/data/weights/{table['head.weight']['path_name']}")
    assert table["head.weight"]["path_name"] == table["embed.weight"]["path_name"]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32).view(11, 8), loss_of.head.weight.detach())


@pytest.mark.parametrize(("level", "attention"), [("core", "math"), ("coarse", "fused")])
def test_dropout_is_one_mask_in_forward_and_backward(level: Level, attention: Attention) -> None:
    loss_of, args = model(), batches()[0]
    step = export_joint(loss_of, args, level=level, attention=attention)
    draw = {"core": "rand_like", "coarse": "native_dropout"}[level]
    # Embedding, attention twice, MLP twice: each is drawn once, and not again for the backward.
    assert ops(step).count(f"torch.ops.aten.{draw}.default") == 5
    assert max(error(step, loss_of, args, seed) for seed in range(3)) <= MAX_ERROR


def test_dropout_draws_anew_for_another_seed() -> None:
    loss_of, args = model(), batches()[0]
    step, parameters = export_joint(loss_of, args), dict(loss_of.named_parameters())
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        losses.append(run(step, parameters, {}, args).loss.item())
    assert losses[0] == losses[1] != losses[2]


class DropPath(nn.Module):
    """Stochastic depth written by hand, with an in-place draw, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = x.new_empty(x.shape[0], 1).bernoulli_(0.5).div_(0.5)
        return x + keep * self.fc(x) * torch.rand(8)


@pytest.mark.parametrize("level", ["core", "coarse"])
def test_random_numbers_of_a_model_are_the_same_in_its_backward(level: Level) -> None:
    loss_of, args = made(DropPath(), 16, 8)
    step = export_joint(loss_of, args, level=level)
    assert error(step, loss_of, args, seed=3) <= MAX_ERROR


class Norms(nn.Module):
    """A convolution net that mutates: buffers in batch norm, activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        y += 0.5
        return F.max_pool2d(F.relu(y, inplace=True), 2)


@pytest.mark.parametrize("level", ["core", "coarse"])
def test_mutated_buffers_are_outputs(level: Level) -> None:
    loss_of, args = made(Norms(), 2, 3, 8, 8)
    step = export_joint(loss_of, args, level=level)
    before = {name: buffer.clone() for name, buffer in loss_of.named_buffers()}
    result = run(step, dict(loss_of.named_parameters()), before, args)
    loss_of(*args)
    after = dict(loss_of.named_buffers())
    assert result.buffers.keys() == after.keys()
    for name, value in result.buffers.items():
        torch.testing.assert_close(value, after[name])
    assert error(step, loss_of, args) <= MAX_ERROR
    targets = [node.target for node in step.program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert not [target for target in targets if target._schema.is_mutable]


@pytest.mark.parametrize(("level", "attention"), FORMS)
def test_each_operation_is_tagged(level: Level, attention: Attention, tmp_path: Path) -> None:
    loss_of, args = model(), batches()[0]
    program = saved(export_joint(loss_of, args, level=level, attention=attention), tmp_path / "tags.pt2")
    modules = {name for name, _ in loss_of.named_modules()}
    nodes = program["graph_module"]["graph"]["nodes"]
    tags = [json.loads(node["metadata"]["custom"]) for node in nodes]
    # PyTorch may compute a call again, except one that draws random numbers.
    random = {node["target"].split(".")[-2] for node, tag in zip(nodes, tags, strict=True) if not tag["pure"]}
    drop = "rand_like" if level == "core" else "native_dropout"
    assert random - {"_scaled_dot_product_flash_attention_for_cpu"} == {drop}
    forward = {(tag["seq"], tag["path"]) for tag in tags if tag["phase"] == "fwd"}
    assert {path for _, path in forward} >= {"wte", "drop", "blocks.0.attn.qkv", "blocks.1.mlp.fc", "ln"}
    for tag in tags:
        if tag.get("acc"):
            assert tag.keys() == {"phase", "seq", "acc", "pure"}
            assert tag["phase"] == "bwd"
        else:
            assert tag["path"] in modules
            assert tag["phase"] == "fwd" or (tag["seq"], tag["path"]) in forward
    phases = [tag["phase"] for tag in tags]
    assert phases == sorted(phases, reverse=True)
    # The embedding is read twice, and so is each block's input: the sums of their gradients belong to no module.
    assert sum(tag.get("acc", False) for tag in tags) == 5


def test_weightless_model_has_no_memory_and_no_weights(tmp_path: Path) -> None:
    config = Config(vocabulary=1000, layers=2, width=8192, heads=64, sequence=128, batch=2)  # 1.6 billion parameters
    with weightless() as mode:
        big = Gpt2(config)
    with mode:
        args = tuple(torch.empty(config.batch, config.sequence, dtype=torch.long) for _ in range(2))
    step, path = export_joint(big, args), tmp_path / "big.pt2"
    save(step, path, weights=False)
    assert path.stat().st_size < 1_000_000
    with zipfile.ZipFile(path) as archive:
        sizes = {i.file_size for i in archive.infolist() if "/data/weights/weight_" in i.filename}
        info = json.loads(archive.read("big/extra/joint_step.json"))
    assert sizes == {0}
    assert info["weights"] is False
    assert len(step.info["parameters_with_gradient"]) == len(list(big.parameters()))


def test_weightless_graph_is_the_graph_with_weights(tmp_path: Path) -> None:
    with weightless() as mode:
        fake = Gpt2(CONFIG)
    with mode:
        args = tuple(torch.empty(CONFIG.batch, CONFIG.sequence, dtype=torch.long) for _ in range(2))
    one = saved(export_joint(fake, args), tmp_path / "step.pt2", weights=False)
    two = saved(export_joint(model(), batches()[0]), tmp_path / "step.pt2", weights=False)
    assert one["graph_module"]["graph"] == two["graph_module"]["graph"]


def test_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "step.pt2", tmp_path / "b" / "step.pt2"]
    for path in paths:
        path.parent.mkdir()
        save(export_joint(model(), batches()[0]), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_batch_size_may_be_a_symbol(tmp_path: Path) -> None:
    loss_of, args = made(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), 4, 8)
    batch = torch.export.Dim("batch", min=2, max=64)
    step = export_joint(loss_of, args, dynamic_shapes=({0: batch},))
    (symbol,) = saved(step, tmp_path / "step.pt2")["range_constraints"].values()
    assert (symbol["min_val"], symbol["max_val"]) == (2, 64)
    assert error(step, loss_of, (torch.randn(7, 8),)) <= MAX_ERROR


def test_torch_loads_the_file(tmp_path: Path) -> None:
    loss_of, args = model(), batches()[0]
    step, path = export_joint(loss_of, args), tmp_path / "step.pt2"
    save(step, path)
    loaded = Step(torch.export.load(path), step.info)
    assert error(loaded, loss_of, args) <= MAX_ERROR


def test_export_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(export_joint(model(), batches()[0]), tmp_path / "step.pt2", weights=False)
    assert capfd.readouterr() == ("", "")


def test_one_tensor_for_two_inputs_is_refused() -> None:
    ids = torch.zeros(CONFIG.batch, CONFIG.sequence, dtype=torch.long)
    with pytest.raises(CaptureError, match="one tensor"):
        export_joint(model(), (ids, ids))


def test_model_without_a_scalar_loss_is_refused() -> None:
    with pytest.raises(CaptureError, match="one scalar"):
        export_joint(nn.Linear(8, 8), (torch.randn(2, 8),))


def test_model_without_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match="no parameter"):
        export_joint(Regression(nn.ReLU()), (torch.randn(2, 8),))


@pytest.mark.parametrize(
    "layer",
    [
        nn.PReLU(),
        nn.Hardswish(),
        nn.Hardsigmoid(),
        nn.GLU(-2),
        nn.InstanceNorm2d(4, affine=True),
        nn.ReflectionPad2d(1),
        nn.PixelShuffle(2),
        nn.SmoothL1Loss(),
        nn.HuberLoss(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_without_an_operation_of_their_own_are_spelled_out(layer: nn.Module) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Conv2d(1, 4, 3, bias=False), layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            # The mean square of what is normalised would be constant.
            return torch.sigmoid(self.layer(h, torch.zeros_like(h)) if "Loss" in str(layer) else self.layer(h))

    model, args = made(Body(), 2, 1, 6, 6)
    step = export_joint(model, args)
    assert error(step, model, args) <= MAX_ERROR
    spelled = ("_prelu", "hards", "glu", "_native_batch_norm_legit.no", "reflection", "pixel", "smooth_l1", "huber")
    assert not [name for name in ops(step) if name.removeprefix("torch.ops.aten.").startswith(spelled)]
