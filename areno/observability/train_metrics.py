"""Lists the metrics of ``areno train`` with unit and meaning.

The tables of ``docs/run-directory.md`` are generated from this list. :mod:`areno.observability.scalars` says where
``rollout/``, ``train/`` and ``time/`` metrics are computed. :mod:`areno.observability.metric_advice` has normal values and
remedies.

A row may describe several metrics: ``rewards_{mean,std}`` describes ``rewards_mean`` and ``rewards_std``. ``NAME`` stands for
any name, and the ``K`` of ``pass@K`` for any number.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_Rows = tuple[tuple[str, str, str], ...]
"""Rows of a table of metrics. A row has three texts: a name without prefix (such as ``train/``), a unit and a meaning."""
_SUMMARY = "{mean,std,min,max}"
_GRADIENT = "grad_{zero,nonzero,total}"


@dataclass(frozen=True, slots=True)
class Metric:
    """A documented metric. ``unit`` is empty if the metric has no unit, or if ``meaning`` states the unit."""

    name: str
    unit: str
    meaning: str


_ROLLOUT: _Rows = (
    ("rewards_{mean,std,max,min}", "reward", "rewards of the samples of the step"),
    ("reward_parts/NAME", "reward", "mean of the [reward part](rewards.md#named-parts) `NAME`"),
    ("accuracy", "fraction", "fraction of samples with a reward above 0"),
    ("advantages_{mean,std}", "advantage", "advantages of the trained response tokens"),
    ("logprobs_mean", "nats", "mean log-prob of the trained response tokens, recorded during sampling"),
    ("num_sequences", "rows", "number of training rows in the step"),
    ("{seq,prompt,response}_len_mean", "tokens", "mean length of the rows, of their prompts and of their responses"),
    (
        "{,total_}skipped_long",
        "prompts",
        "prompts skipped in the step, because they exceed `--max-prompt-tokens` or the context length. `total_skipped_long` "
        "is the total since the start of the run",
    ),
)
_SAMPLES: _Rows = (
    ("reward_mean", "reward", "mean reward over the samples of the step"),
    ("reward_errors", "samples", "samples dropped because the reward function failed"),
    ("empty_responses", "samples", "samples dropped because they have no token to train on"),
    (
        "zero_std_groups",
        "fraction",
        "fraction of prompts whose answers all got the same reward. With group-relative advantages, these prompts give no "
        "learning signal",
    ),
    ("truncated_ratio", "fraction", "fraction of answers truncated at `--max-new-tokens` or at the context length"),
    (
        "sampling_cut_mass",
        "probability",
        "probability mass that `--top-k`, `--top-p` and grammars remove, averaged over tokens. Grammars constrain "
        "the tool calls of agents (`tool_choice`) and structured output",
    ),
    (f"reward_model_raw_reward_{_SUMMARY}", "reward", "with `--reward-ckpt`: scores of the reward model"),
    (
        "staleness_{mean,max}",
        "updates",
        "with rollout replicas: age of a sample's oldest token. The age is the number of updates between sampling the token "
        "and training on the sample",
    ),
    ("agent_failed", "samples", "with `--agent-fn`: samples dropped because the agent failed"),
    ("agent_rerun", "samples", "with `--agent-fn`: retries of samples on which the agent failed"),
    ("agent_filtered_long", "samples", "with `--agent-fn`: samples dropped because they exceed the context length"),
    (
        "agent_forks",
        "rows",
        "with `--agent-fn`: rows added because [a conversation forked](agentic.md#when-a-conversation-forks)",
    ),
    ("agent_turns_mean", "turns", "with `--agent-fn`: mean number of model turns per sample"),
    ("workflow_failed", "prompts", "with `--workflow`: prompts whose workflow raised an exception"),
    ("workflow_left_out", "samples", "with `--workflow`: samples for which the workflow returned nothing"),
)
_UPDATE: _Rows = (
    ("loss", "", "loss of the update, which is [near 0 for GSPO and GRPO](run-directory.md#why-the-loss-is-near-0)"),
    ("policy_loss", "", "loss of the policy without the KL term"),
    ("total_loss", "", "loss of the policy, including any KL term"),
    (
        "entropy",
        "nats",
        "mean entropy of the policy per trained token. The entropy falls as the policy becomes more certain",
    ),
    (
        "ratio_{mean,std}",
        "ratio",
        "importance ratio relative to the log-probs recorded in the rollout. With IcePop and M2PO, the ratio is instead "
        "relative to the proximal policy, which is the policy before the update. In the first update after a synchronous "
        "rollout, the mean is 1 and the standard deviation is 0, up to rounding",
    ),
    (
        "clip_fraction{,_high,_low,_dual}",
        "fraction",
        "fraction of tokens (GRPO) or answers (GSPO) that lose their gradient because the ratio is clipped. `_high` counts "
        "only ratios above the clip range, `_low` only ratios below the range, and `_dual` only ratios beyond the dual clip",
    ),
    ("rollout_logprobs_mean", "nats", "mean log-prob of the trained tokens, recorded during sampling"),
    ("train_logprobs_mean", "nats", "mean log-prob of the trained tokens, computed in the update"),
    (
        "logp_diff_mean",
        "nats",
        "train log-prob minus rollout log-prob, averaged over tokens, in the first optimizer step of a batch",
    ),
    (
        "logp_abs_diff_mean",
        "nats",
        "mean absolute difference between rollout and train log-prob per token, in the first optimizer step of a batch",
    ),
    ("advantage_mean", "advantage", "advantages of the trained response tokens"),
    ("response_len", "tokens", "mean number of trained tokens per row"),
    ("grad_norm", "", "norm of the gradient before `--grad-clip-norm`"),
    ("grad_norm_clipped", "", "norm of the gradient after `--grad-clip-norm`"),
    (f"{_GRADIENT}_count", "", "number of zero entries, of nonzero entries and of all entries of the gradient"),
    ("grad_{zero,nonzero}_ratio", "fraction", "fraction of zero and of nonzero entries of the gradient"),
    (
        "update_skipped",
        "fraction",
        "fraction of updates that were skipped, because the gradient was not finite or no parameter had a gradient. If "
        "the gradient is not finite in five consecutive updates, the run stops. With `dtype: float16`, this rule applies only "
        "while `loss_scale` is at its minimum",
    ),
    ("loss_scale", "", "with `dtype: float16`: the factor applied to the loss before the backward pass"),
    ("lr", "", "learning rate of the update"),
    ("kl_loss", "nats", "with a KL term in the loss: mean of the estimated KL divergence per token"),
    ("kl_coef", "", "with a KL term in the loss: weight of the KL term"),
    (
        f"kl_reward_{_SUMMARY}",
        "reward",
        "with `--kl-reward-coef`: KL reward of a training row. The KL reward is `-c * s`, where c is `--kl-reward-coef` and s "
        "is the sum of the KL estimates of the row's tokens",
    ),
    (f"ref_logprob_{_SUMMARY}", "nats", "with a KL term: log-prob of the trained tokens under the reference model"),
    (
        "m2_filtered_fraction",
        "fraction",
        "M2PO: fraction of tokens that M2PO excludes from the loss, so that the mean squared log-ratio of the other tokens "
        "is below `--m2-threshold`",
    ),
    (
        "tree_token_ratio",
        "fraction",
        "with prefix sharing in training: number of tokens that training computes, divided by the number of tokens in all "
        "rows. Training computes a shared prefix only once. Only microbatches whose rows share prefixes are included",
    ),
    (
        "routed_experts_changed",
        "fraction",
        "with [routing replay](rollout.md#routing-replay): fraction of recorded expert choices that differ from the "
        "choices that the router would make in training. A choice is the set of experts of one token in one MoE layer",
    ),
    ("sft_loss", "nats", "SFT: mean negative log-prob of a response token"),
    ("sft_logprob_mean", "nats", "SFT: mean log-prob of a response token"),
    ("sft_target_tokens", "tokens", "SFT: trained tokens per optimizer step"),
)
_PPO: _Rows = (
    ("pg_clipfrac", "fraction", "fraction of tokens whose gradient the clip range removes"),
    ("pg_clipfrac_lower", "fraction", "fraction of tokens whose gradient the dual clip removes"),
    ("ppo_kl", "nats", "mean of log p_old - log p_now, which measures the change of the policy in the update"),
    (f"old_logprob_{_SUMMARY}", "nats", "log-prob of the trained tokens, recorded during sampling"),
    (f"critic_value_{_SUMMARY}", "reward", "the critic's predictions before the update"),
    (f"return_{_SUMMARY}", "reward", "returns, which are the targets of the critic"),
    (f"gae_advantage_{_SUMMARY}", "advantage", "advantages before whitening"),
    (f"normalized_advantage_{_SUMMARY}", "advantage", "advantages after whitening"),
    (
        "critic_explained_variance",
        "fraction",
        "fraction of the returns' variance that the critic explains. If the returns do not vary, the metric is absent",
    ),
    ("critic_value_loss", "", "the critic's loss"),
    ("critic_value_clipfrac", "fraction", "fraction of trained tokens whose prediction is clipped"),
    ("critic_value_mse", "", "mean squared difference between the critic's predictions and targets during the update"),
    (
        "critic_value_abs_error_mean",
        "reward",
        "mean absolute difference between the critic's predictions and targets during the update",
    ),
    ("critic_value_pred_mean", "reward", "the critic's predictions during the update"),
    ("critic_value_target_mean", "reward", "the critic's targets during the update"),
    ("critic_old_value_mean", "reward", "the critic's predictions before the update"),
    ("critic_grad_norm{,_clipped}", "", "norm of the critic's gradient, before and after `--critic-grad-clip-norm`"),
    (
        f"critic_{_GRADIENT}_count",
        "",
        "number of zero entries, of nonzero entries and of all entries of the critic's gradient",
    ),
    (
        "critic_grad_{zero,nonzero}_ratio",
        "fraction",
        "fraction of zero and of nonzero entries of the critic's gradient",
    ),
    (
        "critic_{update_skipped,loss_scale,lr,tree_token_ratio}",
        "",
        "same as the metric without `critic_`, for the critic's update",
    ),
    ("actor_train_skipped", "", "1 in a warm-up step, which trains only the critic"),
    ("critic_value_forward_time_s", "seconds", "time to predict values"),
    ("critic_train_time_s", "seconds", "time to update the critic"),
    ("actor_train_wall_time_s", "seconds", "time to update the policy"),
)
_PAIRS: _Rows = (
    ("{dpo,pair,rm}_loss", "nats", "loss of DPO (`dpo`), SimPO (`pair`) or a reward model (`rm`)"),
    (
        "{dpo,pair,rm}_accuracy",
        "fraction",
        "fraction of pairs whose chosen answer has the higher implicit reward (DPO, SimPO) or score (reward model)",
    ),
    (
        "{dpo,rm}_margin",
        "reward",
        "implicit reward (DPO) or score (reward model) of the chosen answer minus that of the rejected answer",
    ),
    (
        "{dpo,pair}_reward_margin",
        "reward",
        "implicit reward of the chosen answer minus that of the rejected answer. `dpo_reward_margin` equals `dpo_margin`",
    ),
    (
        "{dpo,pair}_{chosen,rejected}_reward",
        "reward",
        "implicit reward of chosen and of rejected answers",
    ),
    ("rm_{chosen,rejected}_score", "reward", "mean score of chosen and of rejected answers"),
    ("dpo_response_len", "tokens", "mean number of tokens per answer"),
)
_SPEED: _Rows = (
    (
        "tokens_per_second",
        "tokens/s",
        "generated tokens divided by the rollout time. In runs without rollouts (SFT, DPO, reward models): tokens of the "
        "training rows divided by the training time",
    ),
    (
        "step_{rollout,train,e2e}_time_s",
        "seconds",
        "time of rollout, time of training, and time from the start of rollout to the end of training",
    ),
    ("policy_train_wall_time_s", "seconds", "time to update the policy"),
    ("reward_score_time_s", "seconds", "time to reward the samples"),
    ("step_wall_time_s", "seconds", "time of the whole step"),
    ("weight_update_time_s", "seconds", "time to transfer new weights to the rollout replicas"),
    ("rollout_pause_time_s", "seconds", "longest pause of a rollout replica for a weight update"),
    (
        "ref_logprob_forward_time_s",
        "seconds",
        "time to score rows with the reference model. DPO scores all rows once per run, and other algorithms score rows in "
        "each step",
    ),
)
_EVALUATION: _Rows = (
    ("rewards_{mean,std}", "reward", "rewards of the answers to held-out prompts"),
    ("reward_parts/NAME", "reward", "mean of the reward part `NAME`"),
    (
        "accuracy",
        "fraction",
        "fraction of answers with a reward above 0. Training on pairs: fraction of pairs whose chosen answer has the higher "
        "implicit reward (DPO, SimPO) or score (reward model)",
    ),
    ("pass@K", "probability", "probability that at least one of K answers to a prompt has a reward above 0"),
    ("response_len_mean", "tokens", "mean number of tokens per answer"),
    ("truncated_ratio", "fraction", "fraction of answers truncated at `--max-new-tokens` or at the context length"),
    ("num_prompts", "", "number of held-out prompts"),
    ("num_samples", "", "number of answers to held-out prompts"),
    ("skipped_long", "prompts", "prompts skipped because they exceed `--max-prompt-tokens` or the context length"),
    ("reward_errors", "answers", "answers on which the reward function failed"),
    (
        "loss",
        "",
        "SFT: mean negative log-prob per response token, in nats. DPO, SimPO and reward models: mean pairwise loss",
    ),
    ("perplexity", "", "SFT: exp(loss)"),
    ("target_tokens", "tokens", "SFT: predicted tokens"),
    ("num_sequences", "rows", "SFT: number of held-out rows"),
    ("skipped_long_or_empty", "rows", "SFT: held-out rows skipped because they are too long or have no response"),
    (
        "{,reward_}margin",
        "reward",
        "implicit reward (DPO, SimPO) or score (reward model) of the chosen answer minus that of the rejected answer",
    ),
    (
        "{chosen,rejected}_reward",
        "reward",
        "DPO and SimPO: implicit reward of chosen and of rejected answers",
    ),
    (
        "{chosen,rejected}_score",
        "reward",
        "reward models: mean score of chosen and of rejected answers",
    ),
    ("eval_time_s", "seconds", "time of the evaluation"),
)
_STAGES: _Rows = (
    (
        "rollout",
        "seconds",
        "time to generate samples. With an asynchronous rollout: time that training waits for samples",
    ),
    ("reward", "seconds", "time to reward the samples"),
    ("advantage", "seconds", "time to score rows with other models (reference, critic) and to compute advantages"),
    ("train", "seconds", "time of the optimizer steps"),
)
_MEMORY: _Rows = (
    (
        "peak_resident_gib",
        "GiB",
        "peak resident memory so far, summed over the run's processes on this machine",
    ),
    (
        "available_gib",
        "GiB",
        "available memory after the step: the minimum of the machine's free memory and the unused part of the cgroup limit",
    ),
    (
        "peak_gpu_gib",
        "GiB",
        "peak memory of the trainer's tensors so far, on the GPU with the highest peak",
    ),
)

SECTIONS: tuple[tuple[str, str, _Rows], ...] = (
    ("The samples of a step", "rollout/", _ROLLOUT),
    ("Rewarding and dropping samples", "train/", _SAMPLES),
    ("The update", "train/", _UPDATE),
    ("PPO", "train/", _PPO),
    ("Preference pairs: DPO, SimPO, reward models", "train/", _PAIRS),
    ("Speed", "train/", _SPEED),
    ("Evaluation on held-out data", "eval/", _EVALUATION),
    ("Seconds of each stage", "time/", _STAGES),
    ("Memory", "memory/", _MEMORY),
)
"""Sections of metrics with title, prefix and rows."""


def expanded(pattern: str) -> list[str]:
    """Return the names that a pattern with braces stands for, such as ``a_b`` and ``a_c`` for ``a_{b,c}``."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    choices, _, tail = rest.partition("}")
    return [head + choice + end for choice in choices.split(",") for end in expanded(tail)]


def documented() -> Iterator[tuple[str, Metric]]:
    """Yield a pair for each metric in ``SECTIONS``: the title of its section, and the metric."""
    for title, prefix, rows in SECTIONS:
        for names, unit, meaning in rows:
            for name in expanded(names):
                yield title, Metric(prefix + name, unit, meaning)


def matches(documented_name: str, name: str) -> bool:
    """Return whether ``name`` has the form ``documented_name``: ``NAME`` stands for any name, and ``K`` for any number."""
    pattern = re.escape(documented_name).replace("NAME", "[^/]+").replace("@K", "@[0-9]+")
    return re.fullmatch(pattern, name) is not None
