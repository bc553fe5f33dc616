"""What programs do around the steps of a compiled model: none of it may be silently wrong.

Where each situation is tested; a name alone is a file, and the start of a test's name stands for it:

* families of models: benches/coverage.py; test_backend, `a_model_trains_as_in_eager_mode`
* the same bits at every budget: test_step, `bits_are_the_same`; test_foreign, `a_step_is_eagers_at_every_budget`
* what Dynamo would run in eager mode: test_backend, `what_dynamo_leaves_in_eager_mode`, `more_shapes`
* two lines of a program change: test_transformers_example; test_step, `example_of_the_page_runs`
* memory, the peak, PyTorch's own, over many steps: here
* a budget that is too small: test_step, `budget_that_nothing_fits`
* the order in which things are dropped: here; test_step, `parameters_outlive`; test_backend, `a_forward_without`
* Ctrl-C: test_step, `interrupt`; test_foreign, `ctrl_c`
* checkpoints, to eager PyTorch and back: test_step, `states_go_through_torch_save`; test_integrations
* `save_pretrained`, `deepcopy`, pickles, averaged weights: here; test_backend, `state_dicts_copies`
* trainers of other libraries: test_integrations
* random numbers, in what is computed again too: test_step, test_backend and test_export, `dropout`, `random_numbers`
* attention of PyTorch: test_export, `attention_equals_eager`
* tied weights: test_step, `losses_and_parameters_are_eagers`; test_export, `tied_weight`
* parameters that are written in place, moved or swapped: test_step, `change_of_values`; test_backend, `a_parameter`
* a norm of a batch whose input needs no gradient: here
* frozen parameters, and unfrozen ones: test_step, `changed_models`; test_backend, `frozen`, `unfrozen`
* hooks of parameters, modules and optimizers: here; test_capture
* gradients that accumulate: test_step, `gradients_accumulate`; test_integrations
* two models, two shapes: test_step, `two_models`, `two_steps`, `batches_of_new_shapes`; test_backend, `every_shape`
* two forwards, second backwards, dropped losses: test_backend
* functions of torch that look at values: test_values
* exceptions in a step: test_backend, `after_a_line_that_fails`; test_step, `failed_line`; test_foreign, `an_exception`
* several processes that average gradients, or divide parameters: test_ranks
* workers of a data loader, forks: here; threads: test_step, `other_threads`; test_foreign, `threads_take_turns`
"""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lighterage.backend import backend
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import lighterage as lt

PACKAGE = Path(lt.__file__).parents[1]
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> lt.Step:
    options = {"kernels": "plain", **options}
    return lt.compile(model, optimizer or sgd(model), loss_of, example=X, **options)


def eager(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())


def python(program: str, **environment: str) -> str:
    """What a program prints that ends well within a minute."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE), **environment}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


# Memory --------------------------------------------------------------------------------------------------------------


def test_steps_allocate_their_losses_alone_and_stay_in_their_peak() -> None:
    step = compiled(network(), budget="80%")
    step(X)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        for _ in range(64):
            step(X)
    # A few hundred numbers of four bytes at most: the losses, which are made several at a time.
    allocated = [max(event.cpu_memory_usage, 0) for event in profiled.events()]
    assert 0 < sum(allocated) <= 1024
    assert step.measured_peak == step.plan.peak


def test_memory_stays_the_same_over_many_steps() -> None:
    def resident() -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1])

    model = network()
    step = compiled(model, torch.optim.AdamW(model.parameters()))
    for _ in range(100):
        step(X)
    before = resident()
    for _ in range(1000):
        step(X)
    # One page a step would be 4000.
    assert resident() - before < 1000


# Lives ---------------------------------------------------------------------------------------------------------------

DROPPED = """
import gc, itertools, torch
import lighterage as lt
torch.set_num_threads(1)
x = torch.ones(2, 4)
loss = lambda m, x: m(x).square().mean()
for order in itertools.permutations(["model", "step", "view"]):
    model = torch.nn.Linear(4, 4)
    step = lt.compile(model, torch.optim.AdamW(model.parameters()), loss, example=x, kernels="plain")
    held = {"model": model, "step": step, "view": model.weight.data[1:]}
    del model, step
    held["step"](x)
    want = held["view"].clone()
    for name in order:
        del held[name]
        filler = [torch.full((1 << 12,), 7.0) for _ in range(8)]
        if "view" in held:
            assert torch.equal(held["view"], want), order
    gc.collect()
model = torch.nn.Linear(4, 4)
# The interpreter ends with a step and its model.
step = lt.compile(model, torch.optim.SGD(model.parameters()), loss, example=x, kernels="plain")
print("dropped")
"""


def test_steps_models_and_views_go_in_any_order() -> None:
    assert python(DROPPED) == "dropped\n"


def test_copies_of_a_model_are_the_programs() -> None:
    model = network()
    step = compiled(model)
    step(X)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False), torch.optim.swa_utils.AveragedModel(model)]
    before = model(X).detach()
    step(X)
    for made in copies:
        assert torch.equal(made(X), before)
    # A step of a copy moves the copy alone.
    expected = model(X).detach()
    twin = compiled(copies[0])
    assert float(twin(X)) == pytest.approx(float(before.square().mean()))
    assert torch.equal(model(X), expected)


def test_a_model_of_transformers_is_saved_and_comes_back(tmp_path: Path) -> None:
    """Its first and last weights are tied: safetensors refuses memory that several tensors share."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(16, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    step = lt.compile(model, sgd(model), example=batch, kernels="plain")
    step(**batch)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 4 * sum(p.numel() for p in model.parameters()) + 10_000
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.transformer.wte.weight
    assert again(**batch).loss.item() == pytest.approx(float(step(**batch)), rel=1e-6)


# Hooks ---------------------------------------------------------------------------------------------------------------


def test_hooks_of_parameters_change_gradients_as_in_eager_mode() -> None:
    model = network()
    reference = copy.deepcopy(model)
    for each in (model, reference):
        each[0].weight.register_hook(lambda gradient: gradient * 3)
        each[2].bias.register_hook(torch.zeros_like)
    step, optimizer = compiled(model), sgd(reference)
    assert step.check is not None
    assert step.check.gradient < 1e-5
    for _ in range(3):
        assert float(step(X)) == pytest.approx(eager(reference, optimizer, X), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model[0].register_forward_hook(lambda *_: None), "0 has other hooks"),
        (lambda model: model.register_forward_pre_hook(lambda *_: None), "the model has other hooks"),
        (lambda model: model[2].register_full_backward_hook(lambda *_: None), "2 has other hooks"),
        (lambda model: model[2].bias.register_hook(lambda _: None), "2.bias has other hooks"),
    ],
)
def test_hooks_that_come_later_are_noticed(change: Callable[[Any], Any], message: str) -> None:
    model = network()
    step = compiled(model)
    step(X)
    handle = change(model)
    for _ in range(2):
        with pytest.raises(lt.StaleError, match=message):
            step(X)
    handle.remove()
    assert step(X).isfinite()


def test_hooks_that_a_step_cannot_call_are_refused_by_name() -> None:
    model = network()
    handle = model[2].weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(lt.CaptureError, match=r"2\.weight has a hook for its accumulated gradient"):
        compiled(model)
    handle.remove()
    optimizer = sgd(model)
    step = compiled(model, optimizer)
    step(X)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(lt.Unsupported, match="hooks of its step"):
        step(X)
    with pytest.raises(lt.Unsupported, match="hooks of its step"):
        compiled(model, optimizer)


# Other processes -----------------------------------------------------------------------------------------------------


def test_workers_of_a_loader_are_forked_from_a_program_with_steps() -> None:
    data = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)))
    found = []
    for workers in (0, 2):
        step = compiled(network())
        step(X)
        found.append([float(step(x)) for (x,) in DataLoader(data, batch_size=6, num_workers=workers)])
    assert len(found[0]) == 4
    assert found[0] == found[1]


FORKED = """
import os, sys, torch
import lighterage as lt
torch.set_num_threads(1)
model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean()
step = lt.compile(model, optimizer, loss, example=x, kernels="plain")
step(x)
if os.fork() == 0:
    print(model(x).isfinite().all().item())
    for call in (lambda: step(x), lambda: step.plan.curve):
        try:
            call()
        except lt.Error as error:
            print("forked" in str(error))
    # All is dropped, as at the end of any program.
    sys.exit()
_, status = os.wait()
print(status, step(x).isfinite().item())
"""


def test_a_forked_process_has_the_parameters_and_no_step() -> None:
    assert python(FORKED).split() == ["True", "True", "True", "0", "True"]


# What is installed ---------------------------------------------------------------------------------------------------


LOSSES = """
import sys, sysconfig, torch
if len(sys.argv) > 1:
    sysconfig.get_path = lambda *_: sys.argv[1]
import lighterage as lt
torch.manual_seed(0)
torch.set_num_threads(1)
model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)), torch.ones(2, 4)
for _ in range(2):
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean()
    step = lt.compile(model, optimizer, loss, example=x)
print(step.plan.kernels, *(step(x).item() for _ in range(3)))
"""


def test_without_a_generator_steps_have_the_packages_kernels_and_one_note(tmp_path: Path) -> None:
    def losses(folder: Path, **environment: str) -> tuple[str, list[float], str]:
        program = tmp_path / "losses.py"
        program.write_text(LOSSES)
        clean = {name: value for name, value in os.environ.items() if name != "LIGHTERAGE_MLIR"}
        env = {**clean, "PYTHONPATH": str(PACKAGE), "LIGHTERAGE_CACHE": str(tmp_path / "cache"), **environment}
        ran = subprocess.run([sys.executable, program, folder], env=env, capture_output=True, text=True, check=True)
        kernels, *found = ran.stdout.split()
        return kernels, list(map(float, found)), ran.stderr

    kernels, plain, note = losses(tmp_path / "nothing")
    assert kernels == "plain"
    assert note.count("lighterage-kernels") == 1
    assert losses(tmp_path, LIGHTERAGE_MLIR="/nonexistent")[:2] == (kernels, plain)

    generator = PACKAGE.parents[2] / "target/debug/lighterage-mlir"
    if not generator.is_file():
        pytest.skip(f"there is no {generator}")
    # As pip puts it among the scripts of an environment.
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / generator.name).symlink_to(generator)
    kernels, generated, note = losses(scripts)
    assert kernels == "generated"
    assert "lighterage-kernels" not in note
    assert generated == pytest.approx(plain, rel=1e-5)


def test_import_loads_neither_torch_nor_the_native_module() -> None:
    program = "import lighterage, sys; print([m for m in ('torch', 'lighterage._lighterage') if m in sys.modules])"
    assert python(program) == "[]\n"


# Norms ---------------------------------------------------------------------------------------------------------------

NORMS_FIRST: dict[str, Callable[[], list[nn.Module]]] = {
    "batch": lambda: [nn.BatchNorm2d(3)],
    "instance": lambda: [nn.InstanceNorm2d(3, affine=True)],
    "frozen": lambda: [nn.Conv2d(3, 3, 1).requires_grad_(False), nn.BatchNorm2d(3)],
    "evaluation": lambda: [nn.BatchNorm2d(3).eval()],
}


@pytest.mark.parametrize("first", NORMS_FIRST)
def test_a_norm_of_a_batch_may_come_first(first: str) -> None:
    """PyTorch names the gradient of its input, which is not computed."""
    torch.manual_seed(0)
    models = [nn.Sequential(*NORMS_FIRST[first](), nn.Conv2d(3, 4, 3))]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    optimizers = [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1) for model in models]
    x = torch.randn(2, 3, 6, 6)
    step = lt.compile(models[0], optimizers[0], loss_of, example=(x,), kernels="plain")
    graphs: Any = torch.compile(models[1], backend=backend, options={"kernels": "plain", "strict": True})
    for _ in range(3):
        expected = eager(models[2], optimizers[2], x)
        assert float(step(x)) == pytest.approx(expected, rel=1e-5)
        assert eager(graphs, optimizers[1], x) == pytest.approx(expected, rel=1e-5)
    for model in models[:2]:
        torch.testing.assert_close(model.state_dict(), models[2].state_dict())
