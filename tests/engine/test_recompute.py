"""Offloaded inputs of recomputed layers: the same gradients, and nothing else is moved."""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

import pytest
import torch

from areno.engine.model import causal_lm
from areno.engine.model.loading import prepare
from areno.engine.model.packing import PackedPlan
from areno.engine.train import step as step_module
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.engine.train.recompute import InHostMemory, kept_bytes
from areno.engine.train.step import TrainStep
from areno.loss_fns import sft_loss_fn
from tests.engine.test_model_families import random_rows
from tests.support.tiny import VOCAB, tiny_module

LAYERS = 4


class Watched(InHostMemory):
    """Records what is offloaded; on a CPU, that is a copy in the same memory."""

    moved: ClassVar[list] = []

    def __init__(self) -> None:
        super().__init__()
        self.pack_hook, inner = self._noted, self.pack_hook
        self._inner = inner

    def _noted(self, tensor):
        kept = self._inner(tensor)
        if tensor.numel():  # PyTorch 2.11 also saves an empty tensor per layer
            Watched.moved.append((tuple(tensor.shape), weakref.ref(tensor.untyped_storage()), kept[1].data_ptr()))
            assert kept[1].data_ptr() != tensor.data_ptr()
        return kept


def make(family, offload, device="cpu", dtype=torch.float32):
    model = prepare(tiny_module(family, sharpen=1.0, layers=LAYERS).to(device, dtype), family)
    optimizer = MasterAdamW(model.parameters(), OptimizerOptions(lr=1e-3))
    return TrainStep(model, optimizer, True, offload_activations=offload)


def gradients(step):
    step.set_training(True)
    loss = step.accumulate(random_rows(5), sft_loss_fn, 2)["loss"]
    step.set_training(False)
    names = [name for name, _ in step.model.parameters()]
    return loss, {name: each.clone() for name, each in zip(names, step.optimizer.gradients(), strict=True)}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "gpt2", "qwen3_5"])
def test_gradients_are_the_same_bit_for_bit(family, monkeypatch):
    monkeypatch.setattr(step_module, "InHostMemory", Watched)
    Watched.moved = []
    expected = gradients(make(family, offload=False))
    assert not Watched.moved
    got = gradients(make(family, offload=True))
    assert got[0] == expected[0]
    assert got[1].keys() == expected[1].keys()
    assert all(torch.equal(got[1][name], expected[1][name]) for name in expected[1])
    hidden = {shape for shape, _, _ in Watched.moved}
    assert len(Watched.moved) == LAYERS * 3, "one tensor per layer and microbatch: 2, 2 and 1 rows"
    assert all(len(shape) == 3 and shape[0] == 1 and shape[2] == 64 for shape in hidden)


def test_the_originals_are_free_once_the_layer_has_run(monkeypatch):
    monkeypatch.setattr(step_module, "InHostMemory", Watched)
    alive = {}
    for offload in (True, False):
        Watched.moved = []
        step = make("llama", offload)
        step.set_training(True)
        inputs: list = []

        def note(_, args, inputs=inputs):
            inputs.append(weakref.ref(args[0].untyped_storage()))

        for layer in step.model.module.model.layers:
            layer.register_forward_pre_hook(note)
        loss, *_ = step._loss(random_rows(2), sft_loss_fn, False)
        gc.collect()
        alive[offload] = sum(reference() is not None for reference in inputs)
        assert len(inputs) == LAYERS
        loss.backward()
    assert alive == {True: 0, False: LAYERS}


def test_activations_are_offloaded_only_in_training_steps(monkeypatch):
    """Offloading is switched on for each step, and an evaluation between two steps moves nothing."""
    monkeypatch.setattr(step_module, "InHostMemory", Watched)
    steps = [make("llama", offload) for offload in (True, False)]
    for seed in range(3):
        for step in steps:
            step.run(random_rows(4, seed), sft_loss_fn, 2)
        Watched.moved = []
        steps[0].measure(random_rows(4, seed), sft_loss_fn, 2)
        assert not Watched.moved
    for (name, a), (_, b) in zip(steps[0].model.parameters(), steps[1].model.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU beside the computer's memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_gradients_are_the_same_and_less_is_held(dtype):
    found, peaks = [], []
    for offload in (False, True):
        step = make("llama", offload, "cuda", dtype)
        gradients(step)
        step.optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        found.append(gradients(step))
        peaks.append(torch.cuda.max_memory_allocated())
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], gradient) for name, gradient in found[0][1].items())
    assert peaks[1] < peaks[0]


def saved_bytes(model, tokens):
    """Return the bytes that autograd keeps of a forward pass: saved tensors are those that stay allocated."""
    plan = PackedPlan([tokens])
    ids = torch.arange(tokens) % 90
    model.body(ids, plan.position_ids, plan)  # creates what is cached
    with torch.profiler.profile(profile_memory=True) as profile:
        hidden = model.body(ids, plan.position_ids, plan)
    del hidden
    return sum(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize(
    ("family", "frozen"), [("llama", ""), ("llama", "proj"), ("gemma2", ""), ("gemma3", ""), ("gpt2", "")]
)
def test_the_bytes_that_a_pass_keeps_are_predicted(family, frozen):
    model = prepare(tiny_module(family, sharpen=1.0, layers=LAYERS), family)
    model.module.train()
    for name, weight in model.module.named_parameters():
        weight.requires_grad_(not frozen or frozen not in name)
    assert kept_bytes(model).of([256]) == pytest.approx(saved_bytes(model, 256), rel=0.1)


@pytest.mark.parametrize(("share", "recomputes"), [(1.05, False), (0.95, True)])
def test_layers_are_recomputed_only_if_what_they_keep_takes_half_of_the_free_memory(share, recomputes, monkeypatch):
    rows, step = random_rows(5), make("llama", offload=False)
    kept = kept_bytes(step.model)
    most = max(kept.of([len(row.tokens) for row in rows[start : start + 2]]) for start in range(0, 5, 2))
    gradients = sum(parameter.nbytes for _, parameter in step.model.parameters())
    free = int((most + gradients) * 2 * share)
    monkeypatch.setattr(step_module, "usable_bytes", lambda device: free)
    switched = []
    monkeypatch.setattr(step_module, "recompute_layers", lambda module, enabled, *more: switched.append(enabled))
    step.activation_checkpointing = None
    step.run(rows, sft_loss_fn, 2)
    assert switched[0] is recomputes
    assert switched[-1] is False


@pytest.mark.parametrize("entropy", [False, True])
def test_log_probs_and_gradients_match_float64_with_and_without_kept_logits(entropy, monkeypatch):
    monkeypatch.setattr(causal_lm, "CHUNK_ELEMENTS", 3 * VOCAB)
    monkeypatch.setattr(causal_lm, "KEPT_CHUNK_ELEMENTS", 4 * VOCAB)
    model = prepare(tiny_module("llama", seed=3), "llama")
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, model.config.hidden_size, generator=random)
    targets = torch.randint(0, VOCAB, (10,), generator=random)
    temperatures, weights = torch.linspace(0.5, 2.0, 10), torch.linspace(-1.0, 1.0, 10)
    head = model.module.lm_head.weight
    wide, table = hidden.double().requires_grad_(), head.detach().double().requires_grad_()
    exact = ((wide @ table.T) / temperatures.double()[:, None]).log_softmax(-1)
    expected = exact.gather(1, targets[:, None])[:, 0]
    truth = torch.autograd.grad((expected * weights).sum(), [wide, table])
    for keeps in (False, True):
        model.keeps_logits = keeps
        own = hidden.clone().requires_grad_()
        logprobs, spreads, _ = model.logprobs_and_entropy(own, targets, temperatures, entropy)
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-6)
        if entropy:
            torch.testing.assert_close(spreads.double(), -(exact.exp() * exact).sum(-1), rtol=1e-5, atol=1e-6)
        got = torch.autograd.grad((logprobs * weights).sum(), [own, head])
        for mine, theirs in zip(got, truth, strict=True):
            assert (mine.double() - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize(("checkpointing", "keeps"), [(False, True), (True, False)])
def test_logits_are_kept_if_layers_are_and_only_in_training(checkpointing, keeps):
    model = prepare(tiny_module("llama"), "llama")
    step = TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions(lr=1e-3)), checkpointing)
    step.set_training(True)
    assert model.keeps_logits is keeps
    step.set_training(False)
    assert not model.keeps_logits
