"""Which device each thread and each rank computes on."""

from __future__ import annotations

import threading

import pytest
import torch

from areno.engine.device import rank_devices, read_all, use_device
from areno.engine.model.loading import prepare
from areno.engine.rollout import loop as loop_module
from areno.engine.rollout.loop import RolloutLoop
from areno.errors import UsageError
from areno.types import Request, SamplingParams
from tests.support.tiny import tiny_module

CUDA = torch.device("cuda")


def names(*arguments):
    return [str(device) for device in rank_devices(*arguments)]


def test_each_rank_gets_its_own_numbered_gpu():
    assert names(CUDA, 3, 8) == ["cuda:0", "cuda:1", "cuda:2"]
    assert names(torch.device("cuda:2"), 2, 4) == ["cuda:2", "cuda:3"]
    assert names(CUDA, 2, 4, [3, 1]) == ["cuda:3", "cuda:1"]
    assert names(torch.device("cpu"), 3, 0) == ["cpu"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (CUDA, 4, 2),
            "--world-size 4: this machine has 2 GPUs, but the ranks would use GPU 0, 1, 2, 3; use --world-size 2",
        ),
        (
            (torch.device("cuda:1"), 2, 2),
            "this machine has 2 GPUs, but the ranks would use GPU 1, 2; use --world-size 1",
        ),
        ((CUDA, 1, 1, [3]), "this machine has 1 GPU, but the ranks would use GPU 3; use GPU numbers below 1"),
        ((CUDA, 2, 4, [1]), r"devices=\[1\] has length 1, but world_size=2; give one device per rank"),
    ],
)
def test_ranks_without_a_gpu_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        rank_devices(*arguments)


def test_only_a_numbered_gpu_is_made_the_current_one(monkeypatch):
    """``torch.cuda.set_device`` refuses a device without a number."""
    made = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(device))
    for device in (torch.device("cpu"), CUDA, torch.device("cuda:1")):
        use_device(device)
    assert made == [torch.device("cuda:1")]


def test_the_thread_that_generates_uses_the_device_of_the_model(monkeypatch):
    """A new thread starts on GPU 0, where Triton, streams and graphs would then be."""
    calls = []
    monkeypatch.setattr(
        loop_module, "use_device", lambda device: calls.append((threading.current_thread().name, device))
    )
    model = prepare(tiny_module("llama", layers=1, hidden=32, heads=2), "llama")
    loop = RolloutLoop(model, eos_ids=frozenset(), tokenizer=None, budget_tokens=256, max_running=2)
    loop.submit([Request([1, 2], SamplingParams(max_new_tokens=2), [0])])[0].result(timeout=60)
    loop.close()
    assert calls == [("areno-rollout", model.device)]


def test_numbers_are_read_together_and_exactly():
    values = [
        torch.tensor(0.1),
        2,
        torch.tensor([3]),
        torch.tensor(2**40 + 1),
        0.5,
        torch.tensor(True),
        torch.tensor(1e-30),
    ]
    assert read_all(values) == [float(value) for value in values]
    assert read_all([]) == []
