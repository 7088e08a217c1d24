"""Lists the metrics of ``areno train`` with unit and meaning.

The tables of ``docs/run-directory.md`` are generated from this list. :mod:`areno.observability.scalars` says where
``rollout/``, ``train/`` and ``time/`` metrics are computed. :mod:`areno.observability.metric_advice` has normal values
and remedies.

A row may describe several metrics: ``rewards_{mean,std}`` describes two. ``NAME`` stands for any name, and the ``K`` of
``pass@K`` for any number.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_Rows = tuple[tuple[str, str, str], ...]
"""Rows with the names (without their prefix), the unit and the meaning."""
_SUMMARY = "{mean,std,min,max}"
_GRADIENT = "grad_{zero,nonzero,total}"


@dataclass(frozen=True, slots=True)
class Metric:
    """A documented metric. ``unit`` is empty if the metric has no unit or the meaning states it."""

    name: str
    unit: str
    meaning: str


_ROLLOUT: _Rows = (
    ("rewards_{mean,std,max,min}", "reward", "reward over the samples of the step"),
    ("reward_parts/NAME", "reward", "mean of a part of the reward, if the reward has [parts](rewards.md#named-parts)"),
    ("accuracy", "fraction", "samples with a reward above 0"),
    ("advantages_{mean,std}", "advantage", "advantages of the trained response tokens"),
    ("logprobs_mean", "nats", "log-prob of trained response tokens, recorded while sampling"),
    ("num_sequences", "rows", "training rows of the step"),
    ("{seq,prompt,response}_len_mean", "tokens", "length of a row, of its prompt and of its response"),
    (
        "{,total_}skipped_long",
        "prompts",
        "prompts skipped because they exceed `--max-prompt-tokens` or the context: in this step, and since the run's start",
    ),
)
_SAMPLES: _Rows = (
    ("reward_mean", "reward", "mean reward over the samples of the step"),
    ("reward_errors", "samples", "samples dropped because the reward function failed"),
    ("empty_responses", "samples", "samples dropped because they have no token to train on"),
    (
        "zero_std_groups",
        "fraction",
        "prompts whose answers all got the same reward; with group-relative advantages, they give no learning signal",
    ),
    ("truncated_ratio", "fraction", "answers truncated at `--max-new-tokens` or the context length"),
    (
        "sampling_cut_mass",
        "probability",
        "mean probability per token that `--top-k`, `--top-p` and grammars (agents' `tool_choice`, structured output) remove",
    ),
    (f"reward_model_raw_reward_{_SUMMARY}", "reward", "with `--reward-ckpt`: scores of the reward model"),
    (
        "staleness_{mean,max}",
        "updates",
        "with rollout replicas: number of updates by which the weights that sampled a sample's oldest token lag behind the "
        "weights being trained",
    ),
    ("agent_failed", "samples", "with `--agent-fn`: samples dropped because the agent failed"),
    ("agent_rerun", "samples", "with `--agent-fn`: samples that were repeated after a failure"),
    ("agent_filtered_long", "samples", "with `--agent-fn`: samples dropped because they exceed the context"),
    (
        "agent_forks",
        "rows",
        "with `--agent-fn`: rows added because a conversation forked ([when](agentic.md#when-a-conversation-forks))",
    ),
    ("agent_turns_mean", "turns", "with `--agent-fn`: model turns per sample"),
    ("workflow_failed", "prompts", "with `--workflow`: prompts whose workflow raised"),
    ("workflow_left_out", "samples", "with `--workflow`: samples for which the workflow returned nothing"),
)
_UPDATE: _Rows = (
    ("loss", "", "the loss; near 0 for GSPO and GRPO ([why](run-directory.md#why-the-loss-is-near-0))"),
    ("policy_loss", "", "loss of the policy without the KL term"),
    ("total_loss", "", "loss of the policy including the KL term, if any"),
    (
        "entropy",
        "nats",
        "mean entropy of the policy per trained token; falls as the policy becomes more certain",
    ),
    (
        "ratio_{mean,std}",
        "ratio",
        "importance ratio relative to the log-probs recorded in rollout (IcePop, M2PO: relative to the proximal policy); 1 "
        "(std 0), up to rounding, in the first update after a synchronous rollout",
    ),
    (
        "clip_fraction{,_high,_low,_dual}",
        "fraction",
        "tokens (GRPO) or answers (GSPO) that get no gradient because of clipping: all, above the clip range, below "
        "the clip range, and beyond the dual clip",
    ),
    ("rollout_logprobs_mean", "nats", "log-prob of trained tokens when sampled"),
    ("train_logprobs_mean", "nats", "log-prob of trained tokens when trained"),
    ("logp_diff_mean", "nats", "train minus rollout log-prob per token, in the first optimizer step of a batch"),
    (
        "logp_abs_diff_mean",
        "nats",
        "absolute difference between rollout and train log-prob per token, in the first optimizer step of a batch",
    ),
    ("advantage_mean", "advantage", "advantages of the trained response tokens"),
    ("response_len", "tokens", "trained tokens of a row"),
    ("grad_norm", "", "norm of the gradient before `--grad-clip-norm`"),
    ("grad_norm_clipped", "", "norm of the gradient after `--grad-clip-norm`"),
    (f"{_GRADIENT}_count", "", "number of entries of the gradient: zero, nonzero and all"),
    ("grad_{zero,nonzero}_ratio", "fraction", "entries of the gradient that are zero and nonzero"),
    (
        "update_skipped",
        "fraction",
        "updates skipped because the gradient was not finite (five in a row stop the run, except while `loss_scale` falls), "
        "or because no parameter had a gradient",
    ),
    ("loss_scale", "", "with `dtype: float16`: the factor applied to the loss before the backward pass"),
    ("lr", "", "learning rate of the update"),
    ("kl_loss", "nats", "with a KL term in the loss: mean of the estimated KL divergence per token"),
    ("kl_coef", "", "with a KL term in the loss: weight of the term"),
    (
        f"kl_reward_{_SUMMARY}",
        "reward",
        "with `--kl-reward-coef`: KL reward of a row, which is minus the coefficient times the sum of the KL estimates of "
        "its tokens",
    ),
    (f"ref_logprob_{_SUMMARY}", "nats", "with a KL term: log-prob of trained tokens under the reference"),
    ("m2_filtered_fraction", "fraction", "M2PO: trained tokens that the bound on the second moment excludes"),
    (
        "tree_token_ratio",
        "fraction",
        "with prefix sharing in training: computed tokens as a fraction of the tokens of all microbatches that share prefixes",
    ),
    (
        "routed_experts_changed",
        "fraction",
        "with [routing replay](rollout.md#routing-replay): replayed choices, one per token and MoE layer, that differ from "
        "the router's current choice",
    ),
    ("sft_loss", "nats", "SFT: negative log-prob of a response token"),
    ("sft_logprob_mean", "nats", "SFT: log-prob of a response token"),
    ("sft_target_tokens", "tokens", "SFT: trained tokens per optimizer step"),
)
_PPO: _Rows = (
    ("pg_clipfrac", "fraction", "tokens that get no gradient because of the clip range"),
    ("pg_clipfrac_lower", "fraction", "tokens at the dual-clip bound"),
    ("ppo_kl", "nats", "mean of log p_old - log p_now: how much the update has changed the policy"),
    (f"old_logprob_{_SUMMARY}", "nats", "log-prob of trained tokens when sampled"),
    (f"critic_value_{_SUMMARY}", "reward", "the critic's predictions before the update"),
    (f"return_{_SUMMARY}", "reward", "returns, which are the targets of the critic"),
    (f"gae_advantage_{_SUMMARY}", "advantage", "advantages before whitening"),
    (f"normalized_advantage_{_SUMMARY}", "advantage", "advantages after whitening"),
    (
        "critic_explained_variance",
        "fraction",
        "fraction of the returns' variance that the critic explains; absent if the returns do not vary",
    ),
    ("critic_value_loss", "", "the critic's loss"),
    ("critic_value_clipfrac", "fraction", "trained tokens whose prediction is clipped"),
    ("critic_value_mse", "", "mean squared error of the critic, during the update"),
    ("critic_value_abs_error_mean", "reward", "mean absolute error of the critic, during the update"),
    ("critic_value_pred_mean", "reward", "the critic's predictions during the update"),
    ("critic_value_target_mean", "reward", "the critic's targets during the update"),
    ("critic_old_value_mean", "reward", "the critic's predictions before the update"),
    ("critic_grad_norm{,_clipped}", "", "norm of the critic's gradient, before and after `--critic-grad-clip-norm`"),
    (f"critic_{_GRADIENT}_count", "", "number of entries of the critic's gradient: zero, nonzero and all"),
    ("critic_grad_{zero,nonzero}_ratio", "fraction", "entries of the critic's gradient that are zero and nonzero"),
    (
        "critic_{update_skipped,loss_scale,lr,tree_token_ratio}",
        "",
        "like the metric without `critic_`, but for the critic's update",
    ),
    ("actor_train_skipped", "", "1 in a warm-up step of the critic, which does not train the policy"),
    ("critic_value_forward_time_s", "seconds", "time to predict values"),
    ("critic_train_time_s", "seconds", "time to update the critic"),
    ("actor_train_wall_time_s", "seconds", "time to update the policy"),
)
_PAIRS: _Rows = (
    ("{dpo,pair,rm}_loss", "nats", "loss of DPO, of SimPO (preferences without a reference) or of a reward model"),
    ("{dpo,pair,rm}_accuracy", "fraction", "pairs in which the chosen answer has the higher reward or score"),
    ("{dpo,rm}_margin", "reward", "reward or score of the chosen answer minus that of the rejected answer"),
    (
        "{dpo,pair}_reward_margin",
        "reward",
        "implicit reward of the chosen answer minus that of the rejected answer; equal to `dpo_margin` for DPO",
    ),
    ("{dpo,pair}_{chosen,rejected}_reward", "reward", "implicit reward of chosen and of rejected answers"),
    ("rm_{chosen,rejected}_score", "reward", "scores of chosen and of rejected answers"),
    ("dpo_response_len", "tokens", "tokens per answer"),
)
_SPEED: _Rows = (
    (
        "tokens_per_second",
        "tokens/s",
        "tokens generated per second of rollout; without rollout, tokens of the rows per second of training",
    ),
    (
        "step_{rollout,train,e2e}_time_s",
        "seconds",
        "time of rollout, of training, and from the start of rollout to the end of training",
    ),
    ("policy_train_wall_time_s", "seconds", "time to update the policy"),
    ("reward_score_time_s", "seconds", "time to reward the samples"),
    ("step_wall_time_s", "seconds", "time of the whole step"),
    ("weight_update_time_s", "seconds", "with rollout replicas: time to transfer new weights to the replicas"),
    ("rollout_pause_time_s", "seconds", "with rollout replicas: longest pause of a replica for a weight update"),
    (
        "ref_logprob_forward_time_s",
        "seconds",
        "time to score with the reference: once per run with DPO, otherwise in each step",
    ),
)
_EVALUATION: _Rows = (
    ("rewards_{mean,std}", "reward", "reward over the answers to held-out prompts"),
    ("reward_parts/NAME", "reward", "mean of a part of the reward"),
    (
        "accuracy",
        "fraction",
        "answers with a reward above 0; for pairs, pairs in which the chosen answer has the higher reward or score",
    ),
    ("pass@K", "probability", "probability that at least one of K answers to a prompt has a reward above 0"),
    ("response_len_mean", "tokens", "tokens per answer"),
    ("truncated_ratio", "fraction", "answers truncated at `--max-new-tokens` or the context length"),
    ("num_prompts", "", "held-out prompts"),
    ("num_samples", "", "answers to held-out prompts"),
    ("skipped_long", "prompts", "prompts skipped because they exceed `--max-prompt-tokens` or the context"),
    ("reward_errors", "answers", "answers on which the reward function failed"),
    ("loss", "", "SFT: negative log-prob per response token, in nats; pairs: the loss"),
    ("perplexity", "", "SFT: exp(loss)"),
    ("target_tokens", "tokens", "SFT: predicted tokens"),
    ("num_sequences", "rows", "SFT: held-out rows"),
    ("skipped_long_or_empty", "rows", "SFT: held-out rows skipped because they are too long or have no response"),
    (
        "{,reward_}margin",
        "reward",
        "pairs: reward or score of the chosen answer minus that of the rejected answer",
    ),
    ("{chosen,rejected}_reward", "reward", "DPO and SimPO: implicit reward of chosen and of rejected answers"),
    ("{chosen,rejected}_score", "reward", "RM: scores of chosen and of rejected answers"),
    ("eval_time_s", "seconds", "time of the evaluation"),
)
_STAGES: _Rows = (
    ("rollout", "seconds", "time to generate samples, or to wait for them"),
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
        "memory that is available after the step: the minimum of the machine's free memory and the rest of the cgroup limit",
    ),
    ("peak_gpu_gib", "GiB", "with GPUs: peak memory of the trainer's tensors so far, on the GPU with the highest peak"),
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
    """The names that a pattern with braces stands for: ``a_{b,c}`` is ``a_b`` and ``a_c``."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    choices, _, tail = rest.partition("}")
    return [head + choice + end for choice in choices.split(",") for end in expanded(tail)]


def documented() -> Iterator[tuple[str, Metric]]:
    """Yield all metrics with the title of their section."""
    for title, prefix, rows in SECTIONS:
        for names, unit, meaning in rows:
            for name in expanded(names):
                yield title, Metric(prefix + name, unit, meaning)


def matches(documented_name: str, name: str) -> bool:
    """Whether a metric has a documented name. In this name, ``NAME`` stands for any name and ``K`` for any number."""
    pattern = re.escape(documented_name).replace("NAME", "[^/]+").replace("@K", "@[0-9]+")
    return re.fullmatch(pattern, name) is not None
