"""``rollout.return_routed_experts``: from the engine that generates, through workflows and batches, to the update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areno.engine.engine import Engine
from areno.errors import UsageError
from areno.rollouts.conversation.continuation import Turn
from areno.rollouts.conversation.spans import LossMaskPolicy
from areno.rollouts.conversation.trajectory_rows import build_rows, completion_row
from areno.rollouts.trajectory import make_trajectory, samples_of, stack, train_sequences
from areno.types import RolloutSequence
from tests.experiments.trainer_stage import InProcessTrainer, run_kind, settings_of_kind, trainer_of
from tests.support.tiny import save_tiny_checkpoint

NOTHING = 255
ON = {"rollout.return_routed_experts": True}
CHANGED = "ppo_actor/update/routed_experts_changed"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "moe", "qwen3_moe")


def record(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 4, (tokens, 2, 2)).astype(np.uint8)


def answered(tokens, seed=None):
    routed = None if seed is None else record(2 + tokens, seed)
    return completion_row(
        [7, 8, 9], RolloutSequence([5] * tokens, [-1.0] * tokens, versions=[0] * tokens, routed_experts=routed)
    )


def test_trajectories_keep_records_next_to_rows_of_other_lengths_and_without_a_record():
    rows = [answered(4, seed=1), answered(2), answered(6, seed=2)]
    trajectory = stack([make_trajectory([(row, 1.0)]) for row in rows])
    assert trajectory["routed_experts"].dtype == torch.uint8
    assert make_trajectory([(row, 1.0) for row in rows])["routed_experts"].equal(trajectory["routed_experts"])
    assert "routed_experts" not in make_trajectory([(answered(2), 1.0)])
    first, second, third = train_sequences([trajectory], 0)
    for row, seed in ((first, 1), (third, 2)):
        assert len(row.routed_experts) == len(row.tokens)
        assert np.array_equal(row.routed_experts[:-1], record(len(row.tokens) - 1, seed))
        assert (row.routed_experts[-1] == NOTHING).all()
    assert (second.routed_experts == NOTHING).all()
    assert all(isinstance(sample["input_ids"], list) for sample in samples_of(trajectory))


def test_tokens_of_a_conversation_keep_the_record_of_the_request_that_read_them_first():
    texts = {"context_text": "", "anchor": "", "prompt_text": "", "messages": [], "tools": []}
    sampled = {"tokens": [3, 4], "logprobs": [-1.0] * 2, "versions": [0] * 2}
    first = Turn("a", None, [1, 2], **texts, **sampled, routed_experts=record(3, 1))
    second = Turn("b", first, [5], **texts, **sampled, routed_experts=record(6, 2))
    third = Turn("c", second, [6], **texts, **sampled)
    expected = [record(3, 1), record(6, 2)[3:], np.full((1, 2, 2), NOTHING)]
    for turns, missing in (([first, second], 0), ([first, second, third], 3)):
        (row,) = build_rows(turns, LossMaskPolicy(), None)
        filled = [*expected, np.full((missing, 2, 2), NOTHING)]
        assert np.array_equal(row.routed_experts, np.concatenate(filled))
        assert row.routed_experts.dtype == np.uint8


MULTI_TURN = {
    "workflow.path": "multi_turn",
    "workflow.kwargs": {"max_turns": 3},
    "reward.fn": "tests.experiments.plain_rewards.nothing",
    "actor.reward_norm": None,
    "gconfig.max_tokens": 2048,
}


AGENT = {"rollout.agent.agent_cls_path": "tests.experiments.settings_agents.Talker", "gconfig.max_tokens": 2048}
WAYS = {"plain": {}, "scored": {"actor.recompute_logprob": True}, "turns": MULTI_TURN, "agent": AGENT}


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS)
def test_with_equal_weights_training_and_rollout_choose_the_same_experts(checkpoint, tmp_path, changes):
    found = run_kind("rl", checkpoint, tmp_path, {**ON, **changes})
    assert found.column(CHANGED) == [0.0, 0.0]
    assert len(found.column("ppo_actor/update/logp_abs_diff_mean")) == 2


def test_without_the_setting_nothing_is_recorded(checkpoint, tmp_path):
    assert not run_kind("rl", checkpoint, tmp_path).column(CHANGED)


class Perturbed(InProcessTrainer):
    """The replica's routers have other weights than the trainer's."""

    def _start_fleet(self):
        fleet = super()._start_fleet()
        with torch.no_grad():
            for name, weight in fleet._engine.actor.model.module.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    weight.normal_(generator=torch.Generator().manual_seed(1))
        return fleet


def test_the_update_and_the_scores_before_it_follow_the_rollout_and_not_their_own_routers(
    checkpoint, tmp_path, monkeypatch
):
    heard = []
    score = Engine.score_logprobs

    def noted(self, role, rows, *args, routed=None, **kwargs):
        heard.append((role, routed))
        return score(self, role, rows, *args, routed=routed, **kwargs)

    monkeypatch.setattr(Engine, "score_logprobs", noted)
    changes = {**ON, "actor.recompute_logprob": True, "ref": {"path": str(checkpoint)}, "actor.kl_ctl": 0.1}
    config = settings_of_kind("rl", checkpoint, tmp_path, {**changes, "total_train_steps": 1})
    with Perturbed(config) as trainer:
        trainer.train()
        (step,) = [record for record in trainer.run_dir.read_metrics() if CHANGED in record]
    assert step[CHANGED] > 0.1
    given = dict(heard)
    assert given["ref"] is None
    assert all(len(record) for record in given["actor"])


def test_a_model_without_routers_is_refused_before_it_is_loaded(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("areno.engine.engine.load_role", None)
    with pytest.raises(UsageError, match=r"rollout\.return_routed_experts .* is not a mixture-of-experts model"):
        trainer_of(settings_of_kind("rl", tiny_checkpoint, tmp_path, ON))
