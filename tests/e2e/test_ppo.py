"""PPO: values against plain transformers, the order of its updates, warm-up, resume, and learning with a critic."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import string
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from areno.cli.main import main
from areno.errors import EngineError
from areno.loss_fns.shaping import RewardShaping, shape_advantages
from areno.types import TrainSequence
from tests.e2e.test_learning import NEW_TOKENS, kinds_task, mean_reward, train
from tests.e2e.test_resume import metrics
from tests.support.cli import LOADER, areno, kill, start, task_arguments, wait_for_text, without_times, write_task
from tests.support.loops import equal, open_loop, save_classifier, step, weights_of
from tests.support.tiny import save_tiny_checkpoint

# Nearly a third of the vocabulary ends a response, so that some responses finish and some are truncated.
ENDS = tuple(range(100, 200))
GAMMA, LAM = 0.9, 0.8


@pytest.fixture(scope="module")
def critic_checkpoint(tmp_path_factory):
    """A separate critic, whose body differs from the policy's, with a random head."""
    folder = tmp_path_factory.mktemp("critic")
    return save_classifier(folder / "critic", save_tiny_checkpoint(folder / "body", seed=7, sharpen=2.0))


def ppo_loop(checkpoint, folder, **options):
    settings = {"critic_warmup_steps": 0, "critic_lr": 1e-2, "gamma": GAMMA, "lam": LAM, "stop_token_ids": ENDS}
    return open_loop("ppo", checkpoint, folder, **{**settings, **options})


# -- values, returns, advantages ---------------------------------------------------------------------------------------


@torch.inference_mode()
def values_by_transformers(critic, tokens):
    """The value head on the hidden states of the critic's body, in float64: entry i after reading tokens 0 to i."""
    body = AutoModel.from_pretrained(critic, dtype=torch.float64).eval()
    head = load_file(critic / "model.safetensors")["score.weight"].double()
    return (body(input_ids=torch.tensor([tokens])).last_hidden_state[0] @ head[0]).tolist()


def plain_gae(values_before, reward, after_the_end):
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, written out term by term."""
    length = len(values_before)
    rewards = [0.0] * (length - 1) + [reward]
    following = [*values_before[1:], after_the_end]
    deltas = [r + GAMMA * v - now for r, v, now in zip(rewards, following, values_before, strict=True)]
    return [sum((GAMMA * LAM) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]


@pytest.mark.parametrize("bootstrap", [False, True])
def test_advantages_and_returns_are_gae_over_the_critics_values(
    bootstrap, tmp_path, tiny_checkpoint, critic_checkpoint
):
    options = {
        "critic_ckpt": str(critic_checkpoint),
        "whiten_advantages": False,
        "bootstrap_truncated": bootstrap,
    }
    with ppo_loop(tiny_checkpoint, tmp_path, batch_size=6, **options) as loop:
        outcome = step(loop)
    assert {row.truncated for row in outcome.rows} == {True, False}
    for row in outcome.rows:
        value = values_by_transformers(critic_checkpoint, row.tokens)
        prompt = row.prompt_mask.count(True)
        before = value[prompt - 1 : -1]
        # Only a truncated response can have a value after its last token.
        expected = plain_gae(before, row.reward, value[-1] if bootstrap and row.truncated else 0.0)
        assert row.values == pytest.approx([0.0] * prompt + before, abs=1e-4)
        assert row.advantages == pytest.approx([0.0] * prompt + expected, abs=1e-4)
        returns = [advantage + v for advantage, v in zip(expected, before, strict=True)]
        assert row.returns == pytest.approx([0.0] * prompt + returns, abs=1e-4)
    assert max(abs(v) for row in outcome.rows for v in row.values) > 0.5


@pytest.mark.parametrize("bootstrap", [False, True])
def test_a_truncated_one_token_response_earns_its_reward_and_its_bootstrapped_value_if_enabled(bootstrap):
    row = TrainSequence([True, True, False], [5, 6, 7], reward=2.0, truncated=True)
    shaping = RewardShaping(discount=0.5, gae_lambda=0.9, bootstrap_truncated=bootstrap)
    shape_advantages([row], shaping, [[0.1, 0.25, 4.0]])
    gained = 2.0 + (0.5 * 4.0 if bootstrap else 0.0)
    assert row.values == [0.0, 0.0, 0.25]
    assert row.returns == [0.0, 0.0, gained]
    assert row.advantages == [0.0, 0.0, gained - 0.25]


def test_gae_skips_tokens_that_are_not_trained_on():
    # A tool result between two spans: GAE continues from the first span to the second, as if nothing were between them.
    tokens, prompt = [1, 2, 3, 4, 5, 6], [True, False, False, True, True, False]
    row = TrainSequence(prompt, tokens, reward=1.0)
    values = [0.1, 0.2, 9.0, 9.0, 0.5, 7.0]
    shape_advantages([row], RewardShaping(discount=GAMMA, gae_lambda=LAM), [values])
    expected = plain_gae([0.1, 0.2, 0.5], 1.0, 0.0)
    assert [row.advantages[i] for i in (1, 2, 5)] == pytest.approx(expected)
    assert [row.values[i] for i in (1, 2, 5)] == [0.1, 0.2, 0.5]
    assert [row.returns[i] for i in (0, 3, 4)] == [0.0, 0.0, 0.0]


def trainable(rows, name):
    return torch.tensor(
        [v for row in rows for v, prompt in zip(getattr(row, name), row.prompt_mask, strict=True) if not prompt],
        dtype=torch.float64,
    )


def test_whitening_standardizes_the_advantages_of_the_step_and_not_the_returns(
    tmp_path, tiny_checkpoint, critic_checkpoint
):
    def rows(whiten):
        options = {"critic_ckpt": str(critic_checkpoint), "whiten_advantages": whiten}
        with ppo_loop(tiny_checkpoint, tmp_path / str(whiten), **options) as loop:
            return step(loop)

    raw, white = rows(False), rows(True)
    advantages = trainable(raw.rows, "advantages")
    expected = (advantages - advantages.mean()) / advantages.std(correction=0)
    assert torch.allclose(trainable(white.rows, "advantages"), expected, atol=1e-9)
    assert torch.equal(trainable(white.rows, "returns"), trainable(raw.rows, "returns"))
    assert white.stats["gae_advantage_mean"] == pytest.approx(float(advantages.mean()))
    assert white.stats["normalized_advantage_std"] == pytest.approx(1.0)
    assert white.stats["normalized_advantage_max"] == pytest.approx(float(expected.max()))
    assert raw.stats["normalized_advantage_min"] == raw.stats["gae_advantage_min"]


def test_statistics_of_the_critic_match_its_rows(tmp_path, tiny_checkpoint, critic_checkpoint):
    with ppo_loop(tiny_checkpoint, tmp_path, critic_ckpt=str(critic_checkpoint), update_epochs=1) as loop:
        outcome = step(loop)
    stats, rows = outcome.stats, outcome.rows
    values, returns = trainable(rows, "values"), trainable(rows, "returns")
    unexplained = (returns - values).var(correction=0) / returns.var(correction=0)
    assert stats["critic_explained_variance"] == pytest.approx(1 - float(unexplained))
    # With one pass, the critic still predicts its old values when the loss is computed.
    error = (values - returns).square().mean()
    assert stats["critic_value_mse"] == pytest.approx(float(error), rel=1e-4)
    assert stats["critic_value_loss"] == pytest.approx(0.25 * float(error), rel=1e-4)
    assert stats["critic_value_pred_mean"] == pytest.approx(float(values.mean()), rel=1e-4)
    assert stats["critic_value_target_mean"] == pytest.approx(float(returns.mean()), rel=1e-4)
    assert stats["critic_value_clipfrac"] == 0
    for name, tensor in (("critic_value", values), ("return", returns), ("old_logprob", trainable(rows, "logprobs"))):
        assert stats[f"{name}_mean"] == pytest.approx(float(tensor.mean()))
        assert stats[f"{name}_std"] == pytest.approx(float(tensor.std(correction=0)))
        assert stats[f"{name}_min"] == float(tensor.min())
    for name in ("critic_train_time_s", "critic_value_forward_time_s", "ref_logprob_forward_time_s"):
        assert stats[name] > 0
    assert stats["actor_train_wall_time_s"] > 0
    assert abs(stats["ratio_mean"] - 1) < 1e-5
    assert stats["ratio_std"] < 1e-5


def test_equal_returns_have_no_explained_variance(tmp_path, tiny_checkpoint):
    # A critic that starts from the policy has a head of zeros, so the returns equal the rewards.
    with ppo_loop(tiny_checkpoint, tmp_path, reward=lambda record: 1.0, gamma=1.0, lam=1.0) as loop:
        outcome = step(loop)
    assert {value for row in outcome.rows for value in row.returns} == {0.0, 1.0}
    assert "critic_explained_variance" not in outcome.stats
    assert outcome.stats["critic_value_max"] == 0.0


# -- the order and number of updates -----------------------------------------------------------------------------------


def test_critic_and_policy_train_on_the_same_passes_and_the_critic_first(tmp_path, tiny_checkpoint):
    seen = []
    with ppo_loop(tiny_checkpoint, tmp_path, update_epochs=2, update_minibatches=2, value_clip_eps=0.05) as loop:

        def recorded(name, rows_at):
            real = getattr(loop.instance, name)

            def call(*arguments, **keywords):
                seen.append((name, [id(row) for row in arguments[rows_at]], keywords))
                return real(*arguments, **keywords)

            setattr(loop.instance, name, call)

        recorded("train_values", 1)
        recorded("train", 0)
        stats = step(loop).stats
    assert [name for name, _, _ in seen] == ["train_values"] * 4 + ["train"] * 4
    assert [rows for _, rows, _ in seen[:4]] == [rows for _, rows, _ in seen[4:]]
    assert seen[0][2] == {"cliprange_value": 0.05, "value_loss_coef": 0.5}
    assert stats["critic_value_clipfrac"] > 0
    assert stats["ratio_std"] > 1e-3
    assert stats["actor_train_skipped"] == 0


def test_warm_up_trains_only_the_critic(tmp_path, tiny_checkpoint):
    with ppo_loop(tiny_checkpoint, tmp_path, critic_warmup_steps=2) as loop:
        policy = weights_of(loop.instance)
        critics, outcomes = [weights_of(loop.instance, "critic")], []
        for _ in range(2):
            outcomes.append(step(loop))
            critics.append(weights_of(loop.instance, "critic"))
            assert equal(policy, weights_of(loop.instance))
        assert loop.instance.backend.version == 0
        third = step(loop)
        assert not equal(policy, weights_of(loop.instance))
    assert not equal(critics[0], critics[1])
    assert not equal(critics[1], critics[2])
    for outcome in outcomes:
        assert outcome.stats["actor_train_skipped"] == 1
        assert outcome.stats["critic_value_loss"] > 0
        assert outcome.stats["step_rollout_time_s"] > 0
        assert 0 < outcome.stats["step_train_time_s"] <= outcome.stats["critic_train_time_s"]
        assert "policy_loss" not in outcome.stats
    assert third.stats["actor_train_skipped"] == 0
    policy_s = third.stats["actor_train_wall_time_s"]
    assert policy_s < third.stats["step_train_time_s"] <= policy_s + third.stats["critic_train_time_s"]
    assert abs(third.stats["ratio_mean"] - 1) < 1e-5


@pytest.mark.parametrize("failing", ["train_values", "finish_step", "train"])
def test_an_error_after_the_critic_has_moved_saves_the_last_complete_step(failing, tmp_path, tiny_checkpoint):
    warm_up = 5 if failing == "finish_step" else 0
    with ppo_loop(tiny_checkpoint, tmp_path, critic_warmup_steps=warm_up) as loop:
        step(loop)
        loop.checkpoint()
        step(loop)
        kept = weights_of(loop.instance, "critic")
        loop._rescue(EngineError("between two steps"))
        real = getattr(loop.instance, failing)

        def fails_after_its_work(*arguments, **keywords):
            real(*arguments, **keywords)
            raise EngineError("the device is gone")

        setattr(loop.instance, failing, fails_after_its_work)
        with pytest.raises(EngineError, match="device is gone") as caught:
            step(loop)
        assert not equal(kept, weights_of(loop.instance, "critic"))
        loop._rescue(caught.value)
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    assert equal(kept, load_file(tmp_path / "checkpoints" / "step_000002" / "critic" / "model.safetensors"))


def test_the_critic_has_its_own_learning_rate_schedule(tmp_path, tiny_checkpoint):
    rates = {"critic_lr": 8e-3, "critic_lr_warmup_steps": 4, "critic_warmup_steps": 1}
    with ppo_loop(tiny_checkpoint, tmp_path, **rates) as loop:
        first, second = step(loop).stats, step(loop).stats
    assert first["critic_lr"] == pytest.approx(2e-3)
    assert second["critic_lr"] == pytest.approx(4e-3)
    assert "lr" not in first
    assert second["lr"] == pytest.approx(1e-2)


def test_the_critics_gradient_norm_is_clipped(tmp_path, tiny_checkpoint):
    with ppo_loop(tiny_checkpoint, tmp_path, critic_grad_clip_norm=1e-3) as loop:
        stats = step(loop).stats
    assert stats["critic_grad_norm"] > 1e-2
    assert stats["critic_grad_norm_clipped"] == pytest.approx(1e-3, rel=1e-2)


def test_without_a_kl_loss_no_reference_is_loaded(tmp_path, tiny_checkpoint):
    with ppo_loop(tiny_checkpoint, tmp_path, use_kl_loss=False) as loop:
        stats = step(loop).stats
        assert sorted(loop.instance.backend.roles) == ["actor", "critic"]
    assert not any(name.startswith("ref_logprob") for name in stats)


# -- whole runs --------------------------------------------------------------------------------------------------------

STEPS = 8
SHORT = ("--critic-warmup-steps", 3, "--critic-lr", "1e-3", "--update-epochs", 2, "--update-minibatches", 2)
SHORT += ("--save-interval", 2, "--reward-workers", 1)


def assert_same_run(whole, resumed, steps):
    records = [[without_times(record) for record in metrics(folder)] for folder in (whole, resumed)]
    assert [record["step"] for record in records[0]] == list(range(steps))
    assert records[0] == records[1]
    for name in ("model.safetensors", "critic/model.safetensors"):
        a, b = (load_file(folder / "checkpoints" / f"step_{steps:06d}" / name) for folder in (whole, resumed))
        assert equal(a, b)
    assert (resumed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


@pytest.mark.long
def test_a_killed_and_resumed_run_is_bit_for_bit_identical(tmp_path, tiny_checkpoint):
    task, run = write_task(tmp_path / "task"), tmp_path / "killed"
    options = (*SHORT, "--max-steps", STEPS)
    whole = areno(*task_arguments("ppo", tiny_checkpoint, task, tmp_path / "whole"), *options)
    assert whole.returncode == 0, whole.stderr
    process = start(*task_arguments("ppo", tiny_checkpoint, task, run), *options)
    wait_for_text(process, f"step 5/{STEPS}")
    time.sleep(random.Random(0).random() * 0.3)
    assert kill(process) == -signal.SIGKILL
    resumed = areno("train", "--resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stderr
    assert_same_run(tmp_path / "whole", run, STEPS)


def test_a_run_resumed_during_warm_up_equals_an_uninterrupted_one(tmp_path, tiny_checkpoint, critic_checkpoint):
    arguments = task_arguments("ppo", tiny_checkpoint, write_task(tmp_path / "task"), tmp_path / "whole")
    base = shutil.copytree(critic_checkpoint, tmp_path / "base")
    arguments = (*arguments, "--critic-ckpt", base)
    assert main([str(part) for part in (*arguments, *SHORT, "--max-steps", 5, "--keep-checkpoints", 3)]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    for later in ("step_000004", "step_000005"):
        shutil.rmtree(tmp_path / "halves" / "checkpoints" / later)
    (base / "model.safetensors").unlink()  # the critic is loaded from the checkpoint only
    assert main(["train", "--resume", str(tmp_path / "halves")]) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "halves", 5)
    assert [record["train/actor_train_skipped"] for record in metrics(tmp_path / "halves")] == [1, 1, 1, 0, 0]


def test_a_run_that_ends_during_warm_up_is_refused_before_the_model_is_loaded(tmp_path, tiny_checkpoint, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint, damaged)
    (damaged / "model.safetensors").write_bytes(b"nothing that could be loaded")
    arguments = task_arguments("ppo", damaged, write_task(tmp_path / "task"), tmp_path / "run")
    options = ("--epochs", 1, "--batch-size", 4)
    assert main([str(part) for part in (*arguments, *options)]) == 2
    assert "the run is 15 (--epochs 1 over 60 rows in batches of 4 (--batch-size))" in capsys.readouterr().err


def test_every_step_is_logged_and_recorded_including_warm_up(tmp_path, tiny_checkpoint):
    task, run = write_task(tmp_path / "task"), tmp_path / "run"
    options = ("--max-steps", 3, "--critic-warmup-steps", 2, "--reward-workers", 1, "--save-interval", 1)
    assert main([str(part) for part in (*task_arguments("ppo", tiny_checkpoint, task, run), *options)]) == 0
    log = (run / "log.txt").read_text()
    for line in (
        f"role=ref stage=init_start trainable=False path={tiny_checkpoint}",
        "role=ref stage=init_end",
        f"role=critic stage=init_start trainable=True path={tiny_checkpoint}",
        "epoch=0 step=0 role=actor stage=rollout_start",
        "role=ref stage=logprob_score_start rows=24",
        "role=ref stage=logprob_score_end rows=24",
        "role=critic stage=value_score_start rows=24",
        "epoch=0 step=0 role=critic stage=train_start rows=24",
        "epoch=0 step=0 role=critic stage=train_end rows=24",
        "epoch=0 step=1 role=critic metric=value_loss value=",
        "epoch=0 step=1 role=actor stage=train_skip",
        "epoch=0 step=2 role=actor stage=train_start",
        "epoch=0 step=2 role=actor stage=train_end",
    ):
        assert line in log, line
    assert len(re.findall(r"areno\.api\.backend\.areno\.backend: time rollout=\d+\.\d{6} train=", log)) == 3
    assert "step=2 role=actor stage=train_skip" not in log
    assert "step=0 role=actor stage=train_start" not in log
    assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == [f"step_{n:06d}" for n in (1, 2, 3)]
    records = metrics(run)
    expected = ["critic_value_loss", "critic_explained_variance", "critic_value_forward_time_s", "return_mean"]
    expected += ["ref_logprob_std", "old_logprob_mean", "gae_advantage_std", "normalized_advantage_max", "reward_mean"]
    for record in records:
        assert {f"train/{name}" for name in expected} <= record.keys()
    assert [record["train/actor_train_skipped"] for record in records] == [1, 1, 0]
    assert events_of(run) == [set(record) - {"step", "time"} for record in records]


def events_of(run):
    """Tags in the TensorBoard events of each step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "events"), size_guidance={"scalars": 0}).Reload()
    tags_of_steps = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            tags_of_steps.setdefault(event.step, set()).add(tag)
    return [tags_of_steps[number] for number in sorted(tags_of_steps)]


PPO = (
    "--no-bootstrap-truncated",
    "--critic-lr",
    "6e-3",
    "--critic-warmup-steps",
    2,
    "--update-epochs",
    2,
    "--update-minibatches",
    2,
)
PPO += ("--n-samples", 4, "--batch-size", 32, "--max-new-tokens", NEW_TOKENS, "--lr-decay-steps", 110)
PPO += ("--no-activation-checkpointing", "--score-micro-bs", 128)


@pytest.mark.long
def test_ppo_learns_from_rewards_to_do_what_the_prompt_asks(tmp_path):
    """Seeds 0 to 4 reach 0.89 to 0.97, with an explained variance of 0.1 to 0.6 during training."""
    checkpoint, rows, held_out = kinds_task(tmp_path)
    options = (*PPO, "--reward-workers", 1, "--max-steps", 28)
    before = mean_reward(checkpoint, held_out)
    after = mean_reward(train("ppo", checkpoint, rows, tmp_path, *options), held_out)
    assert before < 0.15
    assert after > 0.7
    explained = [record["train/critic_explained_variance"] for record in metrics(tmp_path / "run")]
    assert sum(explained[3:15]) / 12 > 0.05


def answer(kind, rng):
    return "".join(rng.choices(string.digits if kind == "digits" else string.ascii_lowercase, k=rng.randint(3, 8)))


@pytest.mark.long
def test_ppo_improves_a_fine_tuned_policy_with_a_reward_model_trained_on_preferences(tmp_path):
    """SFT trains on answers of either kind, then preferences train a judge, then PPO the policy: from 0.45 to 0.9 or more.

    This holds for seeds 0 to 4. The KL term keeps the policy where its judge is reliable: with the default weight, empty
    answers fool the judge.
    """
    checkpoint, rows, held_out = kinds_task(tmp_path)
    rng, kinds = random.Random(0), ("digits", "letters")
    imitate = [{"prompt": row["prompt"], "response": answer(rng.choice(kinds), rng)} for row in rows]
    wanted = [row["prompt"].split()[1] for row in rows]
    pairs = [
        {"prompt": row["prompt"], "chosen": answer(kind, rng), "rejected": answer(kinds[kind == kinds[0]], rng)}
        for row, kind in zip(rows, wanted, strict=True)
    ]
    (tmp_path / "loader.py").write_text(LOADER)

    def run(algo, start, data, *options):
        (tmp_path / f"{algo}.jsonl").write_text("\n".join(map(json.dumps, data)))
        arguments = ["train", "--algo", algo, "--ckpt", start, "--dataset-path", tmp_path / f"{algo}.jsonl"]
        arguments += ["--run-dir", tmp_path / algo, "--mini-bs", 128, *options]
        assert main([str(part) for part in arguments]) == 0
        return max((tmp_path / algo / "checkpoints").iterdir())

    loader = ("--dataset-loader-fn", tmp_path / "loader.py")
    tuned = run("sft", checkpoint, imitate, *loader, "--batch-size", 64, "--lr", "6e-3", "--max-steps", 150)
    judge = run("rm", tuned, pairs, "--batch-size", 64, "--lr", "3e-3", "--max-steps", 60)
    assert metrics(tmp_path / "rm")[-1]["train/rm_accuracy"] > 0.95
    ppo = (*PPO, "--reward-ckpt", judge, "--lr", "3e-3", "--kl-loss-coef", 0.5, "--max-steps", 32)
    improved = run("ppo", tuned, rows, *ppo)
    assert mean_reward(tuned, held_out) < 0.55
    assert mean_reward(improved, held_out) > 0.8
    scores = [record["train/reward_model_raw_reward_mean"] for record in metrics(tmp_path / "ppo")]
    assert scores[-1] > scores[0] + 1
