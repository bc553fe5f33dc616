"""Trainers of other libraries train a compiled model as they train an eager one, within the budget, and resume."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lighterage.backend import backend
from torch import nn
from torch.utils.data import DataLoader

import lighterage as lt

transformers = pytest.importorskip("transformers", reason="the models of these tests are transformers'")

STEPS = 6
IDS = torch.randint(64, (8 * STEPS, 16), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": row} for row in IDS]
BUDGET = "60%"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    lt.reset()
    yield
    gc.collect()


def model_of(dropout: float = 0.0) -> Any:
    """A GPT-2 with the same random weights each time."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        n_positions=16,
        vocab_size=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    # Without it transformers warns in the model's call, which breaks the graph in torch 2.9.
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def compiled(model: nn.Module) -> nn.Module:
    """The line that a program gets."""
    model.compile(backend=backend, options={"budget": BUDGET, "strict": True, "kernels": "plain"})
    return model


def assert_planned() -> None:
    """Forward and backward ran as planned, within the budget, and nothing ran in eager mode."""
    stats = lt.stats()
    assert (stats.graphs, stats.eager_graphs, stats.waiting) == (1, 0, 0)
    assert stats.backwards >= STEPS / 2
    assert any(plan.budget is not None and plan.peak <= plan.budget < plan.keep_peak for plan in stats.plans)


def assert_close(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == len(theirs) > 0
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-4)


# transformers --------------------------------------------------------------------------------------------------------


def trained_by_transformers(
    model: nn.Module, folder: Path, resume: str | None = None, **options: Any
) -> tuple[list[float], float]:
    """The losses and the norms of the gradients of all steps, and the loss of an evaluation."""
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=DATA, eval_dataset=DATA[:8])
    trainer.train(resume_from_checkpoint=resume)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [entry[name] for entry in logged for name in ("loss", "grad_norm")], trainer.evaluate()["eval_loss"]


@pytest.fixture
def _accelerate() -> None:
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")


@pytest.mark.usefixtures("_accelerate")
def test_trainer_of_transformers(tmp_path: Path) -> None:
    theirs, evaluated = trained_by_transformers(model_of(), tmp_path / "eager")
    ours, ours_evaluated = trained_by_transformers(compiled(model_of()), tmp_path / "ours")
    assert_close([*ours, ours_evaluated], [*theirs, evaluated])
    assert_planned()
    # From the checkpoint in the middle: ours goes on as eager, and eager's as ours.
    for begun, resumed in (("ours", model_of()), ("eager", compiled(model_of()))):
        again, _ = trained_by_transformers(resumed, tmp_path / begun, str(tmp_path / begun / "checkpoint-3"))
        assert_close(again, theirs)


@pytest.mark.usefixtures("_accelerate")
def test_trainer_of_transformers_that_accumulates_in_bf16(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 0.5}
    theirs, _ = trained_by_transformers(model_of(), tmp_path / "eager", **options)
    ours, _ = trained_by_transformers(compiled(model_of()), tmp_path / "ours", **options)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-2, atol=2e-2)
    assert lt.stats().eager_graphs == 0
    assert lt.stats().backwards == 2 * STEPS


# Accelerate ----------------------------------------------------------------------------------------------------------


def trained_by_accelerate(model: nn.Module, folder: Path, **options: Any) -> list[float]:
    """The losses of all steps, where the second half starts anew from what the first half saved."""
    accelerate = pytest.importorskip("accelerate", reason="this is a test of Accelerate")
    accelerator = accelerate.Accelerator(cpu=True, **options)
    # With a smaller eps, gradients that are zero but for rounding would move their parameters by the rate.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    loader: Any = DataLoader(DATA, batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for k, batch in enumerate(loader):
        if k == STEPS // 2:
            accelerator.save_state(str(folder))
            for p in model.parameters():
                torch.nn.init.zeros_(p)
            optimizer.state.clear()
            accelerator.load_state(str(folder))
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_accelerate(tmp_path: Path) -> None:
    theirs = trained_by_accelerate(model_of(), tmp_path / "eager")
    ours = trained_by_accelerate(compiled(model_of()), tmp_path / "ours")
    assert_close(ours, theirs)
    assert_planned()


def test_accelerate_in_bf16(tmp_path: Path) -> None:
    theirs = trained_by_accelerate(model_of(), tmp_path / "eager", mixed_precision="bf16")
    ours = trained_by_accelerate(compiled(model_of()), tmp_path / "ours", mixed_precision="bf16")
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=2e-2, atol=2e-2)
    assert_planned()


# Lightning -----------------------------------------------------------------------------------------------------------


def trained_by_lightning(model: nn.Module, folder: Path, resume: str | None = None) -> list[float]:
    """The losses of all steps; a checkpoint is written in the middle."""
    lightning: Any = pytest.importorskip("lightning", reason="this is a test of Lightning")
    losses: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-4)

    saved = lightning.pytorch.callbacks.ModelCheckpoint(str(folder), "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        callbacks=[saved],
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # One batch, because a plain loader begins anew after a resume.
    trainer.fit(Module(), DataLoader(DATA[:8], batch_size=8), ckpt_path=resume)  # type: ignore[arg-type]
    return losses


def test_lightning(tmp_path: Path) -> None:
    theirs = trained_by_lightning(model_of(), tmp_path / "eager")
    ours = trained_by_lightning(compiled(model_of()), tmp_path / "ours")
    assert_close(ours, theirs)
    assert_planned()
    for begun, resumed in (("ours", model_of()), ("eager", compiled(model_of()))):
        again = trained_by_lightning(resumed, tmp_path / "again", str(tmp_path / begun / "step=3.ckpt"))
        assert_close(again, theirs[3:])


# PEFT ----------------------------------------------------------------------------------------------------------------


def adapted(folder: Path | None = None) -> Any:
    """The model with adapters of rank 4, of which those of `folder` are loaded."""
    peft = pytest.importorskip("peft", reason="this is a test of PEFT")
    if folder is not None:
        return peft.PeftModel.from_pretrained(model_of(), str(folder), is_trainable=True)
    base = model_of()
    torch.manual_seed(2)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))


def trained_by_hand(model: Any, call: Callable[..., Any], steps: range, save: Path | None = None) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for k in steps:
        ids = IDS[8 * k : 8 * k + 8]
        optimizer.zero_grad()
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if save is not None:
        model.save_pretrained(str(save))
    return losses


def test_adapters_of_peft(tmp_path: Path) -> None:
    eager = adapted()
    theirs = trained_by_hand(eager, eager, range(STEPS))
    model = adapted()
    before = copy.deepcopy(model.state_dict())
    compiled(model)
    ours = trained_by_hand(model, model, range(STEPS // 2), tmp_path)
    # Only the adapters are trained and saved.
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora" in name for name in changed)
    torch._dynamo.reset()
    again = adapted(tmp_path)
    compiled(again)
    ours += trained_by_hand(again, again, range(STEPS // 2, STEPS))
    assert_close(ours, theirs)
    stats = lt.stats()
    assert (stats.graphs, stats.eager_graphs) == (2, 0)
    assert all(plan.budget is not None and plan.peak <= plan.budget for plan in stats.plans)


def test_adapters_of_peft_in_a_whole_step() -> None:
    """`lighterage.compile` trains the adapters alone: the frozen weights have no moments."""
    eager, model = adapted(), adapted()
    theirs = trained_by_hand(eager, eager, range(STEPS))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    batch = {"input_ids": IDS[:8], "labels": IDS[:8]}
    step = lt.compile(model, optimizer, example=batch, kernels="plain", budget="90%")
    ours = []
    for k in range(STEPS):
        ids = IDS[8 * k : 8 * k + 8]
        ours.append(step(input_ids=ids, labels=ids).item())
    assert_close(ours, theirs)
