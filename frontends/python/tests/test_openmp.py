"""Steps in a region of torch's OpenMP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lighterage.backend import backend
from torch import nn

import lighterage
from lighterage import _openmp

LAYERS = 3


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of torch's threads, as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def model() -> nn.Module:
    """A model whose steps are long enough for a region."""
    torch.manual_seed(0)
    embedding = nn.Embedding(16, 768)
    return nn.Sequential(embedding, *(nn.Sequential(nn.Linear(768, 768), nn.ReLU()) for _ in range(LAYERS)))


def gradients(run: Any, module: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    torch.autograd.backward(run(ids).square().mean())
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.skipif(not _openmp.MAPS.exists(), reason="only Linux lists a process's libraries")
def test_torchs_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(_openmp, "use_openmp", found.append)
    _openmp.find.__wrapped__()
    libraries = list((Path(torch.__file__).parent / "lib").glob("lib*omp*"))
    assert [address != 0 for address in found] == [True] * bool(libraries)


@pytest.mark.usefixtures("threads")
def test_any_number_of_torchs_threads_gives_the_same_bits() -> None:
    module, ids = model(), torch.arange(256).reshape(16, 16) % 16
    compiled = torch.compile(module, backend=backend)
    first = gradients(compiled, module, ids)
    for number in (1, 2, 3, 1):
        torch.set_num_threads(number)
        for _ in range(3):
            again = gradients(compiled, module, ids)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_python_threads_have_regions_of_their_own() -> None:
    module, ids = model(), torch.arange(256).reshape(16, 16) % 16
    compiled = torch.compile(module, backend=backend)
    differ: list[bool] = []

    def work() -> None:
        for _ in range(10):
            differ.append(not torch.equal(compiled(ids).detach(), wanted))

    gradients(compiled, module, ids)
    wanted = compiled(ids).detach()
    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(differ) == 30
    assert not any(differ)


def test_a_step_that_fails_leaves_its_region() -> None:
    module, ids = model(), torch.arange(256).reshape(16, 16) % 16
    compiled = torch.compile(module, backend=backend)
    first = gradients(compiled, module, ids)
    gradients(compiled, module, ids)
    with pytest.raises(lighterage.Error):
        compiled(ids + 1)
    again = gradients(compiled, module, ids)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
