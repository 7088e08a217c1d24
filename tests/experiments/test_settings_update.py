"""Settings of the policy update: each one changes the result, which equals that of its formula in float64."""

from __future__ import annotations

import math
import re
import shutil
import statistics
from functools import partial
from typing import Any

import pytest
import torch

from areno.algorithms.gmpo import GMPOOptions, gmpo_loss_fn
from areno.config.experiment import GRPOConfig, config_from
from areno.errors import UsageError
from areno.experiments.trainers.update import loss_of, policy_loss_of, shaping_of, with_version
from areno.loss_fns import PolicyLossConfig, RejectionSampling, gspo_loss_fn, policy_loss_fn
from areno.loss_fns.shaping import shape_advantages
from areno.types import TrainSequence, WeightedReward
from tests.config.experiment.samples import RL, changed
from tests.experiments.trainer_stage import Run, differ, run_kind, settings_of_kind, trainer_of
from tests.loss_fns import written_out, written_out_family
from tests.loss_fns.packs import VERSION, make_batch
from tests.support.tiny import save_tiny_checkpoint


def config(changes: dict[str, Any]) -> Any:
    return config_from(changed(RL, changes), GRPOConfig)


# -- the loss --------------------------------------------------------------------------------------------------------

DECOUPLED = {"actor.use_decoupled_loss": True, "actor.rejection_sampling": {}}
SAPO = {"actor.use_sapo_loss": True}
TAUGHT = {"teacher.path": "some/teacher", "teacher.rollout": {}}


def rejecting(**more: Any) -> PolicyLossConfig:
    return PolicyLossConfig(use_decoupled_loss=True, rejection_sampling=RejectionSampling(**{"upper": 5.0, **more}))


def rejection_settings(**more: Any) -> dict[str, Any]:
    return {f"actor.rejection_sampling.{name}": value for name, value in more.items()}


LOSSES: list[tuple[dict[str, Any], dict[str, Any], PolicyLossConfig]] = [
    ({}, {"actor.eps_clip": 0.05}, PolicyLossConfig(eps_clip=0.05)),
    ({}, {"actor.eps_clip_higher": 0.9}, PolicyLossConfig(eps_clip_higher=0.9)),
    ({}, {"actor.c_clip": 1.1}, PolicyLossConfig(c_clip=1.1)),
    ({}, {"actor.importance_sampling_level": "sequence"}, PolicyLossConfig(importance_sampling_level="sequence")),
    ({}, SAPO, PolicyLossConfig(use_sapo_loss=True)),
    (SAPO, {"actor.sapo_tau_pos": 3.0}, PolicyLossConfig(use_sapo_loss=True, sapo_tau_pos=3.0)),
    (SAPO, {"actor.sapo_tau_neg": 3.0}, PolicyLossConfig(use_sapo_loss=True, sapo_tau_neg=3.0)),
    ({}, {"actor.use_cispo_loss": True}, PolicyLossConfig(use_cispo_loss=True)),
    ({}, {"actor.use_decoupled_loss": True}, PolicyLossConfig(use_decoupled_loss=True)),
    ({}, DECOUPLED, rejecting()),
    (
        DECOUPLED,
        {"actor.prox_logp_method": "loglinear"},
        PolicyLossConfig(
            use_decoupled_loss=True, rejection_sampling=RejectionSampling(upper=5.0), prox_logp_method="loglinear"
        ),
    ),
    ({"actor.use_decoupled_loss": True}, DECOUPLED | rejection_settings(upper=1.2), rejecting(upper=1.2)),
    (DECOUPLED, rejection_settings(upper=1.2), rejecting(upper=1.2)),
    (DECOUPLED, rejection_settings(lower=0.9), rejecting(lower=0.9)),
    (
        DECOUPLED | rejection_settings(metric="kl_k1"),
        rejection_settings(metric="kl_k1", lower=0.0),
        rejecting(metric="kl_k1", lower=0.0),
    ),
    (
        DECOUPLED | rejection_settings(upper=1.2),
        rejection_settings(action="clamp"),
        rejecting(upper=1.2, action="clamp"),
    ),
    (
        DECOUPLED | rejection_settings(upper=1.2),
        rejection_settings(level="sequence"),
        rejecting(upper=1.2, level="sequence"),
    ),
    (
        DECOUPLED | rejection_settings(upper=1.2, level="sequence"),
        rejection_settings(agg="max"),
        rejecting(upper=1.2, level="sequence", agg="max"),
    ),
    (
        DECOUPLED | rejection_settings(upper=1.2),
        rejection_settings(metric="kl_k2", upper=0.02),
        rejecting(metric="kl_k2", upper=0.02),
    ),
    ({}, TAUGHT, PolicyLossConfig(distill_loss_weight=0.005)),
    (TAUGHT, {"teacher.distill_loss_weight": 0.7}, PolicyLossConfig(distill_loss_weight=0.7)),
    (TAUGHT, {"teacher.rl_loss_weight": 0.3}, PolicyLossConfig(rl_loss_weight=0.3, distill_loss_weight=0.005)),
]


@pytest.mark.parametrize(
    ("base", "changes", "by_hand"), LOSSES, ids=lambda given: ",".join(given) if isinstance(given, dict) else ""
)
def test_each_loss_setting_follows_its_formula(base, changes, by_hand):
    batch = make_batch([6, 5, 7, 4], seed=3, mask_share=1.0, shift=0.4)
    rows = [[token | {"x0": token["x"]} for token in row] for row in batch.rows]

    def loss(given: dict[str, Any]) -> float:
        made = config(given)
        knobs = policy_loss_of(made.actor, made.teacher)
        return float(policy_loss_fn(batch.pack, batch.logprobs, knobs, version=VERSION)[0])

    assert loss(base | changes) == pytest.approx(written_out_family.loss(rows, by_hand, VERSION), rel=1e-6, abs=1e-9)
    assert loss(base | changes) != pytest.approx(loss(base), rel=1e-4)


@pytest.mark.parametrize("kind", ["low_var_kl", "k1", "k2"])
@pytest.mark.parametrize("algorithm", [{}, {"actor.algorithm": "cispo"}, {"actor.algorithm": "grpo"}])
def test_a_kl_term_in_the_loss_adds_its_mean_over_the_tokens(kind, algorithm):
    batch = make_batch([6, 5, 7, 4], seed=3, mask_share=1.0, shift=0.4)

    def loss(given: dict[str, Any]) -> float:
        made = config({"ref": {}, "actor.kl_ctl": 0.0, **algorithm, **given})
        return float(loss_of(made.actor, made.teacher)(batch.pack, batch.logprobs)[0])

    tokens = [token for row in batch.rows for token in row]
    mean = sum(written_out.kl(kind, token["x"], token["ref_logprobs"]) for token in tokens) / len(tokens)
    added = loss({"actor.kl_loss_coef": 0.3, "actor.kl_loss_type": kind}) - loss({})
    assert added == pytest.approx(0.3 * mean, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(
    ("changes", "by_hand"),
    [
        ({"actor.algorithm": "dapo"}, partial(policy_loss_fn, knobs=PolicyLossConfig(eps_clip_higher=0.28))),
        ({"actor.algorithm": "dapo", "actor.eps_clip_higher": None}, partial(policy_loss_fn, knobs=PolicyLossConfig())),
        ({"actor.algorithm": "icepop"}, partial(policy_loss_fn, knobs=rejecting(lower=0.5))),
        ({"actor.algorithm": "cispo"}, partial(policy_loss_fn, knobs=PolicyLossConfig(use_cispo_loss=True))),
        ({"actor.algorithm": "sapo", "actor.sapo_tau_neg": 3.0},
         partial(policy_loss_fn, knobs=PolicyLossConfig(use_sapo_loss=True, sapo_tau_neg=3.0))),
        ({"actor.algorithm": "gmpo", "actor.algorithm_options": {"gmpo_clip_eps": 0.1}},
         partial(gmpo_loss_fn, knobs=GMPOOptions(0.1))),
        ({"actor.algorithm": "gspo", "actor.algorithm_options": {"gspo_clip_eps": 0.1}},
         partial(gspo_loss_fn, clip_eps=0.1)),
    ],
)  # fmt: skip
def test_an_algorithm_name_selects_its_loss(changes, by_hand):
    batch, made = make_batch([6, 5, 7, 4], seed=3, mask_share=1.0, shift=0.4), config(changes)
    loss = with_version(loss_of(made.actor, made.teacher), VERSION)
    assert loss(batch.pack, batch.logprobs)[0] == by_hand(batch.pack, batch.logprobs)[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"actor.algorithm": "gmppo"}, "actor.algorithm 'gmppo' is unknown (did you mean gmpo?)"),
        ({"actor.algorithm": "dpo"}, "actor.algorithm dpo needs a different trainer"),
        ({"actor.algorithm_options": {"gmpo_clip_eps": 0.1}}, "has no effect without an algorithm"),
        ({"actor.algorithm": "gmpo", "actor.eps_clip": 0.1}, "actor.eps_clip has no effect with actor.algorithm gmpo"),
        ({"actor.algorithm": "gmpo", "actor.algorithm_options": {"gmpo_clip_eps": 0}},
         "actor.algorithm_options.gmpo_clip_eps must be positive, got 0"),
        ({"actor.algorithm": "gmpo", "actor.algorithm_options": {"gmpo_clip": 0.1}}, "did you mean gmpo_clip_eps?"),
        ({"actor.algorithm": "cispo", "actor.algorithm_options": {"eps_clip": 0.1}}, "eps_clip is not an option"),
    ],
)  # fmt: skip
def test_an_algorithm_that_cannot_be_used_says_why(changes, expected):
    with pytest.raises(UsageError, match=re.escape(expected)):
        config(changes)


# -- from rewards to advantages --------------------------------------------------------------------------------------

REWARDS, GROUPS, LENGTHS = [1.0, 0.0, 0.5, 3.0], [0, 0, 1, 1], [3, 6, 4, 5]
CUT = [False, True, False, False]
OLD = [[-0.5 - 0.1 * place - 0.2 * row for place in range(n)] for row, n in enumerate(LENGTHS)]
REFERENCE = [[x + 0.3 * math.sin(place + row) for place, x in enumerate(xs)] for row, xs in enumerate(OLD)]


def rows_to_shape() -> list[TrainSequence]:
    return [
        TrainSequence(
            prompt_mask=[True, True] + [False] * n,
            tokens=[1] * (n + 2),
            logprobs=[0.0, 0.0, *OLD[i]],
            ref_logprobs=[0.0, 0.0, *REFERENCE[i]],
            reward=REWARDS[i],
            group=GROUPS[i],
            truncated=CUT[i],
        )
        for i, n in enumerate(LENGTHS)
    ]


def normalized(values: list[float], groups: list[int], norm: dict[str, Any]) -> list[float]:
    """(x - mu) / (sigma + eps); sigma is the root mean square of x - mu over the batch or the group."""

    def peers(of: list[float], level: str, index: int) -> list[float]:
        return [v for v, g in zip(of, groups, strict=True) if level == "batch" or g == groups[index]]

    centered = list(values)
    for index, value in enumerate(values if norm["mean_level"] else []):
        near = peers(values, norm["mean_level"], index)
        middle = (sum(near) - value) / (len(near) - 1) if norm["mean_leave1out"] else sum(near) / len(near)
        centered[index] = value - middle
    if not norm["std_level"]:
        return centered
    found = []
    for index, value in enumerate(centered):
        near = peers(centered, norm["std_level"], index)
        spread = math.sqrt(sum(v * v for v in near) / (len(near) - int(norm["std_unbiased"])))
        found.append(value / (spread + norm["eps"]))
    return found


def expected(given: dict[str, Any]) -> list[list[float]]:
    knobs: dict[str, Any] = {"bias": 0.0, "scaling": 1.0, "clip": 20.0, "kl_ctl": 0.0, "kl_estimator": "k1"}
    knobs |= {"discount": 1.0, "gae_lambda": 1.0, "mask": False, "overlong": None, "norm": None, **given}
    rewards = []
    for reward, n in zip(REWARDS, LENGTHS, strict=True):
        if knobs["overlong"]:
            tail, factor, most = knobs["overlong"]
            reward += min(-(n - (most - tail)) / tail * factor, 0.0)
        rewards.append(max(-knobs["clip"], min(knobs["clip"], (reward + knobs["bias"]) * knobs["scaling"])))
    if knobs["norm"]:
        rewards = normalized(rewards, GROUPS, knobs["norm"])
    found = []
    for row, reward in enumerate(rewards):
        d = [a - b for a, b in zip(OLD[row], REFERENCE[row], strict=True)]
        kinds = {"k1": d, "k2": [x * x / 2 for x in d], "k3": [math.exp(-x) - 1 + x for x in d]}
        tokens = [-knobs["kl_ctl"] * x for x in kinds[knobs["kl_estimator"]]]
        left_out = knobs["mask"] and CUT[row]
        tokens[-1] += 0.0 if left_out else reward
        carried, advantages = 0.0, []
        for token in reversed(tokens):
            carried = token + knobs["discount"] * knobs["gae_lambda"] * carried
            advantages.insert(0, carried)
        found.append([0.0] * len(tokens) if left_out else advantages)
    return found


def norm_of(**more: Any) -> dict[str, Any]:
    plain = {"mean_level": "batch", "mean_leave1out": False, "std_level": "batch", "std_unbiased": True, "eps": 1e-5}
    return plain | more


def norm_case(**more: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return {"actor.reward_norm": {}}, {"actor.reward_norm": more}, {"norm": norm_of(**more)}


OVERLONG = {"actor.overlong_reward_penalty": True, "actor.overlong_tokens": 3, "actor.overlong_penalty_factor": 1.0}
SIX_TOKENS = {"gconfig.max_new_tokens": 6}
KL = {"ref": {}, "actor.kl_ctl": 0.1}
SHAPES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {"actor.reward_bias": -0.4}, {"bias": -0.4}),
    ({}, {"actor.reward_scaling": 2.5}, {"scaling": 2.5}),
    ({}, {"actor.reward_clip": 0.7}, {"clip": 0.7}),
    (SIX_TOKENS, OVERLONG, {"overlong": (3, 1.0, 6)}),
    (SIX_TOKENS | OVERLONG, {"actor.overlong_tokens": 4}, {"overlong": (4, 1.0, 6)}),
    (SIX_TOKENS | OVERLONG, {"actor.overlong_penalty_factor": 0.3}, {"overlong": (3, 0.3, 6)}),
    ({}, {"actor.mask_no_eos_with_zero": True, "actor.reward_bias": 1.0}, {"mask": True, "bias": 1.0}),
    ({}, {"actor.discount": 0.8}, {"discount": 0.8}),
    ({}, {"actor.gae_lambda": 0.6}, {"gae_lambda": 0.6}),
    ({}, KL, {"kl_ctl": 0.1}),
    (KL, {"actor.kl_estimator": "k2"}, {"kl_ctl": 0.1, "kl_estimator": "k2"}),
    (KL, {"actor.kl_estimator": "k3"}, {"kl_ctl": 0.1, "kl_estimator": "k3"}),
    norm_case(mean_level="group"),
    norm_case(mean_level=None),
    norm_case(std_level="group"),
    norm_case(std_level=None),
    norm_case(mean_leave1out=True, std_level=None),
    norm_case(std_unbiased=False),
    norm_case(eps=0.5),
]


def test_parts_of_a_reward_are_normalized_when_asked_for():
    """Each part is (x - mean) / deviation over its group, times its weight; with no further norm, the sum is the advantage."""

    def advantages(**reward: Any) -> list[float]:
        rows = rows_to_shape()
        for row, number in zip(rows, numbers, strict=True):
            row.reward = WeightedReward(number, {"a": number, "b": number**2})
        given = {f"reward.{name}": value for name, value in reward.items()} | {"actor.reward_norm": None}
        made = config(given)
        shape_advantages(rows, shaping_of(made.actor, made.reward))
        return [row.advantages[2] for row in rows]

    def scores(values: list[float]) -> list[float]:
        groups = [[v for v, g in zip(values, GROUPS, strict=True) if g == group] for group in GROUPS]
        spreads = [statistics.pstdev(group) for group in groups]
        moved = [value - statistics.fmean(group) for value, group in zip(values, groups, strict=True)]
        return [m / s if s else 0.0 for m, s in zip(moved, spreads, strict=True)]

    numbers = [0.5 * (index + 1) for index in range(len(GROUPS))]
    parts = zip(scores(numbers), scores([n**2 for n in numbers]), strict=True)
    assert advantages(normalize_parts=True, weights={"b": 0.5}) == pytest.approx([a + 0.5 * b for a, b in parts])
    assert advantages(weights={"b": 0.5}) == numbers


@pytest.mark.parametrize(("base", "changes", "knobs"), SHAPES, ids=lambda given: ",".join(given))
def test_each_reward_setting_follows_its_formula(base, changes, knobs):
    def advantages(given: dict[str, Any]) -> list[list[float]]:
        rows = rows_to_shape()
        shape_advantages(rows, shaping_of(config(given).actor, config(given).reward))
        return [row.advantages[2:] for row in rows]

    found = advantages(base | changes)
    for row, wanted in zip(found, expected(knobs), strict=True):
        assert row == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    assert found != advantages(base)


# -- steps and other models, in runs ---------------------------------------------------------------------------------


@pytest.fixture
def rl(tiny_checkpoint, tmp_path):
    numbers = iter(range(1000))

    def run(changes: dict[str, Any]) -> Run:
        return run_kind("rl", tiny_checkpoint, tmp_path / str(next(numbers)), changes)

    return run


CRITIC = {"critic.optimizer.lr": 0.05, "critic.optimizer.weight_decay": 0.0}


def steps_of(trainer: Any, role: str) -> int:
    return int(trainer.engine.role(role).trained_by().steps)


def test_an_update_has_the_configured_number_of_optimizer_steps(tiny_checkpoint, tmp_path):
    given = {**CRITIC, "actor.ppo_n_minibatches": 2, "critic.ppo_n_minibatches": 4, "total_train_steps": 2}
    given |= {"actor.ppo_n_epochs": 3, "critic.ppo_n_epochs": 2}
    with trainer_of(settings_of_kind("rl", tiny_checkpoint, tmp_path, given)) as trainer:
        trainer.train()
        assert (steps_of(trainer, "actor"), steps_of(trainer, "critic")) == (12, 16)


def test_a_resumed_run_loads_its_critic_only_from_the_checkpoint(tiny_checkpoint, tmp_path):
    base = shutil.copytree(tiny_checkpoint, tmp_path / "base")
    given = {**CRITIC, "critic.path": str(base), "recover.mode": "auto", "recover.freq_steps": 1}
    for steps in (1, 2):
        run = settings_of_kind("rl", tiny_checkpoint, tmp_path, {**given, "total_train_steps": steps})
        with trainer_of(run) as trainer:
            trainer.train()
            assert steps_of(trainer, "critic") == steps * run.critic.ppo_n_minibatches
        (base / "model.safetensors").unlink(missing_ok=True)


def test_value_clipping_changes_the_critic_loss(rl):
    """In the second optimizer step of an update, values differ from the old ones, so that clipping takes effect."""
    losses = {
        eps: rl({**CRITIC, "critic.ppo_n_minibatches": 2, "critic.eps_clip": eps}).column("ppo_critic/loss")
        for eps in (1e-4, 100.0)
    }
    assert losses[1e-4][0] != losses[100.0][0]


def test_truncated_answers_are_left_out_of_both_updates(rl):
    """Every answer is truncated, so nothing is trained."""
    given = {**CRITIC, "gconfig.ignore_eos": True}
    assert rl(given).column("ppo_critic/loss")
    masked = rl({**given, "actor.mask_no_eos_with_zero": True})
    assert not masked.column("ppo_critic/loss")
    assert not masked.column("ppo_actor/update/loss")


def test_log_probs_are_recomputed_when_asked_for(rl):
    name = "ppo_actor/update/compute_logp/kl_div_direct/avg"
    assert not rl({}).column(name)
    assert rl({"actor.recompute_logprob": True}).column(name)[0] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("bound", [1e-9, 1e9])
def test_tokens_are_masked_by_their_second_moment(tiny_checkpoint, tmp_path, bound):
    given = {**DECOUPLED, "actor.m2_threshold": bound}
    with trainer_of(settings_of_kind("rl", tiny_checkpoint, tmp_path, given)) as trainer:
        trainer.plan_steps()
        rows = rows_to_shape()
        for row in rows:
            row.versions = [-1, -1] + [0] * (len(row.tokens) - 2)
        metrics = trainer._update(rows, next(trainer.steps()).at)
    assert (metrics["ppo_actor/update/m2_filtered_fraction"] > 0.5) == (bound < 1)


@pytest.mark.parametrize("engine_type", ["rollout", "train"])
def test_the_actor_is_distilled_from_the_teacher_at_its_path(rl, tmp_path, engine_type):
    other = save_tiny_checkpoint(tmp_path / "other", seed=7)
    given = {"teacher.engine_type": engine_type, f"teacher.{engine_type}": {}, "teacher.distill_loss_weight": 1.0}
    far = rl({**given, "teacher.path": str(other)}).column("ppo_actor/update/rkl_loss/avg")
    near = rl({**given, "teacher.path": "${actor.path}"}).column("ppo_actor/update/rkl_loss/avg")
    assert near[0] == pytest.approx(0, abs=1e-4)
    assert abs(far[0]) > 1e-3


def test_a_reference_scores_in_its_own_micro_batches(tiny_checkpoint, tmp_path):
    passes = {}
    for most in (64, 4096):
        given = {"ref.mb_spec.max_tokens_per_mb": most, "actor.kl_ctl": 0.1, "total_train_steps": 1}
        with trainer_of(settings_of_kind("rl", tiny_checkpoint, tmp_path / str(most), given)) as trainer:
            counted: list[int] = []
            body = trainer.engine.role("ref").model.module.model
            body.register_forward_hook(lambda *_, counted=counted: counted.append(1))
            trainer.train()
            passes[most] = len(counted)
    assert passes[64] > passes[4096] > 0


def test_sgd_and_adam_give_different_weights(rl):
    assert differ(rl({}), rl({"actor.optimizer.type": "sgd"}))


def test_weights_are_float32(rl):
    assert all(value.dtype == torch.float32 for value in rl({}).weights.values())
