"""The SDK's roles, scores, learning rates and shutdown; tests/engine tests roles against transformers."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import areno
from areno import ArenoConfig, ModelRole, PromptBatch, PromptItem, SamplingParams, Trainer, TrainSequence
from areno.api.agentic import AgentBatch
from areno.errors import EngineError, UsageError
from areno.loss_fns import dpo_loss_fn, gspo_loss_fn, reward_model_loss_fn, sft_loss_fn

ROWS = [[5, 9, 30, 41, 7], [12, 3, 8], [8, 8, 15, 60, 22, 31]]
SAMPLING = SamplingParams(max_new_tokens=8)


def open_trainer(checkpoint, **config):
    trainer = Trainer(world_size=1, model_path=str(checkpoint), custom_config=ArenoConfig(**config))
    trainer.init()
    return trainer


@pytest.fixture
def trainer(tiny_checkpoint):
    with open_trainer(tiny_checkpoint, optimizer={"lr": 1e-2}) as trainer:
        yield trainer


def row(tokens, prompt=2, **lists):
    return TrainSequence([i < prompt for i in range(len(tokens))], list(tokens), **lists)


def test_a_hand_written_ppo_step_needs_only_documented_calls(trainer, tiny_checkpoint, tmp_path):
    path = str(tiny_checkpoint)
    trainer.ensure_roles(
        {
            "ref": ModelRole(name="ref", path=path, trainable=False),
            "critic": ModelRole(name="critic", path=path, trainable=True, optimizer_lr=1e-3),
        }
    )
    with trainer.rollout_session(sampling_params=SAMPLING, proxy=False):
        result = trainer.rollout_token_batch([[5, 9, 30]], n_samples=3, sampling_params=SAMPLING)[0]
    tokens = [[5, 9, 30, *s.resp_tokens] for s in result.sequences]
    reference, values = trainer.score_logprobs("ref", tokens), trainer.score_values("critic", tokens)
    batch = []
    for own, ref, value, sequence in zip(tokens, reference, values, result.sequences, strict=True):
        before = value[2:-1]  # the value before each response token
        advantages, returns = areno.compute_gae([0.0] * (len(before) - 1) + [1.0], before, gamma=1.0, lam=0.95)
        pad = [0.0] * 3
        batch.append(
            row(
                own,
                prompt=3,
                logprobs=pad + sequence.resp_logprobs,
                advantages=pad + list(advantages),
                returns=pad + list(returns),
                values=pad + before,
                ref_logprobs=ref,
            )
        )
    critic = trainer.train_values("critic", batch, mini_bs=2)
    assert critic["value_target_mean"] == pytest.approx(sum(sum(r.returns) for r in batch) / sum(map(sum_mask, batch)))
    stats = trainer.train(batch, partial(areno.ppo_loss_fn, use_kl_loss=True), mini_bs=2)
    assert stats["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert stats["kl_loss"] == pytest.approx(0.0, abs=1e-6)  # the policy still equals the reference
    assert stats["step_rollout_time_s"] > 0
    again = trainer.train(batch, partial(areno.ppo_loss_fn, use_kl_loss=True), mini_bs=2)
    assert again["kl_loss"] > 1e-4
    assert again["step_rollout_time_s"] == 0.0


def sum_mask(sequence):
    return sum(sequence.trainable())


@pytest.mark.parametrize("mini_bs", [2, 4, 6])
def test_pairs_stay_together_in_every_split_into_microbatches(tiny_checkpoint, mini_bs, monkeypatch):
    from areno.engine.train import step as step_module

    monkeypatch.setattr(step_module, "MAX_TOKENS", 12)  # so that the token limit splits microbatches too
    tokens = [[5, 9, *range(20, 20 + n)] for n in (3, 6, 2, 2, 7, 4)]
    rows = [row(t, ref_logprobs=[0.0, 0.0] + [-2.0] * (len(t) - 2), group=i // 2) for i, t in enumerate(tokens)]
    with open_trainer(tiny_checkpoint, optimizer={"lr": 1e-3, "eps": 1e-6}) as trainer:
        before = trainer.score_logprobs("actor", tokens)
        stats = trainer.train(rows, dpo_loss_fn, mini_bs=mini_bs)
        sums = [sum(values[2:]) + 2.0 * (len(values) - 2) for values in before]
        expected = [0.1 * (sums[i] - sums[i + 1]) for i in (0, 2, 4)]
        assert stats["dpo_margin"] == pytest.approx(sum(expected) / 3, abs=1e-5)
        losses = -torch.nn.functional.logsigmoid(torch.tensor(expected, dtype=torch.float64))
        assert stats["loss"] == pytest.approx(float(losses.mean()), abs=1e-6)


def test_the_microbatch_size_does_not_change_scores(trainer):
    one = trainer.score_logprobs("actor", ROWS, micro_bs=1)
    for scored in (trainer.score_logprobs("actor", ROWS), trainer.score_logprobs("actor", ROWS, micro_bs=2)):
        for a, b in zip(one, scored, strict=True):
            assert a == pytest.approx(b, abs=1e-5)
    with pytest.raises(ValueError, match="micro_bs must be at least 1, got 0"):
        trainer.score_logprobs("actor", ROWS, micro_bs=0)


def test_the_learning_rate_can_be_read_and_set_for_each_trained_role(trainer, tiny_checkpoint):
    critic = ModelRole("critic", str(tiny_checkpoint), True, optimizer={"lr": 1e-3, "lr_warmup_steps": 4})
    trainer.ensure_roles({"critic": critic, "ref": ModelRole("ref", str(tiny_checkpoint), False)})
    assert (trainer.learning_rate(), trainer.learning_rate("critic")) == (1e-2, 2.5e-4)
    trainer.set_learning_rate(3e-4)
    assert trainer.train([row(ROWS[0])], sft_loss_fn)["lr"] == 3e-4
    assert trainer.learning_rate("critic") == 2.5e-4
    with pytest.raises(EngineError, match="role 'ref' is frozen"):
        trainer.learning_rate("ref")
    with pytest.raises(ValueError, match="finite and not negative, got -1"):
        trainer.set_learning_rate(-1.0)


def test_errors_explain_misuse_of_roles(trainer, tiny_checkpoint):
    with pytest.raises(UsageError, match=r"key 'ref' has ModelRole\(name='critic'\)"):
        trainer.ensure_roles({"ref": ModelRole("critic", str(tiny_checkpoint), False)})
    trainer.ensure_roles({"critic": ModelRole("critic", str(tiny_checkpoint), True)})
    with pytest.raises(ValueError, match="row 0 lacks returns or values"):
        trainer.train_values("critic", [row(ROWS[0])], mini_bs=2)
    trainer.drop_role("critic")
    with pytest.raises(EngineError, match=r"no role 'critic' \(loaded roles: actor\)"):
        trainer.score_values("critic", ROWS)


def test_a_classifier_is_trained_saved_and_loaded_by_transformers(tiny_checkpoint, tmp_path):
    rows = [row([5, 9, *answer]) for answer in ([30, 31], [40], [30], [40, 41])]
    config = {"optimizer": {"lr": 1e-3}, "runtime": {"trains": "reward"}}
    with open_trainer(tiny_checkpoint, **config) as trainer:
        for _ in range(10):
            stats = trainer.train(rows, reward_model_loss_fn, mini_bs=2)
        assert stats["rm_accuracy"] == 1.0
        saved = trainer.save_checkpoint(str(tmp_path / "rm"))
        scores = trainer.score_rewards("actor", [r.tokens for r in rows])
        with pytest.raises(EngineError, match="cannot generate"):
            trainer.begin_rollout_session()
        with pytest.raises(EngineError, match="role 'actor' predicts rewards, not log-probs"):
            trainer.score_logprobs("actor", ROWS)
    module = AutoModelForSequenceClassification.from_pretrained(saved)
    with torch.no_grad():
        assert [float(module(torch.tensor([r.tokens])).logits) for r in rows] == pytest.approx(scores, abs=1e-5)


def test_an_unknown_kind_of_training_is_refused():
    with pytest.raises(UsageError, match="trains must be one of policy, reward, nothing, got 'critic'"):
        Trainer(1, "x", custom_config=ArenoConfig(runtime={"trains": "critic"}))


# -- sessions and shutdown ---------------------------------------------------------------------------------------------


def test_closing_inside_a_session_and_twice_leaves_nothing_behind(tiny_checkpoint):
    trainer = open_trainer(tiny_checkpoint)
    with trainer.rollout_session(sampling_params=SAMPLING, proxy=False):
        trainer.rollout_token_batch([[5, 6]], 1, SAMPLING)
        trainer.close()
    trainer.close()
    with pytest.raises(EngineError, match="not initialized"):
        trainer.get_tokenizer()
    trainer.init()  # a closed trainer can be reopened, without the old session
    with pytest.raises(EngineError, match="outside a session"):
        trainer.rollout_token_batch([[5, 6]], 1, SAMPLING)
    with trainer.rollout_session(sampling_params=SAMPLING, proxy=False):
        assert trainer.rollout_token_batch([[5, 6]], 1, SAMPLING)
    trainer.close()


def test_text_rollouts_also_have_an_async_form(tiny_checkpoint):
    async def main(trainer):
        async with trainer.rollout_session(sampling_params=SAMPLING, proxy=False):
            return await asyncio.gather(*(trainer.rollout_batch_async([p], 2, SAMPLING) for p in ("a b", "c d e")))

    with open_trainer(tiny_checkpoint) as trainer:
        first, second = asyncio.run(main(trainer))
    assert [len(results[0].sequences) for results in (first, second)] == [2, 2]


def test_finish_step_reports_the_times_of_a_step_without_a_policy_update(trainer):
    with trainer.rollout_session(sampling_params=SAMPLING, proxy=False):
        result = trainer.rollout_token_batch([[5, 6]], 1, SAMPLING)[0].sequences[0]
    times = trainer.finish_step()
    assert times["step_rollout_time_s"] > 0
    assert times["step_e2e_time_s"] >= times["step_rollout_time_s"]
    sequence = row(
        [5, 6, *result.resp_tokens],
        logprobs=[0.0, 0.0, *result.resp_logprobs],
        advantages=[1.0] * (2 + len(result.resp_tokens)),
    )
    assert trainer.train([sequence], gspo_loss_fn)["step_rollout_time_s"] == 0.0


def test_evaluating_reports_rewards_and_does_not_affect_later_rollouts(trainer):
    rows = [{"prompt": f"What is {n} plus 1?", "solutions": [str(n + 1)]} for n in range(5)]
    seen = []

    def reward_fn(record):
        seen.append(record)
        return float(record.metadata["sample_index"] == 0)

    metrics = trainer.evaluate(rows, reward_fn, sampling_params=SAMPLING, n_samples=4)
    assert metrics["rewards_mean"] == metrics["pass@1"] == 0.25
    assert metrics["pass@4"] == 1.0
    assert [record.answer for record in seen[::4]] == [row["solutions"] for row in rows]
    with trainer.rollout_session(sampling_params=SAMPLING, proxy=False):
        after = trainer.rollout_token_batch([[5, 6, 7]], 2, SAMPLING)
    with open_trainer(trainer.model_path) as fresh, fresh.rollout_session(sampling_params=SAMPLING, proxy=False):
        alone = fresh.rollout_token_batch([[5, 6, 7]], 2, SAMPLING)
    assert [s.resp_tokens for s in after[0].sequences] == [s.resp_tokens for s in alone[0].sequences]


def test_there_is_one_replica(trainer):
    assert trainer.dp_size() == 1


def test_an_agent_batch_lists_each_prompt_once_per_sample():
    items = [PromptItem(f"p{i}", None, [i], {"id": i}) for i in range(2)]
    batch = AgentBatch.from_prompt_batch(PromptBatch(items), n_samples=3)
    assert len(batch) == 6
    tasks = [(t.prompt, t.prompt_index, t.sample_index, t.record["id"]) for t in batch.iter_samples()]
    assert tasks == [(f"p{i}", i, s, i) for i in range(2) for s in range(3)]
    with pytest.raises(ValueError, match="1 records, 2 prompts and 1 token lists"):
        AgentBatch([{}], ["a", "b"], [[1]], 1)
    with pytest.raises(ValueError, match="n_samples must be at least 1, got 0"):
        AgentBatch([], [], [], 0)
