"""Log-probs from vocabulary slices on two tensor-parallel ranks, against stock transformers in float64."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from areno.engine.model import causal_lm
from areno.engine.model.loading import LoadOptions, load_causal_lm
from areno.engine.model.packing import PackedPlan
from areno.engine.parallel.parts import local_gradient, unsharded
from areno.engine.parallel.workers import WorkerGroup
from tests.engine.parallel.replica import members
from tests.support.tiny import tiny_module

VOCAB = 97  # odd, so that the second rank's slice is the shorter one
MODELS = {
    "untied": ("llama", {"tie_word_embeddings": False}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "softcap": ("gemma2", {"tie_word_embeddings": True, "final_logit_softcapping": 2.0}),
    "scaled": ("granite", {"tie_word_embeddings": True}),
}
TOKENS = 23
WEIGHTS = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)


def inputs():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[:4] = torch.tensor([0, 48, 49, VOCAB - 1])  # both sides of the cut, and both ends
    return ids, targets, torch.linspace(0.5, 2.0, TOKENS)


class Watch(TorchDispatchMode):
    """Records the shape of every plain tensor that is created; operations on DTensors show as those on their shards."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        made = function(*args, **(kwargs or {}))
        for value in made if isinstance(made, list | tuple) else [made]:
            if isinstance(value, torch.Tensor) and not isinstance(
                value, FakeTensor
            ):  # DTensor infers shapes with those
                self.shapes.add(tuple(value.shape))
        return made

    def with_width(self, width):
        """Return the recorded shapes [..., tokens, width]."""
        return {shape for shape in self.shapes if len(shape) > 1 and shape[-1] == width}


def measure(peers, path, chunk_rows):
    """Return log-probs, entropies, unsharded gradients, and the shapes that training and sampling created."""
    ids, targets, temperatures = inputs()
    model = load_causal_lm(path, LoadOptions(dtype=torch.float32, peers=peers))
    causal_lm.CHUNK_ELEMENTS = chunk_rows * 49
    plan = PackedPlan([TOKENS], model.device)
    watch = Watch()
    with watch:
        hidden = model.body(ids, plan.position_ids, plan)
        logprobs, entropy, bounds = model.logprobs_and_entropy(hidden, targets, temperatures, bounds=True)
        (logprobs * WEIGHTS).sum().backward()
    gradients = {name: unsharded(local_gradient(p), p) for name, p in model.parameters() if "norm" not in name}
    with torch.no_grad(), Watch() as whole:
        logits = model.logits(hidden[-3:])
    found = {
        "logprobs": logprobs.detach(),
        "entropy": entropy,
        "bounds": bounds,
        "gradients": gradients,
        "logits": logits,
    }
    return found | {"wide": watch.with_width(VOCAB), "own": watch.with_width(49 - peers.tensor.rank)}, whole.with_width(
        VOCAB
    )


def truth(path):
    ids, targets, temperatures = inputs()
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")
    logits = module(input_ids=ids[None], use_cache=False).logits[0]
    spread = torch.distributions.Categorical(logits=logits / temperatures[:, None])
    logprobs = spread.log_prob(targets)
    (logprobs * WEIGHTS).sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    bounds = torch.stack([logits.amin(-1), logits.amax(-1)], -1)
    found = {"logprobs": logprobs, "entropy": spread.entropy(), "bounds": bounds, "gradients": gradients}
    return found | {"logits": logits[-3:]}


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    made = WorkerGroup(members(2, tmp_path_factory.mktemp("meet")))
    yield made
    made.close()


@pytest.mark.parametrize("name", MODELS)
def test_vocabulary_slices_give_the_same_results_as_the_whole_vocabulary(name, group, tmp_path):
    family, config = MODELS[name]
    tiny_module(family, vocab=VOCAB, layers=2, sharpen=2.0, **config).save_pretrained(tmp_path)
    expected = truth(tmp_path)
    for chunk_rows in (TOKENS, 5):  # in one chunk, and in chunks that the backward pass recomputes
        for found, gathered in group.call("apply", measure, str(tmp_path), chunk_rows):
            for key in ("logprobs", "entropy", "bounds", "logits"):
                torch.testing.assert_close(found[key].double(), expected[key], rtol=1e-5, atol=1e-5)
            assert len(found["gradients"]) > 10
            for parameter, gradient in found["gradients"].items():
                true = expected["gradients"][parameter]
                assert (gradient - true).abs().max() <= 1e-5 * true.abs().max(), parameter
            # Training creates each rank's slice, never a row of whole logits, which the same watch would have recorded.
            assert not found["wide"]
            assert found["own"]
            assert gathered
