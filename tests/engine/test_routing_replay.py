"""Recorded experts are those of a plain forward pass, and training replays them whatever its routers choose.

The ground truth is stock ``transformers``: its routers' own outputs, and routers whose forward pass is written out here.
"""

from __future__ import annotations

import threading
from functools import partial, partialmethod

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areno.engine.engine import Engine
from areno.engine.engine_config import EngineConfig
from areno.engine.model.loading import prepare
from areno.engine.model.packing import PackedPlan
from areno.engine.model.routers import follow_routers
from areno.engine.model.routing import ChoiceRecorder, ChoiceReplay, Replay, Routers, recompute_contexts
from areno.engine.rollout.loop import RolloutLoop
from areno.engine.rollout.paged.loop import PagedRolloutLoop
from areno.engine.rollout.probe import validate_decoding
from areno.engine.scoring import score
from areno.engine.train.batch import pack_rows
from areno.engine.train.optimizer import MasterAdamW, OptimizerOptions
from areno.engine.train.outputs import predict
from areno.engine.train.recompute import recompute_layers
from areno.engine.train.step import TrainStep
from areno.errors import UnsupportedModelError, UsageError
from areno.loss_fns import sft_loss_fn
from areno.types import Request, SamplingParams, TrainSequence
from areno.types.routing import continued
from tests.support.tiny import VOCAB, save_tiny_checkpoint, tiny_module

FAMILIES = ("qwen3_moe", "gpt_oss")
LAYERS, EXPERTS, EACH = 2, 4, 2
PROMPT = [5, 9, 13, 17, 21, 5, 9, 13, 17, 21]


def stock(family, seed=0):
    return tiny_module(family, seed=seed, layers=LAYERS, sharpen=1.5)


def followed(family, seed=0):
    model = prepare(stock(family, seed), family)
    follow_routers(model, family, lambda value: [value])
    return model


def routers_of(module):
    return [child for child in module.modules() if type(child).__name__.endswith("TopKRouter")]


@torch.no_grad()
def choices(module, tokens, read=lambda out: out[2]):
    """Return the experts that a stock model's routers choose for each token, in ascending order [T, MoE layers, K]."""
    found = []
    hooks = [router.register_forward_hook(lambda _, __, out: found.append(read(out))) for router in routers_of(module)]
    module(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values


def ascending(record):
    return torch.from_numpy(np.sort(record, -1)).long()


def by_hand(module, family, recorded):
    """Make a stock model's routers choose ``recorded`` [T, MoE layers, K]; each family's formula is written out."""

    def forward_of(router, experts):
        def forward(hidden):
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
            if family == "gpt_oss":  # a softmax over the chosen experts; qwen3 has one over all
                logits = logits + router.bias
            among = logits.gather(1, experts) if family == "gpt_oss" else logits
            return logits, logits.gather(1, experts).exp() / among.exp().sum(1, keepdim=True), experts

        return forward

    for number, router in enumerate(routers_of(module)):
        router.forward = forward_of(router, recorded[:, number])
    return module


@pytest.fixture
def make_loop():
    loops = []

    def make(model, kind=RolloutLoop, **options):
        settings = {"eos_ids": frozenset(), "budget_tokens": 8192, "max_running": 16, **options}
        loops.append(kind(model, tokenizer=None, records=model.routers, **settings))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


WAYS = {
    "slots": (RolloutLoop, {}),
    "preempted": (RolloutLoop, {"budget_tokens": 5 * 64}),
    "speculation": (RolloutLoop, {"speculate": 4}),
    "kept prefixes": (RolloutLoop, {"prefix_tokens": 4096}),
    "pages": (PagedRolloutLoop, {"prefix_tokens": 4096}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_experts_are_those_that_a_plain_forward_pass_chooses(make_loop, family, way):
    kind, options = WAYS[way]
    loop = make_loop(followed(family), kind, **options)
    asked = [Request(PROMPT, SamplingParams(max_new_tokens=20 + 30 * i), [i, i + 7]) for i in range(3)]
    asked.append(Request(PROMPT * 5, SamplingParams(greedy=True, max_new_tokens=150), [0]))
    if way != "preempted":  # a prompt that is prefilled in chunks
        asked.append(Request([3] * 600, SamplingParams(max_new_tokens=3), [1, 2]))
    futures = loop.submit(asked)
    if way == "kept prefixes":
        futures[-2].result(60)
        asked.append(Request(PROMPT * 5 + [4], SamplingParams(max_new_tokens=5), [5]))
        futures += loop.submit(asked[-1:])
    module = stock(family)
    for request, future in zip(asked, futures, strict=True):
        for sequence in future.result(60).sequences:
            context = request.prompt_tokens + sequence.resp_tokens
            assert sequence.routed_experts.dtype == np.uint8
            assert sequence.routed_experts.shape == (len(context) - 1, LAYERS, EACH)
            assert torch.equal(ascending(sequence.routed_experts), choices(module, context[:-1]))
    if way == "preempted":
        assert loop.scheduler.preemptions
    if way == "speculation":
        assert loop.counters.agreed_total
    if way == "kept prefixes":
        assert loop.counters.reused_total


def test_a_token_keeps_the_experts_of_the_weights_that_sampled_its_successor(make_loop):
    loop, reached, count = make_loop(followed("qwen3_moe")), threading.Event(), []

    def listener(_, token):
        count.append(token)
        if len(count) == 10:
            reached.set()

    future = loop.submit([Request(PROMPT, SamplingParams(max_new_tokens=400), [3], listener)])[0]
    assert reached.wait(60)
    other = stock("qwen3_moe", seed=9)
    with loop.weights_changing(1), torch.no_grad():
        loop.model.module.load_state_dict(other.state_dict())
    sequence = future.result(60).sequences[0]
    fed = (PROMPT + sequence.resp_tokens)[:-1]
    change = len(PROMPT) - 1 + sequence.versions.index(1)
    found = ascending(sequence.routed_experts)
    assert torch.equal(found[:change], choices(stock("qwen3_moe"), fed)[:change])
    assert torch.equal(found[change:], choices(other, fed)[change:])
    assert not torch.equal(found, choices(other, fed))
    assert np.array_equal(count[-1].routed_experts, sequence.routed_experts), "a listener gets them with the last token"
    assert all(token.routed_experts is None for token in count[:-1])


def rows_of(seed=0, prompts=2, answers=3, records=True):
    """Return answers to common prompts, with random experts that are the same where rows share tokens."""
    rng = np.random.default_rng(seed)

    def experts(tokens):
        return np.stack([[rng.permutation(EXPERTS)[:EACH] for _ in range(LAYERS)] for _ in range(tokens)]).astype(
            np.uint8
        )

    rows = []
    for _ in range(prompts):
        prompt = rng.integers(1, VOCAB, 12).tolist()
        shared = experts(len(prompt))
        for _ in range(answers):
            answer = rng.integers(1, VOCAB, rng.integers(3, 9)).tolist()
            tokens = prompt + answer
            record = continued([np.concatenate([shared, experts(len(answer) - 1)])], len(tokens)) if records else None
            mask = [True] * len(prompt) + [False] * len(answer)
            rows.append(TrainSequence(mask, tokens, routed_experts=record))
    return rows


def logprobs_by_hand(family, row):
    """Return a row's log-probs by a stock model that routes as recorded, or by itself without a record; and that model."""
    own = choices(stock(family), row.tokens)
    recorded = torch.from_numpy(row.routed_experts.astype(np.int64))
    # The last token has no record; its routing does not affect the predictions before it.
    module = by_hand(stock(family), family, torch.where(recorded < EXPERTS, recorded, own))
    logits = module(torch.tensor([row.tokens]), use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(row.tokens[1:])[:, None])[:, 0], module


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_those_of_a_stock_model_that_is_routed_by_hand(family):
    model, rows = followed(family), rows_of()
    tokens, records = [row.tokens for row in rows], [row.routed_experts for row in rows]
    found = score(model, "logprobs", tokens, 4, [1.0] * len(rows), routed=records)
    plain = score(model, "logprobs", tokens, 4, [1.0] * len(rows))
    for row, got, other in zip(rows, found, plain, strict=True):
        assert got[1:] == pytest.approx(logprobs_by_hand(family, row)[0].tolist(), abs=2e-5)
        assert got[1:] != pytest.approx(other[1:], abs=1e-3), "the routers themselves would have chosen otherwise"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_a_stock_model_that_is_routed_by_hand(family, tree, recompute):
    rows, model = rows_of(), followed(family)
    step = TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions(lr=0.0)), recompute, tree=tree)
    step.set_training(True)
    stats = step.accumulate(rows, sft_loss_fn, 3)
    step.set_training(False)
    assert ("tree_token_ratio" in stats) == tree
    total, expected = sum(sum(row.trainable()) for row in rows), {}
    for row in rows:
        logprobs, module = logprobs_by_hand(family, row)
        (-logprobs[torch.tensor(row.trainable()[1:])].sum() / total).backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, 0) + parameter.grad
    assert any("router" in name or "mlp.gate." in name for name in expected)
    for name, parameter in model.parameters():
        gap = (parameter.grad - expected[name]).abs().max()
        assert gap <= 1e-4 * expected[name].abs().max() + 1e-7, name
        if "router.weight" in name or "mlp.gate.weight" in name:
            assert expected[name].abs().max() > 1e-6


def test_the_share_of_changed_choices_is_counted_once_and_regardless_of_order():
    rows, model = rows_of(), followed("qwen3_moe")
    made, changed = 0, 0
    for row in rows:
        recorded = torch.from_numpy(row.routed_experts.astype(np.int64))[:-1]
        module = by_hand(stock("qwen3_moe"), "qwen3_moe", torch.cat([recorded, recorded[-1:]]))
        own = choices(module, row.tokens, lambda out: out[0].topk(EACH).indices)[:-1]
        made += own.shape[0] * LAYERS
        changed += int((own != recorded.sort(-1).values).any(-1).sum())
    for recompute in (False, True):
        step = TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions(lr=0.0)), recompute)
        stats = step.run(rows, sft_loss_fn, 2)
        assert stats["routed_experts_changed"] == pytest.approx(changed / made)
    assert "routed_experts_changed" not in step.run(rows_of(records=False), sft_loss_fn, 2)


def test_rows_with_and_without_a_record_are_trained_together():
    mixed, model = rows_of(answers=1, prompts=3), followed("qwen3_moe")
    mixed[1].routed_experts = None
    step = TrainStep(model, MasterAdamW(model.parameters(), OptimizerOptions(lr=0.0)), False)
    apart = [step.measure([row], sft_loss_fn, 1)["loss"] * sum(row.trainable()) for row in mixed]
    together = step.measure(mixed, sft_loss_fn, 3)["loss"]
    assert together == pytest.approx(sum(apart) / sum(sum(row.trainable()) for row in mixed), rel=1e-5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("ckpt") / "moe", "qwen3_moe")


def test_training_replays_the_rollouts_routing_after_the_routers_have_changed(checkpoint):
    engine = Engine(str(checkpoint), EngineConfig(return_routed_experts=True))
    result = engine.submit([Request(PROMPT, SamplingParams(max_new_tokens=8), [1, 2])])[0].result(60)
    rows = []
    for sequence in result.sequences:
        tokens = PROMPT + sequence.resp_tokens
        mask = [True] * len(PROMPT) + [False] * len(sequence.resp_tokens)
        rows.append(TrainSequence(mask, tokens, routed_experts=continued([sequence.routed_experts], len(tokens))))
    assert engine.train(rows, sft_loss_fn, 4)["routed_experts_changed"] == 0
    module, received = engine.actor.model.module, []
    with torch.no_grad():
        for router in routers_of(module):
            router.weight.normal_(generator=torch.Generator().manual_seed(3))
    for child in module.modules():
        if type(child).__name__.endswith("Experts"):
            child.register_forward_pre_hook(lambda _, args: received.append(args[1]))
    assert engine.measure(rows[:1], sft_loss_fn, 4)["routed_experts_changed"] > 0
    used = torch.stack(received, 1)
    assert torch.equal(used[:-1].byte(), torch.from_numpy(rows[0].routed_experts)[:-1])
    received.clear()
    scored = engine.score_logprobs("actor", [rows[0].tokens], routed=[rows[0].routed_experts])
    assert torch.equal(torch.stack(received, 1), used)
    assert scored != engine.score_logprobs("actor", [rows[0].tokens])
    engine.close()


SIZES = {
    **{
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
    },
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
    **{"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8},
    **{"num_experts_per_tok": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    **{
        "first_k_dense_replace": 1,
        "moe_layer_start_index": 0,
        "enable_moe_block": True,
        "shared_intermediate_size": 16,
    },
}


@pytest.mark.parametrize(
    ("family", "mixtures"),
    [("mixtral", 2), ("olmoe", 2), ("glm4_moe", 1), ("granitemoeshared", 2), ("gemma4_text", 2), ("ernie4_5_moe", 2)],
)
def test_experts_of_other_families_get_the_recorded_routing(family, mixtures):
    """Routers are inside or outside the MoE block, choose in groups, scale, add a bias; the experts get the record."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    model = prepare(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(), family)
    follow_routers(model, family, lambda value: [value])
    assert model.routers == Routers(mixtures, 8, 2)
    recorded = torch.stack([torch.randperm(8)[:2] for _ in range(6 * mixtures)]).view(6, mixtures, 2)
    recorded[4] = 255
    heard = []
    for module in model.module.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda _, args: heard.append(args[1]))
    plan = PackedPlan([6])
    plan.routing = Replay(recorded.to(torch.uint8), model.routers)
    with torch.no_grad():
        model.body(torch.arange(6), plan.position_ids, plan)
    received, known = torch.stack(heard, 1), torch.arange(6) != 4
    assert torch.equal(received[known], recorded[known])
    assert (received[4] < 8).all()


def test_a_pass_recomputed_in_another_thread_among_other_rows_replays_its_own_record():
    """As in pipeline stages and on GPUs: the backward passes of several rows start after the forward passes of all."""
    rows, found = rows_of(prompts=1, answers=2), []
    for together in (False, True):
        model = followed("qwen3_moe")
        recompute_layers(model.module, True, contexts=recompute_contexts)
        model.module.train()
        losses = []
        for row in rows:
            batch = pack_rows([row], routers=model.routers)
            losses.append(predict(model, "policy", batch, False, False).sum())
            if not together:
                losses.pop().backward()
        for loss in losses:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        found.append({name: parameter.grad for name, parameter in model.parameters()})
    for name, expected in found[0].items():
        assert torch.allclose(found[1][name], expected, atol=1e-6), name


def test_a_record_of_another_model_is_refused(checkpoint):
    engine = Engine(str(checkpoint), EngineConfig(return_routed_experts=True))
    (row,) = rows_of(prompts=1, answers=1)
    row.routed_experts = row.routed_experts[:, :1]
    with pytest.raises(ValueError, match="the record comes from another model"):
        engine.train([row], sft_loss_fn, 1)
    engine.close()


def test_a_model_without_routers_is_refused(tiny_checkpoint):
    with pytest.raises(
        UsageError, match=r"return_routed_experts \(--return-routed-experts\): .* is not a mixture-of-experts model"
    ):
        Engine(str(tiny_checkpoint), EngineConfig(return_routed_experts=True))
    with pytest.raises(UsageError, match=r"tokenizer: the folder \./missing does not exist"):
        Engine("./missing", EngineConfig(return_routed_experts=True))


def test_routers_that_choose_in_another_way_are_refused(monkeypatch):
    model = prepare(stock("qwen3_moe"), "qwen3_moe")
    for router in routers_of(model.module):
        own = router.forward

        def sorted_instead(hidden, own=own):
            logits, scores, _ = own(hidden)
            return logits, scores, logits.argsort(-1, descending=True)[:, :EACH].flip(-1)

        monkeypatch.setattr(router, "forward", sorted_instead)
    with pytest.raises(UnsupportedModelError, match="cannot identify the topk call"):
        follow_routers(model, "qwen3_moe", lambda value: [value])


@torch.no_grad()
def nearly_tied(family):
    """A model whose experts all have nearly the same score, and whose routers' rounding differs in every pass."""
    module, generator = stock(family), torch.Generator().manual_seed(0)
    for router in routers_of(module):
        router.weight.copy_(router.weight[:1] + 1e-6 * torch.randn(router.weight.shape, generator=generator))
        if getattr(router, "bias", None) is not None:
            router.bias.zero_()
        router.register_forward_pre_hook(
            lambda _, args: (args[0] * torch.randn(args[0].shape, generator=generator), *args[1:])
        )
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_whose_rounding_changes_the_choice_of_experts_is_accepted(family):
    tokens = list(range(5, 35))
    assert (choices(module := nearly_tied(family), tokens) != choices(module, tokens)).any(), "all choices are stable"
    validate_decoding(prepare(nearly_tied(family), family), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_choices_hide_no_layer_that_ignores_the_plan(family, monkeypatch):
    monkeypatch.setattr(PackedPlan, "__init__", partialmethod(one_sequence, PackedPlan.__init__))
    with pytest.raises(UnsupportedModelError, match="than for individual sequences"):
        prepare(stock(family), family)


def choose_by_all_tokens(router, hidden):
    """The forward pass of a router that chooses by the mean scores of all tokens of the pass so far."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    scores = logits.softmax(-1)
    chosen = torch.topk(scores.cumsum(0) / torch.arange(1, len(scores) + 1)[:, None], router.top_k, dim=-1).indices
    values = scores.gather(-1, chosen)
    return logits, values / values.sum(-1, keepdim=True), chosen


def test_replayed_choices_hide_no_router_that_mixes_sequences():
    module = stock("qwen3_moe")
    for router in routers_of(module):
        router.forward = partial(choose_by_all_tokens, router)
    with pytest.raises(UnsupportedModelError, match="than for individual sequences"):
        prepare(module, "qwen3_moe")


@pytest.mark.parametrize("dim", [0, -1])
def test_choices_are_replayed_only_over_the_experts_of_each_token(dim):
    scores = torch.tensor([[0.5, 0.5 + 1e-6, 0.1], [0.5 + 1e-6, 0.5, 0.1], [0.2, 0.3, 0.1]])
    with (recorder := ChoiceRecorder()):
        expected = scores.topk(2, dim=dim).indices
    assert len(recorder.calls) == (dim == -1)
    swapped = scores.flip(1) if dim == 0 else scores - torch.tensor([0.0, 2e-6, 0.0])
    with ChoiceReplay(recorder, tolerance=1e-3):
        replayed = swapped.topk(2, dim=dim).indices
    assert (replayed == (swapped.topk(2, dim=0).indices if dim == 0 else expected)).all()


def test_recordings_of_different_shapes_are_not_replayed():
    recorders = [ChoiceRecorder(), ChoiceRecorder()]
    for recorder, chosen in zip(recorders, (1, 2), strict=True):
        with recorder:
            torch.rand(3, 4).topk(chosen)
    scores = torch.rand(6, 4)
    with ChoiceReplay(*recorders, tolerance=1.0):
        assert (scores.topk(2).indices == scores.sort(descending=True).indices[:, :2]).all()


def one_sequence(plan, original, lengths, *args):
    """Pack all sequences as one, so that the later ones attend to the earlier ones."""
    original(plan, [sum(lengths)], *args)
