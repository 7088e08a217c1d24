"""SDK arguments are checked when they are passed, and errors name them; nothing crashes or hangs later."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areno import ArenoConfig, ModelRole, SamplingParams, Trainer, TrainSequence
from areno.api.agentic import AgentBatch
from areno.errors import UsageError

SAMPLING = SamplingParams(max_new_tokens=3)


@pytest.fixture(scope="module")
def trainer(tiny_checkpoint):
    with Trainer(1, str(tiny_checkpoint)) as trainer:
        trainer.init()
        yield trainer


def row():
    return TrainSequence([True, False], [5, 6], [0.0, -1.0], [0.0, 1.0])


def loss(pack, logprobs):
    return logprobs.sum()


IN_A_SESSION = [
    (lambda t: t.rollout_batch("text", 1, SAMPLING), TypeError, r"prompts must be a list of strings.* got str 'text'"),
    (lambda t: t.rollout_batch([7], 1, SAMPLING), TypeError, r"prompts\[0\] must be .*str.*, got int"),
    (lambda t: t.rollout_batch(["a"], 0, SAMPLING), ValueError, "n_samples must be at least 1, got 0"),
    (lambda t: t.rollout_batch(["a"], 1.5, SAMPLING), TypeError, "n_samples must be an integer, got 1.5"),
    (lambda t: t.rollout_batch(["a"], 1, {"max_new_tokens": 3}), TypeError, "sampling_params must be SamplingParams"),
    (lambda t: t.rollout_token_batch([5, 6], 1, SAMPLING), TypeError, "prompt 0 must be a list of token ids, got int"),
    (lambda t: t.rollout_token_batch(["ab"], 1, SAMPLING), TypeError, "prompt 0 must be a list of token ids, got str"),
    (lambda t: t.rollout_token_batch([[5, "6"]], 1, SAMPLING), TypeError, "prompt 0 must be a list of token ids"),
    (lambda t: t.rollout_token_batch([[5], []], 1, SAMPLING), UsageError, "prompt 1 is empty"),
    (lambda t: t.rollout_token_batch([[5], [10**6]], 1, SAMPLING), UsageError, "prompt 1 has token id 1000000"),
    (
        lambda t: t.rollout_token_batch([[5]], 2, SAMPLING, seeds=[[1]]),
        ValueError,
        r"`seeds` must contain one list per prompt \(1 prompts\), and each list must contain 2 seeds",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), IN_A_SESSION)
def test_a_wrong_rollout_argument_is_refused_and_generation_still_works(trainer, call, error, message):
    with trainer.rollout_session(sampling_params=SAMPLING, proxy=False):
        with pytest.raises(error, match=message):
            call(trainer)
        assert len(trainer.rollout_token_batch([[5, 6]], 2, SAMPLING)[0].sequences) == 2


CALLS = [
    (lambda t: t.train([row()], loss, mini_bs=0), ValueError, "mini_bs must be at least 1, got 0"),
    (
        lambda t: t.train([row()], loss, gradient_accumulation_steps=-1),
        ValueError,
        "gradient_accumulation_steps must be at least 1, got -1",
    ),
    (lambda t: t.train(row(), loss), TypeError, "batch_data must be a list of TrainSequence rows"),
    (lambda t: t.train([{}], loss), TypeError, r"batch_data\[0\] must be TrainSequence, got dict"),
    (lambda t: t.train([row()], "gspo"), TypeError, "loss_fn must be callable, got str"),
    (lambda t: t.score_logprobs("actor", [5, 6]), TypeError, r"token_rows\[0\] must be a list of token ids, got int"),
    (lambda t: t.score_logprobs("actor", [[5]], temperatures=0), ValueError, "temperatures must be finite and above 0"),
    (lambda t: t.score_logprobs("actor", [[5]], micro_bs=0), ValueError, "micro_bs must be at least 1"),
    (lambda t: t.score_values("critic", "ab"), TypeError, "token_rows must be a list of rows, got str"),
    (lambda t: t.ensure_roles([]), TypeError, "roles must be dict, got list"),
    (lambda t: t.ensure_roles({"ref": "path"}), TypeError, r"roles\['ref'\] must be ModelRole, got str"),
    (lambda t: t.set_learning_rate(float("nan")), ValueError, "the learning rate must be finite"),
    (lambda t: t.save_checkpoint(None), TypeError, "path must be"),
    (
        lambda t: t.load_prompt_batches([{"prompt": "a"}], batch_size=0, max_prompt_tokens=9),
        ValueError,
        "batch_size must be at least 1, got 0",
    ),
    (
        lambda t: t.load_prompt_batches("d.jsonl", batch_size=1, max_prompt_tokens=9),
        TypeError,
        "dataset must support len",
    ),
    (lambda t: t.rollout_session(sampling_params=None), TypeError, "sampling_params must be SamplingParams"),
    (
        lambda t: t.rollout_session(sampling_params=SAMPLING, max_running_prompts=0),
        ValueError,
        "max_running_prompts must be at least 1",
    ),
    (lambda t: t.rollout_session(sampling_params=SAMPLING, timeout_s=0), ValueError, "timeout_s must be .* above 0"),
    (
        lambda t: t.rollout_session(sampling_params=SAMPLING, loss_mask_policy={"tool_results": True}),
        TypeError,
        "loss_mask_policy must be LossMaskPolicy, got dict",
    ),
    (lambda t: t.evaluate([{"prompt": "a"}], "f", sampling_params=SAMPLING), TypeError, "reward_fn must be callable"),
    (
        lambda t: t.evaluate([{"prompt": "a"}], len, sampling_params=SAMPLING, n_samples=0),
        ValueError,
        "n_samples must be at least 1",
    ),
    (lambda t: t.train_values("critic", [row()], 0), ValueError, "row 0 lacks returns"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_errors_name_the_wrong_argument(trainer, call, error, message):
    with pytest.raises(error, match=message):
        call(trainer)


def test_arrays_of_token_ids_are_accepted(trainer):
    prompts = np.array([[5, 6], [7, 8]])
    with trainer.rollout_session(sampling_params=SAMPLING, proxy=False):
        assert len(trainer.rollout_token_batch(prompts, np.int64(2), SAMPLING)) == 2
    assert len(trainer.score_logprobs("actor", prompts)) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"runtime": {"attn_backend": "xx"}}, "runtime attn_backend must be one of flash, native, got 'xx'"),
        ({"runtime": {"device": "gpu"}}, "runtime device 'gpu' is unknown; use auto, cpu, cuda or cuda:N"),
        ({"runtime": {"device": "cpu:x"}}, "runtime device 'cpu:x' is unknown"),
        ({"runtime": {"speculate": -1}}, "runtime speculate must be at least 0"),
        ({"runtime": {"keep_rollout_state": "no"}}, "runtime keep_rollout_state must be True or False, got 'no'"),
        ({"runtime": {"kv_cache_tokens": 0}}, "runtime kv_cache_tokens must be at least 1"),
        ({"runtime": {"stall_timeout_s": 0}}, "runtime stall_timeout_s must be finite and above 0"),
        ({"runtime": "native"}, "ArenoConfig.runtime must be dict, got str"),
        ({"optimizer": {"lr": -1.0}}, "optimizer lr must be finite and not negative"),
        ({"optimizer": {"lr": "1e-4"}}, "optimizer lr must be a number, got '1e-4'"),
        ({"optimizer": {"betas": 0.9}}, "optimizer betas must be a list of two numbers"),
        ({"optimizer": {"lr_decay_style": "wsd"}}, "lr_decay_style must be one of constant, linear, cosine"),
        (
            {"optimizer": {"lr_decay_style": "cosine"}},
            "ArenoConfig.optimizer lr_decay_style='cosine' needs lr_decay_steps",
        ),
        ({"lora": {"rank": -2}}, "lora rank must be at least 0"),
        ({"max_running_prompts": 0}, "max_running_prompts must be at least 1"),
        ({"tp_size": "2"}, "tp_size must be an integer, got '2'"),
        ({"devices": "0,1"}, "devices must be a list of device numbers, got str"),
        ({"decode_progress_interval_s": -1}, "decode_progress_interval_s must be finite and not negative"),
    ],
)
def test_a_wrong_configuration_value_is_a_usage_error(tmp_path, values, message):
    with pytest.raises(UsageError, match=message):
        Trainer(1, str(tmp_path), custom_config=ArenoConfig(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": None}, "max_new_tokens must be an integer, got None"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer, got True"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"temperature": float("nan")}, "temperature must be finite, got nan"),
        ({"greedy": 1}, "greedy must be True or False, got 1"),
        ({"max_context_len": 1}, "max_context_len must be at least 2, got 1"),
        ({"max_prompt_len": 0}, "max_prompt_len must be at least 1, got 0"),
        ({"stop": [7]}, "stop must be a list of strings"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list of token ids"),
        ({"logit_bias": [7]}, "logit_bias must be a dict"),
        ({"logit_bias": {7: None}}, r"logit_bias must be a dict from token ids to numbers, got \{7: None\}"),
        ({"logit_bias": {7: "1"}}, "logit_bias must be a dict from token ids to numbers"),
        ({"logit_bias": {7: float("nan")}}, "logit_bias must have finite numbers"),
        ({"logit_bias": {7: 1, 8: -float("inf")}}, "logit_bias must have finite numbers.*-100"),
        ({"presence_penalty": float("inf")}, "presence_penalty must be finite"),
    ],
)
def test_wrong_sampling_parameters_are_refused(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SamplingParams(**values)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_rows_may_be_made_of_arrays(kind):
    lists = {"tokens": [5, 6, 7], "prompt_mask": [True, False, False], "logprobs": [0.0, -1.0, -0.5]}
    lists |= {"advantages": [0.0, 1.0, 1.0], "loss_mask": [True, True, False]}
    plain = TrainSequence(**lists)
    assert TrainSequence(**{name: kind(values) for name, values in lists.items()}) == plain
    assert TrainSequence(**lists | {"logprobs": kind([0.0, -1.0, -0.5])}, temperature=0.5).logprobs == plain.logprobs


def test_other_data_classes_refuse_invalid_values():
    with pytest.raises(TypeError, match=r"TrainSequence\.tokens must be a list, got 'ab'"):
        TrainSequence([True, False], "ab")
    with pytest.raises(ValueError, match=r"optimizer_lr must be finite and not negative, got -1"):
        ModelRole("critic", "path", True, optimizer_lr=-1)
    with pytest.raises(ValueError, match=r"n_samples must be at least 1, got 0"):
        AgentBatch([{}], ["a"], [[5]], 0)
    for size in (0, "1"):
        with pytest.raises((TypeError, ValueError), match="world_size must be"):
            Trainer(size, "path")


@pytest.mark.parametrize(
    ("optimizer", "error", "message"),
    [
        ({"lr": "1e-5"}, TypeError, "lr must be a number, got '1e-5'"),
        (
            {"lr_decay_style": "cosin"},
            ValueError,
            "lr_decay_style must be one of constant, linear, cosine, got 'cosin'",
        ),
        ({"grad_clip_norm": 0}, ValueError, "grad_clip_norm must be finite and above 0, got 0"),
        ({"lr_decay_style": "linear"}, UsageError, "lr_decay_style='linear' needs lr_decay_steps"),
    ],
)
def test_wrong_optimizer_options_of_a_role_are_refused(trainer, tiny_checkpoint, optimizer, error, message):
    role = ModelRole("critic", str(tiny_checkpoint), True, optimizer=optimizer)
    with pytest.raises(error, match=rf"ModelRole\('critic'\)\.optimizer {message}"):
        trainer.ensure_roles({"critic": role})


def test_an_evaluation_may_exceed_the_trainers_max_running_prompts(tiny_checkpoint):
    with Trainer(1, str(tiny_checkpoint), custom_config=ArenoConfig(max_running_prompts=2)) as trainer:
        trainer.init()
        rows = [{"prompt": f"What is {n} plus {n}?"} for n in range(8)]
        metrics = trainer.evaluate(rows, lambda record: 1.0, sampling_params=SAMPLING, max_running_prompts=24)
    assert metrics["num_samples"] == 8
