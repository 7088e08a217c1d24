"""Effects of the settings of generation, rollout, rewards and workflows in small runs."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areno.errors import ArenoError, RewardError, UsageError
from areno.experiments.trainers.engines import rollout_devices
from areno.experiments.trainers.update import workflow_values
from areno.experiments.trainers.workflows import _reward_call
from areno.rollouts.tasks import RolloutStoppedError
from areno.rollouts.workflows.rlvr import RLVRWorkflow
from areno.types import Request, SamplingParams
from tests.config.experiment.samples import rl as example
from tests.experiments.trainer_stage import PROMPTS, InProcessTrainer, RolloutRun, Run, settings_of_kind
from tests.support.loops import save_classifier

REWARDS = "tests.experiments.plain_rewards."
AGENTS = "tests.experiments.settings_agents."


# -- sampling --------------------------------------------------------------------------------------------------------

ALONE = {"gconfig.n_samples": 1, "actor.reward_norm": None}
SAMPLED: dict[str, Any] = {
    "max_new_tokens": 9,
    "min_new_tokens": 5,
    "temperature": 0.7,
    "top_k": 50,
    "top_p": 0.9,
    "frequency_penalty": 0.25,
    "stop": ["zz"],
    "stop_token_ids": [token for token in range(512) if token != 7],
    "ignore_eos": True,
    "skip_special_tokens": False,
}
GREEDY: dict[str, Any] = {"greedy": True, "max_new_tokens": 90, "ignore_eos": True}


def asked_for(rl: Any, gconfig: dict[str, Any], **more: Any) -> tuple[RolloutRun, list[Request]]:
    """A run, and the requests that its engine received."""
    asked: list[Request] = []

    def watch(trainer: InProcessTrainer) -> None:
        fleet: Any = trainer.fleet
        submit = fleet.submit
        fleet.submit = lambda requests: asked.extend(requests) or submit(requests)

    run = rl({f"gconfig.{name}": value for name, value in gconfig.items()} | more, watch=watch)
    assert asked
    return run, asked


def test_sampling_settings_reach_the_engine_of_a_run(rl):
    """Tests of the engine show what each setting does to answers."""
    run, asked = asked_for(rl, SAMPLED)
    assert all(request.sampling == SamplingParams(**SAMPLED) for request in asked)
    assert {len(answer) for answer in run.answers()} <= {5, 6}  # nearly all tokens stop, but not before the fifth
    run, asked = asked_for(rl, {**GREEDY, "max_tokens": 40}, **ALONE)
    for request in asked:
        assert request.sampling == SamplingParams(**{**GREEDY, "max_new_tokens": 40 - len(request.prompt_tokens)})
    assert {len(row["input_ids"]) for row in run.samples} == {40}


def test_a_group_has_n_samples(rl):
    for samples in (2, 5):
        groups = [t for batch in rl({"gconfig.n_samples": samples}).batches for t in batch.trajectories]
        assert [len(t["rewards"]) for t in groups] == [samples] * 4


WILD = {"gconfig.n_samples": 16, "gconfig.max_new_tokens": 60, "gconfig.temperature": 20.0}


def test_rewards_see_special_tokens_when_asked_for(rl):
    def seen(skip: bool) -> float:
        given = {
            **WILD,
            "gconfig.skip_special_tokens": skip,
            "gconfig.ignore_eos": True,
            "reward.fn": REWARDS + "specials",
        }
        return rl(given).column("rollout/reward/max")[0]

    assert seen(False) > seen(True) == 0


def test_an_evaluation_samples_with_its_own_settings(rl, tmp_path):
    given = {
        "valid_dataset.path": "${train_dataset.path}",
        "valid_dataset.split": "train",
        "valid_dataset.type": "rl",
        "evaluator.freq_steps": 1,
        "eval_gconfig": {"max_new_tokens": 3, "ignore_eos": True, "n_samples": 1, "max_tokens": 128},
    }
    short = rl({**given, "gconfig.ignore_eos": True}).column("eval-rollout/seq_len/max")[0]
    assert (
        rl({**given, "eval_gconfig": None, "gconfig.ignore_eos": True}).column("eval-rollout/seq_len/max")[0]
        == short + 3
    )


# -- how far rollout runs ahead --------------------------------------------------------------------------------------


def peaks(trainer: InProcessTrainer) -> dict[str, int]:
    """Maximum numbers of episodes that ran, and that waited, at once."""
    found = {"running": 0, "enqueued": 0}
    manager = trainer.dispatcher.staleness
    add = manager._add

    def recorded(**changes: int) -> None:
        add(**changes)
        for name in found:
            found[name] = max(found[name], getattr(manager.stat, name))

    manager._add = recorded  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("changes", "name", "most"),
    [
        ({"rollout.max_concurrent_rollouts": 1}, "running", 1),
        ({"rollout.max_concurrent_rollouts": 3}, "running", 3),
        ({"rollout.max_head_offpolicyness": 3, "rollout.queue_size": 2}, "enqueued", 2),
        ({"rollout.max_head_offpolicyness": 3, "rollout.queue_size": 7}, "enqueued", 7),
    ],
)
def test_running_and_waiting_episodes_reach_their_limits(rl, changes, name, most):
    found: list[dict[str, int]] = []
    rl({**changes, "total_train_steps": 3}, watch=lambda trainer: found.append(peaks(trainer)))
    assert found[0][name] == most


def test_rollout_runs_ahead_as_far_as_allowed(rl):
    steps = {"total_train_steps": 4, "total_train_epochs": 2}
    behind = {
        ahead: rl({**steps, "rollout.max_head_offpolicyness": ahead}).column("rollout/staleness/max")
        for ahead in (0, 2)
    }
    assert behind[0] == [0, 0, 0, 0]
    assert 0 < max(behind[2]) <= 2


def test_stale_trajectories_are_dropped_or_regenerated(rl):
    steps = {"total_train_steps": 4, "total_train_epochs": 2, "rollout.max_head_offpolicyness": 3}
    repeats = {}
    for how in ("drop", "regenerate"):
        run = rl({**steps, "rollout.max_staleness": 0, "rollout.on_stale": how})
        assert set(run.column("rollout/staleness/max")) == {0}
        assert run.column("rollout/stale")[-1] > 0
        used = [task for batch in run.batches for task in batch.task_ids]
        repeats[how] = max(used)
    assert repeats["regenerate"] < repeats["drop"]


def test_requests_are_logged_when_asked_for(rl, caplog):
    for on in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "areno.rollouts.engine_client"):
            rl({"rollout.enable_rollout_tracing": on})
        assert any(record.message.startswith("request ") for record in caplog.records) == on


class TrainsOnPrompts(RLVRWorkflow):
    """Marks prompt tokens as trained on."""

    async def arun_group(self, engine: Any, data: dict[str, Any], samples: int) -> Any:
        found = await super().arun_group(engine, data, samples)
        return [{**t, "loss_mask": torch.ones_like(t["loss_mask"])} for t in found]


def built_in(trainer: InProcessTrainer) -> dict[str, Any]:
    """Arguments of the built-in workflows."""
    reward = _reward_call(trainer.config)
    return {"reward_fn": reward, "gconfig": trainer.config.gconfig, "tokenizer": trainer.engine.tokenizer}


def test_trajectories_are_checked_when_asked_for(rl):
    def run(check: bool) -> RolloutRun:
        def own(trainer: InProcessTrainer) -> None:
            train = trainer.train
            workflow = TrainsOnPrompts(**built_in(trainer))
            trainer.train = lambda *_: train(workflow)  # type: ignore[method-assign]

        return rl({"rollout.check_trajectory_format": check}, watch=own)

    assert run(False).steps == 1
    with pytest.raises(RolloutStoppedError, match="a trajectory's entry `loss_mask`"):
        run(True)


def test_trajectories_are_written_when_asked_for(rl):
    assert not (rl().folder / "rollout").exists()
    run = rl({"rollout.dump_to_file": True})
    lines = [
        json.loads(line)
        for path in (run.folder / "rollout/0").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert sorted(line["reward"] for line in lines) == sorted(row["rewards"] for row in run.samples)


def test_a_request_has_a_deadline_and_retries(rl, caplog):
    endless = {"gconfig.max_new_tokens": 4000, "gconfig.max_tokens": 4090, "gconfig.ignore_eos": True, **ALONE}
    endless["train_dataset.batch_size"] = 1
    tries = {}
    for retries in (0, 2):
        caplog.clear()
        with pytest.raises(ArenoError, match=r"rollout\.request_timeout"):
            rl({**endless, "rollout.request_timeout": 0.03, "rollout.request_retries": retries})
        messages = [record.message for record in caplog.records if "retrying request" in record.message]
        tries[retries] = max((int(text.partition("(retry ")[2].partition(" of")[0]) for text in messages), default=0)
    assert tries == {0: 0, 2: 2}


# -- batches ---------------------------------------------------------------------------------------------------------


def test_prompts_outside_of_the_success_band_are_left_out(rl):
    judged = {"reward.fn": REWARDS + "by_row", "actor.reward_norm": None}
    assert rl(judged).column("rollout/filtered") == [0]
    high = rl({**judged, "success_rate_lb": 0.5})
    assert {row["rewards"] for row in high.samples} == {1.0}
    assert high.column("rollout/filtered")[0] > 0
    assert {row["rewards"] for row in rl({**judged, "success_rate_ub": 0.5}).samples} == {0.0}


def test_the_named_filter_selects_the_groups_to_train_on(rl):
    judged = {"reward.fn": REWARDS + "by_row", "actor.reward_norm": None}
    solved = rl({**judged, "workflow.dynamic_filter_fn": REWARDS + "solved"})
    assert {row["rewards"] for row in solved.samples} == {1.0}
    assert solved.column("rollout/filtered")[0] > 0
    with pytest.raises(UsageError, match=r"workflow\.dynamic_filter_fn .*defines no unsolved"):
        rl({"workflow.dynamic_filter_fn": REWARDS + "unsolved"})


def test_a_dynamic_batch_counts_filtered_groups(rl):
    judged = {
        "reward.fn": REWARDS + "by_row",
        "actor.reward_norm": None,
        "success_rate_lb": 0.5,
        "total_train_steps": 3,
    }
    whole, dynamic = rl(judged), rl({**judged, "dynamic_bs": True})
    assert set(whole.column("ppo_actor/n_seqs")) == {8}
    assert sum(dynamic.column("ppo_actor/n_seqs")) < 24


# -- rewards and workflows -------------------------------------------------------------------------------------------


def test_the_reward_function_is_the_named_one(rl):
    assert max(rl({"reward.fn": REWARDS + "nothing"}).column("rollout/reward/max")) == 0
    assert max(rl({"reward.fn": REWARDS + "letters"}).column("rollout/reward/max")) > 0


PARTS = ("reward_parts/letters", "reward_parts/short")


def test_parts_of_a_reward_are_weighted(rl):
    run = rl({
        **{"reward.fn": REWARDS + "in_parts", "reward.weights": {"short": 0.25}, "rollout.dump_to_file": True},
        **{"valid_dataset.path": "${train_dataset.path}", "valid_dataset.split": "train", "valid_dataset.type": "rl"},
        **{"evaluator.freq_steps": 1},
    })  # fmt: skip
    for row, answer in zip(run.samples, run.answers(), strict=True):
        parts = {"letters": sum(answer) % 7 / 7, "short": -len(answer)}
        assert {name: row[f"reward_parts/{name}"] for name in parts} == pytest.approx(parts)
        assert row["rewards"] == pytest.approx(parts["letters"] + 0.25 * parts["short"])
    reward, *parts = (run.column(f"eval-rollout/{name}/avg")[0] for name in ("reward", *PARTS))
    assert reward == pytest.approx(parts[0] + 0.25 * parts[1])
    short = [row["reward_parts/short"] for row in run.samples]
    assert run.column("rollout/reward_parts/short/avg") == pytest.approx([sum(short) / len(short)])
    kept = [json.loads(line) for line in (run.folder / "samples.jsonl").read_text().splitlines()]
    dumped = [json.loads(line) for path in (run.folder / "rollout").rglob("*.jsonl") for line in path.open()]
    for one in (*kept, *dumped):
        assert one["reward"] == pytest.approx(one["reward_parts"]["letters"] + 0.25 * one["reward_parts"]["short"])
    assert len(dumped) >= len(run.samples)  # some belong to the next step


class _OddRows(RLVRWorkflow):
    """Rejects the rows 0, 2, 4 and so on of an evaluation."""

    async def arun_group(self, engine: Any, data: Any, samples: int) -> Any:
        answered = await super().arun_group(engine, data, samples)
        return answered if PROMPTS.index({"prompt": data["prompt"], "answer": data["answer"]}) % 2 else [None] * samples


def test_evaluation_samples_have_the_number_of_their_prompt_after_a_rejection(tiny_checkpoint, tmp_path):
    changes = {"total_train_steps": 1, "evaluator.freq_steps": 1, "valid_dataset.type": "rl"}
    changes |= {"valid_dataset.path": "${train_dataset.path}", "valid_dataset.split": "train"}
    config = settings_of_kind("rl", tiny_checkpoint, tmp_path, changes)
    reward = {"reward_fn": REWARDS + "letters"}
    with InProcessTrainer(config) as trainer:
        trainer.train(eval_workflow=_OddRows, eval_workflow_kwargs=reward)
        samples = trainer.run_dir.read_eval_samples()
    assert {sample["prompt_index"] for sample in samples} == {1, 3, 5, 7, 9, 11}
    for sample in samples:
        wanted = PROMPTS[sample["prompt_index"]]
        assert wanted["prompt"] in sample["prompt"]
        assert sample["data"]["answer"] == wanted["answer"]


def test_a_reward_model_scores_finished_answers_in_training_and_evaluation(rl, tiny_checkpoint, tmp_path):
    judge = save_classifier(tmp_path / "judge", tiny_checkpoint)
    run = rl({
        **{"reward.fn": "", "reward.max_workers": None, "reward.path": str(judge), "evaluator.freq_steps": 1},
        **{"valid_dataset.path": "${train_dataset.path}", "valid_dataset.split": "train", "valid_dataset.type": "rl"},
    })  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float64).eval()
    with torch.inference_mode():
        wanted = [model(input_ids=torch.tensor([row["input_ids"]])).logits.item() for row in run.samples]
    assert [row["rewards"] for row in run.samples] == pytest.approx(wanted, abs=1e-4)
    assert run.column("rollout/reward/avg") == pytest.approx([sum(wanted) / len(wanted)], abs=1e-4)
    assert run.column("rollout/reward/min") == pytest.approx([min(wanted)], abs=1e-4)
    assert len(set(wanted)) > 4
    assert run.column("eval-rollout/reward/min")[0] < run.column("eval-rollout/reward/max")[0]


def test_a_failing_reward_stops_the_run_if_configured(rl):
    with pytest.raises(RolloutStoppedError, match=r"stops because an episode raised RewardError: .*KeyError"):
        rl({"reward.fn": REWARDS + "broken", "reward.on_error": "stop"})


def test_a_reward_that_times_out_is_retried(tiny_checkpoint, tmp_path):
    for retries, timeout in ((0, 0.2), (2, 0.2)):
        calls = tmp_path / f"calls{retries}"
        calls.mkdir()
        given = {"reward.fn": REWARDS + "late", "reward.timeout_seconds": timeout, "reward.max_retries": retries}
        with InProcessTrainer(settings_of_kind("rl", tiny_checkpoint, tmp_path / str(retries), given)) as trainer:
            reward = built_in(trainer)["reward_fn"]
            with pytest.raises(RewardError, match=rf"{timeout:g} s"):
                asyncio.run(reward("p", "c", [1], [2], folder=str(calls)))
            reward.close()
        assert len(list(calls.iterdir())) == retries + 1


def test_rewards_are_computed_by_the_configured_number_of_processes(rl):
    for workers in (1, 2):
        run = rl({"reward.fn": REWARDS + "slow", "reward.max_workers": workers, "gconfig.n_samples": 4})
        assert len({row["rewards"] for row in run.samples}) == workers


def test_the_named_workflow_gets_its_arguments(rl):
    def answers(**kwargs: Any) -> float:
        given = {"workflow.path": "multi_turn", "workflow.kwargs": kwargs, "reward.fn": REWARDS + "nothing"}
        given |= {"actor.reward_norm": None, "gconfig.ignore_eos": True, "gconfig.max_tokens": 2048}
        return sum(map(len, rl(given).answers()))

    alone = sum(map(len, rl({"gconfig.ignore_eos": True}).answers()))
    assert answers(max_turns=1) == alone
    assert answers(max_turns=3) == 3 * alone


class Reporting(RLVRWorkflow):
    """Adds its own statistic to each sample."""

    async def arun_group(self, engine: Any, data: dict[str, Any], samples: int) -> Any:
        found = await super().arun_group(engine, data, samples)
        return [{**t, "tools": torch.tensor([float(i)])} for i, t in enumerate(found)]


def test_statistics_of_workflows_are_reported_when_asked_for(tiny_checkpoint, tmp_path):
    def run(name: str, **actor: Any) -> Run:
        given = {f"actor.{key}": value for key, value in actor.items()} | {"total_train_steps": 1}
        with InProcessTrainer(settings_of_kind("rl", tiny_checkpoint, tmp_path / name, given)) as trainer:
            trainer.train(Reporting, workflow_kwargs=built_in(trainer))
            return Run(trainer)

    assert run("on", log_agent_stats=True, log_agent_stats_keys=["tools"]).column("rollout/agent/tools/avg") == [0.5]
    assert not run("off").column("rollout/agent/tools/avg")
    with pytest.raises(ArenoError, match=r"log_agent_stats_keys: no trajectory has the key 'hammers'"):
        run("wrong", log_agent_stats=True, log_agent_stats_keys=["hammers"])


def test_a_statistic_may_be_missing_after_the_first_step_but_must_be_a_number():
    trajectory = {"rewards": torch.zeros(1)}
    assert workflow_values([trajectory], "tools", required=False) == []
    assert workflow_values([trajectory, {"tools": torch.tensor([2, 3])}], "tools", required=True) == [2.0, 3.0]
    with pytest.raises(UsageError, match="the values of 'tools' are not numbers"):
        workflow_values([{"tools": "hammer"}], "tools", required=False)


class SometimesReporting(Reporting):
    """Reports its statistic only in the first step."""

    async def arun_group(self, engine: Any, data: dict[str, Any], samples: int) -> Any:
        found = await super().arun_group(engine, data, samples)
        return [t if int(t["versions"].max()) < 1 else {k: v for k, v in t.items() if k != "tools"} for t in found]


def test_a_later_batch_without_a_statistic_does_not_end_the_run(tiny_checkpoint, tmp_path):
    given = {"actor.log_agent_stats": True, "actor.log_agent_stats_keys": ["tools"], "total_train_steps": 2}
    with InProcessTrainer(settings_of_kind("rl", tiny_checkpoint, tmp_path, given)) as trainer:
        trainer.train(SometimesReporting, workflow_kwargs=built_in(trainer))
        assert Run(trainer).column("rollout/agent/tools/avg") == [0.5]
        assert Run(trainer).steps == 2


@pytest.mark.parametrize("keeps", ["recover", "best"])
def test_rows_that_a_checkpoint_cannot_store_are_refused_before_training(tiny_checkpoint, tmp_path, keeps):
    given: dict[str, Any] = {"recover.mode": "auto", "recover.freq_steps": 1}
    if keeps == "best":
        given = {"recover.mode": "off", "evaluator.freq_steps": 1, "evaluator.keep_best": True}
        given["valid_dataset"] = {"path": str(tmp_path), "type": "rl"}
    rows = [{"prompt": "a", "answer": "b", "thing": object()}] * 8
    with pytest.raises(UsageError, match=r"a checkpoint cannot store: .*object.*evaluator\.keep_best=false"):
        InProcessTrainer(settings_of_kind("rl", tiny_checkpoint, tmp_path, given), rows, rows)


# -- devices ---------------------------------------------------------------------------------------------------------


def test_rollout_has_devices_of_its_own_unless_it_shares_the_actor_s():
    apart = example(actor__backend="fsdp:d2", rollout__backend="areno:d2")
    names = [str(device) for device in rollout_devices(apart, 4) or ()]
    assert names == ["cuda:2", "cuda:3"]
    shared = {"type": "colocation", "target": "actor"}
    together = example(actor__backend="fsdp:d2", rollout__backend="areno:d2", rollout__scheduling_strategy=shared)
    assert [str(device) for device in rollout_devices(together, 4) or ()] == ["cuda:0", "cuda:1"]
    assert rollout_devices(apart, 0) is None
