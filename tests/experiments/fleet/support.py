"""Helpers of the fleet tests for trainers and replicas."""

from __future__ import annotations

import time

import torch

from areno.engine.engine import Engine
from areno.types import Request, SamplingParams
from tests.engine.test_equivalences import rows

GREEDY = {"greedy": True, "ignore_eos": True}


def parameters_of(engine: Engine) -> dict[str, torch.Tensor]:
    """An unsharded copy of all parameters; runs on a rank that must not be generating."""
    from areno.engine.parallel.parts import local, unsharded

    named = engine.actor.model.module.named_parameters()
    return {name: unsharded(local(p.detach()), p).clone() for name, p in named}


def adapter_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in parameters_of(engine).items() if ".lora_" in name}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal bit for bit and in dtype."""
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def learn(engine, seed: int = 0) -> dict[str, float]:
    """One optimizer step that moves every weight."""
    from areno.loss_fns import sft_loss_fn

    return engine.train(rows(4, seed=seed), sft_loss_fn, mini_bs=4)


def requests(count: int, tokens: int = 12, **sampling) -> list[Request]:
    settings = {**GREEDY, "max_new_tokens": tokens, **sampling}
    return [Request([3 + i, 5, 7, 9][: 2 + i % 3], SamplingParams(**settings), [i]) for i in range(count)]


def answers(engine, wanted: list[Request]) -> list[list[int]]:
    return [future.result(timeout=60).sequences[0].resp_tokens for future in engine.submit(wanted)]


def generated(fleet) -> int:
    return fleet.load().generated_total


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.01)


def wait_for_tokens(fleet, more: int) -> None:
    """Wait until ``more`` further tokens have been generated."""
    before = generated(fleet)
    wait_until(lambda: generated(fleet) >= before + more)
