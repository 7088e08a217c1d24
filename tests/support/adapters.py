"""Shared by tests of adapters: rows, and the weights and outputs of an engine with an adapter."""

from __future__ import annotations

import torch

import areno  # noqa: F401  (before torch)
from areno.loss_fns import sft_loss_fn
from areno.types import Request, SamplingParams, TrainSequence

PROMPT = [5, 9, 30]
LR = 1e-2
IDS = torch.tensor([[5, 9, 30, 41, 7, 12, 3, 8]])


def row(tokens, prompt=2, **lists):
    return TrainSequence([i < prompt for i in range(len(tokens))], list(tokens), **lists)


ROWS = [row([5, 9, 30, 41, 7, 60]), row([12, 3, 8, 11]), row([8, 8, 15, 60, 22, 31, 2]), row([4, 6, 7])]


def base_weights(engine):
    """A copy of all weights that are not the adapter's, by their names in the base checkpoint."""
    named = engine.actor.model.module.named_parameters()
    return {
        name.replace(".base_layer", ""): p.detach().clone()
        for name, p in named
        if ".lora_" not in name and ".modules_to_save." not in name
    }


def trained_weights(engine):
    return {name: p.detach().clone() for name, p in engine.actor.model.parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def logprobs(module, ids=IDS):
    """Log-prob of each token after the first, by plain transformers."""
    with torch.no_grad():
        logits = module(input_ids=ids).logits
    return logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]


def scored(engine, role="actor"):
    return torch.tensor(engine.score_logprobs(role, IDS.tolist())[0][1:])


def generate(engine, n=4, tokens=12):
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    future = engine.submit([Request(PROMPT, sampling, list(range(n)))])[0]
    return future.result(timeout=120).sequences


def train_some(engine, steps=3):
    for _ in range(steps):
        engine.train(ROWS, sft_loss_fn, mini_bs=2)
